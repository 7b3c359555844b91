"""Sparse attention of a decode step: packed window and main records, a sink per head.

Contract and reference: `deepdraft.ops.attention.chunked_sink_attention`. A row has a fixed number
of places: the window by position, then the selected entries by position, each cut into chunks of
64. A program works on one chunk for some heads; a second kernel combines the chunks in order and
turns the result back. Records are read as stored, so a row sees of its neighbours what a later step
will see.

Letters: R rows, H heads, C channels, W window places, K selected places, P rotary pairs.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepdraft.kernels.cache import record_bytes, turn_pairs
from deepdraft.kernels.gemv import dot_bf16
from deepdraft.kernels.rounding import (
    from_e2m1,
    from_e4m3,
    from_e8m0,
    round_bf16,
    to_bf16_rne,
)
from deepdraft.kernels.runtime import check, launch, next_power, wait_for_inputs

CHUNK_KEYS = 64
"""Keys of a chunk. Part of the numerics: probabilities are rounded relative to a chunk's top."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How a program works: heads and channels at a time, at most; warps."""

    heads: int
    channels: int
    warps: int


PLAN = AttentionPlan(heads=16, channels=64, warps=4)


# ---- device helpers ------------------------------------------------------------------------


@triton.jit
def spread(scale, GROUP: tl.constexpr):
    """[N, G] -> [N, G * GROUP], each value repeated."""
    n: tl.constexpr = scale.shape[0]
    g: tl.constexpr = scale.shape[1]
    return tl.reshape(tl.broadcast_to(scale[:, :, None], (n, g, GROUP)), (n, g * GROUP))


# The last step of every tile below is a rounding: Triton 3.6 fails to compile a wgmma whose operand
# comes straight from a reshape.


