"""The smallest model that splits over eight ranks, and one run of it."""

import dataclasses

import torch
from torch import Tensor

from deepdraft.arch import V41Args
from deepdraft.models.deepseek_v41 import DeepseekV41
from deepdraft.models.layers import make_numerics
from deepdraft.ops.engram_hash import engram_tables
from deepdraft.parallel.group import Group
from deepdraft.parallel.plan import ShardPlan
from deepdraft.parallel.shards import Shards
from deepdraft.proof.tiny import RandomWeights, tiny_args

TEXT = [int(i) for i in torch.randint(4, 256, (40,), generator=torch.Generator().manual_seed(3))]


def args_of_eight() -> V41Args:
    """8 heads and output groups, expert width 256, 24 hash tables: splits over 1, 2, 4 and 8."""
    args = dataclasses.replace(
        tiny_args(),
        hidden_size=256,
        moe_intermediate_size=256,
        num_attention_heads=8,
        o_groups=8,
        n_routed_experts=6,
        dspark_n_routed_experts=4,
        engram_n_heads=8,
    )
    return dataclasses.replace(args, engram_num_embeddings=engram_tables(args).num_embeddings)


def plan_of(args: V41Args, size: int) -> ShardPlan:
    primes = engram_tables(args).primes.reshape(len(args.engram_layer_ids), -1)
    return ShardPlan(args, size, dict(zip(args.engram_layer_ids, primes.tolist(), strict=True)))


def model(group: Group | None = None, numerics: str = "quant", args: V41Args | None = None):
    """One rank of the model; the whole model without a group."""
    args = args or args_of_eight()
    shards = Shards(plan_of(args, group.size), group) if group is not None else Shards()
    source = shards.source(RandomWeights(args))
    ids = list(range(args.vocab_size))
    return DeepseekV41(args, source, ids, numerics=make_numerics(numerics), shards=shards)


def run(rank: DeepseekV41, cuts: tuple[int, ...] = (16, 1, 3, 5)) -> dict[str, Tensor]:
    """Prefill and steps of these sizes, then a draft: everything a caller can see."""
    pool = rank.new_pool(1, 64, slack=16)
    state = pool.open()
    logits, taps, at = [], [], 0
    for size in cuts:
        out = rank.step([(state, TEXT[at : at + size])])
        assert out.logits is not None and out.taps is not None
        logits.append(out.logits)
        taps.append(out.taps)
        at += size
    rank.feed_drafter(state, torch.cat(taps), 0)
    assert rank.drafter is not None
    draft = rank.drafter.draft(state, TEXT[at], lambda row, _: int(row.argmax()))
    return {
        "logits": torch.cat(logits),
        "taps": torch.cat(taps),
        "window": pool.window.clone(),
        "draft": draft.logits,
        "confidence": draft.confidence,
        "tokens": torch.tensor(draft.token_ids),
    }
