"""An engine of a fleet on the network: what fronts ask of it and what it tells them.

Owns: the listening port, the connections of fronts, the way of requests into the engine and of
events out of it, signs of life, the engine's hand when it leaves.
Knows nothing of: HTTP, Ray, how fronts choose. All calls come from one event loop; events come from
the engine's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import secrets
import ssl
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from deepdraft.errors import DeepdraftError, EngineError
from deepdraft.server import fleet_wire as wire
from deepdraft.server.service import Service
from deepdraft.server.session import PREPARED
from deepdraft.telemetry import logger
from deepdraft.types import GenerateRequest, TokenEvent

BEAT_S = 0.5
STATS_EVERY = 4
"""Beats of which one brings the statistics."""
GREETING_S = 10.0
FRONT_SILENT_S = 20.0
"""A front of which nothing was heard for so long is gone, its machine perhaps with it."""
_MOST_STRANGERS = 64
"""Connections that have not proved themselves. Of more the oldest goes: a front's proof comes at
once, so strangers who wait keep no front out."""
_MOST_UNREAD = 256 << 20
"""A front that leaves so many bytes unread is cut off."""
_PROGRESS = ("decode_steps", "prompt_tokens", "generated_tokens")
"""Counters of which one moves with each step of an engine that is at work."""
_FAILURES = 3
"""Requests that fail one after the other, with no step in between, are the machine's fault."""


class Watch:
    """Whether an engine goes on: it must make progress while it has requests."""

    def __init__(self, hang_s: float) -> None:
        self._hang_s = hang_s
        self._progress: tuple[int, ...] = ()
        self._since = self._looked = 0.0
        self._errors = 0

    def look(self, stats: dict[str, int], now: float) -> None:
        """`stats`: the engine's counters; `now`: seconds of a clock that never goes back.

        Raises EngineError where requests have waited for `hang_s` without a step, or where all
        fail. Time in which nobody looked does not count: this process was stopped then.
        """
        progress = tuple(stats.get(n, 0) for n in _PROGRESS)
        busy = stats.get("running", 0) + stats.get("waiting", 0)
        errors = stats.get("finished_error", 0)
        if now - self._looked > max(5.0, self._hang_s / 2):
            self._since = now
        self._looked = now
        if progress != self._progress:
            self._progress, self._since, self._errors = progress, now, errors
        elif errors - self._errors >= _FAILURES:
            raise EngineError(
                f"the last {errors - self._errors} requests failed and none made progress"
            )
        elif not busy:
            self._since = now
        elif now - self._since >= self._hang_s:
            raise EngineError(
                f"the engine has made no step for {now - self._since:.0f} s with {busy} requests"
            )


