"""Small-row matrix-vector products: FP8, FP8 x bf16 and bf16 weights; quantised activations.

Contracts and references: `deepdraft.ops.gemm`. One program works on a tile of output rows, one part
of K and 8 batch rows; the groups of a step are spread over its warps, each with sums of its own,
added in a fixed order at the end. Parts are added in order by the program that arrives last, so no
sum depends on timing. What is chosen (tile, step, split) is a function of the weight alone.

Letters: R batch rows, N output rows, K columns, G = K / 32.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepdraft.kernels.layout import GROUP, Tiled
from deepdraft.kernels.native import stream
from deepdraft.kernels.native.fragments import Streamed
from deepdraft.kernels.rounding import (
    ACT_FLOOR,
    E4M3_CARRY,
    from_e8m0,
    inverse_of,
    scale_bits,
    to_bf16_rne,
    to_e4m3_rne,
)
from deepdraft.kernels.runtime import (
    INTERPRET,
    ROW_TILE,
    check,
    launch,
    next_power,
    prefetch_l2,
    wait_for_inputs,
)


@dataclass(frozen=True, slots=True)
class QuantRows:
    """Activations in FP8: `codes` uint8 [R, K], `scales` float32 [K/32, R]; 8 divides R."""

    codes: Tensor
    scales: Tensor


# ---- device helpers ------------------------------------------------------------------------


@triton.jit
def dot_fp8(w, x, acc):
    """E4M3 codes (uint8) [.., M, 32] x [.., 32, T] + acc, exact products, fp32 sum."""
    return tl.dot(w.to(tl.float8e4nv, bitcast=True), x.to(tl.float8e4nv, bitcast=True), acc)


@triton.jit
def dot_bf16(a, b, acc):
    """bf16 [.., M, K] x [.., K, N] + acc, fp32 sum (the interpreter's bf16 dot is wrong)."""
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def row_factors(ptr, inside, TILE: tl.constexpr, P: tl.constexpr):
    """E8M0 bytes [P, TILE / 32], one per group and 32 rows, as fp32 [P, TILE or 1]."""
    H: tl.constexpr = TILE // 32
    at = tl.arange(0, P)[:, None] * H + tl.arange(0, H)[None, :]
    factor = from_e8m0(tl.load(ptr + at, mask=inside[:, None], other=0))
    if H == 1:
        return factor
    else:
        return tl.reshape(tl.broadcast_to(factor[:, :, None], (P, H, 32)), (P, TILE))


@triton.jit
def quantize_groups(x):
    """fp32 [G, 32] -> E4M3 codes uint8 [G, 32] and scales fp32 [G] (power of two, amax >= 1e-4)."""
    bits = scale_bits(tl.max(tl.abs(x), axis=1), ACT_FLOOR, E4M3_CARRY)
    return to_e4m3_rne(x * inverse_of(bits)[:, None]), bits.to(tl.float32, bitcast=True)


@triton.jit
def combine_parts(part_ptr, arrive_ptr, acc, at, stride, SPLIT: tl.constexpr):
    """Store one part at part_ptr + `at`; returns whether this program arrived last, and then the
    sum of all parts in order. `stride`: from one part to the next."""
    part = tl.program_id(1)
    tl.store(part_ptr + part * stride + at, acc)
    tl.debug_barrier()
    before = tl.atomic_add(arrive_ptr, 1, sem="acq_rel")
    last = before == SPLIT - 1
    if last:
        acc = tl.load(part_ptr + at, cache_modifier=".cg")
        for s in range(1, SPLIT):
            acc += tl.load(part_ptr + s * stride + at, cache_modifier=".cg")
        tl.store(arrive_ptr, 0)
    return last, acc


# ---- kernels -------------------------------------------------------------------------------


@triton.jit
def quantize_kernel(x_ptr, codes_ptr, scales_ptr, K, R_PAD, GB: tl.constexpr, PDL: tl.constexpr):
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    g = tl.program_id(1) * GB + tl.arange(0, GB)
    at = g[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = g < K // 32
    x = tl.load(x_ptr + row.to(tl.int64) * K + at, mask=inside[:, None], other=0.0).to(tl.float32)
    codes, scales = quantize_groups(x)
    tl.store(codes_ptr + row.to(tl.int64) * K + at, codes, mask=inside[:, None])
    tl.store(scales_ptr + g * R_PAD + row, scales, mask=inside)


@triton.jit
def scaled_product(
    w, x, factor, x_scale, acc, KIND: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """acc fp32 [P, TILE, T] plus one step."""
    zero = tl.zeros((P, TILE, T), tl.float32)
    if KIND == "bf16":
        acc = dot_bf16(w, x, acc)
    elif KIND == "fp8":
        acc += dot_fp8(w, x, zero) * (factor[:, :, None] * x_scale[:, None, :])
    else:
        wide = w.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        acc += dot_bf16(to_bf16_rne(wide), x, zero) * factor[:, :, None]
    return acc


@triton.jit
def tile_products(
    w_ptr, ws_ptr, x_ptr, xs_ptr, rows, R_PAD, X_STRIDE, G,
    KIND: tl.constexpr, TILE: tl.constexpr, P: tl.constexpr, MASKED: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Products of the first G groups behind the pointers with 8 rows: fp32 [TILE, T]."""
    p, n, j = tl.arange(0, P), tl.arange(0, TILE), tl.arange(0, 32)
    w_at = p[:, None, None] * TILE * 32 + n[None, :, None] * 32 + j[None, None, :]
    x_at = rows[None, None, :] * X_STRIDE + p[:, None, None] * 32 + j[None, :, None]
    xs_at = p[:, None] * R_PAD + rows[None, :]
    acc = tl.zeros((P, TILE, T), tl.float32)
    factor, x_scale = tl.zeros((P, 1), tl.float32), tl.zeros((P, T), tl.float32)
    # Scales are read one step ahead.
    if KIND != "bf16":
        factor = row_factors(ws_ptr, p < G, TILE, P)
    if KIND == "fp8":
        x_scale = tl.load(xs_ptr + xs_at, mask=(p < G)[:, None], other=0.0)
    for step in range((G + P - 1) // P):
        done = step * P
        if MASKED:
            here = (p < G - done)[:, None, None]
            w = tl.load(w_ptr + w_at + done * TILE * 32, mask=here, other=0)
            x = tl.load(x_ptr + x_at + done * 32, mask=here, other=0)
        else:
            w = tl.load(w_ptr + w_at + done * TILE * 32)
            x = tl.load(x_ptr + x_at + done * 32)
        factor_now, x_scale_now = factor, x_scale
        later = p < G - done - P
        if KIND != "bf16":
            factor = row_factors(ws_ptr + (done + P) * (TILE // 32), later, TILE, P)
        if KIND == "fp8":
            at = xs_ptr + xs_at + (done + P) * R_PAD
            x_scale = tl.load(at, mask=later[:, None], other=0.0)
        acc = scaled_product(w, x, factor_now, x_scale_now, acc, KIND, P, TILE, T)
    return tl.sum(acc, axis=0)


@triton.jit
def tile_sum(
    w_ptr, ws_ptr, x_ptr, xs_ptr, part_ptr, arrive_ptr,
    G, R_PAD, X_STRIDE, BLOCK_ROWS, BLOCK_COLS, AHEAD,
    KIND: tl.constexpr, TILE: tl.constexpr, P: tl.constexpr, SPLIT: tl.constexpr,
    MASKED: tl.constexpr, T: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """This program's tile: whether it has all parts of its columns, and fp32 [TILE, T]."""
    tile, part, row_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    steps = (G + P - 1) // P
    per_part = (steps + SPLIT - 1) // SPLIT
    first = part * per_part * P
    groups = min(G, first + per_part * P) - first
    start = tile.to(tl.int64) * G + first
    w_ptr += start * TILE * 32
    if PDL:
        prefetch_l2(w_ptr, min(groups * (TILE * 64 if KIND == "bf16" else TILE * 32), AHEAD))
    wait_for_inputs(PDL)
    rows = row_tile * T + tl.arange(0, T)
    # A block-diagonal map reads the columns of its own block.
    x_ptr += (tile * TILE // BLOCK_ROWS) * BLOCK_COLS + first * 32
    total = tile_products(
        w_ptr, ws_ptr + start * (TILE // 32), x_ptr, xs_ptr + first * R_PAD, rows, R_PAD, X_STRIDE,
        groups, KIND, TILE, P, MASKED, T,
    )  # fmt: skip
    if SPLIT == 1:
        return True, total
    else:
        row = tile * TILE + tl.arange(0, TILE)
        where = rows[None, :] * (tl.num_programs(0) * TILE) + row[:, None]
        stride = R_PAD * (tl.num_programs(0) * TILE)
        counter = arrive_ptr + row_tile * tl.num_programs(0) + tile
        return combine_parts(part_ptr, counter, total, where, stride, SPLIT)


@triton.jit
def gemv_kernel(
    w_ptr, ws_ptr, x_ptr, xs_ptr, part_ptr, arrive_ptr, y_ptr,
    N, G, R_PAD, X_STRIDE, BLOCK_ROWS, BLOCK_COLS, AHEAD,
    KIND: tl.constexpr, TILE: tl.constexpr, P: tl.constexpr, SPLIT: tl.constexpr,
    MASKED: tl.constexpr, ROUND: tl.constexpr, T: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    last, total = tile_sum(
        w_ptr, ws_ptr, x_ptr, xs_ptr, part_ptr, arrive_ptr, G, R_PAD, X_STRIDE, BLOCK_ROWS,
        BLOCK_COLS, AHEAD, KIND, TILE, P, SPLIT, MASKED, T, PDL,
    )  # fmt: skip
    t = tl.arange(0, T)
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    y_at = (tl.program_id(2) * T + t)[None, :] * N + row[:, None]
    mine = (row < N)[:, None] & (t >= 0)[None, :]
    if SPLIT > 1:
        mine = mine & last
    if ROUND:
        tl.store(y_ptr + y_at, to_bf16_rne(total), mask=mine)
    else:
        tl.store(y_ptr + y_at, total, mask=mine)


# ---- launches ------------------------------------------------------------------------------


def quantize_rows(x: Tensor) -> QuantRows:
    """x bfloat16 or float32 [R, K] -> FP8 in groups of 32 (contract: ops.gemm.quantize_rows)."""
    device = check(x)
    rows, cols = x.shape
    if cols % GROUP:
        raise ValueError(f"rows of {cols} values cannot be cut into groups of {GROUP}")
    if rows % ROW_TILE:
        raise ValueError(
            f"{rows} rows must be padded to a multiple of {ROW_TILE} (runtime.pad_rows)"
        )
    codes = torch.empty(rows, cols, dtype=torch.uint8, device=device)
    scales = torch.empty(cols // GROUP, rows, dtype=torch.float32, device=device)
    per_program = min(32, next_power(cols // GROUP))
    grid = (rows, triton.cdiv(cols // GROUP, per_program))
    launch(quantize_kernel, grid, x, codes, scales, cols, rows, GB=per_program)
    return QuantRows(codes, scales)


def _parts(x: QuantRows | Tensor) -> tuple[Tensor, Tensor | None]:
    return (x.codes, x.scales) if isinstance(x, QuantRows) else (x, None)


def gemv_quantized(x: QuantRows | Tensor, w: Tiled | Streamed, *, blocks: int = 1) -> QuantRows:
    """As `gemv`, rounded to bfloat16 and then quantised as `quantize_rows` does."""
    if isinstance(w, Streamed):
        codes, scales = stream.gemv(*_parts(x), w, blocks=blocks, dtype=torch.uint8)
        assert scales is not None
        return QuantRows(codes, scales)
    return quantize_rows(gemv(x, w, blocks=blocks))


def gemv(
    x: QuantRows | Tensor,
    w: Tiled | Streamed,
    *,
    blocks: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """x [R, blocks * K] times w [N, K]: [R, N] in bfloat16 or float32 (contracts: ops.gemm).

    QuantRows times fp8, or bfloat16 rows times fp8 or bf16. 8 divides R.
    """
    if isinstance(w, Streamed):
        return stream.gemv(*_parts(x), w, blocks=blocks, dtype=dtype)[0]
    values, x_scales = _parts(x)
    pad, width = values.shape
    if width != blocks * w.cols or pad % ROW_TILE or w.rows % blocks:
        raise ValueError(
            f"{tuple(values.shape)=} must be [multiple of {ROW_TILE}, {blocks} x {w.cols}] for a "
            f"matrix of {w.rows} x {w.cols}"
        )
    if (w.rows // blocks) % w.plan.tile and blocks > 1:
        raise ValueError(f"a block of {w.rows // blocks} rows is no multiple of {w.plan.tile=}")
    kind = w.kind if w.kind == "bf16" or x_scales is not None else "fp8xbf16"
    if (kind == "bf16" and x_scales is not None) or w.kind == "fp4":
        raise ValueError(f"{w.kind} weights do not go with {type(x).__name__} here")
    device = check(values, w.values)
    if w.plan.split > 1 and w.arrivals.numel() < w.values.shape[0] * pad // ROW_TILE:
        raise ValueError(f"{pad} rows are more than this matrix has arrival counters for")
    plan, tiles = w.plan, w.values.shape[0]
    y = torch.empty(pad, w.rows, dtype=dtype, device=device)
    if plan.split > 1:
        part = torch.empty(plan.split, pad, tiles * plan.tile, dtype=torch.float32, device=device)
    else:
        part = y
    # A constexpr decides which pointers are read; the others only need to be valid.
    groups = w.cols // GROUP
    launch(
        gemv_kernel, (tiles, plan.split, pad // ROW_TILE),
        w.values, w.values if w.scales is None else w.scales,
        values, values if x_scales is None else x_scales, part, w.arrivals, y,
        w.rows, groups, pad, width, w.rows // blocks, w.cols if blocks > 1 else 0, plan.ahead,
        KIND=kind, TILE=plan.tile, P=plan.step, SPLIT=plan.split, MASKED=groups % plan.step != 0,
        ROUND=dtype == torch.bfloat16, T=ROW_TILE, num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
    return y
