"""Rounding on the device: bf16, E4M3 and E2M1 to nearest even, and the scales of groups.

Owns: every narrowing that a kernel does. Triton's interpreter truncates fp32 -> bf16 and rounds
E4M3 ties away from zero, so under it the two casts are written with integers; on a GPU they are
the hardware's casts. Both give the same bits (tests over all patterns). The formulas are those of
`deepdraft.quant.rounding`.
"""

import triton
import triton.language as tl

from deepdraft.kernels.runtime import INTERPRET

ACT_FLOOR = tl.constexpr(0x38D1B717)
"""Bits of 1e-4, the least largest magnitude of an FP8 group of 32."""
INDEX_FLOOR = tl.constexpr(0x01C00000)
"""Bits of 6 * 2**-126, the same for an MXFP4 group."""
E4M3_CARRY = tl.constexpr((0x1FFFFF - (8 << 23)) % (1 << 32))
"""Added to an amax's bits: its exponent field becomes that of 2**ceil(log2(amax / 448))."""
E2M1_CARRY = tl.constexpr((0x3FFFFF - (2 << 23)) % (1 << 32))
"""As E4M3_CARRY, for 6 in place of 448."""


@triton.jit
def to_bf16_rne(x):
    """fp32 -> bf16, ties to even. NaN stays NaN."""
    if INTERPRET:
        bits = x.to(tl.uint32, bitcast=True)
        up = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        nan = ((bits >> 16) & 0x8000) | 0x7FC0
        out = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, nan, up)
        return out.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def round_bf16(x):
    """fp32 rounded to bf16 values, as fp32."""
    return to_bf16_rne(x).to(tl.float32)


@triton.jit
def to_e4m3_rne(x):
    """fp32 -> E4M3 codes (uint8), ties to even, clipped to +-448; keeps NaN and the sign of 0."""
    if INTERPRET:
        bits = x.to(tl.uint32, bitcast=True)
        magnitude = tl.minimum((bits & 0x7FFFFFFF).to(tl.float32, bitcast=True), 448.0)
        exponent = magnitude.to(tl.uint32, bitcast=True) & 0x7F800000
        exponent = tl.maximum(exponent, 0x3C800000)  # 2**-6, below it steps are 2**-9
        shift = (exponent + ((23 - 3) << 23) + (1 << 22)).to(tl.float32, bitcast=True)
        rounded = (magnitude + shift) - shift
        normal = (rounded.to(tl.uint32, bitcast=True) >> 20) - ((127 - 7) << 3)
        small = (rounded * 512.0).to(tl.uint32)
        code = tl.where(rounded < 0.015625, small, normal)
        code = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7F, code)
        return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
    else:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def from_e4m3(codes):
    """E4M3 codes (uint8) -> fp32, exact. NaN codes are not valid here."""
    return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def to_e2m1_rne(x):
    """fp32 -> E2M1 codes 0..15 (uint8), ties to even, clipped to +-6; keeps the sign of zero."""
    bits = x.to(tl.uint32, bitcast=True)
    a = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    # Halfway points; those whose lower neighbour has an even code round down.
    code = (a > 0.25).to(tl.uint8) + (a >= 0.75).to(tl.uint8) + (a > 1.25).to(tl.uint8)
    code += (a >= 1.75).to(tl.uint8) + (a > 2.5).to(tl.uint8) + (a >= 3.5).to(tl.uint8)
    code += (a > 5.0).to(tl.uint8)
    return code | ((bits >> 28) & 8).to(tl.uint8)


@triton.jit
def from_e2m1(codes):
    """E2M1 codes 0..15 (any integer type) -> fp32, exact."""
    code = codes.to(tl.uint32)
    two = code & 3
    # Exponent bits 01, 10, 11 of a normal code stand for 2**0, 2**1, 2**2.
    normal = (((code & 6) >> 1) + 126 << 23) | ((code & 1) << 22)
    small = tl.where(two == 1, 0x3F000000, 0).to(tl.uint32)
    bits = tl.where((code & 7) < 2, small, normal) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def from_e8m0(byte):
    """E8M0 bytes 1..254 (any integer type) -> fp32, exact. Byte 0 counts as zero."""
    return (byte.to(tl.uint32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def scale_bits(amax, FLOOR: tl.constexpr, CARRY: tl.constexpr):
    """Bits (uint32) of the power of two that a group's largest magnitude asks for."""
    bits = tl.maximum(amax.to(tl.uint32, bitcast=True), FLOOR)
    return (bits + CARRY) & 0x7F800000


@triton.jit
def inverse_of(power_bits):
    """1 / 2**e from the bits of 2**e, exact."""
    return ((254 << 23) - power_bits).to(tl.float32, bitcast=True)
