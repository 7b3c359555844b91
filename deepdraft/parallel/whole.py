"""Whole tensors from the parts that the ranks of a group hold.

Owns: gathering a tensor's parts. Knows nothing of: which tensors are wanted, files.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepdraft.parallel.group import Group
from deepdraft.parallel.plan import ShardPlan
from deepdraft.parallel.shards import Part, WholeSource


class GatheredSource:
    """A source that gives whole what `parts` holds of this rank. Every rank asks for the same
    tensors in the same order; the parts are of equal size (all but Engram tables are)."""

    def __init__(
        self, parts: WholeSource, plan: ShardPlan, group: Group, device: torch.device | str
    ) -> None:
        """`device`: where the group exchanges."""
        self._parts, self._plan, self._group, self._device = parts, plan, group, device

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """The whole tensor, dequantised."""
        return self._whole(name, self._parts.tensor(name, dtype))

    def packed(self, name: str) -> Part:
        """The whole tensor's stored bytes, and their scales."""
        part = self._parts.packed(name)
        scales = None if part.scales is None else self._whole(name, part.scales)
        return Part(self._whole(name, part.values), scales, getattr(part, "format", ""))

    def _whole(self, name: str, part: Tensor) -> Tensor:
        cut = self._plan.cut(name)
        if cut is None:
            return part
        raw = part.to(self._device).contiguous().view(torch.uint8)
        whole = torch.cat([p.view(part.dtype) for p in self._group.gather(raw)], cut.axis)
        return whole
