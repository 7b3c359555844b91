"""Mixture of experts: routing and expert products. Torch reference.

Letters: R rows, E experts (the shared expert is the last one, number E-1), K picks of a row with the shared
expert last, D hidden, F expert width.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from deepdraft.ops.elementwise import sigmoid, softplus


def gathers(num_rows: int, k: int, experts: int) -> bool:
    """Whether the picked experts' weights are gathered (few rows) or every expert meets every row.

    Both give the same bits, as each product has two or more rows (`selftest` checks it). Gathering
    copies the weights first, so it pays up to about half of the experts.
    """
    return 2 * num_rows * k < experts


def route(
    x: Tensor, gate_t: Tensor, bias: Tensor, *, k: int, scale: float, temperature: float
) -> tuple[Tensor, Tensor]:
    """x [R, D] -> picks int64 [R, k] by descending biased score, weights [R, k] (notes section 4).

    Scores are sqrt(softplus(gate x)); the bias takes part in the choice only.
    """
    logits = x @ gate_t
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

    x [R, D] (already quantised where the numerics ask for it), picks and weights [R, K], w13 [E, D, 2F] (gate
    then up), w2 [E, F, D]. `round_up` rounds the first products and the second ones as
    the numerics ask, `quantise` the input of the second product.
    `num_rows`: rows that count; the rest is padding and gets zeros or anything finite.
    """
    if gathers(num_rows, picks.shape[1], w13.shape[0]):
        return _gathered(x, picks, weights, w13, w2, limit, num_rows, round_up, quantise)
    return _dense(x, picks, weights, w13, w2, limit, round_up, quantise)


def _activate(h: Tensor, limit: float) -> Tensor:
    gate, up = h.chunk(2, -1)
    gate = gate.clamp(max=limit)
    return sigmoid(gate).mul_(gate).mul_(up.clamp(-limit, limit))


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
    rows, k = x.shape[0], picks.shape[1]
    flat = picks[:num_rows].reshape(-1)
    # Two equal rows a product: a product of one row takes another path in BLAS, with other bits.
    pairs = x[:num_rows].view(num_rows, 1, 1, -1).expand(num_rows, k, 2, -1)
    h = torch.bmm(pairs.reshape(num_rows * k, 2, -1), w13.index_select(0, flat))
    f = _activate(round_up(h), limit).mul_(weights[:num_rows].reshape(-1, 1, 1))
    y = round_up(torch.bmm(quantise(round_up(f)), w2.index_select(0, flat)))
    y = y.view(num_rows, k, 2, -1)
    out = y[:, 0]
    for i in range(1, k):
        out = out + y[:, i]
    if rows == 2 and num_rows == 1:
        return out.reshape(2, -1)  # the padding row repeats the only row
    out = out[:, 0]
    return out if rows == num_rows else torch.cat([out, out[-1:].expand(rows - num_rows, -1)])


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
    rows, k = picks.shape
    experts = w13.shape[0]
    spread = torch.zeros(rows, experts, dtype=x.dtype, device=x.device).scatter_(1, picks, weights)
    h = torch.bmm(x.unsqueeze(0).expand(experts, -1, -1), w13)
    f = _activate(round_up(h), limit).mul_(spread.t().unsqueeze(-1))
    y = round_up(torch.bmm(quantise(round_up(f)), w2)).transpose(0, 1)
    picked = y.gather(1, picks.unsqueeze(-1).expand(-1, -1, y.shape[-1]))
    out = picked[:, 0]
    for i in range(1, k):
        out = out + picked[:, i]
    return out
