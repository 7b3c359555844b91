"""Where the ranks' parts of a device step become whole.

Owns: the calls a step makes at these places, for one rank and for several. On one rank they are the
products themselves, so a step has one code path.
Knows nothing of: layers, processes. The torch model's counterpart is `parallel.shards`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepdraft.kernels import gemv, mhc
from deepdraft.kernels.gemv import QuantRows
from deepdraft.kernels.layout import Tiled
from deepdraft.kernels.native.fragments import Streamed
from deepdraft.kernels.one_shot import OneShot


class Joins:
    """One rank: nothing is to be joined."""

    def begin(self, positions: Tensor) -> None:
        """A step of rows at these positions int32 [R] starts; -1: a row that only fills a tile."""

    def part(self, x: QuantRows | Tensor, w: Tiled | Streamed) -> Tensor:
        """x times a map whose columns are split: bfloat16 [R, N], for `whole` or `boundary`."""
        return gemv.gemv(x, w)

    def whole(self, part: Tensor) -> Tensor:
        """What a `part` is a part of: bfloat16 [R, N]."""
        return part

    def boundary(
        self, x: Tensor, norm: Tensor | None, **more: Any
    ) -> tuple[Tensor, Tensor | None, QuantRows | None]:
        """`mhc.boundary` behind a `part`, or behind the experts: y their picks bfloat16
        [R, K, D], `shared` the shared expert's [R, D]."""
        return mhc.boundary(x, norm, **more)

    def logits(self, h: Tensor, head: Tiled) -> Tensor:
        """h times a map whose rows are split: float32 [R, V]."""
        return gemv.gemv(h, head, dtype=torch.float32)

    def table_rows(self, rows: Tensor) -> Tensor:
        """Table rows int64 [Engram layers, R, G] of all hash tables -> of this rank's."""
        return rows

    def finish(self) -> None:
        """The launches of one step are over."""


@dataclass(frozen=True, slots=True)
class OwnTables:
    """One Engram layer's tables on this rank: which hashes, the first stored row, how many."""

    hashes: slice
    first_row: int
    num_rows: int


class RankJoins(Joins):
    """One of several ranks. All ranks make the same calls."""

    def __init__(self, exchange: OneShot, tables: Sequence[OwnTables] = ()) -> None:
        """`tables`: of each Engram layer, in order."""
        self.exchange, self.tables = exchange, tables

    def begin(self, positions: Tensor) -> None:
        """Rows at -1 may hold anything."""
        self.exchange.positions = positions

    def part(self, x: QuantRows | Tensor, w: Tiled | Streamed) -> Tensor:
        """This rank's product, float32 [R, N]."""
        return gemv.gemv(x, w, dtype=torch.float32)

    def whole(self, part: Tensor) -> Tensor:
        """The ranks' products, added in float32 in rank order."""
        return self.exchange.sum_rows(part)

    def boundary(
        self, x: Tensor, norm: Tensor | None, **more: Any
    ) -> tuple[Tensor, Tensor | None, QuantRows | None]:
        """Each rank's part, or its picks and shared expert in order; then the ranks in order."""
        return mhc.boundary(x, norm, exchange=self.exchange, **more)

    def logits(self, h: Tensor, head: Tiled) -> Tensor:
        """The ranks' parts of the vocabulary side by side."""
        return self.exchange.gather(gemv.gemv(h, head, dtype=torch.float32))

    def table_rows(self, rows: Tensor) -> Tensor:
        """Places in this rank's part. (Shortened tables of a benchmark wrap around.)"""
        parts = [
            (row[:, own.hashes] - own.first_row).remainder(own.num_rows)
            for row, own in zip(rows, self.tables, strict=True)
        ]
        return torch.stack(parts) if parts else rows

    def finish(self) -> None:
        """The next step's exchanges count on."""
        self.exchange.finish()
