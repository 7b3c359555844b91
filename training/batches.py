"""Packs documents into training rows.

Owns: cutting documents into pieces, filling rows so that documents start aligned and never share
positions, sampling sources by weight, held-out rows. Knows nothing of: the model, devices.

A row is three int32 arrays of length T: token ids, position in the piece, piece number
(padding: -1).
"""

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

Row = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Source:
    """Token range [start, end) of one source and split."""

    name: str
    split: str
    weight: float
    start: int
    end: int


def sources_of(corpus: Any) -> list[Source]:
    """The corpus's sources as records; they may be objects or mappings."""
    out = []
    for s in corpus.sources:
        get = s.get if isinstance(s, dict) else lambda key, s=s: getattr(s, key)
        out.append(
            Source(
                str(get("name")),
                str(get("split")),
                float(get("weight")),
                int(get("start")),
                int(get("end")),
            )
        )
    return out


class SourceRows:
    """An endless, shuffled sequence of rows of one source."""

    def __init__(
        self, corpus: Any, source: Source, length: int, align: int, pad_id: int, seed: int
    ) -> None:
        self.tokens = np.asarray(corpus.tokens)
        self.length, self.align, self.pad_id = length, align, pad_id
        self.rng = np.random.default_rng(seed)
        starts = np.asarray(corpus.doc_starts).astype(np.int64)
        starts = starts[(starts >= source.start) & (starts < source.end)]
        if len(starts) == 0 or starts[0] != source.start:
            starts = np.concatenate([[source.start], starts])
        ends = np.concatenate([starts[1:], [source.end]])
        pieces = []
        for s, e in zip(starts.tolist(), ends.tolist(), strict=True):
            for at in range(s, e, length):
                stop = min(at + length, e)
                if stop - at >= 2:
                    pieces.append((at, stop))
        self.pieces = np.array(pieces, dtype=np.int64).reshape(-1, 2)
        self.order = np.empty(0, dtype=np.int64)
        self.at = 0
        self.epochs = 0
        self.waiting: list[tuple[int, int]] = []

    def _next_piece(self) -> tuple[int, int]:
        if self.at >= len(self.order):
            self.order = self.rng.permutation(len(self.pieces))
            self.at = 0
            self.epochs += 1
        self.at += 1
        a, b = self.pieces[self.order[self.at - 1]]
        return int(a), int(b)

    def next_row(self) -> Row:
        """Fill one row; a piece that fits nowhere is cut at the end of the row and kept."""
        t = self.length
        ids = np.full(t, self.pad_id, dtype=np.int32)
        pos = np.zeros(t, dtype=np.int32)
        seg = np.full(t, -1, dtype=np.int32)
        at = number = 0
        while t - at >= 2:
            while len(self.waiting) < 16:
                self.waiting.append(self._next_piece())
            fits = [k for k, (a, b) in enumerate(self.waiting) if b - a <= t - at]
            if fits:
                a, b = self.waiting.pop(fits[0])
            elif at and t - at < 64:
                break
            else:
                a, b = self.waiting[0]
                b = a + t - at
            n = b - a
            ids[at : at + n] = self.tokens[a:b]
            pos[at : at + n] = np.arange(n)
            seg[at : at + n] = number
            number += 1
            at = -(-(at + n) // self.align) * self.align
        return ids, pos, seg


def stack(rows: list[Row]) -> np.ndarray:
    """Rows as one int32 array [3, B, T]."""
    return np.stack([np.stack([row[k] for row in rows]) for k in range(3)])


class Sampler:
    """Batches [3, B, T] drawn from the sources of one split, by weight per token."""

    def __init__(
        self,
        corpus: Any,
        split: str,
        length: int,
        align: int,
        pad_id: int,
        seed: int,
        factors: dict[str, float] | None = None,
    ) -> None:
        """`factors`: weight by name prefix, in place of the corpus's own (longest prefix wins)."""
        factors = factors or {}

        def weigh(s: Source) -> Source:
            known = [k for k in factors if s.name.startswith(k)]
            return replace(s, weight=factors[max(known, key=len)]) if known else s

        chosen = [
            s
            for s in map(weigh, sources_of(corpus))
            if s.split == split and s.end - s.start >= 2 and s.weight > 0
        ]
        self.rows = [
            SourceRows(corpus, s, length, align, pad_id, seed + 17 * k)
            for k, s in enumerate(chosen)
        ]
        self.names = [s.name for s in chosen]
        weights = np.array([s.weight for s in chosen], dtype=np.float64)
        if not len(chosen) or weights.sum() <= 0:
            raise ValueError(f"the corpus has no sources with split {split!r} and weight above 0")
        self.weights = weights / weights.sum()
        self.rng = np.random.default_rng(seed)

    def batch(self, size: int) -> np.ndarray:
        """Next [3, size, T]."""
        picks = self.rng.choice(len(self.rows), size=size, p=self.weights)
        return stack([self.rows[k].next_row() for k in picks])

    def epochs(self) -> dict[str, int]:
        """Passes begun over each source."""
        return {name: rows.epochs for name, rows in zip(self.names, self.rows, strict=True)}


def prefetch(make: Callable[[], Any], depth: int = 4) -> Iterator[Any]:
    """Run `make` in a thread, a few results ahead. An error in it is raised here."""
    box: queue.Queue[Any] = queue.Queue(depth)

    def work() -> None:
        try:
            while True:
                box.put((make(), None))
        except BaseException as e:
            box.put((None, e))

    threading.Thread(target=work, daemon=True).start()
    while True:
        value, error = box.get()
        if error is not None:
            raise error
        yield value
