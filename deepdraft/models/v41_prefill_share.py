"""The rows of a chunk shared by ranks: which are whose, and what the ranks exchange.

Every rank has the sequences' whole caches, and all weights but the routed experts', of which it
has a part of the width; Engram tables and the head are cut as for a decode step. It runs its rows
through everything else. Window records, entries and rows that enter the experts go to all ranks,
table rows and the experts' sums to the rank that has the row.
Owns: the parts of a chunk, these exchanges, the memory they go through.
Knows nothing of: layers, how ranks reach each other's memory.

Every exchange has a region of its own (`exchange_regions`): what it held last time was read before
the exchanges in between, so one barrier behind the writing is enough.

Letters: R rows of a rank, T of the chunk, N ranks, K picks, D hidden.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from deepdraft.arch import V41Args
from deepdraft.errors import StateError
from deepdraft.kernels.prefill_share import push_sums
from deepdraft.models.v41_joins import OwnTables
from deepdraft.models.v41_prefill_plan import (
    REGION_ALIGN,
    exchange_regions,
    padded_chunk,
    rows_each,
)
from deepdraft.parallel.group import Alone, Group
from deepdraft.parallel.peers import PeerMemory
from deepdraft.parallel.plan import Cut, ShardPlan, cut_for_rows

_DTYPES = {
    "inputs": torch.bfloat16,
    "picks": torch.int32,
    "weights": torch.float32,
    "sums": torch.bfloat16,
    "tables": torch.bfloat16,
}
"""Of regions that hold no records."""
_MAIN, _BESIDE = 0, 1
"""Lanes of barriers."""


class Part(Protocol):
    """What is asked of a chunk: rows of this rank begin at `offset` of the whole chunk's `total`,
    whose first one has position `first - offset`; buffers of this rank's have `rows`."""

    first: int
    offset: int
    total: int

    @property
    def rows(self) -> int: ...


def part_of(first: int, total: int, ranks: int, rank: int) -> slice:
    """A rank's rows of a chunk at `first`: neighbours, beginning at even positions but for the
    first rank, so that no pair of a ratio-2 entry is shared. May be empty."""
    each, odd = rows_each(first, total, ranks), first % 2
    start, stop = (max(0, n * each - odd) for n in (rank, rank + 1))
    return slice(min(start, total), min(stop, total))


