"""The DSpark drafter in training form: many anchors per row at once.

Owns: architecture section 6 for given anchors. An anchor is the row index of a known token; the
drafter sees the taps of the window before it and proposes the block after it.
Knows nothing of: losses, the verification loop.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from training import ops
from training.model import Batch, Model


@dataclass
class Draft:
    """`base` [B, A, block, V] before the Markov bias, `hidden` [B, A, block, d] un-normed."""

    base: Tensor
    hidden: Tensor
    loads: dict[str, Tensor]


def _draft_attention(
    model: Model, m: int, u: Tensor, context: Tensor, mask: Tensor, rope: tuple[Tensor, Tensor]
) -> Tensor:
    """u [N, block, d], context keys [N, w, D], mask [N, block, w + block]."""
    p, heads = f"mtp.{m}.attn", model.args.num_attention_heads
    c = model.norm(model.linear(u, f"{p}.wq_a.weight"), f"{p}.q_norm.weight")
    q = model.queries(c, p, rope)
    keys = torch.cat((context, model.window_keys(u, p, rope)), 1)
    n, block = u.shape[:2]
    s = (q.reshape(n, block * heads, -1) @ keys.transpose(1, 2)).view(n, block, heads, -1)
    probs, _ = ops.SinkSoftmax.apply(s, None, mask, None, model.stat(f"{p}.attn_sink"))
    o = (probs.reshape(n, block * heads, -1) @ keys).view(q.shape)
    o = ops.rotate(o, rope[0][..., None, :], -rope[1][..., None, :])
    return model.output_projection(o, p)


def draft(model: Model, batch: Batch, taps: Tensor, anchors: Tensor) -> Draft:
    """Draft from anchors [B, A] (row indices). Embedding and head are used detached."""
    a = model.args
    w, block, depth = a.sliding_window, a.dspark_block_size, a.num_nextn_predict_layers
    bsz, length = batch.tokens.shape
    dev = anchors.device
    count = anchors.shape[1]
    mu = model.norm(model.linear(taps, "mtp.0.main_proj.weight"), "mtp.0.main_norm.weight")
    rope_row = model.rope_at(batch.pos, False)
    flat = (torch.arange(bsz, device=dev)[:, None] * length + anchors).flatten()
    back = anchors.flatten()[:, None] - w + torch.arange(w, device=dev)
    index = (flat[:, None] - w + torch.arange(w, device=dev)).clamp(min=0)
    seg = batch.seg.flatten()
    seen = (back >= 0) & (seg[index] == seg[flat][:, None])
    mask = functional.pad(seen, (0, block), value=True)[:, None].expand(-1, block, -1)

    ids = torch.full((bsz * count, block), a.dspark_noise_token_id, device=dev)
    ids[:, 0] = batch.tokens.flatten()[flat].long()
    x = functional.embedding(ids, model.params["embed.weight"].detach()).to(model.compute_dtype)
    pos = batch.pos.flatten()[flat][:, None] + torch.arange(block, device=dev)
    rope = model.rope_at(pos.clamp(max=a.max_position_embeddings - 1), False)
    streams = x[:, :, None, :].expand(-1, -1, a.hc_mult, -1)
    mix = torch.zeros(*x.shape[:2], a.hc_mult, device=dev, dtype=ops.acc(x).dtype)
    mix[..., 0] = 1.0
    loads: dict[str, Tensor] = {}
    eps = a.rms_norm_eps
    for m in range(depth):
        p = f"mtp.{m}"
        keys = model.window_keys(mu, f"{p}.attn", rope_row).flatten(0, 1)
        context = keys.index_select(0, index.flatten()).view(bsz * count, w, -1)
        streams = streams.contiguous()
        pre, post, comb = model.mix(streams, f"{p}.hc_attn")
        u = ops.collapse_norm(streams, mix, model.stat(f"{p}.attn_norm.weight"), eps)
        y = _draft_attention(model, m, u, context, mask, rope)
        streams = ops.expand(y, streams, post, comb)
        mix, post, comb = model.mix(streams, f"{p}.hc_ffn")
        v = ops.collapse_norm(streams, pre, model.stat(f"{p}.ffn_norm.weight"), eps)
        y = model.moe(v, f"{p}.ffn", a.dspark_num_experts_per_tok, loads)
        streams = ops.expand(y, streams, post, comb)
    hidden = ops.collapse(streams, mix).view(bsz, count, block, -1)
    base = model.logits(model.norm(hidden, f"mtp.{depth - 1}.norm.weight"), detach=True)
    return Draft(base, hidden, loads)


def markov(model: Model, previous: Tensor) -> tuple[Tensor, Tensor]:
    """Bias [.., V] and embedding [.., rank] for the previous token ids."""
    last = f"mtp.{model.args.num_nextn_predict_layers - 1}"
    e = functional.embedding(previous, model.params[f"{last}.markov_head.embed.weight"])
    e = e.to(model.compute_dtype)
    head = model.params[f"{last}.markov_head.head.weight"].to(model.compute_dtype)
    return functional.linear(e, head), e


def confidence(model: Model, hidden: Tensor, embedding: Tensor) -> Tensor:
    """Raw confidence (before the sigmoid), float32."""
    last = f"mtp.{model.args.num_nextn_predict_layers - 1}"
    x = ops.acc(torch.cat((hidden, embedding), -1))
    return functional.linear(x, model.stat(f"{last}.confidence_head.proj.weight"))[..., 0]
