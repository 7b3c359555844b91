"""How many replicas: hysteresis, cool-down, storms, loads that are not known, clocks that jump."""

import itertools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepdraft.server.fleet_scale import METRICS, SILENT_S, Load, Memory, Policy, Rules, decide

RULES = Rules(min_count=1, max_count=8, capacity=10, busy=0.5, wait_s=2, up_s=10, down_s=100)


class Crowd:
    """A fleet whose replicas take `start_s` to come; demand is shared evenly among those there."""

    def __init__(self, rules: Rules = RULES, count: int = 1, start_s: float = 30.0) -> None:
        self.rules, self.target, self.start_s = rules, count, start_s
        self.memory, self.now = Memory(), 0.0
        self.ready = [0.0] * count
        self.changes: list[tuple[float, int]] = []

    def run(self, seconds: float, demand: Callable[[float], float], wait_s: float = 0.0) -> "Crowd":
        until = self.now + seconds
        while self.now < until:
            there = [at for at in self.ready if at <= self.now]
            each = demand(self.now) / max(1, len(there))
            loads: list[Load | None] = [Load(each, 0, wait_s) for _ in there]
            new = decide(self.rules, self.memory, self.now, self.target, loads)
            if new != self.target:
                self.changes.append((self.now, new))
            self.ready = self.ready[:new]
            self.ready += [self.now + self.start_s] * (new - len(self.ready))
            self.target = new
            self.now += 1.0
        return self


def test_a_need_that_lasts_is_met_at_once_and_once() -> None:
    """35 requests of 5 a replica need 7; while they start nothing more is asked for."""
    crowd = Crowd(count=4).run(400, lambda now: 35)
    assert crowd.changes == [(10.0, 7)]


def test_growth_is_bounded_by_a_factor() -> None:
    crowd = Crowd(count=1).run(100, lambda now: 1000)
    assert [n for _, n in crowd.changes] == [2, 4, 8]


def test_a_short_storm_changes_nothing() -> None:
    crowd = Crowd(count=2).run(400, lambda now: 80 if now % 60 < 9 else 8)
    assert crowd.changes == []


def test_down_goes_one_at_a_time_and_stays_up_until_it_is_calm() -> None:
    crowd = Crowd(count=8).run(2000, lambda now: 4)
    assert [n for _, n in crowd.changes] == [7, 6, 5, 4, 3, 2]
    times = [at for at, _ in crowd.changes]
    assert times[0] >= 100 and all(b - a >= 100 for a, b in itertools.pairwise(times))


@pytest.mark.parametrize("demand", range(1, 41, 3))
def test_no_demand_makes_it_go_up_and_down_by_turns(demand: int) -> None:
    """A steady demand, from above and from below: it settles, and stays."""
    for count in (1, 8):
        crowd = Crowd(count=count).run(2000, lambda now: demand)
        settled = len(crowd.changes)
        assert crowd.run(2000, lambda now: demand).changes[settled:] == []
        directions = {
            b > a
            for a, b in zip(
                [count, *(n for _, n in crowd.changes)], [n for _, n in crowd.changes], strict=False
            )
        }
        assert len(directions) <= 1
        assert crowd.target * 5 >= min(demand, 40)


def test_waves_within_the_hysteresis_do_nothing() -> None:
    crowd = Crowd(count=4).run(3000, lambda now: 19 if now % 240 < 120 else 13)
    assert crowd.changes == []


def test_not_down_while_replicas_start_or_shortly_after_a_change() -> None:
    crowd = Crowd(count=1, start_s=300).run(60, lambda now: 20)
    assert crowd.target == 2 or crowd.target == 4
    changes = len(crowd.changes)
    crowd.run(200, lambda now: 0)
    assert len(crowd.changes) == changes, "they have not come yet"


def test_prompts_that_wait_ask_for_more() -> None:
    """Few requests, long prompts: seconds of waiting count, within the same bounds."""
    crowd = Crowd(count=2, start_s=1000).run(100, lambda now: 2, wait_s=30)
    assert crowd.target == 4, "not again and again while they start"
    assert Crowd(count=2).run(100, lambda now: 2, wait_s=1.9).target == 2
    assert Crowd(count=2).run(300, lambda now: 2, wait_s=1.5).target == 2, "not calm enough"


