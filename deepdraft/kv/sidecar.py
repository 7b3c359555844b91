"""RDMA by NIXL, from a process beside the server that may crash, stall or be ended at any time.

Owns: that process and its restarts, reads under way in it, and when memory that they might still
write to is safe again.
Knows nothing of: conversations, digests, what is read.

NIXL has no time-out and no cancel: a read whose owner stalls stays under way, and writes once the
owner goes on, whatever was released before. So a read is settled when the sidecar says that it has
ended, or when the sidecar is gone; every start of it is a new incarnation with a name of its own.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import itertools
import json
import logging
import os
import queue
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepdraft.errors import ConfigError
from deepdraft.kv import wire
from deepdraft.kv.settings import TransferSettings
from deepdraft.kv.slab import Slab
from deepdraft.kv.transport import Feed, Pending, Piece
from deepdraft.telemetry import Counters

logger = logging.getLogger(__name__)
PROGRAM = Path(__file__).with_name("nixl_process.py")
READS_AHEAD = 8
"""Chunks of one fetch under way at a time."""
MAX_BACKOFF_S = 60.0
_MAX_LINE = 1 << 20


def inherited() -> dict[str, str]:
    """Variables that a sidecar gets: what its libraries read, and none of our secrets."""
    names, prefixes = ("PATH", "LD_LIBRARY_PATH", "HOME", "TMPDIR"), ("UCX_", "NIXL_", "CUDA_")
    return {k: v for k, v in os.environ.items() if k in names or k.startswith(prefixes)}


@dataclass(frozen=True, slots=True)
class Export:
    """One incarnation: its name, what peers' agents need to reach it, where the slab begins."""

    name: str
    agent: bytes
    base: int


class Ticket:
    """One read (`transport.Pending`)."""

    def __init__(self, slot: int, ended: Callable[[Ticket, str | None], None]) -> None:
        self._slot, self._ended = slot, ended
        self._lock = threading.Lock()
        self._settled, self._over = False, False
        self._calls: list[Callable[[], None]] = []

    @property
    def slot(self) -> int:
        """Where it writes to."""
        return self._slot

    @property
    def settled(self) -> bool:
        """Nothing can write any more."""
        return self._settled

    def when_settled(self, call: Callable[[], None]) -> None:
        """See `Pending`."""
        with self._lock:
            if not self._settled:
                self._calls.append(call)
                return
        call()

    def end(self, why: str | None, *, settled: bool) -> None:
        """The first end is told to the reader; `why` None: all bytes are there."""
        with self._lock:
            first, self._over = not self._over, True
            calls: list[Callable[[], None]] = []
            if settled and not self._settled:
                self._settled = True
                calls, self._calls = self._calls, []
        for call in calls:
            call()
        if first:
            self._ended(self, why)


