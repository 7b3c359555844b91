"""Exact rounding of floats to few mantissa bits, by arithmetic on their bit patterns.

Owns: rounding to nearest, ties to even, on the grids of E4M3 and E2M1, and the power of two that a
group's largest magnitude asks for. Few operator calls, no branch on a value, float32 and float64
alike: values are rounded once, in the dtype of the input, whereas a torch cast from float64 to an
8-bit type rounds twice. Knows nothing of: codes, bytes, weights, caches.
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0


class Bits(NamedTuple):
    """Layout of a float dtype: integer type of the same size, stored mantissa bits, masks."""

    integer: torch.dtype
    mantissa: int
    exponent_mask: int
    magnitude_mask: int
    bias: int


BITS = {
    torch.float32: Bits(torch.int32, 23, 0x7F80_0000, 0x7FFF_FFFF, 127),
    torch.float64: Bits(torch.int64, 52, 0x7FF0_0000_0000_0000, 0x7FFF_FFFF_FFFF_FFFF, 1023),
}


def bits_of(x: Tensor) -> Bits:
    assert x.dtype in BITS, f"quantisers take float32 or float64, got {x.dtype}"
    return BITS[x.dtype]


@functools.cache
def float_bits(value: float, bits: Bits) -> int:
    """The bit pattern of a positive number in the dtype of `bits`, as an integer."""
    dtype = torch.float32 if bits.mantissa == 23 else torch.float64
    return int(torch.tensor(value, dtype=dtype).view(bits.integer))


def round_at(x: Tensor, exponent: Tensor, kept: int) -> Tensor:
    """x rounded to multiples of 2**-kept times the power of two that has the bits `exponent`.

    The multiple of 1.5 * 2**(mantissa - kept) that is added leaves no room for lower bits, so the
    processor's own rounding (to even) does the work; taking it away again is exact. `exponent` is
    overwritten. A zero loses its sign. |x| must be below 2**100, else the shift overflows.
    """
    bits = bits_of(x)
    offset = ((bits.mantissa - kept) << bits.mantissa) + (1 << (bits.mantissa - 1))
    shift = exponent.add_(offset).view(x.dtype)
    return x.add(shift).sub_(shift)


def round_element(x: Tensor, smallest: float, kept: int) -> Tensor:
    """x rounded to `kept` mantissa bits; below the binade `smallest` to the step used there."""
    bits = bits_of(x)
    exponent = (x.view(bits.integer) & bits.exponent_mask).clamp_(min=float_bits(smallest, bits))
    return round_at(x, exponent, kept)


def round_e4m3(x: Tensor) -> Tensor:
    """x in -448..448 rounded to E4M3 values; a zero loses its sign."""
    return round_element(x, 2.0**-6, kept=3)


def round_e2m1(x: Tensor) -> Tensor:
    """x in -6..6 rounded to E2M1 values; a zero loses its sign."""
    return round_element(x, 1.0, kept=1)


@functools.cache
def _ceil_constants(
    dtype: torch.dtype, floor: float, largest: float, smallest: float
) -> tuple[int, int]:
    """Integers for `ceil_exponent`: bits of the floor, and what to add to an amax's bits."""
    bits = BITS[dtype]
    fraction, exponent = math.frexp(largest)  # largest = 2 * fraction * 2**(exponent - 1)
    carry = (1 << bits.mantissa) - 1 - int((2 * fraction - 1) * 2.0**bits.mantissa)
    down = exponent - 1 - int(math.log2(smallest))
    return float_bits(floor, bits), carry - (down << bits.mantissa)


def ceil_exponent(
    magnitude: Tensor, dtype: torch.dtype, *, floor: float, largest: float, smallest: float = 1.0
) -> Tensor:
    """Bits of smallest * 2**ceil(log2(max(amax, floor) / largest)); amax from float bits.

    `magnitude` holds the bits of |x|, [..., group]; returns [..., 1]. Exact: a carry out of the
    mantissa decides (an amax above largest's mantissa takes the next power), without logarithm or
    division. `smallest` is a power of two.
    """
    low, addend = _ceil_constants(dtype, floor, largest, smallest)
    amax = magnitude.amax(dim=-1, keepdim=True).clamp_(min=low)
    return amax.add_(addend).bitwise_and_(BITS[dtype].exponent_mask)


def ceil_scale(amax: Tensor, largest: float, floor: float) -> Tensor:
    """2**ceil(log2(max(amax, floor) / largest)) of non-negative `amax`; `largest` is 448 or 6."""
    bits = bits_of(amax)
    magnitude = amax.contiguous().view(bits.integer).unsqueeze(-1)
    exponent = ceil_exponent(magnitude, amax.dtype, floor=floor, largest=largest)
    return exponent.squeeze(-1).view(amax.dtype)
