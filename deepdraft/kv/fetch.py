"""The reader's side of a transfer: brings a conversation of a peer into this server's store.

Owns: what is asked for, the check of every byte before it counts, deadlines and back-off.
Knows nothing of: the directory, sessions, whether a fetch pays (it asks).

Over TCP only this process writes to the destination, so a failed fetch frees it at once. What a
sidecar may still write to is quarantined until it cannot.
"""

from __future__ import annotations

import dataclasses
import hmac
import logging
import math
import secrets
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from deepdraft.kv import wire
from deepdraft.kv.adopt import Ahead, adopt, known_chunks, names_of
from deepdraft.kv.cache import KvCache
from deepdraft.kv.directory import Record
from deepdraft.kv.errors import SnapshotError, StoreFull
from deepdraft.kv.prefix import Path, shared_tokens, token_array
from deepdraft.kv.settings import TransferSettings
from deepdraft.kv.sidecar import NixlTransport, Sidecar
from deepdraft.kv.snapshot import Manifest, decode_manifest
from deepdraft.kv.store import Chunk
from deepdraft.kv.transfer import authenticate, check_address
from deepdraft.kv.transport import CHUNKS_PER_LINK, Piece, Reading, TcpTransport, Transport
from deepdraft.telemetry import Counters, log_event

logger = logging.getLogger(__name__)
MOST_THREADS = 256
"""A fetch has two a connection; they are made as needed, kept, and end with the fetcher."""
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


@dataclass(frozen=True, slots=True)
class _Work:
    """What is fetched of a peer's conversation, and what is known of it ahead."""

    wanted: Manifest
    indices: Sequence[int]
    """Of its chunks, in the peer's order."""
    names: Sequence[bytes]
    path: Path | None


class _Further:
    """Further connections for one fetch: made while the owner answers, joined while its manifest is
    checked. (Made after it, they came 2 ms later, while the first one read a fifth of all.)"""

    def __init__(
        self, connect: Callable[[], wire.Link], crew: ThreadPoolExecutor, count: int
    ) -> None:
        self._connect = connect
        self._token: Future[bytes] = Future()
        self._links = [crew.submit(self._join) for _ in range(count)]

    def admit(self, token: bytes) -> None:
        """The owner answered: connections may join its lease."""
        self._token.set_result(token)

    def take(self) -> wire.Link:
        """A connection that joined, made now where there is none. Raises OSError or SnapshotError
        for one that did not come about."""
        try:
            ahead = self._links.pop()
        except IndexError:
            return self._join()
        return ahead.result()

    def close(self) -> None:
        """Closes those that nobody took, when they are there."""
        self._token.cancel()
        while self._links:
            self._links.pop().add_done_callback(_close_unused)

    def _join(self) -> wire.Link:
        link = self._connect()
        try:
            link.send(wire.Join(wire.PROTOCOL, self._token.result()))
            if not isinstance(link.reply(), wire.Joined):
                raise SnapshotError("the peer's lease ended before it was read")
        except BaseException:
            link.close()
            raise
        return link


