"""What requests cost on this machine: the tables that a simulated fleet runs on, measured.

Owns: which requests are sent to an idle fleet, how their times and its counters become a `Costs`.
Knows nothing of: events of a simulation. The requests are a trace's own sort of text.

What the engine took is read from its own counters, so that the way of a request (client, proxy,
front) is no part of it; the way is what the client waited beyond that.
"""

import contextlib
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace

from deepdraft.errors import EngineError
from deepdraft.proof.fleet_costs import UNBOUNDED, Costs
from deepdraft.proof.fleet_served import Started
from deepdraft.proof.fleet_sim import FleetShape, in_tokens, simulate
from deepdraft.proof.fleet_trace import TracePlan, fleet_trace
from deepdraft.proof.serve_client import Answer, Ask, Target
from deepdraft.proof.serve_load import conversations
from deepdraft.proof.suite import document

_PARTS = (1, 150, 270, 440)
"""Characters of prompts of one part."""
_MORE = 4
"""Times as many runs of what is over soon."""
_CHUNKS, _SPARE = (1, 3, 6), 8
"""Whole parts of longer prompts; they have so many tokens less, to have no part of few rows."""
_SIZES = ((150, 1), (4800, 1), (150, 10))
"""Characters and turns of conversations that move."""
_QUESTION = "\nWhat does the text say about the old map?"
_NEXT = "And who else spoke of the road?"
_STREAMS = (1, 2, 4, 8)
_MIXED, _MIXED_TURNS, _TRIES = 12, 12, 4
"""Conversations of the short trace and their most turns; times its costs are set right."""
_IDLE_S = 5.0
_SETTLE_S, _SETTLED_S = 20.0, 0.1
"""A front hears its engines' counters every two seconds."""
_STORED_S = 0.4
"""What is stored is hashed and claimed beside the answer."""
_ENDED = "deepdraft_e2e_request_latency_seconds_count"
_FIRST = "deepdraft_time_to_first_token_seconds_sum"
_READ, _DECODED = "deepdraft_prefill_seconds_total", "deepdraft_iteration_seconds_total"
_DECODING = "deepdraft_request_decode_time_seconds_sum"
_STEPS, _TOKENS = "deepdraft_iterations_total", "deepdraft_generation_tokens_total"
_OWN_STEPS = "deepdraft_spec_decode_steps_total"
_FETCHED = "deepdraft_kv_fetch_bytes_total"
Say = Callable[[str], None]


@dataclass(slots=True)
class _Scene:
    """Some requests, and what the fleet counted meanwhile."""

    texts: list[str] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    counted: Counter[str] = field(default_factory=Counter)
    wall_s: float = 0.0
    cpu_s: float = 0.0
    """Of the fleet and this client."""

    @property
    def engine_s(self) -> float:
        """Of the engine's steps."""
        return self.counted[_READ] + self.counted[_DECODED]

    @property
    def way_s(self) -> float:
        """What a first token took beside its engine's time, on average."""
        waited = sum(a.first_s or a.end_s for a in self.answers)
        return max(0.0, (waited - self.counted[_FIRST]) / len(self.answers))


@dataclass(frozen=True, slots=True)
class Machine:
    """How fast a machine is at some time."""

    alone_s: float
    """As in `Costs`."""
    capacity: tuple[float, ...]


@dataclass(slots=True)
class _Chat:
    """A conversation on one server."""

    at: int
    session: str
    turns: tuple[str, ...]
    last: Answer

    @property
    def known(self) -> int:
        """Tokens so far."""
        return self.last.prompt_tokens + self.last.tokens


class _Sessions:
    """A target that is told which conversation a turn is of."""

    def __init__(self, target: Target, tag: str) -> None:
        self._target, self._tag = target, tag

    def ask(self, ask: Ask, *, deadline_s: float | None = None) -> Answer:
        """With the conversation's session id."""
        session = f"{self._tag}-{ask.name}".replace(" ", "-")
        return self._target.ask(replace(ask, session=session), deadline_s=deadline_s)


