"""Cache entries as bytes: 528 (window KV), 288 (main KV) and 68 (index key) at the published sizes.

Owns: the record layouts. A record holds the element codes of one entry, then its scales:

    fp8_group32       n E4M3 bytes, n/32 E8M0 bytes                       512 -> 512 + 16 = 528
    fp4_e4m3_group16  n/2 bytes of two E2M1, low nibble first, n/16 E4M3  512 -> 256 + 32 = 288
    mxfp4_group32     n/2 bytes of two E2M1, low nibble first, n/32 E8M0  128 ->  64 +  4 = 68

`unpack_x(pack_x(v))` equals `fake_x(v)` of `deepdraft.quant.simulate` bit for bit up to the sign of
zero, which records keep. Records are the state: packing again what was unpacked may choose another
scale. Knows nothing of: pages, sequences, files.
"""

import torch
from torch import Tensor

from deepdraft.quant import formats
from deepdraft.quant.rounding import E2M1_MAX, E4M3_MAX, ceil_scale
from deepdraft.quant.simulate import (
    ACT_AMAX_FLOOR,
    GROUP,
    INDEX_AMAX_FLOOR,
    KV_GROUP,
    kv_group_scale,
)


def fp8_record_bytes(dim: int) -> int:
    """Bytes of a window KV record of `dim` values."""
    return dim + dim // GROUP


def fp4_record_bytes(dim: int) -> int:
    """Bytes of a main KV record of `dim` values."""
    return dim // 2 + dim // KV_GROUP


def mxfp4_record_bytes(dim: int) -> int:
    """Bytes of an index-key record of `dim` values."""
    return dim // 2 + dim // GROUP


def pack_fp8_group32(x: Tensor) -> Tensor:
    """[..., n] float32 or float64 -> [..., n + n/32] uint8 (window KV)."""
    groups = x.unflatten(-1, (-1, GROUP))
    amax = groups.abs().amax(dim=-1)
    scale = ceil_scale(amax, E4M3_MAX, ACT_AMAX_FLOOR)
    codes = formats.encode_e4m3(groups / scale[..., None]).flatten(-2)
    return torch.cat((codes, formats.encode_e8m0(scale)), dim=-1)


def unpack_fp8_group32(record: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Inverse of `pack_fp8_group32`: [..., n + n/32] uint8 -> [..., n]."""
    dim = record.shape[-1] * GROUP // (GROUP + 1)
    codes, scales = record.split((dim, dim // GROUP), dim=-1)
    return formats.dequantize_fp8_row(codes.contiguous(), scales.contiguous(), dtype)


def pack_fp4_e4m3_group16(x: Tensor) -> Tensor:
    """[..., n] float32 or float64 -> [..., n/2 + n/16] uint8 (main KV)."""
    groups = x.unflatten(-1, (-1, KV_GROUP))
    scale = kv_group_scale(groups)
    codes = formats.encode_e2m1(groups / scale).flatten(-2)
    return torch.cat((formats.pack_nibbles(codes), formats.encode_e4m3(scale.squeeze(-1))), dim=-1)


def unpack_fp4_e4m3_group16(record: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Inverse of `pack_fp4_e4m3_group16`: [..., n/2 + n/16] uint8 -> [..., n]."""
    dim = record.shape[-1] * KV_GROUP // (KV_GROUP // 2 + 1)
    packed, scales = record.split((dim // 2, dim // KV_GROUP), dim=-1)
    codes = formats.decode_e2m1_pairs(packed, dtype)
    groups = codes.unflatten(-1, (-1, KV_GROUP))
    return groups.mul_(formats.decode_e4m3(scales.contiguous(), dtype)[..., None]).flatten(-2)


def pack_mxfp4_group32(x: Tensor) -> Tensor:
    """[..., n] float32 or float64 -> [..., n/2 + n/32] uint8 (index keys)."""
    groups = x.unflatten(-1, (-1, GROUP))
    amax = groups.abs().amax(dim=-1)
    scale = ceil_scale(amax, E2M1_MAX, INDEX_AMAX_FLOOR)
    codes = formats.encode_e2m1(groups / scale[..., None]).flatten(-2)
    return torch.cat((formats.pack_nibbles(codes), formats.encode_e8m0(scale)), dim=-1)


def unpack_mxfp4_group32(record: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Inverse of `pack_mxfp4_group32`: [..., n/2 + n/32] uint8 -> [..., n]."""
    dim = record.shape[-1] * GROUP // (GROUP // 2 + 1)
    packed, scales = record.split((dim // 2, dim // GROUP), dim=-1)
    return formats.dequantize_mxfp4(packed.contiguous(), scales.contiguous(), dtype)
