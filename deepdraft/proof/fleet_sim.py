"""A fleet that is not there: conversations on engines whose costs were measured.

Owns: the events of a simulated fleet: arrivals, routing, reading of prompts, rounds of decoding,
fetches, eviction, cores that processes share.
Knows nothing of: how costs were measured (`fleet_calibrate`), what figures are made of turns
(`fleet_figures`). Runs without torch or clocks: the same trace, costs and seed give the same turns.

An engine is a process that makes one step at a time, as the real one does: a part of a prompt,
bound in rows and in time while others wait, and one token for every running stream. Rounds without
a prompt to read are taken together until something happens. Processes of one machine share its
cores evenly (processor sharing): with k of them busy each has the rate capacity(k) / k.
"""

import heapq
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from deepdraft.engine.pace import Pace
from deepdraft.errors import ConfigError
from deepdraft.proof.fleet_costs import Costs
from deepdraft.proof.fleet_figures import COMPUTED, TurnDone

Routing = Literal["random", "two", "sticky"]
"""Any replica; of two drawn at random the one with fewer requests at hand; always the same one."""
ROUTINGS: tuple[Routing, ...] = get_args(Routing)
_CLOSE = 1e-12


@dataclass(frozen=True, slots=True)
class SimTurn:
    """Tokens a user adds (with what the chat format puts around them), tokens of the answer."""

    new: int
    answer: int
    pause_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SimConversation:
    """One conversation of a trace, in tokens."""

    at_s: float
    turns: tuple[SimTurn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetShape:
    """How many replicas on which machines, and what they share."""

    replicas: int = 1
    per_machine: int = 1
    routing: Routing = "two"
    sharing: bool = True
    kv_bytes: float = float("inf")
    """Host memory of each replica for conversations."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.replicas < 1 or self.per_machine < 1 or self.kv_bytes < 0:
            raise ConfigError("a simulated fleet has 1 replica or more on machines of 1 or more")
        if self.routing not in ROUTINGS:
            raise ConfigError(f"routing is one of {', '.join(ROUTINGS)}, got {self.routing!r}")


@dataclass(slots=True)
class Simulated:
    """What came of it."""

    turns: list[TurnDone] = field(default_factory=list)
    wall_s: float = 0.0
    fetch_bytes: float = 0.0
    kv_bytes_most: float = 0.0
    """Of one replica."""
    busy_share: float = 0.0
    """Of the engines' time, on average, in which they made a step."""


class _Job:
    """Work of one process; `end` is in its machine's virtual time."""

    __slots__ = ("begin", "done", "end", "started")

    def __init__(self, done: Callable[[], None]) -> None:
        self.done = done
        self.begin = self.end = self.started = 0.0


class _Machine:
    """Cores that busy processes share evenly. Virtual time goes on at the rate of each of them."""

    def __init__(self, fleet: "_Fleet") -> None:
        self._fleet, self._capacity = fleet, fleet.costs.capacity
        self._virtual, self._at, self._live = 0.0, 0.0, 0
        self._heap: list[tuple[float, int, _Job]] = []
        self._order = 0
        self.version = 0
        self._side: _Job | None = None

    def _rate(self) -> float:
        return self._capacity[min(self._live, len(self._capacity)) - 1] / self._live

    def _advance(self) -> None:
        now = self._fleet.now
        if self._live:
            self._virtual += self._rate() * (now - self._at)
        self._at = now

    def virtual(self) -> float:
        """Now, in virtual time."""
        self._advance()
        return self._virtual

    def start(self, job: _Job, work_s: float) -> None:
        """`work_s`: seconds that it takes where it is alone."""
        self._advance()
        job.begin, job.end, job.started = self._virtual, self._virtual + work_s, self._fleet.now
        self._live += 1
        self._push(job)

    def move(self, job: _Job, end: float) -> None:
        """Another end for a job under way."""
        self._advance()
        job.end = end
        self._push(job)

    def beside(self, work_s: float) -> None:
        """Work of the processes beside the engines: they take turns on one core."""
        if work_s <= 0:
            return
        if self._side is None:
            self._side = _Job(self._side_done)
            self.start(self._side, work_s)
        else:
            self.move(self._side, self._side.end + work_s)

    def _side_done(self) -> None:
        self._side = None

    def _push(self, job: _Job) -> None:
        self._order += 1
        heapq.heappush(self._heap, (job.end, self._order, job))
        self._schedule()

    def _schedule(self) -> None:
        self.version += 1
        while self._heap and self._heap[0][0] != self._heap[0][2].end:
            heapq.heappop(self._heap)  # was moved
        if self._heap:
            left = max(0.0, self._heap[0][0] - self._virtual)
            self._fleet.at(self._fleet.now + left / self._rate(), self, self.version)

    def fire(self) -> None:
        """The first job is done."""
        self._advance()
        end, _, job = heapq.heappop(self._heap)
        self._virtual = max(self._virtual, end)
        self._live -= 1
        job.end = -1.0  # further entries of it are stale
        self._schedule()
        job.done()


class _Request:
    __slots__ = (
        *("answer", "cached", "chat", "due", "first", "known", "left", "number", "prompt"),
        *("read", "replica", "source"),
    )

    def __init__(self, chat: "_Chat", number: int, due: float) -> None:
        turn = chat.source.turns[number - 1]
        self.chat, self.number, self.due = chat, number, due
        self.known, self.answer = chat.tokens, turn.answer
        self.prompt = chat.tokens + turn.new
        self.cached = self.read = 0
        self.left = turn.answer
        self.first = 0.0
        self.source = COMPUTED
        self.replica = -1


class _Chat:
    __slots__ = ("home", "key", "owner", "source", "tokens")

    def __init__(self, key: int, source: SimConversation) -> None:
        self.key, self.source, self.tokens = key, source, 0
        self.owner = self.home = -1


class _Replica:
    """One engine and its cache."""

    def __init__(self, fleet: "_Fleet", number: int, machine: _Machine) -> None:
        self.fleet, self.number, self.machine = fleet, number, machine
        self.at_hand = 0
        self.busy_s = 0.0
        self._waiting: deque[_Request] = deque()
        self._reading: list[_Request] = []
        self._running: list[_Request] = []
        self._job: _Job | None = None
        self._parts: list[tuple[_Request, int]] = []
        self._parts_s = 0.0
        self._rounds = 0
        self._pace = Pace(1e3 * fleet.costs.max_stall_s)
        self._kept: OrderedDict[int, int] = OrderedDict()
        self._kept_bytes = self.most_bytes = 0.0

    # ---- cache ------------------------------------------------------------------------------

    def kept(self, chat: _Chat) -> int:
        """Tokens of a conversation that lie here."""
        tokens = self._kept.get(chat.key, 0)
        if tokens:
            self._kept.move_to_end(chat.key)
        return tokens

    def keep(self, chat: _Chat, tokens: int) -> None:
        """Stores a conversation; what was used longest ago makes room."""
        costs = self.fleet.costs
        self._drop(chat.key)
        size = costs.kv_bytes(tokens)
        if size > self.fleet.shape.kv_bytes:
            return
        while self._kept_bytes + size > self.fleet.shape.kv_bytes:
            self._drop(next(iter(self._kept)))
        self._kept[chat.key] = tokens
        self._kept_bytes += size
        self.most_bytes = max(self.most_bytes, self._kept_bytes)

    def _drop(self, key: int) -> None:
        tokens = self._kept.pop(key, 0)
        if tokens:
            self._kept_bytes -= self.fleet.costs.kv_bytes(tokens)

    # ---- requests ---------------------------------------------------------------------------

    def take(self, request: _Request) -> None:
        """A request has come: its cache is fetched first where another one has more of it."""
        fleet, costs, chat = self.fleet, self.fleet.costs, request.chat
        request.replica = self.number
        self.at_hand += 1
        self.machine.beside(costs.side_request_s)
        here = self.kept(chat)
        there = 0
        if fleet.shape.sharing and chat.owner not in (-1, self.number):
            there = fleet.replicas[chat.owner].kept(chat)
        tokens = max(here, there)
        request.cached = min(max(0, tokens - costs.gap_tokens), request.prompt - 1)
        request.read = request.cached
        if request.cached:
            request.source = "peer" if there > here else "host"
        if there <= here or not request.cached:
            self._queue(request)
            return
        size = costs.kv_bytes(there - here)
        fleet.out.fetch_bytes += size
        fetch = _Job(lambda: self._queue(request))
        self.machine.start(fetch, costs.fetch_s(size))

    def _queue(self, request: _Request) -> None:
        self._waiting.append(request)
        if self._job is None:
            self._step()
        elif not self._parts and self._rounds > 1:
            # Several rounds were taken together: the one under way is the last of them.
            step = self.fleet.costs.round_s(len(self._running))
            over = int((self.machine.virtual() - self._job.begin + _CLOSE) / step)
            self._rounds = min(self._rounds, over + 1)
            self.machine.move(self._job, self._job.begin + self._rounds * step)

    def _step(self) -> None:
        costs = self.fleet.costs
        room = costs.max_running - len(self._reading) - len(self._running)
        while self._waiting and room > 0:
            self._reading.append(self._waiting.popleft())
            room -= 1
        self._parts = self._plan()
        self._rounds = 0
        self._parts_s = sum(
            costs.prefill(request.read + rows) - costs.prefill(request.read)
            for request, rows in self._parts
        )
        if self._parts:
            short = 1 - min(1.0, sum(rows for _, rows in self._parts) / costs.chunk)
            self._parts_s += costs.part_s * short
        begun = [r.cached > 0 for r, _ in self._parts if r.read == r.cached]
        work = self._parts_s + len(begun) * costs.request_s + sum(begun) * costs.resume_s
        if self._running:
            self._rounds = 1 if self._reading else min(r.left for r in self._running)
            work += self._rounds * costs.round_s(len(self._running))
        if not (self._parts or self._rounds):
            self._job = None
            return
        self._job = _Job(self._stepped)
        self.machine.start(self._job, work)

    def _plan(self) -> list[tuple[_Request, int]]:
        """Rows of prompts in the next step, by the rules of `engine.scheduler`: the oldest prompt
        goes on, half of the room is for prompts short enough to be finished with it."""
        reading, costs = self._reading, self.fleet.costs
        if not reading:
            return []
        room = max(1, costs.chunk - len(self._running))
        if self._running:
            room = min(room, self._pace.rows)
        left = {id(r): r.prompt - r.read for r in reading}
        first, others = reading[0], sorted(reading[1:], key=lambda r: left[id(r)])
        whole = sum(left[id(r)] for r in others)
        size = room if not others else max(1, room // 2, room - whole)
        parts = [(first, min(size, left[id(first)]))]
        room -= parts[0][1]
        for request in others:
            if not 0 < left[id(request)] <= room:
                break
            parts.append((request, left[id(request)]))
            room -= left[id(request)]
        return parts

    def _stepped(self) -> None:
        fleet, costs = self.fleet, self.fleet.costs
        assert self._job is not None
        self.busy_s += fleet.now - self._job.started
        tokens = self._rounds * len(self._running)
        if self._parts:
            # As the engine does it: processor time of the part.
            self._pace.observe(sum(rows for _, rows in self._parts), 1e3 * self._parts_s)
        for request in self._running:
            request.left -= self._rounds
        ended = [r for r in self._running if r.left <= 0]
        self._running = [r for r in self._running if r.left > 0]
        for request, rows in self._parts:
            request.read += rows
            if request.read >= request.prompt:
                self._reading.remove(request)
                request.first = fleet.now
                request.left -= 1
                tokens += 1
                (self._running if request.left > 0 else ended).append(request)
        self.machine.beside(tokens * costs.side_token_s)
        for request in ended:
            self._end(request)
        self._step()

    def _end(self, request: _Request) -> None:
        chat = request.chat
        self.at_hand -= 1
        chat.tokens = request.prompt + request.answer
        self.keep(chat, chat.tokens)
        chat.owner = self.number
        self.fleet.ended(request)


class _Fleet:
    """The events and the clock."""

    def __init__(self, costs: Costs, shape: FleetShape) -> None:
        self.costs, self.shape, self.out = costs, shape, Simulated()
        self.now = 0.0
        self._events: list[tuple[float, int, _Machine | _Request, int]] = []
        self._order = 0
        self._random = random.Random(f"routes {shape.seed}")
        machines = [_Machine(self) for _ in range(-(-shape.replicas // shape.per_machine))]
        self.replicas = [
            _Replica(self, i, machines[i // shape.per_machine]) for i in range(shape.replicas)
        ]
        self._homes = [0] * shape.replicas

    def at(self, when: float, what: "_Machine | _Request", version: int = 0) -> None:
        self._order += 1
        heapq.heappush(self._events, (when, self._order, what, version))

    def run(self, trace: Sequence[SimConversation]) -> Simulated:
        for key, source in enumerate(trace):
            self.at(source.at_s, _Request(_Chat(key, source), 1, source.at_s))
        while self._events:
            when, _, what, version = heapq.heappop(self._events)
            if isinstance(what, _Machine):
                if version == what.version:
                    self.now = when
                    what.fire()
                continue
            self.now = when
            self._route(what.chat).take(what)
        return self.out

    def _route(self, chat: _Chat) -> _Replica:
        routing = self.shape.routing
        if routing == "sticky":
            if chat.home < 0:
                chat.home = min(range(len(self._homes)), key=self._homes.__getitem__)
                self._homes[chat.home] += 1
            return self.replicas[chat.home]
        if routing == "random" or len(self.replicas) == 1:
            return self._random.choice(self.replicas)
        a, b = self._random.sample(self.replicas, 2)
        return a if a.at_hand <= b.at_hand else b

    def ended(self, request: _Request) -> None:
        """A turn is answered; the next one comes after a pause."""
        chat = request.chat
        self.out.turns.append(
            TurnDone(
                number=request.number,
                first_s=request.first - request.due,
                end_s=self.now - request.due,
                prompt=request.prompt,
                cached=request.cached,
                known=request.known,
                tokens=request.answer,
                source=request.source,
                replica=f"replica {request.replica + 1}",
            )
        )
        self.out.wall_s = self.now
        if request.number < len(chat.source.turns):
            due = self.now + chat.source.turns[request.number].pause_s
            self.at(due, _Request(chat, request.number + 1, due))


def simulate(trace: Sequence[SimConversation], costs: Costs, shape: FleetShape) -> Simulated:
    """Plays the trace on a fleet of this shape."""
    fleet = _Fleet(costs, shape)
    out = fleet.run(trace)
    out.kv_bytes_most = max(r.most_bytes for r in fleet.replicas)
    if out.wall_s:
        out.busy_share = sum(r.busy_s for r in fleet.replicas) / out.wall_s / shape.replicas
    return out
