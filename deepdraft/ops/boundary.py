"""From one sublayer to the next in quant numerics: contract and torch reference.

Composes the row-wise operations of `elementwise` with the roundings of the published arithmetic, as
the models do step by step. `deepdraft.kernels.mhc` computes the same.

Letters: R rows, S residual streams, D hidden, M = (2 + S) S coefficients (pre, post, comb), K
picks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepdraft.ops.elementwise import HyperMix, collapse, expand, rms_norm


def _bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


def mix_coefficients(
    x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, iters: int, eps: float, norm_eps: float
) -> Tensor:
    """Streams x [R, S, D] -> [R, M]: pre [S], post [S], comb [S, S] row by row (notes 2.2)."""
    mix = HyperMix(fn, base, scale, streams=x.shape[1], iters=iters, eps=eps)
    pre, post, comb = mix(x, norm_eps)
    return torch.cat((pre.flatten(1), post.flatten(1), comb.flatten(1)), 1)


def sum_of_picks(picked: Tensor, shared: Tensor) -> Tensor:
    """picked [R, K, D] and the shared expert's output [R, D], added in that order: [R, D], rounded
    to bf16 values."""
    first, *rest = picked.unbind(1)
    for part in (*rest, shared):
        first = first + part
    return _bf16(first)


def boundary(
    x: Tensor, y: Tensor | None, coef: Tensor | None, pre: Tensor, norm: Tensor, *, norm_eps: float
) -> tuple[Tensor, Tensor]:
    """Streams x [R, S, D] with y [R, D] written back, and the next sublayer's input [R, D].

    coef [R, M] (post and comb are read), pre [R, S], norm [D]. Values of both results are bf16.
    `y` None: the streams stay.
    """
    s = x.shape[1]
    if y is not None:
        assert coef is not None
        post, comb = coef[:, s : 2 * s].unsqueeze(1), coef[:, 2 * s :].view(-1, s, s)
        x = _bf16(expand(y, x, post, comb))
    return x, norm_rows(_bf16(collapse(x, pre.unsqueeze(1))), norm, norm_eps=norm_eps)


def norm_rows(x: Tensor, weight: Tensor, *, norm_eps: float) -> Tensor:
    """RMS norm of [R, D], rounded to bf16 values."""
    return _bf16(rms_norm(x, weight, norm_eps))
