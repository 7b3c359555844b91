"""A chunk's rows shared by ranks: what they exchange, and a model on ranks in turn against one."""

import dataclasses
import functools

import numpy as np
import pytest
import torch

from deepdraft.arch import V41Args
from deepdraft.engine.dummy import DummyWeights
from deepdraft.kernels.cache import record_bytes
from deepdraft.kernels.prefill_share import sum_of_picks
from deepdraft.kernels.prefill_streams import Entered
from deepdraft.models.v41_device import DevicePool
from deepdraft.models.v41_prefill import DevicePrefill
from deepdraft.models.v41_prefill_layers import PrefillLayers
from deepdraft.models.v41_prefill_plan import exchange_bytes, rows_each
from deepdraft.models.v41_prefill_share import (
    PrefillCuts,
    Regions,
    RowShare,
    own_tables,
    part_of,
)
from deepdraft.models.v41_weights import load_weights
from deepdraft.ops.engram_hash import engram_tables
from deepdraft.parallel.group import run_in_turn
from deepdraft.parallel.peers import OneProcessMemory
from deepdraft.parallel.shards import SlicedSource
from tests.kernels import prefill_tiny as tiny
from tests.kernels.interpreter import DEVICE


@dataclasses.dataclass
class Part:
    first: int
    offset: int
    total: int
    rows: int
    positions: torch.Tensor | None = None


CASES = [(0, 1), (0, 40), (7, 40), (6, 41), (1, 3), (3, 8), (5, 130)]


@pytest.mark.parametrize("first, total", CASES)
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_parts_of_a_chunk(first, total, size):
    parts = [part_of(first, total, size, rank) for rank in range(size)]
    assert [i for part in parts for i in range(total)[part]] == list(range(total))
    assert all(part.stop - part.start <= rows_each(first, total, size) for part in parts)
    # No pair of positions lies on two ranks.
    assert all((first + part.start) % 2 == 0 for part in parts[1:] if part.start < total)


@functools.cache
def memories(size: int, rows: int) -> tuple[torch.Tensor, ...]:
    """Filled with what must not be read."""
    nbytes = exchange_bytes(args(), rows, size)
    return tuple(torch.full((nbytes,), 255, dtype=torch.uint8) for _ in range(size))


def share_of(group, rows: int, tables=()) -> RowShare:
    if group.size == 1:
        return RowShare()
    memory = OneProcessMemory(memories(group.size, rows), group)
    return RowShare(group, Regions(args(), rows, memory), tables)


