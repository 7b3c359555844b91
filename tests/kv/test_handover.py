"""A server that leaves gives its conversations to its peers, and every fault of that."""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepdraft.kv import wire
from deepdraft.kv.directory import Claim, DirectorySettings, LocalDirectory, Record, RedisDirectory
from deepdraft.kv.fetch import Peer
from deepdraft.kv.handover import HandOver, Offered, Report
from tests.kv.conftest import FAST, FINGERPRINT, MakeFleet, text, wait_for
from tests.kv.test_directory import RealRedis, needs_redis
from tests.kv.test_fleet import Server, counts

KEYS = [letter * 64 for letter in "abcdef"]
CALM = DirectorySettings(timeout_s=10, breaker_s=0.3)
LONG_S = 30.0
"""A deadline that does not decide."""


def owner(directory: LocalDirectory, key: str) -> str:
    return directory._live(key).owner


def talk(server: Server, keys: list[str], length: int = 40) -> None:
    for i, key in enumerate(keys):
        server.turn(text(10 + i, length), key)


# ---- servers that share a directory --------------------------------------------------------


def test_all_conversations_go_to_the_peers(join: MakeFleet, directory: LocalDirectory) -> None:
    a, b, c = (Server(join, name) for name in "abc")
    talk(a, KEYS)
    report = a.fleet.hand_over(LONG_S)
    assert (report.offered, report.moved, report.left) == (6, 6, 0)
    assert report.answers == {"taken": 6} and report.num_bytes > 0
    a.fleet.close()
    owners = {key: owner(directory, key) for key in KEYS}
    assert set(owners.values()) <= {b.fleet.owner, c.fleet.owner}
    for i, key in enumerate(KEYS):
        tokens = [*text(10 + i, 40), *text(90, 20)]
        mine, other = (b, c) if owners[key] == b.fleet.owner else (c, b)
        assert mine.kept.start(text(10 + i, 40)) == 40, "the one that took it has it"
        other.turn(tokens, key)
        assert other.started == 40, "the other one is sent to it"
    taken = counts(b).get("taken_over", 0) + counts(c).get("taken_over", 0)
    assert taken == 6 == counts(a)["handed_over"]


def test_what_was_used_last_goes_first(join: MakeFleet, directory: LocalDirectory) -> None:
    """The peer has room for some only; those are the ones that were used last."""
    a = Server(join, "a")
    talk(a, KEYS)
    a.kept.start(text(10, 40))  # the first one is the last used
    slots = len(a.kept.entries[0].all_chunks())
    b = Server(join, "b", slots=4 * slots)
    report = a.fleet.hand_over(LONG_S)
    assert report.moved == 3 and report.left == 3
    assert report.answers == {"taken": 3, "full": 1}, "what is as large is not offered again"
    assert {key for key in KEYS if owner(directory, key) == b.fleet.owner} == {
        KEYS[0],
        *KEYS[4:],
    }
    assert all(owner(directory, key) == a.fleet.owner for key in KEYS[1:4])
    a.fleet.close()
    assert not any(directory._live(key).sequence for key in KEYS[1:4])


def test_nothing_of_the_peer_is_evicted(join: MakeFleet) -> None:
    a = Server(join, "a")
    b = Server(join, "b", slots=40)
    for i in range(9):
        b.kept.store(text(100 + i, 8))
    before = [entry.id for entry in b.kept.entries]
    assert len(before) == 9, "all have room"
    talk(a, KEYS[:1], length=120)
    assert a.fleet.hand_over(LONG_S).answers == {"full": 1}
    assert [entry.id for entry in b.kept.entries] == before


def test_a_smaller_one_fits_where_a_larger_one_did_not(join: MakeFleet) -> None:
    a = Server(join, "a")
    a.turn(text(1, 20), KEYS[0])
    small = len(a.kept.entries[0].all_chunks())
    a.turn(text(2, 120), KEYS[1])
    large = len(a.kept.entries[1].all_chunks())
    Server(join, "b", slots=round((small + large) / 0.95 / 1.5))
    report = a.fleet.hand_over(LONG_S)
    assert report.answers == {"full": 1, "taken": 1}