class Pace:
    """What a prompt's token and a request's step took of late, from the engine's counters."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self.prompt_us = self.row_us = 0.0

    def learn(self, stats: dict[str, int]) -> None:
        """Takes the counters as they are now."""

        def grown(*names: str) -> int:
            return sum(stats.get(n, 0) - self._last.get(n, 0) for n in names)

        tokens, steps = grown("prompt_tokens"), grown("spec_steps")
        if tokens > 0:
            self.prompt_us = _average(self.prompt_us, grown("prompt_us") / tokens)
        if steps > 0:
            us = grown("draft_us", "verify_us", "judge_us", "commit_us")
            self.row_us = _average(self.row_us, us / steps)
        self._last = stats


def _average(old: float, new: float) -> float:
    return new if not old else 0.7 * old + 0.3 * new


class Node:
    """One engine's side of all its fronts."""

    def __init__(
        self,
        service: Service,
        identity: wire.Identity,
        secret: bytes,
        *,
        hang_s: float = 60.0,
        resume: bool = False,
        tls: ssl.SSLContext | None = None,
        beat_s: float = BEAT_S,
        front_silent_s: float = FRONT_SILENT_S,
    ) -> None:
        """`service` has loaded. `resume`: fronts go on with streams elsewhere."""
        self.service, self.identity = service, identity
        self.failure: str | None = None
        """Why nothing may be sent here any more."""
        self._secret, self._tls, self._resume = secret, tls, resume
        self._beat_s, self._hang_s, self._front_silent_s = beat_s, hang_s, front_silent_s
        self._watch, self._pace = Watch(hang_s), Pace()
        self._lines: set[_Line] = set()
        self._strangers: dict[_Line, None] = {}
        self._server: asyncio.Server | None = None
        self._beats: asyncio.Task[None] | None = None
        self._reading: asyncio.Future[dict[str, int]] | None = None
        self._stats: dict[str, int] = {}
        self._asked = 0.0
        self.workers = ThreadPoolExecutor(PREPARED, "deepdraft-prepare")

    async def start(self, host: str) -> int:
        """Listens; returns the port."""
        limit_s = None if self._tls is None else GREETING_S
        self._server = await asyncio.start_server(
            self._serve, host, 0, ssl=self._tls, ssl_handshake_timeout=limit_s
        )
        self._beats = asyncio.create_task(self._beat())
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Ends all connections."""
        if self._beats is not None:
            self._beats.cancel()
        if self._server is not None:
            self._server.close()
        for line in list(self._lines):
            line.writer.close()
        self.workers.shutdown(wait=False, cancel_futures=True)
        await asyncio.sleep(0)

    @property
    def num_requests(self) -> int:
        """Requests of all fronts that have not ended."""
        return sum(len(line.told) + len(line.preparing) for line in self._lines)

    def load(self) -> wire.Load:
        """How busy the engine is, as of the last look at it."""
        stats, engine = self._stats, self.service.config.engine
        running = stats.get("running", 0)
        return wire.Load(
            running=running,
            waiting=stats.get("waiting", 0),
            to_read=stats.get("to_read", 0),
            free=max(0, engine.max_running - running),
            prompt_us=self._pace.prompt_us,
            row_us=self._pace.row_us,
        )

    def check(self) -> None:
        """Raises EngineError where the engine has failed or hangs."""
        if self.failure is not None:
            raise EngineError(self.failure)

    # Leaving

    def begin_drain(self) -> None:
        """No new requests; fronts are told. Where streams are resumed, requests without a token
        are given back at once."""
        self.service.begin_drain()
        self._say(self._sign(False))
        if self._resume:
            for line in self._lines:
                line.give_back(line.fresh())

    def give_back(self) -> None:
        """Ends every request here; fronts go on with them elsewhere where they can."""
        for line in self._lines:
            line.give_back([*line.told, *line.preparing])

    async def wait_idle(self, most_s: float) -> bool:
        """Until no request is left; False where time ran out."""
        until = time.monotonic() + most_s
        while self.num_requests:
            if time.monotonic() >= until:
                return False
            await asyncio.sleep(0.05)
        return True

    # Signs of life

    async def _beat(self) -> None:
        last = time.monotonic()
        for count in itertools.count():
            begin = time.monotonic()
            await self._look()
            self._say(self._sign(count % STATS_EVERY == 0))
            # Of a pause of this process itself only a part counts.
            self._miss(min(begin - last, 4 * self._beat_s))
            last = begin
            await asyncio.sleep(max(0.0, self._beat_s - (time.monotonic() - begin)))

    def _miss(self, seconds: float) -> None:
        for line in list(self._lines):
            line.silent_s += seconds
            if line.silent_s > self._front_silent_s:
                logger.warning(
                    "front %s has said nothing for %.0f s; %d requests of it end",
                    *(line.front, line.silent_s, len(line.told) + len(line.preparing)),
                )
                line.writer.transport.abort()

    async def _look(self) -> None:
        """Reads the counters in a thread: a hung engine may hold their lock."""
        loop, now = asyncio.get_running_loop(), time.monotonic()
        if self._reading is None:
            self._asked = now
            self._reading = loop.run_in_executor(None, self.service.stats)
        done, _ = await asyncio.wait({self._reading}, timeout=self._beat_s)
        try:
            if done:
                stats, self._reading = self._reading.result(), None
                self._stats = stats
                self._pace.learn(stats)
                self._watch.look(stats, now)
            elif now - self._asked >= self._hang_s:
                raise EngineError(f"the engine's counters cannot be read for {self._hang_s:g} s")
            if self.service.engine_failure is not None:
                raise EngineError(self.service.engine_failure)
        except EngineError as error:
            if self.failure is None:
                logger.error("replica %s: %s", self.identity.label, error.message)
            self.failure = error.message
        except Exception:
            self._reading = None
            logger.exception("the engine's counters cannot be read")

    def _sign(self, whole: bool) -> wire.Beat:
        draining = self.service.state == "draining"
        state = "failed" if self.failure else "draining" if draining else "ready"
        if not whole:
            return wire.Beat(state, self.load())
        times = {
            name: wire.Times(h.bounds, *h.snapshot())
            for name, h in self.service.histograms().items()
        }
        return wire.Beat(state, self.load(), self._stats, times)

    def _say(self, beat: wire.Beat) -> None:
        data = wire.frame(beat)
        for line in self._lines:
            line.write(data)

    # Connections

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = _Line(self, reader, writer)
        try:
            if len(self._strangers) >= _MOST_STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                oldest.writer.transport.abort()
            self._strangers[line] = None
            try:
                async with asyncio.timeout(GREETING_S):
                    line.front = await self._greet(reader, writer)
            finally:
                self._strangers.pop(line, None)
            logger.info("front %s is connected", line.front)
            self._lines.add(line)
            line.write(wire.frame(self._sign(True)))
            await line.run()
        except (OSError, EOFError):  # TimeoutError is the one, IncompleteReadError the other
            pass
        except wire.WireError as error:
            logger.warning("a connection is cut: %s", error.message)
        finally:
            self._lines.discard(line)
            line.end()
            writer.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        """The front's name. Raises WireError where it does not know the secret."""
        nonce = secrets.token_bytes(wire.NONCE_BYTES)
        writer.write(wire.frame(wire.Greet(wire.PROTOCOL, nonce)))
        said = await wire.read_to_engine(reader, wire.MOST_BYTES_BEFORE)
        if not isinstance(said, wire.Prove):
            raise wire.WireError("a stranger does not greet")
        expected = wire.proof(self._secret, "front", said.nonce, nonce)
        if not hmac.compare_digest(said.proof, expected):
            raise wire.WireError("a stranger does not know the fleet's secret")
        answer = wire.proof(self._secret, "engine", nonce, said.nonce)
        writer.write(wire.frame(wire.Welcome(answer, self.identity)))
        return said.front


