"""What a model is given to run as one rank of several: its parts of the weights, and the joins.

Owns: slicing of tensors by the plan, the functions that make partial results whole.
Knows nothing of: layers, how ranks exchange (`group`), which tensors are cut (`plan`).

A model asks for the join of the map it just applied, by the map's published name. On one rank, and
for maps that are whole, it is the identity: the same code, the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from deepdraft.errors import EngineError
from deepdraft.parallel.group import Alone, Group, rank_order_sum
from deepdraft.parallel.plan import ShardPlan

Join = Callable[[Tensor], Tensor]


def _whole(x: Tensor) -> Tensor:
    return x


class Shards:
    """One rank's share of a model. `plan` None: the whole model."""

    def __init__(self, plan: ShardPlan | None = None, group: Group | None = None) -> None:
        self.group = group or Alone()
        self.plan = plan
        if (plan.size if plan else 1) != self.group.size:
            raise ValueError(f"a plan for {plan and plan.size} ranks in {self.group.size}")

    def local(self, args: Any) -> Any:
        """The model's sizes as this rank's layers see them."""
        return args if self.plan is None else self.plan.local(args)

    def join(self, name: str) -> Join:
        """Makes whole what the map of this published name gave: float [..., N].

        `sum`: partial sums are added in rank order (`group`). `gather`: parts of N are put side by
        side. Raises EngineError where a rank's part is not finite (CPU tensors; on a GPU that
        would wait for the device, there the step's error word tells).
        """
        kind = "none" if self.plan is None else self.plan.join(name)
        if kind == "none" or self.group.size == 1:
            return _whole
        group = self.group

        def total(x: Tensor) -> Tensor:
            parts = group.gather(x)
            whole = rank_order_sum(parts) if kind == "sum" else torch.cat(parts, -1)
            if whole.device.type == "cpu" and not torch.isfinite(whole).all():
                raise EngineError(_which(parts, name))
            return whole

        return total

    def own_tables(self, name: str, count: int) -> tuple[slice, int]:
        """Of an Engram table's `count` hash tables: those of this rank, and the stored row at which
        its part begins."""
        if self.plan is None or self.plan.size == 1:
            return slice(0, count), 0
        first, last = self.plan.own_tables(self.group.rank)
        return slice(first, last), self.plan.bounds(name, 0, self.group.rank)[0]

    def source(self, whole: WholeSource) -> WholeSource:
        """A source that gives this rank's parts of what `whole` holds."""
        if self.plan is None or self.plan.size == 1:
            return whole
        return SlicedSource(whole, self.plan, self.group.rank)


def _which(parts: list[Tensor], name: str) -> str:
    bad = [rank for rank, part in enumerate(parts) if not bool(torch.isfinite(part).all())]
    if not bad:
        return f"the sum of finite parts of {name} is not finite: its values overflow"
    several = "s" if len(bad) > 1 else ""
    return (
        f"rank{several} {', '.join(map(str, bad))} produced NaN or infinity in {name}; "
        "the device or its memory may be faulty"
    )


WHOLE = Shards()
"""A model on one rank."""


class WholeSource(Protocol):
    """Where whole weights come from (`deepdraft.models.layers.WeightSource`)."""

    def tensor(self, name: str, dtype: torch.dtype = ...) -> Tensor: ...
    def packed(self, name: str) -> Any: ...


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's part of a stored tensor."""

    values: Tensor
    scales: Tensor | None
    format: str


class SlicedSource:
    """One rank's parts of a source of whole tensors, as views where possible."""

    def __init__(self, whole: WholeSource, plan: ShardPlan, rank: int) -> None:
        self._whole, self._plan, self._rank = whole, plan, rank

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """The rank's part of the dequantised tensor."""
        return cut_tensor(self._plan, name, self._whole.tensor(name, dtype), self._rank)

    def packed(self, name: str) -> Part:
        """The rank's part of the stored bytes and of their scales."""
        stored = self._whole.packed(name)
        scales = stored.scales
        if scales is not None:
            scales = cut_tensor(self._plan, name, scales, self._rank)
        values = cut_tensor(self._plan, name, stored.values, self._rank)
        return Part(values, scales, getattr(stored, "format", ""))


def cut_tensor(plan: ShardPlan, name: str, x: Tensor, rank: int) -> Tensor:
    """The rank's part of a tensor of that published name (values, stored bytes or scales); a view.

    The cut axis counts units of any fixed number of places, so values and scales are cut alike."""
    cut = plan.cut(name)
    if cut is None:
        return x
    start, stop = plan.bounds(name, x.shape[cut.axis], rank)
    return x.narrow(cut.axis, start, stop - start)
