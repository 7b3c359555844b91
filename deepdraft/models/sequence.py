"""Per-sequence state of all families but V4.1: rows addressed by position, in pools by kind.

Owns: `SequencePool`, `Sequence` and the addresses of a step's rows. What the kinds are, a family's
args say (`state_kinds`). Knows nothing of: weights, layers' arithmetic, requests.

Every row is addressed by position, so a step writes where its positions say and a rejected draft is
undone by writing again. Rings have `slack` spare rows. Rows that no token stands for are zero, so
that a masked place is harmless whatever a broken sequence wrote before.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepdraft.arch import StateKind
from deepdraft.errors import StateError
from deepdraft.models.state import StateItem
from deepdraft.ops.blocked import PAST_BLOCK, whole_blocks
from deepdraft.ops.index import MIN_PRODUCT_ROWS

NOTES = 1024
"""Hidden states of so many tokens are kept for a drafter that was not asked meanwhile."""


class SequencePool:
    """Room for `num_sequences` sequences of up to `max_tokens` tokens on one device.

    rows[kind.name]: [layers, num_sequences * entries + 1, width]; the last row stays zero (the
    sink's key).
    """

    def __init__(
        self,
        kinds: Seq[StateKind],
        *,
        max_positions: int,
        num_sequences: int,
        max_tokens: int,
        slack: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        if max_tokens > max_positions:
            raise StateError(
                f"a sequence of {max_tokens} tokens was asked for, but the model's positions end "
                f"at {max_positions} (max_position_embeddings)"
            )
        self.kinds = {kind.name: kind for kind in kinds}
        self.num_sequences, self.max_tokens, self.slack = num_sequences, max_tokens, slack
        self.ring = NOTES
        self.dtype, self.device = dtype, torch.device(device)
        self.entries = {k.name: self._entries(k) for k in kinds}
        self.rows = {
            k.name: _zeros((k.layers, num_sequences * self.entries[k.name] + 1, k.width), self)
            for k in kinds
        }
        self._free = list(range(num_sequences - 1, -1, -1))

    def _entries(self, kind: StateKind) -> int:
        if kind.ring:
            return kind.ring + self.slack
        return whole_blocks(-(-self.max_tokens // kind.ratio), PAST_BLOCK)

    @property
    def num_free(self) -> int:
        """Sequences that can still be opened."""
        return len(self._free)

    @property
    def allocated_bytes(self) -> int:
        """Address space of the whole pool; on a CPU, pages are taken as rows are written."""
        return sum(t.nbytes for t in self.rows.values())

    def open(self) -> Sequence:
        """A new empty sequence; StateError when all are taken."""
        if not self._free:
            raise StateError(f"all {self.num_sequences} sequences of the state pool are in use")
        return Sequence(self, self._free.pop())

    def restore(self, saved: SavedSequence) -> Sequence:
        """A saved sequence with its bits as they were; StateError when all are taken."""
        return saved.marks._copy_to(self.open(), saved.rows)

    def close(self, sequence: Sequence) -> None:
        """Give a sequence's rows back; it must not be used afterwards."""
        if sequence.slot < 0:
            return
        assert sequence.slot not in self._free, f"closing a free sequence: {sequence.slot=}"
        sequence.truncate(0)
        self._free.append(sequence.slot)
        sequence.slot = -1

    def scrub(self, sequence: Sequence) -> None:
        """Zero a sequence's rows, as `close` does."""
        sequence.truncate(0)

    def check(self) -> None:
        """Programmer's check: free slots are distinct and in range."""
        assert len(set(self._free)) == len(self._free), self._free
        assert all(0 <= s < self.num_sequences for s in self._free), self._free


def _zeros(shape: tuple[int, ...], pool: SequencePool) -> Tensor:
    if pool.device.type == "cpu":  # numpy's zeros take memory only where they are written
        kind = {torch.float32: np.float32, torch.float64: np.float64}[pool.dtype]
        return torch.from_numpy(np.zeros(shape, dtype=kind))
    return torch.zeros(shape, dtype=pool.dtype, device=pool.device)


class Sequence:
    """One sequence: its tokens (those whose forward pass is complete) and its rows in a pool."""

    origin = "exact"
    replay_from = None

    def __init__(self, pool: SequencePool, slot: int) -> None:
        self.pool, self.slot = pool, slot
        self.token_ids: list[int] = []
        self.written = 0
        """Highest position ever written plus one: rings hold what is less than a ring below it."""
        self.tail: tuple[int, Tensor] | None = None
        """The last position that the drafter was told of, and its hidden state [D]."""
        self.fed = (0, 0)
        """Positions [first, end) of which a drafter with rings was told."""
        self.resumed = 0
        """Rings hold no more than their last rows before this position."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def decoder_tokens(self) -> int:
        """Tokens that all layers have seen: all."""
        return len(self.token_ids)

    @property
    def drafter_tokens(self) -> int:
        """Tokens of which the drafter was told."""
        if self.fed[1]:
            return self.fed[1]
        return 0 if self.tail is None else self.tail[0] + 1

    def items(self) -> list[StateItem]:
        """What a snapshot of this sequence holds, at its present length."""
        n, size = self.num_tokens, torch.empty((), dtype=self.pool.dtype).element_size()
        items = []
        for letter, kind in zip("ABCDEFGH", self.pool.kinds.values(), strict=False):
            first, last = self._live(kind, n)
            rows = kind.layers * (last - first)
            num_bytes = rows * kind.width * size
            items.append(StateItem(letter, kind.label, rows, num_bytes, num_bytes, not kind.ring))
        items.append(StateItem("J", "token ids", n, n * 8, n * 8, True))
        return items

    def live_rows(self, name: str) -> Tensor:
        """The rows of one kind that count now, oldest first: [layers, rows, width], a copy."""
        kind = self.pool.kinds[name]
        first, last = self._live(kind, self.num_tokens)
        return self.pool.rows[name][:, self.address(kind, np.arange(first, last))]

    def _live(self, kind: StateKind, n: int) -> tuple[int, int]:
        """Entries [first, last) of a kind that a sequence of n tokens needs."""
        if not kind.ring:
            return 0, n // kind.ratio
        return self._needed_from(kind, n), n

    @staticmethod
    def _needed_from(kind: StateKind, n: int) -> int:
        """The first position whose ring row the next token may read."""
        return max(0, n // kind.group * kind.group - kind.before)

    def address(self, kind: StateKind, entries: np.ndarray) -> Tensor:
        """Where entries of a kind lie in the pool's rows."""
        size = self.pool.entries[kind.name]
        rows = self.slot * size + entries % size
        return torch.from_numpy(rows).to(self.pool.device)

    def truncate(self, num_tokens: int) -> None:
        """Cut the sequence to its first `num_tokens` tokens, exactly.

        Raises StateError, naming the items, where a ring has overwritten what that length needs;
        nothing is changed then. At least `slack` tokens can always be undone.
        """
        m, n = num_tokens, self.num_tokens
        if not 0 <= m <= n:
            raise StateError(f"cannot truncate a sequence of {n} tokens to {m}")
        kinds = self.pool.kinds.values()
        lost = [
            kind.label
            for kind in kinds
            if m and kind.ring and self._needed_from(kind, m) < self._held_from(kind)
        ]
        if lost:
            raise StateError(
                f"cannot truncate {n} tokens to {m} exactly: {', '.join(lost)} of older tokens are "
                f"gone. At most {self.pool.slack} tokens can be undone; 0 starts again"
            )
        for kind in kinds:
            size = self.pool.entries[kind.name]
            first, last = m // kind.ratio, -(-self.written // kind.ratio)
            first = max(first, last - size)
            if last > first:
                self.pool.rows[kind.name][:, self.address(kind, np.arange(first, last))] = 0.0
        del self.token_ids[m:]
        if self.tail is not None and self.tail[0] >= m:
            self.tail = None
        self.fed = min(self.fed[0], m), min(self.fed[1], m)
        if m == 0:
            self.written = self.resumed = 0

    def _held_from(self, kind: StateKind) -> int:
        return max(self.written - self.pool.entries[kind.name], self.resumed - kind.ring)

    def keep_global(self, num_tokens: int) -> None:
        """As `truncate`: no state of these families can be rebuilt approximately."""
        self.truncate(num_tokens)

    def clone(self) -> Sequence:
        """A second sequence with the same tokens and a copy of every row."""
        return self._copy_to(self.pool.open(), self._rows())

    def save(self) -> SavedSequence:
        """A copy in host memory for `SequencePool.restore`; this sequence may then be closed."""
        rows = [rows.to("cpu", copy=True) for rows in self._rows()]
        return SavedSequence(self._copy_to(Sequence(self.pool, -1), []), rows)

    def _rows(self) -> list[Tensor]:
        """Views of all rows that were ever written and may still count."""
        views = []
        for name, kind in self.pool.kinds.items():
            size = self.pool.entries[name]
            live = size if kind.ring else min(size, -(-self.written // kind.ratio))
            views.append(self.pool.rows[name][:, self.slot * size : self.slot * size + live])
        return views

    def _copy_to(self, other: Sequence, rows: list[Tensor]) -> Sequence:
        other.token_ids = list(self.token_ids)
        other.written, other.tail, other.resumed = self.written, self.tail, self.resumed
        other.fed = self.fed
        if rows:
            with torch.inference_mode():
                for target, source in zip(other._rows(), rows, strict=True):
                    target.copy_(source)
        return other


@dataclass(frozen=True, slots=True)
class SavedSequence:
    """A sequence outside of its pool: its tokens, without a slot, and its rows."""

    marks: Sequence
    rows: list[Tensor]

    @property
    def nbytes(self) -> int:
        """Memory of the rows."""
        return sum(rows.nbytes for rows in self.rows)


@dataclass(slots=True)
class Span:
    """Consecutive rows of one sequence in a step: rows [start, end), positions from `first`."""

    sequence: Sequence
    start: int
    end: int
    first: int
    last: int
    """The last row's position plus one."""


class StepRows:
    """Addresses of the rows of one step, made once and shared by all layers.

    A single row is padded to two (see `layers.Weights`); `num_rows` counts the real ones.
    """

    def __init__(self, pool: SequencePool, work: Seq[tuple[Sequence, int, Seq[int]]]) -> None:
        """work: (sequence, first position, token ids) of each sequence."""
        self.pool = pool
        self.spans: list[Span] = []
        positions: list[int] = []
        slots: list[int] = []
        ids: list[int] = []
        for sequence, first, new in work:
            start, last = len(positions), first + len(new)
            positions.extend(range(first, last))
            slots.extend([sequence.slot] * len(new))
            ids.extend(new)
            self.spans.append(Span(sequence, start, len(positions), first, last))
        self.num_rows = len(positions)
        if self.num_rows == 1:
            for column in (positions, slots, ids):
                column.append(column[0])
            self.spans[0].end += 1
        self.padded = len(positions)
        self.positions = np.asarray(positions, dtype=np.int64)
        self.slots = np.asarray(slots, dtype=np.int64)
        self.position = self.tensor(self.positions)
        self.token_ids = self.tensor(np.asarray(ids, dtype=np.int64))
        self._write: dict[str, Tensor] = {}
        self._causal: dict[int, list[Tensor]] = {}

    def tensor(self, array: np.ndarray) -> Tensor:
        """A host array on the pool's device."""
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.pool.device)

    def write(self, name: str, layer: int, values: Tensor) -> None:
        """Store one row per token, values [R, width], of a kind with ratio 1."""
        if name not in self._write:
            size = self.pool.entries[name]
            self._write[name] = self.tensor(self.slots * size + self.positions % size)
        self.pool.rows[name][layer].index_copy_(0, self._write[name], values)

    def past(self, name: str, layer: int, span: Span) -> Tensor:
        """Rows of one sequence from its first entry to the step's last, padded to whole blocks:
        [N, width]."""
        kind, size = self.pool.kinds[name], self.pool.entries[name]
        base = span.sequence.slot * size
        count = max(whole_blocks(span.last // kind.ratio, PAST_BLOCK), PAST_BLOCK)
        return self.pool.rows[name][layer, base : base + count]

    def causal(self, times: int) -> list[Tensor]:
        """Per span, 0 where a row may look and -inf elsewhere, every row `times` times, filled up
        to the rows that a product with keys needs: [rows * times or more, N]."""
        if times not in self._causal:
            self._causal[times] = []
            for span in self.spans:
                keys = np.arange(whole_blocks(span.last, PAST_BLOCK))
                positions = self.positions[span.start : span.end].repeat(times)
                missing = max(0, MIN_PRODUCT_ROWS - len(positions))
                positions = np.pad(positions, (0, missing), mode="edge")
                bias = np.where(keys <= positions[:, None], np.float32(0.0), np.float32(-np.inf))
                self._causal[times].append(self.tensor(bias).to(self.pool.dtype))
        return self._causal[times]

    def of(self, x: Tensor, span: Span) -> Tensor:
        """The rows of one span of x [R, ...]."""
        return x if len(self.spans) == 1 else x[span.start : span.end]
