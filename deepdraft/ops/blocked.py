"""Attention over any number of keys, in blocks of a fixed size. Torch reference.

Letters: B independent problems, M query rows of each, N keys (a multiple of the block), C query
channels, Cv value channels.

Contract: the bits of a query row depend on that row, its keys and its bias alone: neither on other
rows nor on keys beyond its own (bias -inf) that other rows can see. A row's maximum is exact in any
order; sums are made block by block and added as a tree, in which a block without keys is an exact
zero.
"""

import torch
from torch import Tensor

BLOCK_KEYS = 64
PAST_BLOCK = 256
"""For attention to all tokens so far: a text of that length needs no sum over blocks."""


def whole_blocks(keys: int, block: int = BLOCK_KEYS) -> int:
    """The least multiple of the block that holds this many keys."""
    return -(-keys // block) * block


def blocked_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor,
    scale: float,
    *,
    block: int = BLOCK_KEYS,
) -> Tensor:
    """Softmax attention: q [B, M, C], keys [B, N, C], values [B, N, Cv], bias (0, a logit to add,
    or -inf) broadcastable to [B, M, N] -> [B, M, Cv].

    Every row needs one key at least. The bias may have more rows than q, which is filled up then:
    `index.MIN_PRODUCT_ROWS` where M varies from call to call (docs/numerics.md).
    """
    b, m, n = q.shape[0], q.shape[1], keys.shape[1]
    two = max(m, 2)  # a product of one row takes another path in BLAS, with other bits
    rows = max(two, bias.shape[-2])
    if m < rows:
        q = torch.cat([q, q[:, :1].expand(-1, rows - m, -1)], 1)
    # Not baddbmm: of one problem (B = 1) its rows' bits depend on their number where there are two
    # threads.
    scores = torch.add(bias, torch.bmm(q, keys.transpose(1, 2)), alpha=scale)
    if two < rows:
        scores = scores[:, :two]
    weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
    blocks = n // block
    if blocks == 1:
        out = torch.bmm(weights, values).div_(weights.sum(-1, keepdim=True))
        return out[:, :1] if m == 1 else out
    weights = weights.view(b, two, blocks, block).transpose(1, 2).reshape(b * blocks, two, block)
    parts = torch.bmm(weights, values.reshape(b * blocks, block, -1))
    parts = torch.cat([parts, weights.sum(-1, keepdim=True)], 2)
    whole = _tree_sum(parts.view(b, blocks, two, -1))
    out = whole[..., :-1] / whole[..., -1:]
    return out[:, :1] if m == 1 else out


def _tree_sum(x: Tensor) -> Tensor:
    """Sum over axis 1, which overwrites x: the second half, cut short where x is, on the first."""
    n = x.shape[1]
    while n > 1:
        half = 1 << (n - 1).bit_length() - 1
        x[:, : n - half].add_(x[:, half:n])
        n = half
    return x[:, 0]
