"""Runs requests: one thread that owns the runner, and the ways in for everybody else.

Owns: the step loop, admission, cancellation, draining, and what a failure costs whom.
Knows nothing of: HTTP, text, model internals, how drafts are made and judged. Only the engine
thread touches the runner.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from deepdraft.engine.block import FATAL, Block
from deepdraft.engine.endings import Endings
from deepdraft.engine.events import AsyncEvents, Events
from deepdraft.engine.fair import TenantLimits
from deepdraft.engine.pace import LEAST_ROWS, STEP_ROWS, Pace
from deepdraft.engine.protocol import JoiningRunner, ModelRunner, ParkingRunner
from deepdraft.engine.reading import Reading
from deepdraft.engine.request import EventSink, Request, Wake, check_request
from deepdraft.engine.sampler import Choice, Sampler
from deepdraft.engine.scheduler import Limits, PrefillChunk, Scheduler
from deepdraft.engine.speculate import Outcome, Speculation, Speculator
from deepdraft.errors import DeepdraftError, EngineError, Overloaded, RequestError
from deepdraft.telemetry import Counters, logger
from deepdraft.types import (
    FinishReason,
    GenerateRequest,
    StepTrace,
    TokenEvent,
    TokenLogprob,
)

if TYPE_CHECKING:  # the KV cache brings packages that a bare GPU host lacks
    from deepdraft.engine.reuse import Reuse

STEP_PARTS = ("draft", "verify", "judge", "commit")
"""Parts of a decode step whose time is counted."""


class Engine:
    """A model that takes requests from any thread.

    `start` begins serving. `submit` queues requests and reports on each one through its sink,
    `generate` and `stream` wrap that for plain and for asyncio code. `drain` and `close` end it.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        max_queue: int = 256,
        max_running: int = 4,
        prefill_chunk: int | None = None,
        max_stall_ms: float = 100.0,
        max_parked: int = 0,
        preempt_after_s: float = 1.0,
        tenants: Mapping[str, TenantLimits] | None = None,
        tenant_default: TenantLimits | None = None,
        speculation: Speculation | None = None,
        reuse: "Reuse | None" = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`prefill_chunk`: rows of a step, drafts aside; None: what the runner reads at once.
        `max_stall_ms`: what a part of a prompt may take while others wait for their next token.
        `max_parked`: preempted sequences at most. `reuse`: the KV cache; None: every prompt is
        computed."""
        self.runner, self.reuse = runner, reuse
        self.counters = Counters()
        self.endings = Endings()
        sampler = Sampler(runner.vocab_size, getattr(runner, "device", "cpu"))
        self.speculator = Speculator(runner, sampler, speculation or Speculation())
        self._ahead = runner.ahead() if hasattr(runner, "ahead") else None
        self._clock = clock
        # Of a prompt's part. What other programs take is not its own time: smaller parts cost more.
        computes_here = getattr(runner, "computes_here", False)
        self._busy = time.thread_time if computes_here else time.perf_counter
        self._pace = Pace(max_stall_ms, least_rows=getattr(runner, "least_rows", LEAST_ROWS))
        self._reading = Reading()
        room = getattr(runner, "num_sequences", max_running)
        self._scheduler = Scheduler(
            Limits(
                max_queue=max_queue,
                max_running=min(max_running, room),
                step_rows=prefill_chunk or getattr(runner, "prefill_rows", STEP_ROWS),
                max_parked=max_parked if hasattr(runner, "park") else 0,
                preempt_after_s=preempt_after_s,
            ),
            tenants=tenants,
            tenant_default=tenant_default,
            pace=self._pace,
        )
        # Guards the scheduler and the three flags; never held while the runner works.
        self._wake = threading.Condition()
        self._draining = False
        self._stopping = False
        self._broken: str | None = None
        self._wakes: set[Wake] = set()
        self._thread = threading.Thread(target=self._run, name="deepdraft-engine", daemon=True)

    # Calls from any thread

    def start(self) -> None:
        """Starts the engine thread. Requests submitted before are served then."""
        self._thread.start()

    def submit(self, requests: Sequence[GenerateRequest], sinks: Sequence[EventSink]) -> None:
        """Queues all requests or none; each sink gets that request's events on the engine thread.

        The last event of a request carries `finish_reason`. A sink must not block. Raises
        RequestError or PromptTooLong for a request that cannot run, Overloaded when the queue is
        full or the engine drains, EngineError when it has stopped.
        """
        for request in requests:
            check_request(request, self.runner.vocab_size, self.runner.max_tokens)
        records = [Request(r, sink) for r, sink in zip(requests, sinks, strict=True)]
        with self._wake:
            if self._broken is not None:
                raise EngineError(self._broken)
            if self._draining or self._stopping:
                raise Overloaded("the server is shutting down and takes no new requests")
            try:
                self._scheduler.add(records, self._clock())
            except DeepdraftError:
                self.counters.add("rejected", len(records))
                raise
            self._wake.notify()
        self.counters.add("requests", len(records))

    def cancel(self, *request_ids: str) -> None:
        """Asks to end requests early; unknown and finished ids are fine.

        A running request ends after the step in progress, with `finish_reason` "abort".
        """
        wanted = set(request_ids)
        with self._wake:
            for request in self._scheduler.everything():
                if request.request_id in wanted:
                    request.cancelled = True
            self._wake.notify()

    def generate(self, request: GenerateRequest) -> "Events":
        """Queues one request and returns its events, for plain code."""
        events = Events(self, request.request_id)
        self.submit([request], [events.put])
        return events

    def stream(self, requests: Sequence[GenerateRequest]) -> "AsyncEvents":
        """Queues requests and returns their events as they come, for asyncio code."""
        events = AsyncEvents(self, [r.request_id for r in requests])
        self.submit(requests, [events.put] * len(requests))
        return events

    def warm_up(self) -> None:
        """Runs a short prompt and one step through the whole path. Raises EngineError."""
        prompt = tuple(i % self.runner.vocab_size for i in range(3))
        request = GenerateRequest(
            request_id="warm-up", prompt_ids=prompt, max_new_tokens=2, reuse=False
        )
        for event in self.generate(request):
            if event.finish_reason == "error":
                raise EngineError(f"the warm-up step failed: {event.error}")

    def stats(self) -> dict[str, int]:
        """Counters, and how many requests wait, run and are preempted now."""
        with self._wake:
            one = self._scheduler
            now = {"waiting": one.num_waiting, "running": one.num_running, "parked": one.num_parked}
            now["to_read"] = one.num_to_read
        stored = {} if self.reuse is None else self.reuse.stats()
        return {**now, **self.counters.snapshot(), **stored}

    @property
    def failure(self) -> str | None:
        """Why the engine thread ended by itself, or None."""
        return self._broken

    def begin_drain(self) -> None:
        """Takes no new requests from now on; those at hand go on."""
        with self._wake:
            self._draining = True

    def cancel_all(self) -> None:
        """Asks to end every request at hand."""
        with self._wake:
            for request in self._scheduler.everything():
                request.cancelled = True
            self._wake.notify()

    def drain(self, grace_s: float) -> bool:
        """Takes no new requests, waits until all are finished, ends the rest after `grace_s`.

        True when nothing had to be ended early. Blocks the caller, not the engine.
        """
        self.begin_drain()
        with self._wake:
            clean = self._wake.wait_for(lambda: self._scheduler.idle, timeout=grace_s)
        if not clean:
            self.cancel_all()
        return clean

    def close(self, timeout_s: float = 10.0) -> None:
        """Ends every request and the thread. May be called twice."""
        with self._wake:
            self._draining = self._stopping = True
            for request in self._scheduler.everything():
                request.cancelled = True
            self._wake.notify_all()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        if self.reuse is not None and not self._thread.is_alive():
            reuse, self.reuse = self.reuse, None
            reuse.close()

    # The engine thread

    def _run(self) -> None:
        torch.get_num_threads()  # gives torch's number to this thread's OpenMP and MKL, too
        try:
            with torch.inference_mode():
                going = True
                while going:
                    going = self._step_once()
                    self._wake_readers()
        except BaseException as error:
            # A fault of the loop itself: nobody may be left waiting for an event.
            logger.exception("the engine thread failed")
            self._fail_everything(f"the engine has stopped: {type(error).__name__}")

    def _step_once(self) -> bool:
        """Waits for work and does one step of it: plan, run, commit. False when told to stop."""
        with self._wake:
            while self._scheduler.idle and not self._stopping:
                self._wake.notify_all()  # for `drain`
                self._wake.wait()
            cancelled = self._scheduler.cancelled()
            expired = self._scheduler.expired(self._clock())
        for request in cancelled:
            self._finish(request, "abort")
        for request in expired:
            if request.finished is None:
                self._finish(request, "timeout")
        with self._wake:
            if self._stopping and self._scheduler.idle:
                return False
        self._make_room()
        self._admit()
        with self._wake:
            plan = self._scheduler.plan()
        if plan is not None:
            for chunks in self._joined(plan.prefill):
                self._prefill(chunks)
                self._wake_readers()
            if plan.decode:
                self._decode(plan.decode)
        return True

    def _admit(self) -> None:
        with self._wake:
            admitted = self._scheduler.admit()
        for request in admitted:
            self._open(request)

    def _make_room(self) -> None:
        """Preempts running requests for those that have waited too long beside them."""
        while True:
            with self._wake:
                victim = self._scheduler.victim(self._clock())
            if victim is None:
                return
            try:
                victim.parked = cast(ParkingRunner, self.runner).park(victim.handle)
            except Exception:
                logger.exception("%s cannot be preempted and goes on", victim.request_id)
                victim.pinned = True
                continue
            victim.handle = None
            with self._wake:
                self._scheduler.park(victim)
            self.counters.add("preemptions")
            self._admit()

    def _open(self, request: Request) -> None:
        try:
            if request.parked is not None and self._resume(request):
                return
            request.handle = self.runner.open_sequence()
            if not request.opened:
                request.opened = self._clock()
                request.take_grammar()
                self.speculator.settle(request)
            if self.reuse is not None:
                self.reuse.begin(request)
        except FATAL:
            raise
        except BaseException as error:
            self._fail(request, "opening a sequence", error)

    def _resume(self, request: Request) -> bool:
        """Goes on with a preempted sequence; False where it is lost, and will be computed again."""
        parked, request.parked = request.parked, None
        try:
            request.handle = cast(ParkingRunner, self.runner).unpark(parked)
        except Exception:
            logger.exception("the sequence of %s is lost and computed again", request.request_id)
            self.counters.add("recomputed")
            request.begin_again()
            return False
        return True

    def _joined(self, chunks: Sequence[PrefillChunk]) -> list[list[PrefillChunk]]:
        """Chunks that are computed together: short ones, as many as the runner takes at once."""
        runner = cast(JoiningRunner, self.runner)
        most = getattr(runner, "joint_rows", 0)
        groups: list[list[PrefillChunk]] = []
        room = 0
        for chunk in chunks:
            rows = chunk.end - chunk.start
            joins = bool(most) and runner.joins(chunk.request.handle, rows)
            if joins and rows <= room:
                groups[-1].append(chunk)
            else:
                groups.append([chunk])
                room = most if joins else 0
            room -= rows
        return groups

    def _prefill(self, chunks: Sequence[PrefillChunk]) -> None:
        begin, busy, batch = time.perf_counter(), self._busy(), [c.request for c in chunks]
        parts = [c.request.context(c.start, c.end) for c in chunks]
        logits: Sequence[Tensor | None]
        try:
            if len(chunks) == 1:
                final = chunks[0].final
                logits = [self.runner.prefill(batch[0].handle, parts[0], final=final)]
            else:
                together = cast(JoiningRunner, self.runner).prefill_together
                logits = together([(r.handle, ids) for r, ids in zip(batch, parts, strict=True)])
        except Exception as error:
            for chunk in chunks:
                untouched = getattr(chunk.request.handle, "num_tokens", -1) == chunk.start
                if len(chunks) == 1 or not untouched:
                    where = f"prompt tokens {chunk.start}..{chunk.end}"
                    self._fail(chunk.request, where, error)
                else:
                    self._prefill([chunk])
            return
        took_s, num_rows = time.perf_counter() - begin, sum(map(len, parts))
        self._pace.observe(num_rows, 1e3 * (self._busy() - busy))
        if self.reuse is not None:
            self.reuse.note_prefill(num_rows, took_s)
        for name, amount in (("tokens", num_rows), ("parts", 1), ("us", round(1e6 * took_s))):
            self.counters.add(f"prompt_{name}", amount)
        for chunk, logits_V in zip(chunks, logits, strict=True):
            self._charge(chunk.request, chunk.end - chunk.start)
            self._read_to(chunk, logits_V)

    def _read_to(self, chunk: PrefillChunk, logits_V: Tensor | None) -> None:
        """A part of a prompt was read; behind the last one stands the answer's first token."""
        request = chunk.request
        request.num_computed = chunk.end
        if chunk.final and not request.output_ids:
            assert logits_V is not None, "the final chunk of a prompt must return logits"
            # Judged like a step without drafts, though it is no step of decoding.
            try:
                block = Block(request)
            except FATAL:
                raise
            except BaseException as error:
                self._fail(request, f"position {request.next_position}", error)
                return
            outcome = self._judge(block, logits_V.unsqueeze(0))
            if outcome is not None:
                self._apply(block, outcome, ms=1e3 * (time.perf_counter() - request.opened))
        elif not chunk.final:
            progress = self._reading.after(request, chunk.start, self._clock())
            if progress is not None:
                self._emit(request, progress=progress)
        if self.reuse is not None and request.finished is None:
            self.reuse.after_prefill(request)

    def _charge(self, request: Request, num_rows: int) -> None:
        with self._wake:
            self._scheduler.charge(request, num_rows)

    def _decode_ahead(self, requests: tuple[Request, ...]) -> bool:
        """Decodes on the device where it can; False where the step is still to be done."""
        emitted = self._ahead.decode(requests, self.counters) if self._ahead else None
        for e in emitted or ():
            if not e.request.cancelled:
                self._charge(e.request, 1 + e.num_drafts)
                self._apply(Block(e.request), e.outcome, ms=e.ms)
        return emitted is not None

    def _decode(self, requests: tuple[Request, ...]) -> None:
        if self._decode_ahead(requests):
            return
        begin = time.perf_counter()
        try:
            blocks = self.speculator.propose(requests)
        except FATAL:
            raise
        except BaseException as error:
            # Drafting fails by itself and costs nothing: this is a grammar's mask.
            for request in requests:
                if len(requests) == 1:
                    self._fail(request, f"position {request.next_position}", error)
                else:
                    self._decode((request,))
            return
        drafted = time.perf_counter()
        # One that was cancelled meanwhile is left as it is; the loop ends it next.
        blocks = [block for block in blocks if not block.request.cancelled]
        if not blocks:
            return
        try:
            logits_RV = self.runner.step([(b.request.handle, b.step_ids) for b in blocks])
        except Exception as error:
            self._isolate(tuple(b.request for b in blocks), error)
            return
        stepped = time.perf_counter()
        judged: list[tuple[Block, Outcome]] = []
        at = 0
        with self._wake:
            for block in blocks:
                self._scheduler.charge(block.request, len(block.rows))
        for block in blocks:
            outcome = self._judge(block, logits_RV[at : at + len(block.rows)])
            at += len(block.rows)
            if outcome is not None:
                judged.append((block, outcome))
        end = time.perf_counter()
        accepted = [outcome.num_accepted for _, outcome in judged]
        self.speculator.learn([block for block, _ in judged], accepted, 1e3 * (end - begin))
        # Before the answers go out, so that who has one finds its steps counted.
        self._count_step([block for block, _ in judged], accepted, (begin, drafted, stepped, end))
        for block, outcome in judged:
            self._apply(block, outcome, ms=1e3 * (end - begin), draft_ms=1e3 * (drafted - begin))
        self.speculator.ended(blocks)
        self.counters.add(f"{STEP_PARTS[-1]}_us", round(1e6 * (time.perf_counter() - end)))

    def _count_step(
        self, blocks: Sequence[Block], accepted: Sequence[int], times: tuple[float, ...]
    ) -> None:
        add = self.counters.add
        add("decode_steps")
        add("decode_rows", sum(len(b.rows) for b in blocks))
        add("spec_steps", len(blocks))
        add("spec_drafted_steps", sum(b.drafted for b in blocks))
        add("spec_drafts", sum(b.num_drafted for b in blocks))
        add("spec_verified", sum(len(b.token_ids) for b in blocks))
        for num_accepted in accepted:
            add(f"spec_accepted_{num_accepted}")
        for name, (start, end) in zip(STEP_PARTS[:-1], pairwise(times), strict=True):
            add(f"{name}_us", round(1e6 * (end - start)))

    def _isolate(self, requests: tuple[Request, ...], error: Exception) -> None:
        """After a failed step: ends the request to blame and lets the others go on.

        A sequence that the failed step left as it was is stepped again, alone. One that the step
        touched holds a state nobody can vouch for, so it ends.
        """
        for request in requests:
            # The last chosen token is the one that this step was to append.
            untouched = getattr(request.handle, "num_tokens", -1) == request.next_position - 1
            if len(requests) == 1 or not untouched:
                self._fail(request, f"position {request.next_position - 1}", error)
            else:
                self._decode((request,))

    def _judge(self, block: Block, logits_RV: Tensor) -> Outcome | None:
        """What a block appends; None where judging failed, and with it the request."""
        try:
            return self.speculator.judge(block, logits_RV)
        except RequestError as error:
            block.request.at_fault = True
            where = f"position {block.start - block.request.num_prompt} of the answer"
            self._finish(block.request, "error", error=f"{error.message} ({where})")
            return None
        except FATAL:
            raise
        except BaseException as error:
            self._fail(block.request, f"sampling at position {block.start}", error)
            return None

    def _apply(self, block: Block, outcome: Outcome, *, ms: float, draft_ms: float = 0.0) -> None:
        """Appends what stands, takes the rest of the step back, reports."""
        request = block.request
        reason: FinishReason | None = None
        taken: list[Choice] = []
        for choice in outcome.choices:
            try:
                reason = request.append(choice.token_id)
            except FATAL:
                raise
            except BaseException as error:
                self._fail(request, f"position {request.next_position}", error)
                return
            taken.append(choice)
            request.answered = request.answered or self._clock()
            if reason is not None:
                break
        self.counters.add("generated_tokens", len(taken))
        token_ids = tuple(choice.token_id for choice in taken)
        logprobs = tuple(c.logprob for c in taken if c.logprob is not None)
        step = None
        if request.source.speculation.steps and token_ids:
            step = self.speculator.trace(block, outcome, len(taken), ms=ms, draft_ms=draft_ms)
        if reason is not None:
            self._finish(request, reason, token_ids=token_ids, logprobs=logprobs, step=step)
            return
        if token_ids:
            # Whoever ends an answer early, by a stop string, has the counters up to there.
            report = request.source.speculation.report
            stats = request.record.stats(request.rule) if report else None
            self._emit(request, token_ids, logprobs=logprobs, stats=stats, step=step)
        if outcome.error is not None:
            self._finish(request, "error", error=outcome.error)
        elif block.token_ids:
            try:
                self.speculator.commit(block, outcome.num_accepted)
            except Exception as error:
                self._fail(request, f"position {block.start}", error)

    def _fail(self, request: Request, where: str, error: BaseException) -> None:
        # The traceback goes to the log; the client gets our own errors' text and no other's, as a
        # foreign message may hold paths or data.
        logger.error("request %s failed at %s", request.request_id, where, exc_info=error)
        reason = error.message if isinstance(error, DeepdraftError) else type(error).__name__
        self._finish(request, "error", error=f"the model failed at {where}: {reason}")

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        *,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
        error: str | None = None,
        step: StepTrace | None = None,
    ) -> None:
        request.finished, request.parked = reason, None
        if self.reuse is not None:
            self.reuse.finish(request, reason)
        handle, request.handle = request.handle, None
        if handle is not None:
            try:
                if request.tainted or reason == "error":
                    self.runner.close_sequence(handle, scrub=True)
                else:
                    self.runner.close_sequence(handle)
            except Exception:
                logger.exception("closing the sequence of %s failed", request.request_id)
        with self._wake:
            self._scheduler.remove(request)
        self.counters.add(f"finished_{reason}")
        stats = request.record.stats(request.rule)
        self.endings.note(request, reason, stats, self._clock())
        more = {"finish_reason": reason, "error": error, "stats": stats, "step": step}
        self._emit(request, token_ids, logprobs=logprobs, **more)

    def _emit(self, request: Request, token_ids: tuple[int, ...] = (), **more: Any) -> None:
        """Sends an event; `more`: of `TokenEvent`."""
        event = TokenEvent(
            request_id=request.request_id,
            token_ids=token_ids,
            at_fault=request.at_fault,
            cached=request.cached,
            **more,
        )
        try:
            wake = request.sink(event)
            if wake is not None:
                self._wakes.add(wake)
        except Exception:
            # A reader that is gone must not take the engine with it.
            logger.warning("the reader of %s is gone", request.request_id, exc_info=True)
            request.cancelled = True

    def _wake_readers(self) -> None:
        """Once for all events of a step."""
        for wake in self._wakes:
            wake()
        self._wakes.clear()

    def _fail_everything(self, message: str) -> None:
        with self._wake:
            self._broken = message
            requests = self._scheduler.everything()
            for request in requests:
                self._scheduler.remove(request)
            self._wake.notify_all()
        for request in requests:
            request.finished = "error"
            self._emit(request, finish_reason="error", error=message)
        self._wake_readers()
