"""Sends a job's answer: as server-sent events or as one JSON body.

Owns: framing, keep-alive comments, errors in mid-stream, and that a client that leaves ends its
requests.
Knows nothing of: wire formats, prompts, the engine's thread.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deepdraft.errors import DeepdraftError
from deepdraft.server.connections import DIRECT_SEND
from deepdraft.server.job import Job, Json
from deepdraft.server.wire_errors import STOPS, error_body
from deepdraft.telemetry import logger
from deepdraft.types import PromptProgress, TokenEvent

_KEEP_ALIVE = b": keep-alive\n\n"
_DONE = b"data: [DONE]\n\n"


class Wire:
    """How one API frames a stream. This one is OpenAI's, of chat and completions."""

    keep_alive = _KEEP_ALIVE
    done = _DONE

    def opening(self) -> list[Json]:
        """Chunks to send before the engine has said anything."""
        return []

    def frame(self, chunk: Json) -> bytes:
        """One chunk of a job as bytes."""
        return b"data: " + msgspec.json.encode(chunk) + b"\n\n"

    def progress(self, progress: PromptProgress) -> bytes:
        """How far the prompt is: a comment, which every client skips that does not look for it."""
        return (
            f": prompt {progress.done} of {progress.total} tokens, "
            f"{progress.tokens_per_second:.0f} a second, {progress.seconds_left:.0f} s left\n\n"
        ).encode()

    def error(self, error: BaseException) -> bytes:
        """An error after the stream has begun."""
        return self.frame(error_body(error))


class EventSource(Protocol):
    """Engine events of one job; `engine.AsyncEvents` is one."""

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        """The events, in the order of their arrival."""
        ...

    async def __anext__(self) -> TokenEvent:
        """The next event; may be cancelled without losing one."""
        ...

    async def batch(self, patience_s: float) -> list[TokenEvent]:
        """All events at hand; none after `patience_s` of silence."""
        ...

    def cancel(self, request_id: str) -> None:
        """Ends one request early."""
        ...

    def close(self) -> None:
        """Ends every request that still runs."""
        ...


async def collect(job: Job, events: EventSource) -> Json:
    """Reads a job's events to the end and returns its response. Raises what the job raises."""
    try:
        async for event in events:
            job.push(event)
            if job.ended_early(event):
                events.cancel(event.request_id)
            if job.finished:
                break
        return job.response()
    finally:
        events.close()


async def frames(
    job: Job, events: EventSource, keep_alive_s: float, wire: Wire | None = None
) -> AsyncGenerator[bytes]:
    """The frames of a job's stream, those of one moment together; a comment after every
    `keep_alive_s` of silence.

    Errors become a frame. The caller must close this iterator if it stops early.
    """
    wire = wire or Wire()
    try:
        for chunk in wire.opening():
            yield wire.frame(chunk)
        while not job.finished:
            events_now = await events.batch(keep_alive_s)
            if not events_now:
                yield wire.keep_alive
                continue
            ready: list[bytes] = []
            try:
                _read(job, events, events_now, wire, ready)
            finally:
                # What came before a fault is sent before the fault.
                if ready:
                    yield ready[0] if len(ready) == 1 else b"".join(ready)
        last = job.last_chunk()
        if last is not None:
            yield wire.frame(last)
    except DeepdraftError as error:
        yield wire.error(error)
    except STOPS:
        raise
    except BaseException as error:
        logger.exception("a stream failed")
        yield wire.error(error)
    finally:
        events.close()
    if wire.done:
        yield wire.done


def _read(
    job: Job, events: EventSource, now: list[TokenEvent], wire: Wire, ready: list[bytes]
) -> None:
    """Appends the frames of events to `ready`, up to a fault."""
    for event in now:
        if event.progress is not None:
            ready.append(wire.progress(event.progress))
        for chunk in job.push(event):
            ready.append(wire.frame(chunk))
        if job.ended_early(event):
            events.cancel(event.request_id)


class StreamResponse(Response):
    """Sends frames until they end or the client leaves, whichever is first."""

    def __init__(
        self,
        body: AsyncGenerator[bytes],
        on_end: Callable[[], None],
        headers: Mapping[str, str],
    ) -> None:
        """`on_end` is called exactly when sending has ended, even before the first frame."""
        self.status_code = 200
        self.body_iterator = body
        self.on_end = on_end
        self.background = None
        self.init_headers(
            {
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache",
                # Some reverse proxies collect a whole answer unless they are told not to.
                "x-accel-buffering": "no",
                **headers,
            }
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = asyncio.ensure_future(self._send(send, scope.get(DIRECT_SEND, send)))
        try:
            await until_disconnect(receive, sender)
        finally:
            # Also where this task itself is cancelled, by a server that is told to stop at once.
            sender.cancel()
            # An iterator that was never started would not run its own clean-up.
            self.on_end()
            await asyncio.gather(sender, return_exceptions=True)
            await self.body_iterator.aclose()

    async def _send(self, send: Send, direct: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        async for frame in self.body_iterator:
            await direct({"type": "http.response.body", "body": frame, "more_body": True})
        await direct({"type": "http.response.body", "body": b"", "more_body": False})


async def until_disconnect(receive: Receive, work: "asyncio.Future[Any]") -> bool:
    """Waits for `work` or for the client to leave; True when `work` is done, with its error raised.

    On False `work` has been cancelled.
    """

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    watcher = asyncio.ensure_future(watch())
    try:
        await asyncio.wait({work, watcher}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        watcher.cancel()
    if work.done():
        work.result()
        return True
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    return False
