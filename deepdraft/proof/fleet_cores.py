"""Cores of a simulated machine, and the processes that share them.

Owns: processor sharing, processes that do one thing after the other, their events.
Knows nothing of: what the work is.

Processes of one machine share its cores evenly: with k of them busy each has the rate
capacity(k) / k (processor sharing). What runs all the time is a part of a process, and rates are
those of one that was measured beside it.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

Then = Callable[[], None]


class Clock(Protocol):
    """Where events are kept."""

    now: float

    def at(self, when: float, then: Then) -> None:
        """Calls `then` at a time."""
        ...


class Job:
    """Work of one process; `begin` and `end` are in its machine's virtual time."""

    __slots__ = ("begin", "done", "end", "started")

    def __init__(self, done: Then) -> None:
        self.done = done
        self.begin = self.end = self.started = 0.0


class Machine:
    """Cores that busy processes share. Virtual time goes on at the rate of each of them."""

    def __init__(self, clock: Clock, capacity: Sequence[float], always: float = 0.0) -> None:
        """`capacity`: what 1, 2, ... busy processes do, in what one does; `always`: processes that
        are always busy, as a part of one."""
        self._clock, self._capacity, self._always = clock, capacity, always
        self._virtual, self._at, self._live = 0.0, 0.0, 0
        self._heap: list[tuple[float, int, Job]] = []
        self._order = self._version = 0
        self._alone = self._share(1)

    def _share(self, live: int) -> float:
        """What each of so many busy processes does, with those that always are."""
        busy = live + self._always
        low = min(int(busy), len(self._capacity))
        high = min(low + 1, len(self._capacity))
        below, above = self._capacity[low - 1], self._capacity[high - 1]
        return (below + (above - below) * (busy - int(busy))) / busy

    def _rate(self) -> float:
        return self._share(self._live) / self._alone

    def _advance(self) -> None:
        now = self._clock.now
        if self._live:
            self._virtual += self._rate() * (now - self._at)
        self._at = now

    def virtual(self) -> float:
        """Now, in virtual time."""
        self._advance()
        return self._virtual

    def start(self, job: Job, work_s: float) -> None:
        """`work_s`: seconds that it takes where it is alone."""
        self._advance()
        job.begin, job.end, job.started = self._virtual, self._virtual + work_s, self._clock.now
        self._live += 1
        self._push(job)

    def move(self, job: Job, end: float) -> None:
        """Another end for a job under way."""
        self._advance()
        job.end = end
        self._push(job)

    def _push(self, job: Job) -> None:
        self._order += 1
        heapq.heappush(self._heap, (job.end, self._order, job))
        self._schedule()

    def _schedule(self) -> None:
        self._version += 1
        while self._heap and self._heap[0][0] != self._heap[0][2].end:
            heapq.heappop(self._heap)  # was moved
        if self._heap:
            left = max(0.0, self._heap[0][0] - self._virtual)
            version = self._version
            self._clock.at(self._clock.now + left / self._rate(), lambda: self._fire(version))

    def _fire(self, version: int) -> None:
        """The first job is done, unless another one came before it meanwhile."""
        if version != self._version:
            return
        self._advance()
        end, _, job = heapq.heappop(self._heap)
        self._virtual = max(self._virtual, end)
        self._live -= 1
        job.end = -1.0  # further entries of it are stale
        self._schedule()
        job.done()


class Process:
    """One process of a machine: what comes to it is done in the order of its coming."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._waiting: deque[tuple[float, Then]] = deque()
        self._busy = False

    def do(self, work_s: float, then: Then = lambda: None) -> None:
        """Calls `then` when this is done; at once where there is nothing to do, or to wait for."""
        if work_s <= 0 and not self._busy:
            then()
            return
        self._waiting.append((work_s, then))
        if not self._busy:
            self._next()

    def _next(self) -> None:
        if not self._waiting:
            self._busy = False
            return
        self._busy = True
        work_s, then = self._waiting.popleft()

        def done() -> None:
            then()
            self._next()

        self._machine.start(Job(done), work_s)
