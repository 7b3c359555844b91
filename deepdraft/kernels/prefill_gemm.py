"""Products of many rows with dense weights as they are stored: FP8 in 32 x 32 tiles, bf16.

Contracts and references: `deepdraft.ops.gemm`. Rows come as bf16 values (activations that were
quantised are exact in bf16), weights are unpacked to bf16 on the way to the tensor cores: the
products are exact, sums fp32. A row's bits depend on that row alone: the tile is a constant.

Letters: R rows, N outputs, K inputs, G = K / 32.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepdraft.kernels.gemv import QuantRows, dot_bf16, quantize_groups
from deepdraft.kernels.layout import GROUP, Tiled
from deepdraft.kernels.native.fragments import Streamed
from deepdraft.kernels.prefill_weights import dense_tile, stored
from deepdraft.kernels.rounding import from_e4m3, round_bf16, to_bf16_rne
from deepdraft.kernels.runtime import check, launch, next_power


@dataclass(frozen=True, slots=True)
class GemmPlan:
    """A program's tile: `wide` outputs, `tall` rows, `groups` of 32 columns a step (a power of
    two); `band` row tiles that share weights in the cache. The sides of a tile change no bit."""

    wide: int = 128
    tall: int = 256
    groups: int = 2
    warps: int = 8
    stages: int = 3
    band: int = 8


PLAN = GemmPlan()
MULTIPROCESSORS = 132
"""Of an H200: fewer programs leave some idle."""


def few_rows(plan: GemmPlan, rows: int, outputs: int) -> GemmPlan:
    """The plan for so many rows: tiles no taller than they, and smaller ones where there would be
    fewer programs than multiprocessors. At least 64 outputs: narrower ones have other last bits."""
    plan = replace(plan, tall=min(plan.tall, next_power(rows, 32)))

    def programs() -> int:
        return -(-outputs // plan.wide) * -(-rows // plan.tall)

    if programs() < MULTIPROCESSORS and plan.wide > 64:
        plan = replace(plan, wide=64, warps=min(plan.warps, 4))
    while programs() < MULTIPROCESSORS and plan.tall > 32:
        plan = replace(plan, tall=plan.tall // 2)
    if plan.tall > 64:
        return plan
    # Small tiles wait for each step more than they work in it.
    return replace(plan, groups=2 * plan.groups, stages=plan.stages + 1)


# ---- device helpers ------------------------------------------------------------------------


@triton.jit
def quantized_values(x):
    """fp32 [G, 32] -> the numbers that E4M3 with a scale a group gives, fp32."""
    codes, scales = quantize_groups(x)
    return from_e4m3(codes) * scales[:, None]


@triton.jit
def band_order(number, row_tiles, col_tiles, BAND: tl.constexpr):
    """(row tile, column tile) of a program: bands of BAND row tiles, column by column."""
    in_band = BAND * col_tiles
    first = number // in_band * BAND
    height = min(row_tiles - first, BAND)
    rest = number % in_band
    return first + rest % height, rest // height


# ---- kernels -------------------------------------------------------------------------------


@triton.jit
def gemm_kernel(
    w_ptr, ws_ptr, x_ptr, y_ptr, R, N, STORED_N, G, X_STRIDE, BLOCK_ROWS, BLOCK_COLS,
    KIND: tl.constexpr, TILE: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, P: tl.constexpr,
    MASKED: tl.constexpr, ROUND: tl.constexpr, QUANTIZE: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    row_tiles = (R + BM - 1) // BM
    row_tile, col_tile = band_order(tl.program_id(0), row_tiles, (N + BN - 1) // BN, BAND)
    n0 = col_tile * BN
    n, n_group = n0 + tl.arange(0, BN), col_tile * (BN // 32) + tl.arange(0, BN // 32)
    m = row_tile * BM + tl.arange(0, BM)
    # A block-diagonal map reads the columns of its own block.
    x_ptr += n0 // BLOCK_ROWS * BLOCK_COLS
    x_at = m.to(tl.int64) * X_STRIDE
    acc = tl.zeros((BN, BM), tl.float32)
    for step in range((G + P - 1) // P):
        first = step * P
        w = dense_tile(w_ptr, ws_ptr, n, n_group, first, G, STORED_N, KIND, TILE, BN, P, MASKED)
        k = first * 32 + tl.arange(0, P * 32)
        here = (m < R)[None, :]
        if MASKED:
            here = here & (k < G * 32)[:, None]
        x = tl.load(x_ptr + x_at[None, :] + k[:, None], mask=here, other=0.0)
        acc = dot_bf16(w, x, acc)
    y = tl.trans(acc)
    at = m.to(tl.int64)[:, None] * N + n[None, :]
    mine = (m < R)[:, None] & (n < N)[None, :]
    if QUANTIZE:
        y = quantized_values(tl.reshape(round_bf16(y), (BM * BN // 32, 32)))
        y = tl.reshape(y, (BM, BN))
    if ROUND:
        tl.store(y_ptr + at, to_bf16_rne(y), mask=mine)
    else:
        tl.store(y_ptr + at, y, mask=mine)


@triton.jit
def values_kernel(codes_ptr, scales_ptr, out_ptr, K, R, GB: tl.constexpr):
    row = tl.program_id(0)
    g = tl.program_id(1) * GB + tl.arange(0, GB)
    inside = g < K // 32
    at = row.to(tl.int64) * K + g[:, None] * 32 + tl.arange(0, 32)[None, :]
    codes = tl.load(codes_ptr + at, mask=inside[:, None], other=0)
    scale = tl.load(scales_ptr + g.to(tl.int64) * R + row, mask=inside, other=0.0)
    tl.store(out_ptr + at, to_bf16_rne(from_e4m3(codes) * scale[:, None]), mask=inside[:, None])


# ---- launches ------------------------------------------------------------------------------


def values(x: QuantRows) -> Tensor:
    """FP8 rows [R, K] as bf16 values, exact."""
    device = check(x.codes, x.scales)
    rows, cols = x.codes.shape
    out = torch.empty(rows, cols, dtype=torch.bfloat16, device=device)
    per_program = min(64, next_power(cols // GROUP))
    grid = (rows, triton.cdiv(cols // GROUP, per_program))
    launch(values_kernel, grid, x.codes, x.scales, out, cols, rows, GB=per_program)
    return out


def gemm(
    x: Tensor,
    w: Tiled | Streamed,
    *,
    blocks: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    quantize: bool = False,
    plan: GemmPlan = PLAN,
) -> Tensor:
    """x bfloat16 [R, blocks * K] times w [N, K]: [R, N] in bfloat16 or float32 (contracts:
    `ops.gemm`). Any R. `quantize`: the bf16 values rounded to E4M3 in groups of 32, as bf16."""
    rows, width = x.shape
    if w.kind == "fp4" or x.dtype != torch.bfloat16:
        raise ValueError(f"{w.kind} weights and {x.dtype} rows: these products take bf16 rows")
    if width != blocks * w.cols or (blocks > 1 and w.rows % (blocks * GROUP)):
        raise ValueError(
            f"{tuple(x.shape)=} must be [R, {blocks} x {w.cols}] for {w.rows} x {w.cols} weights"
        )
    if quantize and (dtype != torch.bfloat16 or w.rows % GROUP):
        raise ValueError(f"{w.rows} outputs in {dtype} cannot be quantised in groups of {GROUP}")
    plan = few_rows(plan, rows, w.rows)
    wide = min(plan.wide, next_power(w.rows, GROUP))
    while blocks > 1 and w.rows // blocks % wide:
        wide //= 2
    found = stored(w)
    device = check(x, found.values, found.scales)
    y = torch.empty(rows, w.rows, dtype=dtype, device=device)
    groups = w.cols // GROUP
    grid = triton.cdiv(w.rows, wide) * triton.cdiv(rows, plan.tall)
    launch(
        gemm_kernel, (grid,), found.values, found.scales, x, y,
        rows, w.rows, found.rows, groups, width, w.rows // blocks, w.cols if blocks > 1 else 0,
        KIND=int(found.bf16), TILE=found.tile, BN=wide, BM=plan.tall, P=plan.groups,
        MASKED=groups % plan.groups != 0, ROUND=dtype == torch.bfloat16, QUANTIZE=quantize,
        BAND=plan.band, num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
    return y
