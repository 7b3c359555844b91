"""The DSpark drafter on the device: ring keys of confirmed rows, and the pass over a block.

Owns: the order of launches from taps to base logits. What the drafter proposes from them (Markov
rounds) and what of it stands (acceptance) are other kernels'. `deepdraft.models.dspark` is the
reference (quant numerics).
Knows nothing of: requests, sampling, graphs.

Letters: R rows of a step, B tokens of a block, Q sequences, K = Q * B rows of a draft (padded to a
multiple of 8), D hidden, V vocabulary, C head width, L drafter layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepdraft.errors import ConfigError
from deepdraft.kernels import attention, cache, gemv, latents, mhc, rows
from deepdraft.models.v41_buffers import DeviceCaches, RowInputs
from deepdraft.models.v41_joins import Joins
from deepdraft.models.v41_step import (
    Flow,
    Lanes,
    Output,
    attention_out,
    run_experts,
    run_mix,
)
from deepdraft.models.v41_weights import DrafterWeights, ModelWeights


@dataclass(slots=True)
class DraftPass:
    """Before the tokens are chosen: base logits float32 [K, V], hidden bfloat16 [K, D]."""

    base: Tensor
    hidden: Tensor


class DeviceDrafter:
    """The drafter over the rings of `caches`."""

    def __init__(
        self,
        weights: ModelWeights,
        caches: DeviceCaches,
        *,
        side_lanes: bool = True,
        joins: Joins | None = None,
    ) -> None:
        if weights.drafter is None:
            raise ConfigError("this model was loaded without its drafter")
        self.weights, self.caches, self.args = weights, caches, weights.args
        self.drafter: DrafterWeights = weights.drafter
        self.joins = joins or Joins()
        self.first_mix = torch.zeros(1, self.args.hc_mult, device=weights.device)
        self.first_mix[0, 0] = 1.0
        self.lanes = Lanes(weights.device, on=side_lanes)
        self.first_ring = self.args.num_hidden_layers

    def feed(self, taps: Tensor, cos: Tensor, sin: Tensor, dest: Tensor) -> None:
        """Ring keys from taps bfloat16 [R, taps * D]; cos, sin float32 [R, P] of the rows'
        positions (window base); dest int32 [R]: row of the rings, -1 where a row was not
        confirmed."""
        w, eps, c = self.drafter, self.args.rms_norm_eps, self.args.head_dim
        mu = gemv.gemv(gemv.quantize_rows(taps), w.main_proj)
        _, mu_quant = mhc.norm_rows(mu, w.main_norm, self.args.hidden_size, norm_eps=eps)
        keys = gemv.gemv(mu_quant, w.ring_kv)
        for number, layer in enumerate(w.layers):
            cache.write_entries(
                "window", keys, layer.attention.kv_norm, cos, sin, dest,
                self.caches.window[self.first_ring + number], norm_eps=eps, start=number * c,
            )  # fmt: skip

    def feed_output(self, out: Output) -> None:
        """Ring keys of all rows of a step: prompts, whose rows all stand."""
        assert out.taps is not None and out.places is not None
        self.feed(out.taps, *out.places.turn(0), out.places.of("window"))

    def run(self, inputs: RowInputs, block: int) -> DraftPass:
        """One pass over a block of each sequence: `block` rows after another, the last token and
        then noise, at the positions that follow the confirmed ones. Ring rows behind the confirmed
        ones are overwritten."""
        args, weights, w, eps = self.args, self.weights, self.drafter, self.args.rms_norm_eps
        self.joins.begin(inputs.positions)
        dest, lists, angles = rows.place_drafts(
            inputs.positions, inputs.slots, self.caches.floors, self.caches.turns,
            window=args.sliding_window, block=block, ring=self.caches.ring,
        )  # fmt: skip
        cos, sin = angles[0], angles[1]
        x = rows.embed(inputs.ids, weights.embed, args.hc_mult)
        first = self.first_mix.expand(len(inputs), -1).contiguous()
        flow = Flow(x, pre=first, joins=self.joins)
        for number, layer in enumerate(w.layers):
            _, _, u_quant = flow.enter(layer.attn_norm, eps)
            with self.lanes.aside("mix"):
                coef = run_mix(flow.x, layer.mix_attn, args)
            attn, window = layer.attention, self.caches.window[self.first_ring + number]
            c_quant = latents.split_latents(
                gemv.gemv(u_quant, attn.w_in), attn.q_norm, attn.kv_norm, cos, sin, dest, window,
                norm_eps=eps,
            )  # fmt: skip
            query = gemv.gemv(c_quant, attn.w_query)
            o = attention.sparse_attention(
                query, cos, sin, window, lists, attn.sink, scale=args.head_dim**-0.5
            )
            y = attention_out(o, attn, self.joins)
            self.lanes.join("mix")
            flow.leave(coef, y)
            _, v, v_quant = flow.enter(layer.ffn_norm, eps)
            with self.lanes.aside("mix"):
                coef = run_mix(flow.x, layer.mix_ffn, args)
            made = run_experts(v, v_quant, inputs.positions, layer.experts, args, self.lanes)
            self.lanes.join("mix")
            flow.leave(coef, *made)
        hidden = x.new_empty(len(inputs), args.hidden_size)
        _, h, _ = flow.enter(w.norm, eps, hidden)
        base = self.joins.logits(h, weights.head)
        self.joins.finish()
        return DraftPass(base, hidden)
