"""What a decode step must read, in bytes: the limit that a measured step is compared with.

Owns: the byte model of one step from sizes alone, every weight once, per rank. The last line of
every measurement is `bytes / rate`.
Knows nothing of: torch, measurements.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepdraft.arch import V41Args

_FP8 = 1 + 1 / 1024
_FP4 = 0.5 + 1 / 32
_WINDOW, _MAIN, _INDEX = 1 + 1 / 32, 0.5 + 1 / 16, 0.5 + 1 / 32
OBSERVED_POOL = 30
"""Experts that real text seems to choose from, per layer: fitted to one public statement (22 of
384 at six rows)."""


def distinct(rows: int, pool: int, picks: int) -> float:
    """Expected number of different experts that this many rows pick evenly from a pool."""
    return pool * (1 - (1 - min(1.0, picks / pool)) ** rows)


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Bytes by part; `split` parts are divided by the number of ranks, `whole` ones are not."""

    split: dict[str, float]
    whole: dict[str, float]

    def per_rank(self, tp: int = 1) -> float:
        """Bytes that one rank reads."""
        return sum(self.split.values()) / tp + sum(self.whole.values())

    def limit_ms(self, rate: float, tp: int = 1) -> float:
        """Milliseconds at `rate` bytes a second."""
        return 1e3 * self.per_rank(tp) / rate


def step_bytes(
    args: V41Args,
    *,
    rows: int,
    experts: float,
    context: int,
    draft: bool,
    draft_experts: float | None = None,
) -> StepBytes:
    """`experts`: different routed experts that a layer reads. `draft`: with the drafter's pass.

    Selected entries of neighbouring rows are taken to overlap by three quarters.
    """
    d, c, layers = args.hidden_size, args.head_dim, args.num_hidden_layers
    heads, width, vocab = args.num_attention_heads * c, args.moe_intermediate_size, args.vocab_size
    roles = args.roles
    expert, shared = 3 * d * width * _FP4, 3 * d * width * _FP8
    wide = args.o_groups * args.o_lora_rank
    output = heads * args.o_lora_rank + wide * d
    projections = (args.q_lora_rank * heads + output) * _FP8
    latents = (args.q_lora_rank + c) * d * _FP8
    streams = args.hc_mult * d
    mixes = 2 * (2 + args.hc_mult) * args.hc_mult * streams * 4
    head = vocab * d * 2
    spread = 1 + 0.25 * (rows - 1)
    split = {
        "attention projections": layers * projections,
        "shared experts": layers * shared,
        "routed experts": layers * experts * expert,
        "head": float(head),
    }
    whole = {
        "query and KV latents": layers * latents,
        "router": layers * args.n_routed_experts * d * 2.0,
        "residual mixes": float(layers * mixes),
        "windows": layers * (args.sliding_window + rows) * c * _WINDOW,
    }
    index_width, index_heads = args.index_head_dim, args.index_n_heads
    small = entries = keys = 0.0
    for role in roles:
        if role.owns_kv:
            small += (role.ratio * c * d + index_width * c) * 2
        if role.runs_indexer:
            small += index_heads * index_width * args.q_lora_rank * _FP8 + index_heads * d * 2
            reach = context // role.ratio
            if role.restricted:
                held = min(args.candidate_topk_blocks * args.candidate_block_size, reach)
                keys += held * index_width * _INDEX * spread
            else:
                keys += reach * index_width * _INDEX
        if role.ratio:
            entries += min(args.index_topk, context // role.ratio) * c * _MAIN * spread
    whole |= {"indexers and compressors": small, "selected entries": entries, "index keys": keys}
    if args.engram_layer_ids:
        groups = (args.engram_max_ngram_size - 1) * args.engram_n_heads * args.engram_head_dim
        count = len(args.engram_layer_ids)
        split["Engram projections"] = count * groups * (args.hc_mult + 1) * d * _FP8
    if draft and args.num_nextn_predict_layers:
        count, block = args.num_nextn_predict_layers, args.dspark_block_size
        pool = args.dspark_n_routed_experts
        if draft_experts is None:
            draft_experts = distinct(block, pool, args.dspark_num_experts_per_tok)
        split["drafter: layers"] = count * (projections + shared + draft_experts * expert)
        split["drafter: head and Markov"] = head + block * vocab * args.dspark_markov_rank * 2.0
        taps = len(args.dspark_target_layer_ids)
        whole["drafter: latents, router, mixes"] = count * (latents + pool * d * 2 + mixes)
        whole["drafter: tap projection"] = taps * d * d * _FP8
    return StepBytes(split, whole)
