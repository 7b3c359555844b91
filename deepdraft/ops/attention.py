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
    scores = _scores(q, keys, bias, scale)
    return torch.bmm(scores.softmax(-1), keys)


def _scores(q: Tensor, keys: Tensor, bias: Tensor, scale: float) -> Tensor:
    q, keys, bias, rows = *_no_fewer_than_threads(q, keys, bias), q.shape[0]
    return torch.baddbmm(bias, q, keys.transpose(1, 2), alpha=scale)[:rows]


def _no_fewer_than_threads(*operands: Tensor) -> tuple[Tensor, ...]:
    """Operands [R, ...] of R products, filled up with the last row's.

    Where MKL has fewer products than threads, it works each with several threads, whose sums depend
    on how many (docs/numerics.md).
    """
    rows, least = operands[0].shape[0], torch.get_num_threads()
    if rows >= least or operands[0].device.type != "cpu":
        return operands
    each = torch.arange(least).clamp_(max=rows - 1)
    return tuple(x.index_select(0, each) for x in operands)


def sink_attention_bf16(q: Tensor, keys: Tensor, bias: Tensor, scale: float) -> Tensor:
    """As `sink_attention`, in the published code's precision: unnormalised probabilities are
    rounded to bf16 before the value product, denominators stay in float32 (architecture notes
    3.7)."""
    scores = _scores(q, keys, bias, scale)
    weights = (scores - scores.amax(-1, keepdim=True)).exp_()
    total = weights.sum(-1, keepdim=True)
    rounded = weights.to(torch.bfloat16).to(q.dtype)
    return torch.bmm(rounded, keys).div_(total)


def chunked_sink_attention(
    q: Tensor, keys: Tensor, valid: Tensor, sink: Tensor, scale: float, *, chunk: int = BLOCK_KEYS
) -> Tensor:
    """q [R, H, C], keys [R, N, C], valid bool [R, N], sink [H] -> o [R, H, C] (quant numerics).

    N is a multiple of `chunk`. Each chunk is worked by itself: its probabilities, relative to its
    own largest score, are rounded to bf16 for the value product and added unrounded to its
    denominator; the chunks are then combined in order. The reference of
    `deepdraft.kernels.attention`. A row without keys gives zeros.
    """
    r, h, c = q.shape
    dots = torch.einsum("rhc,rnc->rhn", *_no_fewer_than_threads(q, keys))[:r]
    scores = (dots * scale).masked_fill(~valid.unsqueeze(1), -torch.inf).view(r, h, -1, chunk)
    top = scores.amax(-1, keepdim=True).clamp(min=-1e30)
    weights = (scores - top).exp()
    rounded = weights.to(torch.bfloat16).to(q.dtype)
    parts = torch.einsum("rhkn,rknc->rhkc", rounded, keys.view(r, -1, chunk, c))
    total, top = weights.sum(-1), top.squeeze(-1)
    highest = torch.maximum(top.amax(-1), sink)
    share = (top - highest.unsqueeze(-1)).exp()
    denominator = (sink - highest).exp() + (total * share).sum(-1)
    return (parts * share.unsqueeze(-1)).sum(2) / denominator.unsqueeze(-1)
