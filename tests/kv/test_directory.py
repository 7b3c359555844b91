"""Ownership records: the same rules in one process and in a real Redis, and Redis at its worst.

The Redis tests start `redis-server` from PATH on a Unix socket each; without one they are skipped.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deepdraft.errors import ConfigError, RequestError
from deepdraft.kv.directory import (
    MOST_LOOKUPS,
    Breaker,
    Claim,
    Directory,
    DirectorySettings,
    LocalDirectory,
    Member,
    Record,
    RedisDirectory,
    session_key,
)

KEY = "a" * 64
FAST = DirectorySettings(timeout_s=0.3, breaker_s=0.3)
PATIENT = DirectorySettings(timeout_s=10, breaker_s=0.3, record_s=1.5)
"""For rules, not faults: a busy machine may take its time."""
SERVER = shutil.which("redis-server") or shutil.which("valkey-server")
needs_redis = pytest.mark.skipif(SERVER is None, reason="no redis-server in PATH")


class RealRedis:
    """A redis-server on a Unix socket."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.socket = directory, directory / "r.sock"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def start(self, *options: str) -> "RealRedis":
        assert SERVER is not None
        self.socket.unlink(missing_ok=True)
        self.process = subprocess.Popen(
            [SERVER, "--port", "0", "--unixsocket", str(self.socket), "--save", "", *options],
            cwd=self.directory,
            stdout=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 30
        while not self._answers():
            assert time.monotonic() < deadline and self.process.poll() is None
            time.sleep(0.01)
        return self

    def _answers(self) -> bool:
        """The socket's file is there before anybody listens on it."""
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self.socket))
            except OSError:
                return False
        return True

    def send(self, what: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(what)

    def stop(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
            self.process = None

    def cli(self, *command: str | bytes) -> Any:
        """One command, by a client of its own."""
        import redis

        with redis.Redis(unix_socket_path=str(self.socket), decode_responses=True) as client:
            return client.execute_command(*command)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RealRedis]:
    made = RealRedis(tmp_path)
    yield made
    made.stop()


Use = Callable[[Directory], Awaitable[None]]


def with_redis(
    server: RealRedis,
    use: Callable[[RedisDirectory], Awaitable[None]],
    settings: DirectorySettings = PATIENT,
) -> None:
    async def main() -> None:
        directory = RedisDirectory.connect(server.url, "t", settings)
        try:
            await use(directory)
        finally:
            await directory.close()

    asyncio.run(main())


@pytest.fixture(params=["local", pytest.param("redis", marks=needs_redis)])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[Use], None]]:
    """Runs a test on each kind of directory."""
    if request.param == "local":

        async def local(use: Use) -> None:
            await use(LocalDirectory(PATIENT))

        yield lambda use: asyncio.run(local(use))
        return
    server = RealRedis(tmp_path).start()
    yield lambda use: with_redis(server, use)
    server.stop()


async def seen(directory: Directory, key: str = KEY) -> Record:
    record = await directory.lookup(key)
    assert record is not None
    return record


# ---- rules that both kinds keep ------------------------------------------------------------


def test_a_claim_moves_ownership(run: Callable[[Use], None]) -> None:
    async def use(d: Directory) -> None:
        nobody = await seen(d)
        assert nobody.sequence == 0 and nobody.owner == ""
        assert await d.claim(KEY, nobody, "A", "fp") == Claim("ok", 1)
        a = await seen(d)
        assert (a.sequence, a.owner, a.fingerprint) == (1, "A", "fp")
        assert await d.check(KEY, a) is True
        assert await d.claim(KEY, a, "B", "fp") == Claim("ok", 2)
        assert await d.check(KEY, a) is False
        assert (await d.claim(KEY, a, "A", "fp")).result == "stale"
        await d.release(KEY, a)  # not mine any more: nothing happens
        b = await seen(d)
        assert b.owner == "B"
        await d.release(KEY, b)
        assert (await seen(d)).sequence == 0

    run(use)


def test_of_many_claims_one_wins(run: Callable[[Use], None]) -> None:
    async def use(d: Directory) -> None:
        record = await seen(d)
        claims = await asyncio.gather(*(d.claim(KEY, record, f"s{i}", "fp") for i in range(50)))
        assert sorted(c.result for c in claims) == ["ok"] + ["stale"] * 49
        winner = next(i for i, c in enumerate(claims) if c.result == "ok")
        assert (await seen(d)).owner == f"s{winner}"

    run(use)


