"""Layers of DeepSeek-V4: window attention with compressed entries, residual streams, experts
(docs/families.md, section V4). The model is `deepseek_v4`, its drafter `dspark_v4`.

One latent per token is key and value of all heads. Beside a window, a layer attends to entries that
stand for groups of tokens: CSA layers pool 4 tokens together with the 4 before and choose among the
entries by an index; HCA layers pool 128 and see every entry. The hidden state is S streams; each
sublayer reads and writes them by mixes made from the same streams (mHC). The first layers' experts
are looked up by token id.

Letters: R rows, D hidden, S streams, H heads, C latent channels, G a group's tokens, E entries, W
window, N places of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from deepdraft.arch import V4Args
from deepdraft.arch.v4 import AttentionKind
from deepdraft.errors import CheckpointError
from deepdraft.models.arithmetic import FamilyWeights
from deepdraft.models.experts import SHORT_NAMES, ExpertStack
from deepdraft.models.sequence import StepRows
from deepdraft.ops import index as index_ops
from deepdraft.ops.blocked import blocked_attention, whole_blocks
from deepdraft.ops.elementwise import (
    HyperMix,
    collapse,
    expand,
    inverse_rms,
    rms_norm,
    rotate,
    sigmoid,
)
from deepdraft.ops.rope import RopeTable
from deepdraft.ops.routing import choose, expert_scores, expert_weights

Turn = tuple[Tensor, Tensor, Tensor]
Note = dict[str, Tensor] | None


@dataclass(slots=True)
class Groups:
    """The groups that a step's rows complete, for one ratio."""

    rows: np.ndarray
    """Rows of the step that end a group."""
    members: np.ndarray
    """[groups, slots] positions that are pooled, oldest first; negative ones do not exist."""
    first: Tensor
    """[groups] position of each group's first token, which is the entry's position."""


@dataclass(slots=True)
class Step:
    """What the layers of one step share."""

    rows: StepRows
    turns: dict[str, Turn]
    """Rotations of this step's tokens: `window`, `compress`, `index`."""
    groups: dict[str, Groups] = field(default_factory=dict)
    entry_turns: dict[tuple[str, int], Turn] = field(default_factory=dict)
    window: tuple[Tensor, Tensor] | None = None


def heads_turn(turn: Turn) -> Turn:
    """The same rotation for [R, H, C]."""
    return turn[0].unsqueeze(1), turn[1].unsqueeze(1), turn[2]


