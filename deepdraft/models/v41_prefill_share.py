"""The rows of a chunk shared by ranks: which are whose, and what the ranks exchange.

Every rank has the sequences' whole caches, and all weights but the routed experts', of which it
has a part of the width. It runs its rows through everything else; window records, entries and open
pairs go to all ranks, rows that enter the experts too, and the experts' partial sums come back.
Owns: the parts of a chunk, these exchanges. Knows nothing of: kernels, layers, how ranks talk.

Letters: R rows of a rank, N ranks, K picks, D hidden.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from deepdraft.parallel.group import Alone, Group, rank_order_sum
from deepdraft.parallel.plan import Cut, ShardPlan, stem


class Part(Protocol):
    """What is asked of a chunk: rows of this rank begin at `offset` of the whole chunk's `total`,
    whose first one has position `first - offset`."""

    first: int
    offset: int
    total: int


def rows_each(first: int, total: int, ranks: int) -> int:
    """Rows of a rank at most, a multiple of 8 (so that equal shapes are exchanged)."""
    return -(-(total + first % 2) // (8 * ranks)) * 8


def part_of(first: int, total: int, ranks: int, rank: int) -> slice:
    """A rank's rows of a chunk at `first`: neighbours, beginning at even positions but for the
    first rank, so that no pair of a ratio-2 entry is shared. May be empty."""
    each, odd = rows_each(first, total, ranks), first % 2
    start, stop = (max(0, n * each - odd) for n in (rank, rank + 1))
    return slice(min(start, total), min(stop, total))


class RowShare:
    """One rank of a group; alone everything is the identity."""

    def __init__(self, group: Group | None = None) -> None:
        self.group = group or Alone()
        self.size, self.rank = self.group.size, self.group.rank

    def part(self, first: int, total: int) -> slice | None:
        """This rank's rows; None: all."""
        return None if self.size == 1 else part_of(first, total, self.size, self.rank)

    def rows_each(self, first: int, total: int) -> int:
        """Rows that a rank's chunk has at least."""
        return 0 if self.size == 1 else rows_each(first, total, self.size)

    def whole(self, x: Tensor, chunk: Part) -> Tensor:
        """Rows [R, ..] of this rank's part -> of the whole chunk [total, ..]."""
        return x if self.size == 1 else self._joined(x, chunk, 1)

    def fill(self, x: Tensor, chunk: Part, *, ratio: int = 1) -> None:
        """Of what belongs to the whole chunk (a record a row, or an entry of every `ratio` rows),
        this rank has made its own: the others' are put in."""
        if self.size == 1 or not x.shape[0]:
            return
        begin = chunk.first - chunk.offset
        own = part_of(begin, chunk.total, self.size, self.rank)
        base = begin // ratio
        at = slice((begin + own.start) // ratio - base, (begin + own.stop) // ratio - base)
        x.copy_(self._joined(x[at], chunk, ratio))

    def last(self, x: Tensor, chunk: Part, count: int) -> Tensor:
        """The last `count` rows of the whole chunk, or all where it has fewer."""
        own = part_of(chunk.first - chunk.offset, chunk.total, self.size, self.rank)
        mine = x[: own.stop - own.start]
        if self.size == 1:
            return x[: chunk.total][-count:]
        parts = self.group.gather(_filled(mine[-count:], count))
        held = []
        for rank, part in enumerate(parts):
            at = part_of(chunk.first - chunk.offset, chunk.total, self.size, rank)
            held.append(part[: min(count, at.stop - at.start)])
        return torch.cat(held)[-count:]

    def own_sum(self, picked: Tensor, shared: Tensor, chunk: Part) -> Tensor:
        """Partial outputs of the experts bfloat16 [>= total, K, D] of all rows, and the shared
        expert's [R, D] of this rank's: their sum bfloat16 [R, D]. Picks are added in order, then
        the ranks in theirs, the shared expert last, all in float32."""
        begin = chunk.first - chunk.offset
        partial = picked[: chunk.total, 0].float()
        for k in range(1, picked.shape[1]):
            partial += picked[: chunk.total, k]
        own = part_of(begin, chunk.total, self.size, self.rank)
        parts = [part[own] for part in self.group.gather(partial)]
        total = _filled(rank_order_sum(parts), shared.shape[0])
        return (total + shared.float()).bfloat16()

    def from_last(self, x: Tensor, chunk: Part) -> Tensor:
        """x of the rank that has the last row of the chunk."""
        if self.size == 1:
            return x
        begin = chunk.first - chunk.offset
        ends = [part_of(begin, chunk.total, self.size, rank).stop for rank in range(self.size)]
        return self.group.gather(x)[ends.index(chunk.total)]

    def _joined(self, x: Tensor, chunk: Part, ratio: int) -> Tensor:
        begin = chunk.first - chunk.offset
        most = rows_each(begin, chunk.total, self.size) // ratio + (ratio - 1)
        held = []
        for rank, part in enumerate(self.group.gather(_filled(x[:most], most))):
            at = part_of(begin, chunk.total, self.size, rank)
            held.append(part[: (begin + at.stop) // ratio - (begin + at.start) // ratio])
        return torch.cat(held)


def _filled(x: Tensor, rows: int) -> Tensor:
    missing = rows - x.shape[0]
    return torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) if missing > 0 else x


class ExpertCuts(ShardPlan):
    """The routed experts' widths cut over the ranks, all else whole."""

    def cut(self, name: str) -> Cut | None:
        """As `ShardPlan.cut`."""
        return super().cut(name) if stem(name).startswith("ffn.experts.") else None
