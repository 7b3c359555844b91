"""Stored conversations in host memory: who holds which chunk, who reads it, what goes first.

Owns: entries, chunks shared between entries, pins, leases, eviction, quarantine.
Knows nothing of: tokens' meaning, tensors, sockets, files.

A chunk is one slot of the slab. Once sealed (hashed) it never changes; a conversation that grows
gets new chunks. Entries share chunks by reference count. `pins` (this server uses the entry) and
leases (a peer reads it) are counted apart; memory is taken back only when both are zero.

    FILLING -> SEALED -> SUPERSEDED (a longer entry holds all of it: goes first)
                     -> CONDEMNED  (damaged or withdrawn: no new reader; freed after the last one)
"""

from __future__ import annotations

import enum
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from deepdraft.kv.codec import Checkpoint
from deepdraft.kv.errors import SnapshotError, StoreFull
from deepdraft.kv.prefix import token_array
from deepdraft.kv.settings import StoreSettings
from deepdraft.kv.slab import Slab, SlotState
from deepdraft.kv.snapshot import digest

TRIM_PAUSE_S = 1e-4


class EntryState(enum.Enum):
    """See the module."""

    FILLING = "filling"
    SEALED = "sealed"
    SUPERSEDED = "superseded"
    CONDEMNED = "condemned"


@dataclass(slots=True, eq=False)
class Chunk:
    """Bytes in one slot. `key` names content that other entries may share; None: private."""

    slot: int
    length: int
    key: bytes | None = None
    digest: bytes | None = None
    refs: int = 0
    hazard_until: float = 0.0
    """A peer whose lease ended by force may read the slot until then."""


@dataclass(slots=True, eq=False)
class CheckpointData:
    """A checkpoint and its chunks, shared between entries as a whole."""

    info: Checkpoint
    chunks: list[Chunk]


@dataclass(slots=True, eq=False)
class Entry:
    """One stored conversation."""

    id: int
    token_ids: np.ndarray
    """uint32."""
    exact: bool
    chunks: list[Chunk]
    checkpoints: list[CheckpointData]
    state: EntryState = EntryState.FILLING
    pins: int = 0
    leases: set[int] = field(default_factory=set)
    last_used: float = 0.0
    uses: int = 0
    fetched: bool = False
    """It came from a peer."""

    def all_chunks(self) -> list[Chunk]:
        """Chunks in stored order."""
        return [*self.chunks, *(c for cp in self.checkpoints for c in cp.chunks)]


@dataclass(slots=True)
class Lease:
    """A peer's right to read an entry until `expires`."""

    id: int
    entry: int
    peer: str
    expires: float
    ends: float
    began: float


