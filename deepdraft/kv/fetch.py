"""The reader's side of a transfer: brings a conversation of a peer into this server's store.

Owns: what is asked for, the check of every byte before it counts, deadlines and back-off.
Knows nothing of: the directory, sessions, whether a fetch pays (it asks).

Only this process writes to the destination, so a failed fetch frees it at once; transports where
the peer writes (RDMA) must quarantine it.
"""

from __future__ import annotations

import dataclasses
import hmac
import logging
import queue
import secrets
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import numpy as np
from blake3 import blake3

from deepdraft.kv import wire
from deepdraft.kv.adopt import adopt, known_chunks
from deepdraft.kv.cache import KvCache
from deepdraft.kv.directory import Record
from deepdraft.kv.errors import SnapshotError, StoreFull
from deepdraft.kv.prefix import common_prefix, token_array, token_bytes
from deepdraft.kv.snapshot import ChunkRef, Manifest, decode_manifest
from deepdraft.kv.store import Chunk
from deepdraft.kv.transfer import TransferSettings, authenticate, check_address
from deepdraft.telemetry import Counters

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
WINDOW = 2
"""Chunks asked for ahead on one connection."""
PART_BYTES = 1 << 20
"""Of a chunk that is handed to the checking thread, so that little is left to check at the end."""
CHUNKS_PER_LINK = 4
"""A further connection pays from so many chunks on."""


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
    """Where a server's exporter listens, and the name in its certificate."""

    host: str
    port: int
    name: str = ""


class _Refused(Exception):
    def __init__(self, outcome: Outcome) -> None:
        self.outcome: Outcome = outcome