def _close_unused(joined: Future[wire.Link]) -> None:
    if joined.exception() is None:
        joined.result().close()


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
        sidecar: Sidecar | None = None,
        wrap: Callable[[Transport], Transport] = lambda transport: transport,
    ) -> None:
        """`worth_it(wanted, token_ids)`: fetching these chunks beats computing their tokens.
        `sidecar`: reads by RDMA from peers that have one too. `wrap` is for tests that let a
        transport fail."""
        self.cache, self.tls, self.fleet_key = cache, tls, fleet_key
        self.clock, self.worth_it = clock, worth_it
        self.sidecar, self.wrap = sidecar, wrap
        self.settings = settings or TransferSettings()
        self.counters = Counters()
        self._backoff: dict[Peer, float] = {}
        self._lock = threading.Lock()
        self._links = weakref.WeakSet[wire.Link]()
        self._closed = False
        self._crew = ThreadPoolExecutor(MOST_THREADS, "deepdraft-kv-fetch")

    def fetch(
        self,
        peer: Peer,
        key: str,
        record: Record,
        token_ids: Sequence[int] | np.ndarray | None,
        trace: str = "",
    ) -> Fetched:
        """Bring what the peer holds of `token_ids` into the local store; None: all, where there is
        free memory for it, whether it pays or not. Blocks. `trace`: of `wire.Open`.

        Never raises for what a peer or a network can do; every outcome but hit means: compute.
        """
        check_address(peer.host, self.tls)
        began = self.clock()
        if token_ids is not None and began < self._backoff.get(peer, 0.0):
            fetched = Fetched("backoff")
        else:
            fetched = self._try(peer, key, record, token_ids, trace)
            fetched = dataclasses.replace(fetched, seconds=self.clock() - began)
        self.counters.add(fetched.outcome)
        self.counters.add("bytes", fetched.num_bytes)
        if fetched.outcome == "hit":
            self.counters.add("microseconds", round(fetched.seconds * 1e6))
        ms = round(1e3 * fetched.seconds, 3)
        about = {"outcome": fetched.outcome, "bytes": fetched.num_bytes, "ms": ms}
        log_event("kv_fetch", {"trace": trace, "peer": peer.name or peer.host, **about})
        return fetched

    def _try(
        self,
        peer: Peer,
        key: str,
        record: Record,
        token_ids: Sequence[int] | np.ndarray | None,
        trace: str,
    ) -> Fetched:
        outcome: Outcome
        try:
            return self._fetch(peer, key, record, token_ids, trace)
        except _Refused as error:
            return Fetched(error.outcome)
        except StoreFull:
            return Fetched("full")
        except TimeoutError:
            outcome = "timeout"
        except OSError:
            outcome = "disconnect"
        except SnapshotError as error:
            outcome = "corrupt"
            logger.warning("KV fetch: %s", error)
        self._backoff[peer] = self.clock() + self.settings.backoff_s
        return Fetched(outcome)

    def close(self) -> None:
        """Ends every connection: fetches under way end as `disconnect`, as do later ones."""
        with self._lock:
            self._closed, links = True, list(self._links)
        for link in links:
            link.abort()

    def backing_off(self, peer: Peer) -> bool:
        """The peer failed lately and is not asked now."""
        return self.clock() < self._backoff.get(peer, 0.0)

    def _note(self, phase: str, seconds: float) -> None:
        self.counters.add(f"{phase}_microseconds", round(1e6 * seconds))

    @property
    def num_backing_off(self) -> int:
        """Peers that are not asked now."""
        now = self.clock()
        return sum(now < until for until in list(self._backoff.values()))

    def connect(self, peer: Peer, *, until: float = math.inf) -> wire.Link:
        """A connection to the peer, see `wire.Link.until`. Raises OSError; ConfigError for a
        foreign one without TLS."""
        check_address(peer.host, self.tls)
        try:
            link = wire.Link.connect(
                peer.host,
                peer.port,
                self.tls,
                peer.name,
                idle_s=self.settings.idle_s,
                by=self.settings.connect_s,
            )
        except OSError:
            raise
        except ValueError as error:  # a name that is none, of whoever wrote it into the directory
            raise OSError(f"no host and name of a peer: {error}") from None
        link.until = until
        with self._lock:
            self._links.add(link)
            closed = self._closed
        if closed:
            link.close()
            raise OSError("this server leaves its fleet")
        return link

    def _fetch(
        self,
        peer: Peer,
        key: str,
        record: Record,
        token_ids: Sequence[int] | np.ndarray | None,
        trace: str,
    ) -> Fetched:
        nonce = secrets.token_bytes(wire.NONCE_BYTES)
        began, until = time.perf_counter(), time.monotonic() + self.settings.deadline_s
        # In another thread, while this one waits for the network.
        tokens = None if token_ids is None else token_array(token_ids)
        ahead = None if tokens is None else self._crew.submit(Ahead, self.cache, tokens)
        link, further = self.connect(peer, until=until), None
        try:
            link.send(
                wire.Open(
                    wire.PROTOCOL,
                    self.cache.expected,
                    key,
                    record.epoch,
                    record.sequence,
                    nonce,
                    trace,
                )
            )
            further = self._further(peer, tokens, until)
            opened = link.reply()
            self._note("open", time.perf_counter() - began)
            if isinstance(opened, wire.Refused):
                known = ("miss", "stale", "incompatible", "busy")
                raise _Refused(opened.reason if opened.reason in known else "miss")  # type: ignore[arg-type]
            if not isinstance(opened, wire.Opened):
                raise SnapshotError("the peer answered something else than was asked")
            mac = authenticate(self.fleet_key, nonce, opened.manifest)
            if not hmac.compare_digest(mac, opened.mac):
                raise SnapshotError("the manifest was not made by a member of this fleet")
            further.admit(opened.token)
            manifest = decode_manifest(
                opened.manifest, layout=self.cache.layout, expected=self.cache.expected
            )
            if manifest.chunk_blocks != self.cache.settings.chunk_blocks:
                raise _Refused("incompatible")
            wanted, indices, names, path = manifest, range(len(manifest.all_chunks())), [], None
            if tokens is not None and ahead is not None:
                shorter, indices, shared = shorten(manifest, tokens)
                if shorter is None:
                    raise _Refused("miss")
                wanted = shorter
                if not self.worth_it(wanted, tokens):
                    raise _Refused("too_slow")
                names = ahead.result().names_of(wanted)
                path = ahead.result().path_of(wanted, shared)
            transport = self.wrap(self._transport(link, further, manifest))
            work = _Work(wanted, indices, names_of(self.cache, wanted, names), path)
            return self._take(link, transport, work, only_free=tokens is None)
        finally:
            link.close()
            if further is not None:
                further.close()

    def _further(self, peer: Peer, tokens: np.ndarray | None, until: float) -> _Further:
        """Connections that will be of use if the peer has all of these tokens."""
        count = 0
        if tokens is not None and self.sidecar is None:
            size = self.cache.settings.chunk_blocks * self.cache.layout.block_tokens
            count = min(self.settings.connections, len(tokens) // size // CHUNKS_PER_LINK) - 1
        return _Further(lambda: self.connect(peer, until=until), self._crew, max(0, count))

    def _transport(self, link: wire.Link, further: _Further, manifest: Manifest) -> Transport:
        """By sidecars where both have one now, else over connections like this one."""
        if self.sidecar is not None and self.sidecar.export is not None:
            link.send(wire.Locate())
            located = link.reply()
            if isinstance(located, wire.Located):
                if len(located.addresses) != len(manifest.all_chunks()):
                    raise SnapshotError("the peer named other addresses than its chunks have")
                return NixlTransport(self.settings, link, self.sidecar, located)
            if not isinstance(located, wire.Refused):
                raise SnapshotError("the peer answered something else than was asked")
        return TcpTransport(self.settings, link, further.take)

    def _take(
        self, link: wire.Link, transport: Transport, work: _Work, *, only_free: bool
    ) -> Fetched:
        memory, wanted = self.cache.memory, work.wanted
        refs = wanted.all_chunks()
        if max(ref.length for ref in refs) > memory.slab.slot_bytes:
            raise SnapshotError("the peer's chunks are larger than a slot here")
        # Chunks of earlier turns are here already, under the same name and digest.
        parts: list[int | Chunk] = list(known_chunks(self.cache, wanted, work.names))
        known = [part for part in parts if isinstance(part, Chunk)]
        slots: list[int] = []
        try:
            slots = memory.reserve(len(parts) - len(known), only_free=only_free)
            free = iter(slots)
            parts = [part if isinstance(part, Chunk) else next(free) for part in parts]
            pieces = [
                Piece(index, ref, part, memory.room(part, ref.length).data)
                for index, ref, part in zip(work.indices, refs, parts, strict=True)
                if not isinstance(part, Chunk)
            ]
            reading = Reading(transport, pieces, self._crew, self.settings)
            began, closed = time.perf_counter(), []
            try:
                reading.run(lambda: closed.append(_ask(link, wire.Close())))
            finally:
                self._note("read", time.perf_counter() - began)
                self._note("verify", reading.verify_s)
            if closed != [wire.Closed(valid=True)]:
                raise SnapshotError("the peer's lease did not hold while it was read")
            entry = adopt(self.cache, wanted, parts, work.names, work.path)
            slots, known = [], []
            read = sum(len(piece.into) for piece in pieces)
            return Fetched("hit", entry, wanted.num_tokens, read)
        finally:
            memory.unreserve(self._hold_back(transport, slots))
            memory.let_go(known)

    def _hold_back(self, transport: Transport, slots: list[int]) -> list[int]:
        """What may be freed after a failure; where a transfer may still write is quarantined."""
        memory = self.cache.memory
        free = set(slots)
        for pending in transport.unsettled() if free else ():
            slot = pending.slot
            free.discard(slot)
            memory.quarantine([slot])
            pending.when_settled(lambda slot=slot: memory.release_quarantine([slot]))  # type: ignore[misc]
        if memory.quarantine_full and self.sidecar is not None:
            logger.warning("too much KV memory is quarantined: the sidecar is started anew")
            self.sidecar.restart()
        return sorted(free)


def _ask(link: wire.Link, message: wire.Request) -> wire.Reply:
    link.send(message)
    while isinstance(reply := link.reply(), wire.Renewed):
        pass  # of an earlier renewal
    return reply


def shorten(
    manifest: Manifest, token_ids: Sequence[int] | np.ndarray
) -> tuple[Manifest | None, list[int], int]:
    """The part of a snapshot that a request can use, as a manifest of its own, the places of its
    chunks in the whole one, and how many tokens are shared. Whole chunks only; None where nothing
    is shared."""
    shared = shared_tokens(manifest.token_ids, token_array(token_ids))
    if not shared:
        return None, [], 0
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
        shared,
    )