class Compressor:
    """Pools groups of tokens into entries: a softmax over the group, channel by channel.

    With `overlap` a token has two values, one for its own group's entry and one for the next.
    """

    def __init__(
        self,
        weights: FamilyWeights,
        prefix: str,
        *,
        name: str,
        slot: int,
        ratio: int,
        overlap: bool,
        width: int,
        eps: float,
        rope: RopeTable,
        rounded: Callable[[Tensor], Tensor],
    ) -> None:
        """`name`: the entries' pool; raw values and gates wait in `name`_raw. `slot`: this layer's
        place in both. `rounded`: entries, rotated, as they are kept."""
        self.act, self.rounded = weights.num.act, rounded
        self.name, self.slot, self.ratio, self.overlap = name, slot, ratio, overlap
        self.width, self.eps, self.rope = width, eps, rope
        self.w_raw = weights.linear(f"{prefix}.wkv.weight", f"{prefix}.wgate.weight")
        self.norm = weights.vector(f"{prefix}.norm.weight")
        ape = weights.vector(f"{prefix}.ape")
        self.ape = torch.cat([ape[:, :width], ape[:, width:]]) if overlap else ape

    def write(self, u: Tensor, step: Step) -> None:
        """u [R, D], normed: store what this step's rows complete."""
        rows = step.rows
        rows.write(f"{self.name}_raw", self.slot, torch.mm(u, self.w_raw))
        groups = self._groups(step)
        if not len(groups.rows):
            return
        key = (self.name, self.ratio)
        if key not in step.entry_turns:
            step.entry_turns[key] = self.rope.table(groups.first)
        entries = rotate(self._pool(groups, rows), *step.entry_turns[key])
        entries = self.rounded(self.act(entries))
        size = rows.pool.entries[self.name]
        at = rows.slots[groups.rows] * size + rows.positions[groups.rows] // self.ratio
        rows.pool.rows[self.name][self.slot].index_copy_(0, rows.tensor(at), entries)

    def _groups(self, step: Step) -> Groups:
        if self.name not in step.groups:
            rows, ratio = step.rows, self.ratio
            ends = np.nonzero((rows.positions + 1) % ratio == 0)[0]
            slots = ratio * (2 if self.overlap else 1)
            members = rows.positions[ends, None] + np.arange(1 - slots, 1)
            first = rows.tensor(rows.positions[ends] - ratio + 1)
            step.groups[self.name] = Groups(ends, members, first)
        return step.groups[self.name]

    def _pool(self, groups: Groups, rows: StepRows) -> Tensor:
        """Normed entries [groups, C], not rotated."""
        name, c, ratio = f"{self.name}_raw", self.width, self.ratio
        ring = rows.pool.entries[name]
        address = rows.slots[groups.rows, None] * ring + groups.members % ring
        raw = rows.pool.rows[name][self.slot].index_select(0, rows.tensor(address.reshape(-1)))
        value, gate = raw.view(*address.shape, -1).chunk(2, -1)
        if self.overlap:  # the group before gives its first values, this one its second
            value, gate = (
                torch.cat([part[:, :ratio, :c], part[:, ratio:, c:]], 1) for part in (value, gate)
            )
        gate = gate + self.ape
        if groups.members.min() < 0:
            absent = rows.tensor(groups.members < 0).unsqueeze(-1)
            gate = gate.masked_fill(absent, -torch.inf)
            value = value.masked_fill(absent, 0.0)
        # Slots last: sums over the last axis do not depend on how many groups there are.
        share = gate.transpose(1, 2).softmax(-1)
        pooled = self.act(share.mul_(value.transpose(1, 2)).sum(-1))
        return self.act(rms_norm(pooled, self.norm, self.eps))


class Indexer:
    """Chooses the entries that a row of a CSA layer attends to."""

    def __init__(
        self, args: V4Args, weights: FamilyWeights, prefix: str, slot: int, rope: RopeTable
    ) -> None:
        self.slot, self.ratio, self.topk = slot, args.csa_ratio, args.index_topk
        self.heads, self.width = args.index_n_heads, args.index_head_dim
        self.weight_scale = self.width**-0.5 * self.heads**-0.5
        self.w_query = weights.map(f"{prefix}.wq_b.weight")
        self.w_heads = weights.map(f"{prefix}.weights_proj.weight")
        self.num = weights.num
        self.compressor = Compressor(
            weights,
            f"{prefix}.compressor",
            name="index",
            slot=slot,
            ratio=args.csa_ratio,
            overlap=True,
            width=args.index_head_dim,
            eps=args.rms_norm_eps,
            rope=rope,
            rounded=weights.num.index_v4,
        )

    def select(self, u: Tensor, latent: Tensor, step: Step, places: int, note: Note) -> Tensor:
        """u [R, D] and query latent [R, q_lora_rank] -> entries int64 [R, places], ascending, -1 in
        places left over."""
        rows = step.rows
        self.compressor.write(u, step)
        reach = (rows.position + 1) // self.ratio
        if max(span.last for span in rows.spans) // self.ratio <= self.topk and note is None:
            return index_ops.select_all(reach, places)
        q = self.w_query(latent).view(-1, self.heads, self.width)
        q = self.num.index_v4(self.num.act(rotate(q, *heads_turn(step.turns["index"]))))
        w = self.w_heads(u).mul_(self.weight_scale)
        picks = []
        for span in rows.spans:
            at = slice(span.start, span.end)
            # Keys channel by channel: see ops.blocked.
            keys = rows.past("index", self.slot, span).t().contiguous().t()
            scores = index_ops.index_scores(q[at], w[at], keys)
            scores = index_ops.mask_unreachable(scores, reach[at])
            best = index_ops.select_top(scores, self.topk)[:, :places]
            picks.append(torch.nn.functional.pad(best, (0, places - best.shape[1]), value=-1))
            if note is not None:
                note.update(index_scores=scores, topk=best)
        return picks[0] if len(picks) == 1 else torch.cat(picks)


