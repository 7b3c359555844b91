"""DeepSeek-V2, V2-Lite and Coder-V2 (docs/families.md, section V2).

MLA in every layer; a dense MLP in the first layers, then experts: softmax scores, the choice
limited to the best groups (V2) or not (V2-Lite), weights not normalised, shared experts beside.

Letters: R rows, D hidden.
"""

from __future__ import annotations

from torch import Tensor

from deepdraft.arch import DeepseekV2Args, DeepseekV3Args
from deepdraft.models.arithmetic import FamilyWeights
from deepdraft.models.decoder import DecoderModel, GatedMlp, Record, residual_block
from deepdraft.models.experts import RoutedMlp
from deepdraft.models.mla import LatentAttention, Turn, rope_table
from deepdraft.models.sequence import StepRows


class Block:
    """One layer: attention, then a dense MLP or experts, each on a normed residual."""

    def __init__(
        self, args: DeepseekV2Args | DeepseekV3Args, weights: FamilyWeights, layer: int
    ) -> None:
        prefix = f"model.layers.{layer}"
        self.eps, self.num = args.rms_norm_eps, weights.num
        self.norms = (
            weights.vector(f"{prefix}.input_layernorm.weight"),
            weights.vector(f"{prefix}.post_attention_layernorm.weight"),
        )
        self.attention = LatentAttention(args, weights, f"{prefix}.self_attn", layer)
        self.dense = self.experts = None
        if args.is_dense(layer):
            self.dense = GatedMlp(weights, f"{prefix}.mlp")
        else:
            self.experts = RoutedMlp(weights, f"{prefix}.mlp", args.router, args.n_shared_experts)

    def __call__(
        self, x: Tensor, rows: StepRows, turns: tuple[Turn, ...], note: dict[str, Tensor] | None
    ) -> Tensor:
        """x [R, D] -> [R, D]. `turns`: the rotations of this step, the main one first."""
        return residual_block(
            x,
            self.norms,
            self.eps,
            self.num,
            lambda u: self.attend(u, rows, turns, note),
            lambda v: self.mlp(v, rows, note),
            note,
        )

    def attend(
        self, u: Tensor, rows: StepRows, turns: tuple[Turn, ...], note: dict[str, Tensor] | None
    ) -> Tensor:
        """u [R, D], normed -> [R, D]."""
        return self.attention(u, rows, turns[0])

    def store(self, u: Tensor, rows: StepRows, turns: tuple[Turn, ...]) -> None:
        """What `attend` leaves in the state, without the attention. u [R, D], normed."""
        self.attention.write(self.attention.project(u)[2], rows, turns[0])

    def mlp(self, v: Tensor, rows: StepRows, note: dict[str, Tensor] | None) -> Tensor:
        """v [R, D], normed -> [R, D]."""
        if self.dense is not None:
            return self.dense(v)
        assert self.experts is not None
        return self.experts(v, rows.num_rows, note)


class DeepseekV2(DecoderModel):
    """The model."""

    args: DeepseekV2Args

    def build(self) -> None:
        args = self.args
        self.rope = rope_table(args, self.dtype, self.device)
        self.blocks = [Block(args, self.weights, i) for i in range(args.num_hidden_layers)]

    def layers(self, x: Tensor, rows: StepRows, record: Record | None) -> Tensor:
        turns = (self.rope.table(rows.position),)
        for layer, block in enumerate(self.blocks):
            note = None if record is None else record.setdefault(f"L{layer}", {})
            x = block(x, rows, turns, note)
        return x
