"""Reads through a sidecar process: with NIXL on UCX over tcp where its environment is there, and
with a stand-in for the agent everywhere. The numbers are those of the design's list."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deepdraft.adapters.environments import ENVIRONMENTS, read_record
from deepdraft.cli.options import fleet_settings
from deepdraft.errors import ConfigError
from deepdraft.kv import wire
from deepdraft.kv.directory import Record
from deepdraft.kv.fetch import Fetched, Fetcher, Peer
from deepdraft.kv.settings import TransferSettings
from deepdraft.kv.sidecar import PROGRAM, Sidecar, inherited
from deepdraft.kv.slab import Slab
from deepdraft.kv.transfer import Exporter
from deepdraft.kv.transport import Feed, Piece, Transport
from tests.kv.test_faults import Kept
from tests.kv.test_transfer import KEY, RECORD, TOKENS

FAKE = Path(__file__).with_name("fake_nixl.py")
NIXL = ENVIRONMENTS["nixl"]
PATIENCE_S = 60.0
SETTINGS = TransferSettings(
    connect_s=20,
    deadline_s=120,
    idle_s=30,
    renew_s=0.0001,
    backoff_s=30,
    sidecar_answer_s=30,
    sidecar_backoff_s=0.01,
)
"""So patient that a busy machine decides nothing; `impatient` is for what never comes."""


def until(what: Callable[[], bool]) -> None:
    """Waits for a condition; the limit only ends a test that failed."""
    end = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.005)


class Pair:
    """Owner A and reader B, each with a sidecar, in one process."""

    def __init__(self, kind: str, faults: Path, slots_b: int = 400) -> None:
        self.kind, self.faults = kind, faults
        faults.mkdir(exist_ok=True)
        self.settings = SETTINGS
        self.a, self.b = Kept(shared=True), Kept(slots=slots_b, shared=True)
        self.sidecars = [self._sidecar(side, name) for side, name in ((self.a, "a"), (self.b, "b"))]
        for sidecar in self.sidecars:
            sidecar.start()
        for sidecar in self.sidecars:
            sidecar.wait_ready(PATIENCE_S)
        self.exporter = Exporter(self.a.cache, settings=self.settings, sidecar=self.sidecars[0])
        self.fetcher = self._fetcher()
        self.a.store(TOKENS)
        (self.entry,) = self.a.entries
        self.exporter.own(KEY, RECORD, self.entry.id)
        self.peer = Peer("127.0.0.1", self.exporter.start("127.0.0.1"))

    def _sidecar(self, side: Kept, name: str) -> Sidecar:
        real = self.kind == "nixl"
        more = {"UCX_TLS": "tcp", "UCX_MODULES": "^ib"} if real else {}
        return Sidecar(
            side.cache.memory.slab,
            NIXL.python if real else sys.executable,
            name=name,
            settings=self.settings,
            program=PROGRAM if real else FAKE,
            environ={**os.environ, "DEEPDRAFT_FAKE_FAULTS": str(self.faults), **more},
        )

    def _fetcher(self, **more: Any) -> Fetcher:
        options = {"settings": self.settings, "sidecar": self.sidecars[1], **more}
        return Fetcher(self.b.cache, **options)

    def impatient(self, idle_s: float = 0.5) -> Fetched:
        """A fetch that is expected to wait in vain."""
        settings = TransferSettings(**{**_fields(self.settings), "idle_s": idle_s})
        fetcher = self._fetcher(settings=settings)
        return fetcher.fetch(self.peer, KEY, RECORD, TOKENS)

    def wrapped(self, wrap: Callable[[Transport], Transport]) -> None:
        self.fetcher = self._fetcher(wrap=wrap)

    def fetch(self, tokens: list[int] = TOKENS, record: Record = RECORD) -> Fetched:
        return self.fetcher.fetch(self.peer, KEY, record, tokens)

    def fault(self, name: str, *, on: bool = True) -> None:
        (self.faults / name).touch() if on else (self.faults / name).unlink()

    def hit(self) -> None:
        """An honest fetch after everything, through the sidecars."""
        for sidecar in self.sidecars:
            sidecar.wait_ready(PATIENCE_S)
        self.fetcher._backoff.clear()
        self.b.cache.memory.evict(self.b.cache.memory.slab.num_slots)
        located = self.exporter.counters.get("located")
        assert self.fetch().outcome == "hit"
        assert self.exporter.counters.get("located") == located + 1
        assert self.b.start(TOKENS) == 100

    def nothing_held(self) -> None:
        """Nothing came, and all memory but what is quarantined is free."""
        memory = self.b.cache.memory
        memory.check()
        assert not memory.entries and not memory._reserved

    def baseline(self) -> None:
        """Everything is given back on both sides."""
        memory = self.b.cache.memory
        memory.evict(memory.slab.num_slots)
        assert memory.slab.num_free == memory.slab.num_slots, "a slot stayed quarantined"
        for side in (self.a, self.b):
            side.cache.check()
            side.cache.memory.check()
            until(lambda side=side: side.cache.stats()["leases"] == 0)  # type: ignore[misc]
            assert side.cache.stats()["pins"] == 0

    def close(self) -> None:
        self.exporter.close()
        for sidecar in self.sidecars:
            sidecar.close()
        self.baseline()


def _fields(settings: TransferSettings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in settings.__dataclass_fields__}


needs_nixl = pytest.mark.skipif(
    read_record(NIXL) is None, reason="no NIXL here: deepdraft env create nixl"
)
KINDS = ["fake", pytest.param("nixl", marks=needs_nixl)]


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Pair]]:
    """One pair of each kind: every test leaves it as it found it."""
    made: dict[str, Pair] = {}

    def get(kind: str) -> Pair:
        if kind not in made:
            made[kind] = Pair(kind, tmp_path_factory.mktemp("faults"))
        return made[kind]

    yield get
    for pair in made.values():
        pair.close()


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest, pair_of: Callable[[str], Pair]) -> Iterator[Pair]:
    yield from used(pair_of(request.param))


@pytest.fixture
def fake(pair_of: Callable[[str], Pair]) -> Iterator[Pair]:
    yield from used(pair_of("fake"))


def used(pair: Pair) -> Iterator[Pair]:
    pair.wrapped(lambda inner: inner)
    yield pair
    pair.baseline()
    assert not list(pair.faults.iterdir())


def test_a_conversation_moves(pair: Pair) -> None:
    sent = pair.exporter.counters.get("bytes")
    got = pair.fetch()
    assert (got.outcome, got.tokens) == ("hit", 100)
    assert pair.exporter.counters.get("bytes") == sent, "chunks went over the control connection"
    (entry,) = pair.b.entries
    assert pair.b.cache.manifest(entry) == pair.a.cache.manifest(pair.entry)
    assert pair.b.start(TOKENS) == 100
    pair.hit()


def test_without_a_sidecar_on_either_side_chunks_come_over_tcp(fake: Pair) -> None:
    for side in (fake.exporter, fake.fetcher):
        before = fake.exporter.counters.get("bytes")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(side, "sidecar", None)
            assert fake.fetch().outcome == "hit"
        assert fake.exporter.counters.get("bytes") > before
        fake.b.cache.memory.evict(400)


# ---- 13, 15, 17: processes that end --------------------------------------------------------


@pytest.mark.parametrize("which", [0, 1], ids=["owner's", "reader's"])
def test_a_sidecar_that_was_killed_comes_back_as_another(pair: Pair, which: int) -> None:
    pair.hit()
    sidecar = pair.sidecars[which]
    before, restarts = sidecar.wait_ready(PATIENCE_S), sidecar.counters.get("restarts")
    assert sidecar.pid is not None
    os.kill(sidecar.pid, signal.SIGKILL)
    until(lambda: sidecar.export not in (before, None))
    after = sidecar.wait_ready(PATIENCE_S)
    assert after.name != before.name and sidecar.counters.get("restarts") == restarts + 1
    pair.hit()


def test_a_sidecar_that_aborts_while_it_reads(fake: Pair) -> None:
    fake.fault("crash")
    assert fake.fetch().outcome == "disconnect"
    fake.nothing_held()
    assert fake.b.cache.memory.slab.num_free == 400, "the process is gone: nothing is unsettled"
    fake.fault("crash", on=False)
    fake.hit()


def test_an_owner_that_died_before_it_was_read(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader has the metadata of an incarnation that is not there any more."""
    owner = pair.sidecars[0]
    old = owner.wait_ready(PATIENCE_S)
    honest = pair.exporter._locate

    def locate(lease: int) -> wire.Reply:
        reply = honest(lease)
        if owner.export == old:
            owner.restart()
            until(lambda: owner.export not in (old, None))
        return reply

    monkeypatch.setattr(pair.exporter, "_locate", locate)
    assert pair.impatient(5.0).outcome in ("disconnect", "timeout")
    pair.nothing_held()
    pair.sidecars[1].restart()  # what it may still write to comes back with its end
    until(lambda: not pair.b.cache.memory._quarantined)
    pair.hit()


