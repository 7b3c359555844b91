"""Mix coefficients and the boundary against the float64 reference; bits against other rows."""

import pytest
import torch

from deepdraft.kernels import mhc
from deepdraft.kernels.runtime import pad_rows
from deepdraft.ops import boundary as reference
from deepdraft.ops import gemm
from tests.kernels.cases import grid, poisoned, rows_of
from tests.kernels.interpreter import DEVICE

EPS = 1e-20
# (streams, hidden)
SHAPES = grid([(4, 192), (2, 96), (3, 64)], [(4, 5120), (4, 4096)])


def streams_of(rows, shape, seed=0):
    streams, hidden = shape
    return rows_of(rows, streams * hidden, seed=seed).view(rows, streams, hidden)


def mixer(shape, seed=1):
    streams, hidden = shape
    m = (2 + streams) * streams
    generator = torch.Generator().manual_seed(seed)
    fn = torch.randn(m, streams * hidden, generator=generator) / (streams * hidden) ** 0.5
    base = torch.randn(m, generator=generator)
    return [t.to(DEVICE) for t in (fn, base, torch.tensor([1.0, 0.7, 1.5]))]


def coefficients(x, shape, iters=4):
    return mhc.mix_coefficients(x, *mixer(shape), iters=iters, eps=1e-6, norm_eps=EPS)


@pytest.mark.parametrize("shape", SHAPES)
def test_coefficients(shape):
    x = pad_rows(streams_of(3, shape))
    got = coefficients(x, shape)
    parts = [t.double() for t in mixer(shape)]
    want = reference.mix_coefficients(x.double(), *parts, iters=4, eps=1e-6, norm_eps=EPS)
    torch.testing.assert_close(got[:3].double(), want[:3], rtol=2e-5, atol=2e-6)
    s = shape[0]
    comb = got[:3, 2 * s :].view(3, s, s)
    torch.testing.assert_close(comb.sum(1), torch.ones(3, s, device=DEVICE), rtol=0, atol=1e-5)


def one_step_apart(got, want):
    """bf16 tensors equal but for a few roundings that fell the other way."""
    equal = (got.double() == want).double().mean()
    assert equal >= 0.98, f"{equal:.4f} of the values are equal"
    torch.testing.assert_close(got.double(), want, rtol=2.0**-7, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("picks", [0, 3])
def test_boundary(shape, picks):
    streams, hidden = shape
    x = pad_rows(streams_of(3, shape))
    coef = coefficients(x, shape)
    norm = torch.rand(hidden, generator=torch.Generator().manual_seed(2)).to(DEVICE) + 0.5
    shared = None
    if picks:
        y = rows_of(8 * picks, hidden, seed=4).view(8, picks, hidden)
        shared = rows_of(8, hidden, seed=5)
        total = reference.sum_of_picks(y.double(), shared.double())
    else:
        y = rows_of(8, hidden, seed=3)
        total = y.double()
    out, u, quantised = mhc.boundary(x, norm, y=y, shared=shared, coef=coef, norm_eps=EPS)
    exact = coef.double()
    pre = exact[:, :streams]
    want, want_u = reference.boundary(x.double(), total, exact, pre, norm.double(), norm_eps=EPS)
    one_step_apart(out[:3], want[:3])
    # A bf16 step in a stream moves the collapsed value by about one more.
    torch.testing.assert_close(u[:3].double(), want_u[:3], rtol=2.0**-6, atol=2.0**-6)
    # From the kernel's own streams there are two roundings left: of the collapsed value, where a
    # sum in fp32 may fall on the other side of a tie (a step of it is up to two of u), and of u.
    _, own = reference.boundary(out.double(), None, None, pre, norm.double(), norm_eps=EPS)
    assert (u[:3].double() == own[:3]).double().mean() >= 0.99
    torch.testing.assert_close(u[:3].double(), own[:3], rtol=2.0**-6, atol=1e-6)
    rows = gemm.quantize_rows(u[:3])
    assert torch.equal(quantised.codes[:3], rows.codes)
    assert torch.equal(quantised.scales[:, :3], rows.scales)


def test_collapse_alone_and_expand_alone():
    shape = (4, 96)
    x = streams_of(8, shape)
    coef, y = coefficients(x, shape), rows_of(8, 96, seed=3)
    norm = torch.ones(96, device=DEVICE)
    whole, u, _ = mhc.boundary(x, norm, y=y, coef=coef, norm_eps=EPS)
    streams, none, _ = mhc.boundary(x, None, y=y, coef=coef)
    assert none is None and torch.equal(streams, whole)
    pre = coef[:, :4].contiguous()
    same, alone, _ = mhc.boundary(streams, norm, pre=pre, norm_eps=EPS)
    assert same is streams and torch.equal(alone, u)


def test_bits_do_not_depend_on_other_rows():
    shape = (2, 96)
    x, y = streams_of(9, shape), rows_of(9, 96, seed=3)
    norm = torch.ones(96, device=DEVICE)

    def run(x, y):
        x, y = pad_rows(x), pad_rows(y)
        coef = coefficients(x, shape, iters=1)
        out, u, rows = mhc.boundary(x, norm, y=y, coef=coef, norm_eps=EPS)
        return coef, out, u, rows.codes, rows.scales.t()

    full = run(x, y)
    for at in ([0], [8, 4, 0]):
        for got, want in zip(run(x[at], y[at]), full, strict=True):
            assert torch.equal(got[: len(at)], want[at])
    got = run(poisoned(x[:8], 4), poisoned(y[:8], 4))
    assert all(torch.equal(g[4], f[4]) for g, f in zip(got, full, strict=True))


@pytest.mark.parametrize("width", grid([32, 96, 160], [1280, 512, 5120]))
def test_norm(width):
    x = rows_of(8, width + 64, seed=width)
    weight = torch.rand(width, generator=torch.Generator().manual_seed(2)).to(DEVICE) + 0.5
    u, quantised = mhc.norm_rows(x, weight, width, norm_eps=EPS)
    want = reference.norm_rows(x[:, :width].double(), weight.double(), norm_eps=EPS)
    one_step_apart(u, want)
    rows = gemm.quantize_rows(u)
    assert torch.equal(quantised.codes, rows.codes) and torch.equal(quantised.scales, rows.scales)


def test_missing_operands_are_refused():
    x = streams_of(8, (4, 64))
    norm = torch.ones(64, device=DEVICE)
    with pytest.raises(ValueError, match="needs coef"):
        mhc.boundary(x, norm, y=rows_of(8, 64, seed=0))
    with pytest.raises(ValueError, match="collapse needs"):
        mhc.boundary(x, norm)
    with pytest.raises(ValueError, match="do not fit"):
        mhc.norm_rows(rows_of(8, 64, seed=0), norm, 96, norm_eps=EPS)