class Sidecar:
    """The process, from `start` to `close`. May be used by several threads."""

    def __init__(
        self,
        slab: Slab,
        python: str | Path,
        *,
        name: str,
        settings: TransferSettings | None = None,
        program: Path = PROGRAM,
        environ: dict[str, str] | None = None,
    ) -> None:
        """`python`: of an environment with NIXL; `environ`: its variables, by default those of
        `inherited`. Raises ConfigError where this cannot work."""
        if slab.file is None:
            raise ConfigError("a KV sidecar needs memory that processes can share (memfd, Linux)")
        if not os.access(python, os.X_OK):
            raise ConfigError(
                f"the KV sidecar's interpreter {python} is not there; `deepdraft env create nixl` "
                f"makes one"
            )
        self.slab, self.settings = slab, settings or TransferSettings()
        self.counters = Counters()
        self._command = [str(python), "-I", str(program)]
        self._environ = inherited() if environ is None else environ
        self._name = f"{name}-{uuid.uuid4().hex[:12]}"
        self._incarnations, self._numbers = itertools.count(1), itertools.count(1)
        self._tickets: dict[int, Ticket] = {}
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._export: Export | None = None
        self._sock: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._live, name="deepdraft-kv-sidecar", daemon=True)

    def start(self) -> None:
        """Begins; returns at once."""
        self._thread.start()

    def close(self) -> None:
        """Ends the process; nothing writes to the slab afterwards."""
        self._closing.set()
        self.restart()
        if self._thread.is_alive():
            self._thread.join()

    def restart(self) -> None:
        """Ends the process, which settles every read; a new incarnation follows."""
        with self._lock:
            self._export = None  # from here on nothing is begun
            if self._process is not None:
                self._process.kill()

    @property
    def export(self) -> Export | None:
        """The present incarnation; None while there is none."""
        return self._export

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        process = self._process
        return None if process is None else process.pid

    def wait_ready(self, timeout_s: float) -> Export:
        """For tests and benches. Raises TimeoutError."""
        end = time.monotonic() + timeout_s
        with self._changed:
            while self._export is None:
                if not self._changed.wait(max(0.0, end - time.monotonic())):
                    raise TimeoutError(f"the KV sidecar was not ready within {timeout_s:g} s")
            return self._export

    def read(
        self,
        peer: wire.Located,
        address: int,
        slot: int,
        length: int,
        ended: Callable[[Ticket, str | None], None],
    ) -> Ticket:
        """Bring bytes at an address of a peer's slab into a slot. `ended` is called once, from
        any thread. Raises Disconnected where there is no process."""
        ticket, number = Ticket(slot, ended), next(self._numbers)
        message = {
            "do": "read",
            "id": number,
            "name": peer.name,
            "agent": base64.b64encode(peer.agent).decode(),
            "at": slot * self.slab.slot_bytes,
            "address": address,
            "length": length,
        }
        with self._lock:
            if self._export is None or self._sock is None:
                raise wire.Disconnected("the KV sidecar is not there")
            self._tickets[number] = ticket
            try:
                self._send(self._sock, message)
            except OSError:
                # It may have got the message: its end, which is near, settles the read.
                assert self._process is not None
                self._process.kill()
        self.counters.add("reads")
        return ticket

    # ---- the thread that lives with the process ---------------------------------------------

    def _live(self) -> None:
        failures = 0
        while not self._closing.is_set():
            was_ready = False
            try:
                was_ready = self._once()
            except OSError as error:
                logger.warning("the KV sidecar does not start: %s", error)
            failures = 0 if was_ready else failures + 1
            if not self._closing.is_set():
                self.counters.add("restarts")
                pause = self.settings.sidecar_backoff_s * 2 ** min(failures, 10)
                self._closing.wait(min(MAX_BACKOFF_S, pause))

    def _once(self) -> bool:
        """One incarnation, to its end. Whether it was ever ready."""
        name = f"{self._name}/{next(self._incarnations)}"
        ours, theirs = socket.socketpair()
        words = collections.deque[str](maxlen=8)
        with theirs:
            assert self.slab.file is not None
            size = self.slab.num_slots * self.slab.slot_bytes
            process = subprocess.Popen(
                [*self._command, str(theirs.fileno()), str(self.slab.file), str(size), name],
                pass_fds=(theirs.fileno(), self.slab.file),
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
        with self._lock:
            self._process = process
        if self._closing.is_set():
            process.kill()
        listener = threading.Thread(target=_drain, args=(process, words), daemon=True)
        listener.start()
        starts = self.counters.get("starts")
        try:
            self._serve(ours, name)
        finally:
            process.kill()
            process.wait()
            # The kernel has taken its memory and its connections away: nothing writes any more.
            with self._lock:
                self._export, self._sock, self._process = None, None, None
                tickets, self._tickets = self._tickets, {}
            ours.close()
            for ticket in tickets.values():
                ticket.end("the KV sidecar ended", settled=True)
            listener.join(1.0)
            if not self._closing.is_set():
                said = " / ".join(words)[-500:]
                logger.warning("the KV sidecar ended (%s): %s", process.returncode, said)
        return self.counters.get("starts") > starts

    def _serve(self, sock: socket.socket, name: str) -> None:
        """Its messages, until it ends, or does not answer."""
        sock.settimeout(self.settings.sidecar_start_s)
        buffer, asked, ready = b"", False, False
        while True:
            try:
                data = sock.recv(1 << 16)
            except TimeoutError:
                if asked or not ready:
                    self.counters.add("stalled")
                    return
                asked = True
                with self._lock, contextlib.suppress(OSError):
                    self._send(sock, {"do": "ping"})
                continue
            except OSError:
                return
            *lines, buffer = (buffer + data).split(b"\n")
            if not data or len(buffer) > _MAX_LINE:
                return
            asked = False
            for line in lines:
                ready = True  # that is the first thing it says
                self._hear(sock, name, json.loads(line))

    def _hear(self, sock: socket.socket, name: str, message: dict[str, Any]) -> None:
        if message["is"] == "ready":
            sock.settimeout(self.settings.sidecar_answer_s)
            agent = base64.b64decode(message["agent"])
            with self._changed:
                self._export, self._sock = Export(name, agent, message["base"]), sock
                self._changed.notify_all()
            self.counters.add("starts")
        elif message["is"] in ("done", "failed"):
            settled = message["is"] == "done" or message["settled"]
            with self._lock:
                find = self._tickets.pop if settled else self._tickets.get
                ticket = find(message["id"], None)
            if ticket is not None:
                ticket.end(message.get("why"), settled=settled)

    @staticmethod
    def _send(sock: socket.socket, message: dict[str, Any]) -> None:
        sock.sendall(json.dumps(message).encode() + b"\n")


def _drain(process: subprocess.Popen[bytes], words: collections.deque[str]) -> None:
    assert process.stderr is not None
    with process.stderr as stream:
        for line in stream:
            words.append(line.decode(errors="replace").strip()[:500])


class NixlTransport:
    """The chunks of one fetch by one-sided reads of the owner's slab. The connection that asked
    only keeps the lease."""

    def __init__(
        self,
        settings: TransferSettings,
        link: wire.Link,
        sidecar: Sidecar,
        located: wire.Located,
    ) -> None:
        self.settings, self.link, self.sidecar, self.located = settings, link, sidecar, located
        self._ended: queue.SimpleQueue[tuple[Ticket, str | None] | None] = queue.SimpleQueue()
        self._tickets: list[Ticket] = []

    def readers(self, num_pieces: int) -> Sequence[Callable[[Feed], None]]:
        """One: the sidecar works on several chunks at a time."""
        return [self._read]

    def abort(self) -> None:
        """Lets the reader go; reads stay under way."""
        self.link.abort()
        self._ended.put(None)

    def close(self) -> None:
        """Nothing to do."""

    def unsettled(self) -> Sequence[Pending]:
        """Reads that have not ended."""
        return [ticket for ticket in self._tickets if not ticket.settled]

    def _read(self, feed: Feed) -> None:
        flying: dict[Ticket, Piece] = {}
        renewed = time.monotonic()
        while True:
            while len(flying) < READS_AHEAD and (piece := feed.take()) is not None:
                ticket = self.sidecar.read(
                    self.located,
                    self.located.addresses[piece.index],
                    piece.slot,
                    len(piece.into),
                    lambda ticket, why: self._ended.put((ticket, why)),
                )
                self._tickets.append(ticket)
                flying[ticket] = piece
            if not flying:
                return
            try:
                ended = self._ended.get(timeout=self.settings.idle_s)
            except queue.Empty:
                raise TimeoutError("no chunk came through the sidecar in time") from None
            if ended is None:
                raise wire.Disconnected("the fetch was given up")
            ticket, why = ended
            piece = flying.pop(ticket)
            if why is not None:
                raise wire.Disconnected(f"a read through the sidecar failed: {why}")
            feed.arrived(piece, 0, len(piece.into))
            if time.monotonic() - renewed > self.settings.renew_s:
                renewed = time.monotonic()
                self.link.send(wire.Renew())
