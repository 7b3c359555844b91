"""Trust in confidences: learnt from drafts, forgotten, never out of bounds."""

import math
import random

import pytest

from deepdraft.errors import ConfigError
from deepdraft.spec.trust import Trust, promised


def test_promises_of_a_block() -> None:
    assert promised(()) == 0.0
    assert promised((0.5, 0.5, 1.0)) == pytest.approx(0.5 + 0.25 + 0.25)


def test_new_trust_changes_nothing() -> None:
    some = (0.01, 0.5, 0.99)
    assert Trust().apply(some) == pytest.approx(some)
    assert Trust().apply((0.0, 1.0)) == pytest.approx((0.0025, 0.9975), abs=1e-4)


def test_what_is_no_probability_stays_and_teaches_nothing() -> None:
    trust = Trust()
    odd = (math.nan, -0.5, 1.5)
    assert str(trust.apply(odd)) == str(odd)
    for confidence in odd:
        trust.learn((confidence, 0.5), 0)
    assert trust.shift == 0.0
    trust.learn((), 0)
    assert trust.shift == 0.0


@pytest.mark.parametrize("says", [0.2, 0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("stands", [0.05, 0.3, 0.7, 0.97])
def test_it_finds_what_confidences_are_worth(says: float, stands: float) -> None:
    dice = random.Random(1)
    trust = Trust()
    for _ in range(400):
        accepted = 0
        while accepted < 5 and dice.random() < stands:
            accepted += 1
        trust.learn((says,) * 5, accepted)
    assert trust.apply((says,))[0] == pytest.approx(stands, abs=0.15)


def test_a_drafter_that_is_wrong_about_itself_is_found_out_soon() -> None:
    trust = Trust()
    seen = []
    for _ in range(6):
        trust.learn((0.95, 0.95), 0)
        seen.append(trust.apply((0.95,))[0])
    assert seen == sorted(seen, reverse=True)
    assert seen[0] < 0.8 and seen[5] < 0.35


def test_drafts_behind_the_first_that_fell_teach_nothing() -> None:
    one, many = Trust(), Trust()
    one.learn((0.9, 0.6), 1)
    many.learn((0.9, 0.6, 0.99, 0.01), 1)
    assert one.shift == many.shift != 0.0


def test_it_follows_a_text_that_turns() -> None:
    """Long knowledge weighs no more than that of a few dozen blocks."""
    trust = Trust()
    for _ in range(2000):
        trust.learn((0.9,), 1)
    high = trust.shift
    for _ in range(40):
        trust.learn((0.9,), 0)
    assert trust.apply((0.9,))[0] < 0.5 < high


def test_it_stays_within_bounds() -> None:
    for accepted in (0, 5):
        trust = Trust(spread=100.0, memory=1.0)
        for _ in range(1000):
            trust.learn((0.999,) * 5 if not accepted else (0.001,) * 5, accepted)
        assert all(0.0 < p < 1.0 for p in trust.apply((0.0, 0.5, 1.0)))


@pytest.mark.parametrize("bad", [{"spread": 0.0}, {"memory": 1.1}, {"memory": -0.1}])
def test_it_refuses_what_makes_no_sense(bad: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="trust"):
        Trust(**bad)
