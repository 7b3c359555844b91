"""Quantisers of activations and caches against slow exact rounding."""

from fractions import Fraction

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from deepdraft.quant.simulate import (
    fake_fp4_e4m3_group16,
    fake_fp8_group32,
    fake_fp8_groups,
    fake_mxfp4_group32,
)
from tests.quant.grids import E2M1_POSITIVE, E4M3_POSITIVE, ceil_power, nearest

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
QUANTISERS = pytest.mark.parametrize(
    "quantiser", [fake_fp8_group32, fake_mxfp4_group32, fake_fp4_e4m3_group16]
)


def samples(dtype: torch.dtype) -> torch.Tensor:
    """Rows [24, 64] of very different sizes, with ties, zeros and powers of two among them."""
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(24, 64, generator=generator, dtype=torch.float64)
    x *= 10 ** torch.linspace(-9, 3, 24, dtype=torch.float64)[:, None]
    x = x.to(dtype)
    x[3] = 0
    x[4, ::3] = 0
    x[5] = torch.tensor([448.0, 0.5, 1.0625, 1.1875] * 16)
    x[6] = torch.nextafter(x[5], torch.zeros(64, dtype=dtype))
    x[7] = torch.nextafter(x[5], torch.full((64,), 1e9, dtype=dtype))
    x[8] = torch.tensor([6.0, -0.25, 2.5, -1.75] * 16)
    x[9] = torch.nextafter(x[8], torch.full((64,), 1e9, dtype=dtype))
    return x


def power_of_two_reference(x, floor, largest, grid):
    groups = x.double().unflatten(-1, (-1, 32))
    out = torch.empty_like(groups)
    for row in range(groups.shape[0]):
        for g in range(groups.shape[1]):
            amax = max(Fraction(floor), Fraction(groups[row, g].abs().max().item()))
            scale = float(ceil_power(amax / largest))
            out[row, g] = nearest(groups[row, g] / scale, grid) * scale
    return out.flatten(-2)


@DTYPES
def test_fp8_in_groups_of_32(dtype):
    x = samples(dtype)
    expected = power_of_two_reference(x, 1e-4, 448, E4M3_POSITIVE)
    assert torch.equal(fake_fp8_group32(x).double(), expected)


@DTYPES
def test_mxfp4_in_groups_of_32(dtype):
    x = samples(dtype)
    expected = power_of_two_reference(x, 6 * 2.0**-126, 6, E2M1_POSITIVE)
    assert torch.equal(fake_mxfp4_group32(x).double(), expected)


@DTYPES
def test_fp4_with_e4m3_scales_in_groups_of_16(dtype):
    x = samples(dtype)
    groups = x.unflatten(-1, (-1, 16))
    scale = (groups.abs().amax(-1, keepdim=True) / 6).clamp(2.0**-9, 448)
    scale = nearest(scale, E4M3_POSITIVE).to(dtype)
    codes = nearest(groups / scale, E2M1_POSITIVE)
    expected = (codes * scale.double()).flatten(-2)
    assert torch.equal(fake_fp4_e4m3_group16(x).double(), expected)


@pytest.mark.parametrize(
    "quantiser, group, largest, relative, absolute",
    [
        (fake_fp8_group32, 32, 448, 2**-4, 2**-10),
        (fake_mxfp4_group32, 32, 6, 2**-2, 2**-2),
        (fake_fp4_e4m3_group16, 16, 6, 2**-2, 2**-2),
    ],
)
def test_stated_worst_errors(quantiser, group, largest, relative, absolute):
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(2000, 32, generator=generator, dtype=torch.float64)
    x *= 10 ** torch.empty(2000, 1, dtype=torch.float64).uniform_(0, 2.5, generator=generator)
    amax = x.abs().unflatten(-1, (-1, group)).amax(-1).repeat_interleave(group, -1)
    # The scale is below 2 * amax / largest in every format.
    bound = torch.maximum(relative * x.abs(), absolute * 2 * amax / largest)
    error = (quantiser(x) - x).abs()
    assert (error <= bound).all()
    large = x.abs() > amax / 4
    assert (error[large] > 0.75 * relative * x.abs()[large]).any()  # the bound is not idle


