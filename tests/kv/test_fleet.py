"""Several servers: directory and transfer together, and every fault of either."""

import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from deepdraft.errors import ConfigError
from deepdraft.kv.costs import Costs
from deepdraft.kv.directory import Claim, LocalDirectory, Record
from deepdraft.kv.fleet import Fleet, Session, owner_of, peer_of
from deepdraft.kv.fleet_files import FleetFiles, init_fleet, load_fleet
from deepdraft.kv.store import EntryState
from deepdraft.models.deepseek_v41 import DeepseekV41
from tests.kv.conftest import FAST, FINGERPRINT, MakeFleet, Served, text
from tests.kv.test_exact import both
from tests.kv.test_faults import Kept

KEY = "c" * 64


class Server:
    """A cache of synthetic sequences in a fleet."""

    def __init__(self, join: MakeFleet, name: str, slots: int = 400, **options: Any) -> None:
        self.kept = Kept(slots)
        self.fleet = join(self.kept.cache, name, **options)

    def turn(self, tokens: list[int], key: str = KEY) -> Session:
        """A request: prepare, start from what is there, store, claim."""
        session = self.fleet.prepare(key, [*tokens, 1])
        self.started = self.kept.start(tokens)
        self.kept.store(tokens, session.stored)
        self.fleet.flush()
        return session

    @property
    def owns(self) -> bool:
        return KEY in self.fleet.exporter.owned()


def counts(server: Server) -> dict[str, int]:
    return server.fleet.stats()


def test_a_conversation_follows_its_requests(join: MakeFleet) -> None:
    a, b = Server(join, "a"), Server(join, "b")
    a.turn(text(1, 40))
    session = b.turn(text(1, 60))
    assert session.fetched is not None and session.fetched.outcome == "hit"
    assert b.started == 40
    # B is the owner now; A's next request fetches what B added, not what A has already.
    session = a.turn(text(1, 80))
    assert session.fetched is not None and session.fetched.outcome == "hit"
    assert a.started == 60
    whole = sum(c.length for c in b.kept.entries[-1].all_chunks())
    assert 0 < session.fetched.num_bytes < whole
    assert counts(a)["claim_ok"] == 2 and counts(b)["claim_ok"] == 1
    assert a.owns


def test_hits_of_a_peer_say_so(join: MakeFleet, model: DeepseekV41) -> None:
    a, b = Served(model), Served(model)
    fleets = [join(a.cache, "a"), join(b.cache, "b")]
    prompt = text(2, 60)
    session = fleets[0].prepare(KEY, prompt)
    tokens, _, _, state = a.answer(prompt, keep=False)
    a.runner.feed_pending(state)
    a.cache.store(state, then=session.stored)
    fleets[0].flush()
    turn = [*prompt, *tokens, *text(3, 20)]
    assert fleets[1].prepare(KEY, turn).fetched is not None
    _, _, resumed, state = b.answer(turn, keep=False)
    assert resumed is not None
    assert (resumed.source, resumed.provenance) == ("peer", "exact")
    b.close(state)
    assert both(b, turn) == "63/63"


