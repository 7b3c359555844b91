"""Turns a drafter's raw confidences into probabilities, and judges them.

Owns: temperature scaling per draft position, its fit, Brier score, reliability bins.
Knows nothing of: how drafts are made or verified, what is done with a probability.

A raw confidence is a logit: the drafter's own estimate is its sigmoid, the probability that the
draft is accepted if all before it were.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepdraft.errors import ConfigError

Floats = NDArray[np.float64]

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.05, 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """sigmoid(raw / temperatures[b] + shifts[b]) at draft position b.

    Beyond the fitted positions the last entry holds. `means[b]` is the share of drafts at b that
    was accepted among those reached: what to expect of a position not looked at yet.
    """

    temperatures: tuple[float, ...] = (1.0,)
    shifts: tuple[float, ...] = (0.0,)
    means: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.temperatures or len(self.temperatures) != len(self.shifts):
            raise ConfigError("calibration: as many shifts as temperatures, at least one of each")
        if not all(0.0 < t < float("inf") for t in self.temperatures):
            raise ConfigError(f"calibration: temperatures must be > 0, got {self.temperatures}")
        if not all(abs(x) < float("inf") for x in self.shifts):
            raise ConfigError(f"calibration: shifts must be finite, got {self.shifts}")
        if not all(0.0 <= m <= 1.0 for m in self.means):
            raise ConfigError(f"calibration: means must lie in [0, 1], got {self.means}")

    def apply(self, raw: Sequence[float]) -> tuple[float, ...]:
        """Probabilities for one block's raw confidences; NaN where a confidence is NaN."""
        last = len(self.temperatures) - 1
        return tuple(
            _sigmoid_of(x / self.temperatures[min(b, last)] + self.shifts[min(b, last)])
            for b, x in enumerate(raw)
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, for JSON."""
        return {
            "temperatures": list(self.temperatures),
            "shifts": list(self.shifts),
            "means": list(self.means),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Calibration":
        """The inverse of `to_dict`. Raises ConfigError."""
        try:
            temperatures = tuple(float(x) for x in values["temperatures"])
            shifts = tuple(float(x) for x in values.get("shifts", [0.0] * len(temperatures)))
            means = tuple(float(x) for x in values.get("means", ()))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"calibration: a list of temperatures is needed: {error!r}"
            ) from error
        return cls(temperatures=temperatures, shifts=shifts, means=means)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One verified block: raw confidences of the drafts that were verified, and how many stood."""

    raw: tuple[float, ...]
    num_accepted: int


def pairs(observations: Iterable[Observation], position: int) -> tuple[Floats, Floats]:
    """Raw confidences [n] and outcomes [n] (0 or 1) of the drafts at a position that were reached.

    A draft is reached if it was verified and all before it were accepted.
    """
    raw, accepted = [], []
    for seen in observations:
        if len(seen.raw) > position and seen.num_accepted >= position:
            raw.append(seen.raw[position])
            accepted.append(float(seen.num_accepted > position))
    return np.array(raw, dtype=np.float64), np.array(accepted, dtype=np.float64)


def fit(
    observations: Sequence[Observation],
    *,
    num_positions: int,
    shift: bool = False,
    strength: float = 1.0,
) -> Calibration:
    """Calibrates each position by maximum likelihood.

    `shift` also fits the additive term. `strength` pulls towards the drafter's own estimate as that
    many observations would; it decides where there are few or none, or where they separate.
    """
    temperatures, shifts, means = [], [], []
    for position in range(num_positions):
        raw, accepted = pairs(observations, position)
        keep = np.isfinite(raw)
        slope, offset = _logistic(raw[keep], accepted[keep], shift, strength)
        temperatures.append(1.0 / slope)
        shifts.append(offset)
        # A position never reached is taken to be like the one before it.
        means.append(float(accepted.mean()) if accepted.size else (means[-1] if means else 0.5))
    return Calibration(temperatures=tuple(temperatures), shifts=tuple(shifts), means=tuple(means))


def brier(probabilities: Floats, outcomes: Floats) -> float:
    """Mean squared distance of probabilities [n] from outcomes [n] in [0, 1]; NaN if n is 0."""
    if not len(probabilities):
        return float("nan")
    return float(np.mean((np.asarray(probabilities) - np.asarray(outcomes)) ** 2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """Predictions in [low, high), the last bin with high: how often came true what was said."""

    low: float
    high: float
    count: int
    predicted: float
    observed: float


def reliability(probabilities: Floats, outcomes: Floats, num_bins: int = 10) -> list[Bin]:
    """Equal bins over [0, 1] that hold something, lowest first."""
    probabilities, outcomes = np.asarray(probabilities), np.asarray(outcomes)
    number = np.minimum((probabilities * num_bins).astype(np.int64), num_bins - 1)
    bins = []
    for b in range(num_bins):
        here = number == b
        if here.any():
            bins.append(
                Bin(
                    low=b / num_bins,
                    high=(b + 1) / num_bins,
                    count=int(here.sum()),
                    predicted=float(probabilities[here].mean()),
                    observed=float(outcomes[here].mean()),
                )
            )
    return bins


def calibration_error(bins: Sequence[Bin]) -> float:
    """Mean distance of predicted from observed, weighted by count."""
    total = sum(b.count for b in bins)
    return sum(b.count * abs(b.predicted - b.observed) for b in bins) / total if total else 0.0


def _sigmoid_of(x: float) -> float:
    """Of one number; plain floats take a tenth of numpy's time for scalars."""
    e = math.exp(-abs(x))  # NaN stays NaN
    return (1.0 if x >= 0 else e) / (1.0 + e)


def _sigmoid(x: Any) -> Any:
    # Neither branch overflows.
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1.0, e) / (1.0 + e)


def _logistic(raw: Floats, accepted: Floats, shift: bool, strength: float) -> tuple[float, float]:
    """Slope and offset of the likeliest sigmoid(slope * raw + offset).

    Newton's method on a strictly convex loss: the pull strength / 2 * ((slope - 1)^2 + offset^2)
    makes it so. Steps are halved until the loss falls.
    """
    x = np.stack([raw, np.ones_like(raw)], axis=1) if shift else raw[:, None]
    prior = np.array([1.0, 0.0])[: x.shape[1]]
    low, high = 1.0 / MAX_TEMPERATURE, 1.0 / MIN_TEMPERATURE

    def loss(w: Floats) -> float:
        z = x @ w
        return float(
            (np.logaddexp(0.0, z) - accepted * z).sum() + strength / 2 * ((w - prior) ** 2).sum()
        )

    w = prior.copy()
    now = loss(w)
    for _ in range(50):
        p = _sigmoid(x @ w)
        gradient = x.T @ (p - accepted) + strength * (w - prior)
        curvature = (x * (p * (1 - p))[:, None]).T @ x + strength * np.eye(len(w))
        step = np.linalg.solve(curvature, gradient)
        scale = 1.0
        while scale > 1e-6:
            trial = w - scale * step
            trial[0] = np.clip(trial[0], low, high)
            then = loss(trial)
            if then < now:
                break
            scale /= 2
        else:
            break
        moved = float(np.abs(trial - w).max())
        w, now = trial, then
        if moved < 1e-10:
            break
    return float(w[0]), float(w[1]) if shift else 0.0
