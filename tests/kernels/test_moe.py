"""Routed experts against the float64 reference; the expert list; bits against other rows."""

import dataclasses

import pytest
import torch

from deepdraft.kernels import gemv, layout, moe
from deepdraft.kernels.runtime import pad_rows
from deepdraft.ops import gemm
from deepdraft.ops import moe as reference
from deepdraft.quant import formats
from tests.kernels.cases import close_sum, grid, poisoned, rows_of
from tests.kernels.interpreter import DEVICE

LIMIT = 10.0
# (experts, picks, hidden, width)
SHAPES = grid(
    [(4, 2, 64, 32), (3, 2, 96, 96), (3, 1, 32, 64)],
    [(16, 6, 5120, 2304), (16, 6, 5120, 1152), (16, 6, 5120, 576), (16, 6, 5120, 288)],
)


def expert_weights(shape, seed=0):
    """w1, w3, w2 as stored: random codes, scales of 2**-9..2**-5."""
    experts, _, hidden, width = shape
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def random_bytes(low, high, *size):
        size = (experts, *size)
        return torch.randint(low, high, size, dtype=torch.uint8, device=DEVICE, generator=generator)

    return [
        (random_bytes(0, 256, rows, cols // 2), random_bytes(118, 123, rows, cols // 32))
        for rows, cols in ((width, hidden), (width, hidden), (hidden, width))
    ]


def tiled(parts, split=1):
    w1, w3, w2 = parts
    width, hidden = w1[0].shape[1], w2[0].shape[1]
    plans = [layout.expert_plan(2 * width, hidden), layout.expert_plan(hidden, width)]
    if split > 1:
        plans = [dataclasses.replace(p, step=2, split=split) for p in plans]
    up = [layout.interleave_pair(a, b, plans[0].tile) for a, b in zip(w1, w3, strict=True)]
    return layout.tile_mxfp4(*up, plans[0]), layout.tile_mxfp4(*w2, plans[1])


def routing(rows, experts, k, seed=0):
    generator = torch.Generator().manual_seed(seed)
    picks = torch.stack([torch.randperm(experts, generator=generator)[:k] for _ in range(rows)])
    return picks.to(DEVICE), (torch.rand(rows, k, generator=generator) + 0.1).to(DEVICE)


def run_up(x, picks, weights, w13):
    """[R, K, F] dequantised, and the quantised rows and list for the down product."""
    missing = -picks.shape[0] % 8
    picks = torch.nn.functional.pad(picks.int(), (0, 0, 0, missing), value=-1)
    weights = torch.nn.functional.pad(weights, (0, 0, 0, missing))
    listed = moe.expert_list(picks)
    h = moe.routed_up(gemv.quantize_rows(pad_rows(x)), listed, weights, w13, limit=LIMIT)
    return h, listed


def number(h, picks):
    rows = gemm.Fp8Rows(h.codes, h.scales).dequantize(torch.float64)
    return rows.view(-1, picks.shape[1], rows.shape[1])[: picks.shape[0]]


def test_the_list_names_every_expert_once():
    first = [[3, 5], [5, 9], [-1, -1], [3, 0], *[[-1, -1]] * 4]
    picks = torch.tensor([*first, [9, 3], *[[-1, 7]] * 7])
    listed = moe.expert_list(picks.int().to(DEVICE))
    experts, slots = listed.experts.cpu(), listed.slots.cpu()
    assert experts[0].tolist() == [3, 5, 9, 0] + [-1] * 12
    assert experts[1].tolist() == [9, 3, 7] + [-1] * 13
    for tile in range(2):
        for place, expert in enumerate(experts[tile].tolist()):
            for row in range(8):
                found = picks[tile * 8 + row].tolist()
                want = found.index(expert) if expert >= 0 and expert in found else -1
                assert slots[tile, place, row] == want


@pytest.mark.parametrize("shape", SHAPES)
def test_up(shape):
    experts, k, hidden, _ = shape
    parts = expert_weights(shape)
    w13, _ = tiled(parts)
    x = rows_of(3, hidden, seed=1)
    picks, weights = routing(3, experts, k)
    h, _ = run_up(x, picks, weights, w13)
    exact = gemm.quantize_rows(x).dequantize(torch.float64)
    w1, w3 = (formats.dequantize_mxfp4(*p, torch.float64) for p in parts[:2])
    f = reference.routed_up(exact, picks, weights.double(), w1, w3, limit=LIMIT)
    # The last rounding of a sum may fall either way, and then a bf16 and an E4M3 step.
    got, scale = number(h, picks), f.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True)
    error = (got - f).unflatten(-1, (-1, 32)).abs()
    assert bool((error <= 2.0**-4 * f.unflatten(-1, (-1, 32)).abs() + scale * 2.0**-9).all())
    want = gemm.quantize_rows(f.flatten(0, 1).float()).dequantize(torch.float64)
    same = (got.flatten(0, 1) == want).double().mean()
    assert same >= 0.97, f"{same:.4f} of the codes are equal"


@pytest.mark.parametrize("shape", SHAPES)
def test_down(shape):
    experts, k, hidden, width = shape
    parts = expert_weights(shape)
    w13, w2 = tiled(parts)
    picks, weights = routing(3, experts, k)
    h, listed = run_up(rows_of(3, hidden, seed=1), picks, weights, w13)
    y = moe.routed_down(h, listed, w2, picks=k)[:3]
    exact_w2 = formats.dequantize_mxfp4(*parts[2], torch.float64)
    exact = reference.routed_down(number(h, picks), picks, exact_w2)
    magnitude = reference.routed_down(number(h, picks).abs(), picks, exact_w2.abs())
    close_sum(y, exact, magnitude + 2.0**15 * exact.abs(), width)  # 2**-9: rounding to bf16


def test_sums_that_are_exact_give_equal_bits():
    generator = torch.Generator().manual_seed(7)
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    w = values[torch.randint(0, 8, (3, 64, 96), generator=generator)]
    w *= torch.randint(0, 2, w.shape, generator=generator) * 2 - 1
    packed = formats.quantize_mxfp4(w)
    w2 = layout.tile_mxfp4(*(t.to(DEVICE) for t in packed))
    picks = torch.tensor([[0, 2]] * 8)
    h = torch.randint(-8, 9, (16, 96), generator=generator).float()
    rows = gemv.quantize_rows(h.to(DEVICE))
    y = moe.routed_down(rows, moe.expert_list(picks.int().to(DEVICE)), w2, picks=2)
    want = reference.routed_down(h.view(8, 2, 96), picks, w)
    assert torch.equal(y.cpu(), want.bfloat16())


@pytest.mark.parametrize("split", [1, 2])
def test_bits_do_not_depend_on_other_rows(split):
    width = 32 if split == 1 else 128
    shape = (3, 2, width, width)
    w13, w2 = tiled(expert_weights(shape), split)
    x = rows_of(9, width, seed=2)
    picks, weights = routing(9, 3, 2)

    def run(rows, at):
        h, listed = run_up(rows, picks[at], weights[at], w13)
        n = len(at)
        return moe.routed_down(h, listed, w2, picks=2)[:n], number(h, picks[at])

    full = run(x, list(range(9)))
    assert not w13.arrivals.any()
    for at in ([0], [8, 4, 0, 7]):
        for got, want in zip(run(x[at], at), full, strict=True):
            assert torch.equal(got, want[at])
    got = run(poisoned(x[:8], 5), list(range(8)))
    assert all(torch.equal(g[5], f[5]) for g, f in zip(got, full, strict=True))


def test_parts_of_a_sum_are_added():
    shape = (3, 2, 128, 288)
    parts = expert_weights(shape)
    x, (picks, weights) = rows_of(3, 128, seed=1), routing(3, 3, 2)
    results = []
    for split in (1, 2):
        w13, w2 = tiled(parts, split)
        h, listed = run_up(x, picks, weights, w13)
        results.append((number(h, picks), moe.routed_down(h, listed, w2, picks=2)[:3].float()))
    for whole, split in zip(*results, strict=True):
        # A last bit of a sum may move a value to the next code.
        assert (whole == split).double().mean() >= 0.98
        torch.testing.assert_close(whole, split, rtol=2.0**-3, atol=2.0**-3)


@pytest.mark.parametrize("width", [32, 96, 288])
def test_shared_activation(width):
    h = rows_of(8, 2 * width, seed=width, spread=4.0)
    got = moe.swiglu_rows(h, limit=LIMIT)
    gate, up = h.cpu().double().chunk(2, -1)
    f = torch.nn.functional.silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT)
    want = gemm.quantize_rows(f.bfloat16())
    rows = gemm.Fp8Rows(got.codes.cpu(), got.scales.cpu()).dequantize()
    equal = (rows == want.dequantize()).double().mean()
    assert equal >= 0.98, f"{equal:.4f} of the codes are equal"
    torch.testing.assert_close(rows, want.dequantize(), rtol=2.0**-3, atol=1e-6)


def test_wrong_operands_are_refused():
    w13, w2 = tiled(expert_weights((3, 1, 32, 64)))
    picks = torch.zeros(8, 1, dtype=torch.int32, device=DEVICE)
    listed = moe.expert_list(picks)
    with pytest.raises(ValueError, match="experts of 64 columns"):
        moe.routed_down(gemv.quantize_rows(rows_of(8, 96, seed=0)), listed, w2, picks=1)
    with pytest.raises(ValueError, match="is not one of 16 x 1"):
        x = gemv.quantize_rows(rows_of(16, 32, seed=0))
        moe.routed_up(x, listed, torch.ones(16, 1, device=DEVICE), w13, limit=LIMIT)
    with pytest.raises(ValueError, match="int32"):
        moe.expert_list(picks.long())