def test_a_reader_that_dies_leaves_no_lease(pair: Pair) -> None:
    """Its connection ends, and with it the lease; the owner goes on serving."""
    link = wire.Link.connect("127.0.0.1", pair.peer.port, None, "", idle_s=5, by=5)
    nonce = bytes(wire.NONCE_BYTES)
    expected = pair.a.cache.expected
    link.send(wire.Open(wire.PROTOCOL, expected, KEY, RECORD.epoch, RECORD.sequence, nonce))
    assert isinstance(link.reply(), wire.Opened)
    link.send(wire.Locate())
    assert isinstance(link.reply(), wire.Located)
    assert pair.a.cache.stats()["leases"] == 1
    link.close()
    until(lambda: pair.a.cache.stats()["leases"] == 0)
    pair.hit()


# ---- 14, 16, 33: what comes late -----------------------------------------------------------


def test_what_an_owner_that_stalled_writes_late_goes_into_quarantine(pair: Pair) -> None:
    """The test that catches a destination given back too early."""
    pair.hit()  # connected: now the owner stops in the middle of its life
    owner = pair.sidecars[0]
    memory = pair.b.cache.memory
    memory.evict(400)
    memory.slab.array[:] = 0
    stop, go = _stopper(pair, owner)
    stop()
    assert pair.impatient().outcome == "timeout"
    pair.nothing_held()
    held = sorted(memory._quarantined)
    assert held and memory.slab.num_free == 400 - len(held)
    # The rest is somebody else's meanwhile, and stays as it is.
    pair.b.store(list(range(50, 150)))
    others = [s for s in range(400) if s not in held]
    before = memory.slab.array[others].copy()
    assert not memory.slab.array[held].any()
    go()
    until(lambda: memory.slab.array[held].any() or not memory._quarantined)
    until(lambda: not memory._quarantined)  # each read has ended, or its process has
    assert (memory.slab.array[others] == before).all()
    pair.hit()


