"""Calibration finds what was planted, survives odd data, and the scores mean what they say."""

import math
import warnings

import numpy as np
import pytest

from deepdraft.errors import ConfigError
from deepdraft.spec.calibrate import (
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    Bin,
    Calibration,
    Observation,
    brier,
    calibration_error,
    fit,
    pairs,
    reliability,
)


def observations(
    temperatures: list[float], shifts: list[float], number: int, seed: int
) -> list[Observation]:
    """Blocks whose true acceptance is sigmoid(raw / temperature + shift)."""
    r = np.random.default_rng(seed)
    size = len(temperatures)
    out = []
    for raw in r.normal(1.0, 2.0, size=(number, size)):
        true = 1 / (1 + np.exp(-(raw / temperatures + np.array(shifts))))
        fell = np.append(r.random(size) >= true, True)
        out.append(Observation(raw=tuple(raw.tolist()), num_accepted=int(fell.argmax())))
    return out


def scored(calibration: Calibration, seen: list[Observation], position: int) -> tuple[float, float]:
    raw, accepted = pairs(seen, position)
    p = np.array([calibration.apply([0.0] * position + [x])[position] for x in raw])
    return brier(p, accepted), calibration_error(reliability(p, accepted))


def test_planted_temperatures_are_found() -> None:
    planted = [2.0, 0.5, 1.0]
    calibration = fit(observations(planted, [0.0] * 3, 20_000, seed=1), num_positions=3)
    assert np.allclose(calibration.temperatures, planted, rtol=0.1)
    assert calibration.shifts == (0.0, 0.0, 0.0)
    assert all(0.4 < m < 0.9 for m in calibration.means)


def test_planted_shifts_are_found_when_asked_for() -> None:
    seen = observations([1.5, 0.8], [0.7, -1.0], 20_000, seed=2)
    calibration = fit(seen, num_positions=2, shift=True)
    assert np.allclose(calibration.temperatures, [1.5, 0.8], rtol=0.1)
    assert np.allclose(calibration.shifts, [0.7, -1.0], atol=0.1)


@pytest.mark.parametrize("shift", [False, True])
def test_fitting_improves_held_out_scores(shift: bool) -> None:
    planted = ([3.0, 3.0], [0.5, 0.5] if shift else [0.0, 0.0])
    calibration = fit(observations(*planted, 4000, seed=3), num_positions=2, shift=shift)
    held_out = observations(*planted, 8000, seed=4)
    for position in range(2):
        before, error_before = scored(Calibration(), held_out, position)
        after, error_after = scored(calibration, held_out, position)
        assert after < before - 0.005
        assert error_after < 0.03 < error_before


def test_only_reached_drafts_count() -> None:
    seen = [
        Observation(raw=(1.0, 2.0, 3.0), num_accepted=1),
        Observation(raw=(4.0,), num_accepted=1),
        Observation(raw=(5.0, 6.0), num_accepted=0),
        Observation(raw=(), num_accepted=0),
    ]
    assert [x.tolist() for x in pairs(seen, 0)] == [[1.0, 4.0, 5.0], [1.0, 1.0, 0.0]]
    assert [x.tolist() for x in pairs(seen, 1)] == [[2.0], [0.0]]
    assert [x.tolist() for x in pairs(seen, 2)] == [[], []]


def test_little_data_stays_with_the_drafter() -> None:
    calibration = fit([], num_positions=2)
    assert calibration.temperatures == (1.0, 1.0)
    assert calibration.means == (0.5, 0.5)
    seen = [Observation(raw=(0.3, 0.1), num_accepted=1)]
    calibration = fit(seen, num_positions=3)
    assert all(0.5 < t < 1.5 for t in calibration.temperatures)
    assert calibration.means == (1.0, 0.0, 0.0)


def test_separable_and_contrary_data_stay_bounded() -> None:
    sharp = [Observation(raw=(x,), num_accepted=int(x > 0)) for x in (-3.0, -0.1, 0.1, 3.0)] * 5000
    wrong = [Observation(raw=(x,), num_accepted=int(x < 0)) for x in (-3.0, 3.0)] * 5000
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert MIN_TEMPERATURE <= fit(sharp, num_positions=1).temperatures[0] < 0.3
        assert fit(wrong, num_positions=1).temperatures[0] == pytest.approx(MAX_TEMPERATURE)
        seen = [Observation(raw=(math.nan,), num_accepted=1), *sharp]
        assert fit(seen, num_positions=1).temperatures[0] < 0.3
        huge = [Observation(raw=(1e6,), num_accepted=1), Observation(raw=(-1e6,), num_accepted=0)]
        assert fit(huge, num_positions=1).temperatures[0] > 0


def test_apply_is_a_sigmoid_that_never_overflows() -> None:
    calibration = Calibration(temperatures=(1.0, 2.0), shifts=(0.0, 1.0))
    got = calibration.apply((0.0, 2.0, 2.0, -1e9, 1e9))
    third = 1 / (1 + math.exp(-2.0))  # the last entry holds for later positions
    assert got == pytest.approx((0.5, third, third, 0.0, 1.0))
    assert math.isnan(calibration.apply((math.nan,))[0])
    assert Calibration().apply(()) == ()


def test_calibrations_survive_json_and_are_checked() -> None:
    calibration = fit(observations([2.0], [0.0], 100, seed=5), num_positions=1)
    assert Calibration.from_dict(calibration.to_dict()) == calibration
    assert Calibration.from_dict({"temperatures": [2]}).shifts == (0.0,)
    for bad in (
        {},
        {"temperatures": 3},
        {"temperatures": ["x"]},
        {"temperatures": []},
        {"temperatures": [0.0]},
        {"temperatures": [math.nan]},
        {"temperatures": [10**400]},
        {"temperatures": [1.0], "shifts": [math.inf]},
        {"temperatures": [1.0], "shifts": [0.0, 0.0]},
        {"temperatures": [1.0], "means": [1.5]},
    ):
        with pytest.raises(ConfigError, match="calibration"):
            Calibration.from_dict(bad)


def test_scores() -> None:
    p, y = np.array([0.0, 0.5, 0.95, 1.0]), np.array([0.0, 1.0, 1.0, 0.0])
    assert brier(p, y) == pytest.approx((0 + 0.25 + 0.0025 + 1) / 4)
    assert math.isnan(brier(np.array([]), np.array([])))
    bins = reliability(p, y)
    assert bins == [
        Bin(low=0.0, high=0.1, count=1, predicted=0.0, observed=0.0),
        Bin(low=0.5, high=0.6, count=1, predicted=0.5, observed=1.0),
        Bin(low=0.9, high=1.0, count=2, predicted=pytest.approx(0.975), observed=0.5),
    ]
    assert calibration_error(bins) == pytest.approx((0.5 + 2 * 0.475) / 4)
    assert calibration_error([]) == 0.0
