"""What steps and drafts cost, corrected by what they take while serving.

Owns: the corrections and when a plain step is due to compare with. Knows nothing of: clocks,
requests, tensors.

The tables of the start are few short runs on a machine that may have been busy: one row may be off
by a half, and a row more may look free. A choice needs ratios only, those of drafts and of steps
with drafts to plain steps. So every time is divided by what the table says of it and by the
machine's speed lately, which all kinds of steps share, and each kind keeps the median of its last
such quotients: a slow moment of the machine changes no ratio, a preempted step no median.
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from deepdraft.spec.costs import Costs, CostTable, StepCosts

WINDOW = 32
"""Steps of a kind whose median counts."""
SURE = 8
"""Steps of a kind after which its median counts in full."""
SPEED = 0.2
"""How much a step tells of the machine's speed now."""
MOST_NEWS = 0.5
"""The speed takes no step for more than exp(0.5) times slower or faster than it was."""
FARTHEST = 20.0
"""No time counts as more than exp(20) times the table's, or less."""
FEW = 3
"""Steps of a kind after which it speaks for steps of more or fewer drafts."""
NEAR = 4
"""Steps within which a plain and a drafted one are compared."""
REFRESH = 8
"""Steps between two readings of the medians."""
FIRST_CONTROL, LAST_CONTROL = 4, 64
"""Drafted steps before a plain one is due: at first, and once plain steps are known. One in 64
costs 1 % where drafts give 2.8 times plain decoding, less where they give less."""


@dataclass(slots=True)
class _Kind:
    """Steps, or drafts, of one size: log quotients of time, table and speed."""

    recent: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    value: float = 0.0
    """Their median."""

    def add(self, log_quotient: float) -> None:
        self.recent.append(log_quotient)
        self.value = median(self.recent)

    @property
    def weight(self) -> float:
        return min(1.0, len(self.recent) / SURE)


@dataclass(frozen=True, slots=True)
class _Table:
    """Steps as `LiveCosts` knows them now."""

    live: "LiveCosts"
    start: CostTable

    def step_ms(self, num_rows: int, load: float = 0.0) -> float:
        return self.start.step_ms(num_rows, load) * self.live._step_factor(num_rows, load)