def test_who_leaves_takes_nothing(join: MakeFleet, directory: LocalDirectory) -> None:
    a, b = Server(join, "a"), Server(join, "b")
    talk(a, KEYS[:2])
    b.fleet._leaving = True  # it has not yet said so to the directory
    report = a.fleet.hand_over(LONG_S)
    assert report.answers == {"leaving": 1} and report.left == 2
    assert owner(directory, KEYS[0]) == a.fleet.owner
    assert a.fleet.hand_over(LONG_S) == Report(), "once only"


def test_who_fetches_nothing_takes_nothing(join: MakeFleet, directory: LocalDirectory) -> None:
    a, b = Server(join, "a"), Server(join, "b", rule="never")
    talk(a, KEYS[:2])
    report = a.fleet.hand_over(LONG_S)
    assert report.answers == {"none": 1} and report.left == 2
    assert owner(directory, KEYS[0]) == a.fleet.owner and not b.kept.entries


def test_a_storm_of_offers_is_one_fetch(join: MakeFleet, directory: LocalDirectory) -> None:
    a, b = Server(join, "a"), Server(join, "b")
    talk(a, KEYS[:2])
    one, other = (
        wire.Offer(wire.PROTOCOL, FINGERPRINT, key, *a.fleet.exporter.owned()[key][:2])
        for key in KEYS[:2]
    )
    asked, more = threading.Event(), threading.Event()
    read = a.fleet.exporter._read

    def later(link: wire.Link, index: int, lease: int) -> None:
        asked.set()
        more.wait(60)
        read(link, index, lease)

    a.fleet.exporter._read = later  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as crew:
        first = crew.submit(b.fleet.exporter.take, one)
        assert asked.wait(60)
        assert [b.fleet.exporter.take(one) for _ in range(5)] == ["busy"] * 5
        more.set()
        assert first.result(60) == "taken"
    assert b.fleet.exporter.take(one) == "stale"
    assert b.fleet.exporter.take(other) == "taken", "another key meanwhile, and after it"
    assert counts(a)["export_opened"] == 2 == counts(b)["fetch_hit"]


@pytest.mark.parametrize("why", ["a request", "an offer"])
def test_closing_ends_fetches_that_are_under_way(
    why: str, join: MakeFleet, directory: LocalDirectory
) -> None:
    """The owner answers and then sends nothing; no time-out of the transfer would end that."""
    patient = replace(FAST, idle_s=600, deadline_s=600)
    a, b = Server(join, "a"), Server(join, "b", settings=patient)
    talk(a, KEYS[:1])
    asked, more = threading.Event(), threading.Event()

    def silent(link: wire.Link, index: int, lease: int) -> None:
        asked.set()
        more.wait(120)
        link.abort()

    a.fleet.exporter._read = silent  # type: ignore[method-assign]
    offer = wire.Offer(wire.PROTOCOL, FINGERPRINT, KEYS[0], *a.fleet.exporter.owned()[KEYS[0]][:2])
    with ThreadPoolExecutor(1) as crew:
        if why == "a request":
            fetch = crew.submit(b.fleet.prepare, KEYS[0], [*text(10, 60), 1])
        else:
            fetch = crew.submit(b.fleet.exporter.take, offer)
        try:
            assert asked.wait(60)
            b.fleet.close()
            ended = fetch.result(60)
        finally:
            more.set()
    assert (ended if isinstance(ended, str) else ended.fetched.outcome) == "disconnect"
    assert not b.kept.entries and owner(directory, KEYS[0]) == a.fleet.owner
    session = b.fleet.fetcher.fetch(Peer("127.0.0.1", 1), KEYS[0], Record("e", 1), None)
    assert session.outcome == "disconnect"


def test_alone_or_without_time(join: MakeFleet, directory: LocalDirectory) -> None:
    a = Server(join, "a")
    talk(a, KEYS[:2])
    report = a.fleet.hand_over(LONG_S)
    assert (report.offered, report.moved, report.left) == (2, 0, 2)
    b, c = Server(join, "b"), Server(join, "c")
    b.turn(text(1, 40), KEYS[3])
    assert b.fleet.hand_over(0.0) == Report() and owner(directory, KEYS[3]) == b.fleet.owner
    assert not c.kept.entries


