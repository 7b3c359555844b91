"""What the rows of a device step need before the first layer: addresses, tables, embeddings.

Contract and reference: `deepdraft.models.csa.StepRows` (addresses and rotary tables), `ops.
engram_hash.hash_rows` (table rows), the models' embedding and taps. One program a row, everything
read from memory, so a captured graph serves every length. A row at position -1 does not count: its
writes go nowhere and its lists are empty.

Letters: R rows, W window places, P rotary pairs, S streams, D hidden, L Engram layers, N the
longest n-gram, H hash heads.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepdraft.kernels.rounding import to_bf16_rne
from deepdraft.kernels.runtime import check, launch, next_power, wait_for_inputs

_BLOCK = 1024
PLAN = ("window", "before", "keep", "reach1", "reach2", "base1", "base2", "entry1", "entry2")
"""Rows of a plan int32 [9, R]. window: row of the rings that this row writes; before, keep: its
neighbour and its place in the pending ring (`cache.write_entries`); per ratio 1 and 2: reachable
entries, the sequence's first entry, the entry that this row completes. -1: none."""


# ---- kernels -------------------------------------------------------------------------------


@triton.jit
def place_kernel(
    ids_ptr, position_ptr, slot_ptr, floor_ptr, tokens_ptr, turns_ptr,
    plan_ptr, list_ptr, angle_ptr,
    R, W, RING, PENDING, ENTRIES_1, ENTRIES_2, CONTEXT,
    WP: tl.constexpr, P: tl.constexpr, PP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    position = tl.load(position_ptr + row)
    live = position >= 0
    at = tl.maximum(position, 0)
    slot = tl.maximum(tl.load(slot_ptr + row), 0)
    tl.store(tokens_ptr + slot.to(tl.int64) * CONTEXT + at, tl.load(ids_ptr + row), mask=live)

    tl.store(plan_ptr + row, tl.where(live, slot * RING + at % RING, -1))
    last = tl.maximum(row - 1, 0)
    follows = live & (row > 0) & (tl.load(slot_ptr + last) == slot)
    follows = follows & (tl.load(position_ptr + last) == position - 1)
    stored = slot * PENDING + (at + PENDING - 1) % PENDING
    tl.store(plan_ptr + R + row, tl.where(follows, last, -stored - 1))
    tl.store(plan_ptr + 2 * R + row, tl.where(live, slot * PENDING + at % PENDING, -1))
    pairs = (position + 1) // 2
    tl.store(plan_ptr + 3 * R + row, position + 1)
    tl.store(plan_ptr + 4 * R + row, pairs)
    tl.store(plan_ptr + 5 * R + row, slot * ENTRIES_1)
    tl.store(plan_ptr + 6 * R + row, slot * ENTRIES_2)
    tl.store(plan_ptr + 7 * R + row, tl.where(live, slot * ENTRIES_1 + position, -1))
    closes = live & (position % 2 == 1)
    tl.store(plan_ptr + 8 * R + row, tl.where(closes, slot * ENTRIES_2 + pairs - 1, -1))

    w = tl.arange(0, WP)
    seen = at - (W - 1) + w
    for part in tl.static_range(2):
        floor = tl.maximum(tl.load(floor_ptr + slot * 3 + part), 0)
        where = tl.where(live & (seen >= floor), slot * RING + (seen + RING) % RING, -1)
        tl.store(list_ptr + (part * R + row) * W + w, where, mask=w < W)
    p = tl.arange(0, PP)
    for table in tl.static_range(6):
        source = at if table < 4 else tl.maximum(at - 1, 0)
        kind = table if table < 4 else table - 2
        turn = tl.load(turns_ptr + (source.to(tl.int64) * 4 + kind) * P + p, mask=p < P)
        tl.store(angle_ptr + (table * R + row) * P + p, turn, mask=p < P)


@triton.jit
def draft_place_kernel(
    position_ptr, slot_ptr, floor_ptr, turns_ptr, plan_ptr, list_ptr, angle_ptr,
    R, W, B, RING, PLACES, PP: tl.constexpr, P: tl.constexpr, LP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    position = tl.load(position_ptr + row)
    live = position >= 0
    at = tl.maximum(position, 0)
    slot = tl.maximum(tl.load(slot_ptr + row), 0)
    tl.store(plan_ptr + row, tl.where(live, slot * RING + at % RING, -1))
    # The window before the block, then the whole block: all rows of a block see the same.
    start = at - row % B
    place = tl.arange(0, LP)
    seen = start - W + place
    floor = tl.maximum(tl.load(floor_ptr + slot * 3 + 2), 0)
    where = tl.where(live & (seen >= floor), slot * RING + (seen + RING) % RING, -1)
    tl.store(list_ptr + row * PLACES + place, where, mask=place < PLACES)
    p = tl.arange(0, PP)
    for table in tl.static_range(2):
        turn = tl.load(turns_ptr + (at.to(tl.int64) * 4 + table) * P + p, mask=p < P)
        tl.store(angle_ptr + (table * R + row) * P + p, turn, mask=p < P)


@triton.jit
def engram_rows_kernel(
    tokens_ptr, position_ptr, slot_ptr, map_ptr, factor_ptr, prime_ptr, offset_ptr, size_ptr,
    rows_ptr, R, CONTEXT, PAD, H, N: tl.constexpr, HP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    row, layer = tl.program_id(0), tl.program_id(1)
    position = tl.load(position_ptr + row)
    slot = tl.maximum(tl.load(slot_ptr + row), 0)
    size = tl.load(size_ptr + layer)
    h = tl.arange(0, HP)
    inside = h < H
    mixed = tl.zeros((HP,), tl.int64)
    for back in tl.static_range(N):
        at = position - back
        token = tl.load(tokens_ptr + slot.to(tl.int64) * CONTEXT + at, mask=at >= 0, other=0)
        mapped = tl.load(map_ptr + token, mask=at >= 0, other=0)
        mapped = tl.where(at >= 0, mapped, PAD).to(tl.int64)
        mixed = mixed ^ (mapped * tl.load(factor_ptr + layer * N + back))
        if back > 0:
            hashed = (layer * (N - 1) + back - 1) * H + h
            prime = tl.load(prime_ptr + hashed, mask=inside, other=1)
            found = mixed % prime + tl.load(offset_ptr + hashed, mask=inside, other=0)
            out = ((layer * R + row) * (N - 1) + back - 1) * H + h
            tl.store(rows_ptr + out, found % size, mask=inside)


@triton.jit
def embed_kernel(
    ids_ptr, table_ptr, x_ptr, D, S: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids_ptr + row).to(tl.int64)
    values = tl.load(table_ptr + token * D + d, mask=d < D, other=0.0)
    for s in tl.static_range(S):
        tl.store(x_ptr + (row * S + s).to(tl.int64) * D + d, values, mask=d < D)


@triton.jit
def tap_kernel(
    x_ptr, taps_ptr, D, STRIDE, START, S: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for s in tl.static_range(S):
        at = (row * S + s).to(tl.int64) * D + d
        total += tl.load(x_ptr + at, mask=d < D, other=0.0).to(tl.float32)
    out = taps_ptr + row.to(tl.int64) * STRIDE + START + d
    tl.store(out, to_bf16_rne(total * (1.0 / S)), mask=d < D)


# ---- launches ------------------------------------------------------------------------------


def place_rows(
    ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    floors: Tensor,
    tokens: Tensor,
    turns: Tensor,
    *,
    window: int,
    ring: int,
    pending: int,
    entries: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Write the rows' ids into `tokens` and plan the step.

    ids, positions, slots int32 [R]; floors int32 [S, 3]: the first window position that exists in
    the encoder's, the decoder's and the drafter's rings of each sequence; tokens int32 [S,
    context]; turns float32 [context, 4, P]: cos and sin of the window's base, then of the main one.
    `ring`, `pending`, `entries` (ratio 1, ratio 2): rows of one sequence in each cache. Rows of one
    sequence stand together, in order of position.

    Returns plan int32 [9, R] (see PLAN), lists int32 [2, R, W] (window rows by position, encoder's
    then decoder's) and angles float32 [6, R, P]: cos, sin of the window, of main, and of main one
    position before.
    """
    device = check(ids, positions, slots, floors, tokens, turns)
    rows, pairs = ids.shape[0], turns.shape[2]
    plan = torch.empty(len(PLAN), rows, dtype=torch.int32, device=device)
    lists = torch.empty(2, rows, window, dtype=torch.int32, device=device)
    angles = torch.empty(6, rows, pairs, dtype=torch.float32, device=device)
    launch(
        place_kernel, (rows,),
        ids, positions, slots, floors, tokens, turns, plan, lists, angles,
        rows, window, ring, pending, *entries, tokens.shape[1],
        WP=next_power(window), P=pairs, PP=next_power(pairs), num_warps=1,
    )  # fmt: skip
    return plan, lists, angles


def place_drafts(
    positions: Tensor, slots: Tensor, floors: Tensor, turns: Tensor, *, window: int, block: int,
    ring: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The rows of draft blocks: `block` rows of each sequence after another, at following
    positions. Returns dest int32 [R] (ring rows that their keys are written to), lists int32 [R,
    W + block] (the window before the block, then the block) and angles float32 [2, R, P]."""
    device = check(positions, slots, floors, turns)
    rows, pairs, places = positions.shape[0], turns.shape[2], window + block
    dest = torch.empty(rows, dtype=torch.int32, device=device)
    lists = torch.empty(rows, places, dtype=torch.int32, device=device)
    angles = torch.empty(2, rows, pairs, dtype=torch.float32, device=device)
    launch(
        draft_place_kernel, (rows,), positions, slots, floors, turns, dest, lists, angles,
        rows, window, block, ring, places,
        PP=next_power(pairs), P=pairs, LP=next_power(places), num_warps=1,
    )  # fmt: skip
    return dest, lists, angles


def engram_rows(
    tokens: Tensor,
    positions: Tensor,
    slots: Tensor,
    token_map: Tensor,
    factors: Tensor,
    primes: Tensor,
    offsets: Tensor,
    sizes: Tensor,
    *,
    pad: int,
) -> Tensor:
    """Table rows int64 [L, R, (N - 1) H] of every row (contract: engram_hash.hash_rows).

    tokens int32 [S, context] as `place_rows` left them; token_map int32 [V]; factors int64 [L, N];
    primes, offsets int64 [L, N - 1, H]; sizes int64 [L]: rows of each table, which the result is
    taken modulo (a benchmark's table may be a part); pad: the compressed id of a blocked place.
    """
    device = check(tokens, positions, slots, token_map, factors, primes, offsets, sizes)
    (layers, orders, heads), rows = primes.shape, positions.shape[0]
    found = torch.empty(layers, rows, orders * heads, dtype=torch.int64, device=device)
    launch(
        engram_rows_kernel, (rows, layers),
        tokens, positions, slots, token_map, factors, primes, offsets, sizes, found,
        rows, tokens.shape[1], pad, heads, N=orders + 1, HP=next_power(heads), num_warps=1,
    )  # fmt: skip
    return found


def embed(ids: Tensor, table: Tensor, streams: int) -> Tensor:
    """ids int32 [R], table bfloat16 [V, D] -> streams bfloat16 [R, S, D], all the embedding."""
    device = check(ids, table)
    rows, hidden = ids.shape[0], table.shape[1]
    x = torch.empty(rows, streams, hidden, dtype=torch.bfloat16, device=device)
    block = min(_BLOCK, next_power(hidden))
    launch(
        embed_kernel, (rows, triton.cdiv(hidden, block)), ids, table, x, hidden,
        S=streams, BLOCK=block,
    )  # fmt: skip
    return x


def tap(x: Tensor, taps: Tensor, number: int) -> None:
    """Mean of the streams x bfloat16 [R, S, D] into columns number * D.. of taps bfloat16."""
    check(x, taps)
    rows, streams, hidden = x.shape
    block = min(_BLOCK, next_power(hidden))
    launch(
        tap_kernel, (rows, triton.cdiv(hidden, block)), x, taps, hidden, taps.shape[1],
        number * hidden, S=streams, BLOCK=block,
    )  # fmt: skip
