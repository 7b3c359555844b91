"""Cache writes: norm, rotation and packing of window KV, main KV and index keys.

Contract and reference: `deepdraft.ops.cache`. One program a row. The record layouts are those of
`deepdraft.quant.records`: 528, 288 and 68 bytes at the published sizes.

Letters: R rows, C channels of an entry, P rotary pairs, N entries of a cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepdraft.kernels.rounding import (
    ACT_FLOOR,
    E2M1_CARRY,
    E4M3_CARRY,
    INDEX_FLOOR,
    from_e4m3,
    inverse_of,
    round_bf16,
    scale_bits,
    to_bf16_rne,
    to_e2m1_rne,
    to_e4m3_rne,
)
from deepdraft.kernels.runtime import check, launch, next_power, wait_for_inputs

GROUPS = {"window": 32, "main": 16, "index": 32}
"""Values that share a scale, by format."""
_FORMATS = {"window": 0, "main": 1, "index": 2}
ENTRY_WARPS = 4
_WINDOW = tl.constexpr(0)
_MAIN = tl.constexpr(1)


def record_bytes(kind: str, channels: int) -> int:
    """Bytes of one entry."""
    codes = channels if kind == "window" else channels // 2
    return codes + channels // GROUPS[kind]


# ---- device helpers ------------------------------------------------------------------------


@triton.jit
def turn_pairs(even, odd, cos_ptr, sin_ptr, pair, PAIRS):
    """Rotate adjacent channels. `pair`: number of each pair in the tables, below 0 where channels
    do not turn. Rounded to bf16 values."""
    turning = (pair >= 0) & (pair < PAIRS)
    cos = tl.load(cos_ptr + pair, mask=turning, other=1.0)
    sin = tl.load(sin_ptr + pair, mask=turning, other=0.0)
    return round_bf16(even * cos - odd * sin), round_bf16(odd * cos + even * sin)


@triton.jit
def pack_record(ptr, even, odd, g, i, C, HALF: tl.constexpr, FORMAT: tl.constexpr):
    """Store groups [G, HALF] of even and of odd channels as one record at ptr."""
    inside = g * (2 * HALF) < C
    amax = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), axis=1)
    if FORMAT == _WINDOW:
        bits = scale_bits(amax, ACT_FLOOR, E4M3_CARRY)
        inverse = inverse_of(bits)[:, None]
        at = ptr + g[:, None] * (2 * HALF) + 2 * i[None, :]
        tl.store(at, to_e4m3_rne(even * inverse), mask=inside[:, None])
        tl.store(at + 1, to_e4m3_rne(odd * inverse), mask=inside[:, None])
        tl.store(ptr + C + g, (bits >> 23).to(tl.uint8), mask=inside)
    else:
        if FORMAT == _MAIN:
            six = tl.full(amax.shape, 6.0, tl.float32)
            scale = tl.minimum(tl.maximum(tl.div_rn(amax, six), 0.001953125), 448.0)
            code = to_e4m3_rne(scale)
            # Correctly rounded quotients, as the reference; tl's own division is not.
            low = to_e2m1_rne(
                tl.div_rn(even, tl.broadcast_to(from_e4m3(code)[:, None], even.shape))
            )
            high = to_e2m1_rne(tl.div_rn(odd, tl.broadcast_to(from_e4m3(code)[:, None], odd.shape)))
        else:
            bits = scale_bits(amax, INDEX_FLOOR, E2M1_CARRY)
            code = (bits >> 23).to(tl.uint8)
            low = to_e2m1_rne(even * inverse_of(bits)[:, None])
            high = to_e2m1_rne(odd * inverse_of(bits)[:, None])
        at = ptr + g[:, None] * HALF + i[None, :]
        tl.store(at, low | (high << 4), mask=inside[:, None])
        tl.store(ptr + C // 2 + g, code, mask=inside)


@triton.jit
def pooled(now_ptr, before_ptr, at, mask, C):
    """One channel set of two neighbours, each [value C, gate C] fp32: pooled, bf16 values."""
    now = tl.load(now_ptr + at, mask=mask, other=0.0)
    before = tl.load(before_ptr + at, mask=mask, other=0.0)
    gate = tl.load(now_ptr + C + at, mask=mask, other=0.0)
    gate -= tl.load(before_ptr + C + at, mask=mask, other=0.0)
    return round_bf16(before + (now - before) / (1.0 + tl.exp(-gate)))


@triton.jit
def write_entry(
    row, x_ptr, pending_ptr, before_ptr, keep_ptr, norm_ptr, cos_ptr, sin_ptr, dest_ptr,
    cache_ptr, latent_ptr,
    C, PAIRS, X_STRIDE, X_START, RECORD, NORM_EPS,
    HALF: tl.constexpr, GP: tl.constexpr, FORMAT: tl.constexpr, POOL: tl.constexpr,
    LATENT: tl.constexpr,
):  # fmt: skip
    """One row's entry: pooled, normed, turned, packed and stored."""
    wide = row.to(tl.int64)
    g, i = tl.arange(0, GP), tl.arange(0, HALF)
    at = g[:, None] * (2 * HALF) + 2 * i[None, :]
    inside = at < C
    x_ptr += wide * X_STRIDE + X_START
    if POOL:
        before = tl.load(before_ptr + row)
        if before >= 0:
            before_at = x_ptr + (before.to(tl.int64) - wide) * X_STRIDE
        else:
            before_at = pending_ptr - (before.to(tl.int64) + 1) * (2 * C)
        even = pooled(x_ptr, before_at, at, inside, C)
        odd = pooled(x_ptr, before_at, at + 1, inside, C)
        keep = tl.load(keep_ptr + row).to(tl.int64) * (2 * C)
        for part in tl.static_range(2):
            for odd_one in tl.static_range(2):
                value = tl.load(x_ptr + part * C + at + odd_one, mask=inside, other=0.0)
                target = pending_ptr + keep + part * C + at + odd_one
                tl.store(target, value, mask=inside & (keep >= 0))
    else:
        even = round_bf16(tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32))
        odd = round_bf16(tl.load(x_ptr + at + 1, mask=inside, other=0.0).to(tl.float32))
    square = tl.sum(tl.sum(even * even + odd * odd, axis=1), axis=0)
    inverse = tl.rsqrt(square / C + NORM_EPS)
    even = round_bf16(even * inverse * tl.load(norm_ptr + at, mask=inside, other=0.0))
    odd = round_bf16(odd * inverse * tl.load(norm_ptr + at + 1, mask=inside, other=0.0))
    if LATENT:
        tl.store(latent_ptr + wide * C + at, to_bf16_rne(even), mask=inside)
        tl.store(latent_ptr + wide * C + at + 1, to_bf16_rne(odd), mask=inside)
    pair = tl.where(inside, at // 2 - (C // 2 - PAIRS), -1)
    even, odd = turn_pairs(even, odd, cos_ptr + row * PAIRS, sin_ptr + row * PAIRS, pair, PAIRS)
    dest = tl.load(dest_ptr + row)
    if dest >= 0:
        pack_record(cache_ptr + dest.to(tl.int64) * RECORD, even, odd, g, i, C, HALF, FORMAT)


# ---- kernels -------------------------------------------------------------------------------


@triton.jit
def entry_kernel(
    x_ptr, pending_ptr, before_ptr, keep_ptr, norm_ptr, cos_ptr, sin_ptr, dest_ptr,
    cache_ptr, latent_ptr,
    C, PAIRS, X_STRIDE, X_START, RECORD, NORM_EPS,
    HALF: tl.constexpr, GP: tl.constexpr, FORMAT: tl.constexpr, POOL: tl.constexpr,
    LATENT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    write_entry(
        tl.program_id(0), x_ptr, pending_ptr, before_ptr, keep_ptr, norm_ptr, cos_ptr, sin_ptr,
        dest_ptr, cache_ptr, latent_ptr, C, PAIRS, X_STRIDE, X_START, RECORD, NORM_EPS,
        HALF, GP, FORMAT, POOL, LATENT,
    )  # fmt: skip


# ---- launches ------------------------------------------------------------------------------


def write_entries(
    kind: str,
    x: Tensor,
    norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    dest: Tensor,
    cache: Tensor,
    *,
    norm_eps: float,
    pending: tuple[Tensor, Tensor, Tensor] | None = None,
    latent: bool = False,
    start: int = 0,
) -> Tensor | None:
    """Norm, rotate and pack rows into `cache` (contract: ops.cache.entry).

    kind "window", "main" or "index"; x bfloat16 or float32 [R, >= start + C], its columns start..;
    norm float32 [C]; cos, sin float32 [R, P]; dest int32 [R]: row of the cache, -1 where none is
    written; cache uint8 [N, bytes]. Two rows of one call must not share a dest. `latent`: return
    the normed values before rotation, bfloat16 [R, C].

    pending (ratio 2): (ring float32 [*, 2C], before int32 [R], keep int32 [R]). x is then float32
    [R, 2C], value and gate. A row pools itself with row before[r] of x, or, below 0, with row
    -before[r] - 1 of the ring; x[r] is kept in row keep[r] of the ring (-1: nowhere).
    """
    channels, pairs = norm.shape[0], cos.shape[1]
    rows, stride = x.shape
    if kind not in _FORMATS or cache.shape[1] != record_bytes(kind, channels):
        raise ValueError(
            f"a {kind} cache of {channels} channels has records of "
            f"{record_bytes(kind, channels)} bytes, got {cache.shape}"
        )
    if (
        channels % 32
        or 2 * pairs > channels
        or stride < start + channels * (1 if pending is None else 2)
    ):
        raise ValueError(f"{channels=} (multiple of 32), {pairs=} and {x.shape=} do not fit")
    ring, before, keep = pending or (x, dest, dest)
    device = check(x, norm, cos, sin, dest, cache, ring, before, keep)
    out = torch.empty(rows, channels, dtype=torch.bfloat16, device=device) if latent else None
    half = GROUPS[kind] // 2
    launch(
        entry_kernel, (rows,),
        x, ring, before, keep, norm, cos, sin, dest, cache, cache if out is None else out,
        channels, pairs, stride, start, cache.shape[1], norm_eps,
        HALF=half, GP=next_power(channels // (2 * half)), FORMAT=_FORMATS[kind],
        POOL=pending is not None, LATENT=latent, num_warps=ENTRY_WARPS,
    )  # fmt: skip
    return out
