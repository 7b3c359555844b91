"""A peer that lies, drips, restarts or comes back late; numbers are those of the design's tests."""

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deepdraft.kv import wire
from deepdraft.kv.cache import KvCache
from deepdraft.kv.directory import Record
from deepdraft.kv.errors import SnapshotError
from deepdraft.kv.fetch import Fetched, Fetcher, Peer
from deepdraft.kv.fleet_files import init_fleet, load_fleet
from deepdraft.kv.layout import Span
from deepdraft.kv.settings import TransferSettings
from deepdraft.kv.snapshot import ChunkRef, Manifest, encode_manifest
from deepdraft.kv.transfer import Exporter
from deepdraft.kv.transport import CHUNKS_PER_LINK
from tests.kv.conftest import wait_for
from tests.kv.test_faults import Kept
from tests.kv.test_transfer import FAST, KEY, RECORD, TOKENS, Proxy


class Liar(Exporter):
    """An owner whose chunks or manifest are not what they should be."""

    def __init__(self, cache: KvCache, settings: TransferSettings) -> None:
        super().__init__(cache, settings=settings)
        self.lie: Callable[[wire.Link, int, int], None] | None = None
        self.forge: Callable[[Manifest], Manifest] | None = None

    def _read(self, link: wire.Link, index: int, lease: int) -> None:
        if self.lie is None:
            super()._read(link, index, lease)
        else:
            self.lie(link, index, lease)

    def honest(self, link: wire.Link, index: int, lease: int) -> None:
        super()._read(link, index, lease)

    def _open(self, request: wire.Request, peer: str) -> tuple[wire.Reply, int | None]:
        reply, lease = super()._open(request, peer)
        if self.forge is not None and isinstance(reply, wire.Opened):
            manifest = msgspec.msgpack.decode(reply.manifest[48:], type=Manifest)
            head = encode_manifest(self.forge(manifest))
            reply = msgspec.structs.replace(reply, manifest=head)
        return reply, lease


class Pair:
    """A lying owner and a reader."""

    def __init__(self, **settings: Any) -> None:
        self.a, self.b = Kept(), Kept()
        self.liar = Liar(self.a.cache, FAST)
        self.a.store(TOKENS)
        (self.entry,) = self.a.entries
        self.liar.own(KEY, RECORD, self.entry.id)
        fast: Any = {"connect_s": 2, "deadline_s": 20, "idle_s": 1.0, "backoff_s": 0.01}
        self.fetcher = Fetcher(self.b.cache, settings=TransferSettings(**{**fast, **settings}))
        self.peer = Peer("127.0.0.1", self.liar.start("127.0.0.1"))

    def fetch(self, tokens: list[int] = TOKENS, record: Record = RECORD) -> Fetched:
        time.sleep(0.02)  # past the back-off
        return self.fetcher.fetch(self.peer, KEY, record, tokens)

    def close(self) -> None:
        self.liar.close()
        for side in (self.a, self.b):
            side.cache.check()
            side.cache.memory.check()
            stats = side.cache.stats()
            assert (stats["pins"], stats["leases"]) == (0, 0)

    def refuses(self, *outcomes: str) -> None:
        """Nothing stays here, and an honest owner is believed afterwards."""
        got = self.fetch()
        assert got.outcome in outcomes, got
        memory = self.b.cache.memory
        assert not memory.entries and memory.slab.num_free == memory.slab.num_slots
        assert self.fetcher.counters.get(got.outcome) == 1
        self.liar.lie = self.liar.forge = None
        assert self.fetch().outcome == "hit" and self.b.start(TOKENS) == 100


@pytest.fixture(params=[(1, False), (3, True)], ids=["one-link", "three-links-checked-beside"])
def pair(request: pytest.FixtureRequest) -> Any:
    connections, beside = request.param
    made = Pair(connections=connections, check_beside=beside)
    yield made
    made.close()


# ---- 20, 22: chunks ------------------------------------------------------------------------


def reordered(liar: Liar, link: wire.Link, index: int, lease: int) -> None:
    liar.honest(link, index ^ 1, lease)


def duplicated(liar: Liar, link: wire.Link, index: int, lease: int) -> None:
    liar.honest(link, index, lease)
    liar.honest(link, index, lease)


