"""Sequences whose rows are a plain function of their tokens: no model needed, any size.

Row p of plane x holds numbers that depend on tokens[:p + 1] and on x only, as a model's exact state
does, so a restored sequence can be checked against the function.
"""

import zlib

import numpy as np
import torch
from torch import Tensor

from deepdraft.kv.prefix import token_bytes
from deepdraft.models.state import SequenceState, StatePool


def prefix_sums(token_ids: list[int]) -> np.ndarray:
    """A number in 0..2**24 for each prefix."""
    raw, out, crc = token_bytes(token_ids), [], 0
    for i in range(len(token_ids)):
        crc = zlib.crc32(raw[4 * i : 4 * i + 4], crc)
        out.append(crc & 0xFFFFFF)
    return np.asarray(out, dtype=np.int64)


def rows_for(sums: np.ndarray, salt: int, width: int, dtype: torch.dtype) -> Tensor:
    """[n, width]: bytes for records (uint8), small integers otherwise."""
    mixed = (sums[:, None] * 31 + salt * 1009 + np.arange(width) * 7) % 251
    return torch.from_numpy(mixed).to(dtype)


def planes(state: SequenceState, sums: np.ndarray) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(pool rows, addresses, what belongs there) of everything a sequence holds."""
    pool, n = state.pool, len(sums)
    ring = pool.ring
    recent = np.arange(max(0, n - pool.args.sliding_window), n)
    out = []
    for layer in range(pool.window.shape[0]):
        rows = pool.window[layer]
        where = torch.from_numpy(state.slot * ring + recent % ring)
        out.append((rows, where, rows_for(sums[recent], layer, rows.shape[1], rows.dtype)))
    for kind, group in enumerate((pool.main, pool.index)):
        for source, rows in group.items():
            ratio = pool.ratios[source]
            ends = np.arange(n // ratio) * ratio + ratio - 1
            where = torch.arange(len(ends)) + int(state.entry_row(source, 0))
            value = rows_for(sums[ends], 100 + kind + source, rows.shape[1], rows.dtype)
            out.append((rows, where, value))
    last = np.arange(max(0, n - 2), n)
    for source, rows in pool.pending.items():
        where = torch.from_numpy(state.slot * pool.pending_ring + last % pool.pending_ring)
        out.append((rows, where, rows_for(sums[last], 200 + source, rows.shape[1], rows.dtype)))
    return out


def fill(state: SequenceState, token_ids: list[int]) -> None:
    """Make an empty sequence one that holds these tokens, as if a model had run."""
    for rows, where, value in planes(state, prefix_sums(token_ids)):
        rows[where] = value
    n = len(token_ids)
    state.token_ids[:] = token_ids
    state.decoder_tokens = state.drafter_tokens = state.written = n


def holds(state: SequenceState) -> bool:
    """Every row is the one that belongs to the sequence's tokens."""
    pieces = planes(state, prefix_sums(state.token_ids))
    return all(torch.equal(rows[where], value) for rows, where, value in pieces)


def spoil(pool: StatePool) -> None:
    """Fill the pool with what belongs to nobody."""
    for rows in (pool.window, *pool.main.values(), *pool.index.values(), *pool.pending.values()):
        rows.fill_(250 if rows.dtype == torch.uint8 else -7.0)


class RecordPool(StatePool):
    """A pool of published records, 528 + 288 + 68 bytes at published sizes."""

    def __init__(self, args, *, num_sequences: int, max_tokens: int, slack: int = 16) -> None:
        super().__init__(
            args,
            num_sequences=num_sequences,
            max_tokens=max_tokens,
            slack=slack,
            dtype=torch.uint8,
        )
        c, ci = args.head_dim, args.index_head_dim

        def resized(rows: Tensor, width: int) -> Tensor:
            return torch.zeros(*rows.shape[:-1], width, dtype=torch.uint8)

        self.window = resized(self.window, c + c // 32)
        self.main = {s: resized(r, c // 2 + c // 16) for s, r in self.main.items()}
        self.index = {s: resized(r, ci // 2 + ci // 32) for s, r in self.index.items()}
        self.pending = {
            s: torch.zeros(r.shape[0], 2 * c, dtype=torch.float32) for s, r in self.pending.items()
        }
