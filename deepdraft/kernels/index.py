"""The indexer of a decode step: queries, scores, candidate blocks, the best entries of a row.

Contracts and references: `deepdraft.ops.index` (index_scores, candidate_blocks, select_top,
select_all). A selected set is a function of the row alone: scores have no order of arrival, integer
counts do not depend on it, and equal scores go to the lower entry. Lengths are read from memory,
so a captured graph serves every context; programs beyond a row's reach leave at once.

Letters: R rows, H index heads, C index channels, P rotary pairs, N positions that are scored, K
places of a list.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepdraft.kernels.attention import scaled_bf16, spread, unpack_pairs
from deepdraft.kernels.cache import record_bytes, turn_pairs
from deepdraft.kernels.gemv import dot_bf16
from deepdraft.kernels.index_scores import score_rows
from deepdraft.kernels.native import scores as native_scores
from deepdraft.kernels.native import select as native
from deepdraft.kernels.rounding import (
    E2M1_CARRY,
    INDEX_FLOOR,
    from_e2m1,
    from_e8m0,
    inverse_of,
    round_bf16,
    scale_bits,
    to_bf16_rne,
    to_e2m1_rne,
)
from deepdraft.kernels.runtime import check, launch, next_power, wait_for_inputs

_SCORE_TILE = 128
SELECT_TILE = 8192
"""Scores that one program of a selection looks at."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Candidate blocks of entries: `numbers` int32 [R, keep], ascending, -1 in empty places;
    `counts` int32 [R]; entries per block."""

    numbers: Tensor
    counts: Tensor
    size: int


@dataclass(frozen=True, slots=True)
class Selected:
    """`entries` int32 [R, K], ascending, -1 in empty places; `address`: the same plus each row's
    base, rows of the cache; `counts` int32 [R]."""

    entries: Tensor
    address: Tensor
    counts: Tensor


# ---- queries and scores --------------------------------------------------------------------


@triton.jit
def query_kernel(
    q_ptr, cos_ptr, sin_ptr, out_ptr, Q_STRIDE, Q_START, H,
    C: tl.constexpr, PAIRS: tl.constexpr, GP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    head, row = tl.program_id(0), tl.program_id(1)
    g, i = tl.arange(0, GP), tl.arange(0, 16)
    at = g[:, None] * 32 + 2 * i[None, :]
    inside = at < C
    q_ptr += row.to(tl.int64) * Q_STRIDE + Q_START + head * C
    even = tl.load(q_ptr + at, mask=inside, other=0.0).to(tl.float32)
    odd = tl.load(q_ptr + at + 1, mask=inside, other=0.0).to(tl.float32)
    pair = tl.where(inside, at // 2 - (C // 2 - PAIRS), -1)
    even, odd = turn_pairs(even, odd, cos_ptr + row * PAIRS, sin_ptr + row * PAIRS, pair, PAIRS)
    amax = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), axis=1)
    bits = scale_bits(amax, INDEX_FLOOR, E2M1_CARRY)
    scale, inverse = bits.to(tl.float32, bitcast=True)[:, None], inverse_of(bits)[:, None]
    out_ptr += (row * H + head).to(tl.int64) * C
    even = from_e2m1(to_e2m1_rne(even * inverse)) * scale
    odd = from_e2m1(to_e2m1_rne(odd * inverse)) * scale
    tl.store(out_ptr + at, to_bf16_rne(even), mask=inside)
    tl.store(out_ptr + at + 1, to_bf16_rne(odd), mask=inside)


@triton.jit
def index_keys(cache_ptr, at, wanted, C: tl.constexpr, CP: tl.constexpr):
    """Index keys that start at byte `at`: even and odd channels, bf16 [N, CP / 2], 0 beyond C."""
    pair, g = tl.arange(0, CP // 2)[None, :], tl.arange(0, CP // 32)[None, :]
    here = wanted[:, None] & (pair < C // 2)
    low, high = unpack_pairs(tl.load(cache_ptr + at[:, None] + pair, mask=here, other=0))
    here = wanted[:, None] & (g < C // 32)
    scale = from_e8m0(tl.load(cache_ptr + at[:, None] + C // 2 + g, mask=here, other=1))
    scale = spread(scale, 16)
    return scaled_bf16(low, scale), scaled_bf16(high, scale)


@triton.jit
def row_scores(
    q_ptr, weight_ptr, row, low, high, H, W_STRIDE, W_START, W_SCALE,
    C: tl.constexpr, CP: tl.constexpr, HP: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Scores of one row for N keys: fp32 [N]."""
    h, c = tl.arange(0, HP), tl.arange(0, CP)
    wanted = (h < H)[:, None] & (c < C)[None, :]
    q = tl.load(q_ptr + (row * H + h)[:, None] * C + c[None, :], mask=wanted, other=0.0)
    even, odd = tl.split(tl.reshape(q, (HP, CP // 2, 2)))
    dots = dot_bf16(even, tl.trans(low), tl.zeros((HP, N), tl.float32))
    dots = dot_bf16(odd, tl.trans(high), dots)
    raw = tl.load(weight_ptr + row * W_STRIDE + W_START + h, mask=h < H, other=0.0)
    weight = round_bf16(round_bf16(raw.to(tl.float32)) * W_SCALE)
    return tl.sum(tl.maximum(dots, 0.0) * weight[:, None], axis=0)


@triton.jit
def score_blocks_kernel(
    q_ptr, weight_ptr, keys_ptr, base_ptr, reach_ptr, block_ptr, count_ptr, scores_ptr,
    H, CAPACITY, W_STRIDE, W_START, W_SCALE, SKIP, KEEP,
    C: tl.constexpr, CP: tl.constexpr, HP: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A tile of one row's candidate blocks."""
    wait_for_inputs(PDL)
    tile, row = tl.program_id(0), tl.program_id(1)
    reach = tl.load(reach_ptr + row)
    length = tl.load(count_ptr + row) * BLOCK
    if reach <= SKIP or tile * N >= length:
        return
    place = tile * N + tl.arange(0, N)
    block = tl.load(block_ptr + row * KEEP + place // BLOCK, mask=place < length, other=0)
    entry = block * BLOCK + place % BLOCK
    valid = (place < length) & (entry < reach)
    at = (tl.load(base_ptr + row) + entry).to(tl.int64) * (C // 2 + C // 32)
    low, high = index_keys(keys_ptr, at, valid, C, CP)
    score = row_scores(
        q_ptr, weight_ptr, row, low, high, H, W_STRIDE, W_START, W_SCALE, C, CP, HP, N
    )
    score = tl.where(valid, score, float("-inf"))
    tl.store(scores_ptr + row.to(tl.int64) * CAPACITY + place, score, mask=place < length)


@triton.jit
def block_best_kernel(
    scores_ptr, reach_ptr, best_ptr, CAPACITY, BLOCKS, SKIP, BLOCK,
    BP: tl.constexpr, N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    row, tile = tl.program_id(0), tl.program_id(1)
    reach = tl.load(reach_ptr + row)
    if reach <= SKIP or tile * N * BLOCK >= reach:
        return
    block, i = tile * N + tl.arange(0, N), tl.arange(0, BP)
    entry = block[:, None] * BLOCK + i[None, :]
    inside = (i < BLOCK)[None, :] & (entry < reach)
    at = scores_ptr + row.to(tl.int64) * CAPACITY + entry
    best = tl.max(tl.load(at, mask=inside, other=float("-inf")), axis=1)
    best = tl.where(block == (reach - 1) // BLOCK, float("inf"), best)
    tl.store(best_ptr + row.to(tl.int64) * BLOCKS + block, best, mask=block * BLOCK < reach)


# ---- selection -----------------------------------------------------------------------------
# A program holds one tile of a row's scores, finds the K-th best by its bits, two at a time, and
# takes what is above it, and of those equal to it as many as are missing, from the front. Of
# several tiles each gives its K best to a further tile, until one tile is left.


@triton.jit
def score_keys(scores_ptr, place, length):
    """Integers in the order of the scores (the two zeros are one), 0 in places without one."""
    score = tl.load(scores_ptr + place, mask=place < length, other=float("-inf"))
    bits = tl.where(score == 0.0, 0.0, score).to(tl.uint32, bitcast=True)
    key = tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(score > float("-inf"), key, 0), score


@triton.jit
def best_places(key, K):
    """Which of key [N] are the K best, and the rank of each among them from the front."""
    prefix, unit = tl.cast(0, tl.uint32), tl.cast(1 << 30, tl.uint32)
    for _ in range(16):
        # Three counts in one sum.
        found = (key >= prefix + unit).to(tl.int64)
        found += (key >= prefix + 2 * unit).to(tl.int64) << 20
        found += (key >= prefix + 3 * unit).to(tl.int64) << 40
        counts = tl.sum(found, axis=0)
        enough = (counts >> 40 >= K).to(tl.uint32) + (((counts >> 20) & 0xFFFFF) >= K).to(tl.uint32)
        enough += ((counts & 0xFFFFF) >= K).to(tl.uint32)
        prefix += enough * unit
        unit = unit >> 2
    above = key > prefix
    equal = (key == prefix) & (key > 0)
    missing = K - tl.sum(above.to(tl.int32), axis=0)
    # Two running counts in one.
    counted = above.to(tl.int32) + (equal.to(tl.int32) << 16)
    before = tl.cumsum(counted, axis=0) - counted
    above_before, equal_before = before & 0xFFFF, before >> 16
    take = above | (equal & (equal_before < missing))
    return take, above_before + tl.minimum(equal_before, missing)


@triton.jit
def row_length(length_ptr, row, MUL, DIV):
    return (tl.load(length_ptr + row) * MUL + DIV - 1) // DIV


@triton.jit
def narrow_kernel(
    scores_ptr, entry_ptr, reach_ptr, length_ptr, best_ptr, best_entry_ptr,
    CAPACITY, K, SKIP, MUL, DIV,
    FIRST: tl.constexpr, KP: tl.constexpr, N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The K best of every tile: scores and places (of the first level), -inf where there are
    fewer."""
    wait_for_inputs(PDL)
    row, tile = tl.program_id(0), tl.program_id(1)
    if tl.load(reach_ptr + row) <= SKIP:
        return
    length = CAPACITY
    if FIRST:
        length = row_length(length_ptr, row, MUL, DIV)
    place = tile * N + tl.arange(0, N)
    out = (row.to(tl.int64) * tl.num_programs(1) + tile) * K
    k = tl.arange(0, KP)
    if tile * N >= length:
        tl.store(best_ptr + out + k, tl.full((KP,), float("-inf"), tl.float32), mask=k < K)
        return
    key, score = score_keys(scores_ptr + row.to(tl.int64) * CAPACITY, place, length)
    take, rank = best_places(key, K)
    total = tl.sum(take.to(tl.int32), axis=0)
    fill = (k < K) & (k >= total)
    tl.store(best_ptr + out + k, tl.full((KP,), float("-inf"), tl.float32), mask=fill)
    entry = place
    if not FIRST:
        entry = tl.load(entry_ptr + row.to(tl.int64) * CAPACITY + place, mask=take, other=0)
    tl.store(best_ptr + out + rank, score, mask=take)
    tl.store(best_entry_ptr + out + rank, entry, mask=take)


@triton.jit
def select_kernel(
    scores_ptr, entry_ptr, reach_ptr, length_ptr, block_ptr, base_ptr,
    entries_ptr, address_ptr, count_ptr,
    CAPACITY, K, SKIP, MUL, DIV, KEEP,
    FIRST: tl.constexpr, BLOCK: tl.constexpr, KP: tl.constexpr, N: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The K best of one tile, as entries of the row."""
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    reach, base = tl.load(reach_ptr + row), tl.load(base_ptr + row)
    length = row_length(length_ptr, row, MUL, DIV)
    entries_ptr += row * K
    address_ptr += row * K
    k = tl.arange(0, KP)
    if reach <= SKIP:
        total = tl.minimum(length if BLOCK == 0 else reach, K)
        tl.store(count_ptr + row, total)
        entry = tl.where(k < total, k, -1)
        tl.store(entries_ptr + k, entry, mask=k < K)
        tl.store(address_ptr + k, tl.where(entry >= 0, entry + base, -1), mask=k < K)
        return
    place = tl.arange(0, N)
    key, _ = score_keys(
        scores_ptr + row.to(tl.int64) * CAPACITY, place, length if FIRST else CAPACITY
    )
    take, rank = best_places(key, K)
    total = tl.sum(take.to(tl.int32), axis=0)
    tl.store(count_ptr + row, total)
    fill, none = (k < K) & (k >= total), tl.full((KP,), -1, tl.int32)
    tl.store(entries_ptr + k, none, mask=fill)
    tl.store(address_ptr + k, none, mask=fill)
    entry = place
    if not FIRST:
        entry = tl.load(entry_ptr + row.to(tl.int64) * CAPACITY + place, mask=take, other=0)
    if BLOCK > 0:
        block = tl.load(block_ptr + row * KEEP + entry // BLOCK, mask=take, other=0)
        entry = block * BLOCK + entry % BLOCK
    tl.store(entries_ptr + rank, entry, mask=take)
    tl.store(address_ptr + rank, entry + base, mask=take)


# ---- launches ------------------------------------------------------------------------------


def index_queries(
    q: Tensor, cos: Tensor, sin: Tensor, *, heads: int, channels: int, start: int = 0
) -> Tensor:
    """Columns start.. of q bfloat16 [R, *], turned and rounded to MXFP4: bfloat16 [R, H, C].

    The reference: `simulate.fake_mxfp4_group32` of the rotated, bf16-rounded queries.
    """
    device = check(q, cos, sin)
    rows, width = q.shape
    if start + heads * channels > width or channels % 32 or 2 * cos.shape[1] > channels:
        raise ValueError(f"{q.shape} has no {heads} heads of {channels} channels from {start}")
    out = torch.empty(rows, heads, channels, dtype=torch.bfloat16, device=device)
    launch(
        query_kernel, (heads, rows), q, cos, sin, out, width, start, heads,
        C=channels, PAIRS=cos.shape[1], GP=next_power(channels // 32), num_warps=1,
    )  # fmt: skip
    return out


def best_space(
    rows: int, capacity: int, heads: int, channels: int, device: torch.device
) -> Tensor | None:
    """Room for the best score of every 32 entries, float32 [R, capacity / 32]: `index_scores` fills
    it and the selections read it, where rows are too long for one look at each score; else None."""
    on = native.enabled(device) and native_scores.enabled(device)
    if not on or capacity <= native.MOST or not native_scores.fits(heads, channels):
        return None
    groups = -(-capacity // native_scores.GROUP)
    if groups > native.MOST:
        return None
    return torch.empty(rows, groups, dtype=torch.float32, device=device)


def index_scores(
    queries: Tensor,
    raw_weights: Tensor,
    keys: Tensor,
    base: Tensor,
    reach: Tensor,
    *,
    capacity: int,
    weight_scale: float,
    weight_start: int = 0,
    skip: int = 0,
    blocks: Blocks | None = None,
    best: Tensor | None = None,
) -> Tensor:
    """Scores float32 [R, capacity] (contract: ops.index.index_scores).

    queries bfloat16 [R, H, C]; raw_weights float32 or bfloat16 [R, *], columns weight_start..+H,
    rounded, scaled and rounded again; keys uint8 [*, C/2 + C/32]; base int32 [R]: row of each
    sequence's first entry; reach int32 [R]. Only positions below the reach are written, none for a
    reach of at most `skip`. With `blocks` position p stands for entry p % size of block p // size
    of the row's list, and capacity is theirs. best: as `best_space` gives it, without blocks.
    """
    rows, heads, channels = queries.shape
    given = (queries, raw_weights, keys, base, reach)
    device = check(*given, *(() if blocks is None else (blocks.numbers, blocks.counts)))
    if keys.shape[1] != record_bytes("index", channels):
        raise ValueError(f"{keys.shape[1]} bytes are no index record of {channels} channels")
    keep = 0 if blocks is None else blocks.numbers.shape[1]
    if blocks is not None and capacity < keep * blocks.size:
        raise ValueError(f"{capacity=} is less than {keep} blocks of {blocks.size} entries")
    weights: dict[str, Any] = {"weight_start": weight_start, "weight_scale": weight_scale}
    native_fits = native_scores.enabled(device) and native_scores.fits(heads, channels)
    if best is not None and (blocks is not None or not native_fits):
        raise ValueError("the best of every 32 entries are made with all scores of a row only")
    if blocks is None and not native_fits:
        return score_rows(*given, capacity=capacity, skip=skip, **weights)
    scores = torch.empty(rows, capacity, dtype=torch.float32, device=device)
    if blocks is None:
        native_scores.score(*given, scores, best, skip=skip, **weights)
        return scores
    launch(
        score_blocks_kernel, (-(-capacity // _SCORE_TILE), rows),
        queries, raw_weights, keys, base, reach, blocks.numbers, blocks.counts, scores,
        heads, capacity, raw_weights.shape[1], weight_start, weight_scale, skip, keep,
        C=channels, CP=next_power(channels, 32), HP=next_power(heads, 16), BLOCK=blocks.size,
        N=_SCORE_TILE, num_warps=8,
    )  # fmt: skip
    return scores


def candidate_blocks(
    scores: Tensor,
    reach: Tensor,
    *,
    block: int,
    keep: int,
    skip: int,
    tile: int = SELECT_TILE,
    best: Tensor | None = None,
) -> Blocks:
    """The blocks that stay (contract: ops.index.candidate_blocks): scores float32 [R, N], reach
    int32 [R]; best: what `index_scores` filled. A row whose reach is at most `skip` keeps all; its
    scores are not read."""
    device = check(scores, reach)
    rows, capacity = scores.shape
    if skip > block * keep:
        raise ValueError(f"{keep} blocks of {block} do not hold {skip=} entries")
    if best is not None and native_scores.GROUP % block == 0:
        found = _select_grouped(scores, best, reach, reach, keep, skip=skip, block=block)
        return Blocks(found.entries, found.counts, block)
    total = -(-capacity // block)
    of_blocks = torch.empty(rows, total, dtype=torch.float32, device=device)
    side = next_power(block)
    per_program = max(1, 2048 // side)
    launch(
        block_best_kernel, (rows, -(-total // per_program)),
        scores, reach, of_blocks, capacity, total, skip, block, BP=side, N=per_program,
    )  # fmt: skip
    found = _select(of_blocks, reach, reach, keep, skip=skip, div=block, tile=tile)
    return Blocks(found.entries, found.counts, block)


def select_top(
    scores: Tensor,
    base: Tensor,
    reach: Tensor,
    k: int,
    *,
    skip: int,
    blocks: Blocks | None = None,
    tile: int = SELECT_TILE,
    best: Tensor | None = None,
) -> Selected:
    """The k best reachable entries of each row, ascending (contract: ops.index.select_top).

    scores float32 [R, N] as `index_scores` gives them, with the same blocks; best: what it filled.
    A row whose reach is at most `skip` (at most k) takes every entry; its scores are not read.
    """
    if skip > k:
        raise ValueError(f"{skip=} entries do not fit {k} places")
    if best is not None and blocks is None:
        return _select_grouped(scores, best, reach, base, k, skip=skip)
    length, mul = (reach, 1) if blocks is None else (blocks.counts, blocks.size)
    return _select(
        scores, reach, length, k, skip=skip, mul=mul, base=base, blocks=blocks, tile=tile
    )


def _select_grouped(
    scores: Tensor, best: Tensor, reach: Tensor, base: Tensor, k: int, *, skip: int, block: int = 0
) -> Selected:
    """By two levels: the K best lie in the K groups of 32 entries with the best scores. block: the
    best blocks of so many entries instead, the newest one among them; 0: entries."""
    check(scores, best, reach, base)
    group = native_scores.GROUP
    groups, found = (_room(scores.shape[0], k, scores.device) for _ in range(2))
    native.select(
        best, reach, reach, base, groups.entries, groups.address, groups.counts,
        skip=skip, mul=1, div=group, blocks=None, newest=block > 0,
    )  # fmt: skip
    each = max(block, 1)
    native.select(
        scores, reach, groups.counts, base, found.entries, found.address, found.counts,
        skip=skip, mul=group // each, div=1, blocks=(groups.entries, group // each),
        gather=each, newest=block > 0,
    )  # fmt: skip
    return found


def _room(rows: int, k: int, device: torch.device) -> Selected:
    entries = torch.empty(rows, k, dtype=torch.int32, device=device)
    counts = torch.empty(rows, dtype=torch.int32, device=device)
    return Selected(entries, torch.empty_like(entries), counts)


def _select(
    scores: Tensor,
    reach: Tensor,
    length: Tensor,
    k: int,
    *,
    skip: int,
    mul: int = 1,
    div: int = 1,
    base: Tensor | None = None,
    blocks: Blocks | None = None,
    tile: int,
) -> Selected:
    """length: int32 [R]; (length * mul) / div, rounded up, scores of a row count."""
    device = check(scores, reach, length)
    rows, capacity = scores.shape
    found = _room(rows, k, device)
    entries, address, taken = found.entries, found.address, found.counts
    if native.enabled(device) and capacity <= native.MOST:
        native.select(
            scores, reach, length, reach if base is None else base, entries, address, taken,
            skip=skip, mul=mul, div=div,
            blocks=None if blocks is None else (blocks.numbers, blocks.size),
        )  # fmt: skip
        return found
    tile = max(tile, 2 * next_power(k))
    sizes, first, places = (k, skip, mul, div), True, entries
    while capacity > tile:
        tiles = -(-capacity // tile)
        best = torch.empty(rows, tiles * k, dtype=torch.float32, device=device)
        best_places = torch.empty(rows, tiles * k, dtype=torch.int32, device=device)
        launch(
            narrow_kernel, (rows, tiles), scores, places, reach, length, best, best_places,
            capacity, *sizes,
            FIRST=first, KP=next_power(k), N=tile, num_warps=max(1, min(32, tile // 512)),
        )  # fmt: skip
        scores, places, capacity, first = best, best_places, tiles * k, False
    side = next_power(capacity, 32)
    launch(
        select_kernel, (rows,), scores, places, reach, length,
        length if blocks is None else blocks.numbers, reach if base is None else base,
        entries, address, taken, capacity, *sizes, 0 if blocks is None else blocks.numbers.shape[1],
        FIRST=first, BLOCK=0 if blocks is None else blocks.size, KP=next_power(k), N=side,
        num_warps=max(1, min(32, side // 512)),
    )  # fmt: skip
    return found
