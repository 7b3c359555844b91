"""Dense products of many rows against float64, in both stored orders; bits against other rows."""

import dataclasses

import pytest
import torch

from deepdraft.kernels import layout, prefill_gemm
from deepdraft.kernels.gemv import quantize_rows
from deepdraft.kernels.native import fragments
from deepdraft.kernels.prefill_gemm import PLAN, GemmPlan, gemm
from deepdraft.kernels.runtime import pad_rows
from deepdraft.ops import gemm as reference
from tests.kernels.cases import close_sum, grid, poisoned, rows_of
from tests.kernels.interpreter import DEVICE

SMALL = GemmPlan(wide=64, tall=16, groups=2, warps=4, stages=2, band=2)
# (rows, outputs, inputs)
SHAPES = grid(
    [(5, 96, 96), (33, 64, 64)], [(300, 32768, 1280), (200, 5120, 8192), (70, 1792, 5120)]
)
ORDERS = ("tiled", "streamed")


def plan():
    return SMALL if DEVICE == "cpu" else PLAN


def random_fp8(n, k, seed=0):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (n, k), dtype=torch.uint8, generator=generator)
    codes.masked_fill_((codes & 127) == 127, 0)
    scales = torch.randint(118, 123, (n // 32, k // 32), dtype=torch.uint8, generator=generator)
    return codes.to(DEVICE), scales.to(DEVICE)


def stored(order, codes, scales, blocks=1):
    if order == "tiled":
        return layout.tile_fp8(codes, scales, blocks=blocks)
    return fragments.stream_fp8(codes, scales, fragments.StreamPlan(1, 1, 8, 2, 1, 2))


def quantised(rows, width, seed):
    """bf16 rows whose values E4M3 in groups of 32 holds."""
    x = quantize_rows(pad_rows(rows_of(rows, width, seed=seed)))
    return prefill_gemm.values(x)[:rows].contiguous()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_fp8(shape, order):
    rows, n, k = shape
    codes, scales = random_fp8(n, k)
    x = quantised(rows, k, seed=1)
    y = gemm(x, stored(order, codes, scales), dtype=torch.float32, plan=plan())
    found = reference.quantize_rows(x.float().cpu())
    exact = reference.fp8_linear(found, codes.cpu(), scales.cpu(), dtype=torch.float64)
    size = reference.Fp8Rows(found.codes & 127, found.scales)
    size = reference.fp8_linear(size, codes.cpu() & 127, scales.cpu(), dtype=torch.float64)
    close_sum(y.cpu(), exact, size, k)


@pytest.mark.parametrize("order", ORDERS)
def test_block_diagonal_and_quantised(order):
    codes, scales = random_fp8(128, 96, seed=3)
    x = rows_of(20, 192, seed=4)
    w = stored(order, codes, scales, blocks=2)
    y = gemm(x, w, blocks=2, dtype=torch.float32, plan=plan())
    exact = reference.fp8_grouped_linear(x.cpu(), codes.cpu(), scales.cpu(), 2, dtype=torch.float64)
    size = reference.fp8_grouped_linear(
        x.cpu().abs(), codes.cpu() & 127, scales.cpu(), 2, dtype=torch.float64
    )
    close_sum(y.cpu(), exact, size, 96)
    got = gemm(x, w, blocks=2, quantize=True, plan=plan())
    want = reference.quantize_rows(y.bfloat16().float().cpu()).dequantize()
    assert torch.equal(got.float().cpu(), want)


@pytest.mark.parametrize("n", [40, 128])
def test_bf16_weights(n):
    w = rows_of(n, 96, seed=5)
    x = rows_of(19, 96, seed=6)
    y = gemm(x, layout.tile_bf16(w), dtype=torch.float32, plan=plan())
    exact = reference.bf16_linear(x.cpu(), w.cpu(), dtype=torch.float64)
    size = reference.bf16_linear(x.cpu().abs(), w.cpu().abs(), dtype=torch.float64)
    close_sum(y.cpu(), exact, size, 96)


def test_values_are_those_of_the_codes():
    x = quantize_rows(rows_of(16, 96, seed=7))
    want = reference.Fp8Rows(x.codes, x.scales).dequantize()
    assert torch.equal(prefill_gemm.values(x).float(), want)


@pytest.mark.parametrize("order", ORDERS)
def test_bits_do_not_depend_on_other_rows(order):
    w = stored(order, *random_fp8(64, 96, seed=8))
    x = quantised(37, 96, seed=9)
    full = gemm(x, w, dtype=torch.float32, plan=plan())
    for at in ([0], [36], [20, 5, 36, 7]):
        got = gemm(x[at].contiguous(), w, dtype=torch.float32, plan=plan())
        assert torch.equal(got, full[at])
    got = gemm(poisoned(x, 33), w, dtype=torch.float32, plan=plan())
    assert torch.equal(got[33], full[33])


def test_the_band_changes_no_bit():
    w = stored("tiled", *random_fp8(160, 64, seed=10))
    x = quantised(70, 64, seed=11)
    one = gemm(x, w, plan=dataclasses.replace(plan(), band=1))
    assert torch.equal(one, gemm(x, w, plan=dataclasses.replace(plan(), band=4)))


def test_wrong_operands_are_refused():
    w = stored("tiled", *random_fp8(64, 96))
    x = quantised(8, 96, seed=0)
    with pytest.raises(ValueError, match="must be"):
        gemm(x, w, blocks=2)
    with pytest.raises(ValueError, match="bf16 rows"):
        gemm(x.float(), w)
    with pytest.raises(ValueError, match="cannot be quantised"):
        gemm(x, w, quantize=True, dtype=torch.float32)