def _stopper(pair: Pair, owner: Sidecar) -> tuple[Callable[[], None], Callable[[], None]]:
    if pair.kind == "fake":
        return lambda: pair.fault("stall"), lambda: pair.fault("stall", on=False)
    assert owner.pid is not None and owner._sock is not None
    pid = owner.pid
    # A stopped process answers nothing, so its parent must not look: that is another test.
    owner._sock.settimeout(1e6)
    return lambda: os.kill(pid, signal.SIGSTOP), lambda: os.kill(pid, signal.SIGCONT)


def test_a_full_quarantine_starts_the_sidecar_anew(tmp_path: Path) -> None:
    pair = Pair("fake", tmp_path / "faults", slots_b=60)
    try:
        pair.fault("stall")
        reader = pair.sidecars[1]
        assert pair.impatient().outcome == "timeout"  # eight slots of sixty are above the cap
        until(lambda: not pair.b.cache.memory._quarantined)
        assert reader.counters.get("restarts") == 1 or reader.export is None
        pair.fault("stall", on=False)
        pair.hit()
    finally:
        pair.close()


def test_a_sidecar_that_answers_nothing_is_ended(fake: Pair) -> None:
    reader = fake.sidecars[1]
    stalled = reader.counters.get("stalled")
    reader.settings = TransferSettings(**{**_fields(SETTINGS), "sidecar_answer_s": 1.0})
    reader.restart()
    fake.fault("deaf")

    def ended() -> bool:
        reader.wait_ready(PATIENCE_S)
        fake.fetcher._backoff.clear()
        fake.b.cache.memory.evict(400)
        return fake.fetch().outcome == "disconnect"

    until(ended)  # or it was ended before the fetch, which then went over TCP
    assert reader.counters.get("stalled") > stalled
    reader.settings = SETTINGS
    fake.fault("deaf", on=False)
    reader.restart()
    until(lambda: not fake.b.cache.memory._quarantined)
    fake.hit()


