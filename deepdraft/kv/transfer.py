"""The owner's side of a transfer: answers peers about the conversations of a cache, over TCP.

Owns: which conversations may be read, leases of connections.
Knows nothing of: the directory, sessions, what a reader does with what it gets.

Each connection has a thread; a chunk goes from memory to the socket without a copy in between.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Generator
from ipaddress import ip_address

from blake3 import blake3

from deepdraft.errors import ConfigError
from deepdraft.kv import wire
from deepdraft.kv.cache import KvCache
from deepdraft.kv.directory import Record
from deepdraft.kv.errors import SnapshotError
from deepdraft.kv.settings import TransferSettings
from deepdraft.kv.sidecar import Sidecar
from deepdraft.kv.snapshot import encode_manifest
from deepdraft.telemetry import Counters, log_event

logger = logging.getLogger(__name__)
CLOSE_S = 10.0
"""How long those that are in the middle of something are waited for at the end."""


def check_address(host: str, tls: ssl.SSLContext | None) -> None:
    """Without TLS only loopback is accepted: chunks are users' conversations."""
    with contextlib.suppress(ValueError):
        if ip_address(host).is_loopback:
            return
    if tls is None and host != "localhost":
        raise ConfigError(
            f"KV transfer without TLS is accepted on loopback only, got {host}; make certificates "
            f"(deepdraft kv init-fleet) and set them"
        )


def authenticate(fleet_key: bytes | None, nonce: bytes, manifest: bytes | memoryview) -> bytes:
    """What proves that a member of the fleet made this manifest for this request."""
    if fleet_key is None:
        return b""
    return blake3(nonce, key=fleet_key).update(manifest).digest()


