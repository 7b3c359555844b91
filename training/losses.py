"""Training losses of the backbone and the drafter.

Owns: next-token cross entropy, and the drafter's weighted cross entropy, distribution distance and
confidence losses on random anchors. Knows nothing of: optimisers, schedules.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from training import drafter, ops
from training.model import Batch, Model


def next_tokens(batch: Batch) -> tuple[Tensor, Tensor]:
    """Target ids [B, T] and weights [B, T]: 1 where the next token is of the same document."""
    target = functional.pad(batch.tokens[:, 1:], (0, 1)).long()
    same = functional.pad(batch.seg[:, 1:] == batch.seg[:, :-1], (0, 1), value=False)
    return target, (same & (batch.seg >= 0)).float()


@ops.Piece
def token_loss(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy [N] and squared log-partition [N] of logits [N, V]."""
    f = ops.acc(logits)
    lse = torch.logsumexp(f, -1)
    return lse - f.gather(-1, target[:, None])[:, 0], lse.square()


@ops.Piece
def draft_distance(
    base: Tensor, bias: Tensor, goal: Tensor, target: Tensor
) -> tuple[Tensor, Tensor]:
    """Cross entropy [N] to the data token and L1 [N] to the target distribution."""
    f = ops.acc(base) + ops.acc(bias)
    logp = f - torch.logsumexp(f, -1, keepdim=True)
    q = torch.softmax(ops.acc(goal), -1)
    return -logp.gather(-1, target[:, None])[:, 0], (logp.exp() - q).abs().sum(-1)


def pick_anchors(batch: Batch, weight: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Random anchors [B, A] (known token with a token before and behind it) and their validity."""
    valid = (weight > 0) & (batch.pos >= 1)
    if batch.own is not None:
        valid = valid & batch.own
    score = torch.rand(valid.shape, device=valid.device).masked_fill(~valid, -1.0)
    top = score.topk(min(count, score.shape[1]), dim=1)
    return top.indices, top.values >= 0


@dataclass
class DraftTargets:
    """Rows [B, A, block] of the positions that predict each drafted token, and what is known."""

    rows: Tensor
    previous: Tensor
    target: Tensor
    weight: Tensor


def draft_targets(batch: Batch, anchors: Tensor, valid: Tensor, block: int) -> DraftTargets:
    """Gather the data tokens behind each anchor; weight 0 beyond the document."""
    length = batch.tokens.shape[1]
    rows = anchors[..., None] + torch.arange(block, device=anchors.device)
    inside = rows + 1 < length
    rows = rows.clamp(max=length - 2)
    flat = rows.flatten(1)

    def at(x: Tensor, shift: int) -> Tensor:
        return x.gather(1, flat + shift).view(rows.shape)

    seg = batch.seg.gather(1, anchors)[..., None]
    weight = inside & (at(batch.seg, 1) == seg) & valid[..., None]
    tokens = batch.tokens.long()
    return DraftTargets(rows, at(tokens, 0), at(tokens, 1), weight.float())


def draft_loss(
    model: Model,
    batch: Batch,
    taps: Tensor,
    logits: Tensor,
    weight: Tensor,
    anchors_per_row: int,
    ce_share: float,
    reach_share: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Loss, mean expected acceptance, mean confidence loss, routing loads. `logits` [B, T, V].

    `reach_share`: how far a position's weight follows the chance that it is reached.
    """
    block = model.args.dspark_block_size
    anchors, valid = pick_anchors(batch, weight, anchors_per_row)
    d = drafter.draft(model, batch, taps, anchors)
    t = draft_targets(batch, anchors, valid, block)
    vocab = logits.shape[-1]
    bsz, length = batch.tokens.shape
    offset = torch.arange(bsz, device=anchors.device)[:, None, None] * length
    goal = logits.detach().reshape(-1, vocab).index_select(0, (t.rows + offset).flatten())
    bias, e = drafter.markov(model, t.previous)
    ce, l1 = draft_distance(
        d.base.reshape(-1, vocab), bias.reshape(-1, vocab), goal, t.target.flatten()
    )
    accept = (1 - 0.5 * l1.detach()).clamp(0, 1)
    raw = drafter.confidence(model, d.hidden.detach(), e.detach()).flatten()
    bce = functional.binary_cross_entropy_with_logits(raw, accept.to(raw.dtype), reduction="none")
    decay = torch.exp(-torch.arange(block, device=anchors.device) / 4.0)
    w = (t.weight * decay).flatten()
    if reach_share:
        # A draft counts only where those before it stand.
        reach = accept.view(t.rows.shape)[..., :-1].cumprod(-1)
        reach = functional.pad(reach, (1, 0), value=1.0).flatten()
        w = w * (1 - reach_share + reach_share * reach)
    total = w.sum().clamp(min=1.0)
    seen = t.weight.flatten()
    loss = (w * (ce_share * ce + (1 - ce_share) * l1 + bce)).sum() / total
    count = seen.sum().clamp(min=1.0)
    return loss, (seen * accept).sum() / count, (seen * bce.detach()).sum() / count, d.loads


@torch.no_grad()
def accepted_lengths(
    model: Model, batch: Batch, taps: Tensor, logits: Tensor, anchors: Tensor, valid: Tensor
) -> Tensor:
    """Mean tokens per target pass under greedy drafting, forced along the data.

    A draft counts while it equals the target's argmax and the text so far is the data's, so the
    figure is a lower bound: 1 = no draft accepted, block + 1 = all.
    """
    block = model.args.dspark_block_size
    d = drafter.draft(model, batch, taps, anchors)
    t = draft_targets(batch, anchors, valid, block)
    best = logits.argmax(-1).gather(1, t.rows.flatten(1)).view(t.rows.shape)
    previous = t.previous[..., 0]
    alive = torch.ones_like(previous, dtype=torch.float32)
    total = torch.ones_like(alive)
    for b in range(block):
        bias, _ = drafter.markov(model, previous)
        y = (d.base[:, :, b] + bias).argmax(-1)
        alive = alive * (y == best[..., b]) * t.weight[..., b]
        total = total + alive
        alive = alive * (y == t.target[..., b])
        previous = y
    count = valid.float().sum().clamp(min=1.0)
    return (total * valid).sum() / count
