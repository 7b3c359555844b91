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
from deepdraft.kernels.native import attend as native
from deepdraft.kernels.rounding import (
    from_e2m1,
    from_e4m3,
    from_e8m0,
    round_bf16,
    to_bf16_rne,
)
from deepdraft.kernels.runtime import INTERPRET, check, launch, next_power, wait_for_inputs

CHUNK_KEYS = 64
"""Keys of a chunk. Part of the numerics: probabilities are rounded relative to a chunk's top."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How a program works: heads and channels at a time, at most; warps, loads in flight."""

    heads: int
    channels: int
    warps: int
    stages: int


PLAN = AttentionPlan(heads=16, channels=64, warps=4, stages=3)


# ---- device helpers ------------------------------------------------------------------------


@triton.jit
def spread(scale, GROUP: tl.constexpr):
    """[N, G] -> [N, G * GROUP], each value repeated."""
    n: tl.constexpr = scale.shape[0]
    g: tl.constexpr = scale.shape[1]
    return tl.reshape(tl.broadcast_to(scale[:, :, None], (n, g, GROUP)), (n, g * GROUP))


@triton.jit
def unpack_pairs(byte):
    """Bytes of two E2M1 codes -> bf16 of the low and of the high ones, exact."""
    if INTERPRET:
        low, high = to_bf16_rne(from_e2m1(byte & 15)), to_bf16_rne(from_e2m1(byte >> 4))
    else:
        # A code's magnitude selects both bytes of its bf16 from tables; signs are put in after.
        low, high = tl.inline_asm_elementwise(
            """
            { .reg .b32 m, n, h0, h1, l0, l1, a, b, s;
              and.b32 m, $4, 0x77777777;  shr.u32 n, m, 16;
              prmt.b32 h0, 0x3F3F3F00, 0x40404040, m;  prmt.b32 l0, 0xC0800000, 0xC0804000, m;
              prmt.b32 h1, 0x3F3F3F00, 0x40404040, n;  prmt.b32 l1, 0xC0800000, 0xC0804000, n;
              prmt.b32 a, h0, h1, 0x6420;  prmt.b32 b, l0, l1, 0x6420;
              shl.b32 s, $4, 4;  lop3.b32 a, s, 0x80808080, a, 0xEA;
              prmt.b32 $0, b, a, 0x5140;  prmt.b32 $1, b, a, 0x7362;
              prmt.b32 a, h0, h1, 0x7531;  prmt.b32 b, l0, l1, 0x7531;
              lop3.b32 a, $4, 0x80808080, a, 0xEA;
              prmt.b32 $2, b, a, 0x5140;  prmt.b32 $3, b, a, 0x7362; }
            """,
            "=&r,=&r,=&r,=&r,r",
            [byte],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    return low, high


@triton.jit
def scaled_bf16(x, scale):
    """x times scale, bf16 values whose product is exact in bf16; scale fp32."""
    if INTERPRET:
        return to_bf16_rne(x.to(tl.float32) * scale)
    else:
        return x * scale.to(tl.bfloat16)


@triton.jit
def window_keys(cache_ptr, at, valid, c0, C: tl.constexpr, BC: tl.constexpr):
    """Channels c0.. of the window records that start at byte `at`: bf16 [N, BC]."""
    where = at[:, None] + c0 + tl.arange(0, BC)[None, :]
    codes = tl.load(cache_ptr + where, mask=valid[:, None], other=0)
    scale_at = at[:, None] + C + c0 // 32 + tl.arange(0, BC // 32)[None, :]
    scale = from_e8m0(tl.load(cache_ptr + scale_at, mask=valid[:, None], other=1))
    return to_bf16_rne(from_e4m3(codes) * spread(scale, 32))


@triton.jit
def main_keys(cache_ptr, at, valid, c0, C: tl.constexpr, BC: tl.constexpr):
    """Channels c0.. of the main records that start at byte `at`: even and odd ones, bf16 [N,
    BC / 2]."""
    where = at[:, None] + c0 // 2 + tl.arange(0, BC // 2)[None, :]
    low, high = unpack_pairs(tl.load(cache_ptr + where, mask=valid[:, None], other=0))
    scale_at = at[:, None] + C // 2 + c0 // 16 + tl.arange(0, BC // 16)[None, :]
    scale = from_e4m3(tl.load(cache_ptr + scale_at, mask=valid[:, None], other=0))
    scale = spread(scale, 8)
    return scaled_bf16(low, scale), scaled_bf16(high, scale)


@triton.jit
def query_pairs(
    q_ptr, cos_ptr, sin_ptr, h, heads, c0, C: tl.constexpr, PAIRS: tl.constexpr,
    BC: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Channels c0.. of some heads' queries, turned: even and odd ones, bf16 values [BH, BC / 2]."""
    at = h[:, None] * C + c0 + tl.arange(0, BC)[None, :]
    q = tl.load(q_ptr + at, mask=heads[:, None], other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(q, (BH, BC // 2, 2)))
    pair = (c0 // 2 + tl.arange(0, BC // 2) - (C // 2 - PAIRS))[None, :]
    return turn_pairs(even, odd, cos_ptr, sin_ptr, pair, PAIRS)


@triton.jit
def chunk_weights(scores, valid, h, heads, SCALE, top_ptr, total_ptr):
    """Probabilities of a chunk relative to its top, bf16; the top and their sum are stored."""
    scores = tl.where(valid[None, :], scores * SCALE, float("-inf"))
    top = tl.maximum(tl.max(scores, axis=1), -1e30)
    weights = tl.exp(scores - top[:, None])
    tl.store(top_ptr + h, top, mask=heads)
    tl.store(total_ptr + h, tl.sum(weights, axis=1), mask=heads)
    return to_bf16_rne(weights)


@triton.jit
def attend_window(
    q_ptr, cos_ptr, sin_ptr, cache_ptr, at, valid, part_ptr, top_ptr, total_ptr, h, H, SCALE,
    C: tl.constexpr, PAIRS: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """A chunk of the window. Where all channels are worked on at once (BC = C), keys are read and
    unpacked once for scores and sums."""
    heads = h < H
    scores = tl.zeros((BH, N), tl.float32)
    key = window_keys(cache_ptr, at, valid, 0, C, BC)
    for c0 in range(0, C, BC):
        if BC < C:
            key = window_keys(cache_ptr, at, valid, c0, C, BC)
        even, odd = query_pairs(q_ptr, cos_ptr, sin_ptr, h, heads, c0, C, PAIRS, BC, BH)
        q = to_bf16_rne(tl.reshape(tl.join(even, odd), (BH, BC)))
        scores = dot_bf16(q, tl.trans(key), scores)
    weights = chunk_weights(scores, valid, h, heads, SCALE, top_ptr, total_ptr)
    for c0 in range(0, C, BC):
        if BC < C:
            key = window_keys(cache_ptr, at, valid, c0, C, BC)
        part = dot_bf16(weights, key, tl.zeros((BH, BC), tl.float32))
        where = h[:, None] * C + c0 + tl.arange(0, BC)[None, :]
        tl.store(part_ptr + where, part, mask=heads[:, None])


@triton.jit
def attend_main(
    q_ptr, cos_ptr, sin_ptr, cache_ptr, at, valid, part_ptr, top_ptr, total_ptr, h, H, SCALE,
    C: tl.constexpr, PAIRS: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """As attend_window; a part holds the even channels, then the odd ones."""
    heads = h < H
    scores = tl.zeros((BH, N), tl.float32)
    low, high = main_keys(cache_ptr, at, valid, 0, C, BC)
    for c0 in range(0, C, BC):
        if BC < C:
            low, high = main_keys(cache_ptr, at, valid, c0, C, BC)
        even, odd = query_pairs(q_ptr, cos_ptr, sin_ptr, h, heads, c0, C, PAIRS, BC, BH)
        scores = dot_bf16(to_bf16_rne(even), tl.trans(low), scores)
        scores = dot_bf16(to_bf16_rne(odd), tl.trans(high), scores)
    weights = chunk_weights(scores, valid, h, heads, SCALE, top_ptr, total_ptr)
    for c0 in range(0, C, BC):
        if BC < C:
            low, high = main_keys(cache_ptr, at, valid, c0, C, BC)
        where = part_ptr + h[:, None] * C + c0 // 2 + tl.arange(0, BC // 2)[None, :]
        zero = tl.zeros((BH, BC // 2), tl.float32)
        tl.store(where, dot_bf16(weights, low, zero), mask=heads[:, None])
        tl.store(where + C // 2, dot_bf16(weights, high, zero), mask=heads[:, None])


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
    n, h = tl.arange(0, N), tl.program_id(1) * BH + tl.arange(0, BH)
    if chunk < WINDOW_CHUNKS:
        place = chunk * N + n
        address = tl.load(window_list_ptr + row * W + place, mask=place < W, other=-1)
    else:
        place = (chunk - WINDOW_CHUNKS) * N + n
        address = tl.load(main_list_ptr + row * K + place, mask=place < K, other=-1)
    if tl.max(address, axis=0) < 0:  # nobody here
        tl.store(top_ptr + h, tl.full((BH,), -1e30, tl.float32), mask=h < H)
        tl.store(total_ptr + h, tl.zeros((BH,), tl.float32), mask=h < H)
        return
    valid = address >= 0
    at = tl.maximum(address, 0).to(tl.int64)
    if chunk < WINDOW_CHUNKS:
        attend_window(
            q_ptr, cos_ptr, sin_ptr, window_ptr, at * (C + C // 32), valid,
            part_ptr, top_ptr, total_ptr, h, H, SCALE, C, PAIRS, BH, BC, N,
        )  # fmt: skip
    else:
        attend_main(
            q_ptr, cos_ptr, sin_ptr, main_ptr, at * (C // 2 + C // 16), valid,
            part_ptr, top_ptr, total_ptr, h, H, SCALE, C, PAIRS, BH, BC, N,
        )  # fmt: skip


@triton.jit
def combine_kernel(
    part_ptr, top_ptr, total_ptr, sink_ptr, cos_ptr, sin_ptr, out_ptr, H,
    C: tl.constexpr, PAIRS: tl.constexpr, WINDOW_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr,
    CP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    head, row = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, CP // 2)
    sink = tl.load(sink_ptr + head)
    highest = sink
    for chunk in tl.static_range(CHUNKS):
        highest = tl.maximum(highest, tl.load(top_ptr + (row * CHUNKS + chunk) * H + head))
    total = tl.exp(sink - highest)
    even, odd = tl.zeros((CP // 2,), tl.float32), tl.zeros((CP // 2,), tl.float32)
    for chunk in tl.static_range(CHUNKS):
        at = (row * CHUNKS + chunk) * H + head
        share = tl.exp(tl.load(top_ptr + at) - highest)
        own = tl.load(total_ptr + at)
        total += share * own
        # Channels lie in turn in the window's parts, by halves in the others.
        first = part_ptr + at.to(tl.int64) * C + i * (2 if chunk < WINDOW_CHUNKS else 1)
        second = first + (1 if chunk < WINDOW_CHUNKS else C // 2)
        # Read whether or not there were keys, so that no load waits for another; nobody wrote
        # where no key was.
        first_part = tl.load(first, mask=i < C // 2, other=0.0)
        second_part = tl.load(second, mask=i < C // 2, other=0.0)
        even += share * tl.where(own > 0, first_part, 0.0)
        odd += share * tl.where(own > 0, second_part, 0.0)
    even, odd = round_bf16(even / total), round_bf16(odd / total)
    # Turning back is turning (odd, even). Channels beyond C are of no pair.
    pair = i - (C // 2 - PAIRS)
    odd, even = turn_pairs(odd, even, cos_ptr + row * PAIRS, sin_ptr + row * PAIRS, pair, PAIRS)
    out = tl.reshape(tl.join(even, odd), (CP,))
    c = tl.arange(0, CP)
    tl.store(out_ptr + (row * H + head).to(tl.int64) * C + c, to_bf16_rne(out), mask=c < C)


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
    if native.enabled(device) and native.fits(channels, pairs, q.shape[1]):
        native.chunks(
            q, cos, sin, window, window_rows, main, main_rows, part, top, total, scale=scale
        )
        if native.combine(part, top, total, sink, cos, sin, out, window_chunks=window_chunks):
            return out
    else:
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
            N=CHUNK_KEYS, num_warps=plan.warps, num_stages=plan.stages,
        )  # fmt: skip
    launch(
        combine_kernel, (heads, rows), part, top, total, sink, cos, sin, out, heads,
        C=channels, PAIRS=pairs, WINDOW_CHUNKS=window_chunks, CHUNKS=chunks,
        CP=next_power(channels), num_warps=2,
    )  # fmt: skip
    return out
