"""Schedules: what they choose, that they never look ahead, and what they are worth."""

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, overload

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepdraft.errors import ConfigError
from deepdraft.proof import oracles
from deepdraft.proof.failed import Failed
from deepdraft.spec.costs import CostTable
from deepdraft.spec.gate import DraftGate
from deepdraft.spec.protocol import Dice, Proposal
from deepdraft.spec.schedule import (
    CostSchedule,
    FixedSchedule,
    Schedule,
    ThresholdSchedule,
)
from deepdraft.spec.verify import verify_block, verify_token

LINEAR = CostTable(rows=(1, 6), ms=((10.0, 15.0),))
STAIRS = CostTable(rows=(1, 2, 4, 8, 16), ms=((10.0, 11.0, 13.0, 15.0, 30.0),), padded=True)
SCHEDULES: list[Schedule] = [
    FixedSchedule(num_drafts=3),
    ThresholdSchedule(),
    CostSchedule(table=LINEAR),
    CostSchedule(table=STAIRS, means=(0.8, 0.7, 0.6, 0.6, 0.5)),
]


def one(schedule: Schedule, confidences: Sequence[float], **options: Any) -> int:
    return schedule.allocate([confidences], **options).num_drafts[0]


# The fixed threshold


def test_thresholds_relax_at_the_end_of_a_block() -> None:
    schedule = ThresholdSchedule()
    assert schedule.thresholds(5) == [0.3, 0.3, 0.3, 0.15, 0.075]
    assert schedule.thresholds(3) == [0.3, 0.15, 0.075]
    assert schedule.thresholds(2) == [0.3, 0.3]
    assert schedule.thresholds(0) == []
    assert ThresholdSchedule(threshold=0.2).thresholds(4) == [0.2, 0.2, 0.1, 0.05]


@pytest.mark.parametrize(
    ("confidences", "want"),
    [
        ((1.0, 1.0, 1.0, 1.0, 1.0), 5),
        ((0.3, 1.0, 1.0, 1.0, 1.0), 5),
        ((0.29, 1.0, 1.0, 1.0, 1.0), 0),
        ((0.9, 0.5, 0.5, 0.9, 0.9), 2),  # 0.225 < 0.3; the relaxed fourth would have passed
        ((0.9, 0.9, 0.5, 0.4, 0.5), 5),  # 0.81 0.405 0.162 0.081
        ((0.9, 0.9, 0.5, 0.3, 0.9), 3),  # 0.1215 < 0.15
        ((0.9, math.nan, 0.9, 0.9, 0.9), 1),
        ((0.9, 1.5, 0.9, 0.9, 0.9), 1),
        ((-0.1, 0.9), 0),
        ((0.5, 0.5), 1),  # no relaxation in a block of two
        ((), 0),
    ],
)
def test_threshold_on_the_running_product(confidences: tuple[float, ...], want: int) -> None:
    assert one(ThresholdSchedule(), confidences) == want


def test_thresholds_are_checked() -> None:
    for bad in ({"threshold": 1.5}, {"threshold": math.nan}, {"relaxed": (2.0,)}):
        with pytest.raises(ConfigError, match="must lie in"):
            ThresholdSchedule(**bad)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="relax_from"):
        ThresholdSchedule(relax_from=1)


# Budgets


def test_rows_go_to_the_likeliest_drafts() -> None:
    confidences = [(0.9, 0.9, 0.9), (0.99, 0.99, 0.99), (0.5, 0.5, 0.5)]
    schedule = ThresholdSchedule(threshold=0.0)
    assert schedule.allocate(confidences, max_rows=3 + 4).num_drafts == (1, 3, 0)
    assert schedule.allocate(confidences, max_rows=3 + 7).num_drafts == (3, 3, 1)
    got = schedule.allocate(confidences, max_rows=3 + 5)
    assert got.num_drafts == (2, 3, 0)
    assert got.num_rows == 8
    survivals = 0.9 + 0.81 + 0.99 + 0.99**2 + 0.99**3
    assert got.expected_tokens == pytest.approx(3 + survivals)


