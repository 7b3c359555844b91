"""Re-tiled weights: nothing is lost, plans cover every shape, damaged scales are refused."""

import pytest
import torch

from deepdraft.kernels import layout
from deepdraft.quant import formats


def weight(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(32, 32), (96, 160), (288, 288), (192, 512)])
def test_fp8_tiles_hold_every_code(shape):
    values, scales = formats.quantize_fp8_tile(weight(*shape))
    back = layout.untile(layout.tile_fp8(values, scales))
    assert torch.equal(back[0], values) and torch.equal(back[1], scales)


@pytest.mark.parametrize("shape", [(3, 32, 32), (2, 96, 160), (2, 192, 288), (2, 576, 64)])
def test_fp4_tiles_hold_every_code(shape):
    values, scales = formats.quantize_mxfp4(weight(*shape))
    back = layout.untile(layout.tile_mxfp4(values, scales))
    assert torch.equal(back[0], values) and torch.equal(back[1], scales)


def test_gate_and_up_share_bytes():
    gate, up = weight(2, 96, 64), weight(2, 96, 64, seed=1)
    parts = [formats.quantize_mxfp4(w) for w in (gate, up)]
    tile = layout.expert_plan(192, 64).tile
    packed, scales = (layout.interleave_pair(*pair, tile) for pair in zip(*parts, strict=True))
    tiled = layout.tile_mxfp4(packed, scales)
    byte = tiled.values[1, 2, 1, 5, 7]  # expert 1, channel 2 * tile + 5, column 32 + 7
    want = [formats.unpack_nibbles(p[0])[1, 2 * tile + 5, 39] for p in parts]
    assert [int(byte) & 15, int(byte) >> 4] == [int(w) for w in want]


@pytest.mark.parametrize("rows", [16, 384, 4090, 37])
def test_bf16_rows_are_filled_up(rows):
    w = weight(rows, 96).bfloat16()
    tiled = layout.tile_bf16(w)
    assert tiled.values.shape[0] * tiled.plan.tile >= rows
    assert torch.equal(layout.untile(tiled)[0], w)


@pytest.mark.parametrize("rows", range(32, 1200, 32))
def test_a_plan_fits_every_shape(rows):
    for cols in (32, 96, 160, 288, 1280, 5120):
        dense, expert = layout.dense_plan(rows, cols), layout.expert_plan(rows, cols)
        steps = -(-cols // 32 // dense.step)
        assert rows % dense.tile == 0 and rows % (2 * expert.tile) == 0
        assert dense.step & (dense.step - 1) == 0 and expert.step & (expert.step - 1) == 0
        # No part may be empty: parts are cut from the front.
        assert (dense.split - 1) * -(-steps // dense.split) < steps


def test_nan_scales_are_refused():
    values, scales = formats.quantize_fp8_tile(weight(64, 64))
    scales[1, 0] = 255
    with pytest.raises(ValueError, match="255"):
        layout.tile_fp8(values, scales)


def test_odd_shapes_are_refused():
    with pytest.raises(ValueError, match="multiples of 32"):
        layout.tile_mxfp4(torch.zeros(1, 48, 16, dtype=torch.uint8), torch.zeros(1, 48, 1))
