"""Attention over any number of keys, in blocks of a fixed size. Torch reference.

Letters: B independent problems, M query rows of each, N keys (a multiple of the block), C query
channels, Cv value channels.

Contract: the bits of a query row depend on that row, its keys and its bias alone: neither on other
rows nor on keys beyond its own (bias -inf) that other rows can see. For that, each block is worked
by itself and the blocks are added as a tree, in which an empty block is an exact zero. Keys come
channel by channel, so that a product's row does not depend on the row count (docs/numerics.md).
"""

import torch
from torch import Tensor

BLOCK_KEYS = 64
_LOWEST = -1e30
"""Stands in for the maximum of a block without keys."""


def whole_blocks(keys: int) -> int:
    """The least multiple of the block that holds this many keys."""
    return -(-keys // BLOCK_KEYS) * BLOCK_KEYS


def blocked_attention(q: Tensor, keys_t: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """Softmax attention: q [B, M, C] (scale included), keys_t [B, C, N], values [B, N, Cv], bias
    broadcastable to [B, M, N] (0, a logit to add, or -inf) -> [B, M, Cv].

    Every row needs one key at least. keys_t must be contiguous where M varies from call to call.
    """
    single = q.shape[1] == 1
    if single:  # a product of one row takes another path in BLAS, with other bits
        q = q.expand(-1, 2, -1)
    b, m, n = q.shape[0], q.shape[1], keys_t.shape[2]
    blocks = n // BLOCK_KEYS
    scores = torch.bmm(q, keys_t).add_(bias).view(b, m, blocks, BLOCK_KEYS)
    top = scores.amax(-1, keepdim=True).clamp_(min=_LOWEST)
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1).transpose(1, 2).unsqueeze(-1)  # [B, blocks, M, 1]
    by_block = weights.transpose(1, 2).reshape(b * blocks, m, BLOCK_KEYS)
    parts = torch.bmm(by_block, values.reshape(b * blocks, BLOCK_KEYS, -1))
    parts = parts.view(b, blocks, m, -1)
    if blocks > 1:
        share = (top - top.amax(2, keepdim=True)).exp_().transpose(1, 2)
        both = _tree_sum(torch.cat([parts, total], -1).mul_(share))[:, 0]
        out = both[..., :-1] / both[..., -1:]
    else:
        out = parts[:, 0].div_(total[:, 0])
    return out[:, :1] if single else out


def _tree_sum(x: Tensor) -> Tensor:
    """Sum over axis 1, which is kept: neighbours in pairs, then pairs of pairs, and so on."""
    while x.shape[1] > 1:
        even = x.shape[1] // 2 * 2
        pairs = x[:, 0:even:2] + x[:, 1:even:2]
        x = pairs if even == x.shape[1] else torch.cat([pairs, x[:, even:]], 1)
    return x