@triton.jit
def window_tile(
    cache_ptr, at, valid, c0: tl.constexpr, C: tl.constexpr, BC: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """Channels c0.. of N window records that start at byte `at`: bf16 [N, BC]."""
    where = at[:, None] + c0 + tl.arange(0, BC)[None, :]
    codes = tl.load(cache_ptr + where, mask=valid[:, None], other=0)
    scale_at = at[:, None] + C + c0 // 32 + tl.arange(0, BC // 32)[None, :]
    scale = from_e8m0(tl.load(cache_ptr + scale_at, mask=valid[:, None], other=1))
    return to_bf16_rne(from_e4m3(codes) * spread(scale, 32))


@triton.jit
def main_tile(
    cache_ptr, at, valid, c0: tl.constexpr, C: tl.constexpr, BC: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """Channels c0.. of N main records that start at byte `at`: bf16 [N, BC]."""
    where = at[:, None] + c0 // 2 + tl.arange(0, BC // 2)[None, :]
    byte = tl.load(cache_ptr + where, mask=valid[:, None], other=0)
    scale_at = at[:, None] + C // 2 + c0 // 16 + tl.arange(0, BC // 16)[None, :]
    scale = from_e4m3(tl.load(cache_ptr + scale_at, mask=valid[:, None], other=0))
    codes = tl.reshape(tl.join(byte & 15, byte >> 4), (N, BC))
    return to_bf16_rne(from_e2m1(codes) * spread(scale, 16))


@triton.jit
def key_tile(
    window_ptr, main_ptr, at, valid, c0: tl.constexpr, C: tl.constexpr,
    WINDOW: tl.constexpr, BC: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    if WINDOW:
        return window_tile(window_ptr, at, valid, c0, C, BC, N)
    else:
        return main_tile(main_ptr, at, valid, c0, C, BC, N)


@triton.jit
def query_tile(
    q_ptr, cos_ptr, sin_ptr, h, heads, c0: tl.constexpr, C: tl.constexpr, PAIRS: tl.constexpr,
    BC: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Channels c0.. of some heads' queries, turned: bf16 [BH, BC]."""
    at = h[:, None] * C + c0 + tl.arange(0, BC)[None, :]
    q = tl.load(q_ptr + at, mask=heads[:, None], other=0.0)
    if c0 + BC > C - 2 * PAIRS:
        even, odd = tl.split(tl.reshape(q.to(tl.float32), (BH, BC // 2, 2)))
        pair = (c0 // 2 + tl.arange(0, BC // 2) - (C // 2 - PAIRS))[None, :]
        even, odd = turn_pairs(even, odd, cos_ptr, sin_ptr, pair, PAIRS)
        q = to_bf16_rne(tl.reshape(tl.join(even, odd), (BH, BC)))
    return q


@triton.jit
def attend(
    q_ptr, cos_ptr, sin_ptr, window_ptr, main_ptr, list_ptr, part_ptr, top_ptr, total_ptr,
    place, places, RECORD, H, SCALE, C: tl.constexpr, PAIRS: tl.constexpr,
    WINDOW: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """One chunk: places place.. of a list of cache rows, for heads of this program."""
    n = tl.arange(0, N)
    address = tl.load(list_ptr + place + n, mask=place + n < places, other=-1)
    valid = address >= 0
    at = tl.maximum(address, 0).to(tl.int64) * RECORD
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    heads = h < H
    scores = tl.zeros((BH, N), tl.float32)
    for c0 in tl.static_range(0, C, BC):
        q = query_tile(q_ptr, cos_ptr, sin_ptr, h, heads, c0, C, PAIRS, BC, BH)
        key = key_tile(window_ptr, main_ptr, at, valid, c0, C, WINDOW, BC, N)
        scores = dot_bf16(q, tl.trans(key), scores)
    scores = tl.where(valid[None, :], scores * SCALE, float("-inf"))
    top = tl.maximum(tl.max(scores, axis=1), -1e30)
    weights = tl.exp(scores - top[:, None])
    tl.store(top_ptr + h, top, mask=heads)
    tl.store(total_ptr + h, tl.sum(weights, axis=1), mask=heads)
    rounded = to_bf16_rne(weights)
    for c0 in tl.static_range(0, C, BC):
        key = key_tile(window_ptr, main_ptr, at, valid, c0, C, WINDOW, BC, N)
        part = dot_bf16(rounded, key, tl.zeros((BH, BC), tl.float32))
        where = h[:, None] * C + c0 + tl.arange(0, BC)[None, :]
        tl.store(part_ptr + where, part, mask=heads[:, None])


# ---- kernels -------------------------------------------------------------------------------


@triton.jit
def chunk_kernel(
    q_ptr, cos_ptr, sin_ptr, window_ptr, main_ptr, window_list_ptr, main_list_ptr,
    part_ptr, top_ptr, total_ptr,
    H, Q_STRIDE, W, K, SCALE, C: tl.constexpr, PAIRS: tl.constexpr,
    WINDOW_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr,
    N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    chunk, row = tl.program_id(0), tl.program_id(2)
    q_ptr += row.to(tl.int64) * Q_STRIDE
    cos_ptr += row * PAIRS
    sin_ptr += row * PAIRS
    part_ptr += (row * CHUNKS + chunk).to(tl.int64) * H * C
    top_ptr += (row * CHUNKS + chunk) * H
    total_ptr += (row * CHUNKS + chunk) * H
    if chunk < WINDOW_CHUNKS:
        attend(
            q_ptr, cos_ptr, sin_ptr, window_ptr, main_ptr, window_list_ptr + row * W,
            part_ptr, top_ptr, total_ptr, chunk * N, W, C + C // 32, H, SCALE, C, PAIRS,
            True, BH, BC, N,
        )  # fmt: skip
    else:
        attend(
            q_ptr, cos_ptr, sin_ptr, window_ptr, main_ptr, main_list_ptr + row * K,
            part_ptr, top_ptr, total_ptr, (chunk - WINDOW_CHUNKS) * N, K, C // 2 + C // 16,
            H, SCALE, C, PAIRS, False, BH, BC, N,
        )  # fmt: skip


@triton.jit
def combine_kernel(
    part_ptr, top_ptr, total_ptr, sink_ptr, cos_ptr, sin_ptr, out_ptr, H,
    C: tl.constexpr, PAIRS: tl.constexpr, CHUNKS: tl.constexpr, CP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    head, row = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, CP)
    inside = i < C
    sink = tl.load(sink_ptr + head)
    highest = sink
    for chunk in tl.static_range(CHUNKS):
        highest = tl.maximum(highest, tl.load(top_ptr + (row * CHUNKS + chunk) * H + head))
    total = tl.exp(sink - highest)
    out = tl.zeros((CP,), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        at = (row * CHUNKS + chunk) * H + head
        share = tl.exp(tl.load(top_ptr + at) - highest)
        total += share * tl.load(total_ptr + at)
        out += share * tl.load(part_ptr + at.to(tl.int64) * C + i, mask=inside, other=0.0)
    even, odd = tl.split(tl.reshape(round_bf16(out / total), (CP // 2, 2)))
    # Turning back is turning (odd, even). Channels beyond C are of no pair.
    pair = tl.arange(0, CP // 2) - (C // 2 - PAIRS)
    odd, even = turn_pairs(odd, even, cos_ptr + row * PAIRS, sin_ptr + row * PAIRS, pair, PAIRS)
    out = tl.reshape(tl.join(even, odd), (CP,))
    tl.store(out_ptr + (row * H + head).to(tl.int64) * C + i, to_bf16_rne(out), mask=inside)


# ---- launches ------------------------------------------------------------------------------


def sparse_attention(
    q: Tensor,
    cos: Tensor,
    sin: Tensor,
    window: Tensor,
    window_rows: Tensor,
    sink: Tensor,
    *,
    scale: float,
    main: Tensor | None = None,
    main_rows: Tensor | None = None,
    plan: AttentionPlan = PLAN,
) -> Tensor:
    """Attention output, turned back: bfloat16 [R, H, C] (contract: ops.attention).

    q bfloat16 [R, >= H * C] before rotation; cos, sin float32 [R, P]; window uint8 [*, C + C/32]
    and window_rows int32 [R, W], its rows by position, -1 in empty places; main uint8 [*, C/2 +
    C/16] and main_rows int32 [R, K] likewise; sink float32 [H].
    """
    rows, heads, pairs = q.shape[0], sink.shape[0], cos.shape[1]
    channels = window.shape[1] * 32 // 33
    given = (q, cos, sin, window, window_rows, sink)
    device = check(*given, *(t for t in (main, main_rows) if t is not None))
    if window.shape[1] != record_bytes("window", channels) or channels % 32:
        raise ValueError(f"{window.shape[1]} bytes are no window record")
    if main is not None and main.shape[1] != record_bytes("main", channels):
        raise ValueError(f"{main.shape[1]} bytes are no main record of {channels} channels")
    if (main is None) != (main_rows is None) or q.shape[1] < heads * channels:
        raise ValueError(f"{q.shape=} does not hold {heads} heads of {channels} channels")
    places = 0 if main_rows is None else main_rows.shape[1]
    window_chunks = -(-window_rows.shape[1] // CHUNK_KEYS)
    chunks = window_chunks + -(-places // CHUNK_KEYS)
    part = torch.empty(rows, chunks, heads, channels, dtype=torch.float32, device=device)
    top = torch.empty(rows, chunks, heads, dtype=torch.float32, device=device)
    total = torch.empty_like(top)
    out = torch.empty(rows, heads, channels, dtype=torch.bfloat16, device=device)
    tall = min(plan.heads, next_power(heads, 16))
    wide = plan.channels
    while channels % wide:
        wide //= 2
    launch(
        chunk_kernel, (chunks, -(-heads // tall), rows),
        q, cos, sin, window, window if main is None else main,
        window_rows, window_rows if main_rows is None else main_rows, part, top, total,
        heads, q.shape[1], window_rows.shape[1], places, scale, C=channels, PAIRS=pairs,
        WINDOW_CHUNKS=window_chunks, CHUNKS=chunks, BH=tall, BC=wide,
        N=CHUNK_KEYS, num_warps=plan.warps,
    )  # fmt: skip
    launch(
        combine_kernel, (heads, rows), part, top, total, sink, cos, sin, out, heads,
        C=channels, PAIRS=pairs, CHUNKS=chunks, CP=next_power(channels), num_warps=2,
    )  # fmt: skip
    return out
