"""Ranks that share a prompt's rows and split a step: whole maps, memory, two ranks in turn."""

import dataclasses
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from deepdraft.checkpoint.config import parse_args
from deepdraft.checkpoint.names import tensor_table
from deepdraft.checkpoint.presharded import shard_plan
from deepdraft.config import EngineConfig
from deepdraft.engine.dummy import DummyWeights
from deepdraft.engine.rank_setup import needs
from deepdraft.kernels.one_shot import OneShot
from deepdraft.models.v41_device import DeviceV41
from deepdraft.models.v41_joins import RankJoins
from deepdraft.models.v41_prefill_plan import exchange_bytes
from deepdraft.models.v41_prefill_share import Regions, RowShare, own_tables
from deepdraft.parallel.group import run_in_turn
from deepdraft.parallel.launch import Limits, run_ranks
from deepdraft.parallel.peers import OneProcessMemory
from deepdraft.parallel.plan import V41_CUTS, cut_for_rows, stem
from deepdraft.parallel.shards import Shards
from deepdraft.parallel.whole import GatheredSource
from tests.kernels import prefill_tiny
from tests.kernels.interpreter import DEVICE
from tests.kernels.test_prefill_share import args as shared_args
from tests.step import tiny
from tests.step.test_ranks import args

PUBLISHED = Path(__file__).parents[1] / "checkpoint/data/v41-config.json"
SIZE, CHUNK = 2, 16


class Loud(DummyWeights):
    """Random weights; routed experts of which the streams are full."""

    def packed(self, name):
        stored = super().packed(name)
        if ".experts." not in name:
            return stored
        return dataclasses.replace(stored, scales=stored.scales + 5)


def source() -> DummyWeights:
    return Loud(args(), device="cpu", seed=3)


def test_parts_of_ranks_become_whole():
    names = [
        name
        for name in tensor_table(args())
        if name.startswith("layers.1.") and name.endswith(("weight", "attn_sink"))
    ]
    plan, whole = shard_plan(args(), SIZE), source()

    def work(group):
        parts = Shards(plan, group).source(whole)
        gathered = GatheredSource(parts, plan, group, "cpu")
        return [
            gathered.tensor(name) if name.endswith("sink") else gathered.packed(name)
            for name in names
        ]

    for found in run_in_turn(SIZE, work):
        for name, part in zip(names, found, strict=True):
            if name.endswith("sink"):
                assert torch.equal(part, whole.tensor(name)), name
                continue
            stored = whole.packed(name)
            assert torch.equal(part.values, stored.values), name
            assert (part.scales is None) == (stored.scales is None), name
            assert part.scales is None or torch.equal(part.scales, stored.scales), name


def test_memory_of_ranks_that_share_rows():
    """More than with steps of 64 rows: the maps that are whole then, and a chunk's room."""
    published = parse_args(json.loads(PUBLISHED.read_text()))
    published = dataclasses.replace(published, n_routed_experts=6)
    given = {"device": "cuda", "numerics": "quant", "tp": 4}
    more, less = (
        needs(published, EngineConfig(**given, prefill=prefill), 4).gpu_bytes
        for prefill in ("encoder", "full")
    )
    whole = sum(
        entry.num_bytes
        for name, entry in tensor_table(published).items()
        if stem(name) in V41_CUTS and not cut_for_rows(name) and entry.module == "text"
    )
    assert 6e9 < whole < 7e9 and whole < more - less < whole + 1e9


def conversation(group) -> list[torch.Tensor]:
    """A prompt by two schedules, a step between, a step behind: logits and entries."""
    np.seterr(all="ignore")  # of this thread: integers that wrap are no mistake in a kernel
    given, whole, plan, joins = source(), source(), shard_plan(args(), group.size), None
    tables = own_tables(args(), plan, group.rank) if group.size > 1 else []
    if group.size > 1:
        given = Shards(plan, group).source(whole)
        boxes = BOXES
        exchange = OneShot(
            group.rank, [box.data_ptr() for box in boxes], boxes[group.rank], limit=1,
            between=lambda: group.gather(torch.zeros(1)),
        )  # fmt: skip
        joins = RankJoins(exchange, tables)
    ids = list(range(tiny.VOCABULARY))
    model = DeviceV41(
        args(), given, ids, device=DEVICE, drafter=False, joins=joins, prefill_chunk=CHUNK,
        prefill_plans=prefill_tiny.PLANS, whole=whole if group.size > 1 else None,
    )  # fmt: skip
    if group.size > 1:
        regions = Regions(args(), CHUNK, OneProcessMemory(MEMORY, group))
        model.share_prefill(RowShare(group, regions, tables), CHUNK)
    pool = model.new_pool(2, 32, slack=8)
    one, two = pool.open(), pool.open()
    text = prefill_tiny.text(11, seed=2)
    more = {"mode": "encoder", "feed_drafter": False}
    found = [model.prefill(one, text, final=True, **more).logits[-1]]
    model.prefill(two, text[:5], final=False, **more)
    found.append(model.step([(one, [7])]).logits[-1])
    found.append(model.prefill(two, text[5:], final=True, **more).logits[-1])
    found.append(model.step([(two, [7])]).logits[-1])
    return [x.clone() for x in found]


BOXES = [torch.zeros(2, SIZE, 8 * 3 * 64, dtype=torch.int64, device=DEVICE) for _ in range(SIZE)]
MEMORY = [
    torch.full((exchange_bytes(args(), CHUNK, SIZE),), 255, dtype=torch.uint8, device=DEVICE)
    for _ in range(SIZE)
]


@pytest.mark.full
def test_two_ranks_read_a_prompt_and_decode():
    mine, other = run_in_turn(SIZE, conversation)
    assert all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))
    whole, step, parts, again = mine
    # Other boundaries and a step of another sequence between them: the same bits.
    assert torch.equal(whole, parts) and torch.equal(step, again)
    ((alone, alone_step, *_),) = run_in_turn(1, conversation)
    for own, wanted in ((whole, alone), (step, alone_step)):
        error = (own - wanted).norm() / wanted.norm()
        # Roundings to FP8 flip where sums have another order; a part left out gives about 0.7.
        assert 0 < error < 0.15, error


@pytest.mark.parametrize("size", [3, pytest.param(2, marks=pytest.mark.full)])
def test_processes_exchange_rows_at_any_pace(size, tmp_path):
    """Nobody overwrites what another rank still reads, with one barrier behind every writing."""
    file = tmp_path / "memory"
    file.touch()
    os.truncate(file, size * exchange_bytes(shared_args(), 40, size))
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    program = str(Path(__file__).parent / "share_main.py")
    run_ranks(
        [sys.executable, "-W", "ignore", program, str(tmp_path)],
        size,
        env=env,
        limits=Limits(step_s=300.0),
    )
    assert len(list(tmp_path.glob("done-*"))) == size
