"""Stored conversations from one server to another over TCP.

Owns: the owner's side (`Exporter`), the reader's side (`Fetcher`), their deadlines and back-off.
Knows nothing of: the directory, sessions, what a request does with what was fetched.

The owner gives a lease and a manifest, the reader asks for the chunks it needs, verifies each one
before it counts, and throws all away when the owner says that the lease did not hold throughout.
Only this process writes to the destination, so a failed fetch frees it at once; transports where
the peer writes (RDMA) must quarantine it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import ssl
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Literal

import msgspec

from deepdraft.errors import ConfigError
from deepdraft.kv import wire
from deepdraft.kv.cache import KvCache
from deepdraft.kv.directory import Record
from deepdraft.kv.errors import SnapshotError, StoreFull
from deepdraft.kv.prefix import common_prefix, token_bytes
from deepdraft.kv.snapshot import Manifest, decode_manifest, digest, encode_manifest

logger = logging.getLogger(__name__)
Outcome = Literal[
    "hit",
    "miss",
    "stale",
    "incompatible",
    "busy",
    "too_slow",
    "timeout",
    "disconnect",
    "corrupt",
    "full",
    "backoff",
]
PIECE_BYTES, BUFFER_BYTES = 1 << 18, 1 << 20
WINDOW = 4
"""Chunks asked for ahead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSettings:
    """Times in seconds. A reader's deadline lies below the owner's lease limit."""

    connect_s: float = 0.5
    deadline_s: float = 25.0
    idle_s: float = 5.0
    """Without a byte for this long a peer counts as stalled."""
    renew_s: float = 5.0
    backoff_s: float = 5.0

    def __post_init__(self) -> None:
        if min(self.connect_s, self.deadline_s, self.idle_s, self.renew_s) <= 0:
            raise ConfigError("the KV transfer's times must be above 0")


def check_address(host: str, tls: ssl.SSLContext | None) -> None:
    """Without TLS only loopback is accepted: chunks are users' conversations."""
    with contextlib.suppress(ValueError):
        if ip_address(host).is_loopback:
            return
    if tls is None and host != "localhost":
        raise ConfigError(
            f"KV transfer without TLS is accepted on loopback only, got {host}; make certificates "
            f"and set them"
        )


class Exporter:
    """The owner's side: answers peers about the conversations of a cache."""

    def __init__(
        self,
        cache: KvCache,
        *,
        tls: ssl.SSLContext | None = None,
        settings: TransferSettings | None = None,
    ) -> None:
        self.cache, self.tls = cache, tls
        self.settings = settings or TransferSettings()
        self.counters: Counter[str] = Counter()
        self._owned: dict[str, tuple[str, int, int]] = {}
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def own(self, key: str, record: Record, entry: int) -> None:
        """The directory says this conversation is ours, and this entry holds it."""
        self._owned[key] = (record.epoch, record.sequence, entry)

    def disown(self, key: str) -> None:
        """Someone else owns it now: our copy goes first."""
        owned = self._owned.pop(key, None)
        if owned is not None:
            self.cache.memory.supersede(owned[2])

    async def start(self, host: str, port: int = 0) -> int:
        """Listen; returns the port."""
        check_address(host, self.tls)
        self._server = await asyncio.start_server(self._serve, host, port, ssl=self.tls)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening and end every connection."""
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        lease = None
        try:
            peer = str((writer.get_extra_info("peername") or ("?",))[0])
            async with asyncio.timeout(self.settings.idle_s):
                first = await wire.read_request(reader)
            reply, lease = self._open(first, peer)
            await self._send(writer, wire.frame(reply))
            while lease is not None:
                async with asyncio.timeout(self.cache.settings.max_lease_s):
                    request = await wire.read_request(reader)
                if isinstance(request, wire.Close):
                    valid = self.cache.memory.close(lease)
                    lease = None
                    await self._send(writer, wire.frame(wire.Closed(valid)))
                else:
                    await self._answer(writer, request, lease)
        except (OSError, asyncio.IncompleteReadError):  # time-outs are OSErrors
            self.counters["reader_gone"] += 1
        except SnapshotError as error:
            self.counters["bad_request"] += 1
            logger.warning("KV transfer: %s", error)
        except asyncio.CancelledError:
            pass  # the server is closing
        finally:
            self._tasks.discard(task)
            if lease is not None:
                # Its socket is ours: nothing more can be read, so the lease ends at once.
                self.cache.memory.close(lease)
                writer.transport.abort()
            writer.close()

    async def _send(self, writer: asyncio.StreamWriter, *parts: bytes | memoryview) -> None:
        for part in parts:
            writer.write(part)
        async with asyncio.timeout(self.settings.idle_s):
            await writer.drain()

    def _open(self, request: wire.Request, peer: str) -> tuple[wire.Reply, int | None]:
        if not isinstance(request, wire.Open) or request.protocol != wire.PROTOCOL:
            return wire.Refused("bad"), None
        if request.fingerprint != self.cache.expected:
            return wire.Refused("incompatible"), None
        owned = self._owned.get(request.key)
        if owned is None:
            return wire.Refused("miss"), None
        if owned[:2] != (request.epoch, request.sequence):
            return wire.Refused("stale"), None
        entry = self.cache.memory.pin(owned[2])
        if entry is None:
            del self._owned[request.key]
            return wire.Refused("miss"), None
        try:
            lease = self.cache.memory.lease(entry.id, peer)
            if lease is None:
                return wire.Refused("busy"), None
            self.counters["opened"] += 1
            head = encode_manifest(self.cache.manifest(entry))
            return wire.Opened(head, self.cache.settings.lease_s), lease.id
        finally:
            self.cache.memory.unpin(entry)

    async def _answer(
        self, writer: asyncio.StreamWriter, request: wire.Request, lease: int
    ) -> None:
        memory = self.cache.memory
        if isinstance(request, wire.Renew):
            until = memory.renew(lease)
            reply: wire.Reply = (
                wire.Refused("gone")
                if until is None
                else wire.Renewed(max(0.0, until - memory.clock()))
            )
            await self._send(writer, wire.frame(reply))
            return
        entry = memory.leased(lease)
        chunks = entry.all_chunks() if entry is not None else []
        if not isinstance(request, wire.Read) or not 0 <= request.index < len(chunks):
            await self._send(writer, wire.frame(wire.Refused("gone" if entry is None else "bad")))
            return
        chunk = chunks[request.index]
        data = memory.slab.view(chunk.slot, chunk.length).data
        self.counters["bytes"] += chunk.length
        await self._send(writer, wire.frame(wire.Data(request.index, chunk.length)))
        # In pieces: what the socket does not take at once is copied and moved in the writer.
        for at in range(0, chunk.length, PIECE_BYTES):
            await self._send(writer, memoryview(data)[at : at + PIECE_BYTES])


@dataclass(frozen=True, slots=True)
class Fetched:
    """How a fetch ended; `entry` is the local entry of a hit."""

    outcome: Outcome
    entry: int | None = None
    tokens: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Peer:
    """Where a server's exporter listens."""

    host: str
    port: int


