"""Number formats: element codes, weight storage, and the quantisers of activations and caches.

Owns: E4M3, E8M0 and E2M1 codes; FP8 tiles, FP8 rows and MXFP4 in both directions; the rounding that
activations and cache entries go through (architecture notes 7). Plain torch, the reference of all
kernels. Knows nothing of: files, tensor names, record layouts (`deepdraft.quant.records`).

Rounding is to nearest, ties to even. Scales are powers of two stored as E8M0 bytes b, 2**(b - 127),
255 is NaN; bytes are reinterpreted, never cast by value. Functions take float32 or float64 and
are exact in both: they round once, in the dtype of their input, whereas a torch cast from float64
to an 8-bit type rounds twice.
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 32
"""Side of an FP8 weight tile; scale group of MXFP4, of FP8 rows and of FP8 activations."""
KV_GROUP = 16
"""Scale group of main KV entries."""
E4M3_MAX = 448.0
E2M1_MAX = 6.0
E8M0_BIAS = 127
ACT_AMAX_FLOOR = 1e-4
INDEX_AMAX_FLOOR = 6.0 * 2.0**-126
KV_SCALE_FLOOR = 2.0**-9
_WEIGHT_AMAX_FLOOR = 2.0**-100
"""Gives groups of zeros a scale; far below any weight that matters."""

_E2M1_MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
_E2M1_VALUES = torch.cat((_E2M1_MAGNITUDES, -_E2M1_MAGNITUDES))
_E8M0_VALUES = torch.tensor(
    [2.0 ** (b - E8M0_BIAS) for b in range(255)] + [float("nan")], dtype=torch.float64
)


class _Bits(NamedTuple):
    """Layout of a float dtype: integer type of the same size, stored mantissa bits, masks."""

    integer: torch.dtype
    mantissa: int
    exponent_mask: int
    magnitude_mask: int
    bias: int


_BITS = {
    torch.float32: _Bits(torch.int32, 23, 0x7F80_0000, 0x7FFF_FFFF, 127),
    torch.float64: _Bits(torch.int64, 52, 0x7FF0_0000_0000_0000, 0x7FFF_FFFF_FFFF_FFFF, 1023),
}


def _bits(x: Tensor) -> _Bits:
    assert x.dtype in _BITS, f"quantisers take float32 or float64, got {x.dtype}"
    return _BITS[x.dtype]


@functools.cache
def _float_bits(value: float, bits: _Bits) -> int:
    """The bit pattern of a positive number in the dtype of `bits`, as an integer."""
    dtype = torch.float32 if bits.mantissa == 23 else torch.float64
    return int(torch.tensor(value, dtype=dtype).view(bits.integer))


def _round(x: Tensor, exponent: Tensor, kept: int) -> Tensor:
    """x rounded to multiples of 2**-kept times the power of two that has the bits `exponent`.

    The multiple of 1.5 * 2**(mantissa - kept) that is added leaves no room for lower bits, so the
    processor's own rounding (to even) does the work; taking it away again is exact. `exponent` is
    overwritten. A zero loses its sign.
    """
    bits = _bits(x)
    offset = ((bits.mantissa - kept) << bits.mantissa) + (1 << (bits.mantissa - 1))
    shift = exponent.add_(offset).view(x.dtype)
    return x.add(shift).sub_(shift)


def _round_element(x: Tensor, smallest: float, kept: int) -> Tensor:
    """x rounded to `kept` mantissa bits; below the binade `smallest` to the step used there."""
    bits = _bits(x)
    exponent = (x.view(bits.integer) & bits.exponent_mask).clamp_(min=_float_bits(smallest, bits))
    return _round(x, exponent, kept)


def _round_e4m3(x: Tensor) -> Tensor:
    """x in -448..448 rounded to E4M3 values; a zero loses its sign."""
    return _round_element(x, 2.0**-6, kept=3)


def _round_e2m1(x: Tensor) -> Tensor:
    """x in -6..6 rounded to E2M1 values; a zero loses its sign."""
    return _round_element(x, 1.0, kept=1)


@functools.cache
def _ceil_constants(
    dtype: torch.dtype, floor: float, largest: float, smallest: float
) -> tuple[int, int]:
    """Integers for `_ceil_exponent`: bits of the floor, and what to add to an amax's bits."""
    bits = _BITS[dtype]
    fraction, exponent = math.frexp(largest)  # largest = 2 * fraction * 2**(exponent - 1)
    carry = (1 << bits.mantissa) - 1 - int((2 * fraction - 1) * 2.0**bits.mantissa)
    down = exponent - 1 - int(math.log2(smallest))
    return _float_bits(floor, bits), carry - (down << bits.mantissa)


