"""Forms of the CUDA C++ kernels behind `native.trials`, against the usual ones."""

import dataclasses

import pytest
import torch

from deepdraft.kernels import gemv, moe, runtime
from deepdraft.kernels.native import fragments, plans, stream, trials
from deepdraft.kernels.runtime import pad_rows
from deepdraft.ops import gemm
from deepdraft.quant import formats
from tests.kernels import test_native as usual
from tests.kernels.cases import grid, rows_of
from tests.kernels.emulated import on_cpu
from tests.kernels.test_native import bits, needs_machine

SHAPES = grid([(3, 2, 128, 64)], [(12, 6, 5120, 2304), (12, 6, 5120, 576)])
"""Experts, picks, hidden, width."""


def shared_expert(hidden, width):
    sizes = ((width, hidden), (width, hidden), (hidden, width))
    return [
        (
            usual.random_bytes(rows, cols, seed=20 + i) & 0xF7,
            usual.random_bytes(rows // 32, cols // 32, low=117, high=122, seed=30 + i),
        )
        for i, (rows, cols) in enumerate(sizes)
    ]


class Case:
    """One router's choice for some rows, experts with the shared one behind them."""

    def __init__(self, shape, rows=6, bulk=0, fold=1):
        experts, k, hidden, width = shape
        self.shape, self.rows = shape, rows
        self.parts, self.own = usual.expert_weights(shape), shared_expert(hidden, width)
        w13, w2 = usual.streamed_experts(self.parts, fold, bulk)
        self.w13 = fragments.with_shared_up(w13, self.own[0], self.own[1])
        self.w2 = fragments.with_shared_down(w2, *self.own[2])
        self.x = rows_of(rows, hidden, seed=1)
        self.picks, self.weights = usual.routing(rows, experts, k)

    def run(self, at=None, shared=True):
        """y [R, K, D] and, with it, the shared expert's [R, D] of the rows `at`."""
        at = list(range(self.rows)) if at is None else at
        missing = -len(at) % 8
        picks = torch.nn.functional.pad(self.picks[at].int(), (0, 0, 0, missing), value=-1)
        weights = torch.nn.functional.pad(self.weights[at], (0, 0, 0, missing))
        x = pad_rows(self.x[at])
        x[len(at) :] = float("nan")
        given, listed = gemv.quantize_rows(x), moe.expert_list(picks)
        if shared:
            both = moe.all_experts(given, listed, weights, self.w13, self.w2, limit=usual.LIMIT)
            return [part[: len(at)].clone() for part in both]
        h = moe.routed_up(given, listed, weights, self.w13, limit=usual.LIMIT)
        return moe.routed_down(h, listed, self.w2, picks=picks.shape[1])[: len(at)].clone()


def same(a, b):
    return torch.equal(bits(a), bits(b))


@needs_machine
@on_cpu
def test_other_shares_give_the_same_bits():
    case = Case(SHAPES[0])
    want = case.run(shared=False)
    with trials.using("cyclic", "even", "lanes"):  # up in turn, down evenly
        assert same(case.run(shared=False), want)
    values, scales = usual.dense_weight(128, 1024)
    w = fragments.stream_fp8(values, scales, fragments.StreamPlan(1, 1, 8, 1, 4, 2))
    rows = gemv.quantize_rows(rows_of(8, 1024, seed=2))
    want = gemv.gemv(rows, w)
    with trials.using("even", "lanes"):
        assert same(gemv.gemv(rows, w), want)


@pytest.mark.parametrize("fold", [0, 1])
@pytest.mark.parametrize("shape", SHAPES)
@needs_machine
@on_cpu
def test_shared_expert_among_the_routed_ones(shape, fold):
    case = Case(shape, fold=fold)
    y, own = case.run()
    assert same(y, case.run(shared=False))
    # Float64, quantised where the kernels quantise.
    w1, w3, w2 = (formats.dequantize_fp8_tile(c, s, torch.float64) for c, s in case.own)
    x = gemm.quantize_rows(case.x).dequantize(torch.float64)
    gate, up = (x @ w.T for w in (w1, w3))
    h = torch.nn.functional.silu(gate.clamp(max=usual.LIMIT)) * up.clamp(-usual.LIMIT, usual.LIMIT)
    want = gemm.quantize_rows(h.float()).dequantize(torch.float64) @ w2.T
    assert usual.relative(own, want) < 0.03  # last bits that become other codes
    # And the launches it stands for: the same values but for such codes.
    maps = [
        fragments.stream_fp8(*part, fragments.dense_stream_plan(*part[0].shape))
        for part in ([torch.cat(p) for p in zip(*case.own[:2], strict=True)], case.own[2])
    ]
    given = gemv.quantize_rows(pad_rows(case.x))
    h = moe.swiglu_rows(gemv.gemv(given, maps[0]), limit=usual.LIMIT)
    apart = gemv.gemv(h, maps[1])[: case.rows]
    assert usual.relative(own, apart.double()) < 0.03


@needs_machine
@on_cpu
def test_shared_expert_with_bulk_copies_and_every_lane():
    want = Case(SHAPES[0]).run()
    with trials.using("lanes"):
        assert all(map(same, Case(SHAPES[0], bulk=1).run(), want))


@pytest.mark.parametrize("shape", SHAPES)
@needs_machine
@on_cpu
def test_rows_of_the_shared_expert_are_alone(shape):
    case = Case(shape, rows=9)
    full = case.run()
    for at, programmatic in (([0], False), ([8, 2, 5], True)):
        runtime.use_programmatic_launch(programmatic)
        some = case.run(at)
        runtime.use_programmatic_launch(False)
        for got, want in zip(some, full, strict=True):
            assert same(got, want[at]), at


@needs_machine
@on_cpu
def test_weights_without_the_shared_expert_are_refused():
    case = Case(SHAPES[0])
    case.w13 = dataclasses.replace(case.w13, shared=False)
    with pytest.raises(ValueError, match="do not hold the shared expert"):
        case.run()
    w = usual.streamed_experts(case.parts, 1)[1]
    with pytest.raises(ValueError, match="is no shared expert"):
        fragments.with_shared_down(w, case.own[0][0][:32], case.own[0][1][:1])


def test_bulk_plans_are_those_in_use_with_bulk_copies():
    for kind, rows, cols in plans.BULK:
        plan_of = fragments.dense_stream_plan if kind == "dense" else fragments.expert_stream_plan
        with trials.using():
            usual_plan = plan_of(rows, cols)
        with trials.using("bulk"):
            bulk = plan_of(rows, cols)
        assert bulk.bulk and not usual_plan.bulk
        # What decides the order of sums is as it was.
        for name in ("groups", "across", "split", "fold"):
            assert getattr(bulk, name) == getattr(usual_plan, name), (kind, rows, cols)
        own = {"dense": stream.FP8_ROWS}.get(kind, stream.UP if rows < cols else stream.DOWN)
        assert (stream.shared_bytes(own, bulk) + 1024) * bulk.blocks <= 228 * 1024
