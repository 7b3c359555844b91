"""Llama-like models: DeepSeek-LLM, DeepSeek-Coder (docs/families.md, section Llama).

Grouped-query attention with rotary positions over the whole head (element k pairs with k + half),
and a gated MLP. Every KV head serves `heads / kv_heads` query heads that follow each other.

Letters: R rows, D hidden, H query heads, K KV heads, G = H / K, C head channels, N keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepdraft.arch import LlamaArgs
from deepdraft.models.arithmetic import FamilyWeights
from deepdraft.models.decoder import DecoderModel, GatedMlp, Record, residual_block
from deepdraft.models.sequence import StepRows
from deepdraft.ops.blocked import PAST_BLOCK, blocked_attention
from deepdraft.ops.elementwise import rotate
from deepdraft.ops.rope import RopeTable

Turn = tuple[Tensor, Tensor, Tensor]


class Attention:
    """One layer's attention over all tokens so far."""

    def __init__(self, args: LlamaArgs, weights: FamilyWeights, layer: int) -> None:
        prefix = f"model.layers.{layer}.self_attn"
        self.layer, self.width = layer, args.head_dim
        self.heads, self.kv_heads = args.num_attention_heads, args.num_key_value_heads
        self.scale, self.act = args.head_dim**-0.5, weights.num.act
        self.w_qkv = weights.map(*(f"{prefix}.{n}_proj.weight" for n in "qkv"))
        self.w_o = weights.map(f"{prefix}.o_proj.weight")

    def __call__(self, u: Tensor, rows: StepRows, turn: Turn) -> Tensor:
        """u [R, D], normed -> [R, D]."""
        r, c, h, k = u.shape[0], self.width, self.heads, self.kv_heads
        qkv = self.w_qkv(u).view(r, h + 2 * k, c)
        cos, sin, swap = turn
        turned = self.act(rotate(qkv[:, : h + k], cos.unsqueeze(1), sin.unsqueeze(1), swap))
        kv = torch.cat([turned[:, h:], qkv[:, h + k :]], 1)
        rows.write("kv", self.layer, kv.view(r, -1))
        q = turned[:, :h]
        out = [
            self._attend(rows.of(q, span), rows.past("kv", self.layer, span), bias)
            for span, bias in zip(rows.spans, rows.causal(h // k), strict=True)
        ]
        return self.w_o(self.act(out[0] if len(out) == 1 else torch.cat(out)))

    def _attend(self, q: Tensor, past: Tensor, bias: Tensor) -> Tensor:
        """q [R, H, C], past [N, 2 K C], bias [R G, N] -> [R, H C]."""
        r, k, c = q.shape[0], self.kv_heads, self.width
        keys, values = past.view(-1, 2, k, c).unbind(1)
        grouped = q.unflatten(1, (k, -1)).transpose(0, 1).reshape(k, -1, c)  # rows of a head: R * G
        group = grouped.shape[1] // r
        o = blocked_attention(
            grouped,
            keys.transpose(0, 1),
            values.transpose(0, 1),
            bias,
            self.scale,
            block=PAST_BLOCK,
        )
        return o.view(k, r, group, c).transpose(0, 1).reshape(r, -1)


class Llama(DecoderModel):
    """The model."""

    args: LlamaArgs

    def build(self) -> None:
        args, weights = self.args, self.weights
        self.rope = RopeTable(
            args.rope,
            dim=args.head_dim,
            start=0,
            width=args.head_dim,
            pairing="half",
            dtype=self.dtype,
            device=self.device,
        )
        self.blocks = [
            (
                Attention(args, weights, layer),
                GatedMlp(weights, f"model.layers.{layer}.mlp"),
                (
                    weights.vector(f"model.layers.{layer}.input_layernorm.weight"),
                    weights.vector(f"model.layers.{layer}.post_attention_layernorm.weight"),
                ),
            )
            for layer in range(args.num_hidden_layers)
        ]

    def layers(self, x: Tensor, rows: StepRows, record: Record | None) -> Tensor:
        turn = self.rope.table(rows.position)
        for layer, (attention, mlp, norms) in enumerate(self.blocks):
            note = None if record is None else record.setdefault(f"L{layer}", {})
            x = residual_block(
                x, norms, self.eps, self.num, lambda u, f=attention: f(u, rows, turn), mlp, note
            )
        return x