class Fetcher:
    """May be used by several threads at once."""

    def __init__(
        self,
        cache: KvCache,
        *,
        tls: ssl.SSLContext | None = None,
        fleet_key: bytes | None = None,
        settings: TransferSettings | None = None,
        worth_it: Callable[[Manifest, np.ndarray], bool] = lambda wanted, tokens: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`worth_it(wanted, token_ids)`: fetching these chunks beats computing their tokens."""
        self.cache, self.tls, self.fleet_key = cache, tls, fleet_key
        self.clock, self.worth_it = clock, worth_it
        self.settings = settings or TransferSettings()
        self.counters = Counters()
        self._backoff: dict[Peer, float] = {}

    def fetch(self, peer: Peer, key: str, record: Record, token_ids: Sequence[int]) -> Fetched:
        """Bring what the peer holds of `token_ids` into the local store. Blocks.

        Never raises for what a peer or a network can do; every outcome but hit means: compute.
        """
        check_address(peer.host, self.tls)
        began = self.clock()
        if began < self._backoff.get(peer, 0.0):
            return self._done(Fetched("backoff"))
        outcome: Outcome
        try:
            done = self._fetch(peer, key, record, token_ids)
            return self._done(dataclasses.replace(done, seconds=self.clock() - began))
        except _Refused as error:
            return self._done(Fetched(error.outcome))
        except StoreFull:
            return self._done(Fetched("full"))
        except TimeoutError:
            outcome = "timeout"
        except OSError:
            outcome = "disconnect"
        except SnapshotError as error:
            outcome = "corrupt"
            logger.warning("KV fetch: %s", error)
        self._backoff[peer] = self.clock() + self.settings.backoff_s
        return self._done(Fetched(outcome))

    def backing_off(self, peer: Peer) -> bool:
        """The peer failed lately and is not asked now."""
        return self.clock() < self._backoff.get(peer, 0.0)

    def _done(self, fetched: Fetched) -> Fetched:
        self.counters.add(fetched.outcome)
        self.counters.add("bytes", fetched.num_bytes)
        self.counters.add("microseconds", round(fetched.seconds * 1e6))
        return fetched

    def _connect(self, peer: Peer) -> wire.Link:
        return wire.Link.connect(
            peer.host,
            peer.port,
            self.tls,
            peer.name,
            idle_s=self.settings.idle_s,
            by=self.settings.connect_s,
        )

    def _fetch(self, peer: Peer, key: str, record: Record, token_ids: Sequence[int]) -> Fetched:
        nonce = secrets.token_bytes(wire.NONCE_BYTES)
        link = self._connect(peer)
        try:
            link.send(
                wire.Open(
                    wire.PROTOCOL, self.cache.expected, key, record.epoch, record.sequence, nonce
                )
            )
            tokens = token_array(token_ids)  # while the owner makes the manifest
            opened = link.reply()
            if isinstance(opened, wire.Refused):
                known = ("miss", "stale", "incompatible", "busy")
                raise _Refused(opened.reason if opened.reason in known else "miss")  # type: ignore[arg-type]
            if not isinstance(opened, wire.Opened):
                raise SnapshotError("the peer answered something else than was asked")
            mac = authenticate(self.fleet_key, nonce, opened.manifest)
            if not hmac.compare_digest(mac, opened.mac):
                raise SnapshotError("the manifest was not made by a member of this fleet")
            manifest = decode_manifest(
                opened.manifest, layout=self.cache.layout, expected=self.cache.expected
            )
            if manifest.chunk_blocks != self.cache.settings.chunk_blocks:
                raise _Refused("incompatible")
            wanted, indices = shorten(manifest, tokens)
            if wanted is None:
                raise _Refused("miss")
            if not self.worth_it(wanted, tokens):
                raise _Refused("too_slow")
            return self._take(peer, link, opened.token, wanted, indices)
        finally:
            link.close()

    def _take(
        self, peer: Peer, link: wire.Link, token: bytes, wanted: Manifest, indices: list[int]
    ) -> Fetched:
        memory = self.cache.memory
        refs = wanted.all_chunks()
        if max(ref.length for ref in refs) > memory.slab.slot_bytes:
            raise SnapshotError("the peer's chunks are larger than a slot here")
        # Chunks of earlier turns are here already, under the same name and digest.
        parts: list[int | Chunk] = list(known_chunks(self.cache, wanted))
        known = [part for part in parts if isinstance(part, Chunk)]
        slots: list[int] = []
        try:
            slots = memory.reserve(len(parts) - len(known))
            free = iter(slots)
            parts = [part if isinstance(part, Chunk) else next(free) for part in parts]
            work = [
                _Piece(index, ref, memory.slab.view(part, ref.length).data)
                for index, ref, part in zip(indices, refs, parts, strict=True)
                if not isinstance(part, Chunk)
            ]
            _Reading(self.settings, link, lambda: self._join(peer, token), work).run()
            closed = _ask(link, wire.Close())
            if not isinstance(closed, wire.Closed) or not closed.valid:
                raise SnapshotError("the peer's lease did not hold while it was read")
            entry = adopt(self.cache, wanted, parts)
            slots, known = [], []
            read = sum(len(piece.into) for piece in work)
            return Fetched("hit", entry, wanted.num_tokens, read)
        finally:
            memory.unreserve(slots)
            memory.let_go(known)

    def _join(self, peer: Peer, token: bytes) -> wire.Link:
        link = self._connect(peer)
        try:
            link.send(wire.Join(wire.PROTOCOL, token))
            if not isinstance(link.reply(), wire.Joined):
                raise SnapshotError("the peer's lease ended before it was read")
        except BaseException:
            link.close()
            raise
        return link


def _ask(link: wire.Link, message: wire.Request) -> wire.Reply:
    link.send(message)
    while isinstance(reply := link.reply(), wire.Renewed):
        pass  # of an earlier renewal
    return reply


@dataclass(slots=True)
class _Piece:
    """A chunk, its number in the peer's order, where it goes, and its digest so far."""

    index: int
    ref: ChunkRef
    into: memoryview
    hash: blake3 = field(default_factory=blake3)


class _Reading:
    """All chunks of a fetch over one or more connections, each verified in a thread beside."""

    def __init__(
        self,
        settings: TransferSettings,
        first: wire.Link,
        join: Callable[[], wire.Link],
        work: list[_Piece],
    ) -> None:
        self.settings, self.first, self.join = settings, first, join
        self.work = deque(work)
        self.unverified = len(work)
        more = min(settings.connections, len(work) // CHUNKS_PER_LINK) - 1
        self.num_more = max(0, more)
        self.arrived: queue.SimpleQueue[tuple[_Piece, int] | None] = queue.SimpleQueue()
        self.links = [first]
        self.lock = threading.Lock()
        self.error: Exception | None = None
        self.renewed = time.monotonic()

    def run(self) -> None:
        """Returns when all bytes are there and right, else raises what went wrong first."""
        end = time.monotonic() + self.settings.deadline_s
        readers = [self._thread(self._read_first)]
        readers += [self._thread(self._read_more) for _ in range(self.num_more)]
        checker = self._thread(self._check)
        for thread in readers:
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                self._fail(TimeoutError("the fetch took longer than its deadline"))
        for thread in readers:
            thread.join()  # an aborted connection lets nobody wait
        self.arrived.put(None)
        checker.join()
        for link in self.links[1:]:
            link.close()
        if self.error is not None:
            raise self.error
        assert not self.unverified, f"{self.unverified} chunks were not read and verified"

    def _thread(self, target: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                target()
            except Exception as error:
                self._fail(error)

        thread = threading.Thread(target=run, name="deepdraft-kv-fetch", daemon=True)
        thread.start()
        return thread

    def _fail(self, error: Exception) -> None:
        """The first error counts; the others are what ending every connection looks like."""
        with self.lock:
            self.error = self.error or error
            self.work.clear()
            links = list(self.links)
        for link in links:
            link.abort()

    def _read_first(self) -> None:
        self._read(self.first, renew=True)

    def _read_more(self) -> None:
        try:
            link = self.join()
        except (OSError, SnapshotError):
            return  # the first connection reads everything, or says what is wrong
        with self.lock:
            self.links.append(link)
            failed = self.error is not None
        if failed:
            link.abort()
        else:
            self._read(link, renew=False)

    def _read(self, link: wire.Link, *, renew: bool) -> None:
        asked: deque[_Piece] = deque()
        while True:
            while len(asked) < WINDOW and (piece := self._next()) is not None:
                link.send(wire.Read(piece.index))
                asked.append(piece)
            if not asked:
                return
            piece = asked.popleft()
            while isinstance(reply := link.reply(), wire.Renewed):
                pass
            if isinstance(reply, wire.Refused):
                raise SnapshotError(f"the peer stopped: {reply.reason[:20]}")
            if reply != wire.Data(piece.index, len(piece.into)):
                raise SnapshotError("the peer sent another chunk than was asked for")
            for at in range(0, len(piece.into), PART_BYTES):
                link.fill(piece.into[at : at + PART_BYTES])
                self.arrived.put((piece, at))
            if renew and time.monotonic() - self.renewed > self.settings.renew_s:
                self.renewed = time.monotonic()
                link.send(wire.Renew())

    def _next(self) -> _Piece | None:
        with self.lock:
            return self.work.popleft() if self.work else None

    def _check(self) -> None:
        while (arrived := self.arrived.get()) is not None:
            piece, at = arrived
            piece.hash.update(piece.into[at : at + PART_BYTES])
            if at + PART_BYTES < len(piece.into):
                continue
            if piece.hash.digest() != piece.ref.digest:
                raise SnapshotError(f"chunk {piece.index} came damaged")
            self.unverified -= 1


def shorten(
    manifest: Manifest, token_ids: Sequence[int] | np.ndarray
) -> tuple[Manifest | None, list[int]]:
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
