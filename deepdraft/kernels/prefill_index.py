"""Index scores and the best entries of many rows in one pass: scores never reach memory.

Contract and references: `deepdraft.ops.index` (index_scores, select_top, select_all). A program
scores all entries for a few rows, from the first on, and appends what beats a row's bar to that
row's candidates; when they are full they are cut to the K best and the bar is the worst of those.
Entries come by position and the bar must be beaten, so equal scores go to the lower entry and a
row's set is that of a sort, whatever the tile.

Letters: R rows, H index heads, C index channels, K places of a list, B rows of a program.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepdraft.kernels.cache import record_bytes
from deepdraft.kernels.gemv import dot_bf16
from deepdraft.kernels.index import Selected, best_places, index_keys
from deepdraft.kernels.native import stream_top as native
from deepdraft.kernels.rounding import round_bf16
from deepdraft.kernels.runtime import check, launch, next_power


@dataclass(frozen=True, slots=True)
class IndexPlan:
    """`rows` of a program and `entries` scored at a time, powers of two; `turns` of the loop
    between two looks at how many candidates there are; `held`: candidates of a row, a power of two
    of at least K + `entries` * `turns`, 0: the least that is at least 4 K; `stages`: loads in
    flight."""

    rows: int = 4
    entries: int = 128
    held: int = 0
    turns: int = 8
    warps: int = 4
    stages: int = 2


PLAN = IndexPlan()


@dataclass(slots=True)
class Candidates:
    """Work space: order keys int32 and entries int32 [R, held]."""

    keys: Tensor
    entries: Tensor

    @staticmethod
    def of(rows: int, k: int, device: torch.device, plan: IndexPlan = PLAN) -> "Candidates":
        """Space for so many rows."""
        shape = (-(-rows // plan.rows) * plan.rows, held_places(k, plan))
        keys = torch.empty(shape, dtype=torch.int32, device=device)
        return Candidates(keys, torch.empty_like(keys))


def held_places(k: int, plan: IndexPlan = PLAN) -> int:
    """Candidates that a row holds."""
    return plan.held or next_power(max(4 * k, k + plan.entries * plan.turns))


# ---- device helpers ------------------------------------------------------------------------


@triton.jit
def order_keys(score):
    """uint32 in the order of the scores (the two zeros are one); 0 for -inf and NaN."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.uint32, bitcast=True)
    key = tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(score > float("-inf"), key, 0)


@triton.jit
def of_row(values, i, B: tl.constexpr):
    """values[i] of [B]."""
    return tl.sum(tl.where(tl.arange(0, B) == i, values, 0), axis=0)


@triton.jit
def held_best(key_ptr, entry_ptr, count, K, HELD: tl.constexpr):
    """A row's candidates: keys (0 beyond the last), entries, which are the K best, their ranks."""
    place = tl.arange(0, HELD)
    there = place < count
    key = tl.load(key_ptr + place, mask=there, other=0).to(tl.uint32, bitcast=True)
    entry = tl.load(entry_ptr + place, mask=there, other=0)
    take, rank = best_places(key, K)
    return key, entry, take, rank


# ---- kernels -------------------------------------------------------------------------------


