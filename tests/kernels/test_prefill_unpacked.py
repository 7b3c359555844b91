"""Weights unpacked before their products: values, products, the bits of unpacking on the way."""

import pytest
import torch

from deepdraft.kernels import layout, prefill_unpacked
from deepdraft.kernels.prefill_gemm import gemm
from deepdraft.kernels.prefill_unpacked import (
    PlainPlan,
    plain_gemm,
    unpack_dense,
    unpack_experts,
)
from deepdraft.ops import gemm as reference
from deepdraft.quant import formats
from tests.kernels.cases import close_sum, grid, rows_of
from tests.kernels.interpreter import DEVICE
from tests.kernels.test_moe import expert_weights
from tests.kernels.test_prefill_experts import stored as stored_experts
from tests.kernels.test_prefill_gemm import ORDERS, quantised, random_fp8, stored
from tests.kernels.test_prefill_gemm import plan as gemm_plan

SHAPES = grid([(19, 96, 96)], [(3000, 36864, 1280), (2049, 5120, 8192), (1100, 1792, 5120)])


def plan():
    if DEVICE != "cpu":
        return prefill_unpacked.PLAN
    return PlainPlan(tall=16, wide=32, deep=64, warps=4, stages=1, band=2)


def space(values):
    return torch.full((values,), float("nan"), dtype=torch.bfloat16, device=DEVICE)


def dequantised(codes, scales):
    """float64 [N, K] of E4M3 codes in 32 x 32 tiles."""
    values = codes.cpu().view(torch.float8_e4m3fn).double()
    tiles = torch.exp2(scales.cpu().double() - 127)
    return values * tiles.repeat_interleave(32, 0).repeat_interleave(32, 1)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_dense(shape, order):
    rows, n, k = shape
    codes, scales = random_fp8(n, k)
    w = stored(order, codes, scales)
    unpacked = unpack_dense(w, space(n * k + 7))
    exact = dequantised(codes, scales)
    assert torch.equal(unpacked.double().cpu(), exact)
    x = quantised(rows, k, seed=1)
    y = plain_gemm(x, unpacked, n, dtype=torch.float32, plan=plan())
    some = torch.linspace(0, rows - 1, min(rows, 40)).long()
    own = x.cpu()[some].double()
    close_sum(y.cpu()[some], own @ exact.T, own.abs() @ exact.abs().T, k)
    if DEVICE != "cpu":
        assert torch.equal(y, gemm(x, w, dtype=torch.float32, plan=gemm_plan()))


def test_block_diagonal_and_quantised():
    codes, scales = random_fp8(128, 96, seed=3)
    x = rows_of(20, 192, seed=4)
    unpacked = unpack_dense(stored("tiled", codes, scales, blocks=2), space(128 * 96))
    y = plain_gemm(x, unpacked, 128, blocks=2, dtype=torch.float32, plan=plan())
    exact, parts = dequantised(codes, scales), x.cpu().double().split(96, 1)
    want = torch.cat([p @ exact[i * 64 : i * 64 + 64].T for i, p in enumerate(parts)], 1)
    size = torch.cat(
        [p.abs() @ exact[i * 64 : i * 64 + 64].abs().T for i, p in enumerate(parts)], 1
    )
    close_sum(y.cpu(), want, size, 96)
    got = plain_gemm(x, unpacked, 128, blocks=2, quantize=True, plan=plan())
    rounded = reference.quantize_rows(y.bfloat16().float().cpu()).dequantize()
    assert torch.equal(got.float().cpu(), rounded)


def test_bf16_weights_have_the_rows_that_are_asked_for():
    w = rows_of(40, 96, seed=5)
    x = rows_of(19, 96, seed=6)
    unpacked = unpack_dense(layout.tile_bf16(w), space(64 * 96))
    assert torch.equal(unpacked[:40], w)
    y = plain_gemm(x, unpacked, 40, dtype=torch.float32, plan=plan())
    exact = reference.bf16_linear(x.cpu(), w.cpu(), dtype=torch.float64)
    size = reference.bf16_linear(x.cpu().abs(), w.cpu().abs(), dtype=torch.float64)
    assert y.shape == (19, 40)
    close_sum(y.cpu(), exact, size, 96)


@pytest.mark.parametrize("order", ORDERS)
def test_experts_in_their_two_orders(order):
    shape = (3, 2, 96, 64)
    parts = expert_weights(shape)
    w1, w3, w2 = (formats.dequantize_mxfp4(*p, torch.float64).cpu() for p in parts)
    w13, down = stored_experts(order, parts)
    up = unpack_experts(w13, 1, 2, space(2 * 128 * 96), together=True).double().cpu()
    assert torch.equal(up[:, 0::2], w1[1:]) and torch.equal(up[:, 1::2], w3[1:])
    assert torch.equal(
        unpack_experts(down, 1, 2, space(2 * 96 * 64), together=False).double().cpu(), w2[1:]
    )


def test_a_row_alone_has_the_same_bits():
    codes, scales = random_fp8(64, 96, seed=8)
    unpacked = unpack_dense(stored("streamed", codes, scales), space(64 * 96))
    x = quantised(37, 96, seed=9)
    full = plain_gemm(x, unpacked, 64, dtype=torch.float32, plan=plan())
    for at in ([0], [36], [20, 5, 36, 7]):
        got = plain_gemm(x[at].contiguous(), unpacked, 64, dtype=torch.float32, plan=plan())
        assert torch.equal(got, full[at])
