"""Random lives of the cache: store, reuse, pin, lease, evict, damage, quarantine, let time pass.

Sequences are synthetic (tests/kv/synthetic.py): every row is a function of the tokens before it, so
whatever sharing, eviction and damage did, a restored sequence is checked against the function.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deepdraft.kv.cache import Hit, KvCache
from deepdraft.kv.layout import Layout
from deepdraft.kv.settings import StoreSettings
from deepdraft.kv.store import CheckpointData, Entry, Lease
from deepdraft.models.state import StatePool
from deepdraft.proof.tiny import tiny_args
from tests.kv.synthetic import fill, holds, spoil

ARGS = tiny_args()
LAYOUT = Layout.of(ARGS, packed=False, block_tokens=4)
SETTINGS = StoreSettings(
    min_tokens=1,
    chunk_blocks=2,
    lease_s=10,
    max_lease_s=25,
    grace_s=15,
    leases_per_peer=2,
    leased_share=0.6,
    max_checkpoints=3,
)
TREE = {}
"""Texts that share prefixes in many ways: a branch at 5, 8 (a block), 16 (a chunk) and 30."""
for a in range(2):
    for b in range(2):
        for c in range(2):
            TREE[a, b, c] = [*range(5), *[10 + a] * 3, *[20 + b] * 8, *range(40, 54), *[60 + c] * 9]
KEYS = sorted(TREE)


@dataclass
class Reader:
    """A peer that reads under a lease; it may go on for the grace period after it."""

    lease: Lease
    places: list[tuple[int, int, bytes]]
    expires: float
    safe_until: float | None = None


class CacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.dir = tempfile.TemporaryDirectory()
        self.pool = StatePool(ARGS, num_sequences=3, max_tokens=48, slack=4)
        self.cache = KvCache(
            self.pool,
            expected=b"m" * 32,
            layout=LAYOUT,
            max_bytes=60 * 2 * LAYOUT.block_bytes,
            settings=SETTINGS,
            spill=Path(self.dir.name),
            spill_bytes=400_000,
        )
        self.memory = self.cache.memory
        self.memory.clock = lambda: self.now
        self.hits: list[tuple[Hit, list[int]]] = []
        self.readers: list[Reader] = []
        self.captured: list[CheckpointData] = []
        self.reserved: list[list[int]] = []
        self.quarantined: list[list[int]] = []
        self.damaged: set[int] = set()

    def teardown(self) -> None:
        """Everything given back: nothing may be left in use."""
        for hit, _ in self.hits:
            self.cache.release(hit)
        self.cache.discard(self.captured)
        for slots in self.reserved:
            self.memory.unreserve(slots)
        self.memory.release_quarantine()
        self.now += 1000
        self.memory.expire()
        self.cache.spill = None
        self.memory.evict(self.memory.slab.num_slots)
        self.memory.check()
        self.now += 1000
        self.memory.expire()
        assert self.memory.slab.num_free == self.memory.slab.num_slots, "memory was lost"
        self.dir.cleanup()

    @rule(key=st.sampled_from(KEYS), n=st.integers(1, 39), with_points=st.booleans())
    def store(self, key: tuple[int, int, int], n: int, with_points: bool) -> None:
        tokens, state = TREE[key][:n], self.pool.open()
        captured = []
        for point in self.cache.points(tokens) if with_points else []:
            fill(state, tokens[:point])
            taken = self.cache.capture(state)
            captured += [taken] if taken else []
        fill(state, tokens)
        self.cache.store(state, captured)
        self.pool.close(state)
        spoil(self.pool)

    @rule(key=st.sampled_from(KEYS), n=st.integers(1, 38), extra=st.integers(0, 3))
    def resume(self, key: tuple[int, int, int], n: int, extra: int) -> None:
        tokens, state = [*TREE[key][:n], *[99] * extra], self.pool.open()
        resumed = self.cache.resume(tokens, state)
        if resumed is not None:
            assert 0 < resumed.num_tokens < len(tokens)
            assert state.token_ids == tokens[: resumed.num_tokens]
            assert holds(state)
        else:
            assert state.num_tokens == 0
        self.pool.close(state)
        spoil(self.pool)

    @rule(key=st.sampled_from(KEYS), n=st.integers(2, 39))
    def look_up(self, key: tuple[int, int, int], n: int) -> None:
        tokens = TREE[key][:n]
        hit = self.cache.lookup(tokens) if len(self.hits) < 4 else None
        if hit is not None:
            self.hits.append((hit, tokens))

    @precondition(lambda self: self.hits)
    @rule(data=st.data(), use=st.booleans())
    def end_hit(self, data: st.DataObject, use: bool) -> None:
        hit, tokens = self.hits.pop(data.draw(st.integers(0, len(self.hits) - 1)))
        if not use:
            self.cache.release(hit)
            return
        state = self.pool.open()
        resumed = self.cache.restore(hit, tokens, state)
        assert resumed is None or holds(state)
        clean = isinstance(hit.entry, Entry) and not self.damaged
        assert resumed is not None or not clean, "a pinned, whole entry could not be restored"
        self.pool.close(state)
        spoil(self.pool)

    @precondition(lambda self: self.memory.entries)
    @rule(data=st.data(), peer=st.sampled_from(["p", "q", "r"]))
    def lease(self, data: st.DataObject, peer: str) -> None:
        entry = self.memory.entries[data.draw(st.sampled_from(sorted(self.memory.entries)))]
        lease = self.memory.lease(entry.id, peer)
        if lease is not None:
            view = self.memory.slab.view
            places = [
                (c.slot, c.length, view(c.slot, c.length).tobytes()) for c in entry.all_chunks()
            ]
            self.readers.append(Reader(lease, places, self.now + SETTINGS.lease_s))

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        reader = data.draw(st.sampled_from(self.readers))
        alive = reader.safe_until is None and self.now < reader.expires
        until = self.memory.renew(reader.lease.id)
        assert (until is not None) == alive
        if until is not None:
            reader.expires = until
        else:
            self._ended()

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def close_lease(self, data: st.DataObject) -> None:
        reader = data.draw(st.sampled_from(self.readers))
        valid = reader.safe_until is None and self.now < reader.expires
        assert self.memory.close(reader.lease.id) == valid
        self.readers.remove(reader)
        self._ended()

    @rule(seconds=st.integers(1, 20))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.memory.expire()
        self._ended()

    @precondition(lambda self: any(r.safe_until is None for r in self.readers))
    @rule(key=st.sampled_from(KEYS))
    def let_leases_lapse_under_pressure(self, key: tuple[int, int, int]) -> None:
        """The leases end by force, memory is wanted at once, and somebody writes to it."""
        self.now = max(r.expires for r in self.readers if r.safe_until is None)
        self.memory.expire()
        self._ended()
        self.memory.evict(self.memory.slab.num_slots)
        self.store(key=key, n=39, with_points=True)

    def _ended(self) -> None:
        """Readers whose lease was ended by force keep reading until their grace is over."""
        for reader in self.readers:
            if reader.safe_until is None and reader.expires <= self.now:
                reader.safe_until = self.now + SETTINGS.grace_s
        self.readers = [r for r in self.readers if r.safe_until is None or self.now < r.safe_until]

    @rule(slots=st.integers(1, 60))
    def evict(self, slots: int) -> None:
        busy = [e for e in self.memory.entries.values() if e.pins or e.leases]
        before = [(e, e.state) for e in busy]
        self.memory.evict(slots)
        assert all(e.state is state for e, state in before), "evicted while in use"

    @precondition(lambda self: self.memory.entries)
    @rule(data=st.data())
    def damage(self, data: st.DataObject) -> None:
        """Flip a bit in a chunk that no peer reads (what it reads is compared byte for byte)."""
        read = {slot for r in self.readers for slot, _, _ in r.places}
        chunks = [c for e in self.memory.entries.values() for c in e.all_chunks()]
        chunks = [c for c in chunks if c.slot not in read]
        if chunks:
            chunk = chunks[data.draw(st.integers(0, len(chunks) - 1))]
            at = data.draw(st.integers(0, chunk.length - 1))
            self.memory.slab.view(chunk.slot, chunk.length)[at] ^= 1 << data.draw(st.integers(0, 7))
            self.damaged.add(chunk.slot)

    @rule(count=st.integers(1, 12))
    def reserve(self, count: int) -> None:
        if sum(map(len, self.reserved)) < 15:
            try:
                slots = self.memory.reserve(count)
            except Exception as error:
                assert type(error).__name__ == "StoreFull"
            else:
                self.reserved.append(slots)
                for slot in slots:  # a transfer writes here
                    self.memory.room(slot, 10)[:] = 255
            self._ended()

    @precondition(lambda self: self.reserved)
    @rule(quarantine=st.booleans())
    def end_reservation(self, quarantine: bool) -> None:
        slots = self.reserved.pop()
        if quarantine:
            self.memory.quarantine(slots)
            self.quarantined.append(slots)
        else:
            self.memory.unreserve(slots)

    @precondition(lambda self: self.quarantined)
    @rule()
    def late_write(self) -> None:
        """What is quarantined may still be written to; nobody else may notice."""
        for slot in self.quarantined[0]:
            self.memory.slab.array[slot] = np.uint8(170)

    @precondition(lambda self: self.quarantined)
    @rule()
    def writer_is_gone(self) -> None:
        slots = self.quarantined.pop()
        assert self.memory.release_quarantine(slots) == len(slots)

    @precondition(lambda self: len(self.captured) < 2)
    @rule(key=st.sampled_from(KEYS), n=st.integers(1, 39))
    def capture(self, key: tuple[int, int, int], n: int) -> None:
        state = self.pool.open()
        fill(state, TREE[key][:n])
        taken = self.cache.capture(state)
        if taken is not None:
            self.captured.append(taken)
        self.pool.close(state)
        spoil(self.pool)

    @precondition(lambda self: self.captured)
    @rule()
    def discard(self) -> None:
        self.cache.discard([self.captured.pop()])

    @rule()
    def restart(self) -> None:
        """A new process finds what the disk holds, and every file of it is whole."""
        if self.cache.spill is not None:
            again = KvCache(
                self.pool,
                expected=b"m" * 32,
                layout=LAYOUT,
                max_bytes=1 << 20,
                settings=SETTINGS,
                spill=Path(self.dir.name),
                spill_bytes=400_000,
            )
            assert again.spill is not None
            assert set(again.spill.files) == set(self.cache.spill.files)
            again.check()

    @invariant()
    def books_are_right(self) -> None:
        self.cache.check()
        self.memory.check(held=[c for cp in self.captured for c in cp.chunks])

    @invariant()
    def readers_see_what_they_leased(self) -> None:
        for reader in self.readers:
            for slot, length, data in reader.places:
                assert self.memory.slab.array[slot, :length].tobytes() == data

    @invariant()
    def nothing_of_an_earlier_owner_is_behind_a_chunk(self) -> None:
        for entry in self.memory.entries.values():
            for chunk in entry.all_chunks():
                assert not self.memory.slab.array[chunk.slot, chunk.length :].any()

    @invariant()
    def the_high_water_mark_holds(self) -> None:
        slab = self.memory.slab
        assert slab.num_free >= 0 and len(self.pool._free) == 3


CacheMachine.TestCase.settings = settings(
    max_examples=6,
    stateful_step_count=200,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestCacheMachine = CacheMachine.TestCase
