"""Mixture of experts: routing and expert products. Torch reference.

Letters: R rows, E experts (the shared expert is the last one, number E-1), K picks of a row with
the shared expert last, D hidden, F expert width.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from deepdraft.ops.elementwise import silu, softplus

LARGE_EXPERT = 1 << 16
"""Values of an expert's first map. One row, 8 of 12 experts of 2048 x 2816, one thread: 210 ms with
gathered weights, 31 ms without; 128 x 64: 0.04 and 0.28 ms."""


def gathers(num_rows: int, k: int, experts: int) -> bool:
    """Whether the picked experts' weights are gathered (few rows) or every expert meets every row.

    Both give the same bits, as each product has two or more rows (`selftest` checks it). Gathering
    copies the weights first, so it pays up to about half of the experts.
    """
    return 2 * num_rows * k < experts


def sorts(num_rows: int, experts: int, values: int) -> bool:
    """Whether rows are sorted by expert, so that each expert meets its own rows only; again the
    same bits. It takes two calls an expert, which many rows are worth, and experts with so many
    `values` in their first map that copying one takes longer."""
    return 2 * num_rows > 3 * experts or values >= LARGE_EXPERT


def route(
    x: Tensor, gate_t: Tensor, bias: Tensor, *, k: int, scale: float, temperature: float
) -> tuple[Tensor, Tensor]:
    """x [R, D] -> picks int64 [R, k] by descending biased score, weights [R, k] (notes section 4).

    Scores are sqrt(softplus(gate x)); the bias takes part in the choice only.
    """
    logits = torch.mm(x, gate_t)
    if temperature != 1.0:
        logits = logits / temperature
    scores = softplus(logits).sqrt_()
    picks = (scores + bias).topk(k, dim=-1).indices
    weights = scores.gather(1, picks)
    return picks, weights.div_(weights.sum(-1, keepdim=True).add_(1e-20)).mul_(scale)


def expert_products(
    x: Tensor,
    picks: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    *,
    limit: float,
    num_rows: int,
    round_up: Callable[[Tensor], Tensor],
    quantise: Callable[[Tensor], Tensor],
) -> Tensor:
    """Sum over the picks of weight * expert(x), in pick order: [R, D].

    x [R, D] (already quantised where the numerics ask for it), picks and weights [R, K], w13 [E,
    D, 2F] (gate then up), w2 [E, F, D]. `round_up` rounds the first products and the second ones
    as the numerics ask, `quantise` the input of the second product. `num_rows`: rows that count:
    all, or one that is followed by its copy.
    """
    if x.device.type == "cpu" and sorts(num_rows, w13.shape[0], w13.shape[1] * w13.shape[2]):
        return _sorted(x, picks, weights, w13, w2, limit, round_up, quantise)
    if gathers(num_rows, picks.shape[1], w13.shape[0]):
        return _gathered(x, picks, weights, w13, w2, limit, num_rows, round_up, quantise)
    return _dense(x, picks, weights, w13, w2, limit, round_up, quantise)


def _activate(h: Tensor, limit: float) -> Tensor:
    gate, up = h.chunk(2, -1)
    if limit == math.inf:
        return silu(gate).mul_(up)
    return silu(gate.clamp(max=limit)).mul_(up.clamp(-limit, limit))


def _gathered(
    x: Tensor,
    picks: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    limit: float,
    num_rows: int,
    round_up: Callable[[Tensor], Tensor],
    quantise: Callable[[Tensor], Tensor],
) -> Tensor:
    n, k = num_rows, picks.shape[1]
    # Two equal rows a product: a product of one row takes another path in BLAS, with other bits. A
    # single row is padded to two already.
    if n == 1:
        picks, weights, pairs = picks[0], weights[0], x.expand(k, -1, -1)
    else:
        pairs = x.view(n, 1, 1, -1).expand(-1, k, 2, -1).reshape(n * k, 2, -1)
    flat = picks.reshape(-1)
    h = torch.bmm(pairs, w13.index_select(0, flat))
    f = _activate(round_up(h), limit).mul_(weights.reshape(-1, 1, 1))
    y = round_up(torch.bmm(quantise(round_up(f)), w2.index_select(0, flat)))
    out = _sum(y.view(n, k, 2, -1))
    return out.squeeze(0) if n == 1 else out[:, 0]


def _dense(
    x: Tensor,
    picks: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    limit: float,
    round_up: Callable[[Tensor], Tensor],
    quantise: Callable[[Tensor], Tensor],
) -> Tensor:
    rows = picks.shape[0]
    experts = w13.shape[0]
    spread = torch.zeros(rows, experts, dtype=x.dtype, device=x.device).scatter_(1, picks, weights)
    h = torch.bmm(x.unsqueeze(0).expand(experts, -1, -1), w13)
    f = _activate(round_up(h), limit).mul_(spread.t().unsqueeze(-1))
    y = round_up(torch.bmm(quantise(round_up(f)), w2)).transpose(0, 1)
    return _sum(y.gather(1, picks.unsqueeze(-1).expand(-1, -1, y.shape[-1])))


def _sorted(
    x: Tensor,
    picks: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    limit: float,
    round_up: Callable[[Tensor], Tensor],
    quantise: Callable[[Tensor], Tensor],
) -> Tensor:
    rows, k = picks.shape
    flat = picks.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=w13.shape[0]).tolist()
    h = _products(x.index_select(0, order // k), w13, counts)
    f = _activate(round_up(h), limit).mul_(weights.reshape(-1)[order].unsqueeze(1))
    y = round_up(_products(quantise(round_up(f)), w2, counts))
    back = torch.empty_like(order)
    back[order] = torch.arange(rows * k)
    return _sum(y.index_select(0, back).view(rows, k, -1))


def _products(x: Tensor, w: Tensor, counts: list[int]) -> Tensor:
    """The first counts[0] rows of x times w[0], the next counts[1] ones times w[1], and so on."""
    out = x.new_empty(x.shape[0], w.shape[2])
    at = 0
    for expert, count in enumerate(counts):
        part = x[at : at + count]
        if count == 1:  # a product of one row has other bits
            out[at] = torch.mm(part.expand(2, -1), w[expert])[0]
        elif count:
            torch.mm(part, w[expert], out=out[at : at + count])
        at += count
    return out


def _sum(picked: Tensor) -> Tensor:
    """[R, K, ..] -> [R, ..], in pick order."""
    first, *rest = picked.unbind(1)
    out = first
    for part in rest:
        out = out + part
    return out


def routed_up(
    x: Tensor,
    picks: Tensor,
    weights: Tensor,
    w1: Tensor,
    w3: Tensor,
    *,
    limit: float,
) -> Tensor:
    """Inputs of the down product, before they are quantised: bf16 values [R, K, F] (quant
    numerics).

    x [R, D] (quantised values), picks int64 [R, K], weights [R, K], w1 and w3 [E, F, D] as
    published, dequantised, all of one dtype. The reference of `deepdraft.kernels.moe.routed_up`,
    which quantises the result in groups of 32 as `gemm.quantize_rows` does.
    """
    gate = torch.einsum("rd,rkfd->rkf", x, w1[picks])
    up = torch.einsum("rd,rkfd->rkf", x, w3[picks])
    gate, up = (h.bfloat16().to(x.dtype) for h in (gate, up))
    f = silu(gate.clamp(max=limit)) * up.clamp(-limit, limit) * weights.unsqueeze(-1)
    return f.bfloat16().to(x.dtype)


def routed_down(h: Tensor, picks: Tensor, w2: Tensor) -> Tensor:
    """h [R, K, F] (quantised values) times w2 [E, D, F] of each pick: [R, K, D], sums in h's dtype.

    The reference of `deepdraft.kernels.moe.routed_down`, which rounds the result to bf16.
    """
    return torch.einsum("rkf,rkdf->rkd", h, w2[picks])
