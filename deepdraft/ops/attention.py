"""Sparse attention over a window and selected compressed entries, with a sink per head.

Keys are values (one latent per token). Torch reference.
Letters: R rows, H heads, N keys of a row, C latent channels.

Contract: the keys of a row stand in a fixed number of places (window by position, the sink's zero
key, then selected entries by position); a place without a key has bias -inf. So the bits of a row
are a function of that row alone.
"""

import torch
from torch import Tensor

BLOCK_KEYS = 64
"""The published arithmetic works through the keys in blocks of this many (quant numerics)."""


def sink_attention(q: Tensor, keys: Tensor, bias: Tensor, scale: float) -> Tensor:
    """q [R, H, C], keys [R, N, C], bias [R, H, N] -> o [R, H, C].

    The sink is a key of zeros whose bias is the sink logit, so it adds to the denominator only.
    """
    scores = torch.baddbmm(bias, q, keys.transpose(1, 2), alpha=scale)
    return torch.bmm(scores.softmax(-1), keys)


def sink_attention_bf16(q: Tensor, keys: Tensor, bias: Tensor, scale: float) -> Tensor:
    """As `sink_attention`, in the published code's precision: unnormalised probabilities are
    rounded to bf16 before the value product, denominators stay in float32 (architecture notes
    3.7)."""
    scores = torch.baddbmm(bias, q, keys.transpose(1, 2), alpha=scale)
    weights = (scores - scores.amax(-1, keepdim=True)).exp_()
    total = weights.sum(-1, keepdim=True)
    rounded = weights.to(torch.bfloat16).to(q.dtype)
    return torch.bmm(rounded, keys).div_(total)
