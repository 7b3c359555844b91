"""Router, Engram and token choice against their references."""

import pytest
import torch

from deepdraft.engine.sampler import Row, Sampler
from deepdraft.kernels import engram, routing, sample
from deepdraft.ops import engram as engram_reference
from deepdraft.ops import gemm
from deepdraft.ops.moe import route
from deepdraft.quant import formats
from deepdraft.types import SamplingParams
from tests.kernels.cases import grid, poisoned, rows_of
from tests.kernels.interpreter import DEVICE


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("shape", grid([(16, 2), (5, 5), (24, 3)], [(384, 6), (128, 3)]))
def test_routing(shape):
    experts, k = shape
    logits, bias = random(8, experts) * 6 - 4, random(experts, seed=1) * 0.1
    positions = ints(0, 5, -1, 7, 8, 9, 10, 11)
    picks, weights = routing.route(logits, bias, positions, k=k, scale=1.5, temperature=0.8)
    eye = torch.eye(experts, dtype=torch.float64, device=DEVICE)
    want, exact = route(logits.double(), eye, bias.double(), k=k, scale=1.5, temperature=0.8)
    live = positions >= 0
    assert torch.equal(picks[live].long(), want[live])
    torch.testing.assert_close(weights[live].double(), exact[live], rtol=2e-6, atol=1e-12)
    assert bool((picks[~live] == -1).all()) and not weights[~live].any()


def test_small_scores_keep_their_digits():
    logits = torch.linspace(-60, -8, 16, device=DEVICE).expand(1, 16).contiguous()
    zero = torch.zeros(16, device=DEVICE)
    picks, weights = routing.route(logits, zero, ints(0), k=4, scale=1.0, temperature=1.0)
    exact = torch.nn.functional.softplus(logits[0].double()).sqrt()[-4:].flip(0)
    assert picks.tolist() == [[15, 14, 13, 12]]
    torch.testing.assert_close(weights[0].double(), exact / exact.sum(), rtol=1e-6, atol=0)


def test_equal_scores_go_to_the_lower_expert():
    zero = torch.zeros(1, 16, device=DEVICE)
    picks, _ = routing.route(zero, zero[0], ints(0), k=3, scale=1.0, temperature=1.0)
    assert picks.tolist() == [[0, 1, 2]]


def test_nan_logits_stay_inside():
    logits = torch.full((1, 5), float("nan"), device=DEVICE)
    zero = torch.zeros(5, device=DEVICE)
    picks, _ = routing.route(logits, zero, ints(0), k=2, scale=1.0, temperature=1.0)
    assert bool(((picks >= 0) & (picks < 5)).all())


@pytest.mark.parametrize("width", grid([32, 96], [256]))
def test_table_rows(width):
    values, scales = formats.quantize_fp8_row(random(20, width).cpu() * 3)
    values, scales = values.to(DEVICE), scales.to(DEVICE)
    rows = torch.randint(0, 20, (8, 6), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    rows[0, 0], rows[1, 1] = -1, 20
    got = engram.gather_rows(values, scales, rows)
    want = gemm.quantize_rows(engram_reference.gather_rows(values, scales, rows))
    assert torch.equal(got.codes, want.codes) and torch.equal(got.scales, want.scales)
    assert not got.codes[0, :width].any() and not got.codes[1, width : 2 * width].any()


@pytest.mark.parametrize("shape", grid([(4, 96), (2, 32)], [(4, 5120)]))
def test_injection(shape):
    streams, hidden = shape
    x = rows_of(3, streams * hidden, seed=1).view(3, streams, hidden)
    kv = rows_of(3, (streams + 1) * hidden, seed=2)
    gate = random(streams, hidden, seed=3) * hidden**-0.5
    got = engram.inject(x, kv, gate, norm_eps=1e-20)
    want = engram_reference.inject(x.double(), kv.double(), gate.double(), norm_eps=1e-20)
    assert (got.double() == want).double().mean() >= 0.99
    torch.testing.assert_close(got.double(), want, rtol=2.0**-7, atol=1e-5)
    alone = engram.inject(poisoned(x, 1), poisoned(kv, 1), gate, norm_eps=1e-20)
    assert torch.equal(alone[1], got[1])


@pytest.mark.parametrize("vocabulary", grid([50, 5000], [129280]))
def test_tokens(vocabulary):
    logits = random(4, vocabulary) * 3
    logits[0, 7] = logits[0, 30] = 40.0  # a tie
    temperature = torch.tensor([0.0, 1.0, 0.3, 2.0], dtype=torch.float64, device=DEVICE)
    seeds, positions = ints(0, 17, -5, 2**62, dtype=torch.int64), ints(3, 0, 900, 41)
    got = sample.pick_tokens(logits, temperature, seeds, positions.long())
    sampler = Sampler(vocabulary)
    rows = [
        Row(params=SamplingParams(temperature=t, seed=s), position=p)
        for t, s, p in zip(temperature.tolist(), seeds.tolist(), positions.tolist(), strict=True)
    ]
    assert got.tolist() == [c.token_id for c in sampler.sample(logits.cpu(), rows)]
    assert got[0] == 7


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_unusable_logits_give_no_token(bad):
    logits = random(3, 40)
    logits[1, 20] = bad
    logits[2] = -float("inf")
    temperature = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64, device=DEVICE)
    got = sample.pick_tokens(logits, temperature, *[ints(1, 2, 3, dtype=torch.int64)] * 2)
    assert got[0] >= 0 and got[1:].tolist() == [-1, -1]
