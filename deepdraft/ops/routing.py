"""Choice of experts as each family makes it. Torch reference.

Letters: R rows, E experts, K picks.
"""

import torch
from torch import Tensor

from deepdraft.arch import Router
from deepdraft.ops.elementwise import sigmoid, softplus

_SCORES = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": sigmoid,
    "sqrtsoftplus": lambda logits: softplus(logits).sqrt_(),
}


def expert_scores(logits: Tensor, router: Router) -> Tensor:
    """Router logits [R, E] -> scores [R, E]."""
    return _SCORES[router.scoring](logits)


def choose(scores: Tensor, bias: Tensor | None, router: Router) -> Tensor:
    """The K best experts of each row by (biased) score, within its best groups: int64 [R, K]."""
    ranked = scores if bias is None else scores + bias
    if router.kept_groups < router.groups:
        grouped = ranked.view(len(ranked), router.groups, -1)
        best = grouped.topk(router.group_best, -1).values.sum(-1)
        kept = best.topk(router.kept_groups, -1).indices
        outside = torch.ones_like(best, dtype=torch.bool).scatter_(1, kept, False)
        ranked = grouped.masked_fill(outside.unsqueeze(-1), -torch.inf).view_as(ranked)
    return ranked.topk(router.picks, -1).indices


def expert_weights(scores: Tensor, picks: Tensor, router: Router) -> Tensor:
    """Weights [R, K] of the picks, from their unbiased scores."""
    weights = scores.gather(1, picks)
    if router.normalise:
        weights = weights / weights.sum(-1, keepdim=True).add_(1e-20)
    return weights * router.scale
