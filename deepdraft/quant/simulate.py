"""Quantise-dequantise of activations and cache entries (architecture notes 7.3, 7.4).

Owns: the rounding that inputs of quantised linear maps, window KV, main KV and index queries and
keys go through, as numbers in and numbers out. The last axis is grouped; every group is rounded by
itself, so a row's bits do not depend on other rows. float32 or float64, exact in both.
Knows nothing of: codes and bytes (`formats`, `records`).
"""

import torch
from torch import Tensor

from deepdraft.quant.rounding import (
    E2M1_MAX,
    E4M3_MAX,
    bits_of,
    ceil_exponent,
    ceil_scale,
    round_at,
    round_e2m1,
    round_e4m3,
)

GROUP = 32
"""Scale group of FP8 activations, window KV and index keys."""
KV_GROUP = 16
"""Scale group of main KV entries."""
ACT_AMAX_FLOOR = 1e-4
INDEX_AMAX_FLOOR = 6.0 * 2.0**-126
KV_SCALE_FLOOR = 2.0**-9


def _fake_group32(x: Tensor, *, floor: float, largest: float, smallest: float, kept: int) -> Tensor:
    # Scales are powers of two: rounding x on the scaled grid equals rounding x / scale.
    bits = bits_of(x)
    groups = x.unflatten(-1, (-1, GROUP))
    pattern = groups.view(bits.integer)
    lowest = ceil_exponent(
        pattern & bits.magnitude_mask, x.dtype, floor=floor, largest=largest, smallest=smallest
    )
    exponent = torch.maximum(pattern & bits.exponent_mask, lowest)
    return round_at(groups, exponent, kept).flatten(-2)


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


def fake_fp8_groups(x: Tensor, size: int, *, powers: bool) -> Tensor:
    """E4M3 in groups of `size` along the last axis, the last one cut, as numbers again.

    A group's scale is max(amax, 1e-4) / 448, or the next power of two (`powers`). Inputs of maps
    stored in FP8 blocks and V4's cache entries. Worst error: 2**-4 of a value, at least 2**-10 of
    the scale. Every group by itself.
    """
    width = x.shape[-1]
    if width % size:
        x = torch.nn.functional.pad(x, (0, -width % size))
    groups = x.unflatten(-1, (-1, size))
    amax = groups.abs().amax(dim=-1, keepdim=True)
    if powers:
        scale = ceil_scale(amax, E4M3_MAX, ACT_AMAX_FLOOR)
    else:
        scale = amax.clamp_(min=ACT_AMAX_FLOOR).div_(E4M3_MAX)
    codes = round_e4m3(groups.div(scale).clamp_(-E4M3_MAX, E4M3_MAX))
    return codes.mul_(scale).flatten(-2)[..., :width].contiguous()


def kv_group_scale(groups: Tensor) -> Tensor:
    """E4M3-rounded amax / 6 of [..., g] groups, in 2**-9..448; shape [..., 1]."""
    scale = groups.abs().amax(dim=-1, keepdim=True).div_(E2M1_MAX)
    return round_e4m3(scale.clamp_(min=KV_SCALE_FLOOR, max=E4M3_MAX))


def fake_fp4_e4m3_group16(x: Tensor) -> Tensor:
    """E2M1 in groups of 16 along the last axis with E4M3 scales, as numbers again (main KV).

    Worst error for a largest magnitude in 6 * 2**-6..2688: a quarter of a value, at least a quarter
    of the scale.
    """
    groups = x.unflatten(-1, (-1, KV_GROUP))
    scale = kv_group_scale(groups)
    codes = round_e2m1(groups.div(scale).clamp_(-E2M1_MAX, E2M1_MAX))
    return codes.mul_(scale).flatten(-2)
