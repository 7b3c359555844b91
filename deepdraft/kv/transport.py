"""How the bytes of one fetch come: the interface, and the way over the connections of `wire`.

Owns: which chunk is asked for next, the check of every byte beside its arrival, the deadline.
Knows nothing of: manifests, stores, what happens to memory afterwards.

Another way is `sidecar.NixlTransport`. One that lets the peer, or hardware, write by itself must
say which memory may still be written to after it failed (`unsettled`).
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
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
"""Asked for ahead on a connection: the next chunk, and small ones up to this. When fewer chunks are
left than there are connections, the next one only when so little of the last is to come: no
connection holds one that another could bring sooner."""
PART_BYTES = 512 << 10
"""Without a thread beside it every such part is checked while it is near (two cores: parts of 0.5
MiB 1.04 of no check at all, of 1 MiB 0.85, of 4 MiB 0.75, where the sender waits). With one, chunks
are handed over whole, for a hand-over takes 0.15 ms of processor time and readers wait for one
another in it; of a connection's last one the end apart, so that little is left to check."""


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
    """A reader's `Feed`, and the check of what it brings: in a thread beside it (`check`), so that
    both grow with the number of connections, or in its own."""

    def __init__(self, take: Callable[[], Piece | None], *, beside: bool) -> None:
        self.take = take
        self.verified = 0
        self.verify_s = 0.0
        """Spent on digests."""
        self._arrived: queue.SimpleQueue[tuple[Piece, int, int] | None] = queue.SimpleQueue()
        self._beside = beside

    def arrived(self, piece: Piece, at: int, length: int) -> None:
        """See `Feed`. Raises what `check` would, where it does not run."""
        if self._beside:
            self._arrived.put((piece, at, length))
        else:
            self._verify(piece, at, length)

    def end(self) -> None:
        """Nothing more arrives."""
        self._arrived.put(None)

    def check(self) -> None:
        """Until the end. Raises SnapshotError for a chunk that is not what was promised."""
        while (arrived := self._arrived.get()) is not None:
            self._verify(*arrived)

    def _verify(self, piece: Piece, at: int, length: int) -> None:
        began = time.perf_counter()
        piece.hash.update(piece.into[at : at + length])
        self.verify_s += time.perf_counter() - began
        if at + length == len(piece.into):
            if piece.hash.digest() != piece.ref.digest:
                raise SnapshotError(f"chunk {piece.index} came damaged")
            self.verified += 1


class Reading:
    """All chunks of a fetch by one transport, each verified while the next ones arrive."""

    def __init__(
        self, transport: Transport, work: list[Piece], crew: Executor, settings: TransferSettings
    ) -> None:
        """`crew`: runs at once what it is given. Its threads outlive a fetch: to start eight took
        1.7 ms, a fifth of the time in which four connections bring 100,000 tokens."""
        self.transport, self.crew, self.settings = transport, crew, settings
        self.num_pieces = len(work)
        self._work = deque(work)
        self._lines: list[Line] = []
        self._lock = threading.Lock()
        self._error: Exception | None = None

    @property
    def verify_s(self) -> float:
        """Seconds spent on digests, beside the arrival."""
        return sum(line.verify_s for line in self._lines)

    def run(self, arrived: Callable[[], None] = lambda: None) -> None:
        """Returns when all bytes are there and right, else raises what went wrong first.
        `arrived`: done after the last byte has come, while it is checked."""
        end = time.monotonic() + self.settings.deadline_s
        beside = self.settings.check_beside
        readers = []
        for read in self.transport.readers(self.num_pieces):
            self._lines.append(line := Line(self._take, beside=beside))
            readers.append(self._start(lambda read=read, line=line: read(line)))  # type: ignore[misc]
        checkers = [self._start(line.check) for line in self._lines if beside]
        for reader in readers:
            try:
                reader.result(max(0.0, end - time.monotonic()))
            except TimeoutError:
                self._fail(TimeoutError("the fetch took longer than its deadline"))
        for reader, line in zip(readers, self._lines, strict=True):
            reader.result()  # an aborted transport lets nobody wait
            line.end()
        if self._error is None:
            self._guard(arrived)
        for checker in checkers:
            checker.result()
        self.transport.close()
        if self._error is not None:
            raise self._error
        left = self.num_pieces - sum(line.verified for line in self._lines)
        if left:
            raise SnapshotError(f"{left} chunks were not read and verified")

    def _take(self) -> Piece | None:
        with self._lock:
            return self._work.popleft() if self._work else None

    def _start(self, target: Callable[[], None]) -> Future[None]:
        return self.crew.submit(self._guard, target)

    def _guard(self, target: Callable[[], None]) -> None:
        try:
            target()
        except Exception as error:
            self._fail(error)

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
        self._untaken = self._num_readers = 0

    def readers(self, num_pieces: int) -> Sequence[Callable[[Feed], None]]:
        """One for each connection."""
        most = max(1, num_pieces // CHUNKS_PER_LINK)
        self._untaken, self._num_readers = num_pieces, min(self.settings.connections, most)
        return [self._read_first, *[self._read_more] * (self._num_readers - 1)]

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
            while len(asked) < AHEAD_CHUNKS:
                early = not asked and self._untaken >= self._num_readers
                if not (early or ahead <= AHEAD_BYTES) or (piece := feed.take()) is None:
                    return
                link.send(wire.Read(piece.index))
                asked.append(piece)
                ahead += len(piece.into)
                with self._lock:
                    self._untaken -= 1

        ask()
        while asked:
            piece = asked.popleft()
            ask()
            while isinstance(reply := link.reply(), wire.Renewed):
                pass
            if isinstance(reply, wire.Refused):
                raise SnapshotError(f"the peer stopped: {reply.reason[:20]}")
            if reply != wire.Data(piece.index, len(piece.into)):
                raise SnapshotError("the peer sent another chunk than was asked for")
            size = len(piece.into)
            cuts = list(range(0, size, PART_BYTES))
            if self.settings.check_beside:
                cuts = [0] if asked or size <= AHEAD_BYTES else [0, size - AHEAD_BYTES]
            for at, end in itertools.pairwise([*cuts, size]):
                part = piece.into[at:end]
                link.fill(part)
                ahead -= len(part)
                ask()
                feed.arrived(piece, at, len(part))
            if renew and time.monotonic() - self._renewed > self.settings.renew_s:
                self._renewed = time.monotonic()
                link.send(wire.Renew())
