"""Two servers in one process, and a proxy between them that does what networks do."""

import asyncio
import contextlib
import shutil
import ssl
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest import mock

import msgspec
import pytest

from deepdraft.errors import ConfigError
from deepdraft.kv import wire
from deepdraft.kv.directory import Record
from deepdraft.kv.fetch import Fetched, Fetcher, Peer, shorten
from deepdraft.kv.settings import StoreSettings, TransferSettings
from deepdraft.kv.snapshot import Manifest, decode_manifest, encode_manifest
from deepdraft.kv.transfer import Exporter, check_address
from deepdraft.models.deepseek_v41 import DeepseekV41
from tests.kv.conftest import FINGERPRINT, Served, text
from tests.kv.test_exact import both
from tests.kv.test_faults import LAYOUT, Kept

KEY, RECORD, NONCE = "k" * 64, Record("epoch", 7, "A"), bytes(16)
FAST = TransferSettings(
    connect_s=2, deadline_s=20, idle_s=1.0, renew_s=0.0001, backoff_s=30, check_beside=True
)
TOKENS = text(1, 100)


async def read_reply(reader: asyncio.StreamReader) -> wire.Reply:
    size = int.from_bytes(await reader.readexactly(4), "little")
    return msgspec.msgpack.decode(await reader.readexactly(size), type=wire.Reply)


@dataclass
class Proxy:
    """Forwards to `port`; on the way back cuts, stalls or damages after `after` bytes."""

    port: int
    fault: str = "none"
    after: int = 0
    on_fault: Callable[[], None] = lambda: None
    passed: int = 0
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def start(self) -> int:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return int(self.server.sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.append(task)
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.tasks.append(asyncio.ensure_future(self._forward(reader, up_writer)))
        try:
            while data := await up_reader.read(4096):
                before, self.passed = self.passed, self.passed + len(data)
                if self.fault != "none" and before <= self.after < self.passed:
                    self.on_fault()
                    at = self.after - before
                    if self.fault == "flip":
                        data = data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :]
                    elif self.fault in ("cut", "stall"):
                        writer.write(data[:at])
                        if self.fault == "stall":
                            await asyncio.sleep(60)
                        break
                writer.write(data)
                await writer.drain()
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            up_writer.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(4096):
                writer.write(data)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def close(self) -> None:
        self.server.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


class Two:
    """Server A owns a conversation of 100 tokens; B fetches through a proxy."""

    def __init__(self, slots_b: int = 400, **fetch: object) -> None:
        self.a, self.b = Kept(), Kept(slots=slots_b)
        self.exporter = Exporter(self.a.cache, settings=FAST)
        self.fetcher = Fetcher(self.b.cache, settings=FAST, **fetch)  # type: ignore[arg-type]
        self.a.store(TOKENS)
        (self.entry,) = self.a.entries
        self.exporter.own(KEY, RECORD, self.entry.id)

    def run(self, use: Callable[[Peer, Proxy], Awaitable[None]]) -> None:
        """Afterwards nothing may be held on either side."""

        async def main() -> None:
            self.peer = Peer("127.0.0.1", self.exporter.start("127.0.0.1"))
            proxy = Proxy(self.peer.port)
            peer = Peer("127.0.0.1", await proxy.start())
            try:
                await use(peer, proxy)
                await asyncio.sleep(0.05)
            finally:
                await proxy.close()
                self.exporter.close()
            await asyncio.sleep(0.05)

        asyncio.run(main())
        for side in (self.a, self.b):
            side.cache.check()
            side.cache.memory.check()
            stats = side.cache.stats()
            assert (stats["pins"], stats["leases"]) == (0, 0)

    async def fetch(self, peer: Peer, tokens: list[int] = TOKENS) -> Fetched:
        # In a thread: the proxy lives on this loop.
        return await asyncio.to_thread(self.fetcher.fetch, peer, KEY, RECORD, tokens)

    def nothing_came(self) -> None:
        memory = self.b.cache.memory
        assert not memory.entries and memory.slab.num_free == memory.slab.num_slots


def test_a_conversation_moves() -> None:
    two = Two()

    async def use(peer: Peer, proxy: Proxy) -> None:
        got = await two.fetch(peer)
        assert (got.outcome, got.tokens) == ("hit", 100) and got.entry and got.seconds > 0
        assert got.num_bytes == sum(c.length for c in two.entry.all_chunks())

    two.run(use)
    assert two.b.start(TOKENS) == 100
    # What came is what was there, byte for byte, and can move on from here.
    (entry,) = two.b.entries
    assert two.b.cache.manifest(entry) == two.a.cache.manifest(two.entry)