def test_an_expired_record_cannot_be_claimed_by_its_old_number(run: Callable[[Use], None]) -> None:
    """The hole of a sequence that starts again at 0 after an expiry."""

    async def use(d: Directory) -> None:
        await d.claim(KEY, await seen(d), "A", "fp")
        old = await seen(d)
        await asyncio.sleep(1.6)
        assert await d.check(KEY, old) is False
        fresh = await seen(d)
        assert fresh.sequence == 0
        assert (await d.claim(KEY, old, "A", "fp")).result == "stale"
        again = await d.claim(KEY, fresh, "B", "fp")
        assert again.result == "ok" and again.sequence > old.sequence
        assert (await d.claim(KEY, old, "A", "fp")).result == "stale"

    run(use)


def test_use_renews_a_record_and_a_wrong_check_does_not(run: Callable[[Use], None]) -> None:
    async def use(d: Directory) -> None:
        await d.claim(KEY, await seen(d), "A", "fp")
        mine = await seen(d)
        for _ in range(3):
            await asyncio.sleep(0.6)
            assert await d.check(KEY, mine)
        for _ in range(3):
            await asyncio.sleep(0.6)
            assert not await d.check(KEY, Record(mine.epoch, mine.sequence + 1, "A"))
        assert (await seen(d)).sequence == 0

    run(use)


def test_what_is_handed_on_can_be_claimed_as_before(run: Callable[[Use], None]) -> None:
    """A -> B -> C hand it on while D computes a turn that began at A's record."""

    async def use(d: Directory) -> None:
        await d.claim(KEY, await seen(d), "A", "fp")
        a = await seen(d)
        assert (await d.claim(KEY, a, "B", "fp", moved=True)).result == "ok"
        b = await seen(d)
        assert b.owner == "B" and await d.check(KEY, b)
        assert await d.check(KEY, a) is False
        assert (await d.claim(KEY, b, "C", "fp", moved=True)).result == "ok"
        assert (await d.claim(KEY, b, "B", "fp")).result == "stale", "B's own number is over"
        assert (await d.claim(KEY, a, "D", "fp")).result == "ok"
        assert (await d.claim(KEY, a, "E", "fp")).result == "stale", "the state is a newer one"
        assert (await seen(d)).owner == "D"

    run(use)


def test_servers_announce_themselves(run: Callable[[Use], None]) -> None:
    async def use(d: Directory) -> None:
        assert await d.announce("a@h:1", 5) == []
        assert await d.announce("b@h:2", 7 << 30) == [Member("a@h:1", 5)]
        assert await d.announce("a@h:1", 6) == [Member("b@h:2", 7 << 30)]
        assert await d.announce("a@h:1", None) == [Member("b@h:2", 7 << 30)]
        assert await d.announce("b@h:2", 1) == []

    run(use)


def test_who_is_silent_is_gone() -> None:
    now = 0.0
    d = LocalDirectory(DirectorySettings(member_s=10), clock=lambda: now)

    async def use() -> None:
        nonlocal now
        await d.announce("a@h:1", 5)
        now = 9.0
        assert await d.announce("b@h:2", 5) == [Member("a@h:1", 5)]
        now = 11.0
        assert await d.announce("c@h:3", 5) == [Member("b@h:2", 5)]

    asyncio.run(use())


def test_conversations_are_apart(run: Callable[[Use], None]) -> None:
    async def use(d: Directory) -> None:
        await d.claim(KEY, await seen(d), "A", "fp")
        assert (await seen(d, "b" * 64)).sequence == 0

    run(use)


@needs_redis
def test_who_is_silent_is_gone_from_redis(server: RealRedis) -> None:
    server.start()
    server.cli("HSET", "{t}:members", "a@h:1", "1 5")  # until a millisecond after 1970 began
    server.cli("HSET", "{t}:members", "b@h:2", "99999999999999 5")
    server.cli("HSET", "{t}:members", "c@h:3", "nonsense")

    async def use(d: RedisDirectory) -> None:
        assert await d.announce("d@h:4", 1) == [Member("b@h:2", 5)]

    with_redis(server, use)
    assert set(server.cli("HKEYS", "{t}:members")) == {"b@h:2", "d@h:4"}


# ---- Redis at its worst --------------------------------------------------------------------