class Calibration:
    """Requests to idle servers. Raises EngineError where one is not answered."""

    def __init__(
        self, fleet: Started, targets: Sequence[Target], plan: TracePlan, runs: int
    ) -> None:
        """`plan`: what is to be predicted; `runs`: of each measurement."""
        self._fleet, self._targets, self._plan, self._runs = fleet, targets, plan, runs
        self._tokens = max(16, plan.max_tokens)
        self._idle, self._loop = 0.0, 1.0
        """Processor time of nothing at all; what the engine's loop takes, in its steps."""
        self._number = random.SystemRandom().randrange(1 << 40)
        self._due = fleet.counters()[_ENDED]
        """Requests that the fleet will have counted."""

    def engine(self, say: Say) -> Costs:
        """The first server's tables: of its engine, of the way to it, of what runs beside it."""
        for _ in range(2):
            self._one(0, (self._text(600),), self._tokens)
        say("costs: idle")
        cpu_s = self._cpu_s()
        time.sleep(_IDLE_S)
        self._idle = (self._cpu_s() - cpu_s) / _IDLE_S
        say("costs: prompts")
        costs = self._prompts()
        say("costs: later turns")
        costs = self._turns(costs)
        say("costs: a short trace")
        return replace(self._mixed(costs), alone_s=self._first_turns(1))

    def pair(self, costs: Costs, say: Say) -> Costs:
        """With what two servers show: fetches, bytes, shared cores."""
        for at in range(2):
            self._one(at, (self._text(600),), self._tokens)
        say("costs: cores")
        costs = replace(costs, capacity=self.machine(2).capacity)
        say("costs: fetches")
        return self._fetches(costs)

    def machine(self, servers: int) -> "Machine":
        """How fast the machine is now, of which only a part may be here (a virtual one has more or
        less of its host from minute to minute). `servers`: engines that requests may go to."""
        alone_s = self._first_turns(1)
        capacity = [1.0]
        if servers > 1:
            share = 2 * alone_s / self._first_turns(2)
            capacity.append(min(2.0, max(1.0, share)))
        return Machine(alone_s, tuple(capacity))

    # ---- scenes -----------------------------------------------------------------------------

    def _text(self, chars: int) -> str:
        self._number += 1
        return document(chars, self._number) + _QUESTION

    def _one(self, at: int, turns: tuple[str, ...], tokens: int, session: str = "") -> Answer:
        return self._together([(at, Ask(turns, tokens, session=session or None))])[0]

    @contextlib.contextmanager
    def _scene(self) -> Generator[_Scene]:
        """Requests whose answers are put into the scene; its counters are there when it ends."""
        scene, before = _Scene(), self._counters()
        cpu_s, begin = self._cpu_s(), time.perf_counter()
        yield scene
        scene.wall_s = time.perf_counter() - begin
        scene.cpu_s = self._cpu_s() - cpu_s
        scene.counted = self._counters()
        scene.counted.subtract(before)

    def _counters(self) -> Counter[str]:
        """The fleet's, when all that was answered is counted."""
        until = time.monotonic() + _SETTLE_S
        while True:
            counted = self._fleet.counters()
            if counted[_ENDED] >= self._due:
                return counted
            if time.monotonic() > until:
                raise EngineError("calibration: the fleet does not count what it answered")
            time.sleep(_SETTLED_S)

    def _chat(self, at: int, chars: int) -> "_Chat":
        """A conversation with its first answer."""
        text = self._text(chars)
        session = f"calibrate-{self._number}"
        return _Chat(at, session, (text,), self._one(at, (text,), self._tokens, session))

    def _next_turns(self, chats: Sequence["_Chat"]) -> list[Answer]:
        """The next turns of some conversations, all begun at once."""
        asks = []
        for chat in chats:
            chat.turns = (*chat.turns, chat.last.text, _NEXT)
            asks.append((chat.at, Ask(chat.turns, self._tokens, session=chat.session)))
        answers = self._together(asks)
        for chat, answer in zip(chats, answers, strict=True):
            chat.last = answer
        return answers

    def _together(self, asks: Sequence[tuple[int, Ask]]) -> list[Answer]:
        """One request for each server and ask, all begun at once."""
        answers = [Answer(fault="timeout")] * len(asks)

        def one(i: int) -> None:
            at, ask = asks[i]
            answers[i] = self._targets[at].ask(ask)

        threads = [threading.Thread(target=one, args=(i,)) for i in range(len(asks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._due += len(asks)
        self._check(answers)
        return answers

    @staticmethod
    def _check(answers: Sequence[Answer]) -> None:
        for answer in answers:
            if answer.fault is not None:
                raise EngineError(f"calibration: {answer.fault}: {answer.message}")

    def _side_s(self, scene: _Scene) -> float:
        """Processor time of all but the engine's steps and of what runs anyway."""
        return max(0.0, scene.cpu_s - scene.engine_s - self._idle * scene.wall_s)

    def _cpu_s(self) -> float:
        return self._fleet.cpu_s() + time.process_time()

    # ---- the engine -------------------------------------------------------------------------

    def _prompts(self) -> Costs:
        """Prompts of several lengths, one token of answer each, one at a time."""
        scenes = [self._prompt(chars, _MORE * self._runs) for chars in _PARTS]
        costs = Costs(prefill_s=((1.0, 1e-6),), decode_s=((1.0, 1e-6),))
        per_char, around = self._per_char(scenes)
        head = len(self._text(1)) - 1
        for chunks in _CHUNKS:
            tokens = chunks * costs.chunk - _SPARE
            chars = round((tokens - around) / per_char) - head
            scenes.append(self._prompt(chars, self._runs if chunks > 1 else _MORE * self._runs))
        per_char, around = self._per_char(scenes)
        points = [
            (
                statistics.fmean(a.prompt_tokens for a in s.answers),
                s.counted[_READ] / len(s.answers),
            )
            for s in scenes
        ]
        count = sum(len(s.answers) for s in scenes)
        waits = [(s.counted[_FIRST] - s.counted[_READ]) / len(s.answers) for s in scenes]
        return replace(
            costs,
            name=self._targets[0].model,
            part_s=tuple(points[: len(_PARTS) + 1]),
            prefill_s=rising(points[len(_PARTS) :]),
            request_s=max(0.0, statistics.median(waits)),
            path_s=statistics.median(s.way_s for s in scenes),
            side_request_s=sum(map(self._side_s, scenes)) / count,
            side_idle=self._idle,
            chars_per_token=1 / per_char,
            turn_tokens=max(0.0, around),
        )

    def _prompt(self, chars: int, count: int) -> _Scene:
        with self._scene() as scene:
            for _ in range(count):
                scene.texts.append(self._text(max(1, chars)))
                scene.answers.append(self._one(0, (scene.texts[-1],), 1))
        return scene

    @staticmethod
    def _per_char(scenes: Sequence[_Scene]) -> tuple[float, float]:
        """Tokens of a character, and those around a text."""
        chars = [len(text) for s in scenes for text in s.texts]
        return line(chars, [a.prompt_tokens for s in scenes for a in s.answers])

    def _turns(self, costs: Costs) -> Costs:
        """Later turns of 1, 2, 4, 8 conversations at a time, whose prompts are all but in the cache
        and whose texts are as long as those of a trace."""
        chats = [self._chat(0, 2400) for _ in range(max(_STREAMS))]
        gaps: list[int] = []
        points, wait_s = [], 0.0
        for streams in _STREAMS:
            with self._scene() as scene:
                for _ in range(self._runs):
                    time.sleep(_STORED_S)
                    for i in range(0, len(chats), streams):
                        own = chats[i : i + streams]
                        known = [c.known for c in own]
                        scene.answers += self._next_turns(own)
                        gaps += [k - c.last.cached_tokens for k, c in zip(known, own, strict=True)]
            count, counted = len(scene.answers), scene.counted
            if streams == 1:
                wait_s = (counted[_FIRST] - counted[_READ]) / count
                # The engine's loop does more than its steps.
                self._loop = max(1.0, counted[_DECODING] / counted[_DECODED])
            most = counted[_OWN_STEPS] / counted[_STEPS]
            # The first tokens come with the prompts.
            points.append(
                (most, self._loop * most * counted[_DECODED] / (counted[_TOKENS] - count))
            )
        return replace(
            costs,
            gap_tokens=max(0, round(statistics.fmean(gaps))),
            gaps=tuple(sorted(max(0, gap) for gap in gaps)),
            resume_s=max(0.0, wait_s - costs.request_s),
            decode_s=rising(points),
        )

    def _mixed(self, costs: Costs) -> Costs:
        """A short trace: where parts of prompts and rounds take turns both take longer than alone
        (caches, other threads), and so does the way."""
        plan = self._plan
        short = replace(
            plan,
            conversations=_MIXED,
            most_turns=min(plan.most_turns, _MIXED_TURNS),
            seed=plan.seed + 1,
        )
        with self._scene() as scene:
            done = conversations(
                _Sessions(self._targets[0], f"mixed-{self._number}"), fleet_trace(short)
            )
            scene.answers += [d.answer for d in done]
            self._due += len(done)
            self._check(scene.answers)
        side_s = self._side_s(scene) - costs.side_request_s * len(scene.answers)
        costs = replace(
            costs,
            path_s=max(costs.path_s, scene.way_s),
            side_token_s=max(0.0, side_s / max(1, sum(a.tokens for a in scene.answers))),
        )
        trace = in_tokens(short, costs)
        for _ in range(_TRIES):
            own = simulate(trace, costs, FleetShape())
            costs = replace(
                costs,
                prefill_s=_times(costs.prefill_s, scene.counted[_READ] / own.read_s),
                decode_s=_times(
                    costs.decode_s, self._loop * scene.counted[_DECODED] / own.decode_s
                ),
            )
        return costs

    # ---- two servers ------------------------------------------------------------------------

    def _first_turns(self, at_a_time: int) -> float:
        """Seconds of an engine for a first turn, of which so many begin together, each on a server
        of its own."""
        with self._scene() as scene:
            for _ in range(_MORE * self._runs // 2):
                asks = [
                    (at % len(self._targets), Ask((self._text(2400),), self._tokens))
                    for at in range(at_a_time)
                ]
                scene.answers += self._together(asks)
        return scene.engine_s / len(scene.answers)

    def _fetches(self, costs: Costs) -> Costs:
        """Next turns on the server that has the conversation, and on the other one."""
        rows = []
        for chars, count in _SIZES:
            own = []
            for i in range(self._runs):
                first = i % 2
                here_s, _, _ = self._next_turn(first, first, chars, count)
                there_s, known, size = self._next_turn(first, 1 - first, chars, count)
                own.append((known, size, there_s - here_s))
            rows.append(tuple(map(statistics.fmean, zip(*own, strict=True))))
        (few, small, _), (many, large, _), (later, grown, _) = rows
        if not large:
            raise EngineError("calibration: no server fetched what the other one has")
        per_token = max(0.0, (large - small) / (many - few))
        base = max(0.0, small - per_token * few)
        turns_kept = round((grown - per_token * later) / base) if base else 1
        per_byte, overhead = line([r[1] for r in rows], [r[2] for r in rows])
        if per_byte <= 0 or overhead < 0:  # noise: the mean says more than the slope
            per_byte, overhead = 0.0, max(0.0, statistics.fmean(r[2] for r in rows))
        return replace(
            costs,
            fetch_overhead_s=overhead,
            fetch_bytes_per_s=1 / per_byte if per_byte > 0 else UNBOUNDED,
            kv_base_bytes=base,
            kv_token_bytes=per_token,
            kv_most_turns=min(_SIZES[-1][1], max(1, turns_kept)),
        )

    def _next_turn(self, at: int, then: int, chars: int, count: int) -> tuple[float, int, float]:
        """So many turns on one server and one more on another: the way of that one in seconds,
        tokens of the conversation before it, bytes fetched."""
        chat = self._chat(at, chars)
        for _ in range(count - 1):
            time.sleep(_STORED_S)
            self._next_turns([chat])
        time.sleep(_STORED_S)
        chat.at, known = then, chat.known
        with self._scene() as scene:
            scene.answers += self._next_turns([chat])
        return scene.way_s, known, scene.counted[_FETCHED]


def _times(table: Sequence[tuple[float, float]], factor: float) -> tuple[tuple[float, float], ...]:
    return tuple((x, factor * y) for x, y in table)


def line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Slope and start of the least squares line."""
    fit = statistics.linear_regression(xs, ys)
    return fit.slope, fit.intercept


def rising(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """The points with times that do not fall, as noise can make them; none at or below 0."""
    out: list[tuple[float, float]] = []
    most = 1e-6
    for x, y in sorted(points):
        most = max(most, y)
        if not out or x > out[-1][0]:
            out.append((float(x), most))
    return tuple(out)
