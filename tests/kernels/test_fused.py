"""Fused stages of the decode step: bit for bit what the launches do that they stand for."""

import pytest
import torch

from deepdraft.kernels import cache, gemv, gemv_quant, latents, mhc, moe, routing
from deepdraft.quant import records
from tests.kernels.cases import grid, poisoned, rows_of
from tests.kernels.interpreter import DEVICE
from tests.kernels.test_gemv import fp8_weight

EPS = 1e-6


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


# ---- router and expert list ----------------------------------------------------------------


def arrivals(count=2):
    return torch.zeros(count, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("shape", grid([(16, 2, 8), (5, 5, 8), (24, 3, 16)], [(384, 6, 16)]))
def test_route_and_list(shape):
    experts, k, rows = shape
    logits, bias = random(rows, experts) * 6 - 4, random(experts, seed=1) * 0.1
    positions = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    positions[2] = -1
    counters = arrivals()
    settings = {"k": k, "scale": 1.5, "temperature": 0.8}
    picks, weights, listed = routing.route_listed(logits, bias, positions, counters, **settings)
    want_picks, want_weights = routing.route(logits, bias, positions, **settings)
    want = moe.expert_list(want_picks)
    assert torch.equal(picks, want_picks) and not counters.any()
    # The sum over a row's picks may run in another order.
    torch.testing.assert_close(weights, want_weights, rtol=2.0**-22, atol=0)
    assert torch.equal(listed.experts, want.experts) and torch.equal(listed.slots, want.slots)


def test_a_list_of_forced_picks():
    logits, bias, positions = random(8, 16), random(16, seed=1), ints(*range(8))
    generator = torch.Generator().manual_seed(2)
    forced = torch.stack([torch.randperm(16, generator=generator)[:3] for _ in range(8)])
    forced = forced.int().to(DEVICE)
    forced[6:] = -1
    settings = {"k": 3, "scale": 1.0, "temperature": 1.0}
    picks, _, listed = routing.route_listed(
        logits, bias, positions, arrivals(), forced=forced, **settings
    )
    want = moe.expert_list(forced)
    assert torch.equal(picks, routing.route(logits, bias, positions, **settings)[0])
    assert torch.equal(listed.experts, want.experts) and torch.equal(listed.slots, want.slots)


def test_routes_do_not_depend_on_other_rows():
    logits, bias, positions = random(8, 16), random(16, seed=1), ints(*range(8))
    settings = {"k": 3, "scale": 1.0, "temperature": 1.0}
    picks, weights, _ = routing.route_listed(logits, bias, positions, arrivals(), **settings)
    other = poisoned(logits, 5)
    again, others, _ = routing.route_listed(other, bias, positions, arrivals(), **settings)
    assert torch.equal(again[5], picks[5]) and torch.equal(others[5], weights[5])
    logits.fill_(float("nan"))
    picks, _, listed = routing.route_listed(logits, bias, positions, arrivals(), **settings)
    assert bool(((picks >= 0) & (picks < 16)).all()) and int(listed.experts.max()) < 16


def test_too_few_counters_are_refused():
    settings = {"k": 1, "scale": 1.0, "temperature": 1.0}
    with pytest.raises(ValueError, match="2 arrival counters"):
        routing.route_listed(random(16, 4), random(4), ints(*range(16)), arrivals(1), **settings)


# ---- latents -------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", grid([(64, 32, 8), (96, 64, 16)], [(1280, 512, 32)]))
def test_split_latents(shape):
    width, channels, pairs = shape
    x = rows_of(8, width + channels + 32, seed=1)
    q_norm, kv_norm = random(width, seed=2) + 1, random(channels, seed=3) + 1
    angle = random(8, pairs, seed=4) * 3
    cos, sin = angle.cos(), angle.sin()
    dest = ints(4, 0, -1, 2, 7, 9, -1, 8)
    empty = torch.full((10, cache.record_bytes("window", channels)), 99, dtype=torch.uint8)
    window, want_window = empty.to(DEVICE), empty.to(DEVICE)
    got = latents.split_latents(x, q_norm, kv_norm, cos, sin, dest, window, norm_eps=EPS)
    _, want = mhc.norm_rows(x, q_norm, width, norm_eps=EPS)
    cache.write_entries(
        "window", x, kv_norm, cos, sin, dest, want_window, norm_eps=EPS, start=width
    )
    assert torch.equal(got.codes, want.codes) and torch.equal(got.scales, want.scales)
    assert torch.equal(window, want_window) and bool((window[1] == 99).all())
    assert bool(torch.isfinite(records.unpack_fp8_group32(window[:1].cpu())).all())


def test_narrow_latents_are_refused():
    x, norm, table = rows_of(8, 96, seed=0), random(64), random(8, 8)
    window = torch.zeros(4, 66, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(ValueError, match="does not hold 64 and 64 channels"):
        latents.split_latents(x, norm, norm, table, table, ints(*range(8)), window, norm_eps=EPS)


# ---- quantised products --------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", grid([(64, 96, 1, 1), (96, 192, 2, 3), (64, 64, 2, 2)], [(8192, 4096, None, 8)])
)
def test_quantised_product(shape):
    rows, cols, split, blocks = shape
    w, _, _ = fp8_weight((rows, cols, split), blocks=blocks)
    x = rows_of(16, cols * blocks, seed=5)
    got = gemv_quant.gemv_quantized(x, w, blocks=blocks)
    want = gemv.quantize_rows(gemv.gemv(x, w, blocks=blocks))
    assert torch.equal(got.codes, want.codes) and torch.equal(got.scales, want.scales)
    assert not w.arrivals.any()


def test_a_quantised_product_takes_fp8_weights_and_bf16_rows():
    w, _, _ = fp8_weight((64, 96, 1))
    with pytest.raises(ValueError, match="this takes FP8 and bfloat16"):
        gemv_quant.gemv_quantized(random(8, 96), w)
    with pytest.raises(ValueError, match="multiple of 8"):
        gemv_quant.gemv_quantized(rows_of(7, 96, seed=0), w)