def test_fixed_counts_go_round() -> None:
    schedule = FixedSchedule(num_drafts=2)
    full = [(0.5, 0.5, 0.5)] * 3
    assert schedule.allocate(full).num_drafts == (2, 2, 2)
    assert schedule.allocate(full, max_rows=3 + 4).num_drafts == (2, 1, 1)
    got = schedule.allocate([(0.5, 0.5), (), (0.5, math.nan, 0.5)])
    assert got.num_drafts == (2, 0, 1)
    assert got.expected_tokens == pytest.approx(3 + 0.75 + 0.5)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_room_and_no_requests(schedule: Schedule) -> None:
    assert schedule.allocate([(1.0, 1.0)] * 4, max_rows=4).num_drafts == (0, 0, 0, 0)
    assert schedule.allocate([(1.0, 1.0)] * 4, max_rows=2).num_drafts == (0, 0, 0, 0)
    assert schedule.allocate([]).num_drafts == ()
    assert schedule.allocate([(), ()]) == FixedSchedule(num_drafts=0).allocate([(), ()])


# The cost table


def test_a_draft_goes_in_if_it_is_worth_its_row() -> None:
    schedule = CostSchedule(table=LINEAR)  # a row costs 1 ms
    confidences = (0.9, 0.8, 0.5, 0.5, 0.5)  # survivals 0.9 0.72 0.36 0.18 0.09
    for rate, want in ((0.05, 5), (0.1, 4), (0.2, 3), (0.5, 2), (0.8, 1), (0.95, 0)):
        assert one(schedule, confidences, rate=rate) == want
    assert one(schedule, confidences, rate=0.899) == 1
    assert one(schedule, confidences, rate=0.901) == 0
    # Without a rate: 1 / 10, then 1.9 / 11, 2.62 / 12, 2.98 / 13, 3.16 / 14; 0.09 < 3.16 / 14.
    assert one(schedule, confidences) == 3
    # Time already gone makes a millisecond worth less.
    assert one(schedule, confidences, spent_ms=30.0) == 5


def test_zero_drafts_are_a_choice() -> None:
    dear = CostTable(rows=(1, 2), ms=((10.0, 20.0),))
    assert one(CostSchedule(table=dear), (0.9, 0.9)) == 0
    assert one(CostSchedule(table=LINEAR), (0.01, 1.0, 1.0)) == 0


def test_stairs_are_climbed_whole_or_not_at_all() -> None:
    table = CostTable(rows=(1, 4, 8), ms=((10.0, 12.0, 20.0),), padded=True)
    schedule = CostSchedule(table=table)
    # The first row costs 2 ms: not worth it alone (0.5 at 0.3), but with two more behind it.
    assert one(schedule, (0.5, 0.9, 0.9, 0.9, 0.9), rate=0.3) == 3
    assert one(CostSchedule(table=table, means=(0.5, 0.1, 0.1)), (0.5, 0.9, 0.9), rate=0.3) == 0
    # Rows that are paid for are used, however weak the drafts.
    assert one(schedule, (0.9, 0.1, 0.1, 0.1), rate=0.3) == 3
    # No more rows than the largest count.
    assert one(schedule, (1.0,) * 20, rate=0.001) == 7


def test_load_moves_the_choice() -> None:
    table = CostTable(rows=(1, 6), loads=(0.0, 100.0), ms=((10.0, 10.5), (10.0, 60.0)))
    schedule = CostSchedule(table=table)
    assert one(schedule, (0.7,) * 5, load=0.0) == 5
    assert one(schedule, (0.7,) * 5, load=100.0) == 0
    assert 0 < one(schedule, (0.7,) * 5, load=10.0) < 5


@settings(max_examples=60, deadline=None)
@given(
    confidences=st.lists(st.lists(st.floats(0.01, 0.99), max_size=4), min_size=1, max_size=3),
    rate=st.floats(0.01, 1.0),
    extra=st.integers(0, 8),
)
def test_joint_choice_is_the_best_of_all(
    confidences: list[list[float]], rate: float, extra: int
) -> None:
    """With a steady price of rows the draft-by-draft choice has the best value of all choices."""
    max_rows = len(confidences) + extra

    def value(counts: Sequence[int]) -> float:
        survivals = [np.cumprod(own[:n]).sum() for own, n in zip(confidences, counts, strict=True)]
        return sum(survivals) - rate * LINEAR.step_ms(len(counts) + sum(counts))

    got = CostSchedule(table=LINEAR).allocate(confidences, max_rows=max_rows, rate=rate)
    choices = itertools.product(*(range(len(own) + 1) for own in confidences))
    best = max(value(counts) for counts in choices if sum(counts) <= extra)
    assert value(got.num_drafts) == pytest.approx(best)