class LiveCosts:
    """Costs of the start, and what became known of them. Without `saw_step` they stay as they are.

    Milliseconds are those of the machine as it was at the start, on the whole: only ratios are
    corrected. A `load` is the number of sequences of a step.
    """

    def __init__(self, start: StepCosts) -> None:
        self.start = start
        self.table: Costs = _Table(self, start.verify)
        self._sampled = start.sampled()
        self.sampled: Costs = _Table(self, self._sampled)
        """With the choice at a temperature in it."""
        self._speed: float | None = None
        self._steps: dict[int, dict[float, _Kind]] = {}
        """By size of the load, then by drafts a sequence."""
        self._drafts: dict[tuple[int, int], _Kind] = {}
        """By size of the load and drafts of a block."""
        self._since_plain: dict[int, int] = {}
        self._known: dict[tuple[str, float, float], float] = {}
        self._fresh = 0
        self._clock = 0
        self._last = {True: 0, False: 0}
        """The last plain and the last drafted step."""

    def draft_ms(self, num_sequences: int, size: int, block_size: int) -> float:
        """A block of `size` drafts each, where whole blocks have `block_size`."""
        key = ("draft", num_sequences, size)
        if key not in self._known:
            kind = self._drafts.get((_size(num_sequences), size), _Kind())
            usual = _usual(self._steps.get(_size(num_sequences), {}))
            self._known[key] = math.exp(usual + kind.weight * (kind.value - usual))
        return self.start.draft_ms(num_sequences, size, block_size) * self._known[key]

    def saw_step(self, num_rows: int, load: int, ms: float, *, sampled: bool = False) -> None:
        """A step without the time of its drafts: how long it took."""
        table = self._sampled if sampled else self.start.verify
        news = _log_quotient(ms, table.step_ms(num_rows, load))
        if news is None:
            return
        plain = num_rows <= load
        self._since_plain[_size(load)] = 0 if plain else self._since_plain.get(_size(load), 0) + 1
        kinds = self._steps.setdefault(_size(load), {})
        kind = kinds.setdefault(_drafts_each(num_rows, load), _Kind())
        if self._speed is None:
            self._speed = news
        self._clock += 1
        self._last[plain] = self._clock
        # A long row of steps of one sort says nothing of the other: what changes is the machine.
        if kind.weight < 1.0 or self._clock - self._last[not plain] <= NEAR:
            kind.add(news - self._speed)
        # A kind that is little known says little of the machine.
        change = kind.weight * (news - self._speed - kind.value)
        self._speed += SPEED * min(MOST_NEWS, max(-MOST_NEWS, change))
        self._fresh += 1
        if self._fresh >= REFRESH:
            self._fresh = 0
            self._known.clear()

    def saw_draft(
        self, num_sequences: int, size: int, block_size: int, ms: float, *, num_sampled: int = 0
    ) -> None:
        """Blocks of drafts, `num_sampled` of all of them at a temperature: how long they took."""
        told = self.start.draft_ms(num_sequences, size, block_size)
        news = _log_quotient(ms, told + num_sampled * self.start.sampled_draft)
        if news is None or self._speed is None:
            return
        kind = self._drafts.setdefault((_size(num_sequences), size), _Kind())
        if kind.weight < 1.0 or self._clock - self._last[True] <= NEAR:
            kind.add(news - self._speed)

    def wants_plain(self, load: int) -> bool:
        """A plain step is due, to know what drafted ones are to be compared with."""
        plain = self._steps.get(_size(load), {}).get(0.0)
        known = len(plain.recent) if plain else 0
        due = min(LAST_CONTROL, FIRST_CONTROL * (1 + known))
        return self._since_plain.get(_size(load), 0) >= due

    # ---- inside ----------------------------------------------------------------------------

    def _step_factor(self, num_rows: int, load: float) -> float:
        key = ("step", num_rows, load)
        if key not in self._known:
            self._known[key] = math.exp(self._step_log(num_rows, load))
        return self._known[key]

    def _step_log(self, num_rows: int, load: float) -> float:
        """From steps of as many drafts as far as they are known, and from those of more and fewer:
        between a plain step and one of five drafts, one of two is taken to lie on their line."""
        kinds = self._steps.get(_size(load), {})
        wanted = _drafts_each(num_rows, load)
        own = kinds.get(wanted)
        known = sorted(
            (drafts, kind.value)
            for drafts, kind in kinds.items()
            if len(kind.recent) >= FEW and drafts != wanted
        )
        others = _on_line(known, wanted) if known else _usual(kinds)
        return others if own is None else others + own.weight * (own.value - others)


def _usual(kinds: Mapping[float, _Kind]) -> float:
    """What is taken of steps that nothing is known of: as plain ones, or as all."""
    plain = kinds.get(0.0)
    if plain is not None and len(plain.recent) >= FEW:
        return plain.value
    weights = sum(kind.weight for kind in kinds.values())
    return sum(kind.weight * kind.value for kind in kinds.values()) / (weights or 1.0)


def _on_line(points: Sequence[tuple[float, float]], x: float) -> float:
    """The value at x of the line between its neighbours; the last one's outside."""
    below = [point for point in points if point[0] <= x] or points[:1]
    above = [point for point in points if point[0] >= x] or points[-1:]
    (x0, y0), (x1, y1) = below[-1], above[0]
    return y0 if x1 == x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def _size(load: float) -> int:
    """Loads that count as one: 1, 2, 3, 4 and 5, 6 to 8, 9 to 11, .. sequences."""
    return round(2.0 * math.log2(max(1.0, load)))


def _drafts_each(num_rows: int, load: float) -> float:
    """Drafts a sequence in steps of a quarter; 0 for a plain step only."""
    if num_rows <= load:
        return 0.0
    return max(0.25, round(4.0 * (num_rows - load) / max(1.0, load)) / 4.0)


def _log_quotient(ms: float, told: float) -> float | None:
    """None for what is no time. A broken clock's times are brought near enough to stay numbers."""
    if not (0.0 < ms < math.inf and 0.0 < told < math.inf):
        return None
    return min(FARTHEST, max(-FARTHEST, math.log(ms) - math.log(told)))
