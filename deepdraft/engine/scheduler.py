"""Decides which requests hold a sequence, and which tokens run in the next step.

Owns: the running requests, the limits of the queue, what is preempted for whom, the rows of a step.
Knows nothing of: tensors, the runner, HTTP, threads. Everything here runs without torch.

A request waits (it has no sequence), runs (it has one), or was preempted: then it waits again, with
its sequence's rows kept apart (`parked`), and goes on from there. Times are seconds of one
monotonic clock, given by the caller.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deepdraft.engine.fair import RateLimited, TenantLimits, Tenants
from deepdraft.engine.pace import Pace
from deepdraft.engine.request import Request
from deepdraft.errors import Overloaded, RequestError

_LEFT_TO_OTHERS = 8
"""A tenant leaves the 8th part of the queue to others, or it could lock them out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """Tokens [start, end) of one request's context; `final` when they complete it."""

    request: Request
    start: int
    end: int

    @property
    def final(self) -> bool:
        """The context ends with this chunk."""
        return self.end == self.request.num_context


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What the next step does: parts of prompts, then one token for each of `decode`."""

    prefill: tuple[PrefillChunk, ...]
    decode: tuple[Request, ...]

    @property
    def num_rows(self) -> int:
        """Rows without drafts."""
        return sum(c.end - c.start for c in self.prefill) + len(self.decode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Sizes of a scheduler."""

    max_queue: int = 256
    """Requests that may wait."""
    max_running: int = 4
    """Requests that hold a sequence: what the memory of the model has room for."""
    step_rows: int = 256
    """Rows of a step, drafts aside."""
    max_parked: int = 0
    """Preempted sequences that may be kept apart; 0: nothing is preempted."""
    preempt_after_s: float = 1.0
    """How long a request waits before a running one makes room for it."""

    def __post_init__(self) -> None:
        assert self.max_queue >= 1 and self.max_running >= 1 and self.step_rows >= 1, self