# Never a look ahead


class Watched(Sequence[float]):
    """Confidences that note how far they were read."""

    def __init__(self, values: Sequence[float]) -> None:
        self.values = values
        self.furthest = -1

    def __len__(self) -> int:
        return len(self.values)

    @overload
    def __getitem__(self, i: int) -> float: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[float]: ...
    def __getitem__(self, i: int | slice) -> Any:
        assert isinstance(i, int)
        self.furthest = max(self.furthest, i)
        return self.values[i]


@pytest.mark.parametrize("schedule", SCHEDULES)
@settings(max_examples=60, deadline=None)
@given(
    confidences=st.lists(st.lists(st.floats(0, 1), max_size=5), min_size=1, max_size=4),
    extra=st.integers(0, 12),
)
def test_nothing_is_read_behind_the_first_draft_left_out(
    schedule: Schedule, confidences: list[list[float]], extra: int
) -> None:
    watched = [Watched(own) for own in confidences]
    got = schedule.allocate(watched, max_rows=len(watched) + extra)
    for own, count in zip(watched, got.num_drafts, strict=True):
        assert own.furthest <= count
    assert sum(got.num_drafts) <= extra


def confidence(prefix: tuple[int, ...]) -> float:
    """A confidence of the draft after a prefix: far apart for different prefixes."""
    return 0.95 if sum(prefix) % 2 == 0 else 0.2


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("rule", [verify_token, verify_block])
def test_scheduled_blocks_keep_the_law(schedule: Schedule, rule: oracles.LawRule) -> None:
    seen = set()

    def keep(ids: tuple[int, ...]) -> int:
        count = one(schedule, [confidence(ids[:i]) for i in range(len(ids))])
        seen.add(count)
        return count

    for case in oracles.cases(2):
        oracles.check_output_law("scheduled", rule, case, 4, keep)
    assert len(seen) > 1 or isinstance(schedule, FixedSchedule)


@pytest.mark.parametrize("rule", [verify_token, verify_block])
def test_the_best_of_all_counts_would_not_keep_the_law(rule: oracles.LawRule) -> None:
    # Where a row's price never falls, the best of all counts is where a first draft does not pay.
    # Stairs are different: whether the last rows are filled decides about the first ones.
    table = CostTable(rows=(1, 2, 5), ms=((10.0, 10.5, 18.0),), padded=True)

    def keep(ids: tuple[int, ...]) -> int:
        survivals = np.cumprod([confidence(ids[:i]) for i in range(len(ids))])
        ratios = [(1 + survivals[:n].sum()) / table.step_ms(1 + n) for n in range(len(ids) + 1)]
        return int(np.argmax(ratios))

    with pytest.raises(Failed, match="has probability"):
        for case in oracles.cases(2):
            oracles.check_output_law("best of all", rule, case, 4, keep)


@pytest.mark.parametrize("rule", [verify_token, verify_block])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_requests_that_share_rows_keep_their_laws(
    schedule: Schedule, rule: oracles.LawRule
) -> None:
    """Two requests, too few rows for both: the first one's text follows its target."""
    all_cases = oracles.cases(2)
    counts = set()
    for mine, other in ((all_cases[0], all_cases[3]), (all_cases[1], all_cases[0])):

        def run(
            dice: Dice, mine: oracles.Case = mine, other: oracles.Case = other
        ) -> tuple[int, ...]:
            drafts: list[Proposal] = [mine.proposal(dice, 3), other.proposal(dice, 2)]
            confidences = [[confidence(d.token_ids[:i]) for i in range(len(d))] for d in drafts]
            got = schedule.allocate(confidences, max_rows=2 + 4)
            counts.add(got.num_drafts)
            proposal = drafts[0].cut(got.num_drafts[0])
            target = oracles.Laws(mine.target, (), proposal.token_ids)
            return rule(proposal, target, dice).tokens(proposal)

        law: dict[tuple[int, ...], Fraction] = {}
        for probability, text in oracles.outcomes(run):
            for rest, share in oracles.joint_law(mine.target, 4 - len(text), text).items():
                law[text + rest] = law.get(text + rest, Fraction(0)) + probability * share
        assert law == oracles.joint_law(mine.target, 4)
    assert len(counts) > 1 or isinstance(schedule, FixedSchedule)


