"""The events of requests as their readers take them: in a thread, or in an event loop.

Owns: the queues between the engine's thread and a reader.
Knows nothing of: what a request is made of, the engine's loop.
"""

import asyncio
import queue
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Protocol

from deepdraft.types import TokenEvent


class Canceller(Protocol):
    """What ends requests; `engine.engine.Engine` is one."""

    def cancel(self, *request_ids: str) -> None:
        """Asks to end requests early."""
        ...


class Events(Iterator[TokenEvent]):
    """The events of one request; ends after the last one. `close` cancels what still runs."""

    def __init__(self, engine: Canceller, request_id: str) -> None:
        self._engine = engine
        self._request_id = request_id
        self._queue: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        self._done = False
        self.put = self._queue.put

    def __next__(self) -> TokenEvent:
        if self._done:
            raise StopIteration
        event = self._queue.get()
        self._done = event.finish_reason is not None
        return event

    def close(self) -> None:
        """Cancels the request if it is not finished; its "abort" event still comes."""
        self._engine.cancel(self._request_id)


class Mailbox:
    """Events on their way into one event loop: however many, they cost it one wake-up.

    Waking a loop from another thread is a system call, as dear as all else that becomes of a token;
    and a loop that wakes for the first of a step's events takes turns with the engine for the rest.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._items: deque[tuple[AsyncEvents, TokenEvent]] = deque()
        self._woken = False

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> "Mailbox":
        """The mailbox of a loop. To be called on it."""
        mailbox = _mailboxes.get(loop)
        if mailbox is None:
            mailbox = _mailboxes[loop] = cls(loop)
        return mailbox

    def put(self, reader: "AsyncEvents", event: TokenEvent) -> Callable[[], None]:
        """Takes an event on any thread; the caller calls `wake`, which is returned, soon."""
        self._items.append((reader, event))
        return self.wake

    def wake(self) -> None:
        """Has the loop hand out what is there."""
        if self._woken:
            return
        self._woken = True
        loop = self._loop()
        try:
            if loop is not None:
                loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            # A loop that closed meanwhile has nobody left to tell.
            self._items.clear()

    def _deliver(self) -> None:
        # First, so that an event that comes while others are handed out wakes the loop again.
        self._woken = False
        while self._items:
            reader, event = self._items.popleft()
            reader._take_in(event)


_mailboxes: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Mailbox]" = (
    weakref.WeakKeyDictionary()
)


class AsyncEvents(AsyncIterator[TokenEvent]):
    """The events of several requests, mixed; ends after the last event of the last request.

    To be made and read on one event loop, by one reader. `close` cancels what still runs; it must
    be called by whoever stops reading early, as an abandoned request would run to its end.
    """

    def __init__(self, engine: Canceller, request_ids: Sequence[str]) -> None:
        self._engine = engine
        self._open = set(request_ids)
        self._ready: deque[TokenEvent] = deque()
        self._loop = asyncio.get_running_loop()
        self._mailbox = Mailbox.of(self._loop)
        self._waiter: asyncio.Future[None] | None = None
        self._waits_since = 0.0
        self._alarm: asyncio.TimerHandle | None = None

    def put(self, event: TokenEvent) -> Callable[[], None]:
        """Takes an event on the engine thread; the caller then wakes the reader."""
        return self._mailbox.put(self, event)

    def _take_in(self, event: TokenEvent) -> None:
        self._ready.append(event)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def __anext__(self) -> TokenEvent:
        while not self._ready:
            if not self._open:
                raise StopAsyncIteration
            await self._wait()
        event = self._ready.popleft()
        if event.finish_reason is not None:
            self._open.discard(event.request_id)
        return event

    async def batch(self, patience_s: float) -> list[TokenEvent]:
        """All events at hand, at least one; none after about `patience_s` of silence. Not to be
        called after the last event of the last request."""
        assert self._ready or self._open, "all events were read"
        if not self._ready:
            if self._alarm is None:
                self._alarm = self._loop.call_later(patience_s, self._ring, patience_s)
            self._waits_since = self._loop.time()
            await self._wait()
        events = list(self._ready)
        self._ready.clear()
        for event in events:
            if event.finish_reason is not None:
                self._open.discard(event.request_id)
        return events

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _ring(self, patience_s: float) -> None:
        # One timer for all of a stream's waits: setting one for each token would cost more than
        # the token.
        self._alarm = None
        if self._waiter is None:
            return
        left_s = self._waits_since + patience_s - self._loop.time()
        if left_s > 0:
            self._alarm = self._loop.call_later(left_s, self._ring, patience_s)
        else:
            self._wake()

    def cancel(self, request_id: str) -> None:
        """Cancels one of the requests; its last event still comes."""
        self._engine.cancel(request_id)

    def close(self) -> None:
        """Cancels every request that is not finished."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self._open:
            self._engine.cancel(*self._open)