# ---- 18, 19, 20, 21, 22: what is not what it seems -----------------------------------------


def test_done_without_bytes(fake: Pair) -> None:
    fake.fault("lie")
    assert fake.fetch().outcome == "corrupt"
    fake.nothing_held()
    fake.fault("lie", on=False)
    fake.hit()


def test_an_error_that_proves_nothing_holds_memory_back_until_a_restart(fake: Pair) -> None:
    fake.fault("error")
    assert fake.fetch().outcome == "disconnect"
    fake.nothing_held()
    assert fake.b.cache.memory._quarantined
    fake.sidecars[1].restart()
    until(lambda: not fake.b.cache.memory._quarantined)
    fake.fault("error", on=False)
    fake.hit()


class FaultTransport:
    """Lies about what another transport brought."""

    def __init__(
        self,
        inner: Transport,
        fault: Callable[[Feed, Piece, int, int], None],
        *,
        idle: bool = False,
    ) -> None:
        self.inner, self.fault, self.idle = inner, fault, idle

    def readers(self, num_pieces: int) -> Any:
        if self.idle:
            return [lambda feed: None]

        def run(read: Callable[[Feed], None], feed: Feed) -> None:
            read(_Bent(feed, self.fault))

        return [lambda feed, r=r: run(r, feed) for r in self.inner.readers(num_pieces)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class _Bent:
    def __init__(self, feed: Feed, fault: Callable[[Feed, Piece, int, int], None]) -> None:
        self.feed, self.fault = feed, fault

    def take(self) -> Piece | None:
        return self.feed.take()

    def arrived(self, piece: Piece, at: int, length: int) -> None:
        self.fault(self.feed, piece, at, length)


def flipped(feed: Feed, piece: Piece, at: int, length: int) -> None:
    piece.into[at + length // 2] ^= 1
    feed.arrived(piece, at, length)


def half(feed: Feed, piece: Piece, at: int, length: int) -> None:
    piece.into[at + length // 2 : at + length] = bytes(length - length // 2)
    feed.arrived(piece, at, length)


def twice(feed: Feed, piece: Piece, at: int, length: int) -> None:
    feed.arrived(piece, at, length)
    feed.arrived(piece, at, length)


@pytest.mark.parametrize("fault", [flipped, half, twice])
def test_bytes_that_changed_on_the_way(fault: Any, pair: Pair) -> None:
    pair.wrapped(lambda inner: FaultTransport(inner, fault))  # type: ignore[arg-type,return-value]
    assert pair.fetch().outcome == "corrupt"
    pair.nothing_held()
    pair.wrapped(lambda inner: inner)
    pair.hit()


def test_a_transport_that_ends_without_the_chunks(pair: Pair) -> None:
    pair.wrapped(lambda inner: FaultTransport(inner, flipped, idle=True))  # type: ignore[arg-type,return-value]
    assert pair.fetch().outcome == "corrupt"
    pair.nothing_held()
    pair.wrapped(lambda inner: inner)
    pair.hit()


def test_memory_that_is_used_again_while_it_is_read(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner's lease ends by force: what was read is thrown away, whatever it is."""
    memory, now = pair.a.cache.memory, [time.monotonic()]
    monkeypatch.setattr(memory, "clock", lambda: now[0])

    def force(feed: Feed, piece: Piece, at: int, length: int) -> None:
        now[0] += 500.0
        memory.expire()
        feed.arrived(piece, at, length)

    pair.wrapped(lambda inner: FaultTransport(inner, force))  # type: ignore[arg-type,return-value]
    assert pair.fetch().outcome in ("corrupt", "disconnect")
    pair.nothing_held()
    pair.wrapped(lambda inner: inner)
    pair.hit()


@pytest.mark.parametrize("wrong", ["fewer", "elsewhere", "name"])
def test_places_that_are_not_the_chunks(
    wrong: str, fake: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = fake.exporter._locate

    def locate(lease: int) -> wire.Reply:
        right = honest(lease)
        assert isinstance(right, wire.Located)
        if wrong == "fewer":
            return wire.Located(right.name, right.agent, right.addresses[:-1])
        if wrong == "name":
            return wire.Located("another", right.agent, right.addresses)
        return wire.Located(right.name, right.agent, right.addresses[::-1])

    monkeypatch.setattr(fake.exporter, "_locate", locate)
    assert fake.fetch().outcome in ("corrupt", "disconnect")
    fake.nothing_held()
    monkeypatch.setattr(fake.exporter, "_locate", honest)
    fake.hit()


# ---- the process ---------------------------------------------------------------------------


def test_a_sidecar_that_does_not_start_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / "no_start").touch()
    environ = {**os.environ, "DEEPDRAFT_FAKE_FAULTS": str(tmp_path)}
    slab = Slab(slot_bytes=4096, num_slots=4, as_file=True)
    sidecar = Sidecar(
        slab, sys.executable, name="x", settings=SETTINGS, program=FAKE, environ=environ
    )
    sidecar.start()
    try:
        until(lambda: sidecar.counters.get("restarts") >= 2)
        assert sidecar.export is None
        (tmp_path / "no_start").unlink()
        assert sidecar.wait_ready(PATIENCE_S).name.startswith("x-")
    finally:
        sidecar.close()
    assert sidecar.export is None and sidecar.pid is None


def test_what_a_sidecar_needs() -> None:
    slab = Slab(slot_bytes=4096, num_slots=4, as_file=True)
    with pytest.raises(ConfigError, match="env create nixl"):
        Sidecar(slab, "/nowhere/python", name="x")
    with pytest.raises(ConfigError, match="memfd"):
        Sidecar(Slab(slot_bytes=4096, num_slots=4), sys.executable, name="x")


def test_a_sidecar_gets_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPDRAFT_KV_DIRECTORY", "redis://:secret@x")
    monkeypatch.setenv("UCX_TLS", "tcp")
    there = inherited()
    assert there["UCX_TLS"] == "tcp" and "secret" not in str(there)
    assert set(there) < set(os.environ)


def test_the_flag(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DEEPDRAFT_ENVIRONMENTS", str(tmp_path))
    names = ("directory", "name", "listen", "advertise", "files", "fetch", "nixl", "hand_over_s")
    flags = dict.fromkeys(f"kv_{name}" for name in names)
    assert fleet_settings(flags)["nixl"] is None
    assert fleet_settings({**flags, "kv_nixl": "/x/python"})["nixl"] == "/x/python"
    with pytest.raises(ConfigError, match="env create nixl"):
        fleet_settings({**flags, "kv_nixl": "env"})