def test_a_peer_that_died(join: MakeFleet, directory: LocalDirectory) -> None:
    """Its announcement stands still; the other one takes everything."""
    a, b, c = (Server(join, name) for name in "abc")
    talk(a, KEYS)
    b.fleet.exporter.close()
    report = a.fleet.hand_over(LONG_S)
    assert report.moved == 6 and report.answers == {"unreachable": 1, "taken": 6}
    assert {owner(directory, key) for key in KEYS} == {c.fleet.owner}


@pytest.mark.parametrize("when", ["before the claim", "after the claim"])
def test_a_peer_that_dies_in_the_middle(
    when: str, join: MakeFleet, directory: LocalDirectory
) -> None:
    a, b = Server(join, "a"), Server(join, "b")
    talk(a, KEYS[:1])
    claim = directory.claim

    async def dies(*args: Any, **options: Any) -> Claim:
        done = Claim("unavailable")
        if when == "after the claim":
            done = await claim(*args, **options)
        for link in list(b.fleet.exporter._links):
            link.abort()
        return done

    directory.claim = dies  # type: ignore[method-assign]
    report = a.fleet.hand_over(LONG_S)
    directory.claim = claim  # type: ignore[method-assign]
    assert report.moved == 0 and report.left == 1 and report.answers == {"unreachable": 1}
    claimed = when == "after the claim"
    assert owner(directory, KEYS[0]) == (b.fleet.owner if claimed else a.fleet.owner)
    a.fleet.close()
    assert bool(directory._live(KEYS[0]).sequence) == claimed
    b.fleet.exporter.close()
    c = Server(join, "c")
    c.turn(text(10, 60), KEYS[0])
    assert c.started == 0 and c.fleet.exporter.owned()  # computed, and owned again


def test_the_leaving_server_dies_in_the_middle(join: MakeFleet, directory: LocalDirectory) -> None:
    """While it is read: nothing is adopted, the record stays, the next turn is computed."""
    a, b = Server(join, "a"), Server(join, "b")
    talk(a, KEYS[:1])
    a.fleet.exporter._read = lambda link, index, lease: link.abort()  # type: ignore[method-assign]
    report = a.fleet.hand_over(LONG_S)
    assert report.moved == 0 and report.answers == {"disconnect": 1}
    assert owner(directory, KEYS[0]) == a.fleet.owner and not b.kept.entries
    a.fleet.exporter.close()
    b.turn(text(10, 60), KEYS[0])
    assert b.started == 0 and owner(directory, KEYS[0]) == b.fleet.owner


def test_damaged_memory_is_not_handed_on(join: MakeFleet, directory: LocalDirectory) -> None:
    a, b, c = (Server(join, name) for name in "abc")
    talk(a, KEYS[:2])
    for chunk in a.kept.entries[0].all_chunks():
        a.kept.cache.memory.slab.view(chunk.slot, chunk.length)[:] ^= 1
    report = a.fleet.hand_over(LONG_S)
    assert report.moved == 1 and report.answers == {"taken": 1, "corrupt": 2}
    assert owner(directory, KEYS[0]) == a.fleet.owner
    assert len(b.kept.entries) + len(c.kept.entries) == 1


def test_the_deadline_ends_it(join: MakeFleet, directory: LocalDirectory) -> None:
    """A peer that hangs costs the time that there is, and the conversation that it was offered;
    the others go on meanwhile."""
    a, b, c = (Server(join, name) for name in "abc")
    talk(a, KEYS)
    hangs, asked = threading.Event(), threading.Event()

    def take(offer: wire.Offer) -> str:
        asked.set()
        hangs.wait(60)
        return "failed"

    b.fleet.exporter.take = take
    taken = c.fleet.exporter.take

    def after(offer: wire.Offer) -> str:
        asked.wait(60)
        return taken(offer)

    c.fleet.exporter.take = after
    try:
        report = a.fleet.hand_over(2.5)
    finally:
        hangs.set()
    assert report.moved == 5 and report.left == 1
    assert [owner(directory, key) for key in KEYS].count(c.fleet.owner) == 5