@needs_redis
def test_a_restart_without_data_makes_old_claims_stale(server: RealRedis) -> None:
    async def use(d: RedisDirectory) -> None:
        for _ in range(3):
            await d.claim(KEY, await seen(d), "A", "fp")
        old = await seen(d)
        server.stop()
        server.start()
        assert (await d.claim(KEY, old, "A", "fp")).result in ("stale", "unknown")
        fresh = await seen(d)
        assert fresh.epoch != old.epoch and fresh.sequence == 0
        assert (await d.claim(KEY, old, "A", "fp")).result == "stale"
        # Nor after others have counted up to the same number.
        for _ in range(3):
            await d.claim(KEY, await seen(d), "B", "fp")
        assert (await seen(d)).sequence == old.sequence
        assert (await d.claim(KEY, old, "A", "fp")).result == "stale"

    server.start()
    with_redis(server, use)


@needs_redis
@pytest.mark.parametrize(
    "command", [("DEL", "{t}:meta"), ("HDEL", "{t}:meta", "gen"), ("FLUSHALL",)]
)
def test_a_lost_epoch_makes_old_claims_stale(command: tuple[str, ...], server: RealRedis) -> None:
    async def use(d: RedisDirectory) -> None:
        await d.claim(KEY, await seen(d), "A", "fp")
        old = await seen(d)
        server.cli(*command)
        assert (await d.claim(KEY, old, "A", "fp")).result == "stale"
        assert await d.check(KEY, old) is False
        fresh = await seen(d)
        assert fresh.epoch != old.epoch and fresh.sequence == 0

    server.start()
    with_redis(server, use)


@needs_redis
def test_a_restart_from_an_old_copy_is_healed_by_a_new_epoch(server: RealRedis) -> None:
    """An old copy brings old sequences back, so an old claim can pass: the reason to keep nothing
    on disk. Rotating the epoch (the operator's step after a failover) makes all of them stale."""

    async def use(d: RedisDirectory) -> None:
        await d.claim(KEY, await seen(d), "A", "fp")
        old = await seen(d)
        server.cli("SAVE")
        await d.claim(KEY, old, "B", "fp")
        newer = await seen(d)
        server.stop()
        server.start("--dbfilename", "dump.rdb")
        assert (await seen(d)) == old  # B's claim is forgotten
        assert (await d.claim(KEY, newer, "B", "fp")).result == "stale"
        server.cli("DEL", "{t}:meta")
        fresh = await seen(d)
        assert fresh.epoch != old.epoch and fresh.sequence == 0
        for record in (old, newer):
            assert (await d.claim(KEY, record, "B", "fp")).result == "stale"

    server.start()
    with_redis(server, use)


@needs_redis
def test_lookups_of_one_moment_go_together(server: RealRedis) -> None:
    async def use(d: RedisDirectory) -> None:
        keys = [f"{i:064x}" for i in range(MOST_LOOKUPS + 40)]
        for i in range(0, len(keys), 7):
            await d.claim(keys[i], await seen(d, keys[i]), f"s{i}", f"fp{i}")
        before = int(server.cli("INFO", "commandstats").get("cmdstat_evalsha", {}).get("calls", 0))
        gone = asyncio.ensure_future(d.lookup(keys[0]))
        records = asyncio.gather(*(d.lookup(key) for key in keys))
        await asyncio.sleep(0)
        gone.cancel()  # one that does not wait any more changes nothing for the others
        for i, record in enumerate(await records):
            assert record is not None
            owner, fp = (f"s{i}", f"fp{i}") if i % 7 == 0 else ("", "")
            assert (record.owner, record.fingerprint) == (owner, fp)
            assert (record.sequence > 0) == (i % 7 == 0)
        after = int(server.cli("INFO", "commandstats")["cmdstat_evalsha"]["calls"])
        assert after - before <= 3

    server.start()
    with_redis(server, use)


@needs_redis
def test_forgotten_scripts_are_loaded_again(server: RealRedis) -> None:
    async def use(d: RedisDirectory) -> None:
        await d.claim(KEY, await seen(d), "A", "fp")
        server.cli("SCRIPT", "FLUSH")
        assert (await d.claim(KEY, await seen(d), "B", "fp")).result == "ok"

    server.start()
    with_redis(server, use)


