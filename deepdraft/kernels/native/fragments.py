"""Weights in the order in which threads of `stream.cu` multiply them, and how a matrix is shared.

Owns: that order, its inverse, the plan of each shape. Plain torch, any device.
Knows nothing of: compilers, launches, tensor names.

Letters: N output rows, K columns, G = K / 32 groups, U = N / 32 units. A unit is 32 rows: tile i of
16 rows, half h of 8, row g. Thread 4 g + t of a warp multiplies columns 8 t .. 8 t + 7 of a group.
Row 4 g + 2 i + h of a unit is (i, h, g), so that a thread's four sums are neighbours; for gate and
up maps, which are read together, tile 0 is the gate and tile 1 the up map of 16 channels, channel
2 g + h.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepdraft.kernels.layout import GROUP, _arrivals, _checked_scales, _even
from deepdraft.kernels.native.plans import MEASURED

UNIT = 32
_MULTIPROCESSORS = 132
"""Of an H200: one block of 16 warps each, or two of 8, whose launches overlap."""
_UNIT_GROUPS = 10
"""The most groups of a warp's unit: its rows are in registers."""
_RING_GROUPS = {"fp8": 6, "fp4": 10}
"""Groups in each warp's ring: some 90 KB under way a multiprocessor. Much more only keeps other
reads waiting."""


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """`groups` of 32 columns in a warp's unit, copied `step` at a time; `across` warps by columns
    and `down` by units of rows; `split` parts of the columns among blocks;
    `depth` steps in a warp's ring; `fold`
    1 (experts): scales of rows are folded into their values before the sums; `bulk` 1: weights are
    copied for all warps of a block at once (same bits); `joined` 1: the parts are added within a
    cluster of blocks instead of in memory (same bits)."""

    groups: int
    step: int
    across: int
    down: int
    split: int
    depth: int
    fold: int = 0
    bulk: int = 0
    joined: int = 0

    @property
    def warps(self) -> int:
        """Warps of a block that multiply."""
        return self.across * self.down

    @property
    def blocks(self) -> int:
        """Blocks that a multiprocessor holds."""
        return 2 if self.warps <= 8 else 1


