"""How the bytes of one fetch come: the interface, and the way over the connections of `wire`.

Owns: which chunk is asked for next, the check of every byte beside its arrival, the deadline.
Knows nothing of: manifests, stores, what happens to memory afterwards.

Another way is `sidecar.NixlTransport`. One that lets the peer, or hardware, write by itself must
say which memory may still be written to after it failed (`unsettled`).
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from blake3 import blake3

from deepdraft.kv import wire
from deepdraft.kv.errors import SnapshotError
from deepdraft.kv.settings import TransferSettings
from deepdraft.kv.snapshot import ChunkRef

CHUNKS_PER_LINK = 4
"""A further connection pays from so many chunks on."""
AHEAD_BYTES, AHEAD_CHUNKS = 1 << 20, CHUNKS_PER_LINK
"""The next chunk is asked for on a connection when so little of the last one is to come: enough for
the way there and back, and no connection holds much that an idle one could bring. The end of a
chunk is handed to the check apart, so that little is left to check after the last byte."""


@dataclass(slots=True)
class Piece:
    """A chunk, its number in the peer's order, where it goes, and its digest so far."""

    index: int
    ref: ChunkRef
    slot: int
    into: memoryview
    hash: blake3 = field(default_factory=blake3)


class Pending(Protocol):
    """A transfer that has not ended."""

    @property
    def slot(self) -> int:
        """Where it may still write."""
        ...

    def when_settled(self, call: Callable[[], None]) -> None:
        """Called once nothing can write there any more; at once where that is so already."""
        ...


class Feed(Protocol):
    """What a reader of a transport takes its work from and gives it back to."""

    def take(self) -> Piece | None:
        """The next chunk to bring; None: there is none any more."""
        ...

    def arrived(self, piece: Piece, at: int, length: int) -> None:
        """These bytes of a chunk are there; in rising order."""
        ...


class Transport(Protocol):
    """One way to bring the chunks of one fetch."""

    def readers(self, num_pieces: int) -> Sequence[Callable[[Feed], None]]:
        """What runs side by side until the feed is empty; raises OSError or SnapshotError."""
        ...

    def abort(self) -> None:
        """Whoever waits for bytes gets an OSError."""
        ...

    def close(self) -> None:
        """The end, after all readers have returned."""
        ...

    def unsettled(self) -> Sequence[Pending]:
        """After a failure: transfers that may still write into this server's memory."""
        ...


class Line:
    """A reader's `Feed`, and the check of what it brings: each reader has a checker beside it, so
    that both grow with the number of connections."""

    def __init__(self, take: Callable[[], Piece | None]) -> None:
        self.take = take
        self.verified = 0
        self.verify_s = 0.0
        """Spent on digests."""
        self._arrived: queue.SimpleQueue[tuple[Piece, int, int] | None] = queue.SimpleQueue()

    def arrived(self, piece: Piece, at: int, length: int) -> None:
        """See `Feed`."""
        self._arrived.put((piece, at, length))

    def end(self) -> None:
        """Nothing more arrives."""
        self._arrived.put(None)

    def check(self) -> None:
        """Until the end. Raises SnapshotError for a chunk that is not what was promised."""
        while (arrived := self._arrived.get()) is not None:
            piece, at, length = arrived
            began = time.perf_counter()
            piece.hash.update(piece.into[at : at + length])
            self.verify_s += time.perf_counter() - began
            if at + length < len(piece.into):
                continue
            if piece.hash.digest() != piece.ref.digest:
                raise SnapshotError(f"chunk {piece.index} came damaged")
            self.verified += 1


