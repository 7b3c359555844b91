"""Memory and work of prompts: published sizes against figures counted by hand, refusals."""

import pytest

from deepdraft.errors import StateError
from deepdraft.kernels.prefill_index import PLAN, held_places
from deepdraft.models import v41_prefill_plan as plans
from deepdraft.models.v41_buffers import DeviceCaches
from deepdraft.proof.bench_prefill import Ceilings, long_prompt_estimate
from deepdraft.proof.bench_step_main import read_args
from tests.kernels import prefill_tiny as tiny

FULL = read_args(None)
MILLION = 1 << 20


def test_the_work_of_a_million_tokens():
    """kernels.md 1.4: 15.8 GFLOP a token in linear maps, 1.54 in attention, 6.44 in scores."""
    work = plans.prompt_work(FULL, MILLION)
    each = {name: stage.flop / MILLION / 1e9 for name, stage in work.items()}
    apart = ("index scores", "attention", "residual streams")
    linear = sum(v for name, v in each.items() if name not in apart)
    assert linear == pytest.approx(15.8, abs=0.05)
    assert each["attention"] == pytest.approx(1.54, abs=0.01)
    assert each["index scores"] == pytest.approx(6.44, abs=0.01)
    # 7.2 GB of experts a layer and chunk.
    assert work["routed experts"].bytes / 128 / 20 == pytest.approx(8.6e9, rel=0.05)
    assert plans.limit_s(work, flops=0.79e15, rate=4.2e12) == pytest.approx(31.6, abs=0.2)
    slow = plans.limit_s(work, flops=1e30, rate=4.2e12)
    assert slow == pytest.approx(sum(s.bytes for s in work.values()) / 4.2e12)


def test_chunks_add_up_to_the_prompt():
    one = plans.prompt_work(FULL, 50_000, chunk=1000)
    two = plans.prompt_work(FULL, 50_000, chunk=50_000)
    for name in ("routed experts", "index scores", "shared experts"):
        assert one[name].flop == pytest.approx(two[name].flop, rel=1e-3)
    assert one["routed experts"].bytes > two["routed experts"].bytes


def test_state_is_what_the_caches_take():
    for tokens in (40, 96):
        caches = DeviceCaches(
            tiny.args(), num_sequences=1, max_tokens=tokens, spare=8, device="cpu"
        )
        small = caches.tokens.nbytes + caches.floors.nbytes + caches.turns.nbytes
        small += sum(p.nbytes for p in caches.pending.values())
        planned = plans.state_bytes(tiny.args(), tokens, spare=8)
        tables = tokens * (4 + 16 * (tiny.args().qk_rope_head_dim // 2))
        assert planned - tables == caches.nbytes - small


def test_a_copy_of_a_million_tokens_is_less_than_a_gigabyte():
    tables = MILLION * (4 + 16 * 32)
    assert plans.state_bytes(FULL, MILLION, spare=0) - tables < 1.0e9


def test_the_largest_chunk_that_fits():
    need = plans.workspace_bytes(FULL, 8192) + plans.entry_values_bytes(FULL, MILLION)
    assert 4e9 < need < 5e9
    found = plans.plan_prefill(FULL, MILLION, need + 10, state=False)
    assert (found.rows, found.workspace, found.state) == (8192, need, 0)
    assert plans.plan_prefill(FULL, MILLION, need - 10, state=False).rows == 4096
    assert plans.plan_prefill(FULL, 1000, 10**11).rows == 1024
    assert plans.held_candidates(FULL) == held_places(FULL.index_topk, PLAN)


def test_what_does_not_fit_is_refused_with_what_would():
    free = 1_500_000_000
    with pytest.raises(StateError, match="tokens would fit") as caught:
        plans.plan_prefill(FULL, MILLION, free)
    fitting = int(str(caught.value).rsplit("; ", 1)[1].split()[0])
    assert plans.plan_prefill(FULL, fitting, free).rows == min(plans.CHUNKS)
    with pytest.raises(StateError):
        plans.plan_prefill(FULL, fitting + 1, free)


def test_an_estimate_from_chunks():
    lines = [{"context": c, "ms": 100.0 + c / 10, "rows": 10} for c in (0, 50, 90)]
    assert long_prompt_estimate(lines, 100) == pytest.approx(
        sum(100 + c / 10 for c in range(0, 100, 10)) / 1e3
    )
    limit = Ceilings(2.0, 4.0).limit({"a": plans.Stage(6.0, 4.0), "b": plans.Stage(0.0, 4.0)})
    assert limit == 3.0