class _Refused(Exception):
    def __init__(self, outcome: Outcome) -> None:
        self.outcome: Outcome = outcome


class Fetcher:
    """The reader's side: brings a conversation's cache into this server's store."""

    def __init__(
        self,
        cache: KvCache,
        *,
        tls: ssl.SSLContext | None = None,
        settings: TransferSettings | None = None,
        worth_it: Callable[[int, int], bool] = lambda num_bytes, num_tokens: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`worth_it(bytes, tokens)`: fetching so much beats computing so many tokens."""
        self.cache, self.tls, self.clock, self.worth_it = cache, tls, clock, worth_it
        self.settings = settings or TransferSettings()
        self.counters: Counter[str] = Counter()
        self._backoff: dict[Peer, float] = {}

    async def fetch(
        self, peer: Peer, key: str, record: Record, token_ids: Sequence[int]
    ) -> Fetched:
        """Bring what the peer holds of `token_ids` into the local store.

        Never raises for what a peer or a network can do; every outcome but hit means: compute.
        """
        check_address(peer.host, self.tls)
        began = self.clock()
        if began < self._backoff.get(peer, 0.0):
            return self._done(Fetched("backoff"))
        outcome: Outcome
        try:
            async with asyncio.timeout(self.settings.deadline_s):
                done = await self._fetch(peer, key, record, token_ids)
            return self._done(dataclasses.replace(done, seconds=self.clock() - began))
        except _Refused as error:
            return self._done(Fetched(error.outcome))
        except StoreFull:
            return self._done(Fetched("full"))
        except TimeoutError:
            outcome = "timeout"
        except (OSError, asyncio.IncompleteReadError):
            outcome = "disconnect"
        except SnapshotError as error:
            outcome = "corrupt"
            logger.warning("KV fetch: %s", error)
        self._backoff[peer] = self.clock() + self.settings.backoff_s
        return self._done(Fetched(outcome))

    def _done(self, fetched: Fetched) -> Fetched:
        self.counters[fetched.outcome] += 1
        self.counters["bytes"] += fetched.num_bytes
        return fetched

    async def _fetch(
        self, peer: Peer, key: str, record: Record, token_ids: Sequence[int]
    ) -> Fetched:
        async with asyncio.timeout(self.settings.connect_s):
            reader, writer = await asyncio.open_connection(
                peer.host, peer.port, ssl=self.tls, limit=BUFFER_BYTES
            )
        try:
            talk = _Talk(reader, writer, self.settings)
            opened = await talk.ask(
                wire.Open(wire.PROTOCOL, self.cache.expected, key, record.epoch, record.sequence)
            )
            if isinstance(opened, wire.Refused):
                known = ("miss", "stale", "incompatible", "busy")
                raise _Refused(opened.reason if opened.reason in known else "miss")  # type: ignore[arg-type]
            if not isinstance(opened, wire.Opened):
                raise SnapshotError("the peer answered something else than was asked")
            manifest = decode_manifest(
                opened.manifest, layout=self.cache.layout, expected=self.cache.expected
            )
            wanted, indices = shorten(manifest, token_ids)
            if wanted is None:
                raise _Refused("miss")
            if not self.worth_it(wanted.data_bytes, wanted.num_tokens):
                raise _Refused("too_slow")
            return await self._take(talk, manifest, wanted, indices)
        finally:
            writer.close()

    async def _take(
        self, talk: _Talk, manifest: Manifest, wanted: Manifest, indices: list[int]
    ) -> Fetched:
        memory = self.cache.memory
        refs = manifest.all_chunks()
        if max(refs[i].length for i in indices) > memory.slab.slot_bytes:
            raise SnapshotError("the peer's chunks are larger than a slot here")
        slots = memory.reserve(len(indices))
        try:
            for index in indices[:WINDOW]:
                talk.send(wire.Read(index))
            for at, index in enumerate(indices):
                data = memory.slab.view(slots[at], refs[index].length)
                await talk.chunk(index, data.data)
                if at + WINDOW < len(indices):
                    talk.send(wire.Read(indices[at + WINDOW]))
                # The next chunks arrive in the sockets' buffers meanwhile.
                if await asyncio.to_thread(digest, data) != refs[index].digest:
                    raise SnapshotError(f"chunk {index} came damaged")
                talk.renew_if_due()
            closed = await talk.ask(wire.Close())
            if not isinstance(closed, wire.Closed) or not closed.valid:
                raise SnapshotError("the peer's lease did not hold while it was read")
            entry = self.cache.adopt(wanted, slots)
            slots = []
            return Fetched("hit", entry, wanted.num_tokens, wanted.data_bytes)
        finally:
            if slots:
                memory.unreserve(slots)


class _Talk:
    """One connection, each wait bounded by the idle time."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        settings: TransferSettings,
    ) -> None:
        self.reader, self.writer, self.settings = reader, writer, settings
        self._renewed = time.monotonic()

    def send(self, message: wire.Request) -> None:
        self.writer.write(wire.frame(message))

    async def reply(self) -> wire.Reply:
        while True:
            async with asyncio.timeout(self.settings.idle_s):
                reply = await wire.read_reply(self.reader)
            # Renewals are sent between reads; their replies come in between.
            if not isinstance(reply, wire.Renewed):
                return reply

    async def ask(self, message: wire.Request) -> wire.Reply:
        self.send(message)
        return await self.reply()

    async def chunk(self, index: int, into: memoryview) -> None:
        """Fill `into` with a chunk's bytes, which are not checked yet."""
        reply = await self.reply()
        if isinstance(reply, wire.Refused):
            raise SnapshotError(f"the peer stopped: {reply.reason[:20]}")
        if reply != wire.Data(index, len(into)):
            raise SnapshotError("the peer sent another chunk than was asked for")
        at = 0
        while at < len(into):
            async with asyncio.timeout(self.settings.idle_s):
                part = await self.reader.read(min(len(into) - at, PIECE_BYTES))
            if not part:
                raise asyncio.IncompleteReadError(b"", len(into) - at)
            into[at : at + len(part)] = part
            at += len(part)

    def renew_if_due(self) -> None:
        if time.monotonic() - self._renewed > self.settings.renew_s:
            self._renewed = time.monotonic()
            self.send(wire.Renew())


def shorten(manifest: Manifest, token_ids: Sequence[int]) -> tuple[Manifest | None, list[int]]:
    """The part of a snapshot that a request can use, as a manifest of its own, and the places of
    its chunks in the whole one. Whole chunks only; None where nothing is shared."""
    shared = common_prefix(token_bytes(manifest.token_ids), token_bytes(token_ids))
    if not shared:
        return None, []
    size = manifest.chunk_blocks * manifest.layout.block_tokens
    count = min(len(manifest.chunks), -(-shared // size))
    tokens = min(manifest.num_tokens, count * size)
    indices, at = list(range(count)), len(manifest.chunks)
    kept = []
    for checkpoint in manifest.checkpoints:
        if checkpoint.info.position <= shared:
            kept.append(checkpoint)
            indices.extend(range(at, at + len(checkpoint.chunks)))
        at += len(checkpoint.chunks)
    return (
        msgspec.structs.replace(
            manifest,
            tokens=manifest.tokens[: 4 * tokens],
            chunks=manifest.chunks[:count],
            checkpoints=tuple(kept),
        ),
        indices,
    )