class Regions:
    """The ranks' memory by exchange."""

    def __init__(self, args: V41Args, rows: int, memory: PeerMemory) -> None:
        """`memory`: of `exchange_bytes` at least; chunks of `rows` rows at most."""
        self.rows, self.barrier = rows, memory.barrier
        at = 0
        self._views: dict[str, list[Tensor]] = {}
        self.addresses: dict[str, Tensor] = {}
        for name, (size, shape) in exchange_regions(args, rows, len(memory.parts)).items():
            some, dtype = slice(at, at + size * math.prod(shape)), _DTYPES.get(name, torch.uint8)
            self._views[name] = [part[some].view(dtype).view(shape) for part in memory.parts]
            places = [address + at for address in memory.addresses]
            self.addresses[name] = torch.tensor(places, device=memory.parts[0].device)
            at = -(-some.stop // REGION_ALIGN) * REGION_ALIGN

    def of(self, name: str, rank: int) -> Tensor:
        """A rank's region."""
        return self._views[name][rank]


class RowShare:
    """One rank of a group; alone there is nothing to exchange."""

    def __init__(
        self,
        group: Group | None = None,
        regions: Regions | None = None,
        tables: Sequence[OwnTables] = (),
    ) -> None:
        """`tables`: this rank's part of each Engram layer's, in order."""
        self.group = group or Alone()
        self.size, self.rank = self.group.size, self.group.rank
        self._regions, self._tables = regions, tables
        self._lane: torch.cuda.Stream | None = None
        if self.size > 1 and regions is None:
            raise StateError("ranks that share rows need memory that they reach")
        self.rows = 1 << 62 if regions is None else regions.rows
        """Of a chunk at most."""

    # ---- parts -----------------------------------------------------------------------------

    def part(self, first: int, total: int) -> slice | None:
        """This rank's rows; None: all."""
        return None if self.size == 1 else part_of(first, total, self.size, self.rank)

    def rows_each(self, first: int, total: int) -> int:
        """Rows that a rank's chunk has at least."""
        return 0 if self.size == 1 else rows_each(first, total, self.size)

    def positions(self, chunk: Part, own: Tensor) -> Tensor:
        """`own` int32 [R], this rank's -> the whole chunk's, int32 [T]."""
        if self.size == 1:
            return own
        number = torch.arange(padded_chunk(chunk.total), dtype=own.dtype, device=own.device)
        return torch.where(number < chunk.total, number + _begin(chunk), -1)

    def _own(self, chunk: Part, rank: int | None = None) -> slice:
        return part_of(_begin(chunk), chunk.total, self.size, self.rank if rank is None else rank)

    # ---- through the ranks' memory ---------------------------------------------------------

    @property
    def regions(self) -> Regions:
        """The ranks' memory."""
        assert self._regions is not None
        return self._regions

    def window(self, rows: int, ring: Tensor) -> Tensor:
        """A buffer of records uint8 [rows, bytes], as those of `ring`."""
        if self.size == 1:
            return ring.new_zeros(rows, ring.shape[1])
        return self.regions.of("window", self.rank)

    def fill_window(self, window: Tensor, before: int, chunk: Part) -> None:
        """`window` holds this rank's records, behind `before` others: the other ranks' come in."""
        if self.size == 1:
            return
        own = self._own(chunk)
        self._push("window", window[before + own.start : before + own.stop], before + own.start)
        self.regions.barrier(_MAIN)

    def fill_entries(self, main: Tensor, index: Tensor, chunk: Part, *, ratio: int) -> None:
        """Entries and index keys of the whole chunk, one of every `ratio` rows: this rank has made
        its own, the others' come in."""
        if self.size == 1 or not main.shape[0]:
            return
        own, begin = self._own(chunk), _begin(chunk)
        first, end = ((begin + n) // ratio - begin // ratio for n in (own.start, own.stop))
        kinds = {"main": main, "index": index}
        for name, made in kinds.items():
            self._push(name, made[first:end], first)
        self.regions.barrier(_MAIN)
        for name, made in kinds.items():
            found = self.regions.of(name, self.rank)
            made[:first].copy_(found[:first])
            made[end:].copy_(found[end : made.shape[0]])

    def send_inputs(self, v: Tensor, chunk: Part) -> None:
        """Rows v bfloat16 [R, D] that enter the experts are on their way to all ranks, beside what
        this one does next."""
        if self.size > 1:
            own = self._own(chunk)
            with self._beside():
                self._push("inputs", v[: own.stop - own.start], own.start, here=True)

    def send_picks(self, picks: Tensor, weights: Tensor, chunk: Part) -> None:
        """Their experts int32 [R, K] and weights float32 [R, K], likewise."""
        if self.size > 1:
            own = self._own(chunk)
            count = own.stop - own.start
            with self._beside():
                self._push("picks", picks[:count], own.start, here=True)
                self._push("weights", weights[:count], own.start, here=True)
                self.regions.barrier(_BESIDE)

    def routed(
        self, v: Tensor, picks: Tensor, weights: Tensor, chunk: Part
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What the experts get, of all rows, where this rank's have been sent: [T, ..]."""
        if self.size == 1:
            return v, picks, weights
        if self._lane is not None:
            torch.cuda.current_stream().wait_stream(self._lane)
        rows = padded_chunk(chunk.total)
        names = "inputs", "picks", "weights"
        v, picks, weights = (self.regions.of(name, self.rank)[:rows] for name in names)
        picks[chunk.total :] = -1
        return v, picks, weights

    def sums(self, picked: Tensor, chunk: Part) -> Tensor:
        """This rank's outputs of the experts bfloat16 [>= T, K, D], by pick -> all ranks' sums of
        its own rows, bfloat16 [R, N, D]. Alone the picks themselves."""
        if self.size == 1:
            return picked
        begin, regions = _begin(chunk), self.regions
        push_sums(
            picked, regions.addresses["sums"], rows=chunk.total,
            each=rows_each(begin, chunk.total, self.size), odd=begin % 2, rank=self.rank,
        )  # fmt: skip
        regions.barrier(_MAIN)
        return regions.of("sums", self.rank)[: chunk.rows]

    def own_tables(self, found: Tensor, number: int) -> Tensor:
        """Table rows int64 [T, G] of an Engram layer, the `number`th -> places in this rank's part
        of its tables. (Shortened tables of a benchmark wrap around.)"""
        if self.size == 1:
            return found
        own = self._tables[number]
        return (found[:, own.hashes] - own.first_row).remainder(own.num_rows).contiguous()

    def table_values(self, values: Tensor, chunk: Part) -> Tensor:
        """This rank's tables' values for all rows, bfloat16 [T, G / N * W] -> all tables' for its
        rows [R, G * W]."""
        if self.size == 1:
            return values
        width = values.shape[1]
        columns = slice(self.rank * width, (self.rank + 1) * width)
        for rank in self._from_here():
            own = self._own(chunk, rank)
            there = self.regions.of("tables", rank)[: own.stop - own.start, columns]
            there.copy_(values[own])
        self.regions.barrier(_MAIN)
        return self.regions.of("tables", self.rank)[: chunk.rows]

    def _push(self, name: str, x: Tensor, first: int, *, here: bool = False) -> None:
        """x to rows `first`.. of the other ranks' regions (`here`: of this rank's, too)."""
        for rank in self._from_here():
            if rank != self.rank or here:
                self.regions.of(name, rank)[first : first + x.shape[0]].copy_(x)

    def _from_here(self) -> list[int]:
        """All ranks, this one first: so that not all of them write to one at once."""
        return [(self.rank + step) % self.size for step in range(self.size)]

    def _beside(self) -> contextlib.AbstractContextManager[object]:
        """A lane beside the current one, behind what that has been given so far."""
        if self.regions.of("inputs", self.rank).device.type != "cuda":
            return contextlib.nullcontext()
        self._lane = self._lane or torch.cuda.Stream()
        self._lane.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._lane)

    # ---- few rows, by the group ------------------------------------------------------------

    def whole(self, x: Tensor, chunk: Part) -> Tensor:
        """Rows [R, ..] of this rank's part -> of the whole chunk [total, ..]."""
        if self.size == 1:
            return x[: chunk.total]
        most = rows_each(_begin(chunk), chunk.total, self.size)
        held = []
        for rank, part in enumerate(self.group.gather(_filled(x[:most], most))):
            own = self._own(chunk, rank)
            held.append(part[: own.stop - own.start])
        return torch.cat(held)

    def last(self, x: Tensor, chunk: Part, count: int) -> Tensor:
        """The last `count` rows of the whole chunk, or all where it has fewer."""
        own = self._own(chunk)
        mine = x[: own.stop - own.start]
        if self.size == 1:
            return x[: chunk.total][-count:]
        parts = self.group.gather(_filled(mine[-count:], count))
        held = []
        for rank, part in enumerate(parts):
            at = self._own(chunk, rank)
            held.append(part[: min(count, at.stop - at.start)])
        return torch.cat(held)[-count:]

    def columns(self, x: Tensor) -> Tensor:
        """The ranks' parts [n, V / N] of the same rows side by side."""
        return x if self.size == 1 else torch.cat(self.group.gather(x), -1)


def _begin(chunk: Part) -> int:
    return chunk.first - chunk.offset


def _filled(x: Tensor, rows: int) -> Tensor:
    missing = rows - x.shape[0]
    return torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) if missing > 0 else x


class PrefillCuts(ShardPlan):
    """What of the weights is cut where rows are shared: routed experts' widths, Engram tables, the
    head."""

    def cut(self, name: str) -> Cut | None:
        """As `ShardPlan.cut`."""
        return super().cut(name) if cut_for_rows(name) else None


def own_tables(args: V41Args, plan: ShardPlan, rank: int) -> list[OwnTables]:
    """A rank's part of each Engram layer's tables."""
    own = []
    for layer in args.engram_layer_ids:
        start, stop = plan.bounds(f"layers.{layer}.engram.embed.weight", 0, rank)
        own.append(OwnTables(slice(*plan.own_tables(rank)), start, stop - start))
    return own
