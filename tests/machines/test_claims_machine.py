"""Random lives of the directory and of leases against plain models, 10,000 steps and more."""

import asyncio
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from deepdraft.kv.directory import Claim, DirectorySettings, LocalDirectory, Record
from deepdraft.kv.errors import StoreFull
from deepdraft.kv.settings import StoreSettings
from deepdraft.kv.slab import Slab, SlotState
from deepdraft.kv.store import Entry, EntryState, Store

KEYS = st.sampled_from("xyz")
SERVERS = st.sampled_from("ABC")


class ClaimMachine(RuleBasedStateMachine):
    """Servers look conversations up and claim them, records expire, the directory restarts."""

    records = Bundle("records")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.model: dict[str, tuple[Record, float]] = {}
        self.highest = 0
        self.restart()

    def run(self, work: Any) -> Any:
        return asyncio.run(work)

    @rule()
    def restart(self) -> None:
        """Everything is lost, the epoch with it."""
        self.directory = LocalDirectory(DirectorySettings(record_s=10), clock=lambda: self.now)
        self.model.clear()
        self.state_of: dict[str, int] = {}
        self.highest = 0

    @rule(seconds=st.sampled_from([0.5, 4.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    def live(self, key: str) -> Record:
        record, until = self.model.get(key, (Record(self.directory.epoch, 0), 0.0))
        return record if until > self.now else Record(self.directory.epoch, 0)

    @rule(target=records, key=KEYS)
    def lookup(self, key: str) -> tuple[str, Record]:
        found = self.run(self.directory.lookup(key))
        assert found == self.live(key)
        if found.sequence:
            self.model[key] = (found, self.now + 10)
        return key, found

    @rule(target=records, seen=records, server=SERVERS, moved=st.booleans())
    def claim(self, seen: tuple[str, Record], server: str, moved: bool) -> tuple[str, Record]:
        """By `moved` the state stays, and who saw it before may still claim."""
        key, record = seen
        now = self.live(key)
        claim: Claim = self.run(self.directory.claim(key, record, server, "fp", moved=moved))
        state = self.state_of.get(key, 0) if now.sequence else 0
        fits = now.epoch == record.epoch and record.sequence in (now.sequence, state)
        assert claim.result == ("ok" if fits else "stale")
        if not fits:
            return seen
        assert claim.sequence > self.highest, "a sequence came back within an epoch"
        self.highest = claim.sequence
        self.state_of[key] = state if moved else claim.sequence
        mine = Record(self.directory.epoch, claim.sequence, server, "fp")
        self.model[key] = (mine, self.now + 10)
        return key, mine

    @rule(seen=records)
    def check(self, seen: tuple[str, Record]) -> None:
        key, record = seen
        now = self.live(key)
        right = now.sequence > 0 and (now.epoch, now.sequence, now.owner) == (
            record.epoch,
            record.sequence,
            record.owner,
        )
        assert self.run(self.directory.check(key, record)) == right
        if right:
            self.model[key] = (now, self.now + 10)

    @rule(seen=records)
    def release(self, seen: tuple[str, Record]) -> None:
        key, record = seen
        now = self.live(key)
        self.run(self.directory.release(key, record))
        if now.sequence and (now.epoch, now.sequence, now.owner) == (
            record.epoch,
            record.sequence,
            record.owner,
        ):
            del self.model[key]


TIMES = StoreSettings(lease_s=3, max_lease_s=9, grace_s=5, leases_per_peer=2)


class LeaseMachine(RuleBasedStateMachine):
    """Entries, pins, leases and quarantine; memory that somebody may read is never written."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.store = Store(Slab(slot_bytes=64, num_slots=24), TIMES, clock=lambda: self.now)
        self.pinned: list[Entry] = []
        self.leases: dict[int, tuple[Entry, float, float]] = {}
        """What a peer believes: entry, when it must renew, when it ends for good."""
        self.reading: list[tuple[list[int], bytes, float]] = []
        """Slots that a late reader may look at, what is in them, until when."""
        self.quarantined: list[int] = []
        self.count = 0

    def bytes_of(self, slots: list[int]) -> bytes:
        return self.store.slab.array[slots].tobytes()

    @rule(chunks=st.integers(1, 6))
    def add(self, chunks: int) -> None:
        self.count += 1
        try:
            slots = self.store.reserve(chunks)
        except StoreFull:
            return
        made = []
        for slot in slots:
            self.store.slab.view(slot, 64)[:] = self.count % 251
            made.append(self.store.chunk(slot, 64))
        self.store.hold(made)
        entry = self.store.add([self.count], exact=True, chunks=made, checkpoints=[])
        self.store.seal(entry, self.store.hash(entry))

    @rule(pick=st.integers(0, 99))
    def pin(self, pick: int) -> None:
        if self.store.entries:
            number = sorted(self.store.entries)[pick % len(self.store.entries)]
            entry = self.store.pin(number)
            if entry is not None:
                self.pinned.append(entry)

    @rule(pick=st.integers(0, 99))
    def unpin(self, pick: int) -> None:
        if self.pinned:
            entry = self.pinned.pop(pick % len(self.pinned))
            for chunk in entry.chunks:
                self.store.read(chunk)  # a pinned entry is whole
            self.store.unpin(entry)

    @rule(pick=st.integers(0, 99), peer=st.sampled_from("PQ"))
    def lease(self, pick: int, peer: str) -> None:
        if self.store.entries:
            number = sorted(self.store.entries)[pick % len(self.store.entries)]
            lease = self.store.lease(number, peer)
            if lease is not None:
                entry = self.store.entries[number]
                assert entry.state is not EntryState.CONDEMNED
                self.leases[lease.id] = (entry, self.now + 3, self.now + 9)

    @rule(pick=st.integers(0, 99))
    def renew(self, pick: int) -> None:
        if self.leases:
            number = sorted(self.leases)[pick % len(self.leases)]
            entry, expires, ends = self.leases[number]
            until = self.store.renew(number)
            assert (until is None) == (expires <= self.now)
            if until is not None:
                assert until == min(self.now + 3, ends)
                self.leases[number] = (entry, until, ends)

    @rule(pick=st.integers(0, 99))
    def close(self, pick: int) -> None:
        if self.leases:
            number = sorted(self.leases)[pick % len(self.leases)]
            entry, expires, _ = self.leases.pop(number)
            valid = expires > self.now
            if valid:
                for chunk in entry.chunks:
                    self.store.read(chunk)  # what was read under a valid lease is whole
            assert self.store.close(number) == valid

    @rule(seconds=st.sampled_from([0.5, 2.0, 4.0]))
    def wait(self, seconds: float) -> None:
        before = self.now
        self.now += seconds
        for entry, expires, _ in self.leases.values():
            if before < expires <= self.now and entry.id in self.store.entries:
                # The peer does not know yet, and reads on for as long as the grace.
                slots = [c.slot for c in entry.chunks]
                self.reading.append((slots, self.bytes_of(slots), self.now + 5))
        self.store.expire()

    @rule(pick=st.integers(0, 99))
    def condemn(self, pick: int) -> None:
        if self.store.entries:
            number = sorted(self.store.entries)[pick % len(self.store.entries)]
            self.store.condemn(number)

    @rule(count=st.integers(1, 24))
    def evict(self, count: int) -> None:
        self.store.evict(count)

    @rule(count=st.integers(1, 3))
    def quarantine(self, count: int) -> None:
        try:
            slots = self.store.reserve(count)
        except StoreFull:
            return
        self.store.quarantine(slots)
        self.quarantined += slots

    @rule()
    def release(self) -> None:
        assert self.store.release_quarantine() == len(self.quarantined)
        self.quarantined.clear()

    @invariant()
    def the_books_are_right(self) -> None:
        self.store.check()
        states = self.store.slab.states
        assert set(np.flatnonzero(states == SlotState.QUARANTINED)) == set(self.quarantined)
        assert all(entry.pins > 0 for entry in self.pinned)

    @invariant()
    def a_late_reader_sees_no_new_bytes(self) -> None:
        self.reading = [r for r in self.reading if r[2] > self.now]
        for slots, data, _ in self.reading:
            assert self.bytes_of(slots) == data


TestClaims = ClaimMachine.TestCase
TestClaims.settings = settings(max_examples=60, stateful_step_count=80, deadline=None)
TestLeases = LeaseMachine.TestCase
TestLeases.settings = settings(max_examples=60, stateful_step_count=80, deadline=None)
