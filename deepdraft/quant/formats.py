"""Number formats: element codes and the storage of weights, in both directions, plain torch.

Owns: E4M3, E8M0 and E2M1 codes; FP8 tiles, FP8 rows and MXFP4 (architecture notes 7.1, 7.2). The
reference of all kernels. Knows nothing of: files, tensor names, caches (`simulate`, `records`).

Rounding is to nearest, ties to even. Scales are powers of two stored as E8M0 bytes b, 2**(b - 127),
255 is NaN; bytes are reinterpreted, never cast by value. Encoders take float32 or float64 and are
exact in both.
"""

import torch
from torch import Tensor

from deepdraft.quant.rounding import (
    E2M1_MAX,
    E4M3_MAX,
    bits_of,
    ceil_scale,
    round_e2m1,
    round_e4m3,
)
from deepdraft.quant.simulate import (
    fake_fp4_e4m3_group16,
    fake_fp8_group32,
    fake_mxfp4_group32,
)

__all__ = [
    "GROUP",
    "decode_e2m1",
    "decode_e2m1_pairs",
    "decode_e4m3",
    "decode_e8m0",
    "dequantize_fp8_row",
    "dequantize_fp8_tile",
    "dequantize_mxfp4",
    "encode_e2m1",
    "encode_e4m3",
    "encode_e8m0",
    "fake_fp4_e4m3_group16",
    "fake_fp8_group32",
    "fake_mxfp4_group32",
    "pack_nibbles",
    "quantize_fp8_row",
    "quantize_fp8_tile",
    "quantize_mxfp4",
    "unpack_nibbles",
]

GROUP = 32
"""Side of an FP8 weight tile; scale group of MXFP4 and of FP8 rows."""
E8M0_BIAS = 127
_WEIGHT_AMAX_FLOOR = 2.0**-100
"""Gives groups of zeros a scale; far below any weight that matters."""

_E2M1_MAGNITUDES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
_E2M1_VALUES = torch.cat((_E2M1_MAGNITUDES, -_E2M1_MAGNITUDES))
_E8M0_VALUES = torch.tensor(
    [2.0 ** (b - E8M0_BIAS) for b in range(255)] + [float("nan")], dtype=torch.float64
)
_E4M3_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
_PAIR_TYPES = {
    torch.bfloat16: torch.int32,
    torch.float32: torch.int64,
    torch.float64: torch.complex128,
}
"""Types that hold two values of a dtype, so that one look-up decodes a byte of two codes."""


def _look_up(table: Tensor, codes: Tensor) -> Tensor:
    """table[codes] for byte codes of any shape; index_select is the fastest gather on a CPU."""
    index = codes.view(torch.uint8).reshape(-1).int()
    return table.index_select(0, index).view(codes.shape)


def decode_e4m3(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """E4M3 codes (uint8 or float8_e4m3fn, any shape) as numbers; exact, 0x7F and 0xFF are NaN."""
    return _look_up(_E4M3_VALUES.to(device=codes.device, dtype=dtype), codes)


def encode_e4m3(x: Tensor) -> Tensor:
    """Nearest E4M3 codes (uint8), clipped to +-448; keeps NaN and the sign of zero.

    Worst error inside the range: 2**-4 of a value above 2**-6, 2**-10 below.
    """
    rounded = round_e4m3(x.clamp(-E4M3_MAX, E4M3_MAX))
    return rounded.copysign(x).to(torch.float8_e4m3fn).view(torch.uint8)


def decode_e8m0(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """E8M0 bytes (uint8 or float8_e8m0fnu, any shape) as powers of two; 255 is NaN.

    Exact in float64, float32 and bfloat16 (2**-127 is a subnormal of the last two).
    """
    return _look_up(_E8M0_VALUES.to(device=codes.device, dtype=dtype), codes)


def encode_e8m0(scale: Tensor) -> Tensor:
    """E8M0 bytes (uint8) of exact powers of two in 2**-126..2**127."""
    bits = bits_of(scale)
    exponent = scale.view(bits.integer) >> bits.mantissa
    return (exponent + (E8M0_BIAS - bits.bias)).to(torch.uint8)


def decode_e2m1(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """E2M1 codes 0..15 (uint8, any shape) as numbers; exact. Code 8 is negative zero."""
    return _look_up(_E2M1_VALUES.to(device=codes.device, dtype=dtype), codes)


def encode_e2m1(x: Tensor) -> Tensor:
    """Nearest E2M1 codes 0..15 (uint8) of finite x, clipped to +-6; keeps the sign of zero.

    Worst error inside the range: a quarter of a value, at least 0.25.
    """
    magnitude = round_e2m1(x.clamp(-E2M1_MAX, E2M1_MAX)).abs_()
    table = _E2M1_MAGNITUDES.to(device=x.device, dtype=x.dtype)
    code = torch.searchsorted(table, magnitude.contiguous()).to(torch.uint8)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def decode_e2m1_pairs(packed: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """[..., n] bytes of two E2M1 codes -> [..., 2n] numbers, the low nibble first; exact."""
    every_byte = torch.arange(256, dtype=torch.uint8, device=packed.device)
    pairs = decode_e2m1(unpack_nibbles(every_byte[:, None]), dtype)
    return _look_up(pairs.view(_PAIR_TYPES[dtype]).squeeze(-1), packed).view(dtype)


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
    groups = decode_e2m1_pairs(values, dtype).unflatten(-1, (-1, GROUP))
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