class Reading:
    """All chunks of a fetch by one transport, each verified while the next ones arrive."""

    def __init__(self, transport: Transport, work: list[Piece], *, deadline_s: float) -> None:
        self.transport, self.deadline_s = transport, deadline_s
        self.num_pieces = len(work)
        self._work = deque(work)
        self._lines: list[Line] = []
        self._lock = threading.Lock()
        self._error: Exception | None = None

    @property
    def verify_s(self) -> float:
        """Seconds spent on digests, beside the arrival."""
        return sum(line.verify_s for line in self._lines)

    def run(
        self,
        meanwhile: Callable[[], None] = lambda: None,
        arrived: Callable[[], None] = lambda: None,
    ) -> None:
        """Returns when all bytes are there and right, else raises what went wrong first.
        `meanwhile`: short work of the caller's, done while bytes arrive; `arrived`: after the last
        one, while it is checked."""
        end = time.monotonic() + self.deadline_s
        readers = []
        for read in self.transport.readers(self.num_pieces):
            self._lines.append(line := Line(self._take))
            readers.append(self._thread(lambda read=read, line=line: read(line)))  # type: ignore[misc]
        checkers = [self._thread(line.check) for line in self._lines]
        try:
            meanwhile()
        except Exception as error:
            self._fail(error)
        for thread in readers:
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                self._fail(TimeoutError("the fetch took longer than its deadline"))
        for thread, line in zip(readers, self._lines, strict=True):
            thread.join()  # an aborted transport lets nobody wait
            line.end()
        try:
            if self._error is None:
                arrived()
        except Exception as error:
            self._fail(error)
        for thread in checkers:
            thread.join()
        self.transport.close()
        if self._error is not None:
            raise self._error
        left = self.num_pieces - sum(line.verified for line in self._lines)
        assert not left, f"{left} chunks were not read and verified"

    def _take(self) -> Piece | None:
        with self._lock:
            return self._work.popleft() if self._work else None

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
        with self._lock:
            self._error = self._error or error
            self._work.clear()
        self.transport.abort()


class TcpTransport:
    """Over the connection that asked, and further ones where there are many chunks. Only this
    process writes to the destination, so nothing is unsettled afterwards."""

    def __init__(
        self, settings: TransferSettings, first: wire.Link, join: Callable[[], wire.Link]
    ) -> None:
        """`join`: a further connection under the same lease."""
        self.settings, self.first, self.join = settings, first, join
        self._links = [first]
        self._lock = threading.Lock()
        self._aborted = False
        self._renewed = time.monotonic()

    def readers(self, num_pieces: int) -> Sequence[Callable[[Feed], None]]:
        """One for each connection."""
        more = min(self.settings.connections, num_pieces // CHUNKS_PER_LINK) - 1
        return [self._read_first, *[self._read_more] * max(0, more)]

    def abort(self) -> None:
        """Ends every connection."""
        with self._lock:
            self._aborted = True
            links = list(self._links)
        for link in links:
            link.abort()

    def close(self) -> None:
        """Gives the further connections back."""
        for link in self._links[1:]:
            link.close()

    def unsettled(self) -> Sequence[Pending]:
        """None."""
        return ()

    def _read_first(self, feed: Feed) -> None:
        self._read(feed, self.first, renew=True)

    def _read_more(self, feed: Feed) -> None:
        try:
            link = self.join()
        except (OSError, SnapshotError):
            return  # the first connection reads everything, or says what is wrong
        with self._lock:
            self._links.append(link)
            aborted = self._aborted
        if aborted:
            link.abort()
        else:
            self._read(feed, link, renew=False)

    def _read(self, feed: Feed, link: wire.Link, *, renew: bool) -> None:
        asked: deque[Piece] = deque()
        ahead = 0

        def ask() -> None:
            nonlocal ahead
            while ahead <= AHEAD_BYTES and len(asked) < AHEAD_CHUNKS:
                if (piece := feed.take()) is None:
                    return
                link.send(wire.Read(piece.index))
                asked.append(piece)
                ahead += len(piece.into)

        ask()
        while asked:
            piece = asked.popleft()
            while isinstance(reply := link.reply(), wire.Renewed):
                pass
            if isinstance(reply, wire.Refused):
                raise SnapshotError(f"the peer stopped: {reply.reason[:20]}")
            if reply != wire.Data(piece.index, len(piece.into)):
                raise SnapshotError("the peer sent another chunk than was asked for")
            cut = max(0, len(piece.into) - AHEAD_BYTES)
            for begin, end in ((0, cut), (cut, len(piece.into))):
                if begin == end:
                    continue
                link.fill(piece.into[begin:end])
                feed.arrived(piece, begin, end - begin)
                ahead -= end - begin
                ask()
            if renew and time.monotonic() - self._renewed > self.settings.renew_s:
                self._renewed = time.monotonic()
                link.send(wire.Renew())
