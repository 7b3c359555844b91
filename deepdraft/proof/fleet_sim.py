"""A fleet that is not there: conversations on engines whose costs were measured.

Owns: the events of a simulated fleet: arrivals, routing, reading of prompts, rounds of decoding,
fetches, eviction.
Knows nothing of: how costs were measured (`fleet_calibrate`), what figures are made of turns
(`fleet_figures`), how processes share cores (`fleet_cores`). Runs without torch or clocks: the same
trace, costs and seed give the same turns.

An engine is a process that makes one step at a time, as the real one does: a part of a prompt,
bound in rows and in time while others wait, and then one token for every running stream. A request
comes to it through a process beside it (proxy, front, client), and its tokens go back through that;
the rest of the way is time that nobody works.
"""

import heapq
import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from deepdraft.engine.pace import Pace
from deepdraft.errors import ConfigError
from deepdraft.proof.fleet_cores import Job, Machine, Process, Then
from deepdraft.proof.fleet_costs import Costs
from deepdraft.proof.fleet_figures import COMPUTED, TurnDone
from deepdraft.proof.fleet_trace import TracePlan, lengths

Routing = Literal["random", "two", "sticky"]
"""Any replica; of two drawn at random the one with less at hand; always the same one."""
ROUTINGS: tuple[Routing, ...] = get_args(Routing)
ANSWER_TOKENS = 64
"""Of an answer at hand, where loads are compared (as `server.fleet_flights` does)."""
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
    read_s: float = 0.0
    decode_s: float = 0.0
    """Of all engines: for parts of prompts, and for rounds."""


class _Request:
    __slots__ = (
        *("answer", "cached", "chat", "due", "first", "known", "left", "number", "prompt"),
        *("read", "replica", "side", "source"),
    )

    def __init__(self, chat: "_Chat", number: int, due: float, side: Process) -> None:
        turn = chat.source.turns[number - 1]
        self.chat, self.number, self.due, self.side = chat, number, due, side
        self.known, self.answer = chat.tokens, turn.answer
        self.prompt = chat.tokens + turn.new
        self.cached = self.read = 0
        self.left = turn.answer
        self.first = 0.0
        self.source = COMPUTED
        self.replica = -1


_Part = tuple[_Request, int]
"""Rows of a request's prompt."""


class _Chat:
    __slots__ = ("home", "key", "owner", "source", "tokens")

    def __init__(self, key: int, source: SimConversation) -> None:
        self.key, self.source, self.tokens = key, source, 0
        self.owner = self.home = -1


