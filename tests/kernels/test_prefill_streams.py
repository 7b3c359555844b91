"""From one sublayer to the next for many rows, against the float64 reference."""

import pytest
import torch

from deepdraft.kernels.prefill_streams import PLAN, Mix, StreamPlan, enter
from deepdraft.ops import boundary as reference
from deepdraft.ops import gemm
from tests.kernels.cases import grid, poisoned, rows_of
from tests.kernels.interpreter import DEVICE

SMALL = StreamPlan(channels=64, rows=16, part=128, deep=64, stages=1)
# (rows, streams, hidden, picks)
SHAPES = grid([(5, 2, 64, 0), (19, 4, 96, 3)], [(40, 4, 5120, 0), (33, 4, 5120, 6)])
EPS, NORM_EPS, ITERS = 1e-6, 1e-20, 4


def plan():
    return SMALL if DEVICE == "cpu" else PLAN


class Case:
    def __init__(self, shape, seed=0):
        rows, streams, hidden, picks = shape
        generator = torch.Generator().manual_seed(seed)

        def random(*size):
            return torch.randn(size, generator=generator).to(DEVICE)

        m = (2 + streams) * streams
        self.x = rows_of(rows * streams, hidden, seed=seed + 1).view(rows, streams, hidden)
        self.y = rows_of(rows * max(picks, 1), hidden, seed=seed + 2)
        self.shared = None
        if picks:
            self.y = self.y.view(rows, picks, hidden)
            self.shared = rows_of(rows, hidden, seed=seed + 3)
        self.norm = random(hidden) * 0.1 + 1
        self.fn, self.base = random(m, streams * hidden) * hidden**-0.5, random(m)
        self.scale = random(3)
        self.coef = self.mixes(self.x).float()
        self.rows = rows

    def mixes(self, x):
        args = (t.double() for t in (x, self.fn, self.base, self.scale))
        return reference.mix_coefficients(*args, iters=ITERS, eps=EPS, norm_eps=NORM_EPS)

    def run(self, at=slice(None), **options):
        x, y, coef = (t[at].contiguous() for t in (self.x, self.y, self.coef))
        shared = None if self.shared is None else self.shared[at].contiguous()
        options = {"y": y, "shared": shared, "coef": coef, **options}
        return enter(
            x, self.norm, mix=Mix.of(self.fn, self.base, self.scale), iters=ITERS, eps=EPS,
            norm_eps=NORM_EPS, **{"plan": plan(), **options},
        )  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_expand_collapse_norm_and_mix(shape):
    case = Case(shape)
    got = case.run()
    y = case.y.double()
    if case.shared is not None:
        y = reference.sum_of_picks(y, case.shared.double())
    coef, s = case.coef.double(), shape[1]
    x, u = reference.boundary(
        case.x.double(), y, coef, coef[:, :s], case.norm.double(), norm_eps=NORM_EPS
    )
    torch.testing.assert_close(got.x.double(), x, rtol=2.0**-7, atol=1e-5)
    assert (got.x.double() == x).double().mean() >= 0.98
    torch.testing.assert_close(got.u.double(), u, rtol=2.0**-6, atol=1e-4)
    assert (got.u.double() == u).double().mean() >= 0.97
    want = gemm.quantize_rows(got.u.float().cpu()).dequantize()
    assert torch.equal(got.quantised.float().cpu(), want)
    # Coefficients of the streams as they were written.
    # A GPU's tensor cores cut a sum off after each 16 products.
    step = s * shape[2] // 16 * 2.0**-23 if DEVICE == "cuda" else 1e-6
    torch.testing.assert_close(got.coef.double(), case.mixes(got.x), rtol=4 * step, atol=step)


def test_streams_that_stay():
    case = Case((7, 4, 64, 0))
    pre = case.coef[:, :4].contiguous()
    got = case.run(y=None, coef=None, pre=pre)
    assert torch.equal(got.x, case.x)
    _, u = reference.boundary(
        case.x.double(), None, None, pre.double(), case.norm.double(), norm_eps=NORM_EPS
    )
    torch.testing.assert_close(got.u.double(), u, rtol=2.0**-6, atol=1e-4)
    without = enter(case.x, case.norm, pre=pre, norm_eps=NORM_EPS, plan=plan())
    assert without.coef is None and torch.equal(without.u, got.u)


def test_bits_do_not_depend_on_other_rows():
    case = Case((19, 4, 96, 3))
    full = case.run()

    def same(got, at):
        for name in ("x", "u", "quantised", "coef"):
            assert torch.equal(getattr(got, name), getattr(full, name)[at]), name

    for at in ([0], [18, 3]):
        same(case.run(at), at)
    case.x = poisoned(case.x, 17)
    got = case.run()
    assert torch.equal(got.u[17], full.u[17]) and torch.equal(got.coef[17], full.coef[17])


def test_wrong_operands_are_refused():
    case = Case((5, 2, 64, 0))
    with pytest.raises(ValueError, match="picks the shared expert"):
        case.run(shared=case.y)
    with pytest.raises(ValueError, match="needs pre or coef"):
        case.run(y=None, coef=None)
    with pytest.raises(ValueError, match="is no mix"):
        enter(case.x, case.norm, coef=case.coef, mix=Mix.of(case.fn[:1], case.base, case.scale))


def test_three_parts_are_the_whole():
    fn = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)) * 3
    parts = Mix.of(fn, fn, fn).parts
    assert torch.equal(parts.double().sum(0), fn.double())