def test_float64_rounds_once():
    # Through float32 this value would become the tie 1.1875, and that 1.25.
    x = torch.zeros(32, dtype=torch.float64)
    x[0], x[1] = 448.0, 1.1875 - 1e-12
    assert fake_fp8_group32(x)[1] == 1.125


def test_floors():
    tiny = torch.full((32,), 1e-5)
    # amax counts as 1e-4: scale 2**-22, which makes 1e-5 the 41.9 between 40 and 44.
    assert fake_fp8_group32(tiny)[0] == 40 * 2.0**-22
    assert fake_fp8_group32(torch.full((32,), 2.0**-33)).eq(0).all()
    # Main KV: the scale is 2**-9 at least, its step half of that.
    assert fake_fp4_e4m3_group16(torch.full((16,), 2.0**-11)).eq(0).all()
    assert fake_fp4_e4m3_group16(torch.full((16,), 1.01 * 2.0**-11)).eq(2.0**-10).all()
    # Index keys keep values far below that.
    assert fake_mxfp4_group32(torch.full((32,), 2.0**-60)).eq(2.0**-60).all()
    for quantiser in (fake_fp8_group32, fake_mxfp4_group32, fake_fp4_e4m3_group16):
        assert quantiser(torch.zeros(2, 32)).eq(0).all()


@QUANTISERS
@DTYPES
def test_a_row_does_not_depend_on_others(quantiser, dtype):
    x = samples(dtype)
    whole = quantiser(x)
    assert torch.equal(whole, torch.cat([quantiser(row[None]) for row in x]))
    assert torch.equal(whole.view(2, 3, 4, 64), quantiser(x.view(2, 3, 4, 64)))
    assert whole.dtype == dtype


@QUANTISERS
def test_input_is_kept_and_may_be_strided(quantiser):
    x = samples(torch.float32)
    before = x.clone()
    expected = quantiser(x)
    assert torch.equal(x, before)
    assert torch.equal(quantiser(x.t().contiguous().t()), expected)
    assert torch.equal(quantiser(torch.cat((x, x), 1)[:, :64]), expected)


@QUANTISERS
def test_nan_stays_nan(quantiser):
    x = torch.ones(2, 32)
    x[0, 5] = float("nan")
    out = quantiser(x)
    assert out[0, 5].isnan()
    assert out[1].isfinite().all()


class CountCalls(TorchDispatchMode):
    """Counts operators that reach the dispatcher, views included."""

    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "quantiser, most",
    [(fake_fp8_group32, 16), (fake_mxfp4_group32, 16), (fake_fp4_e4m3_group16, 27)],
)
def test_few_operators_and_no_branch_on_values(quantiser, most):
    x = samples(torch.float32)
    quantiser(x)
    with CountCalls() as count:
        quantiser(x)
    assert count.calls <= most
    with FakeTensorMode() as mode:  # has no values: reading one raises
        assert quantiser(mode.from_tensor(x)).shape == x.shape


@DTYPES
@pytest.mark.parametrize("size", [32, 48, 128])
def test_fp8_in_groups_of_any_size(size, dtype):
    """Powers of two as above, the last group cut; any scale against torch's own cast."""
    x = samples(dtype)
    if size == 32:
        expected = power_of_two_reference(x, 1e-4, 448, E4M3_POSITIVE)
        assert torch.equal(fake_fp8_groups(x, size, powers=True).double(), expected)
    for part, got in zip(
        x.split(size, -1), fake_fp8_groups(x, size, powers=False).split(size, -1), strict=True
    ):
        scale = part.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448
        codes = (part / scale).float().to(torch.float8_e4m3fn).to(dtype)
        assert torch.allclose(
            got, codes * scale, rtol=2**-4 if dtype == torch.float64 else 0, atol=0
        )
    for rows in (1, 5, 24):
        whole = fake_fp8_groups(x, size, powers=True)
        assert torch.equal(fake_fp8_groups(x[:rows], size, powers=True), whole[:rows])
