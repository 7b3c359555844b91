"""The fake quantisers give what the engine's formats store and read back."""

import pytest
import torch

from deepdraft.quant import formats
from training import quantise


def sample(*shape: int) -> torch.Tensor:
    gen = torch.Generator().manual_seed(5)
    x = torch.randn(shape, generator=gen)
    return x * torch.exp2(torch.randint(-12, 12, (*shape[:-1], 1), generator=gen).float())


def test_weights_equal_the_engines_formats() -> None:
    w = sample(64, 96)
    assert torch.equal(
        quantise.fp8_tiles(w), formats.dequantize_fp8_tile(*formats.quantize_fp8_tile(w))
    )
    assert torch.equal(
        quantise.fp8_rows(w), formats.dequantize_fp8_row(*formats.quantize_fp8_row(w))
    )
    assert torch.equal(
        quantise.mxfp4_group32(w), formats.dequantize_mxfp4(*formats.quantize_mxfp4(w))
    )


def test_powers_of_two_keep_their_exponent() -> None:
    x = torch.tensor([1.0, 2.0, 2.0000002, 0.75, 3.0, 2.0**-126])
    want = torch.tensor([1.0, 2.0, 4.0, 1.0, 4.0, 2.0**-126])
    assert torch.equal(quantise.pow2_ceil(x), want)
    assert torch.equal(quantise.pow2_ceil(x.double()), want.double())


def test_e2m1_rounds_to_even_codes() -> None:
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, -0.2, -5.1])
    want = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, -0.0, -6.0])
    assert torch.equal(quantise.round_e2m1(x), want)


@pytest.mark.parametrize(
    "name", ["fp8_group32", "fp4_group16", "mxfp4_group32", "fp8_tiles", "fp8_rows"]
)
def test_values_are_stable_and_gradients_pass_straight(name: str) -> None:
    fn = getattr(quantise, name)
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(6)).requires_grad_()
    q = fn(x)
    assert torch.equal(fn(q.detach()), q.detach())
    relative = (q - x).abs().max(-1).values / x.abs().max(-1).values
    assert 0 < relative.max() < 0.2
    q.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
