"""FP8 weights in blocks of 128 x 128, as V3, V3.1, V3.2 and V4 are published.

Owns: E4M3 codes with one factor per block, in both directions. Factors are float32
(`weight_scale_inv`, a multiplier in spite of its name) or E8M0 bytes. Rows and columns need not be
multiples of 128: the last blocks are cut. Knows nothing of: files, tensor names.
"""

import torch
from torch import Tensor

from deepdraft.quant.formats import decode_e4m3, decode_e8m0, encode_e4m3
from deepdraft.quant.rounding import E4M3_MAX

BLOCK = 128


def dequantize_fp8_block(
    values: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """E4M3 codes [out, in] times `scales` [ceil(out/128), ceil(in/128)] (float32, or uint8 E8M0
    bytes): [out, in] in `dtype`."""
    factors = decode_e8m0(scales, dtype) if scales.dtype == torch.uint8 else scales.to(dtype)
    return decode_e4m3(values, dtype).mul_(_spread(factors, values.shape))


def quantize_fp8_block(x: Tensor) -> tuple[Tensor, Tensor]:
    """Finite [out, in] -> E4M3 codes (uint8) and float32 factors amax / 448 of each block.

    Worst error: 2**-4 of a value, at least 2**-10 of its factor.
    """
    out, width = x.shape
    rows, cols = -(-out // BLOCK), -(-width // BLOCK)
    padded = x.new_zeros(rows * BLOCK, cols * BLOCK)
    padded[:out, :width] = x
    blocks = padded.view(rows, BLOCK, cols, BLOCK)
    scales = (blocks.abs().amax(dim=(1, 3)) / E4M3_MAX).clamp(min=2.0**-100).float()
    return encode_e4m3(x / _spread(scales.to(x.dtype), x.shape)), scales


def _spread(factors: Tensor, shape: torch.Size) -> Tensor:
    rows = factors.repeat_interleave(BLOCK, 0)[: shape[0]]
    return rows.repeat_interleave(BLOCK, 1)[:, : shape[1]]
