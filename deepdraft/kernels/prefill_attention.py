"""Sparse attention of many rows: a window of the chunk, selected packed records, a sink per head.

Contract and reference: `deepdraft.ops.prefill.running_sink_attention`. A row's keys stand in fixed
places (window by position, then the selected entries by position) and are worked some at a time
with a running maximum, as the published arithmetic does; one program holds the sums of a row's
heads, so nothing but the result is written. A row's bits depend on that row alone.

Window keys of a chunk are unpacked once, as bf16 with even channels before odd ones
(`window_values`). Main records are gathered as stored and unpacked where they are used, or, where
many rows use them, all unpacked first (`main_values`): the same values, the same bits.

Letters: R rows, H heads, C channels, W window places, K selected places, P rotary pairs.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepdraft.kernels.attention import scaled_bf16, spread, unpack_pairs
from deepdraft.kernels.cache import record_bytes, turn_pairs
from deepdraft.kernels.gemv import dot_bf16
from deepdraft.kernels.native import attend_rows as native
from deepdraft.kernels.rounding import from_e4m3, from_e8m0, round_bf16, to_bf16_rne
from deepdraft.kernels.runtime import check, launch, next_power


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """`keys` of a turn, a power of two, which is part of the numerics: probabilities are rounded
    relative to the top so far. Heads of a program, at most; warps, loads in flight."""

    keys: int = 64
    heads: int = 64
    warps: int = 8
    stages: int = 2


PLAN = AttentionPlan()


# ---- kernels -------------------------------------------------------------------------------


@triton.jit
def window_values_kernel(records_ptr, out_ptr, C: tl.constexpr, CP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, CP // 2)
    inside = i < C // 2
    records_ptr += row * (C + C // 32)
    scale = from_e8m0(tl.load(records_ptr + C + i // 16, mask=inside, other=0))
    for odd in tl.static_range(2):
        code = tl.load(records_ptr + 2 * i + odd, mask=inside, other=0)
        value = to_bf16_rne(from_e4m3(code) * scale)
        tl.store(out_ptr + row * C + odd * (C // 2) + i, value, mask=inside)


@triton.jit
def main_keys(main_ptr, row, wanted, C: tl.constexpr, CP: tl.constexpr):
    """Records of these rows int64 [N]: even and odd channels, bf16 [N, CP / 2]."""
    i, g = tl.arange(0, CP // 2), tl.arange(0, CP // 16)
    at = main_ptr + (row * (C // 2 + C // 16))[:, None]
    mask = wanted[:, None] & (i < C // 2)[None, :]
    low, high = unpack_pairs(tl.load(at + i[None, :], mask=mask, other=0))
    mask = wanted[:, None] & (g < C // 16)[None, :]
    scale = from_e4m3(tl.load(at + C // 2 + g[None, :], mask=mask, other=0))
    scale = spread(scale, 8)
    return scaled_bf16(low, scale), scaled_bf16(high, scale)


@triton.jit
def main_values_kernel(
    records_ptr, out_ptr, COUNT, C: tl.constexpr, CP: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    i = tl.arange(0, CP // 2)
    low, high = main_keys(records_ptr, row, row < COUNT, C, CP)
    here = (row < COUNT)[:, None] & (i < C // 2)[None, :]
    at = out_ptr + row[:, None] * C + i[None, :]
    tl.store(at, low, mask=here)
    tl.store(at + C // 2, high, mask=here)


@triton.jit
def turn_sums(scores, valid, top, total, SCALE):
    """One turn of keys: probabilities bf16, the new maximum and denominator, what the sums so
    far are worth now."""
    scores = tl.where(valid[None, :], scores * SCALE, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    weights = tl.exp(scores - new_top[:, None])
    share = tl.exp(top - new_top)
    return to_bf16_rne(weights), new_top, total * share + tl.sum(weights, axis=1), share


@triton.jit
def attend_kernel(  # noqa: PLR0915 one row from its queries to its result
    q_ptr, cos_ptr, sin_ptr, window_ptr, first_ptr, main_ptr, list_ptr, count_ptr, sink_ptr,
    out_ptr, H, Q_STRIDE, W, K, SCALE, FIRST_MAIN,
    C: tl.constexpr, CP: tl.constexpr, PAIRS: tl.constexpr, BH: tl.constexpr, N: tl.constexpr,
    PACKED: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    wide = row.to(tl.int64)
    h = tl.program_id(1) * BH + tl.arange(0, BH)
    i, n = tl.arange(0, CP // 2), tl.arange(0, N)
    heads, inside = h < H, i < C // 2
    there = heads[:, None] & inside[None, :]
    q_at = q_ptr + wide * Q_STRIDE + h[:, None] * C + 2 * i[None, :]
    even = tl.load(q_at, mask=there, other=0.0).to(tl.float32)
    odd = tl.load(q_at + 1, mask=there, other=0.0).to(tl.float32)
    pair = tl.where(inside, i - (C // 2 - PAIRS), -1)[None, :]
    cos_ptr += wide * PAIRS
    sin_ptr += wide * PAIRS
    even, odd = turn_pairs(even, odd, cos_ptr, sin_ptr, pair, PAIRS)
    # Through the place of the result: operands that are loaded stay in shared memory, computed
    # ones would fill the registers.
    place_of = out_ptr + wide * H * C + h[:, None] * C + i[None, :]
    tl.store(place_of, to_bf16_rne(even), mask=there)
    tl.store(place_of + C // 2, to_bf16_rne(odd), mask=there)
    tl.debug_barrier()
    q_even = tl.load(place_of, mask=there, other=0.0)
    q_odd = tl.load(place_of + C // 2, mask=there, other=0.0)

    top = tl.full((BH,), -1e30, tl.float32)
    total = tl.zeros((BH,), tl.float32)
    even_sum = tl.zeros((BH, CP // 2), tl.float32)
    odd_sum = tl.zeros((BH, CP // 2), tl.float32)
    zero = tl.zeros((BH, N), tl.float32)
    # The window: places first .. W - 1 of the W rows of `window` from `row` on.
    first = tl.load(first_ptr + row)
    for start in range(0, W, N):
        place = start + n
        valid = (place >= first) & (place < W)
        key_at = window_ptr + (wide + place)[:, None] * C + i[None, :]
        mask = valid[:, None] & inside[None, :]
        low = tl.load(key_at, mask=mask, other=0.0)
        high = tl.load(key_at + C // 2, mask=mask, other=0.0)
        scores = dot_bf16(q_odd, tl.trans(high), dot_bf16(q_even, tl.trans(low), zero))
        weights, top, total, share = turn_sums(scores, valid, top, total, SCALE)
        even_sum = dot_bf16(weights, low, even_sum * share[:, None])
        odd_sum = dot_bf16(weights, high, odd_sum * share[:, None])
    list_ptr += wide * K
    end = K
    if COUNTED:
        # A turn without an entry would change no bit.
        end = tl.minimum(tl.load(count_ptr + row), K)
    for start in range(0, end, N):
        place = start + n
        # A turn early by hand is slower: 4.88 ms where this is 4.65 (8,192 rows).
        address = tl.load(list_ptr + place, mask=place < K, other=-1)
        valid = address >= 0
        key = (tl.maximum(address, FIRST_MAIN) - FIRST_MAIN).to(tl.int64)
        if PACKED:
            low, high = main_keys(main_ptr, key, valid, C, CP)
        else:
            # Those of empty places count for nothing, so the first record does for them.
            key_at = main_ptr + key[:, None] * C + i[None, :]
            low = tl.load(key_at, mask=inside[None, :], other=0.0)
            high = tl.load(key_at + C // 2, mask=inside[None, :], other=0.0)
        scores = dot_bf16(q_odd, tl.trans(high), dot_bf16(q_even, tl.trans(low), zero))
        weights, top, total, share = turn_sums(scores, valid, top, total, SCALE)
        even_sum = dot_bf16(weights, low, even_sum * share[:, None])
        odd_sum = dot_bf16(weights, high, odd_sum * share[:, None])
    sink = tl.load(sink_ptr + h, mask=heads, other=0.0)
    highest = tl.maximum(top, sink)
    share = tl.exp(top - highest)
    share = share / (total * share + tl.exp(sink - highest))
    even, odd = round_bf16(even_sum * share[:, None]), round_bf16(odd_sum * share[:, None])
    # Turning back is turning (odd, even).
    odd, even = turn_pairs(odd, even, cos_ptr, sin_ptr, pair, PAIRS)
    tl.debug_barrier()
    both = to_bf16_rne(tl.reshape(tl.join(even, odd), (BH, CP)))
    c = tl.arange(0, CP)
    out = out_ptr + wide * H * C + h[:, None] * C + c[None, :]
    tl.store(out, both, mask=heads[:, None] & (c < C)[None, :])


# ---- launches ------------------------------------------------------------------------------


def window_values(records: Tensor) -> Tensor:
    """Window records uint8 [N, C + C/32] as bf16 [N, C], even channels before odd ones; exact."""
    device = check(records)
    channels = records.shape[1] * 32 // 33
    if records.shape[1] != record_bytes("window", channels) or channels % 32:
        raise ValueError(f"{records.shape[1]} bytes are no window record")
    out = torch.empty(records.shape[0], channels, dtype=torch.bfloat16, device=device)
    launch(
        window_values_kernel, (records.shape[0],), records, out,
        C=channels, CP=next_power(channels, 32), num_warps=1,
    )  # fmt: skip
    return out


def main_values(records: Tensor, out: Tensor) -> Tensor:
    """Main records uint8 [N, C/2 + C/16] as bf16 [N, C] at the front of `out` bfloat16 [>= N, C],
    even channels before odd ones; exact."""
    check(records, out)
    count, channels = records.shape[0], out.shape[1]
    if records.shape[1] != record_bytes("main", channels) or out.shape[0] < count:
        raise ValueError(f"{records.shape} main records do not unpack to {out.shape} values")
    launch(
        main_values_kernel, (triton.cdiv(count, 8),), records, out, count,
        C=channels, CP=next_power(channels, 32), N=8, num_warps=4,
    )  # fmt: skip
    return out[:count]


def takes_values(
    device: torch.device, heads: int, channels: int, pairs: int, places: int, plan: AttentionPlan
) -> bool:
    """Whether main records are to be unpacked first however few the rows are: the kernel that then
    works has other last bits than the one for records."""
    return native.enabled(device) and native.fits(heads, channels, pairs, places, plan.keys)


def attend_rows(
    q: Tensor,
    cos: Tensor,
    sin: Tensor,
    window: Tensor,
    first: Tensor,
    sink: Tensor,
    *,
    places: int,
    scale: float,
    main: Tensor | None = None,
    main_rows: Tensor | None = None,
    counts: Tensor | None = None,
    first_main: int = 0,
    plan: AttentionPlan = PLAN,
) -> Tensor:
    """Attention output, turned back: bfloat16 [R, H, C] (contract: ops.prefill).

    q bfloat16 [R, >= H * C] before rotation; cos, sin float32 [R, P]; window bfloat16 [>= R +
    places - 1, C] as `window_values` gives it: row r sees its rows r + first[r] .. r + places - 1;
    first int32 [R]; sink float32 [H]; main uint8 [*, C/2 + C/16] records, or bfloat16 [*, C] as
    `main_values` gives them, of which row 0 is record `first_main` (one at least: it is read for
    empty places); main_rows int32 [R, K] of records, -1 in empty places; counts int32 [R]: places
    of a row's list before the empty ones (K where it is not given).
    """
    rows, heads, channels, pairs = q.shape[0], sink.shape[0], window.shape[1], cos.shape[1]
    given = [q, cos, sin, window, first, sink]
    device = check(*given, *(t for t in (main, main_rows, counts) if t is not None))
    packed = main is not None and main.dtype == torch.uint8
    if main is not None and main.shape[1] != (
        record_bytes("main", channels) if packed else channels
    ):
        raise ValueError(f"{main.shape[1]} bytes are no main record of {channels} channels")
    if main is not None and not packed and not main.shape[0]:
        raise ValueError("unpacked main records: one at least is read, got none")
    if (main is None) != (main_rows is None) or q.shape[1] < heads * channels:
        raise ValueError(f"{q.shape=} does not hold {heads} heads of {channels} channels")
    if window.shape[0] < rows + places - 1 or first.shape != (rows,):
        raise ValueError(f"{window.shape=} and {first.shape=} do not do for {rows} rows")
    out = torch.empty(rows, heads, channels, dtype=torch.bfloat16, device=device)
    if not packed and takes_values(device, heads, channels, pairs, places, plan):
        native.attend_rows(
            q, cos, sin, window, first, sink, out, places=places, scale=scale, main=main,
            main_rows=main_rows, counts=counts, first_main=first_main,
        )  # fmt: skip
        return out
    tall = min(plan.heads, next_power(heads, 16))
    launch(
        attend_kernel, (rows, -(-heads // tall)),
        q, cos, sin, window, first, window if main is None else main,
        first if main_rows is None else main_rows, first if counts is None else counts, sink, out,
        heads, q.shape[1], places, 0 if main_rows is None else main_rows.shape[1], scale,
        first_main, C=channels, CP=next_power(channels, 32), PAIRS=pairs, BH=tall, N=plan.keys,
        PACKED=packed, COUNTED=counts is not None,
        num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
    return out
