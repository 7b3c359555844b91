"""Fake quantisers with straight-through gradients for quantisation-aware training.

Owns: quantise-dequantise of weights (MXFP4, FP8 tiles, FP8 rows) and of activations and KV
entries, as architecture section 7 defines them. Knows nothing of: the model, packing to bytes.
All work on any float dtype of at least float32 precision internally and keep the input's dtype.
"""

import torch
from torch import Tensor

from training import ops

FP8_MAX = 448.0
FP4_MAX = 6.0


def pow2_ceil(x: Tensor) -> Tensor:
    """2^ceil(log2(x)) for normal x > 0, exact also on powers of two (exponent bits only)."""
    if x.dtype == torch.float64:
        mantissa = (1 << 52) - 1
        return ((x.view(torch.int64) + mantissa) & ~mantissa).view(torch.float64)
    mantissa = (1 << 23) - 1
    return ((x.view(torch.int32) + mantissa) & ~mantissa).view(torch.float32)


def round_e4m3(x: Tensor) -> Tensor:
    """Nearest E4M3 value (ties to even), saturating at 448."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float32).to(torch.float8_e4m3fn).to(x.dtype)


def round_e2m1(x: Tensor) -> Tensor:
    """Nearest E2M1 value (ties to the even code), saturating at 6."""
    a = x.abs().clamp(max=FP4_MAX)
    step = torch.where(a < 2, 0.5, torch.where(a < 4, 1.0, 2.0)).to(x.dtype)
    return torch.copysign((a / step).round() * step, x)


def _work(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _straight(x: Tensor, quantised: Tensor) -> Tensor:
    """Forward value `quantised`, gradient of the identity."""
    return x + (quantised.to(x.dtype) - x).detach()


def _groups(x: Tensor, size: int) -> Tensor:
    return x.unflatten(-1, (x.shape[-1] // size, size))


@ops.Piece
def _fp8_group32(x: Tensor) -> Tensor:
    g = _groups(_work(x), 32)
    scale = pow2_ceil(g.abs().amax(-1, keepdim=True).clamp(min=1e-4) / FP8_MAX)
    return (round_e4m3(g / scale) * scale).flatten(-2).to(x.dtype)


class _StraightFp8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[override]
        return _fp8_group32(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        return grad


def fp8_group32(x: Tensor) -> Tensor:
    """Activations and window KV: E4M3 with one E8M0 scale per 32 channels."""
    return _StraightFp8.apply(x)


def fp4_group16(x: Tensor) -> Tensor:
    """Main KV: E2M1 with one E4M3 scale per 16 channels."""
    with torch.no_grad():
        g = _groups(_work(x), 16)
        scale = (g.abs().amax(-1, keepdim=True) / FP4_MAX).clamp(min=2.0**-9)
        scale = round_e4m3(scale)
        q = (round_e2m1(g / scale) * scale).flatten(-2)
    return _straight(x, q)


def mxfp4_group32(x: Tensor) -> Tensor:
    """Index keys and queries, and expert weights: E2M1 with one E8M0 scale per 32 channels."""
    with torch.no_grad():
        g = _groups(_work(x), 32)
        scale = pow2_ceil(g.abs().amax(-1, keepdim=True).clamp(min=FP4_MAX * 2.0**-126) / FP4_MAX)
        q = (round_e2m1(g / scale) * scale).flatten(-2)
    return _straight(x, q)


def fp8_tiles(w: Tensor) -> Tensor:
    """FP8 linear weights [out, in]: E4M3 with one E8M0 scale per 32 x 32 tile."""
    with torch.no_grad():
        out, inn = w.shape
        t = _work(w).reshape(out // 32, 32, inn // 32, 32)
        amax = t.abs().amax(dim=(1, 3), keepdim=True).clamp(min=FP8_MAX * 2.0**-126)
        scale = pow2_ceil(amax / FP8_MAX)
        q = (round_e4m3(t / scale) * scale).reshape(out, inn)
    return _straight(w, q)


def fp8_rows(w: Tensor) -> Tensor:
    """Engram rows: E4M3 with one E8M0 scale per 32 channels of a row."""
    with torch.no_grad():
        g = _groups(_work(w), 32)
        amax = g.abs().amax(-1, keepdim=True).clamp(min=FP8_MAX * 2.0**-126)
        scale = pow2_ceil(amax / FP8_MAX)
        q = (round_e4m3(g / scale) * scale).flatten(-2)
    return _straight(w, q)


WEIGHT_QUANTISERS = {"fp8": fp8_tiles, "fp4": mxfp4_group32, "fp8row": fp8_rows}