def test_it_moved_on_meanwhile(join: MakeFleet, directory: LocalDirectory) -> None:
    """What the directory says counts, not what the leaving server thinks."""
    a, b = Server(join, "a"), Server(join, "b")
    talk(a, KEYS[:2])
    directory._keep(KEYS[0], Record(directory.epoch, 99, "c@127.0.0.1:1", "fp"))
    report = a.fleet.hand_over(LONG_S)
    assert report.answers == {"stale": 1, "taken": 1} and report.left == 0
    assert owner(directory, KEYS[0]) == "c@127.0.0.1:1"
    assert owner(directory, KEYS[1]) == b.fleet.owner


def test_a_turn_that_was_under_way_becomes_the_owner(
    join: MakeFleet, directory: LocalDirectory
) -> None:
    """C has looked the conversation up and computes; meanwhile its owner hands it to B. What C
    stores is newer, so C owns it; without that the next turn would start from B's older state."""
    a, b = Server(join, "a"), Server(join, "b")
    talk(a, KEYS[:1])
    c = Server(join, "c")
    session = c.fleet.prepare(KEYS[0], [*text(10, 40), 1])
    c.fleet._leaving = True  # so that B takes it
    assert a.fleet.hand_over(LONG_S).moved == 1
    assert owner(directory, KEYS[0]) == b.fleet.owner
    c.kept.store(text(10, 60), session.stored)
    c.fleet.flush()
    assert owner(directory, KEYS[0]) == c.fleet.owner
    assert counts(c)["claim_ok"] == 1
    # But not two of them: who has looked it up before the newest state is stale.
    late = b.fleet.prepare(KEYS[0], [*text(10, 40), 1])
    late.seen = Record(directory.epoch, 1, a.fleet.owner)
    b.kept.store(text(10, 50), late.stored)
    b.fleet.flush()
    assert counts(b)["claim_stale"] == 1


def test_chunks_that_the_peer_has_are_not_sent_again(join: MakeFleet) -> None:
    a, b = Server(join, "a"), Server(join, "b")
    b.kept.store(text(10, 40))
    a.turn(text(10, 60), KEYS[0])
    whole = sum(c.length for c in a.kept.entries[0].all_chunks())
    report = a.fleet.hand_over(LONG_S)
    assert report.moved == 1 and report.num_bytes == whole
    assert 0 < counts(b)["fetch_bytes"] < whole
    assert b.kept.start(text(10, 60)) == 60


def test_a_disk_keeps_what_no_peer_takes(
    join: MakeFleet, directory: LocalDirectory, tmp_path: Path
) -> None:
    a = Server(join, "a")
    a.kept = type(a.kept)(spill=tmp_path)
    a.fleet.close()
    a.fleet = join(a.kept.cache, "a")
    talk(a, KEYS[:2])
    slots = len(a.kept.entries[0].all_chunks())
    Server(join, "b", slots=round(1.5 * slots))
    assert a.fleet.hand_over(LONG_S).moved == 1
    a.fleet.close()
    a.kept.cache.close()
    again = type(a.kept)(spill=tmp_path)
    assert again.cache.stats()["disk_files"] == 1
    assert again.start(text(10, 40)) == 40, "the one that was used first was not taken"


# ---- with Redis ----------------------------------------------------------------------------


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RealRedis]:
    made = RealRedis(tmp_path).start()
    yield made
    made.stop()


def in_redis(join: MakeFleet, redis: RealRedis, name: str) -> Server:
    server = Server(join, name, starts=False)
    server.fleet._make_directory = lambda: RedisDirectory.connect(redis.url, "t", CALM)
    server.fleet.start()
    return server


@needs_redis
def test_through_redis(join: MakeFleet, redis: RealRedis) -> None:
    a, b, c = (in_redis(join, redis, name) for name in "abc")
    talk(a, KEYS)
    wait_for(lambda: redis.cli("HLEN", "{t}:members") == 3)
    report = a.fleet.hand_over(LONG_S)
    assert (report.moved, report.left) == (6, 0)
    a.fleet.close()
    assert redis.cli("HLEN", "{t}:members") == 2
    for i, key in enumerate(KEYS):
        server = (b, c)[i % 2]
        server.turn([*text(10 + i, 40), *text(90, 20)], key)
        assert server.started == 40
    assert counts(b)["claim_ok"] + counts(c)["claim_ok"] == 6


