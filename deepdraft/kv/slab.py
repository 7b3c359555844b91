"""One block of host memory cut into equal slots.

Owns: the bytes, and for each slot whether it is free, used, condemned or quarantined.
Knows nothing of: what lies in a slot, who uses it.

Condemned slots were readable by a peer whose lease was ended by force; they become free after a
grace period. Quarantined slots were the destination of a transfer that may still write; they
become free only when someone who knows that it cannot any more says so.
"""

from __future__ import annotations

import bisect
import enum
import itertools
import mmap
import os
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from deepdraft.errors import ConfigError
from deepdraft.kv import numa

PAGE = 4096


class SlotState(enum.IntEnum):
    """What a slot is."""

    FREE = 0
    USED = 1
    CONDEMNED = 2
    QUARANTINED = 3


class Slab:
    """`num_slots` slots of `slot_bytes`. Not thread-safe."""

    def __init__(
        self,
        *,
        slot_bytes: int,
        num_slots: int,
        as_file: bool = False,
        nodes: Sequence[int] = (),
        bind: Callable[[int, int, int], bool] = numa.bind,
    ) -> None:
        """`as_file`: the memory has a descriptor, `file`, from which the kernel can send.

        `nodes`: NUMA nodes, each of which gives an equal part; slots of the first one are taken
        first. Without them the kernel decides.
        """
        if slot_bytes < 1 or num_slots < 1:
            raise ConfigError(
                f"the KV store needs at least one slot of one byte, got {num_slots} slots of "
                f"{slot_bytes} bytes; give it more memory"
            )
        self.slot_bytes = -(-slot_bytes // PAGE) * PAGE
        self.num_slots = num_slots
        # New pages are zero and are backed by memory when first touched.
        self.file: int | None = None
        if as_file and hasattr(os, "memfd_create"):
            self.file = os.memfd_create("deepdraft-kv", os.MFD_CLOEXEC)
            os.ftruncate(self.file, self.slot_bytes * num_slots)
        size = self.slot_bytes * num_slots
        self._map = mmap.mmap(-1 if self.file is None else self.file, size)
        if hasattr(mmap, "MADV_DONTDUMP"):
            self._map.madvise(mmap.MADV_DONTDUMP)
        self.array = np.frombuffer(self._map, dtype=np.uint8).reshape(num_slots, self.slot_bytes)
        self.states = np.full(num_slots, SlotState.FREE, dtype=np.uint8)
        # Parts are whole ranges of slots, so one mapping is registered, sent from and shared.
        edges = [num_slots * i // max(1, len(nodes)) for i in range(max(1, len(nodes)) + 1)]
        self._ends = edges[1:]
        for node, (first, end) in zip(nodes, itertools.pairwise(edges), strict=False):
            if end > first:
                begin = self.array.ctypes.data + first * self.slot_bytes
                bind(begin, (end - first) * self.slot_bytes, node)
        self._free = [
            list(range(end - 1, first - 1, -1)) for first, end in itertools.pairwise(edges)
        ]
        """Of each part."""
        self._written = np.zeros(num_slots, dtype=np.int64)

    def __del__(self) -> None:
        file, self.file = getattr(self, "file", None), None
        if file is not None:
            os.close(file)

    @property
    def num_free(self) -> int:
        """Slots that can be taken now."""
        return sum(map(len, self._free))

    def part(self, slot: int) -> int:
        """The part, counted in the order of `nodes`, that a slot lies in."""
        return bisect.bisect_right(self._ends, slot)

    def count(self, state: SlotState) -> int:
        """Slots in a state."""
        return int((self.states == state).sum())

    def take(self, count: int) -> list[int] | None:
        """`count` slots, or None when there are fewer."""
        if count > self.num_free:
            return None
        slots: list[int] = []
        for free in self._free:
            while free and len(slots) < count:
                slots.append(free.pop())
        self.states[slots] = SlotState.USED
        return slots

    def move(self, slots: Iterable[int], new: SlotState) -> None:
        """Free, condemn or quarantine slots that are not free now."""
        for slot in slots:
            assert self.states[slot] != SlotState.FREE, f"slot {slot} is free"
            self.states[slot] = new
            if new == SlotState.QUARANTINED:
                self._written[slot] = self.slot_bytes  # by whom is not known
            if new == SlotState.FREE:
                self._free[self.part(slot)].append(slot)

    def view(self, slot: int, length: int) -> np.ndarray:
        """The first `length` bytes of a slot, uint8, not copied."""
        assert self.states[slot] != SlotState.FREE, f"slot {slot} is free"
        return self.array[slot, :length]

    def room(self, slot: int, length: int) -> np.ndarray:
        """As `view`, to be written over: bytes behind it that were ever written become zero."""
        self.array[slot, length : int(self._written[slot])] = 0
        self._written[slot] = length
        return self.view(slot, length)

    def check(self) -> None:
        """Raises AssertionError when the free list and the states disagree."""
        free = [slot for part in self._free for slot in part]
        assert len(set(free)) == len(free), free
        assert all(self.part(s) == i for i, part in enumerate(self._free) for s in part)
        assert set(free) == set(np.flatnonzero(self.states == SlotState.FREE).tolist())
