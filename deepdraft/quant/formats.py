"""Storage formats of weights: E4M3, E8M0, FP8 tiles and rows, MXFP4; both directions, plain torch.

Owns: the element codes (architecture notes 7.1, 7.2), packing order, and the rule that picks a scale.
Knows nothing of: files, tensor names, activations and caches (`deepdraft.quant.simulate`).

Scales are E8M0 bytes: 2**(b - 127), 255 is NaN. Bytes are reinterpreted, never cast by value.
"""

import torch
from torch import Tensor

TILE = 32
"""Side of an FP8 weight tile, and scale group of MXFP4 and of FP8 rows."""
E4M3_MAX = 448.0
E2M1_MAX = 6.0
E8M0_BIAS = 127

_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_VALUES = torch.tensor([*_E2M1_MAGNITUDES, *(-m for m in _E2M1_MAGNITUDES)])
_E2M1_MIDPOINTS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=torch.float64)
_E8M0_VALUES = torch.tensor(
    [2.0 ** (b - E8M0_BIAS) for b in range(255)] + [float("nan")], dtype=torch.float64
)


def decode_e4m3(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """E4M3 codes (uint8 or float8_e4m3fn, any shape) as numbers; exact, 0x7F and 0xFF are NaN."""
    return codes.view(torch.float8_e4m3fn).to(dtype)


def encode_e4m3(x: Tensor) -> Tensor:
    """Nearest E4M3 codes (uint8), ties to even, clipped to +-448; NaN stays NaN.

    Worst error: half a step, 2**-4 of the value above 2**-6, 2**-10 below.
    """
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def decode_e8m0(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """E8M0 bytes (uint8 or float8_e8m0fnu, any shape) as powers of two; 255 is NaN.

    Exact in float64, float32 and bfloat16 (2**-127 is a subnormal of the last two).
    """
    table = _E8M0_VALUES.to(device=codes.device, dtype=dtype)
    return table[codes.view(torch.uint8).int()]


def decode_e2m1(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """E2M1 codes 0..15 (uint8, any shape) as numbers; exact. Code 8 is negative zero."""
    return _E2M1_VALUES.to(device=codes.device, dtype=dtype)[codes.int()]


def unpack_nibbles(packed: Tensor) -> Tensor:
    """[..., n] bytes -> [..., 2n] codes 0..15; element 2k is the low nibble of byte k."""
    packed = packed.view(torch.uint8)
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def dequantize_fp8_tile(
    values: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """FP8 weight [out, in] with E8M0 `scales` [out/32, in/32], one per 32x32 tile."""
    out, width = values.shape
    _check_multiple(values, (out, width))
    tiles = decode_e4m3(values, dtype).view(out // TILE, TILE, width // TILE, TILE)
    return tiles.mul_(decode_e8m0(scales, dtype)[:, None, :, None]).view(out, width)


def dequantize_fp8_row(
    values: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """FP8 rows [..., n] with E8M0 `scales` [..., n/32], one per 32 values (Engram tables)."""
    groups = decode_e4m3(values, dtype).unflatten(-1, (-1, TILE))
    return groups.mul_(decode_e8m0(scales, dtype)[..., None]).flatten(-2)


def dequantize_mxfp4(values: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """MXFP4 [..., n/2] bytes with E8M0 `scales` [..., n/32] -> [..., n]."""
    groups = decode_e2m1(unpack_nibbles(values), dtype).unflatten(-1, (-1, TILE))
    return groups.mul_(decode_e8m0(scales, dtype)[..., None]).flatten(-2)


def _check_multiple(x: Tensor, sizes: tuple[int, ...]) -> None:
    if any(size % TILE for size in sizes):
        raise ValueError(f"axes of shape {tuple(x.shape)} must be multiples of {TILE}")
