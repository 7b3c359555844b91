"""The device step on two ranks in turn: equal bits on both, near those of the torch ranks."""

import dataclasses

import numpy as np
import torch

from deepdraft.arch import V41Args
from deepdraft.checkpoint.presharded import shard_plan
from deepdraft.engine.dummy import DummyWeights
from deepdraft.kernels.one_shot import OneShot
from deepdraft.models.deepseek_v41 import DeepseekV41
from deepdraft.models.v41_buffers import DeviceCaches, RowInputs
from deepdraft.models.v41_draft import DeviceDrafter
from deepdraft.models.v41_joins import OwnTables, RankJoins
from deepdraft.models.v41_step import DeviceStep
from deepdraft.models.v41_weights import load_weights
from deepdraft.ops.engram_hash import engram_tables
from deepdraft.parallel.group import run_in_turn
from deepdraft.parallel.shards import Shards
from tests.kernels.interpreter import DEVICE
from tests.step import tiny

SIZE, IDS = 2, [5, 9, 33]


def args() -> V41Args:
    """Two layers, of which the first has Engram and the second entries and an indexer."""
    small = dataclasses.replace(
        tiny.args(),
        moe_intermediate_size=64,
        num_hidden_layers=2,
        compress_ratios=(0, 1, 0),
        kv_source_layer_ids=(1,),
        index_source_layer_ids=(1,),
        candidate_source_layer_id=1,
        engram_layer_ids=(0,),
        dspark_target_layer_ids=(0, 1),
    )
    rows = engram_tables(small).num_embeddings
    return dataclasses.replace(small, engram_num_embeddings=rows)


def own_tables(shards: Shards) -> list[OwnTables]:
    a, plan = args(), shards.plan
    assert plan is not None
    count = (a.engram_max_ngram_size - 1) * a.engram_n_heads
    own = []
    for layer in a.engram_layer_ids:
        name = f"layers.{layer}.engram.embed.weight"
        start, stop = plan.bounds(name, 0, shards.group.rank)
        own.append(OwnTables(*shards.own_tables(name, count), stop - start))
    return own


def test_two_ranks_of_the_device_step():
    plan, whole = shard_plan(args(), SIZE), DummyWeights(args(), device="cpu", seed=3)
    capacity = 8 * 3 * args().hidden_size
    boxes = [torch.zeros(2, SIZE, capacity, dtype=torch.int64, device=DEVICE) for _ in range(SIZE)]

    def device(group):
        np.seterr(all="ignore")  # of this thread: integers that wrap are no mistake in a kernel
        shards = Shards(plan, group)
        weights = load_weights(args(), shards.source(whole), range(tiny.VOCABULARY), device=DEVICE)
        assert weights.layers[0].experts.w2.cols == 32
        exchange = OneShot(
            group.rank, [box.data_ptr() for box in boxes], boxes[group.rank], limit=1,
            between=lambda: group.gather(torch.zeros(1)),
        )  # fmt: skip
        joins = RankJoins(exchange, own_tables(shards))
        caches = DeviceCaches(args(), num_sequences=1, max_tokens=32, spare=8, device=DEVICE)
        inputs = RowInputs(len(IDS), DEVICE)
        inputs.set([(0, 0, IDS)])
        out = DeviceStep(weights, caches, joins=joins).run(inputs)
        drafter = DeviceDrafter(weights, caches, joins=joins)
        drafter.feed_output(out)
        block = RowInputs(args().dspark_block_size, DEVICE)
        noise = [args().dspark_noise_token_id] * (args().dspark_block_size - 1)
        block.set([(0, len(IDS), [7, *noise])])
        begun = drafter.run(block, args().dspark_block_size)
        exchange.check()
        return out.logits[: len(IDS)].cpu(), begun.base[: args().dspark_block_size].cpu()

    def reference(group):
        shards = Shards(plan, group)
        ids = list(range(tiny.VOCABULARY))
        model = DeepseekV41(args(), shards.source(whole), ids, numerics="quant", shards=shards)
        state = model.new_pool(1, 32, slack=8).open()
        out = model.step([(state, IDS)])
        assert out.taps is not None and model.drafter is not None
        model.feed_drafter(state, out.taps, 0)
        return out.logits, model.drafter.start([(state, 7)])[0].base_logits

    (logits, base), other = run_in_turn(SIZE, device)
    assert torch.equal(logits, other[0]) and torch.equal(base, other[1])
    for own, wanted in zip((logits, base), run_in_turn(SIZE, reference)[0], strict=True):
        error = (own - wanted).norm() / wanted.norm()
        assert error < 0.03, error
