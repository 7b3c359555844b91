"""A chunk's rows shared by ranks: what they exchange, and a model on ranks in turn against one."""

import dataclasses
import functools

import numpy as np
import pytest
import torch

from deepdraft.arch import V41Args
from deepdraft.engine.dummy import DummyWeights
from deepdraft.models.v41_device import DevicePool
from deepdraft.models.v41_prefill import DevicePrefill
from deepdraft.models.v41_prefill_share import ExpertCuts, RowShare, part_of, rows_each
from deepdraft.models.v41_weights import load_weights
from deepdraft.ops.engram_hash import engram_tables
from deepdraft.parallel.group import run_in_turn
from deepdraft.parallel.shards import SlicedSource
from tests.kernels import prefill_tiny as tiny
from tests.kernels.interpreter import DEVICE


@dataclasses.dataclass
class Part:
    first: int
    offset: int
    total: int


CASES = [(0, 1), (0, 40), (7, 40), (6, 41), (1, 3), (3, 8), (5, 130)]


@pytest.mark.parametrize("first, total", CASES)
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_parts_of_a_chunk(first, total, size):
    parts = [part_of(first, total, size, rank) for rank in range(size)]
    assert [i for part in parts for i in range(total)[part]] == list(range(total))
    assert all(part.stop - part.start <= rows_each(first, total, size) for part in parts)
    # No pair of positions lies on two ranks.
    assert all((first + part.start) % 2 == 0 for part in parts[1:] if part.start < total)


@pytest.mark.parametrize("first, total", CASES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_ranks_exchange(first, total, size):
    generator = torch.Generator().manual_seed(first + total)
    rows = torch.randn(total, 3, generator=generator)
    entries = torch.randn((first + total) // 2 - first // 2, 5, generator=generator)
    picked = torch.randn(size, total + 2, 4, 32, generator=generator).bfloat16()
    shared = torch.randn(total, 32, generator=generator).bfloat16()

    def work(group):
        share = RowShare(group)
        own = part_of(first, total, size, group.rank)
        chunk = Part(first + own.start, own.start, total)
        count, most = own.stop - own.start, max(8, rows_each(first, total, size))
        mine = torch.full((most, 3), torch.nan)
        mine[:count] = rows[own]
        out = [share.whole(mine, chunk)[:total], share.last(mine, chunk, 6)]
        for values, ratio in ((rows, 1), (entries, 2)):
            held = torch.full_like(values, torch.nan)
            at = slice(*((first + n) // ratio - first // ratio for n in (own.start, own.stop)))
            held[at] = values[at]
            share.fill(held, chunk, ratio=ratio)
            out.append(held)
        out.append(share.from_last(torch.tensor([group.rank]), chunk))
        if size > 1:
            mine = torch.zeros(most, 32, dtype=torch.bfloat16)
            mine[:count] = shared[own]
            out.append(share.own_sum(picked[group.rank], mine, chunk)[:count])
        return out

    found = run_in_turn(size, work)
    last = max(r for r in range(size) if range(total)[part_of(first, total, size, r)])
    for whole, tail, window, made, of, *_ in found:
        assert torch.equal(whole, rows) and torch.equal(tail, rows[-6:])
        assert torch.equal(window, rows) and torch.equal(made, entries)
        assert of.item() == last
    if size > 1:
        want = picked[:, :total].double().sum((0, 2)) + shared.double()
        got = torch.cat([out[-1] for out in found]).double()
        torch.testing.assert_close(got, want, rtol=2.0**-8, atol=1e-5)


def args() -> V41Args:
    """Encoder: ratio 2 with Engram, reuse. Decoder: ratio 1 with candidates."""
    small = dataclasses.replace(
        tiny.args(),
        moe_intermediate_size=128,
        num_hidden_layers=3,
        compress_ratios=(2, 2, 1, 0),
        kv_source_layer_ids=(0, 2),
        index_source_layer_ids=(0, 2),
        candidate_source_layer_id=2,
        engram_layer_ids=(0,),
        dspark_target_layer_ids=(1, 2),
    )
    rows = engram_tables(small).num_embeddings
    return dataclasses.replace(small, engram_num_embeddings=rows)


@functools.cache
def source() -> DummyWeights:
    return DummyWeights(args(), device="cpu", seed=5)


def read(group, text, cuts):
    """A prompt in parts, each to its logits: caches, and the last logits."""
    np.seterr(all="ignore")  # of this thread: integers that wrap are no mistake in a kernel
    given = source()
    if group.size > 1:
        given = SlicedSource(given, ExpertCuts(args(), group.size), group.rank)
    weights = load_weights(args(), given, range(tiny.VOCABULARY), device=DEVICE, drafter=False)
    assert weights.layers[0].experts.w2.cols == 128 // group.size
    assert weights.layers[0].experts.shared2.cols == 128
    pool = DevicePool(args(), num_sequences=2, max_tokens=64, slack=8, device=DEVICE)
    prefill = DevicePrefill(weights, pool.caches, chunk=24, plans=tiny.PLANS, share=RowShare(group))
    pool.open()
    state, logits = pool.open(), None
    with torch.inference_mode():
        for first, last in zip((0, *cuts), (*cuts, len(text)), strict=True):
            prefill.encode(state, text[first:last])
            logits = prefill.replay(state, all_rows=False)[0]
    n = state.num_tokens
    held = {"window": pool.window[:, state.slot * pool.ring + torch.arange(n - 8, n) % pool.ring]}
    for layer, ratio in pool.ratios.items():
        at = slice(state.slot * pool.entries[layer], state.slot * pool.entries[layer] + n // ratio)
        held |= {f"main {layer}": pool.main[layer][at], f"index {layer}": pool.index[layer][at]}
    pending = state.slot * pool.pending_ring + (n - 1) % pool.pending_ring
    held |= {f"pending {layer}": rows[pending] for layer, rows in pool.pending.items()}
    return held, logits


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_in_turn(size):
    text, cuts = tiny.text(19, seed=4), (5,)
    ((want, logits),) = run_in_turn(1, lambda group: read(group, text, cuts))
    found = run_in_turn(size, lambda group: read(group, text, cuts))
    for held, own in found:
        assert torch.equal(own, found[0][1])
        for name, value in held.items():
            assert torch.equal(value, found[0][0][name]), name
    held, own = found[0]
    # Nothing that an expert made comes before the first layer's records.
    for name in ("main 0", "index 0", "pending 0"):
        assert torch.equal(held[name], want[name]), name
    assert torch.equal(held["window"][0], want["window"][0])
    for name in ("main 2", "index 2"):
        assert (held[name] == want[name]).double().mean() > 0.9, name
    assert (own - logits).norm() / logits.norm() < 0.1