@needs_redis
@pytest.mark.parametrize("how", ["gone at once", "gone in the middle"])
def test_redis_goes_away(how: str, join: MakeFleet, redis: RealRedis) -> None:
    a, b = (in_redis(join, redis, name) for name in "ab")
    talk(a, KEYS[:3])
    wait_for(lambda: redis.cli("HLEN", "{t}:members") == 2)
    if how == "gone at once":
        redis.stop()
        assert a.fleet.hand_over(LONG_S) == Report()
    else:
        take = b.fleet.exporter.take

        def then_gone(offer: wire.Offer) -> str:
            answer = take(offer)
            redis.stop()
            return answer

        b.fleet.exporter.take = then_gone
        report = a.fleet.hand_over(LONG_S)
        assert report.moved == 1 and report.left == 2
        assert report.answers == {"taken": 1, "unavailable": 1}
    a.fleet.close()
    b.turn(text(10, 60), KEYS[0])
    assert b.started in (0, 40)  # computed, or what it has taken


# ---- the order of offers -------------------------------------------------------------------


class FakeLink:
    """Answers offers as a function says."""

    def __init__(self, answer: Callable[[wire.Offer], str]) -> None:
        self._answer, self._offer = answer, None
        self.closed = False

    def limit(self, seconds: float) -> None:
        assert seconds > 0

    def send(self, offer: Any) -> None:
        self._offer = offer

    def reply(self) -> wire.Reply:
        assert self._offer is not None
        return wire.Taken(self._answer(self._offer))

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        pass


def offers(count: int) -> list[Offered]:
    return [Offered(str(i), "e", i, 100 * (count - i)) for i in range(count)]


def test_every_conversation_is_offered_to_every_peer_at_most_once() -> None:
    seen: list[tuple[str, str]] = []
    lock = threading.Lock()

    def connect(peer: Peer) -> Any:
        def answer(offer: wire.Offer) -> str:
            with lock:
                seen.append((peer.name, offer.key))
            return "timeout" if peer.name != "p3" or offer.key == "2" else "taken"

        return FakeLink(answer)

    peers = [Peer("h", i, f"p{i}") for i in range(4)]
    report = HandOver(offers(9), peers, connect=connect, fingerprint=b"", deadline_s=LONG_S).run()
    assert len(seen) == len(set(seen))
    assert (report.moved, report.left) == (8, 1)
    assert sum(key == "2" for _, key in seen) == 4


@pytest.mark.parametrize("part", [0, 2, 9])
def test_when_the_time_is_up_nobody_is_waited_for(part: int) -> None:
    """Each peer sends a part of its answer, so that the wait for a byte does not run out. (Their
    ends were once waited for one after the other, a second each.)"""
    answer = bytes(wire.frame(wire.Taken("taken")))[:part]
    ours: list[socket.socket] = []
    theirs: list[socket.socket] = []

    class Patient(wire.Link):
        def limit(self, seconds: float) -> None:
            pass

    def connect(peer: Peer) -> wire.Link:
        mine, its = socket.socketpair(socket.AF_UNIX)
        ours.append(mine)
        theirs.append(its)
        link = Patient.__new__(Patient)
        link.sock, link._tls = mine, False
        its.sendall(answer)
        return link

    peers = [Peer("h", i, str(i)) for i in range(8)]
    over = HandOver(offers(9), peers, connect=connect, fingerprint=b"", deadline_s=0.5)
    report = over.run()
    assert (report.moved, report.left) == (0, 9)
    wait_for(lambda: not over._links)
    assert [mine.fileno() for mine in ours] == [-1] * 8
    for its in theirs:
        its.close()


@pytest.mark.parametrize("outcome", ["x\n2026-11-30 ERROR forged", "taken\n", "T", "a" * 1000])
def test_what_a_peer_answers_is_a_word(outcome: str) -> None:
    """It stands in the log."""
    ours, its = socket.socketpair(socket.AF_UNIX)
    link = wire.Link.__new__(wire.Link)
    link.sock, link._tls = ours, False
    its.sendall(wire.frame(wire.Taken(outcome)))
    with its:
        over = HandOver(
            offers(1),
            [Peer("h", 1, "p")],
            connect=lambda peer: link,
            fingerprint=b"",
            deadline_s=LONG_S,
        )
        report = over.run()
    assert report.answers == {"unreachable": 1} and report.left == 1


