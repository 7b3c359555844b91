"""DeepSeek-V4 (Flash, Pro): layers with windows and compressed entries on residual streams
(docs/families.md, section V4).

Owns: the order of layers, the collapse of the streams. Layers are `v4_layers`, the drafters
`dspark_v4` and `mtp_v4`.

Letters: R rows, D hidden, S streams.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from deepdraft.arch import StateKind, V4Args
from deepdraft.models import mtp_v4
from deepdraft.models.decoder import DecoderModel, Record
from deepdraft.models.dspark_v4 import Drafter, present
from deepdraft.models.mtp import NextTokenDrafter
from deepdraft.models.sequence import StepRows
from deepdraft.models.v4_layers import Attention, Block, HeadMix, Step
from deepdraft.ops.rope import RopeTable


class DeepseekV4(DecoderModel):
    """The model."""

    args: V4Args
    names: tuple[str, str, str] = ("embed.weight", "norm.weight", "head.weight")

    def build(self) -> None:
        args, weights = self.args, self.weights
        self.ropes = {
            name: RopeTable(
                rope,
                dim=dim,
                start=dim - args.qk_rope_head_dim,
                width=args.qk_rope_head_dim,
                pairing="adjacent",
                dtype=self.dtype,
                device=self.device,
            )
            for name, rope, dim in (
                ("window", args.rope, args.head_dim),
                ("compress", args.compress_rope, args.head_dim),
                ("index", args.compress_rope, args.index_head_dim),
            )
        }
        self.blocks = []
        for layer, kind in enumerate(args.attention):
            slot = args.attention[:layer].count(kind)
            prefix = f"layers.{layer}"
            attention = Attention(
                args, weights, f"{prefix}.attn", self.ropes, layer=layer, slot=slot, kind=kind
            )
            hashed = layer < args.num_hash_layers
            self.blocks.append(Block(args, weights, prefix, attention, hashed=hashed))
        self.head_mix = HeadMix(args, weights, "")
        self.tapped: list[Tensor] = []
        self.predicts = False
        if self.drafting:
            self.drafter = self._drafter()

    def _drafter(self) -> Drafter | NextTokenDrafter | None:
        args, weights = self.args, self.weights
        more = {"embed": self.embed, "head": self.head}
        if present(args, weights):
            return Drafter(args, weights, self.ropes, **more)
        self.predicts = mtp_v4.present(args, weights)
        if not self.predicts:
            return None
        return NextTokenDrafter(mtp_v4.StreamPrediction(args, weights, self.ropes, **more))

    @property
    def state_kinds(self) -> tuple[StateKind, ...]:
        """With a drafter its windows, too."""
        kinds = self.args.state_kinds
        if self.predicts:
            return tuple(replace(k, layers=k.layers + (k.name == "window")) for k in kinds)
        return kinds if self.drafter is None else (*kinds, self.args.drafter_kind)

    def taps(self, x: Tensor) -> Tensor:
        """All streams behind the last layer [R, S * D], or the mean stream behind each of the
        DSpark drafter's target layers [R, targets * D]."""
        return torch.cat(self.tapped, 1)

    def layers(self, x: Tensor, rows: StepRows, record: Record | None) -> Tensor:
        step = Step(rows, {name: rope.table(rows.position) for name, rope in self.ropes.items()})
        x = x.unsqueeze(1).expand(-1, self.args.hc_mult, -1).contiguous()
        self.tapped = []
        for layer, block in enumerate(self.blocks):
            x = block(x, step, None if record is None else record.setdefault(f"L{layer}", {}))
            if self.drafter is not None and layer in self.args.dspark_target_layer_ids:
                self.tapped.append(self.num.act(x.mean(1)))
        if self.predicts:
            self.tapped.append(x.flatten(1))
        return self.head_mix(x)