@triton.jit
def key_values_kernel(
    records_ptr, out_ptr, COUNT, C: tl.constexpr, CP: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    pair = tl.arange(0, CP // 2)
    low, high = index_keys(records_ptr, row * (C // 2 + C // 32), row < COUNT, C, CP)
    here = (row < COUNT)[:, None] & (pair < C // 2)[None, :]
    at = out_ptr + row[:, None] * C + pair[None, :]
    tl.store(at, low, mask=here)
    tl.store(at + C // 2, high, mask=here)


@triton.jit
def stream_top_kernel(  # noqa: PLR0915 one pass over the entries
    q_ptr, weight_ptr, keys_ptr, base_ptr, reach_ptr, held_key_ptr, held_entry_ptr,
    entries_ptr, address_ptr, count_ptr,
    R, H, W_STRIDE, W_START, W_SCALE, SKIP, K,
    C: tl.constexpr, CP: tl.constexpr, HP: tl.constexpr, B: tl.constexpr, N: tl.constexpr,
    HELD: tl.constexpr, KP: tl.constexpr, PACKED: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    row0 = tl.program_id(0) * B
    b = tl.arange(0, B)
    row = row0 + b
    reach = tl.load(reach_ptr + row, mask=row < R, other=0)
    base = tl.load(base_ptr + row0).to(tl.int64)  # the rows of one launch are one sequence's
    held = row.to(tl.int64) * HELD
    # Queries of all rows and heads are one operand: column b * HP + h.
    column, pair = tl.arange(0, B * HP), tl.arange(0, CP // 2)
    q_row, h = row0 + column // HP, column % HP
    wanted = ((q_row < R) & (h < H))[None, :] & (pair < C // 2)[:, None]
    q_at = (q_row.to(tl.int64) * H + h)[None, :] * C + 2 * pair[:, None]
    q_even = tl.load(q_ptr + q_at, mask=wanted, other=0.0)
    q_odd = tl.load(q_ptr + q_at + 1, mask=wanted, other=0.0)
    w_at = q_row.to(tl.int64) * W_STRIDE + W_START + h
    raw = tl.load(weight_ptr + w_at, mask=(q_row < R) & (h < H), other=0.0)
    weight = round_bf16(round_bf16(raw.to(tl.float32)) * W_SCALE)

    count = tl.zeros((B,), tl.int32)
    bar = tl.zeros((B,), tl.uint32)
    end = tl.max(reach, axis=0)
    for part in range(0, end, TURNS * N):
        # No branch with a loop in here, or nothing would be loaded ahead.
        for start in range(part, tl.minimum(part + TURNS * N, end), N):
            entry = start + tl.arange(0, N)
            if PACKED:
                at = (base + entry) * (C // 2 + C // 32)
                low, high = index_keys(keys_ptr, at, entry < end, C, CP)
            else:
                at = tl.minimum(entry, end - 1).to(tl.int64)[:, None] * C + pair[None, :]
                low = tl.load(keys_ptr + at, mask=(pair < C // 2)[None, :], other=0.0)
                high = tl.load(keys_ptr + at + C // 2, mask=(pair < C // 2)[None, :], other=0.0)
            dots = dot_bf16(low, q_even, tl.zeros((N, B * HP), tl.float32))
            dots = dot_bf16(high, q_odd, dots)
            parts = tl.reshape(tl.maximum(dots, 0.0) * weight[None, :], (N, B, HP))
            key = order_keys(tl.sum(parts, axis=2))
            # Few enough to be all taken: whatever their scores.
            key = tl.where((reach <= SKIP)[None, :], 1, key)
            key = tl.where(entry[:, None] < reach[None, :], key, 0)
            take = key > bar[None, :]
            found = take.to(tl.int32)
            if tl.max(tl.max(found, axis=1), axis=0) > 0:
                place = held[None, :] + count[None, :] + tl.cumsum(found, axis=0) - 1
                tl.store(held_key_ptr + place, key.to(tl.int32, bitcast=True), mask=take)
                where = tl.broadcast_to(entry[:, None], (N, B))
                tl.store(held_entry_ptr + place, where, mask=take)
                count += tl.sum(found, axis=0)
        if tl.max(count, axis=0) > HELD - TURNS * N:
            tl.debug_barrier()
            for i in range(B):
                have = of_row(count, i, B)
                if have > HELD - TURNS * N:
                    own = (row0 + i).to(tl.int64) * HELD
                    kept, entry_of, best, rank = held_best(
                        held_key_ptr + own, held_entry_ptr + own, have, K, HELD
                    )
                    worst = tl.min(tl.where(best, kept, 0xFFFFFFFF), axis=0)
                    tl.debug_barrier()
                    kept = kept.to(tl.int32, bitcast=True)
                    tl.store(held_key_ptr + own + rank, kept, mask=best)
                    tl.store(held_entry_ptr + own + rank, entry_of, mask=best)
                    count = tl.where(b == i, K, count)
                    bar = tl.where(b == i, worst, bar)
                    tl.debug_barrier()
    tl.debug_barrier()
    k = tl.arange(0, KP)
    for i in range(B):
        if row0 + i < R:
            own = (row0 + i).to(tl.int64)
            have = of_row(count, i, B)
            _, entry_of, best, rank = held_best(
                held_key_ptr + own * HELD, held_entry_ptr + own * HELD, have, K, HELD
            )
            total = tl.minimum(have, K)
            tl.store(count_ptr + own, total)
            none, fill = tl.full((KP,), -1, tl.int32), (k >= total) & (k < K)
            tl.store(entries_ptr + own * K + k, none, mask=fill)
            tl.store(address_ptr + own * K + k, none, mask=fill)
            tl.store(entries_ptr + own * K + rank, entry_of, mask=best)
            tl.store(address_ptr + own * K + rank, entry_of + base.to(tl.int32), mask=best)


# ---- launches ------------------------------------------------------------------------------


def key_values(records: Tensor, out: Tensor) -> Tensor:
    """Index keys uint8 [N, C/2 + C/32] as bf16 [N, C] at the front of `out` bfloat16 [>= N, C],
    even channels before odd ones; exact."""
    check(records, out)
    count, channels = records.shape[0], out.shape[1]
    if records.shape[1] != record_bytes("index", channels) or out.shape[0] < count:
        raise ValueError(f"{records.shape} index records do not unpack to {out.shape} values")
    launch(
        key_values_kernel, (triton.cdiv(count, 32),), records, out, count,
        C=channels, CP=next_power(channels, 32), N=32, num_warps=4,
    )  # fmt: skip
    return out[:count]


def reads_records(device: torch.device, heads: int, channels: int) -> bool:
    """Whether `stream_top` is faster on records than on keys that were unpacked first."""
    return native.enabled(device) and native.fits(heads, channels)


def stream_top(
    queries: Tensor,
    raw_weights: Tensor,
    keys: Tensor,
    base: Tensor,
    reach: Tensor,
    k: int,
    *,
    weight_scale: float,
    weight_start: int = 0,
    skip: int = 0,
    held: Candidates | None = None,
    plan: IndexPlan = PLAN,
) -> Selected:
    """The k best reachable entries of each row, ascending (contract: ops.index.select_top of
    index_scores).

    queries bfloat16 [R, H, C] as `index.index_queries` makes them; raw_weights float32 or bfloat16
    [R, *], columns weight_start..+H, rounded, scaled and rounded again; keys uint8 [*, C/2 + C/32]
    records, or bfloat16 [*, C] of this sequence as `key_values` gives them; base int32 [R]: row of
    the sequence's first entry, the same in all rows; reach int32 [R]. A row whose reach is at most
    `skip` (at most k) takes every entry. `held`: work space for as many rows; made here where it
    is not given.
    """
    rows, heads, channels = queries.shape
    packed = keys.dtype == torch.uint8
    if keys.shape[1] != (record_bytes("index", channels) if packed else channels):
        raise ValueError(f"{keys.shape[1]} bytes are no index record of {channels} channels")
    if skip > k:
        raise ValueError(f"{skip=} entries do not fit {k} places")
    device = check(queries, raw_weights, keys, base, reach)
    entries = torch.empty(rows, k, dtype=torch.int32, device=device)
    address, counts = torch.empty_like(entries), torch.empty_like(reach)
    if packed and k <= native.MOST and reads_records(device, heads, channels):
        native.stream_top(
            queries, raw_weights, keys, base, reach, entries, address, counts,
            weight_scale=weight_scale, weight_start=weight_start, skip=skip,
        )  # fmt: skip
        return Selected(entries, address, counts)
    space = Candidates.of(rows, k, device, plan) if held is None else held
    places = held_places(k, plan)
    least = k + plan.entries * plan.turns
    if places < least or space.keys.shape[1] != places:
        raise ValueError(f"{space.keys.shape} candidates; {least} must fit {places}")
    if space.keys.shape[0] < -(-rows // plan.rows) * plan.rows:
        raise ValueError(f"candidates of {space.keys.shape[0]} rows do not do for {rows}")
    launch(
        stream_top_kernel, (-(-rows // plan.rows),),
        queries, raw_weights, keys, base, reach, space.keys, space.entries,
        entries, address, counts,
        rows, heads, raw_weights.shape[1], weight_start, weight_scale, skip, k,
        C=channels, CP=next_power(channels, 32), HP=next_power(heads, 16), B=plan.rows,
        N=plan.entries, HELD=places, KP=next_power(k), PACKED=packed, TURNS=plan.turns,
        num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
    return Selected(entries, address, counts)
