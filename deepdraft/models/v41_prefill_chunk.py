"""The rows of a chunk of one prompt, and what depends on their positions alone.

Owns: positions, addresses, rotary tables, which rows of rings and caches a chunk reads and writes.
Knows nothing of: weights, layers, launches.

Letters: R rows of a chunk (a multiple of 16; the last ones may be empty), W window, P rotary pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deepdraft.kernels import index
from deepdraft.models.v41_buffers import DECODER, ENCODER, DeviceCaches

ROW_TILE = 16
"""Rows of a chunk are a multiple of it: no kernel is compiled for odd tiles of 8, too."""
WINDOW_TURN, MAIN_TURN, PAIR_TURN = range(3)
"""Of `Chunk.turns`."""


@dataclass(slots=True)
class Chunk:
    """Rows of one sequence at positions first, first + 1, ... and what depends on these alone.

    Where ranks share a chunk, each has such rows, a part of its `total` ones from `offset` on."""

    slot: int
    first: int
    count: int
    offset: int
    total: int
    ids: Tensor
    positions: Tensor
    """int32 [R], -1 in empty rows."""
    turns: list[tuple[Tensor, Tensor]]
    """cos and sin [R, P]: of the window's base, of the main one, of that a position before."""
    window_dest: Tensor
    """int32 [R]: rows of the chunk's window."""
    window_first: dict[bool, Tensor]
    """By role.decoder, int32 [R]: the first place of a row's window that exists."""
    before: Tensor
    base: dict[int, Tensor]
    reach: dict[int, Tensor]
    entry: dict[int, Tensor]
    """By ratio, int32 [R]: the sequence's first entry, how many a row sees, which it writes."""
    ring_before: Tensor
    """int64 [W - 1]: ring rows of the positions before the whole chunk."""
    kept: tuple[int, Tensor]
    """How many of its last rows go to the ring, and their rows of it (int64)."""
    pending: tuple[int, Tensor]
    """The same for the open pairs."""
    selected: dict[int, index.Selected] = field(default_factory=dict)
    blocks: list[index.Blocks] = field(default_factory=list)
    values: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Main entries and index keys of this sequence as bf16, of the source that was used last."""

    def copy_(self, other: Chunk) -> None:
        """Take over another chunk of as many rows: every tensor keeps its place."""
        assert (self.rows, self.count) == (other.rows, other.count)
        pairs = [
            *zip(self._tensors(), other._tensors(), strict=True),
            (self.kept[1], other.kept[1]),
            (self.pending[1], other.pending[1]),
        ]
        for mine, theirs in pairs:
            mine.copy_(theirs)

    def _tensors(self) -> list[Tensor]:
        found = [self.ids, self.positions, *(t for pair in self.turns for t in pair)]
        found += [self.window_dest, self.before, self.ring_before]
        groups: list[dict[Any, Tensor]] = [self.window_first, self.base, self.reach, self.entry]
        for group in groups:
            found += [group[key] for key in sorted(group)]
        return found

    @property
    def end(self) -> int:
        """The position behind its last row."""
        return self.first + self.count

    @property
    def rows(self) -> int:
        """R."""
        return self.positions.shape[0]


def make_chunk(
    caches: DeviceCaches,
    ids: list[int],
    *,
    slot: int,
    first: int,
    floors: tuple[int, int],
    write_from: int,
    rows_at_least: int = 0,
    part: slice | None = None,
) -> Chunk:
    """The rows of `ids` at `first`; their ids join the sequence's tokens on the device.

    `floors`: the first window position that exists, of the encoder's and the decoder's layers.
    `write_from`: entries completed before this position are there already. `part`: of `ids`, the
    rows of this rank.
    """
    args, device, all_ids, begin = caches.args, caches.tokens.device, ids, first
    caches.tokens[slot, begin : begin + len(ids)].copy_(torch.tensor(ids, dtype=torch.int32))
    offset = 0
    if part is not None:
        ids, offset = ids[part], min(part.start, len(ids))
        first = begin + offset
    count = len(ids)
    total = -(-max(count, rows_at_least, 1) // ROW_TILE) * ROW_TILE
    window, ring, pending = args.sliding_window, caches.ring, caches.pending_ring
    number = torch.arange(total, device=device, dtype=torch.int32)
    live = number < count
    at = number + first
    positions = torch.where(live, at, -1)
    row_ids = torch.zeros(total, dtype=torch.int32)
    row_ids[:count] = torch.tensor(ids, dtype=torch.int32)
    row_ids = row_ids.to(device)

    place = at.clamp(max=caches.context - 1).long()
    tables = caches.turns.index_select(0, place).unbind(1)
    earlier = caches.turns.index_select(0, (place - 1).clamp(min=0)).unbind(1)
    turns = [
        (cos.contiguous(), sin.contiguous()) for cos, sin in (tables[:2], tables[2:], earlier[2:])
    ]
    window_first = {
        decoder: torch.where(live, (floor - at + window - 1).clamp(0, window), window)
        for decoder, floor in ((False, floors[ENCODER]), (True, floors[DECODER]))
    }
    before = torch.where(live, number - 1, -slot * pending - 1)
    # A part that is not the first begins at an even position, whose pair is its own.
    before[0] = -(slot * pending + (first - 1) % pending) - 1
    writes = live & (at >= write_from)
    ends = {1: writes, 2: writes & (at % 2 == 1)}
    base, reach, entry = {}, {}, {}
    for ratio, size in zip((1, 2), caches.entries, strict=True):
        base[ratio] = torch.full_like(number, slot * size)
        reach[ratio] = torch.where(live, (at + 1) // ratio, 0)
        entry[ratio] = torch.where(ends[ratio], slot * size + (at + 1) // ratio - 1, -1)

    def last(most: int, size: int) -> tuple[int, Tensor]:
        end, kept = begin + len(all_ids), min(most, len(all_ids))
        return kept, slot * size + torch.arange(end - kept, end, device=device) % size

    ring_before = torch.arange(begin - window + 1, begin, device=device)
    return Chunk(
        slot, first, count, offset, len(all_ids), row_ids, positions, turns,
        torch.where(live, number + offset + window - 1, -1), window_first, before, base, reach,
        entry,
        slot * ring + ring_before % ring, last(ring, ring), last(pending, pending),
    )  # fmt: skip