@needs_redis
def test_a_stalled_server_costs_little_and_heals(server: RealRedis) -> None:
    async def use(d: RedisDirectory) -> None:
        await d.claim(KEY, await seen(d), "A", "fp")
        server.send(signal.SIGSTOP)
        began = time.monotonic()
        for _ in range(20):
            assert await d.lookup(KEY) is None
        # Three calls wait, the breaker spares the rest.
        assert d.counters["unreachable"] <= 8 and d.counters["breaker_open"] >= 10
        assert time.monotonic() - began < 20 * 2 * FAST.timeout_s
        assert (await d.claim(KEY, Record("e", 1), "A", "fp")).result in ("unavailable", "unknown")
        server.send(signal.SIGCONT)
        await asyncio.sleep(FAST.breaker_s + 0.1)
        assert await d.lookup(KEY) is not None

    server.start()
    with_redis(server, use, FAST)


@needs_redis
def test_no_server_at_all(server: RealRedis) -> None:
    async def use(d: RedisDirectory) -> None:
        assert await d.lookup(KEY) is None
        assert await d.check(KEY, Record("e", 1)) is None
        await d.release(KEY, Record("e", 1))
        assert (await d.claim(KEY, Record("e", 1), "A", "fp")).result in ("unknown", "unavailable")

    with_redis(server, use, FAST)


@needs_redis
@pytest.mark.parametrize("option", ["maxmemory", "replica"])
def test_a_server_that_takes_no_writes(option: str, server: RealRedis) -> None:
    async def use(d: RedisDirectory) -> None:
        record = await seen(d)
        if option == "maxmemory":
            server.cli("CONFIG", "SET", "maxmemory", "1")
        else:
            server.cli("REPLICAOF", "127.0.0.1", "1")
        assert (await d.claim(KEY, record, "A", "fp")).result == "unavailable"
        assert d.counters["error"] == 1

    server.start()
    with_redis(server, use)


