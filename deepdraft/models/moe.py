"""The mixture of experts of one layer (architecture notes 4)."""

from __future__ import annotations

import torch
from torch import Tensor

from deepdraft.arch import V41Args
from deepdraft.models.layers import Numerics, Weights
from deepdraft.ops import moe as moe_ops


class MoE:
    """Router, routed experts and the shared expert, which is kept as one expert more."""

    def __init__(
        self, weights: Weights, prefix: str, *, experts: int, k: int, args: V41Args, num: Numerics
    ) -> None:
        self.k, self.num, self.experts = k, num, experts
        self.scale, self.temperature = args.routed_scaling_factor, args.gate_temp
        self.limit = args.swiglu_limit
        self.gate = weights.linear(f"{prefix}.gate.weight")
        self.bias = weights.vector(f"{prefix}.gate.bias")
        self.w13, self.w2 = weights.experts(prefix, experts)
        self.join = weights.join(f"{prefix}.shared_experts.w2.weight")
        self._shared: dict[int, tuple[Tensor, Tensor]] = {}

    def _shared_pick(self, rows: int) -> tuple[Tensor, Tensor]:
        """The last pick of every row: the shared expert, with weight 1. Kept by row count."""
        if rows not in self._shared:
            self._shared[rows] = (
                torch.full((rows, 1), self.experts, device=self.gate.device),
                self.gate.new_ones(rows, 1),
            )
        return self._shared[rows]

    def __call__(self, v: Tensor, num_rows: int, record: dict[str, Tensor] | None) -> Tensor:
        """v [R, D], normed -> [R, D]."""
        num = self.num
        picks, weights = moe_ops.route(
            v, self.gate, self.bias, k=self.k, scale=self.scale, temperature=self.temperature
        )
        if record is not None:
            scores = moe_ops.softplus(v @ self.gate).sqrt_()
            record.update(experts=picks, weights=weights.clone(), scores_router=scores)
        shared, one = self._shared_pick(v.shape[0])
        y = moe_ops.expert_products(
            num.fp8(v),
            torch.cat([picks, shared], 1),
            torch.cat([weights, one], 1),
            self.w13,
            self.w2,
            limit=self.limit,
            num_rows=num_rows,
            round_up=num.act,
            quantise=num.fp8,
        )
        return num.act(self.join(y))