@pytest.mark.parametrize("first, total", [(7, 40), (6, 41), (1, 3)])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_ranks_exchange(first, total, size):
    a = args()
    generator = torch.Generator().manual_seed(first + total)
    codes = functools.partial(torch.randint, 0, 256, dtype=torch.uint8, generator=generator)
    main, index = record_bytes("main", a.head_dim), record_bytes("index", a.index_head_dim)
    made = (first + total) // 2 - first // 2
    window, entries = codes((total + 5, record_bytes("window", a.head_dim))), codes((made, main))
    keys, rows = codes((made, index)), torch.randn(total, a.hidden_size, generator=generator)
    picks, k = torch.randint(0, 5, (total, 4), generator=generator), a.num_experts_per_tok
    picks, weights = picks[:, :k].int(), torch.rand(total, k, generator=generator)
    values = torch.randn(size, total, 32 // size, generator=generator).bfloat16()
    picked = torch.randn(size, total + 2, 4, a.hidden_size, generator=generator).bfloat16()

    def work(group):
        np.seterr(all="ignore")
        share = share_of(group, 136)
        own = part_of(first, total, size, group.rank)
        count, most = own.stop - own.start, max(8, rows_each(first, total, size))
        chunk = Part(first + own.start, own.start, total, -(-most // 16) * 16)

        def mine(x, value=torch.nan):
            part = torch.full((chunk.rows, *x.shape[1:]), value, dtype=x.dtype)
            part[:count] = x[own]
            return part

        ends = (share.whole(mine(rows), chunk), share.last(mine(rows), chunk, 6))
        records = share.window(chunk.rows + total + 5, window)
        records[:5] = window[:5]
        records[5 + own.start : 5 + own.stop] = window[5 + own.start : 5 + own.stop]
        share.fill_window(records, 5, chunk)
        at = slice(*((first + n) // 2 - first // 2 for n in (own.start, own.stop)))
        held = torch.zeros_like(entries), torch.zeros_like(keys)
        held[0][at], held[1][at] = entries[at], keys[at]
        share.fill_entries(*held, chunk, ratio=2)
        sent = mine(rows.bfloat16()), mine(picks, -1), mine(weights)
        share.send_inputs(sent[0], chunk)
        share.send_picks(*sent[1:], chunk)
        got = [x.clone() for x in share.routed(*sent, chunk)]
        sums = share.sums(picked[group.rank], chunk)[:count].clone()
        tables = share.table_values(values[group.rank], chunk)[:count, : 32 // size * size].clone()
        return ends, records[: total + 5].clone(), held, got, sums, tables

    found = run_in_turn(size, work)
    for ends, records, held, (v, p, w), *_ in found:
        assert torch.equal(ends[0], rows) and torch.equal(ends[1], rows[-6:])
        assert torch.equal(held[0], entries) and torch.equal(held[1], keys)
        assert torch.equal(v[:total], rows.bfloat16()) and torch.equal(w[:total], weights)
        assert torch.equal(p[:total], picks) and bool((p[total:] == -1).all())
        if size > 1:
            assert torch.equal(records, window)
    sums = torch.cat([out[-2] for out in found])
    want = [sum_of_picks(y[:total]) for y in picked] if size > 1 else picked[0, :total].unbind(1)
    assert torch.equal(sums, torch.stack(list(want), 1))
    tables = torch.cat([out[-1] for out in found])
    assert torch.equal(tables, torch.cat(values.unbind(0), 1))


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


class Loud(DummyWeights):
    """Random weights; routed experts of which the streams are full."""

    def packed(self, name):
        stored = super().packed(name)
        if ".experts." not in name:
            return stored
        return dataclasses.replace(stored, scales=stored.scales + 5)


@functools.cache
def source() -> DummyWeights:
    return Loud(args(), device="cpu", seed=5)


def cuts_of(size: int) -> PrefillCuts:
    primes = engram_tables(args()).primes.reshape(1, -1).tolist()
    return PrefillCuts(args(), size, dict(zip(args().engram_layer_ids, primes, strict=True)))


def read(group, text, cuts):
    """A prompt in parts, each to its logits: caches, and the last logits."""
    np.seterr(all="ignore")  # of this thread: integers that wrap are no mistake in a kernel
    given, plan, tables = source(), cuts_of(group.size), ()
    if group.size > 1:
        given = SlicedSource(given, plan, group.rank)
        tables = own_tables(args(), plan, group.rank)
    weights = load_weights(args(), given, range(tiny.VOCABULARY), device=DEVICE, drafter=False)
    assert weights.layers[0].experts.w2.cols == 128 // group.size
    assert weights.layers[0].experts.shared2.cols == 128
    pool = DevicePool(args(), num_sequences=2, max_tokens=64, slack=8, device=DEVICE)
    prefill = DevicePrefill(
        weights, pool.caches, chunk=24, plans=tiny.PLANS, share=share_of(group, 24, tables)
    )
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


def test_the_experts_of_ranks_add_up():
    """A sublayer of experts on rows of ranks; its sums are those of one rank, in another order."""
    size, total, first, a = 2, 11, 5, args()
    generator = torch.Generator().manual_seed(7)
    u = torch.randn(total, a.hidden_size, generator=generator).bfloat16()

    def work(group):
        np.seterr(all="ignore")
        given = source()
        if group.size > 1:
            given = SlicedSource(given, cuts_of(group.size), group.rank)
        ids = range(tiny.VOCABULARY)
        weights = load_weights(args(), given, ids, device=DEVICE, drafter=False)
        layers = PrefillLayers(weights, None, plans=tiny.PLANS, share=share_of(group, 24))
        own = part_of(first, total, group.size, group.rank)
        count, most = own.stop - own.start, rows_each(first, total, group.size)
        part = Part(first + own.start, own.start, total, -(-most // 16) * 16)
        x = torch.zeros(part.rows, a.hidden_size, dtype=torch.bfloat16)
        x[:count] = u[own]
        part.positions = torch.where(torch.arange(part.rows) < count, 0, -1).int()
        y, shared = layers._experts(weights.layers[1].experts, Entered(x, x, x, None), part)
        return y[:count].double().sum(1), shared[:count].double()

    (want, shared), *_ = run_in_turn(1, work)
    found = run_in_turn(size, work)
    got = torch.cat([y for y, _ in found])
    assert torch.equal(torch.cat([s for _, s in found]), shared)
    assert (got - want).norm() / want.norm() < 2.0**-7


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