def _ceil_exponent(
    magnitude: Tensor, dtype: torch.dtype, *, floor: float, largest: float, smallest: float = 1.0
) -> Tensor:
    """Bits of smallest * 2**ceil(log2(max(amax, floor) / largest)); amax from float bits.

    `magnitude` holds the bits of |x|, [..., group]; returns [..., 1]. Exact: a carry out of the
    mantissa decides (an amax above largest's mantissa takes the next power), without logarithm or
    division. `smallest` is a power of two.
    """
    low, addend = _ceil_constants(dtype, floor, largest, smallest)
    amax = magnitude.amax(dim=-1, keepdim=True).clamp_(min=low)
    return amax.add_(addend).bitwise_and_(_BITS[dtype].exponent_mask)


def ceil_scale(amax: Tensor, largest: float, floor: float) -> Tensor:
    """2**ceil(log2(max(amax, floor) / largest)) of non-negative `amax`; `largest` is 448 or 6."""
    bits = _bits(amax)
    magnitude = amax.contiguous().view(bits.integer).unsqueeze(-1)
    exponent = _ceil_exponent(magnitude, amax.dtype, floor=floor, largest=largest)
    return exponent.squeeze(-1).view(amax.dtype)


# Quantise-dequantise of activations and caches (architecture notes 7.3, 7.4)


def _fake_group32(x: Tensor, *, floor: float, largest: float, smallest: float, kept: int) -> Tensor:
    # Scales are powers of two: rounding x on the scaled grid equals rounding x / scale.
    bits = _bits(x)
    groups = x.unflatten(-1, (-1, GROUP))
    pattern = groups.view(bits.integer)
    lowest = _ceil_exponent(
        pattern & bits.magnitude_mask, x.dtype, floor=floor, largest=largest, smallest=smallest
    )
    exponent = torch.maximum(pattern & bits.exponent_mask, lowest)
    return _round(groups, exponent, kept).flatten(-2)


def fake_fp8_group32(x: Tensor) -> Tensor:
    """E4M3 in groups of 32 along the last axis with power-of-two scales, as numbers again.

    Inputs of FP8 and FP4 linear maps, and window KV entries. A group's amax counts as 1e-4 at
    least. Worst error: 2**-4 of a value, at least 2**-10 of the scale. Every group by itself.
    """
    return _fake_group32(x, floor=ACT_AMAX_FLOOR, largest=E4M3_MAX, smallest=2.0**-6, kept=3)


def fake_mxfp4_group32(x: Tensor) -> Tensor:
    """E2M1 in groups of 32 along the last axis with power-of-two scales, as numbers again.

    Index queries and keys. Worst error: a quarter of a value, at least a quarter of the scale.
    """
    return _fake_group32(x, floor=INDEX_AMAX_FLOOR, largest=E2M1_MAX, smallest=1.0, kept=1)


def kv_group_scale(groups: Tensor) -> Tensor:
    """E4M3-rounded amax / 6 of [..., g] groups, in 2**-9..448; shape [..., 1]."""
    scale = groups.abs().amax(dim=-1, keepdim=True).div_(E2M1_MAX)
    return _round_e4m3(scale.clamp_(min=KV_SCALE_FLOOR, max=E4M3_MAX))


def fake_fp4_e4m3_group16(x: Tensor) -> Tensor:
    """E2M1 in groups of 16 along the last axis with E4M3 scales, as numbers again (main KV).

    Worst error for a largest magnitude in 6 * 2**-6..2688: a quarter of a value, at least a quarter
    of the scale.
    """
    groups = x.unflatten(-1, (-1, KV_GROUP))
    scale = kv_group_scale(groups)
    codes = _round_e2m1(groups.div(scale).clamp_(-E2M1_MAX, E2M1_MAX))
    return codes.mul_(scale).flatten(-2)


# Element codes