class _Line:
    """One front's connection, and its requests."""

    def __init__(
        self, node: Node, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.writer, self.front = writer, ""
        self.silent_s = 0.0
        """Since the front said something."""
        self.preparing: set[str] = set()
        """Requests that are not queued yet."""
        self.told: dict[str, int] = {}
        """Requests at hand: tokens of the answer so far, those it began with included."""
        self._began: dict[str, int] = {}
        """The tokens that they began with."""
        self._node, self._reader = node, reader
        self._loop = asyncio.get_running_loop()
        self._outbox: deque[TokenEvent] = deque()
        self._woken = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until the front goes."""
        while True:
            message = await wire.read_to_engine(self._reader)
            self.silent_s = 0.0
            if isinstance(message, wire.Submit):
                self.preparing |= {ask.id for ask in message.asks}
                task = asyncio.create_task(self._submit(message.asks))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            elif isinstance(message, wire.Cancel):
                self._cancel(message.ids)
            elif not isinstance(message, wire.Alive):
                raise wire.WireError("a front greets twice")

    def end(self) -> None:
        """The front is gone, and nobody waits for its requests."""
        self.preparing.clear()
        self._cancel(tuple(self.told))

    def _cancel(self, ids: tuple[str, ...]) -> None:
        self.preparing.difference_update(ids)
        known = [id for id in ids if self.told.pop(id, None) is not None]
        for id in known:
            del self._began[id]
        if known:
            self._engine_cancel(known)

    def _engine_cancel(self, ids: list[str]) -> None:
        engine: Any = self._node.service.engine
        if engine is not None:
            engine.cancel(*ids)

    def fresh(self) -> list[str]:
        """Requests of which no token was told."""
        return [*self.preparing, *(i for i, n in self.told.items() if n == self._began[i])]

    def give_back(self, ids: list[str]) -> None:
        """Ends requests in a way that sends the front elsewhere with them."""
        queued = [id for id in ids if id in self.told]
        if queued:
            self._engine_cancel(queued)  # their last event says abort

    async def _submit(self, asks: tuple[wire.Ask, ...]) -> None:
        ids = [ask.id for ask in asks]
        try:
            made = [await self._made(ask) for ask in asks]
            if not self.preparing.issuperset(ids):
                return  # cancelled meanwhile
            engine, _ = self._node.service.ready()
            for ask in asks:
                self.told[ask.id] = self._began[ask.id] = len(ask.generated_ids)
            engine.submit(made, [self._take] * len(made))
        except DeepdraftError as error:
            self._refuse(ids, error)
        except Exception as error:
            logger.exception("a request could not be queued")
            self._refuse(
                ids, EngineError(f"the request could not be queued: {type(error).__name__}")
            )
        else:
            # Before any event: those wait for this loop.
            self.write(wire.frame(wire.Accepted(tuple(ids))))
        finally:
            self.preparing.difference_update(ids)

    def _refuse(self, ids: list[str], error: DeepdraftError) -> None:
        for id in ids:
            self.told.pop(id, None)
            self._began.pop(id, None)
        if self.preparing.issuperset(ids):
            self.write(wire.frame(wire.refusal(ids, error)))

    async def _made(self, ask: wire.Ask) -> GenerateRequest:
        """The request, with its conversation brought here and its grammar compiled."""
        service, workers = self._node.service, self._node.workers
        _, view = service.ready()
        grammar = session = None
        if ask.grammar is not None:
            from deepdraft.engine.grammar import compiler_for

            ends = (view.vocab_size, view.eos_token_id, view.more_end_ids)
            compiler = compiler_for(view.tokenizer, *ends)
            grammar = await self._loop.run_in_executor(workers, compiler.compile, ask.grammar)
        fleet = service.fleet
        if ask.session is not None and fleet is not None:
            service.num_preparing += 1
            try:
                session = await self._loop.run_in_executor(
                    workers,
                    fleet.prepare,
                    ask.session.key,
                    (*ask.prompt_ids, *ask.generated_ids),
                    ask.session.trace,
                )
            finally:
                service.num_preparing -= 1
        return wire.request_of(ask, grammar, session)

    # Events

    def _take(self, event: TokenEvent) -> Callable[[], None]:
        """On the engine's thread."""
        self._outbox.append(event)
        return self._wake

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._flush)

    def _flush(self) -> None:
        # First, so that an event that comes meanwhile wakes the loop again.
        self._woken = False
        events: list[wire.Event] = []
        lost = self._node.service.engine_failure is not None
        while self._outbox:
            event = self._outbox.popleft()
            at = self.told.get(event.request_id)
            if at is None:
                continue  # cancelled
            if event.finish_reason is None:
                self.told[event.request_id] = at + len(event.token_ids)
            else:
                del self.told[event.request_id], self._began[event.request_id]
            events.append(wire.wire_event(event, at, lost and event.finish_reason == "error"))
        if events:
            self.write(wire.frame(wire.Events(tuple(events))))

    def write(self, data: bytes) -> None:
        """Sends a frame; a front that does not read is cut off."""
        transport = self.writer.transport
        if transport.is_closing():
            return
        self.writer.write(data)
        if transport.get_write_buffer_size() > _MOST_UNREAD:
            logger.warning("a front does not read what it is sent, and is cut off")
            transport.abort()