def test_what_is_not_known_is_neither_idle_nor_a_reason_to_grow() -> None:
    memory = Memory()
    for now in range(0, 1000, 5):
        assert decide(RULES, memory, float(now), 3, [Load(0, 0, 0), Load(0, 0, 0), None]) == 3
        assert decide(RULES, Memory(), float(now), 3, []) == 3
    busy: list[Load | None] = [Load(9, 9, 0), Load(9, 9, 0), None]
    memory = Memory()
    found = [decide(RULES, memory, float(now), 3, busy) for now in range(0, 20, 2)]
    assert 6 in found, "the others are too busy all the same"


def test_bounds_hold_at_once() -> None:
    for target, wanted in ((0, 1), (12, 8)):
        assert decide(RULES, Memory(), 0.0, target, []) == wanted
    none = Rules(min_count=3, max_count=3, capacity=10)
    assert Crowd(none, count=3).run(2000, lambda now: 1000).changes == []
    assert Crowd(none, count=3).run(2000, lambda now: 0).changes == []


@given(st.integers(0, 10**6))
def test_random_lives(seed: int) -> None:
    """Whatever comes, clocks that jump included: within bounds, at most doubled, one down."""
    rng = random.Random(seed)
    memory, now, target = Memory(), 1000.0, rng.randint(1, 8)
    last_down = None
    for _ in range(200):
        jump = rng.random() < 0.02
        now += rng.choice([-500.0, 5000.0]) if jump else rng.choice([0.5, 3.0, 20.0])
        if jump:
            last_down = None
        there = rng.randint(0, target + 1)
        busy = rng.choice([0, 3, 9, 50])
        loads = [
            None if rng.random() < 0.1 else Load(busy, rng.randint(0, 3), rng.choice([0, 1, 9]))
            for _ in range(there)
        ]
        new = decide(RULES, memory, now, target, loads)
        assert 1 <= new <= 8 and target - 1 <= new <= 2 * target
        if new < target:
            assert None not in loads and there == target
            assert last_down is None or now - last_down >= RULES.down_s
            last_down = now
        target = new


# ---- as Ray calls it -----------------------------------------------------------------------


def context(now: float, target: int, values: dict[str, tuple[float, Load]]) -> Any:
    point = SimpleNamespace
    raw = {
        name: {
            r: [point(timestamp=at, value=getattr(load, name))] for r, (at, load) in values.items()
        }
        for name in METRICS
    }
    return SimpleNamespace(
        current_time=now,
        raw_metrics=raw,
        running_replicas=[*values, "without a word"],
        target_num_replicas=target,
        policy_state={"kept": 1},
    )


def policy() -> Policy:
    return Policy(min_count=1, max_count=8, capacity=10, busy=0.5, up_s=10.0)


def test_the_policy_reads_what_ray_hands_it() -> None:
    made = policy()
    for step in range(30):
        now = 1e9 + step
        its = 5.0 + step  # another clock altogether
        found, state = made(context(now, 3, {"a": (its, Load(9, 9, 0)), "b": (its, Load(9, 0, 0))}))
        assert state == {"kept": 1}
        assert found == (3 if step % 11 < 10 else 6), step
        if found == 6:
            break
    else:
        raise AssertionError("it never grew")


def test_a_load_that_stands_still_is_not_known() -> None:
    made = policy()
    busy = Load(50, 50, 0)
    grew = []
    for step in range(100):
        found, _ = made(context(1e9 + step, 3, {"a": (7.0, busy), "b": (7.0, busy)}))
        grew.append(found)
    assert 6 in grew[: int(SILENT_S)] and set(grew[int(SILENT_S) + 1 :]) == {3}


def test_the_policy_without_metrics() -> None:
    made = policy()
    for metrics in (None, {}, {"running": {}}):
        some = context(1e9, 2, {})
        some.raw_metrics = metrics
        assert made(some)[0] == 2
