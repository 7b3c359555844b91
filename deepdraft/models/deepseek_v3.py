"""DeepSeek-V3, R1, V3.1, and V3.2 (docs/families.md, sections V3 and V3.2).

V3 differs from V2 in routing: sigmoid scores, a bias per expert that takes part in the choice only,
groups judged by their two best experts, weights normalised and scaled. V3.2 adds an indexer to
every layer: it scores all tokens so far and attention sees the best `index_topk` of them.

Letters: R rows, D hidden, H index heads, C index channels, N tokens, K selected tokens.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from deepdraft.arch import DeepseekV3Args, StateKind
from deepdraft.models import deepseek_v2
from deepdraft.models.arithmetic import FamilyWeights
from deepdraft.models.decoder import DecoderModel, Record
from deepdraft.models.mla import Chosen, Turn, rope_table
from deepdraft.models.mtp import LatentPrediction, NextTokenDrafter
from deepdraft.models.sequence import StepRows
from deepdraft.ops import index as index_ops
from deepdraft.ops.blocked import whole_blocks
from deepdraft.ops.elementwise import rms_norm, rotate
from deepdraft.ops.rope import RopeTable

_KEY_NORM_EPS = 1e-6
"""Of the index keys' layer norm, whatever rms_norm_eps is."""


class Indexer:
    """Chooses the tokens that a row attends to (V3.2)."""

    def __init__(
        self, args: DeepseekV3Args, weights: FamilyWeights, prefix: str, layer: int
    ) -> None:
        self.layer, self.topk = layer, args.index_topk
        self.heads, self.width = args.index_n_heads, args.index_head_dim
        self.weight_scale = self.width**-0.5 * self.heads**-0.5
        self.w_query = weights.map(f"{prefix}.wq_b.weight")
        self.w_raw = weights.map(f"{prefix}.wk.weight", f"{prefix}.weights_proj.weight")
        self.key_norm = weights.vector(f"{prefix}.k_norm.weight")
        self.key_bias = weights.vector(f"{prefix}.k_norm.bias")
        self.num = weights.num

    def select(
        self, u: Tensor, latent: Tensor, rows: StepRows, turn: Turn, note: dict | None
    ) -> Chosen:
        """u [R, D] normed and query latent [R, q_lora_rank] -> the tokens of each row."""
        raw = self.w_raw(u)
        self.write(raw, rows, turn)
        reach = rows.position + 1
        furthest = max(span.last for span in rows.spans)
        if furthest <= self.topk and note is None:
            picks = index_ops.select_all(reach, whole_blocks(furthest))
        else:
            picks = self._best(u, raw, latent, rows, turn, note)
        return self._publish(picks, rows)

    def write(self, raw: Tensor, rows: StepRows, turn: Turn) -> None:
        """Store the index keys of this step's tokens, the first part of `raw`."""
        key = raw[:, : self.width]
        centred = key - key.mean(-1, keepdim=True)
        key = rms_norm(centred, self.key_norm, _KEY_NORM_EPS).add_(self.key_bias)
        rows.write("index", self.layer, self.rounded(rotate(self.num.act(key), *turn)))

    def rounded(self, turned: Tensor) -> Tensor:
        """Rotated queries or keys [..., C] as they are compared."""
        return self.num.index_v32(self.num.act(turned))

    def _best(
        self,
        u: Tensor,
        raw: Tensor,
        latent: Tensor,
        rows: StepRows,
        turn: Turn,
        note: dict | None,
    ) -> Tensor:
        """int64 [R, K], ascending, -1 in empty places."""
        cos, sin, swap = turn
        q = self.w_query(latent).view(-1, self.heads, self.width)
        q = self.rounded(rotate(q, cos.unsqueeze(1), sin.unsqueeze(1), swap))
        w = raw[:, self.width :] * self.weight_scale
        furthest = max(span.last for span in rows.spans)
        places = whole_blocks(min(self.topk, furthest))
        picks = []
        for span in rows.spans:
            at = slice(span.start, span.end)
            # Keys channel by channel: see ops.blocked.
            keys = rows.past("index", self.layer, span).t().contiguous().t()
            scores = index_ops.index_scores(q[at], w[at], keys)
            scores = index_ops.mask_unreachable(scores, rows.position[at] + 1)
            best = index_ops.select_top(scores, self.topk)[:, :places]
            picks.append(torch.nn.functional.pad(best, (0, places - best.shape[1]), value=-1))
            if note is not None:
                note.update(index_scores=scores, topk=best)
        return picks[0] if len(picks) == 1 else torch.cat(picks)

    def _publish(self, picks: Tensor, rows: StepRows) -> Chosen:
        base = rows.tensor(rows.slots * rows.pool.entries["latent"]).unsqueeze(1)
        bias = torch.zeros(picks.shape, dtype=rows.pool.dtype, device=picks.device)
        bias = bias.masked_fill_(picks < 0, -torch.inf).unsqueeze(1)
        return Chosen((picks.clamp(min=0) + base).view(-1), bias)


