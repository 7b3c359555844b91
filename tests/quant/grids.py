"""The value grids of the element formats and slow nearest-value rounding, written from the formats'
definitions and independent of the package's bit arithmetic."""

from fractions import Fraction

import torch
from torch import Tensor


def e4m3_value(code: int) -> float:
    """Value of an E4M3 code: 1 sign, 4 exponent (bias 7), 3 mantissa bits; all ones is NaN."""
    sign, exponent, mantissa = code >> 7, (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    if exponent == 0:
        magnitude = Fraction(mantissa, 8) * Fraction(1, 64)
    else:
        magnitude = Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7)
    return float(-magnitude if sign else magnitude)


E4M3_POSITIVE = [e4m3_value(code) for code in range(127)]
E2M1_POSITIVE = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def nearest(y: Tensor, positive: list[float]) -> Tensor:
    """y rounded to +-`positive`, clipped, ties to the even index; any shape, in float64 exact.

    Distances are compared as exact fractions.
    """
    out = []
    for value in y.double().flatten().tolist():
        magnitude = min(Fraction(abs(value)), Fraction(positive[-1]))
        distances = [abs(magnitude - Fraction(p)) for p in positive]
        best = min(distances)
        ties = [i for i, d in enumerate(distances) if d == best]
        index = next((i for i in ties if i % 2 == 0), ties[0])
        out.append(positive[index] if value >= 0 else -positive[index])
    return torch.tensor(out, dtype=torch.float64).view(y.shape)


def ceil_power(value: Fraction) -> Fraction:
    """The smallest power of two that is at least `value` > 0."""
    power = Fraction(1)
    while power < value:
        power *= 2
    while power / 2 >= value:
        power /= 2
    return power