class _Replica:
    """One engine and its cache."""

    def __init__(self, fleet: "_Fleet", number: int, machine: Machine) -> None:
        self.fleet, self.number, self.machine = fleet, number, machine
        self.at_hand = 0
        self.rows = 0
        """Done so far."""
        self.busy_s = 0.0
        self._waiting: deque[_Request] = deque()
        self._reading: list[_Request] = []
        self._running: list[_Request] = []
        self._job: Job | None = None
        self._rounds = 0
        self._pace = Pace(1e3 * fleet.costs.max_stall_s)
        self._kept: OrderedDict[int, tuple[int, int]] = OrderedDict()
        """Tokens and turns of conversations."""
        self._kept_bytes = self.most_bytes = 0.0

    # ---- cache ------------------------------------------------------------------------------

    def kept(self, chat: _Chat) -> tuple[int, int]:
        """Tokens and turns of a conversation that lie here."""
        own = self._kept.get(chat.key)
        if own is None:
            return 0, 0
        self._kept.move_to_end(chat.key)
        return own

    def keep(self, chat: _Chat, tokens: int, turns: int) -> None:
        """Stores a conversation; what was used longest ago makes room."""
        self._drop(chat.key)
        size = self.fleet.costs.kv_bytes(tokens, turns)
        if size > self.fleet.shape.kv_bytes:
            return
        while self._kept_bytes + size > self.fleet.shape.kv_bytes:
            self._drop(next(iter(self._kept)))
        self._kept[chat.key] = tokens, turns
        self._kept_bytes += size
        self.most_bytes = max(self.most_bytes, self._kept_bytes)

    def _drop(self, key: int) -> None:
        own = self._kept.pop(key, None)
        if own is not None:
            self._kept_bytes -= self.fleet.costs.kv_bytes(*own)

    # ---- requests ---------------------------------------------------------------------------

    @property
    def load(self) -> tuple[float, int]:
        """Seconds, roughly, until a new request would have a few tokens; then the work so far."""
        costs = self.fleet.costs
        reading = sum(
            costs.prefill(r.prompt) - costs.prefill(r.read)
            for r in (*self._reading, *self._waiting)
        )
        answers = ANSWER_TOKENS * costs.round_s(self.at_hand) if self.at_hand else 0.0
        return reading + answers, self.rows

    def take(self, request: _Request) -> None:
        """A request has come: its cache is fetched first where another one has more of it."""
        fleet, costs, chat = self.fleet, self.fleet.costs, request.chat
        request.replica = self.number
        self.at_hand += 1
        here, there = self.kept(chat), (0, 0)
        if fleet.shape.sharing and chat.owner not in (-1, self.number):
            there = fleet.replicas[chat.owner].kept(chat)
        tokens = max(here, there)[0]
        gap = fleet.gap()
        request.cached = min(max(0, tokens - gap), request.prompt - 1)
        request.read = request.cached
        if request.cached:
            request.source = "peer" if there > here else "host"
        if there <= here or not request.cached:
            self._queue(request)
            return
        # Checkpoints come all again, rows only where they are not here.
        size = costs.kv_bytes(there[0] - here[0], there[1])
        fleet.out.fetch_bytes += size
        fetch = Job(lambda: self._queue(request))
        self.machine.start(fetch, costs.fetch_s(size))

    def _queue(self, request: _Request) -> None:
        self._waiting.append(request)
        if self._job is None:
            self._step()
        elif self._rounds > 1:
            # Several rounds were taken together: the one under way is the last of them.
            step = self.fleet.costs.round_s(len(self._running))
            over = int((self.machine.virtual() - self._job.begin + _CLOSE) / step)
            self._rounds = min(self._rounds, over + 1)
            self.machine.move(self._job, self._job.begin + self._rounds * step)

    # ---- steps ------------------------------------------------------------------------------

    def _step(self) -> None:
        """Parts of prompts first; what has its first token by them decodes from the next step."""
        costs = self.fleet.costs
        room = costs.max_running - len(self._reading) - len(self._running)
        while self._waiting and room > 0:
            self._reading.append(self._waiting.popleft())
            room -= 1
        parts = self._plan()
        begun = [r.cached > 0 for r, _ in parts if r.read == r.cached]
        begin_s = len(begun) * costs.request_s + sum(begun) * costs.resume_s
        self._read(self._joined(parts), list(self._running), begin_s)

    def _joined(self, parts: Sequence[_Part]) -> deque[list[_Part]]:
        """Parts that are computed together, as `engine.engine` puts them together."""
        groups: deque[list[_Part]] = deque()
        room, most = 0, self.fleet.costs.joint_rows
        for request, rows in parts:
            if rows <= min(most, room):
                groups[-1].append((request, rows))
            else:
                groups.append([(request, rows)])
                room = most if rows <= most else 0
            room -= rows
        return groups

    def _start(self, done: Then, work_s: float) -> None:
        def ended() -> None:
            assert self._job is not None
            took_s = self.fleet.now - self._job.started
            self.busy_s += took_s
            if self._rounds:
                self.fleet.out.decode_s += took_s
            else:
                self.fleet.out.read_s += took_s
            done()

        self._job = Job(ended)
        self.machine.start(self._job, work_s)

    def _plan(self) -> list[_Part]:
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

    def _read(
        self, groups: deque[list[_Part]], decoding: Sequence[_Request], begin_s: float = 0.0
    ) -> None:
        """One group of parts after the other, then a round for those that decode."""
        if not groups:
            self._decode(decoding)
            return
        group = groups.popleft()
        took_s = self.fleet.costs.read_s([(request.read, rows) for request, rows in group])

        def done() -> None:
            # As the engine does it: processor time of the part, which grows where cores are shared.
            assert self._job is not None
            wall_s = self.fleet.now - self._job.started - begin_s
            capacity = self.fleet.costs.capacity
            seen_s = max(took_s, min(wall_s, took_s * len(capacity) / capacity[-1]))
            self._pace.observe(sum(rows for _, rows in group), 1e3 * seen_s)
            for request, rows in group:
                request.read += rows
                self.rows += rows
                if request.read < request.prompt:
                    continue
                self._reading.remove(request)
                self._token(request)
                if request.left > 0:
                    self._running.append(request)
                else:
                    self._end(request)
            self._read(groups, decoding)

        self._rounds = 0
        self._start(done, begin_s + took_s)

    def _decode(self, requests: Sequence[_Request]) -> None:
        if not requests:
            self._job = None
            if self._reading or self._running or self._waiting:
                self._step()
            return
        costs = self.fleet.costs
        others = self._reading or self._waiting or len(requests) < len(self._running)
        together = not others and not costs.side_token_s
        self._rounds = min(r.left for r in requests) if together else 1
        self._start(lambda: self._decoded(requests), self._rounds * costs.round_s(len(requests)))

    def _decoded(self, requests: Sequence[_Request]) -> None:
        for request in requests:
            for _ in range(self._rounds):
                self._token(request)
        ended = [r for r in requests if r.left <= 0]
        self._running = [r for r in self._running if r.left > 0]
        for request in ended:
            self._end(request)
        self._step()

    def _token(self, request: _Request) -> None:
        """One more token of an answer; its way to the client begins."""
        request.left -= 1
        self.rows += 1
        first, last = request.left == request.answer - 1, request.left == 0

        def seen() -> None:
            if first:
                request.first = self.fleet.now
            if last:
                self.fleet.ended(request)

        request.side.do(self.fleet.costs.side_token_s, seen)

    def _end(self, request: _Request) -> None:
        chat = request.chat
        self.at_hand -= 1
        self.keep(chat, request.prompt + request.answer, request.number)
        chat.owner = self.number


