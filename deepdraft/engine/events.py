"""The events of requests as their readers take them: in a thread, or in an event loop.

Owns: the queues between the engine's thread and a reader.
Knows nothing of: what a request is made of, the engine's loop.
"""

import asyncio
import queue
from collections.abc import AsyncIterator, Iterator, Sequence
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


class AsyncEvents(AsyncIterator[TokenEvent]):
    """The events of several requests, mixed; ends after the last event of the last request.

    To be made and read on one event loop. `close` cancels what still runs; it must be called by
    whoever stops reading early, as an abandoned request would run to its end.
    """

    def __init__(self, engine: Canceller, request_ids: Sequence[str]) -> None:
        self._engine = engine
        self._open = set(request_ids)
        self._queue: asyncio.Queue[TokenEvent] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def put(self, event: TokenEvent) -> None:
        """Takes an event on the engine thread."""
        # A loop that closed meanwhile has nobody left to tell.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put_nowait, event)

    async def __anext__(self) -> TokenEvent:
        if not self._open:
            raise StopAsyncIteration
        event = await self._queue.get()
        if event.finish_reason is not None:
            self._open.discard(event.request_id)
        return event

    def cancel(self, request_id: str) -> None:
        """Cancels one of the requests; its last event still comes."""
        self._engine.cancel(request_id)

    def close(self) -> None:
        """Cancels every request that is not finished."""
        if self._open:
            self._engine.cancel(*self._open)