def decode_e4m3(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """E4M3 codes (uint8 or float8_e4m3fn, any shape) as numbers; exact, 0x7F and 0xFF are NaN."""
    return codes.view(torch.float8_e4m3fn).to(dtype)


def encode_e4m3(x: Tensor) -> Tensor:
    """Nearest E4M3 codes (uint8), clipped to +-448; keeps NaN and the sign of zero.

    Worst error inside the range: 2**-4 of a value above 2**-6, 2**-10 below.
    """
    rounded = _round_e4m3(x.clamp(-E4M3_MAX, E4M3_MAX))
    return rounded.copysign(x).to(torch.float8_e4m3fn).view(torch.uint8)


def decode_e8m0(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """E8M0 bytes (uint8 or float8_e8m0fnu, any shape) as powers of two; 255 is NaN.

    Exact in float64, float32 and bfloat16 (2**-127 is a subnormal of the last two).
    """
    table = _E8M0_VALUES.to(device=codes.device, dtype=dtype)
    return table[codes.view(torch.uint8).int()]


def encode_e8m0(scale: Tensor) -> Tensor:
    """E8M0 bytes (uint8) of exact powers of two in 2**-126..2**127."""
    bits = _bits(scale)
    exponent = scale.view(bits.integer) >> bits.mantissa
    return (exponent + (E8M0_BIAS - bits.bias)).to(torch.uint8)


def decode_e2m1(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """E2M1 codes 0..15 (uint8, any shape) as numbers; exact. Code 8 is negative zero."""
    return _E2M1_VALUES.to(device=codes.device, dtype=dtype)[codes.int()]


def encode_e2m1(x: Tensor) -> Tensor:
    """Nearest E2M1 codes 0..15 (uint8) of finite x, clipped to +-6; keeps the sign of zero.

    Worst error inside the range: a quarter of a value, at least 0.25.
    """
    magnitude = _round_e2m1(x.clamp(-E2M1_MAX, E2M1_MAX)).abs_()
    table = _E2M1_MAGNITUDES.to(device=x.device, dtype=x.dtype)
    code = torch.searchsorted(table, magnitude.contiguous()).to(torch.uint8)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """[..., n] bytes -> [..., 2n] codes 0..15; element 2k is the low nibble of byte k."""
    packed = packed.view(torch.uint8)
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def pack_nibbles(codes: Tensor) -> Tensor:
    """[..., 2n] codes 0..15 (uint8) -> [..., n] bytes; the inverse of `unpack_nibbles`."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


# Weights


def dequantize_fp8_tile(
    values: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """FP8 weight [out, in] with E8M0 `scales` [out/32, in/32], one per 32x32 tile; exact."""
    tiles = _tiles(decode_e4m3(values, dtype))
    return tiles.mul_(decode_e8m0(scales, dtype)[:, None, :, None]).view(values.shape)


def quantize_fp8_tile(x: Tensor, scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Finite [out, in] -> E4M3 codes [out, in] and E8M0 bytes [out/32, in/32].

    The scale of a tile is 2**ceil(log2(amax / 448)); `scales` (bytes) are used instead when given.
    Worst error: 2**-4 of a value, at least 2**-10 of its scale. Dequantised weights keep their
    values, and with their old `scales` also their codes.
    """
    tiles = _tiles(x)
    if scales is None:
        scales = encode_e8m0(ceil_scale(tiles.abs().amax(dim=(1, 3)), E4M3_MAX, _WEIGHT_AMAX_FLOOR))
    codes = encode_e4m3(tiles / decode_e8m0(scales, x.dtype)[:, None, :, None])
    return codes.view(x.shape), scales.view(torch.uint8)


def dequantize_fp8_row(
    values: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """FP8 rows [..., n] with E8M0 `scales` [..., n/32] (Engram tables); exact."""
    groups = decode_e4m3(values, dtype).unflatten(-1, (-1, GROUP))
    return groups.mul_(decode_e8m0(scales, dtype)[..., None]).flatten(-2)


def quantize_fp8_row(x: Tensor, scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Finite [..., n] -> E4M3 codes [..., n] and E8M0 bytes [..., n/32]; as `quantize_fp8_tile`."""
    groups, scales = _grouped(x, scales, E4M3_MAX)
    return encode_e4m3(groups).flatten(-2), scales


def dequantize_mxfp4(values: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """MXFP4 [..., n/2] bytes with E8M0 `scales` [..., n/32] -> [..., n]; exact."""
    groups = decode_e2m1(unpack_nibbles(values), dtype).unflatten(-1, (-1, GROUP))
    return groups.mul_(decode_e8m0(scales, dtype)[..., None]).flatten(-2)


def quantize_mxfp4(x: Tensor, scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Finite [..., n] -> packed E2M1 [..., n/2] and E8M0 bytes [..., n/32].

    The scale of a group is 2**ceil(log2(amax / 6)); `scales` (bytes) are used instead when given.
    Worst error: a quarter of a value, at least a quarter of its scale. Dequantised weights keep
    their values, and with their old `scales` also their codes.
    """
    groups, scales = _grouped(x, scales, E2M1_MAX)
    return pack_nibbles(encode_e2m1(groups).flatten(-2)), scales


def _grouped(x: Tensor, scales: Tensor | None, largest: float) -> tuple[Tensor, Tensor]:
    """Groups of 32 divided by their scales, and the scales' bytes."""
    groups = x.unflatten(-1, (-1, GROUP))
    if scales is None:
        scales = encode_e8m0(ceil_scale(groups.abs().amax(dim=-1), largest, _WEIGHT_AMAX_FLOOR))
    return groups / decode_e8m0(scales, x.dtype)[..., None], scales.view(torch.uint8)


def _tiles(x: Tensor) -> Tensor:
    """[out, in] as [out/32, 32, in/32, 32]."""
    rows, cols = x.shape
    if rows % GROUP or cols % GROUP:
        raise ValueError(f"an FP8 weight needs multiples of {GROUP} rows and columns: {x.shape}")
    return x.view(rows // GROUP, GROUP, cols // GROUP, GROUP)