class Attention:
    """One layer's attention."""

    def __init__(
        self,
        args: V4Args,
        weights: FamilyWeights,
        prefix: str,
        ropes: dict[str, RopeTable],
        *,
        layer: int,
        slot: int = 0,
        kind: AttentionKind = "window",
    ) -> None:
        """`layer`: the window's place in its pool. `slot`: this layer's place among those of its
        kind."""
        self.args, self.layer, self.slot, self.kind = args, layer, slot, kind
        self.ratio = {"window": 0, "csa": args.csa_ratio, "hca": args.hca_ratio}[kind]
        self.heads, self.width, self.eps = (
            args.num_attention_heads,
            args.head_dim,
            args.rms_norm_eps,
        )
        self.w_in = weights.map(f"{prefix}.wq_a.weight", f"{prefix}.wkv.weight")
        self.q_norm = weights.vector(f"{prefix}.q_norm.weight")
        self.kv_norm = weights.vector(f"{prefix}.kv_norm.weight")
        self.w_query = weights.map(f"{prefix}.wq_b.weight")
        self.wo_a = weights.grouped(f"{prefix}.wo_a.weight", args.o_groups)
        self.wo_b = weights.map(f"{prefix}.wo_b.weight")
        self.num = weights.num
        self.sink = weights.vector(f"{prefix}.attn_sink")
        self.compressor = self.indexer = None
        if self.kind != "window":
            self.compressor = Compressor(
                weights,
                f"{prefix}.compressor",
                name=self.kind,
                slot=slot,
                ratio=self.ratio,
                overlap=self.kind == "csa",
                width=self.width,
                eps=self.eps,
                rope=ropes["compress"],
                rounded=self.kept,
            )
        if self.kind == "csa":
            self.indexer = Indexer(args, weights, f"{prefix}.indexer", slot, ropes["index"])

    def __call__(self, u: Tensor, step: Step, note: Note) -> Tensor:
        """u [R, D], normed -> [R, D]."""
        turn = step.turns["window" if self.kind == "window" else "compress"]
        latent, q, kv = self.latents(u, turn)
        step.rows.write("window", self.layer, kv)
        keys, bias = self._places(u, latent, step, note)
        return self.attend(q, keys, bias, turn)

    def latents(self, u: Tensor, turn: Turn) -> tuple[Tensor, Tensor, Tensor]:
        """u [R, D] -> query latent [R, q_lora_rank], rotated queries [R, H, C], window key [R, C]
        as it is kept."""
        act, rank = self.num.act, self.q_norm.shape[0]
        h = self.w_in(u)
        latent = act(rms_norm(h[:, :rank], self.q_norm, self.eps))
        q = self.w_query(latent).view(-1, self.heads, self.width)
        q = act(rotate(act(q * inverse_rms(q, self.eps)), *heads_turn(turn)))
        return latent, q, self.window_key(h[:, rank:], turn)

    def store(self, u: Tensor, step: Step) -> None:
        """What a call of a window-only layer leaves in the state. u [R, D], normed."""
        kv = self.w_in(u)[:, self.q_norm.shape[0] :]
        step.rows.write("window", self.layer, self.window_key(kv, step.turns["window"]))

    def window_key(self, kv: Tensor, turn: Turn) -> Tensor:
        """Projections [R, C] -> window keys as they are kept."""
        act = self.num.act
        return self.kept(act(rotate(act(rms_norm(kv, self.kv_norm, self.eps)), *turn)))

    def attend(self, q: Tensor, keys: Tensor, bias: Tensor, turn: Turn) -> Tensor:
        """Queries [R, H, C] over keys [R, N, C] with bias [R, H, N] -> [R, D]."""
        act = self.num.act
        o = blocked_attention(q, keys, keys, bias, self.width**-0.5)
        cos, sin, swap = heads_turn(turn)
        return self._output(act(rotate(act(o), cos, -sin, swap)))

    def kept(self, kv: Tensor) -> Tensor:
        """Window keys and entries [R, C], rotated, as they are kept."""
        kv_rounding = self.num.kv
        return kv if kv_rounding is None else kv_rounding(kv, self.args.qk_rope_head_dim)

    def _places(self, u: Tensor, latent: Tensor, step: Step, note: Note) -> tuple[Tensor, Tensor]:
        """What each row attends to: keys [R, N, C] and bias [R, H, N]; the window by position, the
        sink's zero key, then entries by position."""
        rows, window = step.rows, self.args.sliding_window
        address, bias = window_places(step, window)
        keys = rows.pool.rows["window"][self.layer].index_select(0, address)
        keys = keys.view(rows.padded, window + 1, -1)
        reach = max(span.last for span in rows.spans) // self.ratio if self.ratio else 0
        if self.indexer is not None:
            reach = min(reach, self.args.index_topk)
        places = whole_blocks(window + 1 + reach) - window - 1
        picks = self._picks(u, latent, step, places, note)
        if picks is None:  # no entries, only places that fill the last block
            keys = torch.nn.functional.pad(keys, (0, 0, 0, places))
            extra = bias.new_full((rows.padded, 1, places), -torch.inf)
        else:
            base = rows.tensor(rows.slots * rows.pool.entries[self.kind]).unsqueeze(1)
            where = (picks.clamp(min=0) + base).view(-1)
            entries = rows.pool.rows[self.kind][self.slot].index_select(0, where)
            keys = torch.cat([keys, entries.view(rows.padded, places, -1)], 1)
            extra = torch.zeros_like(picks, dtype=bias.dtype)
            extra = extra.masked_fill_(picks < 0, -torch.inf).unsqueeze(1)
        bias = torch.cat([bias, extra], 2).repeat(1, self.heads, 1)
        bias[:, :, window] = self.sink
        return keys, bias

    def _picks(
        self, u: Tensor, latent: Tensor, step: Step, places: int, note: Note
    ) -> Tensor | None:
        """Entries of each row, int64 [R, places], -1 in places left over."""
        if self.compressor is None:
            return None
        self.compressor.write(u, step)
        if self.indexer is not None:
            return self.indexer.select(u, latent, step, places, note)
        return index_ops.select_all((step.rows.position + 1) // self.ratio, places)

    def _output(self, o: Tensor) -> Tensor:
        """Head outputs [R, H, C] -> [R, D] through the grouped map."""
        groups = o.reshape(o.shape[0], self.args.o_groups, -1).transpose(0, 1)
        t = torch.bmm(groups, self.wo_a).transpose(0, 1).reshape(o.shape[0], -1)
        return self.wo_b(self.num.act(t))


def window_places(step: Step, window: int) -> tuple[Tensor, Tensor]:
    """Addresses int64 [R * (W + 1)] of each row's window, oldest first, and of the sink's zero key;
    bias [R, 1, W + 1]."""
    if step.window is None:
        rows = step.rows
        ring = rows.pool.entries["window"]
        back = rows.positions[:, None] - np.arange(window - 1, -1, -1)
        zero = np.full((rows.padded, 1), rows.pool.rows["window"].shape[1] - 1)
        address = np.concatenate([rows.slots[:, None] * ring + back % ring, zero], 1)
        bias = np.concatenate([np.where(back >= 0, 0.0, -np.inf), np.zeros_like(zero)], 1)
        bias_t = rows.tensor(bias[:, None]).to(rows.pool.dtype)
        step.window = rows.tensor(address.reshape(-1)), bias_t
    return step.window


class Experts:
    """The MLP of a layer: experts by score and bias, or by token id in the first layers."""

    def __init__(
        self, args: V4Args, weights: FamilyWeights, prefix: str, *, hashed: bool = False
    ) -> None:
        """`hashed`: by token id."""
        self.router = args.router
        self.gate = weights.linear(f"{prefix}.gate.weight")
        self.table = self.bias = None
        if hashed:
            table = weights.source.tensor(f"{prefix}.gate.tid2eid", torch.int64)
            if int(table.min()) < 0 or int(table.max()) >= args.router.experts:
                raise CheckpointError(
                    f"{prefix}.gate.tid2eid names experts {int(table.min())}..{int(table.max())}; "
                    f"there are 0..{args.router.experts - 1}"
                )
            self.table = table.to(weights.device)
        else:
            self.bias = weights.vector(f"{prefix}.gate.bias")
        self.stack = ExpertStack(
            weights,
            prefix,
            experts=args.router.experts,
            shared=args.n_shared_experts,
            names=SHORT_NAMES,
            limit=args.swiglu_limit,
        )

    def __call__(self, v: Tensor, token_ids: Tensor, num_rows: int, note: Note) -> Tensor:
        """v [R, D], normed -> [R, D]."""
        scores = expert_scores(torch.mm(v, self.gate), self.router)
        if self.table is not None:
            picks = self.table.index_select(0, token_ids)
        else:
            picks = choose(scores, self.bias, self.router)
        weights = expert_weights(scores, picks, self.router)
        if note is not None:
            note.update(scores_router=scores, experts=picks, weights=weights)
        return self.stack(v, picks, weights, num_rows)


class Block:
    """One layer; each sublayer collapses the streams by the mix made from them."""

    def __init__(
        self,
        args: V4Args,
        weights: FamilyWeights,
        prefix: str,
        attention: Attention,
        *,
        hashed: bool = False,
    ) -> None:
        self.eps, self.num = args.rms_norm_eps, weights.num
        self.attn_norm = weights.vector(f"{prefix}.attn_norm.weight")
        self.ffn_norm = weights.vector(f"{prefix}.ffn_norm.weight")
        self.attention = attention
        self.experts = Experts(args, weights, f"{prefix}.ffn", hashed=hashed)
        self.mix_attn, self.mix_ffn = (
            HyperMix(
                *(weights.vector(f"{prefix}.hc_{part}_{n}") for n in ("fn", "base", "scale")),
                streams=args.hc_mult,
                iters=args.hc_sinkhorn_iters,
                eps=args.hc_eps,
            )
            for part in ("attn", "ffn")
        )

    def __call__(self, x: Tensor, step: Step, note: Note) -> Tensor:
        """Streams X [R, S, D] -> [R, S, D]."""
        rows = step.rows
        return self.run(
            x, lambda u: self.attention(u, step, note), rows.token_ids, rows.num_rows, note
        )

    def store(self, x: Tensor, step: Step) -> None:
        """What a call leaves in the window, without attention. Streams X [R, S, D]."""
        act = self.num.act
        u = act(rms_norm(act(collapse(x, self.mix_attn(x, self.eps)[0])), self.attn_norm, self.eps))
        self.attention.store(u, step)

    def run(
        self,
        x: Tensor,
        attention: Callable[[Tensor], Tensor],
        token_ids: Tensor,
        num_rows: int,
        note: Note = None,
    ) -> Tensor:
        """As a call, with the attention that is given: normed [R, D] -> [R, D]."""
        act = self.num.act
        pre, post, comb = self.mix_attn(x, self.eps)
        y = attention(act(rms_norm(act(collapse(x, pre)), self.attn_norm, self.eps)))
        mid = act(expand(y, x, post, comb))
        pre, post, comb = self.mix_ffn(mid, self.eps)
        v = act(rms_norm(act(collapse(mid, pre)), self.ffn_norm, self.eps))
        z = self.experts(v, token_ids, num_rows, note)
        if note is not None:
            note.update(stream_in=x, attn_out=y, ffn_out=z)
        return act(expand(z, mid, post, comb))


class HeadMix:
    """Collapses the streams behind the last layer by a learned mix."""

    def __init__(self, args: V4Args, weights: FamilyWeights, prefix: str) -> None:
        self.fn = weights.exact(f"{prefix}hc_head_fn")
        self.base = weights.vector(f"{prefix}hc_head_base")
        self.scale = weights.vector(f"{prefix}hc_head_scale")
        self.norm_eps, self.eps, self.act = args.rms_norm_eps, args.hc_eps, weights.num.act

    def __call__(self, x: Tensor) -> Tensor:
        """Streams X [R, S, D] -> [R, D]."""
        flat = x.view(x.shape[0], -1)
        mix = torch.mm(flat, self.fn).mul_(inverse_rms(flat, self.norm_eps))
        gates = sigmoid(torch.addcmul(self.base, mix, self.scale))
        return self.act(collapse(x, gates.add_(self.eps).unsqueeze(1)))