def wrong_bytes(liar: Liar, link: wire.Link, index: int, lease: int) -> None:
    """The number of one chunk, the bytes of another of the same length."""
    chunks = liar.cache.memory.leased(lease).all_chunks()  # type: ignore[union-attr]
    link.send(wire.Data(index, chunks[index].length))
    other = chunks[0 if index else 1]
    link.send_bytes(liar.cache.memory.slab.view(other.slot, chunks[index].length).data)


def nothing_moved(liar: Liar, link: wire.Link, index: int, lease: int) -> None:
    """Done is reported, and the bytes are zeros."""
    chunk = liar.cache.memory.leased(lease).all_chunks()[index]  # type: ignore[union-attr]
    link.send(wire.Data(index, chunk.length))
    link.send_bytes(memoryview(bytes(chunk.length)))


def shorter(liar: Liar, link: wire.Link, index: int, lease: int) -> None:
    chunk = liar.cache.memory.leased(lease).all_chunks()[index]  # type: ignore[union-attr]
    link.send(wire.Data(index, chunk.length - 1))
    link.send_bytes(liar.cache.memory.slab.view(chunk.slot, chunk.length - 1).data)


def cut_off(liar: Liar, link: wire.Link, index: int, lease: int) -> None:
    """The length is right, the bytes stop, and the next message follows at once."""
    chunk = liar.cache.memory.leased(lease).all_chunks()[index]  # type: ignore[union-attr]
    link.send(wire.Data(index, chunk.length))
    link.send_bytes(liar.cache.memory.slab.view(chunk.slot, chunk.length // 2).data)
    link.send(wire.Data(index, chunk.length))


@pytest.mark.parametrize(
    "lie", [reordered, duplicated, wrong_bytes, nothing_moved, shorter, cut_off]
)
def test_chunks_that_are_not_what_was_asked_for(lie: Any, pair: Pair) -> None:
    pair.liar.lie = lambda *args: lie(pair.liar, *args)
    pair.refuses("corrupt", "disconnect", "timeout")


# ---- 19, 23: manifests, forged with a right root -------------------------------------------


def forged(**changes: Any) -> Callable[[Manifest], Manifest]:
    return lambda m: msgspec.structs.replace(m, **changes)


def more_tokens(m: Manifest) -> Manifest:
    return msgspec.structs.replace(m, tokens=m.tokens + b"\1\0\0\0" * 200)


def other_tokens(m: Manifest) -> Manifest:
    """Says to be of the reader's tokens from the start, with the chunks of another text."""
    chunks = (ChunkRef(m.chunks[0].length, m.chunks[1].digest), *m.chunks[1:])
    return msgspec.structs.replace(m, chunks=chunks)


def beyond(m: Manifest) -> Manifest:
    (last,) = m.checkpoints
    info = msgspec.structs.replace(last.info, position=101)
    return msgspec.structs.replace(m, checkpoints=(msgspec.structs.replace(last, info=info),))


def fewer_rows(m: Manifest) -> Manifest:
    (last,) = m.checkpoints
    spans = (Span(90, 100), *last.info.spans[1:])
    info = msgspec.structs.replace(last.info, spans=spans)
    return msgspec.structs.replace(m, checkpoints=(msgspec.structs.replace(last, info=info),))


def huge_chunk(m: Manifest) -> Manifest:
    chunks = (ChunkRef(1 << 40, m.chunks[0].digest), *m.chunks[1:])
    return msgspec.structs.replace(m, chunks=chunks)


@pytest.mark.parametrize(
    "forge",
    [
        forged(format=2),
        forged(fingerprint=b"x" * 32),
        forged(fingerprint=b""),
        forged(chunk_blocks=0),
        forged(chunk_blocks=1 << 40),
        forged(tokens=b""),
        forged(tokens=b"abc"),
        forged(chunks=()),
        more_tokens,
        other_tokens,
        beyond,
        fewer_rows,
        huge_chunk,
        lambda m: msgspec.structs.replace(m, checkpoints=m.checkpoints * 300),
        lambda m: msgspec.structs.replace(
            m, layout=msgspec.structs.replace(m.layout, window=1 << 30)
        ),
    ],
)
def test_forged_manifests(forge: Any, pair: Pair) -> None:
    pair.liar.forge = forge
    pair.refuses("corrupt", "miss", "incompatible")


def test_an_exact_flag_that_lies_is_still_bound_to_the_bytes(pair: Pair) -> None:
    """A state marked exact by a member of the fleet is believed; without the key nobody is one."""
    pair.fetcher.fleet_key = b"k" * 32
    pair.liar.forge = forged(exact=False)
    assert pair.fetch().outcome == "corrupt"


# ---- 14, 16: slow and late -----------------------------------------------------------------


def test_a_slow_drip_ends_at_the_deadline() -> None:
    pair = Pair(deadline_s=0.6, idle_s=5.0)

    def drip(link: wire.Link, index: int, lease: int) -> None:
        chunk = pair.a.cache.memory.leased(lease).all_chunks()[index]  # type: ignore[union-attr]
        link.send(wire.Data(index, chunk.length))
        data = pair.a.cache.memory.slab.view(chunk.slot, chunk.length).data
        for at in range(0, chunk.length, 16):
            link.send_bytes(data[at : at + 16])
            time.sleep(0.02)

    pair.liar.lie = drip
    try:
        begin = time.monotonic()
        pair.refuses("timeout")
        assert time.monotonic() - begin < 30
    finally:
        pair.close()


def test_bytes_that_come_after_the_reader_gave_up_go_nowhere() -> None:
    pair = Pair(idle_s=0.3)
    resumed, sent = threading.Event(), threading.Event()

    def stopped(link: wire.Link, index: int, lease: int) -> None:
        """Stops in the middle, as by SIGSTOP, and goes on when nobody waits any more."""
        chunk = pair.a.cache.memory.leased(lease).all_chunks()[index]  # type: ignore[union-attr]
        data = pair.a.cache.memory.slab.view(chunk.slot, chunk.length).data
        link.send(wire.Data(index, chunk.length))
        link.send_bytes(data[:100])
        resumed.wait(20)
        try:
            link.send_bytes(data[100:])
        finally:
            sent.set()

    pair.liar.lie = stopped
    try:
        assert pair.fetch().outcome == "timeout"
        # The memory is somebody else's now.
        slab = pair.b.cache.memory.slab
        assert slab.num_free == slab.num_slots
        pair.b.store(list(range(50, 150)))
        before = slab.array.copy()
        resumed.set()
        assert sent.wait(20)
        time.sleep(0.1)
        assert (slab.array == before).all()
    finally:
        resumed.set()
        pair.close()


def test_nobody_answers_the_connection() -> None:
    """A listener that accepts nothing more: connecting ends by itself."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as deaf:
        port = deaf.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            pair = Pair(connect_s=0.2, idle_s=0.3)
            try:
                got = pair.fetcher.fetch(Peer("127.0.0.1", port), KEY, RECORD, TOKENS)
                assert got.outcome in ("timeout", "disconnect")
            finally:
                pair.close()


# ---- 18: the same address, another life ----------------------------------------------------


def test_an_owner_that_restarted_does_not_know_old_records(pair: Pair) -> None:
    pair.liar.close()
    again = Kept()
    again.store(list(range(60, 160)))
    other = Exporter(again.cache, settings=FAST)
    (entry,) = again.entries
    other.start("127.0.0.1", pair.peer.port)
    try:
        assert pair.fetch().outcome == "miss"
        other.own(KEY, Record("new epoch", 7, "A"), entry.id)
        assert pair.fetch().outcome == "stale"
        # Even under the old number: its tokens are others, so nothing is shared.
        other.own(KEY, RECORD, entry.id)
        assert pair.fetch().outcome == "miss"
    finally:
        other.close()


# ---- several connections -------------------------------------------------------------------


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("beside", [False, True])
def test_connections_share_the_chunks_and_each_is_checked(damaged: bool, beside: bool) -> None:
    pair = Pair(connections=3, check_beside=beside)
    served: list[tuple[wire.Link, int]] = []
    entry, joined = pair.entry, threading.Event()
    assert len(entry.all_chunks()) >= 3 * CHUNKS_PER_LINK

    def lie(link: wire.Link, index: int, lease: int) -> None:
        served.append((link, index))
        if link is served[0][0]:  # it waits until another connection has had its turn
            assert joined.wait(10)
        else:
            joined.set()
            if damaged:
                nothing_moved(pair.liar, link, index, lease)
                return
        pair.liar.honest(link, index, lease)

    pair.liar.lie = lie
    try:
        if damaged:
            pair.refuses("corrupt")
        else:
            assert pair.fetch().outcome == "hit" and pair.b.start(TOKENS) == 100
            assert sorted(i for _, i in served) == list(range(len(entry.all_chunks())))
        assert len({id(link) for link, _ in served}) > 1
    finally:
        pair.close()


@pytest.mark.parametrize("refused", ["gone", "ended"])
def test_where_no_further_connection_comes_the_first_brings_all(
    refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(connections=3)

    def join(link: wire.Link, request: wire.Join) -> None:
        if refused == "gone":
            link.send(wire.Refused("gone"))

    monkeypatch.setattr(pair.liar, "_join", join)
    try:
        assert pair.fetch().outcome == "hit" and pair.b.start(TOKENS) == 100
    finally:
        pair.close()


# ---- 13: the owner ends at any byte --------------------------------------------------------


@pytest.mark.parametrize("percent", [0, 1, 50, 99])
def test_an_owner_that_dies_at_any_byte(percent: int) -> None:
    pair = Pair()
    total = sum(c.length for c in pair.entry.all_chunks())

    async def main() -> Fetched:
        proxy = Proxy(pair.peer.port, "cut", total * percent // 100)
        peer = Peer("127.0.0.1", await proxy.start())
        got = await asyncio.to_thread(pair.fetcher.fetch, peer, KEY, RECORD, TOKENS)
        await proxy.close()
        return got

    try:
        assert asyncio.run(main()).outcome == "disconnect"
        memory = pair.b.cache.memory
        assert not memory.entries and memory.slab.num_free == memory.slab.num_slots
        assert pair.fetch().outcome == "hit"
    finally:
        pair.close()


def test_many_readers_and_no_more_connections_than_allowed() -> None:
    pair = Pair()
    pair.liar.settings = TransferSettings(max_connections=1)
    try:
        link = wire.Link.connect("127.0.0.1", pair.peer.port, None, "", idle_s=2, by=2)
        nonce = bytes(wire.NONCE_BYTES)
        link.send(wire.Open(wire.PROTOCOL, pair.a.cache.expected, KEY, "epoch", 7, nonce))
        assert isinstance(link.reply(), wire.Opened)
        assert pair.fetch().outcome == "disconnect"
        link.send(wire.Close())
        assert link.reply() == wire.Closed(True)
        link.close()
        for _ in range(200):
            if pair.fetch().outcome == "hit":
                break
        assert pair.fetcher.counters.get("hit") == 1
    finally:
        pair.close()


def test_a_token_joins_only_while_its_lease_lives(pair: Pair) -> None:
    def connect() -> wire.Link:
        return wire.Link.connect("127.0.0.1", pair.peer.port, None, "", idle_s=2, by=2)

    first, nonce = connect(), bytes(wire.NONCE_BYTES)
    first.send(wire.Open(wire.PROTOCOL, pair.a.cache.expected, KEY, "epoch", 7, nonce))
    opened = first.reply()
    assert isinstance(opened, wire.Opened)
    second = connect()
    second.send(wire.Join(wire.PROTOCOL, opened.token), wire.Read(0))
    assert second.reply() == wire.Joined()
    assert second.reply() == wire.Data(0, pair.entry.chunks[0].length)
    first.send(wire.Close())
    assert first.reply() == wire.Closed(True)
    for token in (opened.token, b"", bytes(16)):
        late = connect()
        late.send(wire.Join(wire.PROTOCOL, token))
        assert late.reply() == wire.Refused("gone")
        late.close()
    first.close()
    second.close()


# ---- time: every phase ends ----------------------------------------------------------------


def drip(link: wire.Link, message: wire.Reply) -> None:
    """A byte now and then, so that no wait for one runs out."""
    for byte in wire.frame(message):
        link.send_bytes(memoryview(bytes([byte])))
        time.sleep(0.2)


def flood(link: wire.Link, message: wire.Reply) -> None:
    """Message after message that says nothing."""
    while True:
        link.send(wire.Renewed(1.0))


@pytest.mark.parametrize(
    ("how", "phase"),
    [
        (drip, wire.Opened),
        (drip, wire.Joined),
        (drip, wire.Data),
        (drip, wire.Closed),
        (flood, wire.Data),
        (flood, wire.Closed),
    ],
)
def test_no_phase_of_a_fetch_is_without_an_end(
    how: Callable[[wire.Link, wire.Reply], None], phase: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its deadline counts for all of it. (Of a peer that dripped the manifest, or sent renewals
    for ever where the lease's end was asked for, a request once waited without an end.)"""
    pair = Pair(connections=3, deadline_s=0.6, idle_s=30.0)
    pair.liar.settings = TransferSettings(idle_s=30.0)
    send, lying = wire.Link.send, threading.Event()
    lying.set()

    def slow(self: wire.Link, *messages: Any, more: bool = False) -> None:
        if lying.is_set() and isinstance(messages[0], phase):
            how(self, messages[0])
        else:
            send(self, *messages, more=more)

    monkeypatch.setattr(wire.Link, "send", slow)
    if phase is wire.Joined:  # the first connection waits for the others
        pair.liar.lie = lambda *args: time.sleep(1)
    try:
        got = pair.fetch()
        assert got.outcome == "timeout", got
        memory = pair.b.cache.memory
        assert not memory.entries and memory.slab.num_free == memory.slab.num_slots
        lying.clear()
        pair.liar.lie, pair.fetcher.settings = None, FAST
        assert pair.fetch().outcome == "hit" and pair.b.start(TOKENS) == 100
    finally:
        lying.clear()
        pair.close()


# ---- the owner's side ----------------------------------------------------------------------


def test_a_request_that_drips_ends() -> None:
    """Its connection is one of few; a byte now and then does not keep it."""
    pair = Pair()
    pair.liar.settings = TransferSettings(idle_s=0.3)
    try:
        with socket.create_connection(("127.0.0.1", pair.peer.port), 10) as sock:
            sock.settimeout(30)
            ended = False
            for byte in (4096).to_bytes(4, "little") + bytes(200):
                try:
                    sock.sendall(bytes([byte]))
                except OSError:
                    ended = True
                    break
                time.sleep(0.05)
            assert ended, "4,300 bytes would have taken minutes"
        assert pair.liar.counters.get("reader_gone") == 1
    finally:
        pair.close()


def test_connections_that_never_shake_hands_are_few(tmp_path: Path) -> None:
    """Who has no certificate can hold so many threads for `idle_s`, and no more."""
    (directory,) = init_fleet(tmp_path, ["a"], ["127.0.0.1"])
    pair = Pair()
    pair.liar.tls = load_fleet(directory).server_tls
    pair.liar.settings = TransferSettings(max_connections=4, idle_s=60)
    socks = [socket.create_connection(("127.0.0.1", pair.peer.port), 10) for _ in range(40)]
    try:
        wait_for(lambda: pair.liar.counters.get("too_many") == 36)
        assert len(pair.liar._threads) == 5
    finally:
        for sock in socks:
            sock.close()
        wait_for(lambda: len(pair.liar._threads) == 1)
        pair.close()


EVIL = "x\n2026-11-30 ERROR forged\x1b[31m"


@pytest.mark.parametrize(
    "message",
    [
        {"type": EVIL},
        {"type": "closed", "valid": True, EVIL: 1},
        {"type": "refused", "reason": EVIL},
        {"type": "taken", "outcome": "taken\n"},
        {"type": "taken", "outcome": "a" * 10_000},
        {"type": "refused", "reason": ""},
        {"type": EVIL * 1000},
    ],
)
def test_a_peer_writes_no_log_lines(message: dict[str, Any]) -> None:
    body = msgspec.msgpack.encode(message)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        link = wire.Link.__new__(wire.Link)
        link.sock, link._tls, link._limit = ours, False, 10.0
        theirs.sendall(len(body).to_bytes(4, "little") + body)
        with pytest.raises(SnapshotError) as caught:
            link.reply()
    said = caught.value.message
    assert said.isprintable() and len(said) <= 400


def test_a_name_that_is_no_host_is_a_peer_that_is_not_there() -> None:
    """Of a record in the directory; the look-up of such a name fails in another way."""
    pair = Pair()
    try:
        for host in ("a..b", "a" * 70, "."):
            pair.fetcher.tls = ssl.create_default_context()
            got = pair.fetcher.fetch(Peer(host, 1, "n"), KEY, RECORD, TOKENS)
            assert got.outcome == "disconnect"
    finally:
        pair.close()
