"""The smallest checkpoint that splits over eight ranks, and one run of its model."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepdraft.checkpoint.config import parse_args
from deepdraft.checkpoint.presharded import shard_plan
from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.checkpoint.writer import write_checkpoint
from deepdraft.models.deepseek_v41 import DeepseekV41
from deepdraft.models.layers import make_numerics
from deepdraft.ops.engram_hash import engram_tables
from deepdraft.parallel.group import Group
from deepdraft.parallel.shards import Shards
from deepdraft.proof.tiny import RandomWeights
from tests.checkpoint.tiny import tiny_config

TEXT = [int(i) for i in torch.randint(4, 60, (64,), generator=torch.Generator().manual_seed(3))]
CUTS = (16, 1, 3, 5)
Run = dict[str, Tensor]


def config_of_eight(**text: Any) -> dict[str, Any]:
    """8 heads and output groups, expert width 256, 24 hash tables: splits over 1, 2, 4 and 8. Four
    layers: window; ratio 2 with Engram; ratio 1; ratio 1 that indexes again. One drafter layer."""
    sizes = {
        "hidden_size": 256,
        "moe_intermediate_size": 256,
        "num_attention_heads": 8,
        "o_groups": 8,
    }
    config = tiny_config(**(sizes | text))
    args = dataclasses.replace(parse_args(config), engram_n_heads=8)
    rows = list(engram_tables(args).num_embeddings)
    config["text_config"] |= {"engram_n_heads": 8, "engram_num_embeddings": rows}
    return config


def write_of_eight(directory: Path, **text: Any) -> Checkpoint:
    """Writes it with random weights that keep activations near one."""
    config = config_of_eight(**text)
    weights = RandomWeights(parse_args(config))
    write_checkpoint(directory, config, weights.tensor, max_shard_bytes=4 << 20)
    return Checkpoint.open(directory)


def rank_of(checkpoint: Checkpoint, group: Group | None = None, numerics: str = "quant"):
    """One rank's model from a published checkpoint; the whole model without a group."""
    shards = Shards(shard_plan(checkpoint.args, group.size), group) if group else Shards()
    return model_of(checkpoint, shards.source(checkpoint), shards, numerics)


def model_of(checkpoint: Checkpoint, source: Any, shards: Shards, numerics: str) -> DeepseekV41:
    ids = list(range(checkpoint.args.vocab_size))
    num = make_numerics(numerics)
    return DeepseekV41(checkpoint.args, source, ids, numerics=num, shards=shards)


def run(model: DeepseekV41, cuts: Sequence[int] = CUTS, *, others: int = 0) -> Run:
    """Steps of these sizes, then a draft: all that a caller can see. `others`: tokens of a second
    sequence that are in every step."""
    pool = model.new_pool(2, 64, slack=16)
    state, other = pool.open(), pool.open()
    logits, taps, at = [], [], 0
    for size in cuts:
        work = [(state, TEXT[at : at + size])]
        if others:
            work.append((other, TEXT[-others:]))
        out = model.step(work)
        assert out.logits is not None and out.taps is not None
        logits.append(out.logits[:size])
        taps.append(out.taps[:size])
        at += size
    model.feed_drafter(state, torch.cat(taps), 0)
    assert model.drafter is not None
    draft = model.drafter.draft(state, TEXT[at], lambda row, _: int(row.argmax()))
    return {
        "logits": torch.cat(logits),
        "taps": torch.cat(taps),
        "draft": draft.logits,
        "confidence": draft.confidence,
        "tokens": torch.tensor(draft.token_ids),
    }


def assert_equal(a: Run, b: Run) -> None:
    """Bit for bit."""
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name
