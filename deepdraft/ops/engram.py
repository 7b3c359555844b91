"""Engram of a decode step in quant numerics: contract and torch reference.

`deepdraft.kernels.engram` computes the same. Letters: R rows, S streams, D hidden, G table rows of
a token, W values of a table row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepdraft.ops.elementwise import inverse_rms, sigmoid
from deepdraft.quant import formats


def gather_rows(values: Tensor, scales: Tensor, rows: Tensor) -> Tensor:
    """Table values uint8 [N, W] and scales uint8 [N, W/32], rows int64 [R, G] -> [R, G * W], bf16
    values; a kernel quantises them in groups of 32 (`gemm.quantize_rows`).

    A row number outside the table gives zeros.
    """
    inside = (rows >= 0) & (rows < values.shape[0])
    at = rows.where(inside, torch.zeros_like(rows)).flatten()
    x = formats.dequantize_fp8_row(values[at], scales[at]).view(*rows.shape, -1)
    return x.masked_fill(~inside.unsqueeze(-1), 0.0).bfloat16().float().flatten(1)


def inject(x: Tensor, kv: Tensor, gate: Tensor, *, norm_eps: float) -> Tensor:
    """Streams x [R, S, D] plus the gated memory: kv [R, (S + 1) D] (a key for each stream, then
    the value), gate [S, D] (q_weight * k_weight / sqrt(D)); bf16 values (notes 5.3)."""
    kv = kv.unflatten(1, (-1, x.shape[2]))
    key, value = kv[:, :-1], kv[:, -1:]
    delta = (x * gate * key).sum(-1)
    delta = delta * inverse_rms(x, norm_eps).squeeze(-1) * inverse_rms(key, norm_eps).squeeze(-1)
    gamma = sigmoid(delta.sign() * delta.abs().clamp(min=1e-6).sqrt())
    return (x + gamma.unsqueeze(-1) * value).to(torch.bfloat16).to(x.dtype)
