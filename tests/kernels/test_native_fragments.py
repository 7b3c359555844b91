"""Weights in fragment order: the order's inverse, and a product made of it thread by thread with
the bit operations of stream.cu and the operand maps of mma.m16n8k16."""

import numpy as np
import pytest
import torch

from deepdraft.kernels.native import fragments
from deepdraft.kernels.native.fragments import StreamPlan
from deepdraft.quant import formats

PLAN = StreamPlan(1, 1, 1, 16, 1, 2)
ROWS, HIDDEN, EXPERTS = 64, 96, 2


def random_bytes(*shape, low=0, high=256, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)


def mma(a, b):
    """a float [32 threads, 4 registers, 2], b [32, 2, 2] -> c [32, 4], as the PTX manual maps
    them."""
    left, right = np.zeros((16, 16)), np.zeros((16, 8))
    for lane in range(32):
        g, t = lane // 4, lane % 4
        for register in range(4):
            row, col = g + 8 * (register % 2), 2 * t + 8 * (register // 2)
            left[row, col : col + 2] = a[lane, register]
        for register in range(2):
            right[2 * t + 8 * register : 2 * t + 8 * register + 2, g] = b[lane, register]
    out = left @ right
    c = np.zeros((32, 4))
    for lane in range(32):
        g, t = lane // 4, lane % 4
        c[lane] = *out[g, 2 * t : 2 * t + 2], *out[g + 8, 2 * t : 2 * t + 2]
    return c


def unpack_e2m1(words):
    """uint32 [32] -> float [32, 4, 2]: unpack_e2m1 of stream.cu."""
    w = words.astype(np.uint64)
    v = ((w >> 3) & 0x0E0E0E0E) | ((w << 7) & 0x80808080)
    low = [w & 0x8E008E00, (w << 8) & 0x8E008E00]
    high = [v & 0xFF00FF00, (v & 0xFF) << 8 | (v >> 16 & 0xFF) << 24]
    registers = np.stack([r.astype(np.uint32) for r in low + high], -1)
    return registers.view(np.float16).astype(np.float64).reshape(32, 4, 2) * 2.0**14


def rows_of_thread(x, group):
    """x [8, K] -> float [32, k step, 2 registers, 2]: load_rows of stream.cu."""
    part = x[:, 32 * group : 32 * group + 32].reshape(8, 4, 2, 2, 2)
    return part.reshape(32, 2, 2, 2)


def product(tiles, scales, x):
    """tiles(group) -> float [tile, k step, 32, 4, 2]; scales(group) -> [tile, 32, half]: the sums
    of one unit, [32 threads, tile, 4]."""
    total = np.zeros((32, 2, 4))
    for group in range(x.shape[1] // 32):
        b, a, factor = rows_of_thread(x, group), tiles(group), scales(group)
        for tile in range(2):
            c = mma(a[tile][0], b[:, 0]) + mma(a[tile][1], b[:, 1])
            total[:, tile] += c * np.repeat(factor[tile], 2, axis=-1)
    return total


def sums_as_rows(total):
    """[32 threads, tile, 4] -> [8 g, tile, half, 8 batch rows]: as `finish` reads them."""
    return total.reshape(8, 4, 2, 2, 2).transpose(0, 2, 3, 1, 4).reshape(8, 2, 2, 8)


def fp4_unit(w, expert, unit, x):
    def tiles(group):
        words = w.values[expert, unit, group].numpy().view(np.uint32)  # [32, (tile, k step)]
        return [[unpack_e2m1(words[:, 2 * i + s]) for s in range(2)] for i in range(2)]

    def scales(group):
        own = 2.0 ** (w.scales[expert, unit, group].numpy().astype(float) - 127)  # [8 g, 4]
        return own.repeat(4, axis=0).reshape(32, 2, 2).transpose(1, 0, 2)

    return sums_as_rows(product(tiles, scales, x))


def batch(seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, (8, HIDDEN), generator=generator).double().numpy()


def stored(rows, seed):
    return random_bytes(EXPERTS, rows, HIDDEN // 2, seed=seed), random_bytes(
        EXPERTS, rows, HIDDEN // 32, low=120, high=130, seed=seed + 1
    )


def test_experts_down():
    codes, scales = stored(ROWS, 1)
    w = fragments.stream_mxfp4(codes, scales, PLAN)
    assert all(torch.equal(*p) for p in zip(fragments.unstream(w), (codes, scales), strict=True))
    x = batch()
    exact = formats.dequantize_mxfp4(codes, scales, torch.float64).numpy() @ x.T
    for expert in range(EXPERTS):
        for unit in range(ROWS // 32):
            got = fp4_unit(w, expert, unit, x).reshape(32, 8)  # row 4 g + 2 tile + half
            np.testing.assert_array_equal(got, exact[expert, 32 * unit : 32 * unit + 32])


def test_experts_gate_and_up():
    gate, up = stored(ROWS, 5), stored(ROWS, 7)
    w = fragments.stream_gate_up(gate, up, PLAN)
    assert (w.rows, w.cols) == (2 * ROWS, HIDDEN)
    x = batch()
    exact = [formats.dequantize_mxfp4(*m, torch.float64).numpy() @ x.T for m in (gate, up)]
    for unit in range(ROWS // 16):
        got = fp4_unit(w, 1, unit, x)
        for tile in range(2):  # channel 2 g + half
            want = exact[tile][1, 16 * unit : 16 * unit + 16]
            np.testing.assert_array_equal(got[:, tile].reshape(16, 8), want)


def test_dense():
    codes, scales = (
        random_bytes(ROWS, HIDDEN, seed=2) & 0xF7,
        random_bytes(ROWS // 32, HIDDEN // 32, low=120, high=130),
    )
    w = fragments.stream_fp8(codes, scales, PLAN)
    assert all(torch.equal(*p) for p in zip(fragments.unstream(w), (codes, scales), strict=True))
    x = batch()
    exact = formats.dequantize_fp8_tile(codes, scales, torch.float64).numpy() @ x.T

    def tiles(unit, group):
        """As multiply_fp8: words (half, k step); the low two bytes go before the high two."""
        values = w.values[unit, group].view(torch.float8_e4m3fn).double().numpy()
        own = values.reshape(2, 32, 2, 2, 2, 2)  # tile, thread, half, k step, pair, column
        return own.transpose(0, 3, 1, 4, 2, 5).reshape(2, 2, 32, 4, 2)

    for unit in range(ROWS // 32):
        got = product(
            lambda group, unit=unit: tiles(unit, group),
            lambda group, unit=unit: np.full((2, 32, 2), 2.0 ** (int(w.scales[unit, group]) - 127)),
            x,
        )
        want = exact[32 * unit : 32 * unit + 32]
        np.testing.assert_array_equal(sums_as_rows(got).reshape(32, 8), want)


@pytest.mark.parametrize(
    "kind, rows, cols",
    [("fp4", 4608, 5120), ("fp4", 576, 5120), ("fp4", 5120, 2304), ("fp4", 5120, 288),
     ("fp8", 32768, 1280), ("fp8", 8192, 4096), ("fp8", 5120, 8192), ("fp8", 5120, 1024)],
)  # fmt: skip
def test_plans_cover_the_columns(kind, rows, cols):
    make = fragments.dense_stream_plan if kind == "fp8" else fragments.expert_stream_plan
    plan = make(rows, cols)
    assert plan is not None and plan.groups % plan.step == 0
    assert plan.groups * plan.across * plan.split == cols // 32
    assert plan.warps in (8, 16)


def test_columns_that_cannot_be_shared_have_no_plan():
    assert fragments.expert_stream_plan(64, 32 * 11) is None
    assert fragments.dense_stream_plan(64, 32 * 13) is None
