"""How many drafts of each request a step verifies.

Owns: the fixed threshold, the cost-table rule, both also across requests under a row budget. Knows
nothing of: target results, laws, models, whether to draft at all (`spec.gate`).

Every choice here is a stopping rule. Whether draft i + 1 goes in is decided from the confidences of
drafts up to i + 1, and a confidence depends on earlier drafts only. A choice that looked further
(say, the best of all counts) would depend on drafts that it then throws away, and the text would
not follow the target's law any more (docs/speculation.md). How long a block became is such a look
ahead, as a draft that is a stop token ends it; how long it was to be is not: that is `sizes`.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from deepdraft.errors import ConfigError
from deepdraft.spec.costs import Costs

THRESHOLD_PROFILES = {"4-gpu": 0.3, "8-gpu": 0.2}
"""Thresholds as published for the reference engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """How many drafts each request gets, and what that should yield.

    `expected_tokens` counts each request's certain token too. Row count of the step: one a request
    and one a draft.
    """

    num_drafts: tuple[int, ...]
    expected_tokens: float

    @property
    def num_rows(self) -> int:
        """Rows of the step."""
        return len(self.num_drafts) + sum(self.num_drafts)


class Schedule(Protocol):
    """A way to choose the number of drafts."""

    def allocate(
        self,
        confidences: Sequence[Sequence[float]],
        *,
        sizes: Sequence[int] | None = None,
        max_rows: int | None = None,
        load: float = 0.0,
    ) -> Allocation:
        """Chooses for every request of a step.

        `confidences[r][i]`: probability that draft i of request r is accepted if all before it
        were. A NaN or one outside [0, 1] ends that request's drafts. `sizes[r]`: drafts its block
        was to have, as known before any was made; None: as many as it has. `max_rows` bounds the
        rows of the whole step, and each request needs one whatever happens.
        """
        ...


class _Front:
    """The next draft of each request, best first; a confidence is read when its draft comes up.

    A request's confidence is never read beyond the first draft that is not taken.
    """

    def __init__(self, confidences: Sequence[Sequence[float]]) -> None:
        self.confidences = confidences
        self.taken = [0] * len(confidences)
        self.survivals = [1.0] * len(confidences)
        self.heads: list[tuple[float, int]] = []
        for request in range(len(confidences)):
            self._reveal(request)

    def _reveal(self, request: int) -> None:
        i = self.taken[request]
        if i < len(self.confidences[request]):
            confidence = float(self.confidences[request][i])
            if _usable(confidence):
                heapq.heappush(self.heads, (-self.survivals[request] * confidence, request))

    def take(self) -> float:
        """Takes the best draft; returns the probability that it stands."""
        value, request = heapq.heappop(self.heads)
        self.survivals[request] = -value
        self.taken[request] += 1
        self._reveal(request)
        return -value

    def take_each(self, room: float) -> float:
        """Takes the first draft of every request, likeliest first while there is room; returns how
        many of them should stand."""
        firsts, self.heads = sorted(self.heads), []
        for value, request in firsts[: int(min(room, len(firsts)))]:
            self.survivals[request] = -value
            self.taken[request] += 1
            self._reveal(request)
        return sum(s for s, n in zip(self.survivals, self.taken, strict=True) if n)

    def drop(self) -> None:
        """Ends the drafts of the request with the best draft."""
        heapq.heappop(self.heads)


def _usable(confidence: float) -> bool:
    return 0.0 <= confidence <= 1.0  # false for NaN


def _sizes(confidences: Sequence[Sequence[float]], sizes: Sequence[int] | None) -> Sequence[int]:
    if sizes is None:
        return [len(own) for own in confidences]
    assert all(len(own) <= n for own, n in zip(confidences, sizes, strict=True)), f"{sizes=}"
    return sizes


