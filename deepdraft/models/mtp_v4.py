"""V4's next-token prediction layer (first release), for `mtp.NextTokenDrafter` (docs/families.md).

    X_i = h_proj hnorm(stream) + e_proj enorm(embedding of token i+1),  stream by stream of those
          behind the model's last layer
    X'_i = block(X_i), window-only,  logits of token i+2 = head( norm( mix(X'_i) ) )

The mix is one of the layer's own (`hc_head_*`); embedding and head are the model's. Facts: names
and formulas as vLLM 0.32 loads and runs the published layer. A hidden state is all streams, flat.

Letters: R rows, S streams, D hidden, H = S * D, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepdraft.arch import V4Args
from deepdraft.models.arithmetic import FamilyWeights
from deepdraft.models.sequence import StepRows
from deepdraft.models.v4_layers import Attention, Block, HeadMix, Step
from deepdraft.ops.elementwise import rms_norm
from deepdraft.ops.rope import RopeTable

PREFIX = "mtp.0"


def present(args: V4Args, weights: FamilyWeights) -> bool:
    """Whether the checkpoint holds exactly one such layer."""
    table = getattr(weights.source, "table", {})
    one = args.num_nextn_predict_layers == 1 and not args.dspark_block_size
    return one and f"{PREFIX}.h_proj.weight" in table


class StreamPrediction:
    """The layer, and the norms and maps in front of it."""

    def __init__(
        self,
        args: V4Args,
        weights: FamilyWeights,
        ropes: dict[str, RopeTable],
        *,
        embed: Tensor,
        head: Tensor,
    ) -> None:
        """Its window keys lie behind those of the model's layers."""
        self.eps, self.act, self.streams = args.rms_norm_eps, weights.num.act, args.hc_mult
        self.rope, self.embed, self.head = ropes["window"], embed, head
        attention = Attention(args, weights, f"{PREFIX}.attn", ropes, layer=args.num_hidden_layers)
        self.block = Block(args, weights, PREFIX, attention)
        self.w_embed = weights.map(f"{PREFIX}.e_proj.weight")
        self.w_hidden = weights.map(f"{PREFIX}.h_proj.weight")
        self.enorm, self.hnorm, self.norm = (
            weights.vector(f"{PREFIX}.{name}.weight") for name in ("enorm", "hnorm", "norm")
        )
        self.head_mix = HeadMix(args, weights, f"{PREFIX}.")

    def store(self, rows: StepRows, hidden: Tensor) -> None:
        """See `mtp.PredictionLayer`."""
        self.block.store(self._inputs(rows, hidden), self._step(rows))

    def run(self, rows: StepRows, hidden: Tensor) -> Tensor:
        """See `mtp.PredictionLayer`."""
        return self.block(self._inputs(rows, hidden), self._step(rows), None).flatten(1)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `mtp.PredictionLayer`."""
        h = self.head_mix(hidden.unflatten(1, (self.streams, -1)).contiguous())
        return torch.mm(self.act(rms_norm(h, self.norm, self.eps)), self.head)

    def _step(self, rows: StepRows) -> Step:
        return Step(rows, {"window": self.rope.table(rows.position)})

    def _inputs(self, rows: StepRows, hidden: Tensor) -> Tensor:
        """X [R, S, D]."""
        act = self.act
        tokens = act(rms_norm(self.embed.index_select(0, rows.token_ids), self.enorm, self.eps))
        streams = hidden.reshape(rows.padded * self.streams, -1)
        streams = self.w_hidden(act(rms_norm(streams, self.hnorm, self.eps)))
        return act(streams.view(rows.padded, self.streams, -1) + self.w_embed(tokens).unsqueeze(1))