def test_one_id_finds_a_fetch_in_both_logs(
    join: MakeFleet, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = Server(join, "a"), Server(join, "b")
    a.turn(text(1, 40))
    caplog.set_level(logging.INFO, "deepdraft")
    for trace, result in (("4bf92f35", "opened"), ("0ff", "stale")):
        b.fleet.prepare(KEY, [*text(1, 60), 1], trace)
        lines = [vars(r) for r in caplog.records]
        seen = [(line["event"], line["fields"]) for line in lines if "event" in line]
        reads = [f for event, f in seen if event == "kv_read" and f["trace"] == trace]
        fetches = [f for event, f in seen if event == "kv_fetch" and f["trace"] == trace]
        assert [f["result"] for f in reads] == [result]
        assert [f["outcome"] for f in fetches] == ["hit" if result == "opened" else result]
        a.fleet.exporter.disown(KEY)
        a.fleet.exporter.own(KEY, Record("another", 99, a.fleet.owner), a.kept.entries[0].id)
        b.kept.cache.memory.evict(400)


def test_a_hundred_turns_in_turn(join: MakeFleet) -> None:
    """Two servers interleave the turns of one conversation; each starts where the other ended."""
    servers = [Server(join, "a"), Server(join, "b")]
    tokens = text(4, 10)
    for i in range(100):
        server = servers[i % 2]
        server.turn(tokens)
        assert server.started == (len(tokens) - 1 if i else 0) or i % 40 == 0, i
        tokens = [*tokens, 7] if len(tokens) < 110 else text(5 + i, 10)
    assert counts(servers[0])["claim_ok"] == counts(servers[1])["claim_ok"] == 50


def test_two_requests_of_one_session_at_a_time(join: MakeFleet) -> None:
    """Both are answered; one becomes the owner, the other's state stays here unowned."""
    a, b = Server(join, "a"), Server(join, "b")
    a.turn(text(1, 40))
    first, second = (s.fleet.prepare(KEY, [*text(1, 60), 1]) for s in (a, b))
    assert b.kept.start(text(1, 60)) == 40
    b.kept.store(text(1, 60), second.stored)
    b.fleet.flush()
    a.kept.store(text(1, 60), first.stored)
    a.fleet.flush()
    assert counts(b)["claim_ok"] == 1 and counts(a)["claim_stale"] == 1
    assert a.kept.start(text(1, 60)) == 60 == b.kept.start(text(1, 60))


def test_a_fault_of_the_fetch_leaves_the_owner(join: MakeFleet, directory: LocalDirectory) -> None:
    a, b = Server(join, "a"), Server(join, "b")
    a.turn(text(1, 40))
    (entry,) = a.kept.entries
    for chunk in entry.all_chunks():
        a.kept.cache.memory.slab.view(chunk.slot, chunk.length)[:] ^= 1
    session = b.fleet.prepare(KEY, [*text(1, 60), 1])
    assert session.fetched is not None and session.fetched.outcome == "corrupt"
    assert b.kept.start(text(1, 60)) == 0
    assert directory._live(KEY).owner == a.fleet.owner
    free = b.kept.cache.memory.slab
    assert free.num_free == free.num_slots


@pytest.mark.parametrize("rule", ["never", "auto", "always"])
def test_rules(rule: str, join: MakeFleet, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "deepdraft")
    costs = Costs()
    costs.note_prefill(100, 1e-6)  # computing is for nothing
    costs.note_fetch(1000, 5.0)
    a, b = Server(join, "a"), Server(join, "b", rule=rule, costs=costs)
    a.turn(text(1, 40))
    b.turn(text(1, 60))
    assert b.started == (40 if rule == "always" else 0)
    assert counts(b).get("fetch_too_slow", 0) == (rule == "auto")
    decisions = [r.getMessage() for r in caplog.records if "for 40 tokens: no (" in r.getMessage()]
    assert len(decisions) == (rule == "auto")
    assert b.owns  # it computed a state of its own


def test_what_is_here_is_not_fetched(join: MakeFleet) -> None:
    a, b = Server(join, "a"), Server(join, "b")
    b.kept.store(text(1, 60))
    a.turn(text(1, 40))
    session = b.fleet.prepare(KEY, [*text(1, 60), 1])
    assert session.fetched is None and counts(b)["fetch_unneeded"] == 1


def test_another_build_is_not_asked(join: MakeFleet) -> None:
    a = Server(join, "a")
    other = Kept()
    other.cache.expected = b"x" * 32
    fleet = join(other.cache, "b")
    a.turn(text(1, 40))
    assert fleet.prepare(KEY, [*text(1, 60), 1]).fetched is None
    assert fleet.stats()["fetch_incompatible"] == 1


@pytest.mark.parametrize("owner", ["", "nobody", "a@host:99999", "a b@h:1", "a@10.9.9.9:1", "@:1"])
def test_a_record_that_makes_no_sense(
    owner: str, join: MakeFleet, directory: LocalDirectory
) -> None:
    """Whatever stands in the directory, the request is computed."""
    b = Server(join, "b")
    record = Record(directory.epoch, 3, owner, FINGERPRINT.hex())
    directory._keep(KEY, record)
    b.turn(text(1, 40))
    assert b.started == 0 and b.owns


def test_an_owner_that_is_gone(join: MakeFleet, directory: LocalDirectory) -> None:
    a, b = Server(join, "a"), Server(join, "b")
    a.turn(text(1, 40))
    a.fleet.exporter.close()  # died: the record stays
    b.turn(text(1, 60))
    assert b.started == 0 and counts(b)["fetch_disconnect"] == 1
    assert directory._live(KEY).owner == b.fleet.owner


def test_leaving_gives_ownership_up(join: MakeFleet, directory: LocalDirectory) -> None:
    a = Server(join, "a")
    a.turn(text(1, 40))
    assert directory._live(KEY).sequence
    a.fleet.close()
    assert not directory._live(KEY).sequence


class Broken(LocalDirectory):
    """Answers nothing, or raises."""

    fails = False

    async def lookup(self, key: str) -> Record | None:
        if self.fails:
            raise RuntimeError("broken")
        return None

    async def claim(self, key: str, seen: Record, owner: str, fingerprint: str) -> Claim:
        raise AssertionError("nothing was seen, so nothing can be claimed")


@pytest.mark.parametrize("fails", [False, True])
def test_no_directory(fails: bool) -> None:
    broken = Broken()
    broken.fails = fails
    kept = Kept()
    fleet = Fleet(kept.cache, lambda: broken, name="a", settings=FAST)
    fleet.start()
    try:
        session = fleet.prepare(KEY, text(1, 41))
        assert session.seen is None and session.fetched is None
        kept.store(text(1, 40), session.stored)
        fleet.flush()
        assert kept.start(text(1, 40)) == 40
    finally:
        fleet.close()


def test_eviction_while_a_peer_reads(join: MakeFleet) -> None:
    """A pressed owner never gives leased memory to anybody; what is read is right or not used."""
    a, b = Server(join, "a", slots=60), Server(join, "b")
    a.turn(text(1, 100))
    stop = threading.Event()

    def press() -> None:
        seed = 100
        while not stop.is_set():
            a.kept.store(text(seed, 30))
            seed += 1

    presser = threading.Thread(target=press)
    presser.start()
    outcomes = set()
    try:
        for i in range(12):
            session = b.fleet.prepare(KEY, [*text(1, 100), i])
            outcomes.add("none" if session.fetched is None else session.fetched.outcome)
            started = b.kept.start(text(1, 100))
            assert started in (0, 100)
            b.kept.cache.memory.evict(400)
            if session.fetched is None or session.fetched.outcome != "hit":
                a.kept.store(text(1, 100), session.stored)
                a.fleet.flush()
    finally:
        stop.set()
        presser.join()
    assert outcomes <= {"hit", "miss", "busy", "stale", "none", "backoff"}


class Silent(LocalDirectory):
    """One that stops to answer checks."""

    silent = False

    async def check(self, key: str, mine: Record) -> bool | None:
        return None if self.silent else await super().check(key, mine)


@pytest.mark.parametrize("why", ["claimed", "expired", "restarted", "silent", "none"])
def test_an_owner_asks_before_it_is_read(why: str, join: MakeFleet) -> None:
    """A reader comes with the owner's own old record; the directory has gone on meanwhile."""
    directory = Silent()
    a, b = (Server(join, name) for name in "ab")
    for server in (a, b):
        server.fleet.directory = directory
    session = a.turn(text(1, 40))
    assert session.seen is not None and a.owns
    if why == "claimed":
        directory._keep(KEY, Record(directory.epoch, 9, "c@127.0.0.1:1", FINGERPRINT.hex()))
    elif why == "expired":
        del directory._records[KEY]
    elif why == "restarted":
        directory._records.clear()
        directory.epoch = "another"
    directory.silent = why == "silent"
    peer = peer_of(a.fleet.owner)
    assert peer is not None
    fetched = b.fleet.fetcher.fetch(peer, KEY, session.seen, text(1, 60))
    gone = why in ("claimed", "expired", "restarted")
    assert fetched.outcome == ("stale" if gone else "hit")
    assert a.owns != gone
    states = [entry.state for entry in a.kept.entries]
    assert states == [EntryState.SUPERSEDED if gone else EntryState.SEALED]
    assert a.kept.start(text(1, 60)) == 40  # it can still be used here
    name = {"silent": "check_none", "none": "check_ok"}.get(why, "check_stale")
    assert counts(a)[name] == 1 and counts(a).get("export_disowned", 0) == gone


def test_after_an_interruption_everything_is_checked(join: MakeFleet) -> None:
    """Announcements were missed: what is not ours any more goes first, what is stays."""
    directory = Silent()
    a = Server(join, "a")
    a.fleet.directory = directory
    keys = [letter * 64 for letter in "abc"]
    for i, key in enumerate(keys):
        a.turn(text(i, 40), key)
    directory._keep(keys[1], Record(directory.epoch, 99, "c@127.0.0.1:1", FINGERPRINT.hex()))
    directory.silent = True
    a.fleet._call(a.fleet.check_all())
    assert set(a.fleet.exporter.owned()) == set(keys), "no directory, so nothing is known"
    directory.silent = False
    a.fleet._call(a.fleet.check_all())
    assert set(a.fleet.exporter.owned()) == {keys[0], keys[2]}
    assert [e.state for e in a.kept.entries].count(EntryState.SUPERSEDED) == 1


@pytest.mark.parametrize("jump", [-1e9, -3600.0, 3600.0, 1e9])
def test_the_wall_clock_jumps(
    jump: float, join: MakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leases, deadlines, records and back-off do not look at it: nothing changes."""
    a, b = Server(join, "a"), Server(join, "b")
    a.turn(text(1, 40))
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + jump)
    session = b.turn(text(1, 60))
    assert session.fetched is not None and session.fetched.outcome == "hit" and b.started == 40
    monkeypatch.setattr(time, "time", lambda: now - jump)
    session = a.turn(text(1, 80))
    assert session.fetched is not None and session.fetched.outcome == "hit" and a.started == 60
    assert counts(a)["claim_ok"] == 2 and counts(b)["claim_ok"] == 1


@pytest.mark.parametrize("seconds", [10.0, 100.0, 1e6])
def test_a_machine_sleeps(seconds: float, join: MakeFleet, directory: LocalDirectory) -> None:
    """Every clock of the owner goes ahead between two turns: what is over is over, and the
    conversation goes on from what is here or from nothing."""
    a, b = Server(join, "a"), Server(join, "b")
    a.turn(text(1, 40))
    lease = a.kept.cache.memory.lease(a.kept.entries[0].id, "somebody")
    assert lease is not None
    ahead = time.monotonic() + seconds
    a.kept.cache.memory.clock = directory.clock = lambda: ahead
    over = seconds >= a.kept.cache.settings.lease_s
    assert (a.kept.cache.memory.renew(lease.id) is None) == over
    a.kept.cache.memory.close(lease.id)
    session = b.turn(text(1, 60))
    expired = seconds > directory.settings.record_s
    assert (session.fetched is None) == expired and b.started == (0 if expired else 40)
    assert b.owns and directory._live(KEY).owner == b.fleet.owner


# ---- costs ---------------------------------------------------------------------------------


def test_costs_learn_both_sides() -> None:
    costs = Costs()
    assert costs.decide(10, 10).fetch  # nothing is known: try
    for n in (100, 200, 400):
        costs.note_prefill(n, n * 1e-3)
    for size in (1_000_000, 2_000_000, 8_000_000):
        costs.note_fetch(size, 0.01 + size * 1e-9)
    assert costs.fetch_seconds(4_000_000) == pytest.approx(0.014, rel=1e-3)
    assert costs.compute_seconds(50) == pytest.approx(0.05)
    assert costs.decide(4_000_000, 50).fetch and not costs.decide(4_000_000, 10).fetch


def test_costs_of_odd_measurements() -> None:
    """No negative times, no division by nothing."""
    costs = Costs()
    costs.note_prefill(3, 1.0)  # too short to say anything
    costs.note_prefill(100, 0.0)
    assert costs.compute_seconds(5) is None
    costs.note_fetch(0, 0.5)
    assert costs.fetch_seconds(100) == pytest.approx(0.5)
    for size, seconds in ((10, 9.0), (1000, 1.0), (5000, 0.1)):  # the larger, the faster
        costs.note_fetch(size, seconds)
        for asked in (0, 100, 10**9):
            assert (costs.fetch_seconds(asked) or 0) >= 0


# ---- names and files -----------------------------------------------------------------------


def test_owners_and_peers() -> None:
    for name, host in (("a", "127.0.0.1"), ("b-1.x", "gpu7.example"), ("c", "::1")):
        peer = peer_of(owner_of(name, host, 5))
        assert peer is not None and (peer.name, peer.host, peer.port) == (name, host, 5)
    for name, host in (("a b", "h"), ("", "h"), ("x" * 65, "h"), ("a", "h h"), ("a", "")):
        with pytest.raises(ConfigError, match="name of 1 to 64"):
            owner_of(name, host, 5)


def tls_of(place: Path) -> dict[str, Any]:
    files: FleetFiles = load_fleet(place)
    return {
        "server_tls": files.server_tls,
        "client_tls": files.client_tls,
        "fleet_key": files.manifest_key,
    }


def test_a_fleet_with_certificates(join: MakeFleet, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    places = init_fleet(ours, ["a", "b"])
    (stranger,) = init_fleet(theirs, ["b"])
    for place in (*places, stranger):
        assert os.stat(place / "key.pem").st_mode & 0o077 == 0
    a = Server(join, "a", **tls_of(places[0]))
    b = Server(join, "b", **tls_of(places[1]))
    a.turn(text(1, 40))
    b.turn(text(1, 60))
    assert b.started == 40
    # A server of another fleet, one without certificates, and one under another's name.
    for options in (tls_of(stranger), {}):
        c = Server(join, "c", **options)
        session = c.fleet.prepare(KEY, [*text(1, 60), 1])
        assert session.fetched is not None
        assert session.fetched.outcome in ("disconnect", "timeout", "corrupt")
    d = Server(join, "not-in-its-certificate", **tls_of(init_fleet(ours, ["d"])[0]))
    d.turn(text(6, 40))
    session = b.fleet.prepare(KEY, [*text(6, 60), 1])
    assert session.fetched is not None and session.fetched.outcome == "disconnect"


def test_a_manifest_of_another_key_is_forged(join: MakeFleet) -> None:
    a = Server(join, "a", fleet_key=b"k" * 32)
    b, c = Server(join, "b", fleet_key=b"k" * 32), Server(join, "c", fleet_key=b"z" * 32)
    d = Server(join, "d")
    a.turn(text(1, 40))
    for server, outcome in ((b, "hit"), (c, "corrupt"), (d, "corrupt")):
        session = server.fleet.prepare(KEY, [*text(1, 60), 1])
        assert session.fetched is not None and session.fetched.outcome == outcome


def test_fleet_files_are_checked(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    with pytest.raises(ConfigError, match="init-fleet"):
        load_fleet(tmp_path)
    (place,) = init_fleet(tmp_path / "f", ["a"])
    with pytest.raises(ConfigError, match="there already"):
        init_fleet(tmp_path / "f", ["a"])
    for name in ("", "a/b", "..", "x" * 65):
        with pytest.raises(ConfigError, match="node's name"):
            init_fleet(tmp_path / "f", [name])
    (place / "manifest.key").write_bytes(b"short")
    with pytest.raises(ConfigError, match="32 bytes"):
        load_fleet(place)
    (place / "cert.pem").write_bytes(b"junk")
    with pytest.raises(ConfigError, match="init-fleet"):
        load_fleet(place)