class Scheduler:
    """Fair between tenants; within one, by priority and then first in, first out.

    Not thread-safe: the engine holds its lock around every call.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        tenants: Mapping[str, TenantLimits] | None = None,
        tenant_default: TenantLimits | None = None,
        pace: Pace | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.pace = pace or Pace(float("inf"))
        self._tenants = Tenants(tenants, tenant_default)
        self._running: list[Request] = []
        self._num_added = 0

    # ---- counts ----------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests that have no sequence now."""
        return sum(1 for _ in self._tenants)

    @property
    def num_running(self) -> int:
        """Requests that own a sequence."""
        return len(self._running)

    @property
    def num_parked(self) -> int:
        """Waiting requests whose sequence is kept apart."""
        return sum(r.parked is not None for r in self._tenants)

    @property
    def num_to_read(self) -> int:
        """Tokens of prompts that are still to be read."""
        return sum(map(_to_read, (*self._running, *self._tenants)))

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing runs."""
        return not self._running and next(iter(self._tenants), None) is None

    def everything(self) -> list[Request]:
        """All requests: the running ones first, oldest first, then the waiting ones in the order of
        their arrival."""
        return [*self._running, *sorted(self._tenants, key=lambda r: r.number)]

    # ---- in and out ------------------------------------------------------------------------

    def add(self, requests: Sequence[Request], now: float = 0.0) -> None:
        """Queues all of `requests`, which are of one tenant, or none.

        Raises Overloaded when they do not fit the queue now, RateLimited when they do not fit their
        tenant's, RequestError when they never would.
        """
        if not requests:
            return
        limits, name = self.limits, requests[0].tenant
        most = limits.max_queue + limits.max_running
        own = self._tenants.limits_of(name)
        own_most = None
        if own.max_queue is not None:
            own_most = own.max_queue + (own.max_running or limits.max_running)
        left_to_others = limits.max_queue // _LEFT_TO_OTHERS if name else 0
        fitting = min(most - left_to_others, own_most or most)
        if len(requests) > fitting:
            raise RequestError(
                f"the request asks for {len(requests)} answers; this server takes at most "
                f"{fitting} at once: send fewer prompts, or a smaller n"
            )
        # Free running places count too: an idle engine takes max_running requests at once.
        if len(requests) > most - self.num_running - self.num_waiting:
            raise Overloaded(
                f"the queue is full ({self.num_waiting} waiting, {self.num_running} running, "
                f"at most {limits.max_queue} may wait); try again later"
            )
        waiting = self._tenants.num_waiting(name)
        running = sum(r.tenant == name for r in self._running)
        if len(requests) > most - left_to_others - waiting - running:
            raise Overloaded(
                f"this tenant has {waiting} requests waiting and {running} running, and the rest "
                "of the queue is for others; try again when some are finished"
            )
        if own_most is not None and len(requests) > own_most - waiting - running:
            raise RateLimited(
                f"this key has {waiting} requests waiting and {running} running, and at most "
                f"{own.max_queue} may wait; try again when some are finished"
            )
        for request in requests:
            self._num_added += 1
            request.number = self._num_added
            request.arrived = now
            self._tenants.put(request)

    def remove(self, request: Request) -> None:
        """Forgets a request, wherever it is."""
        if request in self._running:
            self._running.remove(request)
            self._tenants.stop(request)
        else:
            self._tenants.drop(request)

    def cancelled(self) -> list[Request]:
        """Requests that somebody asked to cancel and that still hold a place."""
        return [r for r in (*self._running, *self._tenants) if r.cancelled]

    def expired(self, now: float) -> list[Request]:
        """Requests whose time is up."""
        return [
            r
            for r in (*self._running, *self._tenants)
            if r.source.deadline_s is not None and now - r.arrived >= r.source.deadline_s
        ]

    # ---- places ----------------------------------------------------------------------------

    def admit(self) -> list[Request]:
        """Gives free places to waiting requests, whose turn it is, and returns these."""
        admitted = []
        while len(self._running) < self.limits.max_running:
            request = self._tenants.next()
            if request is None:
                break
            self._tenants.start(request)
            self._running.append(request)
            admitted.append(request)
        return admitted

    def victim(self, now: float) -> Request | None:
        """The running request that has to make room for one that waits, if one has to.

        That is where no place is free, the one whose turn it is has waited long enough, and either
        its tenant has fewer running requests for its weight than the other one will have left, or
        it is of the same tenant and more urgent. So the opposite exchange never follows.
        """
        limits = self.limits
        if len(self._running) < limits.max_running or self.num_parked >= limits.max_parked:
            return None
        request = self._tenants.next()
        if request is None or now - request.arrived < limits.preempt_after_s:
            return None
        own = self._tenants[request.tenant]
        weight = own.limits.weight
        candidates = []
        for running in self._running:
            if running.pinned:
                continue
            if running.tenant == request.tenant:
                if running.priority > request.priority:
                    candidates.append((0.0, running.rank, running))
                continue
            other = self._tenants[running.tenant]
            left = (other.num_running - 1) / other.limits.weight
            if (own.num_running + 1) / weight <= left:
                candidates.append((left, running.rank, running))
        # The least urgent and youngest of the tenant that has most.
        return max(candidates, key=lambda c: c[:2])[2] if candidates else None

    def park(self, request: Request) -> None:
        """A running request waits again; the caller has put its sequence into `parked`."""
        assert request.parked is not None and request.handle is None
        self._running.remove(request)
        # Queued before it is taken off, so that its tenant is not forgotten in between.
        self._tenants.put(request)
        self._tenants.stop(request)

    # ---- steps -----------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to run.

        Every request that has its prompt gets one token. What is left of the rows goes to prompts:
        no more than `pace` allows where somebody waits for a token, so that a long prompt never
        holds up the answers that are being written.
        """
        decode = tuple(r for r in self._running if r.prefilled)
        reading = [r for r in self._running if not r.prefilled]
        if not decode and not reading:
            return None
        room = max(1, self.limits.step_rows - len(decode))
        if decode:
            room = min(room, self.pace.rows)
        return StepPlan(prefill=tuple(self._chunks(reading, room)), decode=decode)

    def _chunks(self, reading: list[Request], room: int) -> list[PrefillChunk]:
        """The prompt whose tenant has had least goes on. If it is long, half of the room is for
        prompts that are short enough to be finished with it."""
        if not reading:
            return []
        order = sorted(reading, key=lambda r: (self._tenants[r.tenant].used, r.rank))
        first = order[0]
        size = room if len(order) == 1 else max(1, room // 2, room - _left(order[1:]))
        chunks = [self._chunk(first, size)]
        room -= chunks[0].end - chunks[0].start
        for request in sorted(order[1:], key=_to_read):
            chunk = self._chunk(request, room) if room else None
            if chunk is None or not chunk.final:
                break
            chunks.append(chunk)
            room -= chunk.end - chunk.start
        return chunks

    @staticmethod
    def _chunk(request: Request, size: int) -> PrefillChunk:
        return PrefillChunk(
            request=request, start=request.num_computed, end=request.chunk_end(size)
        )

    def charge(self, request: Request, num_rows: int) -> None:
        """Counts rows that were computed for a running request."""
        self._tenants.charge(request, num_rows)

    def check(self) -> None:
        """Raises AssertionError when the books are wrong."""
        everything, waiting = self.everything(), list(self._tenants)
        assert len({id(r) for r in everything}) == len(everything), "a request is held twice"
        assert len(self._running) <= self.limits.max_running, f"{self.num_running=}"
        assert self.num_parked <= self.limits.max_parked, f"{self.num_parked=}"
        assert all(r.finished is None for r in everything), "a finished request holds a place"
        assert all(r.handle is None for r in waiting), "a waiting request owns a sequence"
        self._tenants.check(self._running)


def _to_read(request: Request) -> int:
    return request.num_context - request.num_computed


def _left(requests: Sequence[Request]) -> int:
    return sum(map(_to_read, requests))