def test_more_peers_than_are_asked_at_a_time() -> None:
    """Those behind take over where the first ones take nothing."""
    asked: list[str] = []

    def connect(peer: Peer) -> Any:
        asked.append(peer.name)
        if int(peer.name) % 3 == 0:
            raise OSError("gone")
        return FakeLink(lambda offer: "leaving" if int(peer.name) < 29 else "taken")

    peers = [Peer("h", i, str(i)) for i in range(30)]
    report = HandOver(offers(5), peers, connect=connect, fingerprint=b"", deadline_s=LONG_S).run()
    assert (report.moved, report.left) == (5, 0)
    assert sorted(asked, key=int) == [str(i) for i in range(30)]


# ---- the peer's side -----------------------------------------------------------------------


def test_an_offer_of_nonsense(join: MakeFleet) -> None:
    """Nothing is fetched; the connection is answered or ends."""
    b = Server(join, "b")
    fp = b.kept.cache.expected
    for offer, answer in (
        (wire.Offer(wire.PROTOCOL, b"x" * 32, KEYS[0], "e", 1), wire.Taken("incompatible")),
        (wire.Offer(wire.PROTOCOL, fp, KEYS[0], "e", 1), wire.Taken("stale")),
        (wire.Offer(wire.PROTOCOL, fp, "no key", "", -5), wire.Taken("stale")),
        (wire.Offer(3, fp, KEYS[0], "e", 1), wire.Refused("bad")),
    ):
        port = b.fleet.exporter._listener.getsockname()[1]  # type: ignore[union-attr]
        link = wire.Link(socket.create_connection(("127.0.0.1", port), 10), 30)
        link.send(offer)
        assert link.reply() == answer
        link.close()
    assert "fetch_hit" not in counts(b)


@pytest.mark.parametrize("fault", ["raises", "no directory"])
def test_a_fault_of_the_peer_is_an_answer(fault: str, join: MakeFleet) -> None:
    a, b = Server(join, "a"), Server(join, "b")
    talk(a, KEYS[:1])

    class Broken(LocalDirectory):
        async def lookup(self, key: str) -> Record | None:
            if fault == "raises":
                raise RuntimeError("broken")
            return None

    b.fleet.directory = Broken()
    answer = "failed" if fault == "raises" else "unavailable"
    assert a.fleet.hand_over(LONG_S).answers == {answer: 1}
    assert not b.kept.entries


def test_an_offer_to_the_owner_itself(join: MakeFleet, directory: LocalDirectory) -> None:
    """It would read from itself, and claim what it has."""
    b = Server(join, "b")
    talk(b, KEYS[:1])
    record = directory._live(KEYS[0])
    fields = (KEYS[0], record.epoch, record.sequence)
    assert b.fleet._take(wire.Offer(wire.PROTOCOL, b.kept.cache.expected, *fields)) == "stale"
    assert directory._live(KEYS[0]) == record and len(b.kept.entries) == 1


def test_a_hint_of_an_earlier_claim_comes_late(join: MakeFleet) -> None:
    """What is here is newer: it is neither given up nor evicted first."""
    b = Server(join, "b")
    talk(b, KEYS[:1])
    (epoch, sequence, _) = b.fleet.exporter.owned()[KEYS[0]]
    for late in (sequence - 1, sequence):
        b.fleet.exporter.outdated(KEYS[0], epoch, late)
    b.fleet.exporter.outdated(KEYS[1], epoch, 99)
    assert KEYS[0] in b.fleet.exporter.owned()
    for newer in ((epoch, sequence + 1), ("another", 1)):
        b.fleet.exporter.own(KEYS[0], Record(epoch, sequence), b.kept.entries[0].id)
        b.fleet.exporter.outdated(KEYS[0], *newer)
        assert KEYS[0] not in b.fleet.exporter.owned()
