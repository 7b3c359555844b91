"""Behind the latent map: the query latent's norm and the window's entry, in one launch.

Owns: that both are one launch. What they compute is `mhc.norm_rows` and `cache.write_entries`, bit
for bit: the two read the same rows, neither needs the other, and two launches would be two links of
the step's chain or a branch of its graph.

Letters: R rows, Q channels of the query latent, C of an entry, P rotary pairs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepdraft.kernels.cache import ENTRY_WARPS, record_bytes, write_entry
from deepdraft.kernels.gemv import QuantRows
from deepdraft.kernels.layout import GROUP
from deepdraft.kernels.mhc import norm_row
from deepdraft.kernels.runtime import ROW_TILE, check, launch, next_power

_MOST_CHANNELS = 2048
"""Channels of a query latent that ENTRY_WARPS warps norm as `mhc.norm_rows` does."""


@triton.jit
def latent_kernel(
    x_ptr, q_norm_ptr, codes_ptr, scales_ptr, kv_norm_ptr, cos_ptr, sin_ptr, dest_ptr,
    cache_ptr, Q, C, PAIRS, X_STRIDE, RECORD, R, NORM_EPS,
    QGP: tl.constexpr, CGP: tl.constexpr, HALF: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        # The query map may start at once: it reads nothing but weights before it waits.
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    if tl.program_id(1) == 0:
        norm_row(
            row, x_ptr, q_norm_ptr, x_ptr, codes_ptr, scales_ptr, Q, X_STRIDE, R, NORM_EPS, QGP,
            False,
        )  # fmt: skip
    else:
        write_entry(
            row, x_ptr, x_ptr, dest_ptr, dest_ptr, kv_norm_ptr, cos_ptr, sin_ptr, dest_ptr,
            cache_ptr, x_ptr, C, PAIRS, X_STRIDE, Q, RECORD, NORM_EPS, HALF, CGP, 0, False, False,
        )  # fmt: skip


def split_latents(
    x: Tensor,
    q_norm: Tensor,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    dest: Tensor,
    window: Tensor,
    *,
    norm_eps: float,
) -> QuantRows:
    """x bfloat16 [R, Q + C], 8 divides R: its first Q columns normed, in FP8; the others become
    window entries (contract of both: `ops.boundary.norm_rows`, `ops.cache.entry`).

    q_norm float32 [Q], kv_norm float32 [C]; cos, sin float32 [R, P]; dest int32 [R]: row of
    `window` uint8 [N, C + C/32], -1 where none is written.
    """
    (rows, stride), width, channels = x.shape, q_norm.shape[0], kv_norm.shape[0]
    device = check(x, q_norm, kv_norm, cos, sin, dest, window)
    if rows % ROW_TILE or stride < width + channels or width % GROUP or channels % GROUP:
        raise ValueError(f"{x.shape} does not hold {width} and {channels} channels of 8 n rows")
    if width > _MOST_CHANNELS:
        raise ValueError(f"a query latent of {width} channels; at most {_MOST_CHANNELS} here")
    if window.shape[1] != record_bytes("window", channels):
        raise ValueError(f"{window.shape} are no window records of {channels} channels")
    codes = torch.empty(rows, width, dtype=torch.uint8, device=device)
    scales = torch.empty(width // GROUP, rows, dtype=torch.float32, device=device)
    launch(
        latent_kernel, (rows, 2),
        x, q_norm, codes, scales, kv_norm, cos, sin, dest, window,
        width, channels, cos.shape[1], stride, window.shape[1], rows, norm_eps,
        QGP=next_power(width // GROUP), CGP=next_power(channels // GROUP), HALF=GROUP // 2,
        num_warps=ENTRY_WARPS,
    )  # fmt: skip
    return QuantRows(codes, scales)
