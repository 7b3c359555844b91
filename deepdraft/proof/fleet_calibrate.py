"""Measures what a request costs on this machine: the table a simulated fleet runs on.

Owns: which requests are sent for that, and how their times become a `Costs`.
Knows nothing of: events of a simulation. The requests are a trace's own sort of text.
"""

import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from deepdraft.errors import EngineError
from deepdraft.proof.fleet_costs import UNBOUNDED, Costs
from deepdraft.proof.fleet_served import Started
from deepdraft.proof.fleet_sim import FleetShape, SimConversation, SimTurn, simulate
from deepdraft.proof.serve_client import Answer, Ask, Target
from deepdraft.proof.suite import document

_CHARS = (1, 150, 1200, 2400, 4800)
_QUESTION = "\nWhat does the text say about the old map?"
_STREAMS = (1, 2, 4, 8)
_LONG, _AHEAD_S = 500, 1.0
"""Tokens of a stream that a prompt is read beside, and its head start."""
Say = Callable[[str], None]


class Calibration:
    """Requests to one or two idle servers. Raises EngineError where one is not answered."""

    def __init__(self, fleet: Started, targets: Sequence[Target], tokens: int, runs: int) -> None:
        """`tokens`: of an answer of the trace; `runs`: of each measurement."""
        self._fleet, self._targets, self._runs = fleet, targets, runs
        self._tokens = tokens
        self._number = random.SystemRandom().randrange(1 << 40)

    def _text(self, chars: int) -> str:
        self._number += 1
        return document(chars, self._number) + _QUESTION

    def _ask(self, at: int, turns: tuple[str, ...], tokens: int, session: str = "") -> Answer:
        answer = self._targets[at].ask(Ask(turns, tokens, session=session or None))
        if answer.fault is not None:
            raise EngineError(f"calibration: {answer.fault}: {answer.message}")
        return answer

    def measure(self, say: Say) -> Costs:
        """The table; without two servers nothing of fetches and of shared cores."""
        for at in range(len(self._targets)):
            self._ask(at, (self._text(600),), self._tokens)
        say("costs: prompts")
        chars_per_token, turn_tokens, request_s, prefill, side_request = self._prompts()
        say("costs: rounds of decoding")
        decode, side_token = self._rounds()
        costs = Costs(
            name=self._targets[0].model,
            request_s=request_s,
            prefill_s=prefill,
            decode_s=decode,
            side_request_s=side_request,
            side_token_s=side_token,
            chars_per_token=chars_per_token,
            turn_tokens=turn_tokens,
        )
        if len(self._targets) > 1:
            say("costs: fetches, cores")
            costs = self._fetches(replace(costs, capacity=(1.0, self._both())))
        say("costs: parts of prompts")
        return self._parts(costs)

    def _prompts(self) -> tuple[float, float, float, tuple[tuple[float, float], ...], float]:
        """Prompts of several lengths, one token of answer each, one at a time."""
        points = []
        busy = wall = 0.0
        for chars in _CHARS:
            done = []
            for _ in range(self._runs):
                text = self._text(chars)
                cpu, begin = self._cpu_s(), time.perf_counter()
                answer = self._ask(0, (text,), 1)
                wall += time.perf_counter() - begin
                busy += self._cpu_s() - cpu
                done.append((len(text), answer.prompt_tokens, answer.first_s or answer.end_s))
            points.append(tuple(map(statistics.median, zip(*done, strict=True))))
        chars_each, tokens_each, seconds = zip(*points, strict=True)
        per_char, around = line(chars_each, tokens_each)
        # Up to the shortest prompt the part a token goes as in the next stretch.
        slope = (seconds[1] - seconds[0]) / (tokens_each[1] - tokens_each[0])
        request_s = max(0.0, seconds[0] - slope * tokens_each[0])
        table = rising([(n, s - request_s) for n, s in zip(tokens_each, seconds, strict=True)])
        beside = max(0.0, busy - wall) / (self._runs * len(_CHARS))
        return 1 / per_char, max(0.0, around), request_s, table, beside

    def _rounds(self) -> tuple[tuple[tuple[float, float], ...], float]:
        """Streams that begin together on prompts that are in the cache."""
        points, beside = [], []
        for streams in _STREAMS:
            took = []
            for _ in range(self._runs):
                texts = [self._text(1200) for _ in range(streams)]
                for text in texts:
                    self._ask(0, (text,), 1)
                cpu, begin = self._cpu_s(), time.perf_counter()
                answers = self._together([(0, text) for text in texts])
                wall = time.perf_counter() - begin
                if streams == 1:
                    beside.append((self._cpu_s() - cpu - wall) / answers[0].tokens)
                span = max(a.end_s for a in answers) - min(a.first_s for a in answers)
                took.append(span / (max(a.tokens for a in answers) - 1))
            points.append((float(streams), statistics.median(took)))
        return rising(points), max(0.0, statistics.median(beside))

    def _together(self, asks: Sequence[tuple[int, str]]) -> list[Answer]:
        answers: list[Answer | None] = [None] * len(asks)

        def one(i: int) -> None:
            at, text = asks[i]
            answers[i] = self._targets[at].ask(Ask((text,), max(16, self._tokens)))

        threads = [threading.Thread(target=one, args=(i,)) for i in range(len(asks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        kept = [a for a in answers if a is not None and a.fault is None and a.tokens > 1]
        if len(kept) < len(asks):
            raise EngineError("calibration: streams at a time were not all answered")
        return kept

    def _parts(self, costs: Costs) -> Costs:
        """With the cost of a short part: a prompt is read beside a stream, and the cost is the one
        with which the simulation takes as long."""
        took, sizes = [], []
        for _ in range(self._runs):
            stream = threading.Thread(
                target=self._targets[0].ask, args=(Ask((self._text(150),), _LONG),)
            )
            stream.start()
            time.sleep(_AHEAD_S)
            answer = self._ask(0, (self._text(2400),), 1)
            took.append(answer.first_s or answer.end_s)
            sizes.append(answer.prompt_tokens)
            stream.join()
        seconds, tokens = statistics.median(took), round(statistics.median(sizes))
        trace = [
            SimConversation(0.0, (SimTurn(60, _LONG),)),
            SimConversation(_AHEAD_S, (SimTurn(tokens, 1),)),
        ]

        def simulated(part_s: float) -> float:
            done = simulate(trace, replace(costs, part_s=part_s), FleetShape()).turns
            return next(t.first_s for t in done if t.prompt == tokens)

        low, high = 0.0, 0.2
        for _ in range(20):
            middle = (low + high) / 2
            low, high = (middle, high) if simulated(middle) < seconds else (low, middle)
        return replace(costs, part_s=low)

    def _both(self) -> float:
        """What two servers do at once, as a multiple of one."""
        shares = []
        for _ in range(self._runs):
            texts = [self._text(2400) for _ in range(3)]
            begin = time.perf_counter()
            self._together([(0, texts[0])])
            alone = time.perf_counter() - begin
            begin = time.perf_counter()
            self._together([(0, texts[1]), (1, texts[2])])
            shares.append(2 * alone / (time.perf_counter() - begin))
        return min(2.0, max(1.0, statistics.median(shares)))

    def _fetches(self, costs: Costs) -> Costs:
        """Second turns on the server that has the first and on the other: with what a start from a
        stored conversation costs, a fetch, the bytes of a conversation, the tokens computed
        again."""
        points, gaps, resumes = [], [], []
        for chars in (_CHARS[1], _CHARS[-1]):
            rows = []
            for i in range(self._runs):
                first, size, known = i % 2, 0.0, 0
                seconds = []
                for second in (first, 1 - first):
                    self._number += 1
                    session = f"calibrate-{self._number}"
                    text = self._text(chars)
                    one = self._ask(first, (text,), self._tokens, session)
                    time.sleep(0.5)  # what is stored is hashed and claimed beside the answer
                    before = self._fleet.counters()["deepdraft_kv_fetch_bytes_total"]
                    two = self._ask(second, (text, one.text, "And then?"), 1, session)
                    seconds.append(two.first_s or two.end_s)
                    size = self._fleet.counters()["deepdraft_kv_fetch_bytes_total"] - before
                    known = one.prompt_tokens + one.tokens
                    gaps.append(known - two.cached_tokens)
                    if second == first:
                        new = costs.prefill(two.prompt_tokens) - costs.prefill(two.cached_tokens)
                        resumes.append(seconds[-1] - costs.request_s - new)
                if size:
                    rows.append((known, size, seconds[1] - seconds[0]))
            if rows:
                points.append(tuple(map(statistics.median, zip(*rows, strict=True))))
        costs = replace(
            costs,
            gap_tokens=max(0, round(statistics.fmean(gaps))),
            resume_s=max(0.0, statistics.median(resumes)),
        )
        if len(points) < 2:
            return costs
        tokens, sizes, seconds = zip(*points, strict=True)
        per_token, base = line(tokens, sizes)
        per_byte, overhead = line(sizes, seconds)
        if per_byte <= 0 or overhead < 0:  # noise: the mean says more than the slope
            per_byte, overhead = 0.0, max(0.0, statistics.fmean(seconds))
        return replace(
            costs,
            fetch_overhead_s=overhead,
            fetch_bytes_per_s=1 / per_byte if per_byte > 0 else UNBOUNDED,
            kv_base_bytes=max(0.0, base),
            kv_token_bytes=max(0.0, per_token),
        )

    def _cpu_s(self) -> float:
        return self._fleet.cpu_s() + time.process_time()


def line(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float]:
    """Slope and start of the least squares line."""
    fit = statistics.linear_regression(xs, ys)
    return fit.slope, fit.intercept


def rising(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """The points with times that do not fall, as noise can make them; none at or below 0."""
    out, most = [], 1e-6
    for x, y in points:
        most = max(most, y)
        out.append((float(x), most))
    return tuple(out)