class Block(deepseek_v2.Block):
    """A layer of V2, which reads the chosen tokens only where there is an indexer."""

    def __init__(self, args: DeepseekV3Args, weights: FamilyWeights, layer: int) -> None:
        super().__init__(args, weights, layer)
        self.indexer = None
        if args.index_topk:
            prefix = f"model.layers.{layer}.self_attn.indexer"
            self.indexer = Indexer(args, weights, prefix, layer)

    def attend(
        self, u: Tensor, rows: StepRows, turns: tuple[Turn, ...], note: dict[str, Tensor] | None
    ) -> Tensor:
        """u [R, D], normed -> [R, D]. `turns`: of the main keys, and of the index."""
        if self.indexer is None:
            return self.attention(u, rows, turns[0])
        latent, q, kv = self.attention.project(u)
        assert latent is not None
        self.attention.write(kv, rows, turns[0])
        chosen = self.indexer.select(u, latent, rows, turns[1], note)
        q = self.attention.latent_queries(q, turns[0])
        return self.attention.output(self.attention.attend_chosen(q, rows, chosen))

    def store(self, u: Tensor, rows: StepRows, turns: tuple[Turn, ...]) -> None:
        """As V2's, with the index keys."""
        super().store(u, rows, turns)
        if self.indexer is not None:
            self.indexer.write(self.indexer.w_raw(u), rows, turns[1])


class DeepseekV3(DecoderModel):
    """The model, V3.2 where the args have an indexer."""

    args: DeepseekV3Args

    def build(self) -> None:
        args = self.args
        self.rope = rope_table(args, self.dtype, self.device)
        self.index_rope = None
        if args.index_topk:
            # The first channels turn here, and pair with the one half a width away.
            self.index_rope = RopeTable(
                args.rope,
                dim=args.index_head_dim,
                start=0,
                width=args.qk_rope_head_dim,
                pairing="half",
                dtype=self.dtype,
                device=self.device,
            )
        self.blocks = [Block(args, self.weights, i) for i in range(args.num_hidden_layers)]
        if self.drafting:
            self.drafter = self._drafter()

    def _drafter(self) -> NextTokenDrafter | None:
        """The next-token prediction layer, where the checkpoint has exactly one."""
        layer = self.args.num_hidden_layers
        prefix = f"model.layers.{layer}"
        table = getattr(self.weights.source, "table", {})
        if f"{prefix}.eh_proj.weight" not in table or self.args.num_nextn_predict_layers != 1:
            return None
        return NextTokenDrafter(
            LatentPrediction(
                Block(self.args, self.weights, layer),
                self.weights,
                prefix,
                embed=self.embed,
                head=self.head,
                eps=self.eps,
                turns=self._turns,
            )
        )

    @property
    def state_kinds(self) -> tuple[StateKind, ...]:
        """With a drafter every kind has rows of its layer, too."""
        kinds, more = self.args.state_kinds, 0 if self.drafter is None else 1
        return tuple(replace(kind, layers=kind.layers + more) for kind in kinds)

    def _turns(self, position: Tensor) -> tuple[Turn, ...]:
        turns: tuple[Turn, ...] = (self.rope.table(position),)
        if self.index_rope is not None:
            turns += (self.index_rope.table(position),)
        return turns

    def layers(self, x: Tensor, rows: StepRows, record: Record | None) -> Tensor:
        turns = self._turns(rows.position)
        for layer, block in enumerate(self.blocks):
            note = None if record is None else record.setdefault(f"L{layer}", {})
            x = block(x, rows, turns, note)
        return x