# What it is worth


def blocks(kind: str, number: int, seed: int) -> np.ndarray:
    """Confidences [n, 5] of a class of text; each is the true chance of its draft."""
    r = np.random.default_rng(seed)
    a, b = {"templates": (9, 1), "code": (3, 1.2), "prose": (1.2, 1.8), "random": (0.4, 4)}[kind]
    ease = r.beta(a, b, size=(number, 1))
    return np.clip(ease + r.normal(scale=0.15, size=(number, 5)) - 0.03 * np.arange(5), 0.01, 0.99)


def rates(
    kinds: Sequence[str], table: CostTable, draft_ms: float, gated: bool
) -> tuple[float, list[float]]:
    """Tokens per ms of the schedule and of each fixed count, which counts 0 spend no draft time."""
    tokens, ms = 0.0, 0.0
    fixed = [[0.0, 0.0] for _ in range(6)]
    for kind in kinds:
        lately, gate = np.zeros(2), DraftGate()
        schedule = CostSchedule(table=table)
        for own in blocks(kind, 3000, seed=len(kind)):
            survivals = np.cumprod(own)
            for n in range(6):
                fixed[n][0] += 1 + survivals[:n].sum()
                fixed[n][1] += table.step_ms(1 + n) + (draft_ms if n or not gated else 0.0)
            drafts = gate.wants_draft() if gated else True
            n, spent = 0, 0.0
            if drafts:
                spent = draft_ms
                rate = lately[0] / lately[1] if lately[1] else None
                got = schedule.allocate([list(own)], rate=rate, spent_ms=spent)
                n = got.num_drafts[0]
            stood = int(np.argmin(np.append(np.random.default_rng(n).random(n) < own[:n], False)))
            step = spent + table.step_ms(1 + n)
            gained = 1 + survivals[:n].sum()
            tokens, ms = tokens + gained, ms + step
            lately = 0.98 * lately + (1 + stood, step)
            if drafts:
                gate.record(gained, step, table.step_ms(1))
    return tokens / ms, [a / b for a, b in fixed]


CPU = CostTable(rows=(1, 2, 3, 4, 5, 6), ms=((20.0, 23.0, 25.0, 27.0, 29.0, 31.0),))


@pytest.mark.parametrize("kind", ["templates", "code", "prose", "random"])
@pytest.mark.parametrize("table", [CPU, STAIRS])
def test_scheduled_rows_match_the_best_fixed_count_of_a_class(kind: str, table: CostTable) -> None:
    ours, fixed = rates([kind], table, draft_ms=3.0, gated=False)
    assert ours >= 0.98 * max(fixed)


@pytest.mark.parametrize("table", [CPU, STAIRS])
def test_scheduled_rows_beat_every_fixed_count_on_a_mixed_set(table: CostTable) -> None:
    ours, fixed = rates(["templates", "code", "prose", "random"], table, draft_ms=3.0, gated=False)
    assert ours > max(fixed)


@pytest.mark.parametrize("kind", ["templates", "code", "prose", "random"])
def test_gated_drafting_stays_near_the_best_even_where_drafts_fail(kind: str) -> None:
    """Plain steps spend no draft time here; drafting costs a third of a step."""
    ours, fixed = rates([kind], CPU, draft_ms=7.0, gated=True)
    assert ours >= 0.97 * max(fixed)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_early_end_says_nothing_about_earlier_drafts(schedule: Schedule) -> None:
    """A block that ends early, as at a stop token, is the whole one cut there."""
    r = np.random.default_rng(3)
    for size in (1, 2, 3, 5):
        for _ in range(60):
            own = list(r.uniform(0.3, 1.0, size))
            whole = one(schedule, own)
            for end in range(size + 1):
                got = one(schedule, own[:end], sizes=[size])
                assert got == min(whole, end), (own, end)
