"""Experts of the families before V4.1: stacks of gated MLPs, and the layer that routes to them.

Owns: the layout of expert weights, shared experts as experts that are always picked.
Knows nothing of: how a family chooses (`ops.routing`).

Letters: R rows, D hidden, E experts, S shared experts, F expert width, K picks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deepdraft.arch import Router
from deepdraft.errors import ConfigError
from deepdraft.models.arithmetic import FamilyWeights
from deepdraft.ops import moe as moe_ops
from deepdraft.ops.routing import choose, expert_scores, expert_weights

HF_NAMES = ("gate_proj", "up_proj", "down_proj")
SHORT_NAMES = ("w1", "w3", "w2")


class ExpertStack:
    """All experts of a layer in two tensors.

    The shared experts are published as one MLP of S times the width; it is cut into S experts of
    the routed width, whose sum is the same function.
    """

    def __init__(
        self,
        weights: FamilyWeights,
        prefix: str,
        *,
        experts: int,
        shared: int,
        names: tuple[str, str, str],
        limit: float = math.inf,
    ) -> None:
        """`names`: of the gate, up and down map. `limit` clamps them before they are multiplied."""
        self.experts, self.shared, self.limit = experts, shared, limit
        w13 = w2 = None
        quantised = set()
        for e in range(experts):
            first, second, fp8 = weights.expert(f"{prefix}.experts.{e}", names)
            if w13 is None or w2 is None:
                w13 = first.new_empty(experts + shared, *first.shape)
                w2 = second.new_empty(experts + shared, *second.shape)
            w13[e], w2[e] = first, second
            quantised.add(fp8)
        assert w13 is not None and w2 is not None
        first, second, fp8 = weights.expert(f"{prefix}.shared_experts", names)
        quantised.add(fp8)
        width = w2.shape[1]
        gates, ups = (part.split(width, 1) for part in first.chunk(2, 1))
        for number, parts in enumerate(zip(gates, ups, second.split(width, 0), strict=True)):
            w13[experts + number] = torch.cat(parts[:2], 1)
            w2[experts + number] = parts[2]
        if len(quantised) > 1:
            raise ConfigError(
                f"experts of {prefix} are stored in different formats; numerics "
                f"{weights.num.name!r} needs all of them in FP8 or FP4, or none"
            )
        self.w13, self.w2 = w13, w2
        self.act = weights.num.act
        self.fp8 = weights.num.fp8 if quantised.pop() else weights.num.keep
        self._always: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, x: Tensor, picks: Tensor, weights: Tensor, num_rows: int) -> Tensor:
        """x [R, D], picks int64 [R, K], weights [R, K] -> [R, D], shared experts included.

        `num_rows`: rows that count: all, or one that is followed by its copy.
        """
        always, ones = self._shared_picks(x.shape[0])
        y = moe_ops.expert_products(
            self.fp8(x),
            torch.cat([picks, always], 1),
            torch.cat([weights, ones], 1),
            self.w13,
            self.w2,
            limit=self.limit,
            num_rows=num_rows,
            round_up=self.act,
            quantise=self.fp8,
        )
        return self.act(y)

    def _shared_picks(self, rows: int) -> tuple[Tensor, Tensor]:
        if rows not in self._always:
            first, last = self.experts, self.experts + self.shared
            picks = torch.arange(first, last, device=self.w2.device).expand(rows, -1)
            self._always[rows] = picks, self.w2.new_ones(rows, self.shared)
        return self._always[rows]


class RoutedMlp:
    """The MLP of a layer with experts: V2 and V3 (names of transformers)."""

    def __init__(self, weights: FamilyWeights, prefix: str, router: Router, shared: int) -> None:
        self.router = router
        self.gate = weights.linear(f"{prefix}.gate.weight")
        self.bias = (
            weights.vector(f"{prefix}.gate.e_score_correction_bias") if router.biased else None
        )
        self.stack = ExpertStack(
            weights, prefix, experts=router.experts, shared=shared, names=HF_NAMES
        )

    def __call__(self, v: Tensor, num_rows: int, note: dict[str, Tensor] | None = None) -> Tensor:
        """v [R, D], normed -> [R, D]."""
        scores = expert_scores(torch.mm(v, self.gate), self.router)
        picks = choose(scores, self.bias, self.router)
        weights = expert_weights(scores, picks, self.router)
        if note is not None:
            note.update(scores_router=scores, experts=picks, weights=weights)
        return self.stack(v, picks, weights, num_rows)
