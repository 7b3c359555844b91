"""CUDA C++ products against float64 and against other rows: the kernel itself on a GPU, its source
compiled for the CPU elsewhere (tests/kernels/emulated)."""

import dataclasses

import pytest
import torch

from deepdraft.kernels import gemv, layout, moe, runtime
from deepdraft.kernels.native import fragments, trials
from deepdraft.kernels.runtime import pad_rows
from deepdraft.ops import gemm
from deepdraft.ops import moe as reference
from deepdraft.quant import formats
from tests.kernels.cases import grid, rows_of
from tests.kernels.emulated import CAN_RUN, on_cpu
from tests.kernels.interpreter import DEVICE

LIMIT = 10.0
needs_machine = pytest.mark.skipif(not CAN_RUN, reason="needs a CUDA device, or g++")
DENSE = grid(
    [("fp8", 96, 1536, 1), ("bf16", 128, 96, 2)],
    [("fp8", 32768, 1280, 1), ("fp8", 36864, 1280, 1), ("bf16", 8192, 4096, 8),
     ("fp8", 5120, 8192, 1), ("fp8", 4608, 5120, 1), ("fp8", 5120, 2304, 1),
     ("fp8", 1792, 5120, 1), ("fp8", 25600, 6144, 1), ("fp8", 5120, 15360, 1),
     ("fp8", 4096, 1280, 1), ("bf16", 1024, 4096, 1), ("fp8", 5120, 1024, 1),
     ("fp8", 576, 5120, 1), ("fp8", 5120, 288, 1)],
)  # fmt: skip
"""Rows' format, rows, columns, blocks of a block-diagonal map."""
_SMALL = [(4, 2, 64, 32), (3, 2, 96, 64)]
_LARGE = [(12, 6, 5120, 2304), (12, 6, 5120, 1152), (12, 6, 5120, 576), (12, 6, 5120, 288),
          (5, 3, 320, 96)]  # fmt: skip
EXPERTS = grid(
    [(_SMALL[0], 1), (_SMALL[1], 0)],
    [(s, fold) for s in _LARGE for fold in (0, 1)] + [(_SMALL[0], 0), (_SMALL[1], 1)],
)
"""(Experts, picks, hidden, width) and how their loop is folded."""
PROGRAMMATIC = (False, True) if DEVICE == "cuda" else (False,)
"""The emulator knows one way to launch."""


def random_bytes(*shape, low=0, high=256, seed=0):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randint(low, high, shape, dtype=torch.uint8, device=DEVICE, generator=generator)


