"""Multi-head latent attention (MLA), shared by V2, V3 and V3.2 (docs/families.md, section MLA).

A token keeps one latent and one rotated key part for all heads. The maps from the latent to keys
and values are moved to the query's and the output's side, so that the latent itself is key and
value: <W_k^T q, c> = <q, W_k c>. One formulation serves prefill and decoding, so that both give the
same bits.

Letters: R rows, D hidden, H heads, C latent channels (kv_lora_rank), P rotary channels, N keys, K
selected tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deepdraft.arch import DeepseekV2Args, DeepseekV3Args
from deepdraft.models.arithmetic import FamilyWeights
from deepdraft.models.sequence import StepRows
from deepdraft.ops.blocked import PAST_BLOCK, blocked_attention
from deepdraft.ops.elementwise import rms_norm, rotate
from deepdraft.ops.rope import RopeTable

Turn = tuple[Tensor, Tensor, Tensor]

_LATENT_EPS = 1e-6
"""Of the norms of both latents, whatever rms_norm_eps is."""


class Chosen(NamedTuple):
    """Tokens that each row attends to: where they lie in the pool, int64 [R * K], and 0 or -inf for
    each place, [R, 1, K]."""

    address: Tensor
    bias: Tensor


def rope_table(
    args: DeepseekV2Args | DeepseekV3Args, dtype: torch.dtype, device: torch.device | str
) -> RopeTable:
    """Rotation of the rotary part of queries and keys."""
    return RopeTable(
        args.rope,
        dim=args.qk_rope_head_dim,
        start=0,
        width=args.qk_rope_head_dim,
        pairing="adjacent" if args.rope_interleave else "half",
        dtype=dtype,
        device=device,
    )


class LatentAttention:
    """One layer's attention."""

    def __init__(
        self, args: DeepseekV2Args | DeepseekV3Args, weights: FamilyWeights, prefix: str, layer: int
    ) -> None:
        self.layer = layer
        self.heads, self.rank = args.num_attention_heads, args.kv_lora_rank
        self.nope, self.rope = args.qk_nope_head_dim, args.qk_rope_head_dim
        self.scale, self.act = args.softmax_scale, weights.num.act
        kv = f"{prefix}.kv_a_proj_with_mqa.weight"
        self.kv_norm = weights.vector(f"{prefix}.kv_a_layernorm.weight")
        self.w_o = weights.map(f"{prefix}.o_proj.weight")
        # Rows of a head: its key map [nope, C], then its value map [v, C].
        both = weights.linear(f"{prefix}.kv_b_proj.weight").t().view(self.heads, -1, self.rank)
        self.w_key = both[:, : self.nope].contiguous()
        self.w_value = both[:, self.nope :].transpose(1, 2).contiguous()
        self.query_rank = args.q_lora_rank
        if args.q_lora_rank is None:
            self.w_in = weights.map(f"{prefix}.q_proj.weight", kv)
        else:
            self.w_in = weights.map(f"{prefix}.q_a_proj.weight", kv)
            self.q_norm = weights.vector(f"{prefix}.q_a_layernorm.weight")
            self.w_query = weights.map(f"{prefix}.q_b_proj.weight")

    def project(self, u: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        """u [R, D], normed -> query latent [R, q_lora_rank] (None without one), queries
        [R, H * (nope + P)], and the raw latent and key part [R, C + P]."""
        h = self.w_in(u)
        width = self.rank + self.rope
        q, kv = h.split_with_sizes([h.shape[1] - width, width], 1)
        if self.query_rank is None:
            return None, q, kv
        latent = self.act(rms_norm(q, self.q_norm, _LATENT_EPS))
        return latent, self.w_query(latent), kv

    def write(self, kv: Tensor, rows: StepRows, turn: Turn) -> None:
        """Store the normed latent and the rotated key part of this step's tokens."""
        latent = rms_norm(kv[:, : self.rank], self.kv_norm, _LATENT_EPS)
        key = rotate(kv[:, self.rank :], *turn)
        rows.write("latent", self.layer, self.act(torch.cat([latent, key], 1)))

    def latent_queries(self, q: Tensor, turn: Turn) -> Tensor:
        """Queries [R, H * (nope + P)] as they meet latents: [R, H, C + P]."""
        q = q.reshape(q.shape[0], self.heads, -1)
        cos, sin, swap = turn
        turned = rotate(q[..., self.nope :], cos.unsqueeze(1), sin.unsqueeze(1), swap)
        absorbed = torch.bmm(q[..., : self.nope].transpose(0, 1), self.w_key).transpose(0, 1)
        return self.act(torch.cat([absorbed, turned], -1))

    def attend_all(self, q: Tensor, rows: StepRows) -> Tensor:
        """Latent queries [R, H, C + P] to all tokens so far -> [R, H, C]."""
        out = []
        for span, bias in zip(rows.spans, rows.causal(self.heads), strict=True):
            past = rows.past("latent", self.layer, span)
            past = past.unsqueeze(0)
            o = blocked_attention(
                rows.of(q, span).reshape(1, -1, q.shape[-1]),
                past,
                past[..., : self.rank],
                bias,
                self.scale,
                block=PAST_BLOCK,
            )
            out.append(o.view(-1, self.heads, self.rank))
        return out[0] if len(out) == 1 else torch.cat(out)

    def attend_chosen(self, q: Tensor, rows: StepRows, chosen: Chosen) -> Tensor:
        """Latent queries [R, H, C + P] to the chosen tokens -> [R, H, C]."""
        pool = rows.pool.rows["latent"][self.layer]
        keys = pool.index_select(0, chosen.address).view(q.shape[0], -1, q.shape[-1])
        return blocked_attention(q, keys, keys[..., : self.rank], chosen.bias, self.scale)

    def output(self, o: Tensor) -> Tensor:
        """Attended latents [R, H, C] -> [R, D]."""
        values = torch.bmm(self.act(o).transpose(0, 1), self.w_value).transpose(0, 1)
        return self.w_o(self.act(values.reshape(o.shape[0], -1)))

    def __call__(self, u: Tensor, rows: StepRows, turn: Turn) -> Tensor:
        """u [R, D], normed -> [R, D], attending to all tokens so far."""
        _, q, kv = self.project(u)
        self.write(kv, rows, turn)
        return self.output(self.attend_all(self.latent_queries(q, turn), rows))
