"""Operands and checks shared by the kernel tests."""

import pytest
import torch

from tests.kernels.interpreter import DEVICE

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")


def grid(small, large):
    """Small cases for every machine, large ones for a GPU."""
    return list(small) + [pytest.param(c, marks=[gpu, needs_gpu], id=str(c)) for c in large]


def rows_of(count, width, *, seed, spread=1.0):
    """bf16 values with rows of different size, on the test device."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, width, generator=generator)
    size = torch.exp2(torch.randint(-3, 4, (count, 1), generator=generator).float())
    return (x * size * spread).bfloat16().to(DEVICE)


def poisoned(x, keep):
    """x in which every row but `keep` is NaN or huge."""
    other = torch.full_like(x, float("nan"))
    other[::2] = 3e38 if x.dtype != torch.uint8 else 255
    other[keep] = x[keep]
    return other


def close_sum(got, exact, magnitude, terms):
    """got (float32 sums) against float64 within the bound of a sum of that many terms."""
    bound = (terms + 4) * 2.0**-24 * magnitude + 1e-30
    error = (got.double() - exact).abs()
    assert bool((error <= bound).all()), f"worst error / bound: {(error / bound).max():.3g}"


def quantized(run, *args):
    """run(*args) of a reference in float64 on the CPU copies of tensors."""
    return run(*(a.cpu() if isinstance(a, torch.Tensor) else a for a in args))