class _Fleet:
    """The events and the clock."""

    def __init__(self, costs: Costs, shape: FleetShape) -> None:
        self.costs, self.shape, self.out = costs, shape, Simulated()
        self.now = 0.0
        self._events: list[tuple[float, int, Then]] = []
        self._order = 0
        self._random = random.Random(f"routes {shape.seed}")
        self._random_gap = random.Random(f"gaps {shape.seed}")
        machines = [
            Machine(self, costs.capacity, costs.side_idle)
            for _ in range(-(-shape.replicas // shape.per_machine))
        ]
        self._sides = itertools.cycle([Process(machine) for machine in machines])
        self.replicas = [
            _Replica(self, i, machines[i // shape.per_machine]) for i in range(shape.replicas)
        ]
        self._homes = [0] * shape.replicas

    def at(self, when: float, then: Then) -> None:
        """Calls `then` at a time."""
        self._order += 1
        heapq.heappush(self._events, (when, self._order, then))

    def run(self, trace: Sequence[SimConversation]) -> Simulated:
        """Until nothing happens any more."""
        for key, source in enumerate(trace):
            self._ask(_Chat(key, source), 1, source.at_s)
        while self._events:
            self.now, _, then = heapq.heappop(self._events)
            then()
        return self.out

    def _ask(self, chat: _Chat, number: int, due: float) -> None:
        self.at(due, lambda: self._send(_Request(chat, number, due, next(self._sides))))

    def _send(self, request: _Request) -> None:
        """On its way to an engine: of what the side does for it as much as the way takes."""
        costs = self.costs
        way = max(0.0, costs.path_s - costs.side_token_s)  # its first token goes back
        work = min(costs.side_request_s, way)

        def through() -> None:
            self.at(self.now + way - work, lambda: self._route(request.chat).take(request))

        request.side.do(work, through)
        request.side.do(costs.side_request_s - work)

    def gap(self) -> int:
        """Tokens at a conversation's end that are computed again."""
        costs = self.costs
        return self._random_gap.choice(costs.gaps) if costs.gaps else costs.gap_tokens

    def _route(self, chat: _Chat) -> _Replica:
        routing = self.shape.routing
        if routing == "sticky":
            if chat.home < 0:
                chat.home = min(range(len(self._homes)), key=self._homes.__getitem__)
                self._homes[chat.home] += 1
            return self.replicas[chat.home]
        if routing == "random" or len(self.replicas) == 1:
            return self._random.choice(self.replicas)
        return min(self._random.sample(self.replicas, 2), key=lambda replica: replica.load)

    def ended(self, request: _Request) -> None:
        """A turn is answered; the next one comes after a pause."""
        chat = request.chat
        chat.tokens = request.prompt + request.answer
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
            pause_s = chat.source.turns[request.number].pause_s
            self._ask(chat, request.number + 1, self.now + pause_s)


def simulate(trace: Sequence[SimConversation], costs: Costs, shape: FleetShape) -> Simulated:
    """Plays the trace on a fleet of this shape."""
    fleet = _Fleet(costs, shape)
    out = fleet.run(trace)
    out.kv_bytes_most = max(r.most_bytes for r in fleet.replicas)
    if out.wall_s:
        out.busy_share = sum(r.busy_s for r in fleet.replicas) / out.wall_s / shape.replicas
    return out


def in_tokens(plan: TracePlan, costs: Costs) -> list[SimConversation]:
    """A plan's trace in tokens, by the measured characters a token."""

    def new(chars: int) -> int:
        return max(1, round(chars / costs.chars_per_token + costs.turn_tokens))

    return [
        SimConversation(
            at_s, tuple(SimTurn(new(chars), turn.max_tokens, turn.pause_s) for chars, turn in turns)
        )
        for at_s, turns in lengths(plan)
    ]