@pytest.mark.parametrize("mode", ["full", "encoder"])
def test_the_next_turn_on_another_server(mode: str, model: DeepseekV41) -> None:
    a, b = Served(model, mode=mode), Served(model, mode=mode)
    prompt = text(1, 60)
    tokens, _, _, _ = a.answer(prompt)
    turn = [*prompt, *tokens, *text(2, 20)]

    exporter = Exporter(a.cache)
    (entry,) = a.cache.memory.entries
    exporter.own(KEY, RECORD, entry)
    peer = Peer("127.0.0.1", exporter.start("127.0.0.1"))
    assert Fetcher(b.cache).fetch(peer, KEY, RECORD, turn).outcome == "hit"
    exporter.close()
    assert both(b, turn) == "63/63"


@pytest.mark.parametrize("shared", [1, 8, 63, 64, 65, 99])
def test_only_what_can_be_used_is_read(shared: int) -> None:
    two = Two()

    async def use(peer: Peer, proxy: Proxy) -> None:
        # The peer's next tokens come in the chunk that is cut, and mine, of any number.
        got = await two.fetch(peer, [*TOKENS[:shared], *range(5000, 5020)])
        assert got.outcome == "hit" and got.tokens == min(100, -(-shared // 8) * 8)

    two.run(use)
    match = two.b.cache.index[True].match([*TOKENS[:shared], 5000, 5001])
    assert match is not None and match.length == shared
    (entry,) = two.b.entries
    names = two.b.cache.chunk_keys(TOKENS[: len(entry.token_ids)])
    assert names == [c.key for c in entry.chunks if c.key]  # what lies there, not mine


def test_a_shortened_manifest_is_a_right_one() -> None:
    kept = Kept()
    state = kept.pool.open()
    from tests.kv.synthetic import fill

    captured = []
    for n in (20, 50):
        fill(state, TOKENS[:n])
        taken = kept.cache.capture(state)
        assert taken is not None
        captured.append(taken)
    fill(state, TOKENS)
    kept.cache.store(state, captured)
    manifest = kept.cache.manifest(kept.entries[0])
    for shared in (0, 1, 19, 20, 49, 50, 56, 99, 100):
        short, indices, _ = shorten(manifest, TOKENS[:shared])
        if not shared:
            assert short is None
            continue
        assert short is not None
        assert decode_manifest(encode_manifest(short), layout=LAYOUT, expected=FINGERPRINT) == short
        refs = manifest.all_chunks()
        assert [refs[i] for i in indices] == short.all_chunks()
        positions = [c.info.position for c in short.checkpoints]
        assert positions == [p for p in (20, 50, 100) if p <= shared]


# ---- refusals ------------------------------------------------------------------------------


def test_refusals() -> None:
    two = Two()

    async def use(peer: Peer, proxy: Proxy) -> None:
        f = two.fetcher.fetch
        assert f(two.peer, "x" * 64, RECORD, TOKENS).outcome == "miss"
        for other in (Record("other", 7), Record("epoch", 6), Record("epoch", 8)):
            assert f(two.peer, KEY, other, TOKENS).outcome == "stale"
        assert f(two.peer, KEY, RECORD, [5000, *TOKENS]).outcome == "miss"
        two.b.cache.expected = b"z" * 32
        assert (await two.fetch(peer)).outcome == "incompatible"

    two.run(use)
    two.nothing_came()


def test_an_evicted_conversation_is_a_miss() -> None:
    two = Two()
    two.a.cache.memory.evict(400)

    async def use(peer: Peer, proxy: Proxy) -> None:
        assert (await two.fetch(peer)).outcome == "miss"

    two.run(use)


def test_a_conversation_that_moved_on_goes_first() -> None:
    two = Two()
    two.exporter.disown(KEY)
    assert two.entry.state.value == "superseded"

    async def use(peer: Peer, proxy: Proxy) -> None:
        assert (await two.fetch(peer)).outcome == "miss"

    two.run(use)


def test_busy() -> None:
    two = Two()
    leases = [two.a.cache.memory.lease(two.entry.id, "127.0.0.1") for _ in range(8)]

    async def use(peer: Peer, proxy: Proxy) -> None:
        assert (await two.fetch(peer)).outcome == "busy"
        for lease in leases:
            assert lease is not None and two.a.cache.memory.close(lease.id)
        assert (await two.fetch(peer)).outcome == "hit"

    two.run(use)


def test_not_worth_it() -> None:
    asked: list[tuple[int, int]] = []

    def worth_it(wanted: Manifest, tokens: Sequence[int]) -> bool:
        asked.append((wanted.data_bytes, len(tokens)))
        return False

    two = Two(worth_it=worth_it)

    async def use(peer: Peer, proxy: Proxy) -> None:
        assert (await two.fetch(peer)).outcome == "too_slow"

    two.run(use)
    two.nothing_came()
    assert asked[0][1] == 100


def test_no_room() -> None:
    two = Two(slots_b=5)

    async def use(peer: Peer, proxy: Proxy) -> None:
        assert (await two.fetch(peer)).outcome == "full"

    two.run(use)
    two.nothing_came()


# ---- faults --------------------------------------------------------------------------------

PLACES = [0, 3, 40, 900, 6000, 60_000, 120_000]


@pytest.mark.parametrize("after", PLACES)
@pytest.mark.parametrize("fault", ["cut", "flip"])
def test_a_connection_that_breaks_or_lies(fault: str, after: int) -> None:
    two = Two()

    async def use(peer: Peer, proxy: Proxy) -> None:
        proxy.fault, proxy.after = fault, after
        got = await two.fetch(peer)
        assert proxy.passed > after
        assert got.outcome in ("disconnect", "corrupt", "timeout")
        if fault == "cut":
            assert got.outcome == "disconnect"
        two.nothing_came()
        assert (await two.fetch(peer)).outcome == "backoff"
        two.fetcher._backoff.clear()
        proxy.fault = "none"
        assert (await two.fetch(peer)).outcome == "hit"

    two.run(use)
    assert two.b.start(TOKENS) == 100


@pytest.mark.parametrize("after", [10, 60_000])
def test_an_owner_that_stalls(after: int) -> None:
    two = Two()

    async def use(peer: Peer, proxy: Proxy) -> None:
        proxy.fault, proxy.after = "stall", after
        assert (await two.fetch(peer)).outcome == "timeout"

    two.run(use)
    two.nothing_came()


def test_nobody_there() -> None:
    two = Two()

    async def use(peer: Peer, proxy: Proxy) -> None:
        proxy.server.close()
        assert (await two.fetch(peer)).outcome == "disconnect"

    two.run(use)


@pytest.mark.parametrize("damaged", [True, False])
def test_a_lease_that_ends_by_force_while_it_is_read(damaged: bool) -> None:
    """Memory is used again in the middle: the reader throws away what it has."""
    two = Two()
    memory = two.a.cache.memory
    now = [0.0]
    memory.clock = lambda: now[0]

    def force() -> None:
        now[0] = 500.0
        memory.expire()
        if damaged:
            for chunk in two.entry.all_chunks():
                memory.slab.view(chunk.slot, chunk.length)[:] = 3

    async def use(peer: Peer, proxy: Proxy) -> None:
        proxy.fault, proxy.after, proxy.on_fault = "force", 60_000, force
        assert (await two.fetch(peer)).outcome == "corrupt"

    two.run(use)
    two.nothing_came()


def test_a_reader_that_dies_leaves_no_lease() -> None:
    two = Two()

    async def use(peer: Peer, proxy: Proxy) -> None:
        reader, writer = await asyncio.open_connection(peer.host, proxy.port)
        message = wire.Open(wire.PROTOCOL, FINGERPRINT, KEY, RECORD.epoch, RECORD.sequence, NONCE)
        writer.write(wire.frame(message))
        assert isinstance(await read_reply(reader), wire.Opened)
        assert two.a.cache.stats()["leases"] == 1
        writer.write(wire.frame(wire.Read(0)))
        writer.transport.abort()
        for _ in range(100):
            await asyncio.sleep(0.02)
            if not two.a.cache.stats()["leases"]:
                break
        assert (await two.fetch(peer)).outcome == "hit"

    two.run(use)


@pytest.mark.parametrize(
    "junk",
    [
        b"",
        b"\0\0\0\0",
        b"\xff\xff\xff\xff",
        b"\5\0\0\0hello",
        wire.frame(wire.Read(0)),
        wire.frame(wire.Open(99, FINGERPRINT, KEY, "e", 1, NONCE)),
        wire.frame(wire.Open(wire.PROTOCOL, FINGERPRINT, KEY * 100, "e", 1, NONCE)),
        wire.frame(wire.Open(wire.PROTOCOL, FINGERPRINT, KEY, "e", 1, NONCE, "a\nline")),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_junk_from_a_peer_changes_nothing(junk: bytes) -> None:
    two = Two()

    async def use(peer: Peer, proxy: Proxy) -> None:
        reader, writer = await asyncio.open_connection(peer.host, proxy.port)
        writer.write(junk)
        await writer.drain()
        data = b""
        with contextlib.suppress(ConnectionResetError):  # junk that was not read to its end
            data = await asyncio.wait_for(reader.read(), 5)  # an answer or none, then the end
        assert len(data) < 100
        writer.close()
        assert (await two.fetch(peer)).outcome == "hit"

    two.run(use)


@pytest.mark.parametrize("index", [-1, 1000, 1 << 40])
def test_chunks_that_are_not_there(index: int) -> None:
    two = Two()

    async def use(peer: Peer, proxy: Proxy) -> None:
        reader, writer = await asyncio.open_connection(peer.host, proxy.port)
        message = wire.Open(wire.PROTOCOL, FINGERPRINT, KEY, RECORD.epoch, RECORD.sequence, NONCE)
        writer.write(wire.frame(message) + wire.frame(wire.Read(index)) + wire.frame(wire.Close()))
        assert isinstance(await read_reply(reader), wire.Opened)
        assert await read_reply(reader) == wire.Refused("bad")
        assert await read_reply(reader) == wire.Closed(True)
        writer.close()

    two.run(use)


# ---- addresses and TLS ---------------------------------------------------------------------


def test_plain_tcp_is_for_loopback_only() -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        check_address(host, None)
    for host in ("0.0.0.0", "10.0.0.1", "example", "::"):
        with pytest.raises(ConfigError, match="loopback"):
            check_address(host, None)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make certificates")
def test_peers_without_our_certificate_are_refused(tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "ec", "-nodes", "-days", "1"),
                *("-pkeyopt", "ec_paramgen_curve:P-256", "-subj", "/CN=localhost"),
                *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
                *("-keyout", str(tmp_path / f"{name}.key"), "-out", str(tmp_path / f"{name}.crt")),
            ],
            check=True,
            capture_output=True,
        )

    def context(purpose: ssl.Purpose, name: str, trusts: str) -> ssl.SSLContext:
        made = ssl.create_default_context(purpose, cafile=tmp_path / f"{trusts}.crt")
        made.verify_mode = ssl.CERT_REQUIRED
        made.load_cert_chain(tmp_path / f"{name}.crt", tmp_path / f"{name}.key")
        return made

    two = Two()
    two.fetcher.settings = replace(FAST, connections=3)
    two.exporter.tls = context(ssl.Purpose.CLIENT_AUTH, "ours", "ours")
    made: list[str | None] = []
    connect = two.fetcher.connect

    def noted(peer: Peer, *, until: float) -> wire.Link:
        link = connect(peer, until=until)
        assert isinstance(link.sock, ssl.SSLSocket)
        made.append(link.sock.version())
        return link

    async def main() -> None:
        peer = Peer("127.0.0.1", two.exporter.start("127.0.0.1"))
        for name, trusts, outcome in (
            ("theirs", "ours", {"disconnect"}),
            ("ours", "theirs", {"disconnect"}),
            ("ours", "ours", {"hit"}),
        ):
            two.fetcher.tls = context(ssl.Purpose.SERVER_AUTH, name, trusts)
            two.fetcher._backoff.clear()
            made.clear()
            with mock.patch.object(two.fetcher, "connect", noted):
                assert (await two.fetch(peer)).outcome in outcome
        assert made == ["TLSv1.3"] * 3
        two.fetcher.tls = None
        assert (await two.fetch(peer)).outcome in ("disconnect", "timeout", "corrupt")
        two.exporter.close()
        await asyncio.sleep(0.05)

    asyncio.run(main())


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="above 0"):
        TransferSettings(idle_s=0)
    for wrong in ({"grace_s": 1}, {"low_water": 0.99}, {"lease_s": 500}, {"chunk_blocks": 0}):
        with pytest.raises(ConfigError):
            StoreSettings(**wrong)