def stream_plans(kind: str, groups: int) -> Iterator[StreamPlan]:
    """Plans of a matrix of so many groups of columns; none where they cannot be shared evenly."""
    splits = range(1, 9 if kind == "fp8" else 2)
    for warps, across, split in itertools.product((16, 8), (16, 8, 4, 2, 1), splits):
        each, left = divmod(groups, across * split)
        if across > warps or left or not 0 < each <= _UNIT_GROUPS:
            continue
        step = next(s for s in (2, 3, 1) if each % s == 0)
        depth = _RING_GROUPS[kind] // step
        if kind == "fp4":
            depth = min(depth, 2 * each // step)
        yield StreamPlan(each, step, across, warps // across, split, depth)


def dense_stream_plan(rows: int, cols: int) -> StreamPlan | None:
    """Plan of a dense FP8 matrix: the one whose blocks have the most even work."""
    if (found := MEASURED.get(("dense", rows, cols))) is not None:
        return StreamPlan(*found) if found else None

    def cost(plan: StreamPlan) -> float:
        tasks = plan.split * -(-rows // UNIT // plan.down)
        # Bytes of the busiest block, and something for each of its tasks.
        blocks = _MULTIPROCESSORS * plan.blocks
        turns = -(-tasks // blocks) * plan.blocks
        return turns * (plan.down * plan.across * plan.groups + 16) + 8 * plan.split

    return min(stream_plans("fp8", cols // GROUP), key=cost, default=None)


def expert_stream_plan(rows: int, cols: int) -> StreamPlan | None:
    """Plan of one expert's MXFP4 matrix: as many warps by columns as can be."""
    if (found := MEASURED.get(("expert", rows, cols))) is not None:
        return StreamPlan(*found) if found else None
    return next(stream_plans("fp4", cols // GROUP), None)


@dataclass(frozen=True, slots=True)
class Streamed:
    """A matrix [rows, cols] (`count` of them for experts) in fragment order.

    values  fp8  uint8 [U, G, 2, 32, 16]: tile, thread, its bytes
            fp4  uint8 [count, U, G, 32, 16]: thread, its bytes (two codes each)
    scales  fp8  uint8 [U, G], E8M0
            fp4  uint8 [count, U, G, 8, 4]: row g, (tile, half)
    """

    kind: str
    rows: int
    cols: int
    plan: StreamPlan
    values: Tensor
    scales: Tensor
    arrivals: Tensor = field(repr=False)
    """int32, zero between launches: how many parts of a unit have arrived (split > 1)."""

    @property
    def nbytes(self) -> int:
        """Bytes that a pass over the matrix reads."""
        return self.values.nbytes + self.scales.nbytes


def stream_fp8(values: Tensor, scales: Tensor, plan: StreamPlan) -> Streamed:
    """E4M3 codes [N, K] with E8M0 bytes [N/32, K/32]."""
    n, k = _even(values.shape)
    # rows (g, tile, half), columns (group, t, 8) -> unit, group, tile, g, t, half, 8
    codes = values.view(torch.uint8).view(n // UNIT, 8, 2, 2, k // GROUP, 4, 8)
    codes = codes.permute(0, 4, 2, 1, 5, 3, 6).reshape(n // UNIT, k // GROUP, 2, 32, 16)
    bytes_ = _checked_scales(scales).contiguous()
    arrivals = _arrivals(n // UNIT, values.device)
    return Streamed("fp8", n, k, plan, codes.contiguous(), bytes_, arrivals)


def stream_mxfp4(values: Tensor, scales: Tensor, plan: StreamPlan) -> Streamed:
    """MXFP4 experts: bytes [E, N, K/2] (low nibble first along K), E8M0 bytes [E, N, K/32]."""
    count, n, half = values.shape
    groups = 2 * half // GROUP
    rows = values.view(torch.uint8).view(count, n // UNIT, 8, 2, 2, groups, 16)
    own = _checked_scales(scales).view(count, n // UNIT, 8, 2, 2, groups)
    return _stream_mxfp4(rows, own.permute(0, 1, 5, 2, 3, 4), n, plan)


def stream_gate_up(
    gate: tuple[Tensor, Tensor], up: tuple[Tensor, Tensor], plan: StreamPlan
) -> Streamed:
    """Gate and up maps [E, F, D], each codes and scales as `stream_mxfp4` takes them."""
    count, n, half = gate[0].shape
    groups = 2 * half // GROUP
    both = [
        torch.stack(
            [part[i].view(torch.uint8).view(count, n // 16, 8, 2, -1) for part in (gate, up)], 3
        )
        for i in (0, 1)
    ]  # [E, U, g, tile, half, ..]
    rows = both[0].view(count, n // 16, 8, 2, 2, groups, 16)
    return _stream_mxfp4(rows, _checked_scales(both[1]).permute(0, 1, 5, 2, 3, 4), 2 * n, plan)


def _stream_mxfp4(rows: Tensor, scales: Tensor, n: int, plan: StreamPlan) -> Streamed:
    """rows uint8 [E, U, g, tile, half, G, 16], scales [E, U, G, g, tile, half]."""
    count, units, _, _, _, groups, _ = rows.shape
    # A byte holds columns 2 j and 2 j + 1; of a thread's 8 columns those are (step, pair) of
    # mma's columns: pair 0 its first two, pair 1 its columns 8 and 9.
    codes = torch.stack((rows & 15, rows >> 4), -1).view(*rows.shape[:6], 4, 2, 2, 2)
    # [E, U, g, tile, half, G, t, step, pair, low] -> one byte of both pairs
    first, second = codes.unbind(8)
    joined = (first & 8) << 4 | (first & 7) << 1 | (second & 7) << 4 | second >> 3
    # Byte (low, 1 - half) of word (tile, step) of thread (g, t).
    joined = joined.flip(4).permute(0, 1, 5, 2, 6, 3, 7, 8, 4)
    values = joined.reshape(count, units, groups, 32, 16).contiguous()
    own = scales.reshape(count, units, groups, 8, 4).contiguous()
    return Streamed("fp4", n, groups * GROUP, plan, values, own, _arrivals(1, rows.device))


def unstream(w: Streamed) -> tuple[Tensor, Tensor]:
    """Codes and scale bytes as they were; of gate and up maps, unit by unit the rows of both:
    [.., 16 channels as (g, tile, half)]. The inverse of the functions above."""
    groups, units = w.cols // GROUP, w.values.shape[-4 if w.kind == "fp4" else 0]
    if w.kind == "fp8":
        codes = w.values.view(units, groups, 2, 8, 4, 2, 8).permute(0, 3, 2, 5, 1, 4, 6)
        return codes.reshape(w.rows, w.cols), w.scales
    count = w.values.shape[0]
    joined = w.values.view(count, units, groups, 8, 4, 2, 2, 2, 2)
    joined = joined.permute(0, 1, 3, 5, 8, 2, 4, 6, 7).flip(4)
    first = (joined >> 4) & 8 | (joined >> 1) & 7
    second = (joined & 1) << 3 | (joined >> 4) & 7
    codes = torch.stack((first, second), 8)
    packed = codes[..., 0] | codes[..., 1] << 4
    own = w.scales.view(count, units, groups, 8, 2, 2).permute(0, 1, 3, 4, 5, 2)
    return packed.reshape(count, w.rows, w.cols // 2), own.reshape(count, w.rows, groups)