class Exporter:
    """Serves the conversations that `own` named, until `close`."""

    def __init__(
        self,
        cache: KvCache,
        *,
        tls: ssl.SSLContext | None = None,
        fleet_key: bytes | None = None,
        settings: TransferSettings | None = None,
        still_mine: Callable[[str, str, int], bool | None] = lambda key, epoch, sequence: None,
        take: Callable[[wire.Offer], str] = lambda offer: "none",
        sidecar: Sidecar | None = None,
    ) -> None:
        """`still_mine(key, epoch, sequence)`: the directory says so; None: there is none now, and
        what is here is served. `take` brings what a peer that leaves offers, and says how that
        ended. `sidecar`: peers that have one too may read through it."""
        self.cache, self.tls, self.fleet_key = cache, tls, fleet_key
        self.still_mine, self.take, self.sidecar = still_mine, take, sidecar
        self.settings = settings or TransferSettings()
        self.counters = Counters()
        self._lock = threading.Lock()
        self._owned: dict[str, tuple[str, int, int]] = {}
        self._heads: dict[int, bytes] = {}
        """Manifests of entries that are owned: 4 bytes a token."""
        self._tokens: dict[bytes, int] = {}
        """Leases by the token under which further connections may join them."""
        self._links: set[wire.Link] = set()
        self._threads: set[threading.Thread] = set()
        self._listener: socket.socket | None = None
        self._closing = False

    def own(self, key: str, record: Record, entry: int) -> None:
        """The directory says this conversation is ours, and this entry holds it. Its manifest is
        made now, rather than while a peer waits for it."""
        alive = self.cache.memory.entries
        there = alive.get(entry)
        made = {} if there is None else {entry: encode_manifest(self.cache.manifest(there))}
        with self._lock:
            self._owned[key] = (record.epoch, record.sequence, entry)
            self._heads = {n: h for n, h in self._heads.items() if n in alive} | made
            if len(self._owned) > 2 * len(alive) + 16:
                self._owned = {k: v for k, v in self._owned.items() if v[2] in alive}

    def disown(self, key: str, *seen: str | int) -> None:
        """Someone else owns it now: our copy goes first. `seen`: only if we still hold it as of
        this epoch and sequence."""
        with self._lock:
            owned = self._owned.get(key)
            if owned is None or (seen and owned[:2] != seen):
                return
            del self._owned[key]
        self.cache.memory.supersede(owned[2])
        self.counters.add("disowned")

    def outdated(self, key: str, epoch: str, sequence: int) -> None:
        """Someone else claimed it, as this says; maybe before we did."""
        with self._lock:
            owned = self._owned.get(key)
        if owned is not None and (owned[0] != epoch or owned[1] < sequence):
            self.disown(key, *owned[:2])

    def owned(self) -> dict[str, tuple[str, int, int]]:
        """Epoch, sequence and entry of each conversation, by key."""
        with self._lock:
            return dict(self._owned)

    def start(self, host: str, port: int = 0) -> int:
        """Listen; returns the port."""
        check_address(host, self.tls)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family)
        except OSError as error:
            raise ConfigError(f"cannot listen for KV peers on {host}:{port}: {error}") from error
        self._spawn(self._accept, self._listener)
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Stop listening and end every connection."""
        self._closing = True
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        with self._lock:
            links, threads = list(self._links), list(self._threads)
        for link in links:
            link.abort()
        until = time.monotonic() + CLOSE_S
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _spawn(self, target: object, *args: object) -> None:
        def run() -> None:
            try:
                target(*args)  # type: ignore[operator]
            finally:
                with self._lock:
                    self._threads.discard(thread)

        thread = threading.Thread(target=run, name="deepdraft-kv-export", daemon=True)
        with self._lock:  # `close` joins what is in the set
            thread.start()
            self._threads.add(thread)

    def _accept(self, listener: socket.socket) -> None:
        while not self._closing:
            try:
                sock, address = listener.accept()
            except OSError:
                if self._closing:
                    return
                self.counters.add("accept_failed")
                continue
            with self._lock:
                links, most = len(self._links), self.settings.max_connections
                shaking_hands = len(self._threads) - 1 - links  # but for this thread
            if links >= most or shaking_hands >= most:
                self.counters.add("too_many")
                sock.close()
            else:
                self._spawn(self._serve, sock, str(address[0]))

    @contextlib.contextmanager
    def _link(self, sock: socket.socket) -> Generator[wire.Link]:
        link = None
        try:
            if self.tls is not None:
                sock.settimeout(self.settings.idle_s)
                sock = self.tls.wrap_socket(sock, server_side=True)
            link = wire.Link(sock, self.settings.idle_s)
            self._end_by(link, self.settings.idle_s)
            with self._lock:
                self._links.add(link)
            if self._closing:
                raise OSError("closing")
            yield link
        finally:
            with self._lock:
                self._links.discard(link)  # type: ignore[arg-type]
            sock.close()

    def _end_by(self, link: wire.Link, seconds: float) -> None:
        """A connection that is of no use any more ends, whatever it still sends."""
        link.until = time.monotonic() + seconds + self.settings.idle_s

    def _serve(self, sock: socket.socket, peer: str) -> None:
        lease, token = None, b""
        try:
            with self._link(sock) as link:
                try:
                    first = link.request()
                except wire.Disconnected:
                    return  # made ahead, and not needed
                if isinstance(first, wire.Join):
                    self._join(link, first)
                    return
                if isinstance(first, wire.Offer):
                    self._offered(link, first)
                    return
                reply, lease = self._open(first, peer)
                if isinstance(first, wire.Open):
                    self._log(first, peer, reply)
                if isinstance(reply, wire.Opened) and lease is not None:
                    token = reply.token
                    with self._lock:
                        self._tokens[token] = lease
                link.send(reply)
                if lease is not None and self._answer_all(link, lease):
                    lease = None
        except OSError:  # time-outs are OSErrors
            self.counters.add("reader_gone")
        except SnapshotError as error:
            self.counters.add("bad_request")
            logger.warning("KV transfer: %s", error)
        except Exception:
            self.counters.add("failed")
            logger.exception("KV transfer failed")
        finally:
            with self._lock:
                self._tokens.pop(token, None)
            if lease is not None:
                # Nothing more is sent: the reader cannot get an answer to `Close` any more.
                self.cache.memory.close(lease)

    def _open(self, request: wire.Request, peer: str) -> tuple[wire.Reply, int | None]:
        if not isinstance(request, wire.Open) or request.protocol != wire.PROTOCOL:
            return wire.Refused("bad"), None
        if len(request.nonce) != wire.NONCE_BYTES or not wire.TRACE.fullmatch(request.trace):
            return wire.Refused("bad"), None
        if request.fingerprint != self.cache.expected:
            return wire.Refused("incompatible"), None
        with self._lock:
            owned = self._owned.get(request.key)
        if owned is None:
            return wire.Refused("miss"), None
        if owned[:2] != (request.epoch, request.sequence):
            return wire.Refused("stale"), None
        if self.still_mine(request.key, *owned[:2]) is False:
            self.disown(request.key, *owned[:2])
            return wire.Refused("stale"), None
        entry = self.cache.memory.pin(owned[2])
        if entry is None:
            with self._lock:
                self._owned.pop(request.key, None)
            return wire.Refused("miss"), None
        try:
            lease = self.cache.memory.lease(entry.id, peer)
            if lease is None:
                return wire.Refused("busy"), None
            self.counters.add("opened")
            head = self._heads.get(entry.id) or encode_manifest(self.cache.manifest(entry))
            mac = authenticate(self.fleet_key, request.nonce, head)
            token = secrets.token_bytes(wire.NONCE_BYTES)
            return wire.Opened(memoryview(head), self.cache.settings.lease_s, token, mac), lease.id
        finally:
            self.cache.memory.unpin(entry)

    def _offered(self, link: wire.Link, request: wire.Request) -> None:
        """Offers, one after the other, until the peer that leaves is gone."""
        while isinstance(request, wire.Offer) and request.protocol == wire.PROTOCOL:
            outcome = self.take(request)
            self.counters.add(f"offer_{outcome}")
            link.send(wire.Taken(outcome))
            self._end_by(link, self.cache.settings.max_lease_s)
            link.limit(self.cache.settings.max_lease_s)
            try:
                request = link.request()
            except wire.Disconnected:
                return
            link.limit(self.settings.idle_s)
        link.send(wire.Refused("bad"))

    @staticmethod
    def _log(request: wire.Open, peer: str, reply: wire.Reply) -> None:
        result = reply.reason if isinstance(reply, wire.Refused) else "opened"
        if result != "bad":
            log_event("kv_read", {"trace": request.trace, "peer": peer, "result": result})

    def _join(self, link: wire.Link, request: wire.Join) -> None:
        with self._lock:
            lease = self._tokens.get(request.token)
        # Closed leases are asked for too: their token goes only after the answer to `Close`.
        live = lease is not None and self.cache.memory.leased(lease) is not None
        if lease is None or not live or request.protocol != wire.PROTOCOL:
            link.send(wire.Refused("gone"))
            return
        link.send(wire.Joined())
        self._answer_all(link, lease, joined=True)

    def _answer_all(self, link: wire.Link, lease: int, *, joined: bool = False) -> bool:
        """Answers until the reader is done. True: the lease has been closed."""
        memory = self.cache.memory
        self._end_by(link, self.cache.settings.max_lease_s)
        while True:
            link.limit(self.cache.settings.max_lease_s)
            request = link.request()
            link.limit(self.settings.idle_s)
            if isinstance(request, wire.Read):
                self._read(link, request.index, lease)
            elif joined:
                return False  # the first connection closes for all
            elif isinstance(request, wire.Close):
                link.send(wire.Closed(memory.close(lease)))
                return True
            elif isinstance(request, wire.Locate):
                link.send(self._locate(lease))
            elif isinstance(request, wire.Renew):
                until = memory.renew(lease)
                left = 0.0 if until is None else max(0.0, until - memory.clock())
                link.send(wire.Refused("gone") if until is None else wire.Renewed(left))
            else:
                link.send(wire.Refused("bad"))

    def _locate(self, lease: int) -> wire.Reply:
        export = None if self.sidecar is None else self.sidecar.export
        entry = self.cache.memory.leased(lease)
        if export is None or entry is None:
            return wire.Refused("gone" if entry is None else "none")
        self.counters.add("located")
        size = self.cache.memory.slab.slot_bytes
        places = tuple(export.base + chunk.slot * size for chunk in entry.all_chunks())
        return wire.Located(export.name, export.agent, places)

    def _read(self, link: wire.Link, index: int, lease: int) -> None:
        memory = self.cache.memory
        entry = memory.leased(lease)
        chunks = entry.all_chunks() if entry is not None else []
        if not 0 <= index < len(chunks):
            link.send(wire.Refused("gone" if entry is None else "bad"))
            return
        chunk, slab = chunks[index], memory.slab
        link.send(wire.Data(index, chunk.length), more=True)
        data = slab.view(chunk.slot, chunk.length).data
        link.send_bytes(data, slab.file, chunk.slot * slab.slot_bytes)
        self.counters.add("bytes", chunk.length)
