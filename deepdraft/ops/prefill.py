"""Operations that only prompts have, in quant numerics: contract and torch reference.

What a chunk of a prompt shares with a decode step has its reference there (`gemm`, `moe`, `index`,
`boundary`, `cache`). `deepdraft.kernels.prefill_*` compute the same.

Letters: R rows, H heads, N keys of a row, C latent channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepdraft.ops.attention import BLOCK_KEYS


def running_sink_attention(
    q: Tensor, keys: Tensor, valid: Tensor, sink: Tensor, scale: float, *, turn: int = BLOCK_KEYS
) -> Tensor:
    """q [R, H, C], keys [R, N, C], valid bool [R, N], sink [H] -> o [R, H, C].

    N is a multiple of `turn`. Keys are taken that many at a time; probabilities, relative to the
    largest score so far (at least -1e30), are rounded to bf16 for the value product and added
    unrounded to the denominator; what was summed before is scaled down when the maximum grows. The
    sink joins the denominator last. A row without keys gives zeros (architecture notes 3.7).
    """
    r, h, _ = q.shape
    scores = torch.einsum("rhc,rnc->rhn", q, keys) * scale
    scores = scores.masked_fill(~valid.unsqueeze(1), -torch.inf)
    top = torch.full((r, h), -1e30, dtype=q.dtype, device=q.device)
    total, o = torch.zeros_like(top), torch.zeros_like(q)
    for at in range(0, keys.shape[1], turn):
        part = scores[:, :, at : at + turn]
        highest = torch.maximum(top, part.amax(-1))
        weights = (part - highest.unsqueeze(-1)).exp()
        rounded = weights.to(torch.bfloat16).to(q.dtype)
        share = (top - highest).exp()
        total = total * share + weights.sum(-1)
        o = o * share.unsqueeze(-1)
        o = o + torch.einsum("rhn,rnc->rhc", rounded, keys[:, at : at + turn])
        top = highest
    highest = torch.maximum(top, sink)
    share = (top - highest).exp()
    return o * (share / (total * share + (sink - highest).exp())).unsqueeze(-1)
