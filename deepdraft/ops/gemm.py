"""Matrix products of a decode step in the published formats: contract and torch reference.

Each function says what the kernel of the same purpose in `deepdraft.kernels.gemv` computes (quant
numerics), in float32 or, as the oracle of tests, float64. Kernels never fall back to these: what a
kernel cannot take is an error.

Letters: R rows, N outputs, K inputs, G = K / 32 scale groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepdraft.quant import formats, records

GROUP = 32


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Rows in FP8: `codes` uint8 [R, K], `scales` float32 [K/32, R] (powers of two)."""

    codes: Tensor
    scales: Tensor

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers [R, K], exact."""
        groups = formats.decode_e4m3(self.codes, dtype).unflatten(-1, (-1, GROUP))
        return groups.mul_(self.scales.t().unsqueeze(-1).to(dtype)).flatten(-2)


def quantize_rows(x: Tensor) -> Fp8Rows:
    """x [R, K] (float32 values) -> E4M3 in groups of 32 with power-of-two scales.

    The same rounding as `simulate.fake_fp8_group32` (architecture notes 7.3); keeps -0.
    """
    record = records.pack_fp8_group32(x.float())
    k = x.shape[1]
    scales = formats.decode_e8m0(record[:, k:].contiguous())
    return Fp8Rows(record[:, :k].contiguous(), scales.t().contiguous())


def fp8_linear(
    x: Fp8Rows, values: Tensor, scales: Tensor, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """x [R, K] times the FP8 weight [N, K] with 32 x 32 scales: [R, N], sums in `dtype`.

    A kernel's error against float64: |y - exact| <= (K + 2G) 2**-24 sum |x w|, then one rounding
    to the output's type.
    """
    return x.dequantize(dtype) @ formats.dequantize_fp8_tile(values, scales, dtype).t()


def fp8_grouped_linear(
    x: Tensor, values: Tensor, scales: Tensor, blocks: int, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Block-diagonal map of unquantised rows (wo_a): x [R, blocks * K] (bf16 values), weight
    [N, K] whose rows n belong to block n // (N / blocks): [R, N]."""
    w = formats.dequantize_fp8_tile(values, scales, dtype).view(blocks, -1, values.shape[1])
    parts = x.to(dtype).view(x.shape[0], blocks, -1)
    return torch.einsum("rbk,bnk->rbn", parts, w).flatten(1)


def bf16_linear(x: Tensor, weight: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """x [R, K] (bf16 values) times a bf16 weight [N, K]: [R, N] (head, router, compressor)."""
    return x.to(dtype) @ weight.to(dtype).t()
