"""DSpark: the drafter layers stored with the model (technical report 2.4.3; architecture notes 6).

Conditioning: taps of confirmed positions become context keys in a ring per drafter layer. A draft
runs the last token and `block - 1` noise tokens through the layers at once, then adds a Markov
correction token by token.

Several sequences are drafted together; a sequence's bits do not depend on the others.

Letters: B drafts of a block, Q sequences, R = Q * B rows, S residual streams, D hidden, V
vocabulary, N = W + 1 + B places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepdraft.arch import V41Args
from deepdraft.errors import StateError
from deepdraft.models.csa import Attention, Rotation
from deepdraft.models.layers import Numerics, Weights
from deepdraft.models.moe import MoE
from deepdraft.models.state import SequenceState
from deepdraft.ops.elementwise import HyperMix, Rotary, collapse, expand, rms_norm, rotate


@dataclass(slots=True)
class Draft:
    """One block of proposals after position n: token b is for position n + 2 + b."""

    token_ids: list[int]
    logits: Tensor
    """[B, V] after the Markov correction."""
    confidence: Tensor
    """[B], raw; its sigmoid is the chance that draft b is accepted if all before it were."""
    base_logits: Tensor
    hidden: Tensor
    """[B, D] collapsed, un-normed."""


@dataclass(slots=True)
class DraftStart:
    """A block before its tokens are chosen; `Drafter.refine` goes through it draft by draft."""

    position: int
    """Where the first draft would stand."""
    base_logits: Tensor
    """[B, V] before the Markov correction."""
    hidden: Tensor
    """[B, D] collapsed, un-normed."""

    def __len__(self) -> int:
        return self.hidden.shape[0]


@dataclass(slots=True)
class Refined:
    """One draft of each of Q blocks."""

    logits: Tensor
    """[Q, V] after the Markov correction."""
    raw: Tensor
    """[Q] confidences before the sigmoid."""


class DraftBlock:
    """One drafter layer: a backbone block that attends to the ring and to its own block."""

    def __init__(self, args: V41Args, weights: Weights, number: int, num: Numerics) -> None:
        prefix = f"mtp.{number}"
        self.args, self.num, self.eps = args, num, args.rms_norm_eps
        self.attn_norm = weights.vector(f"{prefix}.attn_norm.weight")
        self.ffn_norm = weights.vector(f"{prefix}.ffn_norm.weight")
        self.window_row = args.num_hidden_layers + number
        self.attention = Attention(
            args,
            weights,
            f"{prefix}.attn",
            window_row=self.window_row,
            layer=args.num_hidden_layers + number,
            role=None,
            num=num,
        )
        self.sink = self.attention.sink[:, -1].view(-1, 1)
        self.moe = MoE(
            weights,
            f"{prefix}.ffn",
            experts=args.dspark_n_routed_experts,
            k=args.dspark_num_experts_per_tok,
            args=args,
            num=num,
        )
        self.mixes = []
        for part in ("attn", "ffn"):
            self.mixes.append(
                HyperMix(
                    *(weights.vector(f"{prefix}.hc_{part}_{n}") for n in ("fn", "base", "scale")),
                    streams=args.hc_mult,
                    iters=args.hc_sinkhorn_iters,
                    eps=args.hc_eps,
                )
            )

    def __call__(
        self,
        x: Tensor,
        p: Tensor,
        turn: Rotation,
        context: Tensor,
        places: Tensor,
        record: dict[str, Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        """X [R, S, D]; context [Q, W + 1, C] ring keys and the sink's zero key; places [Q, N]: 0
        where there is a key, -inf elsewhere."""
        num, attn = self.num, self.attention
        u = num.act(rms_norm(num.act(collapse(x, p)), self.attn_norm, self.eps))
        pre_a, post_a, comb_a = self.mixes[0](x, self.eps)
        _, query, kv = attn.latents(u)
        h, d, r = attn.heads, attn.width, x.shape[0]
        q, sink = context.shape[0], context.shape[1] - 1
        turned = num.act(turn.heads(torch.cat([query[:, : h * d], kv], 1).view(-1, h + 1, d)))
        keys = torch.cat([context, num.window_kv(turned[:, h]).view(q, r // q, d)], 1)
        bias = places.unsqueeze(1).repeat(1, h, 1)
        bias[:, :, sink : sink + 1] = self.sink
        if q > 1:
            keys, bias = (t.repeat_interleave(r // q, 0) for t in (keys, bias))
        o = num.attention(turned[:, :h], keys.expand(r, -1, -1), bias.expand(r, -1, -1), attn.scale)
        y = attn.output(num.act(turn.back(num.act(o))))
        mid = num.act(expand(y, x, post_a, comb_a))
        pre_f, post_f, comb_f = self.mixes[1](mid, self.eps)
        v = num.act(rms_norm(num.act(collapse(mid, pre_a)), self.ffn_norm, self.eps))
        z = self.moe(v, r, record)
        if record is not None:
            record.update(stream_in=x, premix_in=p, attn_in=u, attn_out=y, ffn_in=v, ffn_out=z)
        return num.act(expand(z, mid, post_f, comb_f)), pre_f


class Drafter:
    """All drafter layers and the heads on top of them."""

    def __init__(
        self,
        args: V41Args,
        weights: Weights,
        num: Numerics,
        rotary: Rotary,
        embed: Tensor,
        head: Tensor,
        first_mix: Tensor,
    ) -> None:
        self.args, self.num, self.rotary = args, num, rotary
        self.embed, self.head, self.first_mix = embed, head, first_mix
        count = args.num_nextn_predict_layers
        last = f"mtp.{count - 1}"
        self.blocks = [DraftBlock(args, weights, m, num) for m in range(count)]
        self.main_proj = weights.linear("mtp.0.main_proj.weight")
        self.main_norm = weights.vector("mtp.0.main_norm.weight")
        self.norm = weights.vector(f"{last}.norm.weight")
        self.markov_embed = weights.vector(f"{last}.markov_head.embed.weight")
        self.markov_head = weights.linear(f"{last}.markov_head.head.weight")
        self.join_head = weights.join("head.weight")
        self.confidence = weights.vector(f"{last}.confidence_head.proj.weight").view(-1)

    def _turn(self, positions: Tensor) -> Rotation:
        return Rotation(self.rotary, positions, self.args.index_head_dim)

    def condition(self, taps: Tensor) -> Tensor:
        """taps [n, taps * D] -> mu [n, D] (notes 6.1)."""
        num = self.num
        mu = num.act(num.fp8(num.act(taps)) @ self.main_proj)
        return num.act(rms_norm(mu, self.main_norm, self.args.rms_norm_eps))

    def feed(self, state: SequenceState, taps: Tensor, first: int) -> None:
        """Ring keys for confirmed positions first.. (notes 6.1); rows beyond a ring are skipped."""
        self.feed_all([(state, taps, first)])

    def feed_all(self, work: Sequence[tuple[SequenceState, Tensor, int]]) -> None:
        """`feed` for several sequences of one pool at once: (state, taps [n, taps * D], first)."""
        work = [w for w in work if w[1].shape[0]]
        if not work:
            return
        num, pool = self.num, work[0][0].pool
        kept, positions, rows = [], [], []
        for state, taps, first in work:
            end = first + taps.shape[0]
            if end > state.num_tokens:
                raise StateError(
                    f"drafter rows up to position {end - 1}, but only {state.num_tokens} tokens "
                    f"are confirmed"
                )
            skip = max(0, taps.shape[0] - pool.ring)  # these would be overwritten at once
            places = np.arange(first + skip, end)
            kept.append(taps[skip:])
            positions.append(places)
            rows.append(state.ring_row(places))
        all_taps = kept[0] if len(kept) == 1 else torch.cat(kept)
        at, to = np.concatenate(positions), np.concatenate(rows)
        if all_taps.shape[0] == 1:
            all_taps, at, to = all_taps.expand(2, -1), at.repeat(2), to.repeat(2)
        device = all_taps.device
        mu = num.fp8(self.condition(all_taps))
        turn = self._turn(torch.from_numpy(at).to(device))
        to_t = torch.from_numpy(to).to(device)
        rank = self.blocks[0].attention.q_norm.shape[0]
        for block in self.blocks:
            attn = block.attention
            kv = num.act(mu @ attn.w_in[:, rank:])
            kv = num.act(rms_norm(kv, attn.kv_norm, attn.eps))
            kv = num.window_kv(num.act(rotate(kv, *turn.rows)))
            pool.window[block.window_row].index_copy_(0, to_t, kv)
        for state, taps, first in work:
            if first > state.drafter_tokens:
                state.drafter_floor = first  # a gap: what lies below cannot be reached
            state.drafter_tokens = first + taps.shape[0]

    @torch.inference_mode()
    def start(
        self,
        work: Sequence[tuple[SequenceState, int]],
        block_size: int | None = None,
        *,
        record: dict[str, dict[str, Tensor]] | None = None,
    ) -> list[DraftStart]:
        """The layers' pass over one block of each sequence, all of one pool.

        work: (state, token id), the token standing right after the confirmed ones. The rings must
        be fed up to the last confirmed position.
        """
        args, num, pool = self.args, self.num, work[0][0].pool
        size = args.dspark_block_size if block_size is None else block_size
        rows = max(size, 2)  # a single row is padded by a second one
        device = self.embed.device
        look_back = np.arange(args.sliding_window - 1, -1, -1)
        # The sink, the block itself, and (a block of one) the row that pads it.
        block_places = np.concatenate([np.zeros(1 + size), np.full(rows - size, -np.inf)])
        addresses, places, positions, ids = [], [], [], []
        for state, token_id in work:
            if state.drafter_tokens != state.num_tokens:
                raise StateError(
                    f"the drafter was fed {state.drafter_tokens} of {state.num_tokens} tokens"
                )
            look = state.num_tokens - 1 - look_back
            addresses.append(np.append(state.ring_row(look), pool.window.shape[1] - 1))
            ring = np.where(look >= max(0, state.drafter_floor), 0.0, -np.inf)
            places.append(np.concatenate([ring, block_places]))
            positions.append(np.arange(state.num_tokens, state.num_tokens + rows))
            ids.extend([token_id] + [args.dspark_noise_token_id] * (rows - 1))
        address_t = torch.from_numpy(np.concatenate(addresses)).to(device)
        places_t = torch.from_numpy(np.stack(places)).to(device=device, dtype=num.dtype)
        turn = self._turn(torch.from_numpy(np.concatenate(positions)).to(device))
        x = self.embed.index_select(0, torch.tensor(ids, device=device)).unsqueeze(1)
        x = num.act(x.expand(-1, args.hc_mult, -1).contiguous())
        p = self.first_mix.expand(len(ids), -1, -1)
        for m, layer in enumerate(self.blocks):
            context = pool.window[layer.window_row].index_select(0, address_t)
            note = record.setdefault(f"M{m}", {}) if record is not None else None
            context = context.view(len(work), -1, context.shape[-1])
            x, p = layer(x, p, turn, context, places_t, note)
        h = num.act(collapse(x, p))
        base = self.join_head(num.act(rms_norm(h, self.norm, args.rms_norm_eps)) @ self.head)
        return [
            DraftStart(
                state.num_tokens + 1,
                base[i * rows : i * rows + size],
                h[i * rows : i * rows + size],
            )
            for i, (state, _) in enumerate(work)
        ]

    @torch.inference_mode()
    def refine(self, starts: Sequence[DraftStart], b: int, previous: Sequence[int]) -> Refined:
        """Draft b of several blocks, given the token before it in each.

        A block's bits do not depend on the others.
        """
        q = len(starts)
        e = self.markov_embed[torch.tensor(previous, device=self.embed.device)]
        hidden = torch.stack([start.hidden[b] for start in starts])
        both = torch.cat([hidden, e], 1)
        bias = torch.mm(e.expand(2, -1) if q == 1 else e, self.markov_head)
        bias = bias[:q]
        logits = torch.stack([start.base_logits[b] for start in starts]).add_(bias)
        return Refined(logits, both.mul_(self.confidence).sum(1))

    @torch.inference_mode()
    def draft(
        self,
        state: SequenceState,
        token_id: int,
        choose: Callable[[Tensor, int], int],
        *,
        block_size: int | None = None,
        record: dict[str, dict[str, Tensor]] | None = None,
    ) -> Draft:
        """Propose the tokens after `token_id`, which stands right after the confirmed ones.

        `choose(logits [V], position)` picks a proposal; position is the one it would stand at. The
        rings must be fed up to the last confirmed position.
        """
        begun = self.start([(state, token_id)], block_size, record=record)[0]
        tokens, logits, confidence = [], [], []
        previous = token_id
        for b in range(begun.hidden.shape[0]):
            refined = self.refine([begun], b, [previous])
            confidence.append(refined.raw[0])
            previous = choose(refined.logits[0], begun.position + b)
            tokens.append(previous)
            logits.append(refined.logits[0])
        return Draft(
            tokens, torch.stack(logits), torch.stack(confidence), begun.base_logits, begun.hidden
        )