class Store:
    """All entries of one server. Every method may be called from any thread."""

    def __init__(
        self,
        slab: Slab,
        settings: StoreSettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_drop: Callable[[Entry, str], None] = lambda entry, why: None,
        trimmed: bool = False,
    ) -> None:
        """`on_drop(entry, reason)` runs under the lock, before anything of the entry changes.
        `trimmed`: another thread calls `trim` now and then, so a reservation evicts no more than it
        needs."""
        self.slab, self.settings, self.trimmed = slab, settings or StoreSettings(), trimmed
        self.clock, self.on_drop = clock, on_drop
        self.lock = threading.RLock()
        self.entries: dict[int, Entry] = {}
        self.counters: Counter[str] = Counter()
        self._leases: dict[int, Lease] = {}
        self._shared: dict[bytes, Chunk] = {}
        self._reserved: set[int] = set()
        self._quarantined: set[int] = set()
        self._condemned: dict[int, float] = {}
        self._ids = itertools.count(1)
        self._ticks = itertools.count(1)

    # ---- room ------------------------------------------------------------------------------

    @property
    def num_unused(self) -> int:
        """Slots that can be filled before anything is evicted."""
        with self.lock:
            most = int(self.settings.high_water * self.slab.num_slots)
            return max(0, most - self.slab.num_slots + self.slab.num_free)

    def reserve(self, count: int, *, only_free: bool = False) -> list[int]:
        """`count` slots to write to, evicting where needed, unless `only_free`. Raises StoreFull;
        takes all or none.

        Above the high-water mark entries are evicted down to the low one, by `trim` where that is
        called.
        """
        with self.lock:
            self.expire()
            total = self.slab.num_slots
            if only_free:
                if count > self.num_unused:
                    raise StoreFull(f"{count} slots of the KV store are needed unused")
            elif self.trimmed:
                self._evict(count)
            elif total - self.slab.num_free + count > self.settings.high_water * total:
                self._evict(max(count, self._spare))
            slots = self.slab.take(count)
            if slots is None:
                self.counters["full"] += 1
                raise StoreFull(
                    f"the KV store has {self.slab.num_free} free slots of {total}, {count} are "
                    f"needed, and all that is left is in use"
                )
            self._reserved.update(slots)
            return slots

    @property
    def _spare(self) -> int:
        """Free slots at the low-water mark."""
        total = self.slab.num_slots
        return total - int(self.settings.low_water * total)

    def trim(self) -> None:
        """Above the high-water mark, evict down to the low one. The lock is given up after each
        entry: what an entry leaves behind (a file) takes its time."""
        with self.lock:
            total = self.slab.num_slots
            if total - self.slab.num_free <= self.settings.high_water * total:
                return
            idle = self._idle()
        for entry in idle:
            with self.lock:
                if self.slab.num_free >= self._spare:
                    return
                if self._is_idle(entry) and entry.id in self.entries:
                    self.condemn(entry.id, "evicted")
            time.sleep(TRIM_PAUSE_S)  # or nobody who waits for the lock gets it

    def unreserve(self, slots: Iterable[int]) -> None:
        """Give reserved slots back unused."""
        with self.lock:
            slots = list(slots)
            self._take_reserved(slots)
            self.slab.move(slots, SlotState.FREE)

    def quarantine(self, slots: Iterable[int]) -> None:
        """A transfer into these reserved slots did not end well and may still write."""
        with self.lock:
            slots = list(slots)
            self._take_reserved(slots)
            self.slab.move(slots, SlotState.QUARANTINED)
            self._quarantined.update(slots)
            self.counters["quarantined"] += len(slots)

    def release_quarantine(self, slots: Iterable[int] | None = None) -> int:
        """The writer is gone: free these quarantined slots, or all. Returns how many."""
        with self.lock:
            gone = self._quarantined & set(self._quarantined if slots is None else slots)
            self.slab.move(gone, SlotState.FREE)
            self._quarantined -= gone
            return len(gone)

    @property
    def quarantine_full(self) -> bool:
        """Too much is quarantined: stop fetching and restart what may still write."""
        cap = self.settings.quarantine_share * self.slab.num_slots
        return len(self._quarantined) > cap

    def _take_reserved(self, slots: list[int]) -> None:
        assert self._reserved.issuperset(slots), f"{slots=} are not reserved"
        self._reserved.difference_update(slots)

    # ---- writing ---------------------------------------------------------------------------

    def room(self, slot: int, length: int) -> np.ndarray:
        """The first bytes of a reserved slot, uint8, to be written. What an earlier owner left
        behind them becomes zero, so that nothing of it can ever be read."""
        assert slot in self._reserved, f"{slot=} is not reserved"
        return self.slab.room(slot, length)

    def chunk(self, slot: int, length: int, key: bytes | None = None) -> Chunk:
        """A chunk in a reserved slot, to be written and then given to `add`."""
        assert 0 < length <= self.slab.slot_bytes, f"{length=}"
        return Chunk(slot, length, key)

    def shared(self, key: bytes) -> Chunk | None:
        """The sealed chunk of this content, if there is one; `hold` keeps it."""
        with self.lock:
            return self._shared.get(key)

    def hold(self, chunks: Iterable[Chunk]) -> None:
        """One more user of each chunk."""
        with self.lock:
            for chunk in chunks:
                chunk.refs += 1

    def let_go(self, chunks: Iterable[Chunk]) -> None:
        """One user less; without users a chunk's slot is free, after its hazard has passed."""
        with self.lock:
            now = self.clock()
            for chunk in chunks:
                chunk.refs -= 1
                assert chunk.refs >= 0, chunk
                if chunk.refs:
                    continue
                if chunk.key is not None and self._shared.get(chunk.key) is chunk:
                    del self._shared[chunk.key]
                if chunk.slot in self._reserved:
                    self._reserved.remove(chunk.slot)
                if chunk.hazard_until > now:
                    self.slab.move([chunk.slot], SlotState.CONDEMNED)
                    self._condemned[chunk.slot] = chunk.hazard_until
                else:
                    self.slab.move([chunk.slot], SlotState.FREE)

    def add(
        self,
        token_ids: Sequence[int] | np.ndarray,
        *,
        exact: bool,
        chunks: list[Chunk],
        checkpoints: list[CheckpointData],
    ) -> Entry:
        """A new entry in state FILLING, pinned once. Takes over one reference of each chunk."""
        with self.lock:
            entry = Entry(
                next(self._ids), token_array(token_ids), exact, chunks, checkpoints, pins=1
            )
            for chunk in entry.all_chunks():
                assert chunk.refs >= 1, chunk
                self._reserved.discard(chunk.slot)
            entry.last_used = next(self._ticks)
            self.entries[entry.id] = entry
            return entry

    def hash(self, entry: Entry) -> list[tuple[Chunk, bytes]]:
        """Digests of the entry's chunks that have none yet. Takes no lock: nobody else writes."""
        return [
            (c, digest(self.slab.view(c.slot, c.length)))
            for c in entry.all_chunks()
            if c.digest is None
        ]

    def seal(self, entry: Entry, hashed: list[tuple[Chunk, bytes]]) -> None:
        """Enter the digests, share chunks under their keys, take the writer's pin away."""
        with self.lock:
            assert entry.state is EntryState.FILLING, entry.state
            for chunk, value in hashed:
                chunk.digest = value
            for chunk in entry.chunks:
                if chunk.key is not None:
                    self._shared.setdefault(chunk.key, chunk)
            entry.state = EntryState.SEALED
            self.unpin(entry)

    # ---- reading ---------------------------------------------------------------------------

    def pin(self, entry_id: int) -> Entry | None:
        """The entry, kept until `unpin`; None when it is gone or may not be read."""
        with self.lock:
            entry = self.entries.get(entry_id)
            if entry is None or entry.state in (EntryState.FILLING, EntryState.CONDEMNED):
                return None
            entry.pins += 1
            entry.uses += 1
            entry.last_used = next(self._ticks)
            return entry

    def unpin(self, entry: Entry) -> None:
        """The end of a use."""
        with self.lock:
            assert entry.pins > 0, f"entry {entry.id} is not pinned"
            entry.pins -= 1
            self._free_if_condemned(entry)

    def read(self, chunk: Chunk) -> np.ndarray:
        """A sealed chunk's bytes, not copied, checked. Raises SnapshotError when damaged."""
        data = self.slab.view(chunk.slot, chunk.length)
        if chunk.digest is None or digest(data) != chunk.digest:
            with self.lock:
                self.counters["corrupt"] += 1
                if chunk.key is not None and self._shared.get(chunk.key) is chunk:
                    del self._shared[chunk.key]
                chunk.key = None  # no new entry may take it over
            raise SnapshotError(f"a chunk in slot {chunk.slot} of the KV store is damaged")
        return data

    # ---- leases ----------------------------------------------------------------------------

    def lease(self, entry_id: int, peer: str) -> Lease | None:
        """A lease for a peer; None when the entry is gone or limits are reached (busy)."""
        with self.lock:
            self.expire()
            entry = self.entries.get(entry_id)
            if entry is None or entry.state in (EntryState.FILLING, EntryState.CONDEMNED):
                return None
            mine = sum(lease.peer == peer for lease in self._leases.values())
            leased = {c.slot for e in self.entries.values() if e.leases for c in e.all_chunks()}
            leased |= {c.slot for c in entry.all_chunks()}
            share = self.settings.leased_share * self.slab.num_slots
            if mine >= self.settings.leases_per_peer or len(leased) > share:
                self.counters["busy"] += 1
                return None
            now = self.clock()
            lease = Lease(
                next(self._ids),
                entry_id,
                peer,
                now + self.settings.lease_s,
                now + self.settings.max_lease_s,
                now,
            )
            self._leases[lease.id] = lease
            entry.leases.add(lease.id)
            entry.last_used = next(self._ticks)
            return lease

    def renew(self, lease_id: int) -> float | None:
        """The new expiry, at most `max_lease_s` after the start; None when the lease is over."""
        with self.lock:
            self.expire()
            lease = self._leases.get(lease_id)
            if lease is None:
                return None
            lease.expires = min(self.clock() + self.settings.lease_s, lease.ends)
            return lease.expires

    def leased(self, lease_id: int) -> Entry | None:
        """The entry of a lease that is valid now."""
        with self.lock:
            self.expire()
            lease = self._leases.get(lease_id)
            return None if lease is None else self.entries[lease.entry]

    def close(self, lease_id: int) -> bool:
        """The peer is done. True: the lease was valid throughout, what was read may be used."""
        with self.lock:
            self.expire()
            lease = self._leases.pop(lease_id, None)
            if lease is None:
                return False
            self._note_age(lease)
            entry = self.entries[lease.entry]
            entry.leases.remove(lease_id)
            self._free_if_condemned(entry)
            return True

    def expire(self) -> int:
        """End every lease whose time is over (all are looked at), free what was condemned long
        enough. Returns the number of leases ended."""
        with self.lock:
            now = self.clock()
            over = [lease for lease in self._leases.values() if lease.expires <= now]
            for lease in over:
                del self._leases[lease.id]
                self._note_age(lease)
                entry = self.entries[lease.entry]
                entry.leases.remove(lease.id)
                for chunk in entry.all_chunks():
                    chunk.hazard_until = max(chunk.hazard_until, now + self.settings.grace_s)
                self._free_if_condemned(entry)
            self.counters["leases_expired"] += len(over)
            safe = [slot for slot, until in self._condemned.items() if until <= now]
            for slot in safe:
                del self._condemned[slot]
            self.slab.move(safe, SlotState.FREE)
            return len(over)

    def _note_age(self, lease: Lease) -> None:
        age = round(1e3 * (self.clock() - lease.began))
        name = "lease_most_milliseconds"
        self.counters[name] = max(self.counters[name], age)

    # ---- going -----------------------------------------------------------------------------

    def supersede(self, entry_id: int) -> None:
        """A longer or newer entry exists: this one goes first. It can still be read."""
        with self.lock:
            entry = self.entries.get(entry_id)
            if entry is not None and entry.state is EntryState.SEALED:
                entry.state = EntryState.SUPERSEDED

    def condemn(self, entry_id: int, reason: str = "corrupt") -> None:
        """Nobody may start to read this entry any more; its memory goes with its last reader."""
        with self.lock:
            entry = self.entries.get(entry_id)
            if entry is None or entry.state is EntryState.CONDEMNED:
                return
            assert entry.state is not EntryState.FILLING, "condemning an entry being written"
            self.counters[f"dropped_{reason}"] += 1
            self.on_drop(entry, reason)
            entry.state = EntryState.CONDEMNED
            self._free_if_condemned(entry)

    def evict(self, slots: int) -> int:
        """Free at least `slots` slots if possible, oldest entries first. Returns the free ones."""
        with self.lock:
            self._evict(slots)
            return self.slab.num_free

    def _evict(self, wanted: int) -> None:
        if self.slab.num_free >= wanted:
            return
        for entry in self._idle():
            if self.slab.num_free >= wanted:
                break
            self.condemn(entry.id, "evicted")

    @staticmethod
    def _is_idle(entry: Entry) -> bool:
        sealed = entry.state in (EntryState.SEALED, EntryState.SUPERSEDED)
        return sealed and not entry.pins and not entry.leases

    def _idle(self) -> list[Entry]:
        """Entries that may go, the one that goes first in front."""
        idle = [e for e in self.entries.values() if self._is_idle(e)]
        idle.sort(key=lambda e: (e.state is EntryState.SEALED, e.last_used))
        return idle

    def _free_if_condemned(self, entry: Entry) -> None:
        if entry.state is EntryState.CONDEMNED and not entry.pins and not entry.leases:
            del self.entries[entry.id]
            self.let_go(entry.all_chunks())

    # ---- books -----------------------------------------------------------------------------

    def stats(self) -> dict[str, int]:
        """Counters, and slots by state."""
        with self.lock:
            slots = {f"slots_{s.name.lower()}": self.slab.count(s) for s in SlotState}
            return {
                "slot_bytes": self.slab.slot_bytes,
                "entries": len(self.entries),
                "leases": len(self._leases),
                "pins": sum(e.pins for e in self.entries.values()),
                **slots,
                **self.counters,
            }

    def check(self, *, held: Iterable[Chunk] = ()) -> None:
        """Raises AssertionError when the books are wrong. `held`: chunks in use outside entries."""
        with self.lock:
            self.slab.check()
            refs: Counter[int] = Counter()
            chunks: dict[int, Chunk] = {}
            for chunk in (*(c for e in self.entries.values() for c in e.all_chunks()), *held):
                refs[chunk.slot] += 1
                assert chunks.setdefault(chunk.slot, chunk) is chunk, "two chunks in one slot"
            for slot, chunk in chunks.items():
                assert chunk.refs == refs[slot], f"{chunk=} {refs[slot]=}"
                assert self.slab.states[slot] == SlotState.USED
            used = set(np.flatnonzero(self.slab.states == SlotState.USED).tolist())
            assert used == set(chunks) | self._reserved, "a slot is lost or used twice"
            for state, mine in (
                (SlotState.QUARANTINED, self._quarantined),
                (SlotState.CONDEMNED, set(self._condemned)),
            ):
                assert set(np.flatnonzero(self.slab.states == state).tolist()) == mine
            for key, chunk in self._shared.items():
                assert chunk.key == key and chunk.digest is not None
                assert chunks.get(chunk.slot) is chunk, "a shared chunk without users"
            leases = {(lease.entry, lease.id) for lease in self._leases.values()}
            assert leases == {(e.id, i) for e in self.entries.values() for i in e.leases}
            for entry in self.entries.values():
                idle = not entry.pins and not entry.leases
                assert not (idle and entry.state is EntryState.CONDEMNED)
                assert entry.pins >= 1 or entry.state is not EntryState.FILLING
