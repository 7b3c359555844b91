"""Per-sequence state of a V4.1 model: what it is, how large, and how it is cut back.

Owns: the pools of position-addressed rows, and `SequenceState`, one sequence's share of them. The
items are those of architecture notes 8.1, by the same letters.
Knows nothing of: weights, layers' arithmetic, requests.

Every row is addressed by position, so a step writes where its positions say and a rejected draft
is undone by writing again. Rings have `slack` spare rows: after a step of at most `slack` rows the
window of any position of that step is still whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from deepdraft.arch import V41Args
from deepdraft.errors import StateError

WINDOW_RECORD_BYTES_PER_GROUP = 32


@dataclass(frozen=True, slots=True)
class StateItem:
    """One line of a sequence's inventory."""

    letter: str
    name: str
    rows: int
    packed_bytes: int
    """In the published record formats (notes 7.4)."""
    stored_bytes: int
    """As held here, in this pool's dtype."""
    truncatable: bool


class StatePool:
    """Room for `num_sequences` sequences of up to `max_tokens` tokens on one device.

    keys    [rows of window and main, C]           one tensor, so that one gather reads of both
    window  [layers + drafters, S * ring + 1, C]   the last row is the sink's key of zeros
    main    {source: [S * entries + 1, C]}         the last row takes writes that must not count
    index   {source: [S * entries + 1, Ci]}
    pending {source: [S * pending_ring, 2C]}       value and gate of the last tokens (ratio 2)
    """

    def __init__(
        self,
        args: V41Args,
        *,
        num_sequences: int,
        max_tokens: int,
        slack: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if max_tokens > args.max_position_embeddings:
            raise StateError(
                f"a sequence of {max_tokens} tokens was asked for, but the model's positions end "
                f"at {args.max_position_embeddings} (max_position_embeddings)"
            )
        self.args = args
        self.num_sequences, self.max_tokens, self.slack = num_sequences, max_tokens, slack
        self.dtype = dtype
        self.ring = args.sliding_window + slack
        self.pending_ring = slack + 2
        roles = args.roles
        self.ratios = {s: roles[s].ratio for s in args.kv_source_layer_ids}
        self.entries = {s: -(-max_tokens // r) for s, r in self.ratios.items()}
        layers = args.num_hidden_layers + args.num_nextn_predict_layers
        c, ci = args.head_dim, args.index_head_dim

        def rows(count: int, width: int) -> torch.Tensor:
            return torch.zeros(count, width, dtype=dtype, device=device)

        self.window_rows = num_sequences * self.ring + 1
        at = layers * self.window_rows
        self.main_start: dict[int, int] = {}
        """Row of `keys` where the entries of a source begin."""
        for s, n in self.entries.items():
            self.main_start[s] = at
            at += num_sequences * n + 1
        self.keys = rows(at, c)
        self.window = self.keys[: layers * self.window_rows].view(layers, self.window_rows, c)
        self.main = {
            s: self.keys[start : start + num_sequences * self.entries[s] + 1]
            for s, start in self.main_start.items()
        }
        self.index = {s: rows(num_sequences * n + 1, ci) for s, n in self.entries.items()}
        self.pending = {
            s: rows(num_sequences * self.pending_ring, 2 * c)
            for s, r in self.ratios.items()
            if r == 2
        }
        self._free = list(range(num_sequences - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Sequences that can still be opened."""
        return len(self._free)

    @property
    def allocated_bytes(self) -> int:
        """Memory of the whole pool."""
        parts = [self.keys, *self.index.values(), *self.pending.values()]
        return sum(t.nbytes for t in parts)

    def open(self) -> SequenceState:
        """A new empty sequence; StateError when all are taken."""
        if not self._free:
            raise StateError(f"all {self.num_sequences} sequences of the state pool are in use")
        slot = self._free.pop()
        self._clear_masked_rows(slot)
        return SequenceState(self, slot)

    def restore(self, saved: SavedState) -> SequenceState:
        """A saved sequence with its bits as they were; StateError when all are taken."""
        return saved.marks._copy_to(self.open(), saved.rows)

    def _clear_masked_rows(self, slot: int) -> None:
        """Zero what a new sequence reads under a mask before it writes: its ring, and the entry
        that empty places of a selection point to. A weight of 0 does not hide a NaN or an infinity
        that the last owner of the slot left there."""
        with torch.inference_mode():
            self.window[:, slot * self.ring : (slot + 1) * self.ring].zero_()
            for source, size in self.entries.items():
                self.main[source][slot * size].zero_()

    def close(self, state: SequenceState) -> None:
        """Give a sequence's rows back; the state must not be used afterwards."""
        if state.slot < 0:
            return
        assert state.slot not in self._free, f"closing a free sequence: {state.slot=}"
        self._free.append(state.slot)
        state.slot = -1

    def scrub(self, state: SequenceState) -> None:
        """Zero a sequence's rows. An empty place has weight 0, and 0 times a NaN left in it by a
        broken sequence would reach the next one."""
        a, ring, pending = state.slot, self.ring, self.pending_ring
        self.window[:, a * ring : (a + 1) * ring] = 0
        for source, size in self.entries.items():
            self.main[source][a * size : (a + 1) * size] = 0
            self.index[source][a * size : (a + 1) * size] = 0
            self.main[source][-1] = self.index[source][-1] = 0
        for rows in self.pending.values():
            rows[a * pending : (a + 1) * pending] = 0

    def check(self) -> None:
        """Programmer's check: free slots are distinct and in range."""
        assert len(set(self._free)) == len(self._free), self._free
        assert all(0 <= s < self.num_sequences for s in self._free), self._free


class SequenceState:
    """One sequence: its tokens and its rows in a pool.

    `token_ids`: ids whose forward pass is complete (items I and J are read from them).
    `decoder_tokens`: how many of them the decoder layers have seen; less than `num_tokens` only in
    the middle of an `encoder` prefill. `encoder_floor`, `decoder_floor`: window rows below these
    positions do not exist (bounded replay). `drafter_tokens`: the drafter's rings are fed up to
    here; `drafter_floor` as above.
    """

    def __init__(self, pool: StatePool, slot: int) -> None:
        self.pool, self.slot = pool, slot
        self.token_ids: list[int] = []
        self.decoder_tokens = 0
        self.encoder_floor = self.decoder_floor = 0
        self.drafter_tokens = self.drafter_floor = 0
        self.written = 0
        """Highest position ever written plus one: rings hold what is less than a ring below it."""
        self.replay_from: int | None = None
        """Set when the windows are lost: the next prefill replays the encoder from here."""
        self.tail: tuple[torch.Tensor, torch.Tensor] | None = None
        """Encoder output (streams, mix) of the last window, waiting for the decoder's replay."""
        self.origin = "exact"
        """`exact`, or how it was approximated: `decoder-replayed`, `encoder-replayed`."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    # ---- inventory -------------------------------------------------------------------------

    def items(self) -> list[StateItem]:
        """The inventory of notes 8.1 at the present length (K, a tap, is never kept: rings are fed
        with the step that made it)."""
        args, pool, n = self.pool.args, self.pool, self.num_tokens
        c, ci, width = args.head_dim, args.index_head_dim, pool.window.element_size()
        window_bytes = c + c // WINDOW_RECORD_BYTES_PER_GROUP
        main_bytes, index_bytes = c // 2 + c // 16, ci // 2 + ci // 32
        items = []
        for ratio, main_letter, index_letter in ((2, "A", "B"), (1, "C", "D")):
            rows = sum(n // r for r in pool.ratios.values() if r == ratio)
            for letter, name, packed, stored in (
                (main_letter, f"main KV, ratio {ratio}", main_bytes, c),
                (index_letter, f"index keys, ratio {ratio}", index_bytes, ci),
            ):
                items.append(
                    StateItem(letter, name, rows, rows * packed, rows * stored * width, True)
                )
        live = min(n, args.sliding_window)
        decoder = args.num_hidden_layers - args.decoder_start
        lost = self.replay_from is not None
        for letter, name, layers, tokens, floor in (
            ("E", "window KV, encoder", args.decoder_start, n, self.encoder_floor),
            ("F", "window KV, decoder", decoder, self.decoder_tokens, self.decoder_floor),
            (
                "G",
                "drafter ring",
                args.num_nextn_predict_layers,
                self.drafter_tokens,
                self.drafter_floor,
            ),
        ):
            rows = 0 if lost else layers * max(0, min(tokens, live, tokens - floor))
            items.append(
                StateItem(letter, name, rows, rows * window_bytes, rows * c * width, False)
            )
        open_groups = len(pool.pending) if n % 2 and not lost else 0
        items.append(
            StateItem(
                "H",
                "open compressor group",
                open_groups,
                open_groups * 2 * c * 4,
                open_groups * 2 * c * width,
                False,
            )
        )
        history = min(n, args.engram_max_ngram_size - 1) if args.engram_layer_ids else 0
        items.append(StateItem("I", "n-gram history", history, history * 8, 0, True))
        items.append(StateItem("J", "token ids", n, n * 8, n * 8, True))
        return items

    # ---- addresses -------------------------------------------------------------------------

    def ring_row(self, positions: np.ndarray) -> np.ndarray:
        """Rows of the window pools for positions."""
        return self.slot * self.pool.ring + positions % self.pool.ring

    def entry_row(self, source: int, entries: np.ndarray | int) -> np.ndarray | int:
        """Rows of the main and index pools of a source layer for entry numbers."""
        return self.slot * self.pool.entries[source] + entries

    # ---- cutting back ----------------------------------------------------------------------

    def truncate(self, num_tokens: int) -> None:
        """Cut the sequence to its first `num_tokens` tokens, exactly.

        Raises StateError, naming the items, where one cannot be cut exactly: window rows that were
        overwritten or never existed, the value and gate of an open pair. Nothing is changed then.
        `keep_global` cuts to any even length, at the price of a replay.
        """
        m, n = num_tokens, self.num_tokens
        if not 0 <= m <= n:
            raise StateError(f"cannot truncate a sequence of {n} tokens to {m}")
        if m == n:
            return
        if m == 0:
            self._reset()
            return
        if self.decoder_tokens < n:
            raise StateError(
                f"cannot truncate to {m} tokens in the middle of an encoder prefill "
                f"({self.decoder_tokens} of {n} tokens have passed the decoder); finish it first"
            )
        lost = self._items_lost_at(m)
        if lost:
            raise StateError(
                f"cannot truncate {n} tokens to {m} exactly: {', '.join(lost)}. "
                f"At most {self.pool.slack} tokens can be undone; keep_global(M) with an even M "
                f"keeps the rest and replays the windows"
            )
        del self.token_ids[m:]
        self.decoder_tokens = m
        self.drafter_tokens = min(self.drafter_tokens, m)

    def _items_lost_at(self, m: int) -> list[str]:
        held_from = self.written - self.pool.ring
        needed_from = max(0, m - self.pool.args.sliding_window + 1)
        lost = []
        if max(held_from, self.encoder_floor) > needed_from:
            lost.append("E (window KV, encoder)")
        if max(held_from, self.decoder_floor) > needed_from:
            lost.append("F (window KV, decoder)")
        if self.drafter_tokens and max(held_from, self.drafter_floor) > needed_from:
            lost.append("G (drafter ring)")
        if m % 2 and self.pool.pending and m - 1 < self.written - self.pool.pending_ring:
            lost.append("H (open compressor group)")
        return lost

    def _reset(self) -> None:
        self.token_ids.clear()
        self.decoder_tokens = self.drafter_tokens = self.written = 0
        self.encoder_floor = self.decoder_floor = self.drafter_floor = 0
        self.replay_from, self.tail, self.origin = None, None, "exact"

    def keep_global(self, num_tokens: int) -> None:
        """Keep only what prefix reuse keeps (A to D and the token ids) of the first `num_tokens`.

        The length must be even (ratio-2 groups are whole then). The next prefill replays the
        encoder over the last window before it (notes 3.9); results are approximate by design.
        """
        m, n = num_tokens, self.num_tokens
        if not 0 <= m <= n:
            raise StateError(f"cannot keep {m} tokens of a sequence of {n}")
        if m % 2 and self.pool.pending:
            raise StateError(
                f"global KV can be kept at an even length only (ratio-2 groups), got {m}; "
                f"try {m - 1}"
            )
        if m == 0:
            self._reset()
            return
        del self.token_ids[m:]
        start = max(0, m - self.pool.args.sliding_window)
        self.replay_from = start
        self.encoder_floor = self.decoder_floor = start
        self.decoder_tokens = start
        self.drafter_tokens = self.drafter_floor = start
        self.written = m
        self.tail = None
        self.origin = "encoder-replayed"

    # ---- copies ----------------------------------------------------------------------------

    def clone(self) -> SequenceState:
        """A second sequence with the same tokens and a copy of every row."""
        return self._copy_to(self.pool.open(), self._rows())

    def save(self) -> SavedState:
        """A copy in host memory for `StatePool.restore`; this sequence may then be closed."""
        saved = SavedState(self.pool, [rows.to("cpu", copy=True) for rows in self._rows()])
        self._copy_marks(saved.marks)
        return saved

    def _rows(self) -> list[torch.Tensor]:
        """Views of all rows that count at the present length."""
        pool, a = self.pool, self.slot
        ring, pending = pool.ring, pool.pending_ring
        views = [pool.window[:, a * ring : (a + 1) * ring]]
        for source, size in pool.entries.items():
            live = self.num_tokens // pool.ratios[source]
            for rows in (pool.main[source], pool.index[source]):
                views.append(rows[a * size : a * size + live])
        views += [rows[a * pending : (a + 1) * pending] for rows in pool.pending.values()]
        return views

    def _copy_to(self, other: SequenceState, rows: list[torch.Tensor]) -> SequenceState:
        self._copy_marks(other)
        with torch.inference_mode():
            for target, source in zip(other._rows(), rows, strict=True):
                target.copy_(source)
        return other

    def _copy_marks(self, other: SequenceState) -> None:
        other.token_ids = list(self.token_ids)
        for name in (
            "decoder_tokens",
            "encoder_floor",
            "decoder_floor",
            "drafter_tokens",
            "drafter_floor",
            "written",
            "replay_from",
            "tail",
            "origin",
        ):
            setattr(other, name, getattr(self, name))


class SavedState:
    """A sequence outside of its pool."""

    def __init__(self, pool: StatePool, rows: list[torch.Tensor]) -> None:
        self.rows = rows
        self.marks = SequenceState(pool, -1)
        """Its tokens and counters, without rows."""

    @property
    def nbytes(self) -> int:
        """Memory of the rows."""
        return sum(rows.nbytes for rows in self.rows)
