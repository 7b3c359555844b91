"""Cache entries as records: from a projection to the stored bytes. Contract and torch reference.

What a record holds is `quant.records`; here is what goes into it: norm, rotation of the last
channels, the rounding between them (quant numerics). `deepdraft.kernels.cache` computes the same.

Letters: R rows, C channels of an entry, P rotary pairs (the last 2 P channels).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from deepdraft.ops.elementwise import rms_norm, sigmoid
from deepdraft.quant import records

Format = Literal["window", "main", "index"]
_PACK = {
    "window": records.pack_fp8_group32,
    "main": records.pack_fp4_e4m3_group16,
    "index": records.pack_mxfp4_group32,
}
_UNPACK = {
    "window": records.unpack_fp8_group32,
    "main": records.unpack_fp4_e4m3_group16,
    "index": records.unpack_mxfp4_group32,
}
_BYTES = {
    "window": records.fp8_record_bytes,
    "main": records.fp4_record_bytes,
    "index": records.mxfp4_record_bytes,
}


def record_bytes(kind: Format, channels: int) -> int:
    """Bytes of one entry."""
    return _BYTES[kind](channels)


def unpack(kind: Format, stored: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Records [..., bytes] -> values [..., C]."""
    return _UNPACK[kind](stored.contiguous(), dtype)


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the last 2 P channels of x [R, ..., C] in adjacent pairs by tables [R, P]."""
    middle = (1,) * (x.dim() - 2)
    cos, sin = (t.view(t.shape[0], *middle, t.shape[1]) for t in (cos, sin))
    still, turning = x.split((x.shape[-1] - 2 * cos.shape[-1], 2 * cos.shape[-1]), -1)
    even, odd = turning[..., ::2], turning[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1)
    return torch.cat((still, turned.flatten(-2)), -1)


def bf16(x: Tensor) -> Tensor:
    """x rounded to bf16 values, in its own dtype."""
    return x.to(torch.bfloat16).to(x.dtype)


def pool_pair(before: Tensor, now: Tensor) -> Tensor:
    """Ratio 2: value and gate of two neighbours [R, 2C] each -> pooled [R, C], bf16 values
    (notes 3.4)."""
    c = before.shape[1] // 2
    share = sigmoid(now[:, c:] - before[:, c:])
    return bf16(torch.lerp(before[:, :c], now[:, :c], share))


def entry(
    kind: Format, x: Tensor, norm: Tensor, cos: Tensor, sin: Tensor, *, norm_eps: float
) -> tuple[Tensor, Tensor]:
    """x [R, C] (bf16 values) -> its record uint8 [R, bytes] and the normed latent [R, C] before
    rotation (bf16 values)."""
    latent = bf16(rms_norm(x, norm, norm_eps))
    turned = bf16(rotate_pairs(latent, cos, sin))
    return _PACK[kind](turned), latent