def dense_weight(rows, cols):
    return random_bytes(rows, cols) & 0xF7, random_bytes(rows // 32, cols // 32, low=117, high=122)


def some_plans(cols):
    """The shortest and the longest turns of a block, and on a GPU some between."""
    plans = sorted(fragments.stream_plans("fp8", cols // 32), key=lambda p: p.groups * p.across)
    return plans[:: max(1, len(plans) // 4)] if DEVICE == "cuda" else plans[:1]


def usual_plan(rows, cols):
    """The plan in use; the first one where Triton's kernel is."""
    plan = fragments.dense_stream_plan(rows, cols)
    return plan or next(fragments.stream_plans("fp8", cols // 32))


def relative(got, want):
    return float((got.double() - want).norm() / want.norm())


def bits(x):
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


@pytest.mark.parametrize("shape", DENSE)
@needs_machine
@on_cpu
def test_dense(shape):
    kind, rows, cols, blocks = shape
    values, scales = dense_weight(rows, cols)
    x = rows_of(8, cols * blocks, seed=1)
    given = gemv.quantize_rows(x) if kind == "fp8" else x
    exact_x = gemm.quantize_rows(x).dequantize(torch.float64) if kind == "fp8" else x.double()
    w = formats.dequantize_fp8_tile(values, scales, torch.float64)
    parts = exact_x.view(8, blocks, cols).transpose(0, 1)
    want = (parts @ w.view(blocks, -1, cols).transpose(1, 2)).transpose(0, 1).reshape(8, rows)
    chosen = usual_plan(rows, cols)
    for plan in [*some_plans(cols), chosen]:
        if blocks > 1 and rows // blocks // 32 % plan.down:
            continue
        streamed = fragments.stream_fp8(values, scales, plan)
        got = gemv.gemv(given, streamed, blocks=blocks, dtype=torch.float32)
        assert relative(got, want) < 1e-6 * cols**0.5, plan
        rounded = gemv.gemv(given, streamed, blocks=blocks)
        assert torch.equal(rounded, got.bfloat16()), plan
        quantised = gemv.gemv_quantized(given, streamed, blocks=blocks)
        again = gemv.quantize_rows(rounded)
        assert torch.equal(quantised.codes, again.codes), plan
        assert torch.equal(quantised.scales, again.scales), plan
        assert not streamed.arrivals.any()


@needs_machine
@on_cpu
def test_bf16_rows_of_any_size():
    _, rows, cols, blocks = next(shape for shape in DENSE if shape[0] == "bf16")
    values, scales = dense_weight(rows, cols)
    sizes = 2.0 ** torch.tensor([-120, -60, -20, -1, 0, 13, 40, 70], device=DEVICE)
    x = (rows_of(8, cols * blocks, seed=6).float() * sizes[:, None]).bfloat16()
    x[3] = 0
    w = formats.dequantize_fp8_tile(values, scales, torch.float64).view(blocks, -1, cols)
    want = x.double().view(8, blocks, cols).transpose(0, 1) @ w.transpose(1, 2)
    want = want.transpose(0, 1).reshape(8, rows)
    across = min(16, cols // 32)
    plan = fragments.StreamPlan(cols // 32 // across, 1, across, 1, 1, 4)
    streamed = fragments.stream_fp8(values, scales, plan)
    got = gemv.gemv(x, streamed, blocks=blocks, dtype=torch.float32)
    for row in range(8):
        left = (got[row].double() - want[row]).norm()
        assert float(left) <= 1e-6 * cols**0.5 * float(want[row].norm()), row


@pytest.mark.parametrize("shape", DENSE)
@needs_machine
@on_cpu
def test_dense_rows_are_alone(shape):
    kind, rows, cols, blocks = shape
    plan = usual_plan(rows, cols)
    if blocks > 1 and rows // blocks // 32 % plan.down:
        return
    w = fragments.stream_fp8(*dense_weight(rows, cols), plan)
    x = rows_of(16, cols * blocks, seed=2)

    def run(values):
        given = gemv.quantize_rows(values) if kind == "fp8" else values
        return gemv.gemv(given, w, blocks=blocks, dtype=torch.float32)

    full = run(x)
    for at in ([3], [9, 0, 15], list(range(9)), list(range(16))[::-1]):
        some = x.new_full((-(-len(at) // 8) * 8, x.shape[1]), float("nan"))
        some[: len(at)] = x[at]
        for programmatic in PROGRAMMATIC:
            runtime.use_programmatic_launch(programmatic)
            got = run(some)[: len(at)]
            runtime.use_programmatic_launch(False)
            assert torch.equal(bits(got), bits(full[at])), at


def expert_weights(shape):
    experts, _, hidden, width = shape
    sizes = ((width, hidden), (width, hidden), (hidden, width))
    return [
        (
            random_bytes(experts, rows, cols // 2, seed=i),
            random_bytes(experts, rows, cols // 32, low=118, high=123, seed=9 + i),
        )
        for i, (rows, cols) in enumerate(sizes)
    ]


def streamed_experts(parts, fold, bulk=0):
    w1, w3, w2 = parts
    width, hidden = w1[0].shape[1], w2[0].shape[1]
    up = dataclasses.replace(fragments.expert_stream_plan(2 * width, hidden), fold=fold, bulk=bulk)
    down = dataclasses.replace(fragments.expert_stream_plan(hidden, width), fold=fold, bulk=bulk)
    return fragments.stream_gate_up(w1, w3, up), fragments.stream_mxfp4(*w2, down)


def routing(rows, experts, k, seed=0):
    generator = torch.Generator().manual_seed(seed)
    picks = torch.stack([torch.randperm(experts, generator=generator)[:k] for _ in range(rows)])
    return picks.to(DEVICE), (torch.rand(rows, k, generator=generator) + 0.1).to(DEVICE)


def run_experts(x, picks, weights, w13, w2):
    """h [R, K, F] and y [R, K, D]; rows that fill the tile are NaN."""
    count, missing = picks.shape[0], -picks.shape[0] % 8
    picks = torch.nn.functional.pad(picks.int(), (0, 0, 0, missing), value=-1)
    weights = torch.nn.functional.pad(weights, (0, 0, 0, missing))
    x = pad_rows(x)
    x[count:] = float("nan")
    listed = moe.expert_list(picks)
    h = moe.routed_up(gemv.quantize_rows(x), listed, weights, w13, limit=LIMIT)
    y = moe.routed_down(h, listed, w2, picks=picks.shape[1])
    return h.view(picks.shape[0], picks.shape[1], -1)[:count].clone(), y[:count].clone()


@pytest.mark.parametrize("case", EXPERTS)
@needs_machine
@on_cpu
def test_experts(case):
    shape, fold = case
    experts, k, hidden, _ = shape
    parts = expert_weights(shape)
    x = rows_of(6, hidden, seed=1)
    picks, weights = routing(6, experts, k)
    h, y = run_experts(x, picks, weights, *streamed_experts(parts, fold))
    exact = gemm.quantize_rows(x).dequantize(torch.float64)
    for row in range(6):  # float64 weights of one row's picks at a time
        own = picks[row : row + 1]
        w1, w3, w2 = (
            formats.dequantize_mxfp4(c[own[0]], s[own[0]], torch.float64) for c, s in parts
        )
        all_picks = torch.arange(k, device=own.device)[None]
        want = reference.routed_up(
            exact[row : row + 1], all_picks, weights[row : row + 1].double(), w1, w3, limit=LIMIT
        )
        assert relative(h[row : row + 1], want) < 3e-3
        assert float((h[row].double() - want[0]).abs().max()) < 0.02 * float(want.abs().max())
        seen = gemm.quantize_rows(h[row].float()).dequantize(torch.float64)[None]
        want = reference.routed_down(seen, all_picks, w2)
        assert relative(y[row : row + 1], want) < 3e-3
        assert float((y[row].double() - want[0]).abs().max()) < 0.02 * float(want.abs().max())


@pytest.mark.parametrize("case", EXPERTS)
@needs_machine
@on_cpu
def test_expert_rows_are_alone(case):
    shape, fold = case
    experts, k, hidden, _ = shape
    weights_of = streamed_experts(expert_weights(shape), fold)
    x = rows_of(16, hidden, seed=2)
    picks, weights = routing(16, experts, k)
    full = run_experts(x, picks, weights, *weights_of)
    for at in ([0], [5], [14, 4, 0, 7], list(range(9)), list(range(16))[::-1], list(range(16))):
        for programmatic in PROGRAMMATIC:
            runtime.use_programmatic_launch(programmatic)
            some = run_experts(x[at], picks[at], weights[at], *weights_of)
            runtime.use_programmatic_launch(False)
            for got, want in zip(some, full, strict=True):
                assert torch.equal(bits(got), bits(want[at])), at


@needs_machine
@on_cpu
def test_bulk_copies_and_every_lane_arriving_give_the_same_bits():
    shape, fold = EXPERTS[0]
    parts, x = expert_weights(shape), rows_of(6, shape[2], seed=1)
    picks, weights = routing(6, shape[0], shape[1])
    usual, bulk = (
        run_experts(x, picks, weights, *streamed_experts(parts, fold, bulk)) for bulk in (0, 1)
    )
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(usual, bulk, strict=True))
    with trials.using("lanes"):
        lanes = run_experts(x, picks, weights, *streamed_experts(parts, fold, 1))
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(usual, lanes, strict=True))
    values, scales = dense_weight(96, 1536)
    plan = fragments.dense_stream_plan(96, 1536)
    rows = gemv.quantize_rows(rows_of(8, 1536, seed=2))
    usual, bulk = (
        gemv.gemv(rows, fragments.stream_fp8(values, scales, dataclasses.replace(plan, bulk=bulk)))
        for bulk in (0, 1)
    )
    assert torch.equal(bits(usual), bits(bulk))
    for depth in (1, 2, 3, 2 * (plan.groups // plan.step)):  # whole units in a ring, or not
        other = dataclasses.replace(plan, bulk=1, depth=depth)
        got = gemv.gemv(rows, fragments.stream_fp8(values, scales, other))
        assert torch.equal(bits(usual), bits(got)), depth


@pytest.mark.parametrize(
    "shape",
    grid(
        [("fp8", 224, 512, 1, 4, 1), ("bf16", 192, 256, 1, 2, 2)],
        [("fp8", 5120, 8192, 1, 4, 1), ("fp8", 1792, 5120, 1, 4, 1), ("bf16", 8192, 4096, 8, 2, 1)],
    ),
)
@needs_machine
@on_cpu
def test_parts_joined_in_a_cluster_give_the_same_bits(shape):
    kind, rows, cols, blocks, split, down = shape
    groups = cols // 32
    across = 8 if groups >= 64 else 2
    plan = fragments.StreamPlan(groups // across // split, 1, across, down, split, 4, bulk=1)
    x = rows_of(16, cols * blocks, seed=2)
    given = gemv.quantize_rows(x) if kind == "fp8" else x
    weight = dense_weight(rows, cols)
    for programmatic in (False, True):
        runtime.use_programmatic_launch(programmatic)
        usual, joined = (
            gemv.gemv(given, fragments.stream_fp8(*weight, made), blocks=blocks, dtype=dtype)
            for made in (plan, dataclasses.replace(plan, joined=1))
            for dtype in (torch.float32,)
        )
        runtime.use_programmatic_launch(False)
        assert torch.equal(bits(usual), bits(joined))


@needs_machine
@on_cpu
def test_what_does_not_fit_is_refused():
    w = fragments.stream_fp8(*dense_weight(64, 128), fragments.dense_stream_plan(64, 128))
    x = rows_of(8, 96, seed=0)
    for rows in (x, rows_of(7, 128, seed=0)):
        with pytest.raises(ValueError, match="must be"):
            gemv.gemv(rows, w)
    tiled = layout.tile_fp8(*dense_weight(64, 128))
    assert gemv.gemv(rows_of(8, 128, seed=0), tiled).shape == (8, 64)
