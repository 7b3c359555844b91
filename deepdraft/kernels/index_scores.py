"""Scores of all index entries for the few rows of a step, at any length.

Contract and reference: `deepdraft.ops.index.index_scores`, as of `kernels.index`, which calls this
file where no candidate blocks restrict a row. As many programs as the device holds walk over the
entries, each with all heads of a few rows as one operand, so that a key is unpacked once for them
and lengths that are not there cost nothing. Rows of one sequence share its keys; others take turns.

Letters: R rows, H index heads, C index channels, N entries at a time, B rows of a program.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepdraft.kernels.attention import spread, unpack_pairs
from deepdraft.kernels.gemv import dot_bf16
from deepdraft.kernels.prefill_weights import scaled_pairs
from deepdraft.kernels.rounding import from_e8m0, round_bf16
from deepdraft.kernels.runtime import launch, next_power, wait_for_inputs

ENTRIES, ROWS = 128, 4
"""N and B. Part of the numerics: they decide the order in which heads are added."""
_PROGRAMS = 264
"""Two on each multiprocessor of an H200."""


@triton.jit
def stripe_scores_kernel(
    q_ptr, weight_ptr, keys_ptr, base_ptr, reach_ptr, scores_ptr,
    R, H, CAPACITY, W_STRIDE, W_START, W_SCALE, SKIP,
    C: tl.constexpr, CP: tl.constexpr, HP: tl.constexpr, B: tl.constexpr, N: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    row0 = tl.program_id(1) * B
    b = tl.arange(0, B)
    row = row0 + b
    reach = tl.load(reach_ptr + row, mask=row < R, other=0)
    live = reach > SKIP
    if tl.max(tl.where(live, reach, 0), axis=0) <= tl.program_id(0) * N:
        return
    base = tl.load(base_ptr + row, mask=row < R, other=0)
    # Queries of all rows and heads are one operand: column b * HP + h.
    column, pair, g = tl.arange(0, B * HP), tl.arange(0, CP // 2), tl.arange(0, CP // 32)
    q_row, h = row0 + column // HP, column % HP
    wanted = ((q_row < R) & (h < H))[None, :] & (pair < C // 2)[:, None]
    q_at = (q_row.to(tl.int64) * H + h)[None, :] * C + 2 * pair[:, None]
    q_even = tl.load(q_ptr + q_at, mask=wanted, other=0.0)
    q_odd = tl.load(q_ptr + q_at + 1, mask=wanted, other=0.0)
    w_at = q_row.to(tl.int64) * W_STRIDE + W_START + h
    raw = tl.load(weight_ptr + w_at, mask=(q_row < R) & (h < H), other=0.0)
    weight = round_bf16(round_bf16(raw.to(tl.float32)) * W_SCALE)
    out = scores_ptr + row.to(tl.int64)[None, :] * CAPACITY
    for i in range(B):
        # The rows whose keys are those of row i, if it is the first of them.
        own = tl.sum(tl.where(b == i, base, 0), axis=0)
        mine = live & (base == own)
        first = tl.min(tl.where(mine, b, B), axis=0)
        end = tl.max(tl.where(mine, reach, 0), axis=0)
        end = tl.where(first == i, tl.minimum(end, CAPACITY), 0)
        for start in range(tl.program_id(0) * N, end, tl.num_programs(0) * N):
            entry = start + tl.arange(0, N)
            place = (own + tl.minimum(entry, end - 1)).to(tl.int64)
            at = keys_ptr + place[:, None] * (C // 2 + C // 32)
            byte = tl.load(at + pair[None, :], mask=(pair < C // 2)[None, :], other=0)
            codes = tl.load(at + C // 2 + g[None, :], mask=(g < C // 32)[None, :], other=1)
            low, high = unpack_pairs(byte)
            scale = spread(from_e8m0(codes), 16)
            dots = dot_bf16(scaled_pairs(low, scale), q_even, tl.zeros((N, B * HP), tl.float32))
            dots = dot_bf16(scaled_pairs(high, scale), q_odd, dots)
            parts = tl.reshape(tl.maximum(dots, 0.0) * weight[None, :], (N, B, HP))
            inside = mine[None, :] & (entry[:, None] < reach[None, :])
            tl.store(out + entry[:, None], tl.sum(parts, axis=2), mask=inside)


def score_rows(
    queries: Tensor, raw_weights: Tensor, keys: Tensor, base: Tensor, reach: Tensor, *,
    capacity: int, weight_scale: float, weight_start: int, skip: int,
) -> Tensor:  # fmt: skip
    """Scores float32 [R, capacity]; operands as `index.index_scores` has checked them."""
    rows, heads, channels = queries.shape
    scores = torch.empty(rows, capacity, dtype=torch.float32, device=queries.device)
    programs = min(_PROGRAMS, -(-capacity // ENTRIES))
    launch(
        stripe_scores_kernel, (programs, triton.cdiv(rows, ROWS)),
        queries, raw_weights, keys, base, reach, scores,
        rows, heads, capacity, raw_weights.shape[1], weight_start, weight_scale, skip,
        C=channels, CP=next_power(channels, 32), HP=next_power(heads, 16), B=ROWS, N=ENTRIES,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return scores
