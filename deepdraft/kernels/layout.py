"""Weights as the kernels read them: tiles that a program reads front to back.

Owns: the re-tiling at load, its inverse, and the plan (tile, step, split) of each shape. A plan
is a function of the matrix alone, never of the row count. Plain torch, any device.
Knows nothing of: triton, tensor names.

Letters: N output rows, K input columns, G = K / 32 groups, B rows of a tile, P groups of a step.
One program of a matrix-vector kernel works on one tile of B output rows and on every `split`-th
part of the steps.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepdraft.kernels.plans import MEASURED

GROUP = 32
_PROGRAMS = 512
"""Programs to aim at, about four for each of an H200's 132 multiprocessors."""
_DISTINCT = 22
"""Distinct experts of a step, for the plans of their matrices (kernels.md 1.1)."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How one matrix is cut. `tile` output rows, `step` groups a step (a power of two; the last
    step may be short), `split` parts of K; `ahead`: bytes that a program has fetched while its
    predecessor still runs, a multiple of 16; `registers`: the most of a thread, 0: any."""

    tile: int
    step: int
    split: int
    warps: int
    stages: int = 4
    ahead: int = 32768
    registers: int = 0


def dense_plan(rows: int, cols: int, blocks: int = 1) -> Plan:
    """Plan of a matrix [rows, cols], both multiples of 32. `blocks`: of a block-diagonal map, whose
    tiles must not cross a block."""
    if measured := _measured("dense", rows, cols):
        return measured
    tile = 64 if rows // blocks % 64 == 0 and rows >= 16384 else 32
    split = _split(-(-_PROGRAMS // (rows // tile)), -(-cols // GROUP // 4), least=2)
    return Plan(tile, 4, split, warps=4, stages=3)


def expert_plan(rows: int, cols: int) -> Plan:
    """Plan of a routed expert's matrix. Two rows share a byte, so a tile is `tile` bytes high and
    covers 2 * tile rows."""
    if measured := _measured("expert", rows, cols):
        return measured
    tile = next(b for b in (64, 32, 16) if rows // 2 % b == 0)
    programs = _DISTINCT * rows // (2 * tile)
    split = _split(-(-3 * _PROGRAMS // programs), -(-cols // GROUP // 4), least=8)
    return Plan(tile, 4, split, warps=4, stages=3)


def _measured(kind: str, rows: int, cols: int) -> Plan | None:
    found = MEASURED.get((kind, rows, cols))
    if found is None:
        return None
    tile, step, split, warps, stages, registers = found
    return Plan(tile, step, split, warps, stages, registers=registers)


def _split(wanted: int, steps: int, least: int) -> int:
    """About `wanted` parts of at least `least` steps, none of them empty."""
    parts = max(1, min(wanted, steps // least))
    return -(-steps // -(-steps // parts))


@dataclass(frozen=True, slots=True)
class Tiled:
    """A matrix [rows, cols] (`count` of them for experts) re-tiled.

    values  fp8   uint8 [N/B, G, B, 32]
            bf16  bfloat16 [N/B, G, B, 32], the last tile filled up with zero rows
            fp4   uint8 [count, N/2B, G, B, 32], a byte holds rows b (low) and b + B (high)
    scales  fp8   uint8 [N/B, G, B/32], E8M0
            fp4   uint8 [count, N/2B, G, 2, B], E8M0
            bf16  none
    """

    kind: str
    rows: int
    cols: int
    plan: Plan
    values: Tensor
    scales: Tensor | None
    arrivals: Tensor = field(repr=False)
    """int32, zero between launches: how many parts of a tile have arrived (split > 1)."""

    @property
    def nbytes(self) -> int:
        """Bytes that a pass over the matrix reads."""
        return self.values.nbytes + (0 if self.scales is None else self.scales.nbytes)


_MAX_ROW_TILES = 16
_MAX_PLACES = 64
"""Distinct experts of a row tile."""


def _arrivals(tiles: int, device: torch.device) -> Tensor:
    return torch.zeros(tiles * _MAX_ROW_TILES, dtype=torch.int32, device=device)


def _checked_scales(scales: Tensor) -> Tensor:
    scales = scales.view(torch.uint8)
    if bool((scales == 255).any()):
        raise ValueError("a weight has the scale byte 255 (NaN); its checkpoint is damaged")
    return scales


def tile_fp8(values: Tensor, scales: Tensor, plan: Plan | None = None, *, blocks: int = 1) -> Tiled:
    """E4M3 codes [N, K] with E8M0 bytes [N/32, K/32], one per 32 x 32 tile."""
    n, k = _even(values.shape)
    plan = plan or dense_plan(n, k, blocks)
    b, groups = plan.tile, k // GROUP
    codes = values.view(torch.uint8).view(n // b, b, groups, GROUP).transpose(1, 2).contiguous()
    bytes_ = _checked_scales(scales).view(n // b, b // GROUP, groups).transpose(1, 2).contiguous()
    return Tiled("fp8", n, k, plan, codes, bytes_, _arrivals(n // b, values.device))


def tile_bf16(weight: Tensor, plan: Plan | None = None) -> Tiled:
    """bfloat16 [N, K], any N; K a multiple of 32."""
    n, k = weight.shape
    _even((GROUP, k))
    full = -(-n // GROUP) * GROUP
    plan = plan or dense_plan(full, k)
    b = plan.tile
    padded = torch.nn.functional.pad(weight.to(torch.bfloat16), (0, 0, 0, full - n))
    tiles = padded.view(full // b, b, k // GROUP, GROUP).transpose(1, 2).contiguous()
    return Tiled("bf16", n, k, plan, tiles, None, _arrivals(full // b, weight.device))


def tile_mxfp4(values: Tensor, scales: Tensor, plan: Plan | None = None) -> Tiled:
    """MXFP4 experts: bytes [E, N, K/2] (low nibble first along K), E8M0 bytes [E, N, K/32].

    For a gate and an up map that share their input, pass them as `interleave_pair` gives them: the
    two nibbles of a byte are then the same channel of both.
    """
    count, n, half = values.shape
    k = half * 2
    _even((n, k))
    plan = plan or expert_plan(n, k)
    b, groups = plan.tile, k // GROUP
    packed = values.view(torch.uint8)
    codes = torch.stack((packed & 15, packed >> 4), -1).view(count, n // (2 * b), 2, b, groups, 32)
    joined = codes[:, :, 0] | (codes[:, :, 1] << 4)
    tiles = joined.transpose(2, 3).contiguous()
    bytes_ = _checked_scales(scales).view(count, n // (2 * b), 2, b, groups)
    bytes_ = bytes_.permute(0, 1, 4, 2, 3).contiguous()
    counters = n // (2 * b) * _MAX_PLACES if plan.split > 1 else 1
    return Tiled("fp4", n, k, plan, tiles, bytes_, _arrivals(counters, values.device))


def interleave_pair(gate: Tensor, up: Tensor, tile: int) -> Tensor:
    """[E, F, x] twice -> [E, 2F, x] in which `tile` rows of the gate precede `tile` rows of the
    up map, over and over: with tiles of that height both nibbles of a byte are one channel."""
    e, f, width = gate.shape
    both = torch.stack(
        (gate.view(e, f // tile, tile, width), up.view(e, f // tile, tile, width)), 2
    )
    return both.reshape(e, 2 * f, width)


def untile(w: Tiled) -> tuple[Tensor, Tensor | None]:
    """Values and scale bytes as they were before tiling; the inverse of the three functions."""
    groups = w.cols // GROUP
    if w.kind == "bf16":
        return w.values.transpose(1, 2).reshape(-1, w.cols)[: w.rows], None
    assert w.scales is not None
    if w.kind == "fp8":
        scales = w.scales.transpose(1, 2).reshape(w.rows // GROUP, groups)
        return w.values.transpose(1, 2).reshape(w.rows, w.cols), scales
    count = w.values.shape[0]
    joined = w.values.transpose(2, 3)  # [E, tiles, B, G, 32]
    codes = torch.stack((joined & 15, joined >> 4), 2).reshape(count, w.rows, w.cols)
    packed = codes[..., ::2] | (codes[..., 1::2] << 4)
    return packed, w.scales.permute(0, 1, 3, 4, 2).reshape(count, w.rows, groups)


def _even(shape: torch.Size | tuple[int, int]) -> tuple[int, int]:
    n, k = shape
    if n % GROUP or k % GROUP:
        raise ValueError(f"a quantised matrix needs multiples of {GROUP} rows and columns: {n, k}")
    return n, k
