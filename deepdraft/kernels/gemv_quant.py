"""A product quantised where it is made: `gemv`, then `quantize_rows`, in one launch.

Owns: the epilogue. A tile's rows are whole groups of 32 channels of the output, so the program that
has the sum of a tile has its groups, too. The bits are those of the two launches.

Letters: R batch rows, N output rows, K columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepdraft.kernels import gemv
from deepdraft.kernels.gemv import QuantRows, quantize_groups, tile_sum
from deepdraft.kernels.layout import GROUP, Tiled
from deepdraft.kernels.native.fragments import Streamed
from deepdraft.kernels.rounding import round_bf16
from deepdraft.kernels.runtime import ROW_TILE, check, launch


@triton.jit
def gemv_quant_kernel(
    w_ptr, ws_ptr, x_ptr, part_ptr, arrive_ptr, codes_ptr, scales_ptr,
    N, G, R_PAD, X_STRIDE, BLOCK_ROWS, BLOCK_COLS, AHEAD,
    TILE: tl.constexpr, P: tl.constexpr, SPLIT: tl.constexpr, MASKED: tl.constexpr,
    T: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    last, total = tile_sum(
        w_ptr, ws_ptr, x_ptr, x_ptr, part_ptr, arrive_ptr, G, R_PAD, X_STRIDE, BLOCK_ROWS,
        BLOCK_COLS, AHEAD, "fp8xbf16", TILE, P, SPLIT, MASKED, T, PDL,
    )  # fmt: skip
    tile, row_tile = tl.program_id(0), tl.program_id(2)
    if last:
        H: tl.constexpr = TILE // 32
        group = tl.arange(0, T * H)
        y = tl.reshape(tl.trans(round_bf16(total)), (T * H, 32))
        codes, scales = quantize_groups(y)
        own_row, channel = row_tile * T + group // H, tile * TILE + (group % H) * 32
        at = own_row.to(tl.int64) * N + channel
        tl.store(codes_ptr + at[:, None] + tl.arange(0, 32)[None, :], codes)
        tl.store(scales_ptr + channel // 32 * R_PAD + own_row, scales)


def gemv_quantized(x: Tensor, w: Tiled | Streamed, *, blocks: int = 1) -> QuantRows:
    """x bfloat16 [R, blocks * K] times FP8 w [N, K], rounded to bfloat16 and then to FP8 in groups
    of 32: [R, N] (contracts: ops.gemm). 8 divides R, 32 divides N."""
    if isinstance(w, Streamed):
        return gemv.gemv_quantized(x, w, blocks=blocks)
    pad, width = x.shape
    plan, tiles = w.plan, w.values.shape[0]
    if w.kind != "fp8" or w.scales is None or x.dtype != torch.bfloat16:
        raise ValueError(f"{w.kind} weights and {x.dtype} rows; this takes FP8 and bfloat16")
    if width != blocks * w.cols or pad % ROW_TILE or w.rows % blocks or w.rows % plan.tile:
        raise ValueError(
            f"{tuple(x.shape)=} must be [multiple of {ROW_TILE}, {blocks} x {w.cols}] for a "
            f"matrix of {w.rows} x {w.cols} in tiles of {plan.tile}"
        )
    if (w.rows // blocks) % plan.tile:
        raise ValueError(f"a block of {w.rows // blocks} rows is no multiple of {plan.tile=}")
    device = check(x, w.values)
    if plan.split > 1 and w.arrivals.numel() < tiles * pad // ROW_TILE:
        raise ValueError(f"{pad} rows are more than this matrix has arrival counters for")
    codes = torch.empty(pad, w.rows, dtype=torch.uint8, device=device)
    scales = torch.empty(w.rows // GROUP, pad, dtype=torch.float32, device=device)
    part = scales
    if plan.split > 1:
        part = torch.empty(plan.split, pad, w.rows, dtype=torch.float32, device=device)
    groups = w.cols // GROUP
    launch(
        gemv_quant_kernel, (tiles, plan.split, pad // ROW_TILE),
        w.values, w.scales, x, part, w.arrivals, codes, scales,
        w.rows, groups, pad, width, w.rows // blocks, w.cols if blocks > 1 else 0, plan.ahead,
        TILE=plan.tile, P=plan.step, SPLIT=plan.split, MASKED=groups % plan.step != 0,
        T=ROW_TILE, num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
    return QuantRows(codes, scales)
