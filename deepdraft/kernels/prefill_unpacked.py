"""Products of many rows with weights that were unpacked to bf16 first.

Owns: the unpacked order of a matrix, the unpacking, products that read both operands through
shared memory. Unpacking on the way (`prefill_gemm`, `prefill_experts`) costs instructions for every
tile of rows; this costs memory traffic once a chunk. Values are the same and so is the order of
the sums: columns in steps of 16.
Knows nothing of: when which of the two is taken.

Letters: R rows, N outputs, K inputs, G = K / 32, E experts, D hidden, F expert width.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepdraft.kernels.gemv import dot_bf16
from deepdraft.kernels.layout import GROUP, Tiled
from deepdraft.kernels.moe import swiglu
from deepdraft.kernels.native.fragments import Streamed
from deepdraft.kernels.prefill_gemm import MULTIPROCESSORS, quantized_values
from deepdraft.kernels.prefill_weights import dense_tile, pair_rows, pair_tile, stored
from deepdraft.kernels.rounding import round_bf16, to_bf16_rne
from deepdraft.kernels.runtime import check, launch


@dataclass(frozen=True, slots=True)
class PlainPlan:
    """A program's tile: `tall` rows, `wide` outputs (64 at least, so that gated ones make whole
    groups), `deep` inputs a step, powers of two; `band`
    row tiles that share weights in the cache; `programs` of the experts' products, each of which
    takes one tile after another."""

    tall: int = 128
    wide: int = 256
    deep: int = 64
    warps: int = 8
    stages: int = 4
    band: int = 16
    programs: int = 264


PLAN = PlainPlan()


_NARROW = {1: 1.0, 2: 1.15, 4: 1.5}
"""What an output costs in tiles of half and of a quarter of the width."""


def few_rows(plan: PlainPlan, rows: int, outputs: int) -> PlainPlan:
    """The plan for so many rows: narrower where that ends sooner, by turns that the multiprocessors
    take. A tile's sides change no bit."""

    def cost(part: int) -> float:
        programs = -(-outputs // (plan.wide // part)) * -(-rows // plan.tall)
        return -(-programs // MULTIPROCESSORS) * plan.wide / part * _NARROW[part]

    parts = [part for part in _NARROW if part == 1 or plan.wide // part >= 2 * GROUP]
    return replace(plan, wide=plan.wide // min(parts, key=cost))


# ---- unpacking -----------------------------------------------------------------------------


@triton.jit
def unpack_dense_kernel(
    w_ptr, ws_ptr, out_ptr, G, N, KIND: tl.constexpr, TILE: tl.constexpr, BN: tl.constexpr,
    P: tl.constexpr,
):  # fmt: skip
    n0, first = tl.program_id(0) * BN, tl.program_id(1) * P
    n, n_group = n0 + tl.arange(0, BN), tl.program_id(0) * (BN // 32) + tl.arange(0, BN // 32)
    w = dense_tile(w_ptr, ws_ptr, n, n_group, first, G, N, KIND, TILE, BN, P, True)
    k = first * 32 + tl.arange(0, P * 32)
    here = (n < N)[:, None] & (k < G * 32)[None, :]
    tl.store(out_ptr + n.to(tl.int64)[:, None] * (G * 32) + k[None, :], w, mask=here)


@triton.jit
def unpack_pairs_kernel(
    w_ptr, ws_ptr, out_ptr, FIRST, G, PAIRS, EXPERT_TILES,
    TOGETHER: tl.constexpr, TILE: tl.constexpr, BN: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    i0, first = tl.program_id(0) * BN, tl.program_id(1) * P
    number = tl.program_id(2).to(tl.int64)
    base = (FIRST + number) * EXPERT_TILES * G
    low, high = pair_tile(w_ptr, ws_ptr, base, i0, first, G, TILE, BN, P, True)
    i, k = i0 + tl.arange(0, BN), first * 32 + tl.arange(0, P * 32)
    if TOGETHER:
        one, two = 2 * i, 2 * i + 1
    else:
        one, two = pair_rows(i, 0, TILE), pair_rows(i, 1, TILE)
    out_ptr += number * (2 * PAIRS) * (G * 32) + k[None, :]
    here = (i < PAIRS)[:, None] & (k < G * 32)[None, :]
    tl.store(out_ptr + one.to(tl.int64)[:, None] * (G * 32), low, mask=here)
    tl.store(out_ptr + two.to(tl.int64)[:, None] * (G * 32), high, mask=here)


def unpack_dense(w: Tiled | Streamed, space: Tensor) -> Tensor:
    """A dense matrix as bfloat16 [stored rows, K] at the front of `space` (bfloat16, flat)."""
    found = stored(w)
    out = space[: found.rows * w.cols].view(found.rows, w.cols)
    groups, tall, deep = w.cols // GROUP, 32, 4
    check(out, found.values, found.scales)
    launch(
        unpack_dense_kernel, (triton.cdiv(found.rows, tall), triton.cdiv(groups, deep)),
        found.values, found.scales, out, groups, found.rows,
        KIND=int(found.bf16), TILE=found.tile, BN=tall, P=deep, num_warps=4,
    )  # fmt: skip
    return out


def unpack_experts(
    w: Tiled | Streamed, first: int, count: int, space: Tensor, *, together: bool
) -> Tensor:
    """Experts first.. as bfloat16 [count, N, K] at the front of `space`. `together`: gate and up
    maps, output row 2i is the gate's channel i and 2i + 1 the up map's."""
    found = stored(w)
    out = space[: count * w.rows * w.cols].view(count, w.rows, w.cols)
    groups, pairs, tall, deep = w.cols // GROUP, w.rows // 2, 32, 4
    while pairs % tall:
        tall //= 2
    check(out, found.values, found.scales)
    launch(
        unpack_pairs_kernel, (pairs // tall, triton.cdiv(groups, deep), count),
        found.values, found.scales, out, first, groups, pairs, w.values.shape[1],
        TOGETHER=together, TILE=found.tile, BN=tall, P=deep, num_warps=4,
    )  # fmt: skip
    return out


# ---- products ------------------------------------------------------------------------------


@triton.jit
def plain_products(
    x_ptr, x_at, w_ptr, n, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Rows that begin at x_at [BM] times rows n [BN] of w [.., K]: fp32 [BM, BN]. All of them must
    be there."""
    k = tl.arange(0, BK)
    x_ptr += x_at[:, None] + k[None, :]
    w_ptr += n.to(tl.int64)[:, None] * K + k[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for first in range(0, K, BK):
        if MASKED:
            here = (first + k < K)[None, :]
            x = tl.load(x_ptr + first, mask=here, other=0.0)
            w = tl.load(w_ptr + first, mask=here, other=0.0)
        else:
            x, w = tl.load(x_ptr + first), tl.load(w_ptr + first)
        acc = dot_bf16(x, tl.trans(w), acc)
    return acc


@triton.jit
def plain_gemm_kernel(
    w_ptr, x_ptr, y_ptr, R, N, K, X_STRIDE, BLOCK_ROWS, BLOCK_COLS,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, MASKED: tl.constexpr,
    ROUND: tl.constexpr, QUANTIZE: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    row_tiles, col_tiles = (R + BM - 1) // BM, (N + BN - 1) // BN
    number, in_band = tl.program_id(0), BAND * col_tiles
    first_row = number // in_band * BAND
    height = min(row_tiles - first_row, BAND)
    row_tile = first_row + number % in_band % height
    n0 = number % in_band // height * BN
    m, n = row_tile * BM + tl.arange(0, BM), n0 + tl.arange(0, BN)
    # A block-diagonal map reads the columns of its own block.
    x_ptr += n0 // BLOCK_ROWS * BLOCK_COLS
    x_at = tl.minimum(m, R - 1).to(tl.int64) * X_STRIDE
    y = plain_products(x_ptr, x_at, w_ptr, tl.minimum(n, N - 1), K, BM, BN, BK, MASKED)
    if QUANTIZE:
        y = quantized_values(tl.reshape(round_bf16(y), (BM * BN // 32, 32)))
        y = tl.reshape(y, (BM, BN))
    at = m.to(tl.int64)[:, None] * N + n[None, :]
    mine = (m < R)[:, None] & (n < N)[None, :]
    if ROUND:
        tl.store(y_ptr + at, to_bf16_rne(y), mask=mine)
    else:
        tl.store(y_ptr + at, y, mask=mine)


@triton.jit
def plain_experts_kernel(
    w_ptr, x_ptr, order_ptr, weight_ptr, tile_ptr, end_ptr, y_ptr, FIRST, LAST, N, K, PICKS, TILES,
    LIMIT, UP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """One group of experts. UP: rows of x by pick, gated outputs in the order of the picks; else
    rows in the order of the picks, outputs by pick."""
    first_tile = tl.load(end_ptr + FIRST - 1, mask=FIRST > 0, other=0)
    tiles = tl.load(end_ptr + LAST - 1) - first_tile
    col_tiles = (N + BN - 1) // BN
    for number in range(tl.program_id(0), tiles * col_tiles, tl.num_programs(0)):
        tile = first_tile + number // col_tiles
        n = number % col_tiles * BN + tl.arange(0, BN)
        expert = tl.load(tile_ptr + tile) - FIRST
        last = tl.load(tile_ptr + 2 * TILES + tile)
        m = tl.load(tile_ptr + TILES + tile) + tl.arange(0, BM)
        mine = m < last
        m = tl.minimum(m, last - 1)
        pick = tl.load(order_ptr + m)
        own = w_ptr + expert.to(tl.int64) * N * K
        x_at = m.to(tl.int64) * K
        if UP:
            x_at = (pick // PICKS).to(tl.int64) * K
        y = plain_products(x_ptr, x_at, own, tl.minimum(n, N - 1), K, BM, BN, BK, MASKED)
        if UP:
            F = N // 2
            gate, up = tl.split(tl.reshape(y, (BM, BN // 2, 2)))
            weight = tl.load(weight_ptr + pick)
            f = swiglu(round_bf16(gate), round_bf16(up), LIMIT) * weight[:, None]
            f = quantized_values(tl.reshape(round_bf16(f), (BM * BN // 64, 32)))
            f = tl.reshape(f, (BM, BN // 2))
            c = number % col_tiles * (BN // 2) + tl.arange(0, BN // 2)
            at = m.to(tl.int64)[:, None] * F + c[None, :]
            tl.store(y_ptr + at, to_bf16_rne(f), mask=mine[:, None] & (c < F)[None, :])
        else:
            at = pick.to(tl.int64)[:, None] * N + n[None, :]
            tl.store(y_ptr + at, to_bf16_rne(y), mask=mine[:, None] & (n < N)[None, :])


def plain_gemm(
    x: Tensor,
    w: Tensor,
    outputs: int,
    *,
    blocks: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    quantize: bool = False,
    out: Tensor | None = None,
    plan: PlainPlan = PLAN,
) -> Tensor:
    """As `prefill_gemm.gemm`, with w bfloat16 [>= outputs, K] as `unpack_dense` gives it. `out`:
    contiguous, for the result."""
    rows, cols = x.shape[0], w.shape[1]
    wide = few_rows(plan, rows, outputs).wide
    while blocks > 1 and outputs // blocks % wide:
        wide //= 2
    device = check(x, w)
    y = torch.empty(rows, outputs, dtype=dtype, device=device) if out is None else out
    if y.shape != (rows, outputs) or y.dtype != dtype or not y.is_contiguous():
        raise ValueError(f"{y.shape} {y.dtype} does not hold {rows} x {outputs} values in {dtype}")
    launch(
        plain_gemm_kernel, (triton.cdiv(outputs, wide) * triton.cdiv(rows, plan.tall),),
        w, x, y, rows, outputs, cols, x.shape[1], outputs // blocks, cols if blocks > 1 else 0,
        BM=plan.tall, BN=wide, BK=plan.deep, MASKED=cols % plan.deep != 0,
        ROUND=dtype == torch.bfloat16, QUANTIZE=quantize, BAND=plan.band,
        num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
    return y


def plain_experts(
    x: Tensor,
    w: Tensor,
    first: int,
    order: Tensor,
    tiles: Tensor,
    ends: Tensor,
    y: Tensor,
    *,
    picks: int,
    weights: Tensor | None = None,
    limit: float = 0.0,
    plan: PlainPlan = PLAN,
) -> None:
    """Experts first.. of `unpack_experts`, w [count, N, K], on their picks (`SortedPicks` of tiles
    of `plan.tall`). With the picks' `weights` the up half: x [R, K], y [R * picks, N / 2]; else
    the down half: x [R * picks, K], y [R * picks, N]."""
    count, outputs, cols = w.shape
    if plan.wide < 2 * GROUP or (weights is not None and outputs % (2 * GROUP)):
        raise ValueError(f"{outputs} outputs in tiles of {plan.wide} do not make groups of {GROUP}")
    check(x, w, order, tiles, ends, y)
    launch(
        plain_experts_kernel, (plan.programs,),
        w, x, order, order if weights is None else weights, tiles, ends, y, first, first + count,
        outputs, cols, picks, tiles.shape[1], limit,
        UP=weights is not None, BM=plan.tall, BN=plan.wide, BK=plan.deep,
        MASKED=cols % plan.deep != 0, num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