@needs_redis
@pytest.mark.parametrize("executed", [True, False])
def test_a_lost_reply_to_a_claim_is_resolved_by_a_lookup(
    executed: bool, server: RealRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(d: RedisDirectory) -> None:
        record = await seen(d)
        real, calls = d._scripts["claim"], []

        async def lost(**given: Any) -> None:
            calls.append(given)
            if executed:
                await real(**given)
            raise TimeoutError

        d._scripts["claim"] = lost
        claim = await d.claim(KEY, record, "A", "fp")
        assert claim == (Claim("ok", 1) if executed else Claim("unknown"))
        assert len(calls) == 1  # never sent twice

    server.start()
    with_redis(server, use)


@pytest.mark.parametrize("kept", [False, True])
def test_a_cancel_gets_through_a_call(kept: bool) -> None:
    """Also one that comes with the reply, and one that the client's library swallows: redis-py
    sends in `asyncio.wait_for`, which in Python 3.11 may return instead."""

    async def main() -> None:
        directory = RedisDirectory.connect("unix:///nowhere", "t", PATIENT)

        async def script(**given: Any) -> int:
            checking.cancel()
            if kept:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(60)
            return 1

        directory._scripts["check"] = script
        checking = asyncio.ensure_future(directory.check(KEY, Record("e", 1)))
        with pytest.raises(asyncio.CancelledError):
            await checking
        await directory.close()

    asyncio.run(main())


@needs_redis
def test_claims_are_announced(server: RealRedis) -> None:
    async def use(d: RedisDirectory) -> None:
        moved = d.moved()
        first = asyncio.ensure_future(anext(moved))
        await asyncio.sleep(0.2)
        server.cli("PUBLISH", d.channel, "junk")
        await d.claim(KEY, await seen(d), "A", "fp")
        event = await asyncio.wait_for(first, 5)
        assert event is not None
        assert (event.key, event.sequence, event.owner) == (KEY, 1, "A")
        # The listener's connection is cut: it comes back and says that something may be missing.
        following = asyncio.ensure_future(anext(moved))
        await asyncio.sleep(0.2)
        server.cli("CLIENT", "KILL", "TYPE", "pubsub")
        assert await asyncio.wait_for(following, 20) is None
        assert d.counters["listener_lost"] == 1
        await moved.aclose()  # type: ignore[attr-defined]

    server.start()
    with_redis(server, use)


@needs_redis
def test_what_others_wrote_there_harms_nobody_else(server: RealRedis) -> None:
    """Keys of another kind, records and members of nonsense, bytes that are no text."""

    async def use(d: RedisDirectory) -> None:
        await d.claim(KEY, await seen(d), "A", "fp")
        space, epoch = "{" + d.namespace + "}", (await seen(d)).epoch
        server.cli("SET", f"{space}:s:string", "not a hash")
        for name, fields in (
            ("lines", ("seq", "1", "owner", "x\n5 y z")),
            ("spaces", ("seq", "1", "owner", "x y z")),
            ("word", ("seq", "one", "owner", "x")),
            ("minus", ("seq", "-1", "owner", "x")),
            ("huge", ("seq", "9" * 5000, "owner", "x")),
            ("float", ("seq", "1e5", "owner", "x")),
            ("nothing", ()),
        ):
            server.cli("HSET", f"{space}:s:{name}", "epoch", epoch, *fields)
        names = ("string", "lines", "spaces", "word", "minus", "huge", "float", "nothing")
        records = await asyncio.gather(*(d.lookup(name) for name in (*names, KEY)))
        assert [r and r.sequence for r in records] == [0] * len(names) + [1]
        assert "error" not in d.counters and d.breaker.allows()
        claim = await d.claim("string", Record(epoch, 0), "A", "fp")
        assert claim.result == "unavailable"
        assert (await d.claim("lines", Record(epoch, 0), "A", "fp")).result == "stale"
        until = 10**15
        server.cli("HSET", f"{space}:members", "x y", f"{until} 5", "b@h:1", f"{until} 7")
        server.cli("HSET", f"{space}:members", "z\n", f"{until} 5", "c@h:1", "soon 7")
        assert await d.announce("A@h:1", 0) == [Member("b@h:1", 7)]

    server.start()
    with_redis(server, use, DirectorySettings(timeout_s=10))


@needs_redis
def test_junk_does_not_end_the_listener(server: RealRedis) -> None:
    async def use(d: RedisDirectory) -> None:
        moved = d.moved()
        first = asyncio.ensure_future(anext(moved))
        await asyncio.sleep(0.2)
        for junk in (b"", b"a b \xc2\xb2 c", b"a b " + b"9" * 5000 + b" c", b"\xff\xfe a 1 b"):
            server.cli("PUBLISH", d.channel, junk)
        # The last one is no text: its connection is given up, and some may have been missed.
        assert await asyncio.wait_for(first, 20) is None
        following = asyncio.ensure_future(anext(moved))
        await asyncio.sleep(0.2)
        await d.claim(KEY, await seen(d), "A", "fp")
        event = await asyncio.wait_for(following, 20)
        assert event is not None and event.key == KEY
        await moved.aclose()  # type: ignore[attr-defined]

    server.start()
    with_redis(server, use)


# ---- small parts ---------------------------------------------------------------------------


def test_session_keys() -> None:
    assert session_key("t", "abc") == session_key("t", "abc")
    assert session_key("t", "abc") != session_key("u", "abc")
    assert session_key("t", "abc") != session_key("ta", "bc")
    assert len(session_key("", "x" * 256)) == 64


@pytest.mark.parametrize(
    "bad", ["", "x" * 257, "x" * 10_000, "a b", "a\n", "a\0b", "\u00e4", "\x7f"]
)
def test_bad_session_ids(bad: str) -> None:
    with pytest.raises(RequestError) as error:
        session_key("t", bad)
    assert error.value.http_status == 400 and (not bad or bad not in str(error.value))


def test_breaker() -> None:
    now = [0.0]
    breaker = Breaker(2, 5.0, clock=lambda: now[0])
    for _ in range(2):
        assert breaker.allows()
        breaker.note(ok=False)
    assert not breaker.allows()
    now[0] = 5.0
    assert breaker.allows() and not breaker.allows()
    breaker.note(ok=True)
    assert breaker.allows() and breaker.allows()


@pytest.mark.parametrize("url", ["", "http://:secret@host", "localhost:6379"])
def test_wrong_addresses_do_not_show_the_password(url: str) -> None:
    with pytest.raises(ConfigError) as error:
        RedisDirectory.connect(url, "t")
    assert "secret" not in str(error.value)


def test_namespaces_and_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="namespace"):
        RedisDirectory.connect("redis://localhost", "a}b")
    with pytest.raises(ConfigError, match="above 0"):
        DirectorySettings(timeout_s=0)


def test_the_directory_starts_without_torch_or_redis() -> None:
    code = "import sys, deepdraft.kv.directory; assert not {'torch', 'redis'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))
