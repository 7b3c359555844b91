"""Decides which tokens run in the next step.

Owns: the waiting queue, the set of running requests, the sizes of both.
Knows nothing of: tensors, the runner, HTTP, threads. Everything here runs without torch.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from deepdraft.engine.request import Request
from deepdraft.errors import Overloaded, RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """Prompt tokens [start, end) of one request; `final` when they reach the prompt's end."""

    request: Request
    start: int
    end: int

    @property
    def final(self) -> bool:
        """The prompt ends with this chunk."""
        return self.end == self.request.num_prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What the next step does: at most one chunk of a prompt, one token for each of `decode`."""

    prefill: PrefillChunk | None
    decode: tuple[Request, ...]


class Scheduler:
    """First in, first out. Not thread-safe: the engine holds its lock around every call."""

    def __init__(self, *, max_queue: int, max_running: int, prefill_chunk: int) -> None:
        assert max_queue >= 1 and max_running >= 1 and prefill_chunk >= 1
        self.max_queue = max_queue
        self.max_running = max_running
        self.prefill_chunk = prefill_chunk
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []

    @property
    def num_waiting(self) -> int:
        """Requests that have no sequence yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that own a sequence."""
        return len(self._running)

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing runs."""
        return not self._waiting and not self._running

    def add(self, requests: Sequence[Request]) -> None:
        """Queues all of `requests` or none.

        Raises Overloaded when they do not fit the queue now, RequestError when they never would.
        """
        most = self.max_queue + self.max_running
        if len(requests) > most:
            raise RequestError(
                f"the request asks for {len(requests)} answers; this server takes at most {most} "
                "at once: send fewer prompts, or a smaller n"
            )
        # Free running places count too: an idle engine takes max_running requests at once.
        room = most - self.num_running - self.num_waiting
        if len(requests) > room:
            raise Overloaded(
                f"the queue is full ({self.num_waiting} waiting, {self.num_running} running, "
                f"at most {self.max_queue} may wait); try again later"
            )
        self._waiting.extend(requests)

    def admit(self) -> list[Request]:
        """Moves waiting requests to free running places, oldest first, and returns them."""
        admitted = []
        while self._waiting and len(self._running) < self.max_running:
            request = self._waiting.popleft()
            self._running.append(request)
            admitted.append(request)
        return admitted

    def remove(self, request: Request) -> None:
        """Forgets a request, wherever it is."""
        if request in self._running:
            self._running.remove(request)
        else:
            self._waiting.remove(request)

    def cancelled(self) -> list[Request]:
        """Requests that somebody asked to cancel and that still hold a place."""
        return [r for r in (*self._running, *self._waiting) if r.cancelled]

    def everything(self) -> list[Request]:
        """All requests, running ones first, each group oldest first."""
        return [*self._running, *self._waiting]

    def plan(self) -> StepPlan | None:
        """The next step, or None when there is nothing to run.

        The oldest unfinished prompt gets one chunk; every prefilled request gets one token, so a
        long prompt never stops the answers that are already running.
        """
        chunk = None
        for request in self._running:
            if not request.prefilled:
                end = request.chunk_end(self.prefill_chunk)
                chunk = PrefillChunk(request=request, start=request.num_computed, end=end)
                break
        decode = tuple(r for r in self._running if r.prefilled)
        if chunk is None and not decode:
            return None
        return StepPlan(prefill=chunk, decode=decode)

    def check(self) -> None:
        """Raises AssertionError when the books are wrong."""
        everything = self.everything()
        assert len({id(r) for r in everything}) == len(everything), "a request is held twice"
        assert len(self._running) <= self.max_running, f"{self.num_running=} {self.max_running=}"
        assert all(r.finished is None for r in everything), "a finished request holds a place"
        assert all(r.handle is None for r in self._waiting), "a waiting request owns a sequence"
