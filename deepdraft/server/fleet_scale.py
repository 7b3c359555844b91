"""How many replicas a fleet needs: a decision from their loads, again and again.

Owns: the rules, their state between two decisions, the class that Ray Serve's controller calls.
Knows nothing of: how replicas are started, drained and counted. Runs without Ray and torch.

Upwards the whole demand counts, so replicas that are still starting are not asked for twice.
Downwards goes one replica at a time, only where the rest would be well below `busy`, and never
while any replica starts or its load is not known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CALM = 0.75
"""One replica less must leave the load at this part of `busy`: no up and down by turns."""
STEP = 2
"""The number of replicas grows by this factor at most in one decision."""
SILENT_S = 15.0
"""A load that does not change its time for so long is not known."""
METRICS = ("running", "waiting", "wait_s")


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a fleet wants; times in seconds."""

    min_count: int
    max_count: int
    capacity: int
    """Answers that grow together in one replica."""
    busy: float = 0.7
    """Part of the capacity that is to be in use."""
    wait_s: float = 2.0
    """Prompts may wait so long for the work before them."""
    up_s: float = 10.0
    """Need for more must last so long."""
    down_s: float = 300.0
    """Need for less must last so long, and so long nothing may have changed."""


@dataclass(frozen=True)
class Load:
    """Of one replica: requests that run and wait, seconds of prompts ahead of a new one."""

    running: float
    waiting: float
    wait_s: float


@dataclass
class Memory:
    """What one decision leaves for the next: since when more or less is needed, the last change."""

    more_since: float | None = None
    less_since: float | None = None
    changed: float | None = None


def decide(rules: Rules, memory: Memory, now: float, target: int, loads: list[Load | None]) -> int:
    """The number of replicas from now on.

    `now`: seconds of any clock; one that goes back begins to wait anew. `target`: the number that
    is wanted so far; `loads`: one of each replica that runs, None where it is not known.
    """
    low, high = rules.min_count, rules.max_count
    if not low <= target <= high:
        return min(max(target, low), high)
    known = [load for load in loads if load is not None]
    sure = len(known) == len(loads) == target
    demand = sum(load.running + load.waiting for load in known)
    more = len(loads) - len(known) + math.ceil(demand / (rules.busy * rules.capacity))
    wait_s = sum(load.wait_s for load in known) / len(known) if known else 0.0
    if wait_s > rules.wait_s and sure:
        more = max(more, math.ceil(target * min(STEP, wait_s / rules.wait_s)))
    more = min(more, high, STEP * max(target, 1))
    less = max(math.ceil(demand / (CALM * rules.busy * rules.capacity)), low)

    memory.more_since = _since(memory.more_since, now) if more > target else None
    calm = sure and less < target and wait_s < rules.wait_s / 2
    memory.less_since = _since(memory.less_since, now) if calm else None
    if memory.more_since is not None and now - memory.more_since >= rules.up_s:
        memory.changed, memory.more_since = now, None
        return more
    changed = memory.changed = min(now if memory.changed is None else memory.changed, now)
    if memory.less_since is not None and now - max(memory.less_since, changed) >= rules.down_s:
        memory.changed = now
        return target - 1
    return target


def _since(since: float | None, now: float) -> float:
    return now if since is None else min(since, now)


class Policy:
    """`decide` as Ray Serve's controller calls it, in its own process, about twice a second."""

    def __init__(self, **rules: Any) -> None:
        self._rules = Rules(**rules)
        self._memory = Memory()
        self._heard: dict[Any, tuple[float, float]] = {}
        """Of each replica: its load's own time, and when that was first seen here."""

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """`context`: Ray Serve's AutoscalingContext."""
        now, found = float(context.current_time), context.raw_metrics or {}
        loads = [self._load(replica, found, now) for replica in context.running_replicas]
        self._heard = {r: t for r, t in self._heard.items() if r in context.running_replicas}
        target = int(context.target_num_replicas)
        return decide(self._rules, self._memory, now, target, loads), context.policy_state

    def _load(
        self, replica: Any, found: Mapping[str, Mapping[Any, Any]], now: float
    ) -> Load | None:
        series = [found.get(name, {}).get(replica) for name in METRICS]
        if not all(series):
            return None
        values = [float(points[-1].value) for points in series if points]
        # Only whether it moves: the clocks of two machines may differ.
        its_time = float(series[0][-1].timestamp)  # type: ignore[index]
        last, heard = self._heard.get(replica, (None, now))
        if its_time != last:
            heard = now
        self._heard[replica] = (its_time, heard)
        return Load(*values) if now - heard < SILENT_S else None
