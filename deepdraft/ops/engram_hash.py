"""Tables of the Engram hash: primes, row offsets and multipliers (architecture notes 5.2).

Owns: the numbers that turn compressed token ids into table rows, and `hash_rows`, the plain form.
Knows nothing of: torch, tokenizers, embeddings. Everything is numpy int64.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deepdraft.arch import V41Args

_SEED_STEP = 10007
"""The multipliers of layer L come from numpy's default generator with seed 10007 * L."""


@dataclass(frozen=True, slots=True)
class EngramTables:
    """Hash constants of all Engram layers, in the order of `engram_layer_ids`.

    Orders are n-gram orders 2..N (index 0 is order 2), heads 0..H-1.
    """

    primes: npt.NDArray[np.int64]
    """[layers, orders, heads]; the number of table rows of each hash."""
    offsets: npt.NDArray[np.int64]
    """[layers, orders, heads]; first table row of each hash."""
    multipliers: npt.NDArray[np.int64]
    """[layers, N]; odd, one per look-back distance 0..N-1."""

    @property
    def num_embeddings(self) -> tuple[int, ...]:
        """Rows of each layer's embedding table."""
        return tuple(int(n) for n in self.primes.sum(axis=(1, 2)))


def _is_prime(value: int) -> bool:
    if value < 4:
        return value >= 2
    if value % 2 == 0:
        return False
    divisors = np.arange(3, int(value**0.5) + 2, 2, dtype=np.int64)
    return bool(np.all(value % divisors[divisors < value]))


def _next_primes(start: int, count: int, taken: set[int]) -> list[int]:
    """The first `count` primes above `start` that are not in `taken`; adds them to it."""
    found: list[int] = []
    value = start
    while len(found) < count:
        value += 1
        if value not in taken and _is_prime(value):
            found.append(value)
            taken.add(value)
    return found


def engram_tables(args: V41Args) -> EngramTables:
    """Primes, offsets and multipliers of every Engram layer.

    Primes ascend and no prime is used twice in the model; for each (layer, order) the search
    starts again just above `engram_vocab_size - 1` and passes over those taken.
    """
    num_layers = len(args.engram_layer_ids)
    num_orders = args.engram_max_ngram_size - 1
    num_heads = args.engram_n_heads
    taken: set[int] = set()
    primes = np.array(
        [
            [_next_primes(args.engram_vocab_size - 1, num_heads, taken) for _ in range(num_orders)]
            for _ in range(num_layers)
        ],
        dtype=np.int64,
    ).reshape(num_layers, num_orders, num_heads)
    flat = primes.reshape(num_layers, num_orders * num_heads)
    offsets = (np.cumsum(flat, axis=1) - flat).reshape(primes.shape)
    # Keeps every product token * multiplier below 2**63.
    high = (2**63 - 1) // args.engram_compressed_vocab_size // 2
    multipliers = np.array(
        [
            np.random.default_rng(_SEED_STEP * layer).integers(
                0, high, size=args.engram_max_ngram_size, dtype=np.int64
            )
            for layer in args.engram_layer_ids
        ],
        dtype=np.int64,
    ).reshape(num_layers, args.engram_max_ngram_size)
    return EngramTables(primes, offsets, 2 * multipliers + 1)


def hash_rows(
    tables: EngramTables, layer_index: int, history: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Table rows of one Engram layer.

    `history` [..., N] holds compressed ids: [..., s] is the token s positions back, the pad id
    where the look-back is blocked. Returns [..., orders * heads] in (order, head) order.
    """
    mixed = history * tables.multipliers[layer_index]
    np.bitwise_xor.accumulate(mixed, axis=-1, out=mixed)
    rows = mixed[..., 1:, None] % tables.primes[layer_index] + tables.offsets[layer_index]
    return rows.reshape(*history.shape[:-1], -1)