def _room(num_requests: int, max_rows: int | None) -> float:
    return math.inf if max_rows is None else max(0, max_rows - num_requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedSchedule:
    """Always the same number of drafts, as far as there are rows."""

    num_drafts: int

    def allocate(
        self,
        confidences: Sequence[Sequence[float]],
        *,
        sizes: Sequence[int] | None = None,
        max_rows: int | None = None,
        load: float = 0.0,
    ) -> Allocation:
        """In turn: every request's first draft, then every second one. See `Schedule`."""
        room = _room(len(confidences), max_rows)
        taken = [0] * len(confidences)
        survivals = [1.0] * len(confidences)
        expected = float(len(confidences))
        for i in range(self.num_drafts):
            for request, own in enumerate(confidences):
                if room > 0 and taken[request] == i < len(own) and _usable(float(own[i])):
                    survivals[request] *= float(own[i])
                    expected += survivals[request]
                    taken[request] += 1
                    room -= 1
        return Allocation(num_drafts=tuple(taken), expected_tokens=expected)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdSchedule:
    """Drafts go in while the running product of confidences is at least a threshold.

    In blocks of `relax_from` drafts or more the last `len(relaxed)` positions have the threshold
    times these factors. The first draft below its threshold ends the block, even if a later,
    relaxed threshold would let it pass. If rows are short, the likeliest drafts go in first.
    """

    threshold: float = THRESHOLD_PROFILES["4-gpu"]
    relaxed: tuple[float, ...] = (0.5, 0.25)
    relax_from: int = 3

    def __post_init__(self) -> None:
        if not 0.0 <= self.threshold <= 1.0:
            raise ConfigError(f"threshold must lie in [0, 1], got {self.threshold}")
        if not all(0.0 <= f <= 1.0 for f in self.relaxed):
            raise ConfigError(f"relaxed factors must lie in [0, 1], got {self.relaxed}")
        if self.relax_from < len(self.relaxed):
            raise ConfigError(
                f"relax_from must be at least {len(self.relaxed)}, the number of relaxed positions"
            )

    def thresholds(self, block_size: int) -> list[float]:
        """The threshold of each position of a block."""
        out = [self.threshold] * block_size
        if block_size >= self.relax_from:
            for i, factor in enumerate(self.relaxed, start=block_size - len(self.relaxed)):
                out[i] *= factor
        return out

    def allocate(
        self,
        confidences: Sequence[Sequence[float]],
        *,
        sizes: Sequence[int] | None = None,
        max_rows: int | None = None,
        load: float = 0.0,
    ) -> Allocation:
        """See `Schedule`."""
        room = _room(len(confidences), max_rows)
        limits = [self.thresholds(size) for size in _sizes(confidences, sizes)]
        front = _Front(confidences)
        expected = float(len(confidences))
        while front.heads and room > 0:
            value, request = front.heads[0]
            if -value >= limits[request][front.taken[request]]:
                expected += front.take()
                room -= 1
            else:
                front.drop()
        return Allocation(num_drafts=tuple(front.taken), expected_tokens=expected)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostSchedule:
    """Drafts go in while they are worth their time.

    A millisecond is worth `rate` tokens. Draft by draft, likeliest first, a draft goes in if the
    probability that it stands exceeds rate * (what its row adds to the step), or if it does so
    together with drafts expected behind it, as where a step's cost rises in stairs. Behind a draft
    the confidence is expected to be `means[i]` at position i, or to stay as it is without means.

    `rate` should be what the request or server achieves over time: that choice maximises tokens
    per millisecond in the long run. Without a rate, this step's own ratio of
    expected tokens to milliseconds stands in.
    """

    table: Costs
    means: tuple[float, ...] = ()

    def allocate(
        self,
        confidences: Sequence[Sequence[float]],
        *,
        sizes: Sequence[int] | None = None,
        max_rows: int | None = None,
        load: float = 0.0,
        rate: float | None = None,
        spent_ms: float = 0.0,
        means: Sequence[Sequence[float]] | None = None,
        explore: bool = False,
    ) -> Allocation:
        """See `Schedule`. `spent_ms`: time of the step already gone, such as for drafting.
        `means[r]`: those of request r; None: the schedule's own for all. `explore`: first drafts go
        in whatever they are worth, as what is not verified teaches nothing."""
        room = _room(len(confidences), max_rows)
        rows = len(confidences)
        sizes = _sizes(confidences, sizes)
        ahead = means if means is not None else [self.means] * rows
        front = _Front(confidences)
        expected = float(rows)
        if explore:
            expected += front.take_each(room)
            room -= sum(front.taken)
            rows += sum(front.taken)
        ms = self.table.step_ms(rows, load) if rows else 0.0
        while front.heads and room > 0:
            price = rate if rate is not None else expected / (spent_ms + ms)
            if not self._pays(front, sizes, ahead, rows, room, price, load):
                break
            expected += front.take()
            rows += 1
            room -= 1
            ms = self.table.step_ms(rows, load)
        return Allocation(num_drafts=tuple(front.taken), expected_tokens=expected)

    def _pays(
        self,
        front: _Front,
        sizes: Sequence[int],
        means: Sequence[Sequence[float]],
        rows: int,
        room: float,
        price: float,
        load: float,
    ) -> bool:
        """The best draft is worth its row, alone or with the best ones expected behind it."""
        base = self.table.step_ms(rows, load)
        heads = [(value, request, front.taken[request]) for value, request in front.heads]
        last = dict.fromkeys(range(len(front.taken)), 0.0)
        for value, request, _ in heads:
            before = front.survivals[request]
            last[request] = -value / before if before else 0.0
        gain = 0.0
        heapq.heapify(heads)
        while heads and room > 0:
            value, request, i = heapq.heappop(heads)
            gain -= value
            rows += 1
            room -= 1
            if gain > price * (self.table.step_ms(rows, load) - base):
                return True
            if i + 1 < sizes[request]:
                own = means[request]
                ahead = own[i + 1] if i + 1 < len(own) else last[request]
                heapq.heappush(heads, (value * ahead, request, i + 1))
        return False
