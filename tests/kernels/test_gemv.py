"""Small-row products against the float64 reference, and a row's bits against the row count."""

import pytest
import torch

from deepdraft.kernels import gemv, layout
from deepdraft.kernels.runtime import pad_rows
from deepdraft.ops import gemm
from deepdraft.quant import formats
from tests.kernels.cases import close_sum, grid, poisoned, rows_of
from tests.kernels.interpreter import DEVICE

SHAPES = grid(
    # (rows, cols, split); demo and golden widths, ragged splits, one group
    [(64, 96, 1), (288, 32, 1), (96, 192, 2), (64, 288, 2), (32, 640, 3)],
    # published, whole and sliced (kernels.md 3.1)
    [
        (1792, 5120, None),
        (32768, 1280, None),
        (16384, 1280, None),
        (8192, 1280, None),
        (4096, 1280, None),
        (5120, 8192, None),
        (5120, 4096, None),
        (5120, 2048, None),
        (5120, 1024, None),
        (4608, 5120, None),
        (576, 5120, None),
        (5120, 2304, None),
        (5120, 288, None),
        (25600, 6144, None),
        (5120, 15360, None),
    ],
)


def fp8_weight(shape, seed=3, blocks=1):
    rows, cols, split = shape
    w = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)) / cols**0.5
    w *= torch.exp2(torch.arange(rows) // 32 % 5 - 2.0)[:, None]
    values, scales = formats.quantize_fp8_tile(w)
    plan = layout.dense_plan(rows, cols, blocks)
    if split is not None:
        plan = layout.Plan(plan.tile, plan.step, split, plan.warps)
    return layout.tile_fp8(values.to(DEVICE), scales.to(DEVICE), plan), values, scales


@pytest.mark.parametrize("cols", [32, 96, 320, 1280])
def test_quantise_rows(cols):
    x = pad_rows(rows_of(3, cols, seed=cols))
    x[1, :32] = 0
    got, want = gemv.quantize_rows(x), gemm.quantize_rows(x.cpu())
    assert torch.equal(got.codes.cpu(), want.codes)
    assert torch.equal(got.scales.cpu(), want.scales)


def fp8_reference(x, values, scales):
    rows = gemm.quantize_rows(x.cpu())
    exact = gemm.fp8_linear(rows, values, scales, dtype=torch.float64)
    rows = gemm.Fp8Rows(rows.codes & 0x7F, rows.scales)
    return exact, gemm.fp8_linear(rows, values & 0x7F, scales, dtype=torch.float64)


@pytest.mark.parametrize("shape", SHAPES)
def test_fp8_product(shape):
    w, values, scales = fp8_weight(shape)
    x = pad_rows(rows_of(3, shape[1], seed=1))
    y = gemv.gemv(gemv.quantize_rows(x), w, dtype=torch.float32)
    exact, magnitude = fp8_reference(x, values, scales)
    close_sum(y.cpu(), exact, magnitude, shape[1] + 2 * shape[1] // 32)
    rounded = gemv.gemv(gemv.quantize_rows(x), w)
    assert torch.equal(rounded, y.bfloat16())
    assert not w.arrivals.any()


@pytest.mark.parametrize("split", [1, 2])
def test_bits_do_not_depend_on_other_rows(split):
    w, _, _ = fp8_weight((32, 192, split))
    x = rows_of(10, 192, seed=2)

    def run(rows):
        return gemv.gemv(gemv.quantize_rows(pad_rows(rows)), w, dtype=torch.float32)

    everything = run(x)
    for r in (1, 3):
        assert torch.equal(run(x[:r])[:r], everything[:r])
    order = torch.tensor([9, 3, 7, 0, 1, 2, 8, 4, 5, 6], device=x.device)
    assert torch.equal(run(x[order])[:10], everything[order])
    for row in (0, 9):
        assert torch.equal(run(poisoned(x, row))[row], everything[row])


@pytest.mark.parametrize("shape", grid([(64, 96, 2), (128, 64, 2)], [(8192, 4096, 8)]))
def test_block_diagonal_product(shape):
    rows, cols, blocks = shape
    w, values, scales = fp8_weight((rows, cols, None), blocks=blocks)
    x = pad_rows(rows_of(2, blocks * cols, seed=4))
    y = gemv.gemv(x, w, blocks=blocks, dtype=torch.float32)
    reference = gemm.fp8_grouped_linear
    exact = reference(x.cpu(), values, scales, blocks, dtype=torch.float64)
    magnitude = reference(x.cpu().abs(), values & 0x7F, scales, blocks, dtype=torch.float64)
    close_sum(y.cpu(), exact, magnitude, cols + cols // 32)


@pytest.mark.parametrize(
    "shape", grid([(37, 96), (16, 192), (4, 64)], [(129280, 5120), (384, 5120), (32, 5120)])
)
def test_bf16_product(shape):
    rows, cols = shape
    weight = torch.randn(rows, cols, generator=torch.Generator().manual_seed(5)).bfloat16()
    x = pad_rows(rows_of(3, cols, seed=6))
    y = gemv.gemv(x, layout.tile_bf16(weight.to(DEVICE)), dtype=torch.float32)
    exact = gemm.bf16_linear(x.cpu(), weight, dtype=torch.float64)
    close_sum(
        y.cpu(), exact, gemm.bf16_linear(x.cpu().abs(), weight.abs(), dtype=torch.float64), cols
    )


def test_sums_that_are_exact_give_equal_bits():
    # Small integers: every order of summation gives the same float32, so nothing may differ.
    generator = torch.Generator().manual_seed(7)
    values, scales = formats.quantize_fp8_tile(
        torch.randint(-8, 9, (64, 128), generator=generator).float()
    )
    x = torch.randint(-8, 9, (8, 128), generator=generator).float().bfloat16().to(DEVICE)
    w = layout.tile_fp8(values.to(DEVICE), scales.to(DEVICE))
    y = gemv.gemv(gemv.quantize_rows(x), w, dtype=torch.float32)
    assert torch.equal(y.cpu(), gemm.fp8_linear(gemm.quantize_rows(x.cpu()), values, scales))


def test_wrong_operands_are_refused():
    w, _, _ = fp8_weight((64, 96, None))
    with pytest.raises(ValueError, match="multiple of 8"):
        gemv.quantize_rows(rows_of(3, 96, seed=0))
    with pytest.raises(ValueError, match="matrix of 64 x 96"):
        gemv.gemv(gemv.quantize_rows(rows_of(8, 64, seed=0)), w)
    split, _, _ = fp8_weight((32, 96, 3))
    with pytest.raises(ValueError, match="arrival counters"):
        codes = torch.zeros(136, 96, dtype=torch.uint8, device=DEVICE)
        gemv.gemv(gemv.QuantRows(codes, torch.ones(3, 136, device=DEVICE)), split)
    with pytest.raises(ValueError, match="contiguous"):
        gemv.quantize_rows(rows_of(32, 8, seed=0).t())
