"""The lightning indexer: scores, and the selection of compressed entries. Torch reference.

Letters: R rows, N entries, K selected entries, B blocks, H index heads, C index channels.

Contract: the selected set of a row is a function of that row alone: scores do not depend on how
many entries other rows can see, equal scores go to the lower entry, and a set is listed in
ascending order with -1 in the places left over.
"""

import torch
from torch import Tensor

MIN_PRODUCT_ROWS = 16
"""A product with a transposed second factor gives a row other bits below this many rows (2 to 8,
over 64 and more channels; torch 2.13 with MKL); fewer are filled up with copies of the last."""


def index_scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """sum over h of weights[r, h] relu(<q[r, h], keys[n]>): q [R, H, C], keys [N, C] -> [R, N]."""
    r, h, c = q.shape
    flat = q.reshape(r * h, c)
    if r * h < MIN_PRODUCT_ROWS:
        flat = torch.cat([flat, flat[-1:].expand(MIN_PRODUCT_ROWS - r * h, -1)])
    dots = (flat @ keys.t())[: r * h].relu_().view(r, h, -1)
    return dots.mul_(weights.unsqueeze(-1)).sum(1)


def index_scores_together(
    q: Tensor, weights: Tensor, keys: Tensor, places: Tensor, back: Tensor
) -> Tensor:
    """`index_scores` of rows of several sequences, each over its own keys, with the same bits.

    q [R, H, C], weights [R, H], keys [Q, N, C]; places int64 [Q, M]: rows of each sequence, filled
    up with any of them; back int64 [R]: where in `places` each row stands. Returns [R, N].
    """
    h, c = q.shape[1:]
    sequences, most = places.shape
    least = -(-MIN_PRODUCT_ROWS // h)
    if most < least:
        places = torch.cat([places, places[:, -1:].expand(-1, least - most)], 1)
    flat = q.index_select(0, places.reshape(-1)).view(sequences, -1, c)
    dots = torch.bmm(flat, keys.transpose(1, 2)).view(sequences, -1, h, keys.shape[1])
    dots = dots[:, :most].reshape(sequences * most, h, -1).index_select(0, back)
    return dots.relu_().mul_(weights.unsqueeze(-1)).sum(1)


def mask_unreachable(scores: Tensor, reach: Tensor) -> Tensor:
    """scores [R, N] with -inf from entry `reach[r]` (int64 [R]) on."""
    entry = torch.arange(scores.shape[1], device=scores.device)
    return scores.masked_fill(entry >= reach.unsqueeze(1), -torch.inf)


def _best(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best (value, place) of each row; a stable sort puts the lower place first among
    equals."""
    values, places = torch.sort(scores, dim=-1, descending=True, stable=True)
    return values[:, :k], places[:, :k]


def select_top(scores: Tensor, k: int) -> Tensor:
    """The k best reachable entries of each row, ascending, -1 in places left over: int64 [R, K]."""
    n = scores.shape[1]
    values, places = _best(scores, min(k, n))
    places = torch.where(values > -torch.inf, places, n).sort(-1).values
    places = torch.where(places < n, places, -1)
    if n < k:
        places = torch.nn.functional.pad(places, (0, k - n), value=-1)
    return places


def select_all(reach: Tensor, k: int) -> Tensor:
    """Every reachable entry where there are at most k: int64 [R, K], -1 in places left over."""
    entry = torch.arange(k, device=reach.device).expand(reach.shape[0], k)
    return torch.where(entry < reach.unsqueeze(1), entry, -1)


def candidate_blocks(scores: Tensor, reach: Tensor, *, block: int, keep: int) -> Tensor:
    """First level of the two-level selection (report 2.3.2): which blocks of entries stay, bool
    [R, B].

    A block's score is its best reachable score; the block of the newest reachable entry is always
    kept; at most `keep` blocks stay.
    """
    r, n = scores.shape
    blocks = -(-n // block)
    padded = torch.nn.functional.pad(scores, (0, blocks * block - n), value=-torch.inf)
    best = padded.view(r, blocks, block).amax(-1)
    newest = ((reach - 1).clamp(min=0) // block).unsqueeze(1)
    has_entry = reach.unsqueeze(1) > 0
    number = torch.arange(blocks, device=scores.device)
    best = best.masked_fill((number == newest) & has_entry, torch.inf)
    values, places = _best(best, min(keep, blocks))
    kept = torch.zeros(r, blocks, dtype=torch.bool, device=scores.device)
    return kept.scatter_(1, places, values > -torch.inf)


def restrict_to_blocks(scores: Tensor, kept: Tensor, *, block: int) -> Tensor:
    """scores [R, N] with -inf outside the kept blocks [R, B]."""
    inside = kept.repeat_interleave(block, dim=1)[:, : scores.shape[1]]
    return scores.masked_fill(~inside, -torch.inf)
