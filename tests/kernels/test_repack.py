"""Records between a pool and a snapshot: the kernel against the reference, byte for byte."""

import dataclasses

import pytest
import torch

from deepdraft.kernels import repack as kernels
from deepdraft.kernels.strips import Strip
from deepdraft.ops import repack as reference
from tests.kernels.cases import grid
from tests.kernels.interpreter import DEVICE


def block_strip(data, scale, **changes):
    """Two planes of a block, of which this is the second: 40 bytes before it, 12 behind."""
    per_block, size = 6, data + scale
    strip = Strip(
        base=5, first=12, ring=0, count=15, blocks=3, per_block=per_block,
        block_bytes=40 + per_block * size + 12, layer_bytes=0,
        data_at=40, scale_at=40 + per_block * data, data_bytes=data, scale_bytes=scale,
    )  # fmt: skip
    return dataclasses.replace(strip, **changes), 1


def ring_strip(data, scale, **changes):
    """Windows of three layers, from the end of a ring over its beginning."""
    rows = 7
    strip = Strip(
        base=9, first=24, ring=9, count=rows, blocks=1, per_block=rows,
        block_bytes=0, layer_bytes=rows * (data + scale) + 4,
        data_at=8, scale_at=8 + rows * data, data_bytes=data, scale_bytes=scale,
    )  # fmt: skip
    return dataclasses.replace(strip, **changes), 3


CASES = [
    block_strip(32, 4),
    block_strip(16, 1),
    block_strip(16, 1, count=0),
    block_strip(32, 4, count=18),
    block_strip(32, 4, first=0, count=1),
    block_strip(32, 4, data_at=41, scale_at=41 + 6 * 32),
    ring_strip(64, 2),
    ring_strip(64, 4),
    ring_strip(48, 0),
    ring_strip(64, 4, first=3, count=6),
]
PUBLISHED = grid(
    [],
    [
        block_strip(256, 32),
        block_strip(64, 4),
        ring_strip(512, 16),
        ring_strip(4096, 0),
    ],
)


def run(strip, layers, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows, size = 40, strip.data_bytes + strip.scale_bytes
    pool = torch.randint(1, 256, (layers, rows, size), generator=generator, dtype=torch.uint8)
    end = strip.layer_bytes * (layers - 1) + strip.block_bytes * (strip.blocks - 1)
    end += strip.scale_at + strip.per_block * strip.scale_bytes + 10
    flat = torch.randint(1, 256, (end,), generator=generator, dtype=torch.uint8)
    want, got = flat.clone(), flat.to(DEVICE)
    reference.gather(pool, strip, want)
    kernels.gather(pool.to(DEVICE), strip, got)
    assert torch.equal(got.cpu(), want)
    other = torch.randint(1, 256, pool.shape, generator=generator, dtype=torch.uint8)
    back, there = other.clone(), other.to(DEVICE)
    reference.scatter(want, strip, back)
    kernels.scatter(want.to(DEVICE), strip, there)
    assert torch.equal(there.cpu(), back)
    return pool, want, other, back


@pytest.mark.parametrize("case", [*CASES, *PUBLISHED])
def test_both_ways(case):
    strip, layers = case
    pool, flat, other, back = run(strip, layers)
    # By the contract's words, row by row.
    moved = set()
    for layer in range(layers):
        for i in range(strip.count):
            at = strip.first + i
            record = strip.base + (at % strip.ring if strip.ring else at)
            begin = layer * strip.layer_bytes + i // strip.per_block * strip.block_bytes
            place = i % strip.per_block
            data = flat[begin + strip.data_at + place * strip.data_bytes :][: strip.data_bytes]
            scale = flat[begin + strip.scale_at + place * strip.scale_bytes :][: strip.scale_bytes]
            assert torch.equal(torch.cat((data, scale)), pool[layer, record])
            assert torch.equal(back[layer, record], pool[layer, record])
            moved.add((layer, record))
    for layer in range(layers):
        for record in range(pool.shape[1]):
            if (layer, record) not in moved:
                assert torch.equal(back[layer, record], other[layer, record])


def test_places_behind_the_last_row_are_zero():
    strip, layers = block_strip(32, 4, count=7)
    _, flat, _, _ = run(strip, layers)
    second = flat[strip.block_bytes :]
    assert not second[strip.data_at + 32 : strip.data_at + 6 * 32].any()
    assert not second[strip.scale_at + 4 : strip.scale_at + 6 * 4].any()


@pytest.mark.parametrize(
    "changes",
    [{"base": 30}, {"first": -1}, {"count": 19}, {"blocks": 4}, {"data_bytes": 31}],
)
def test_what_does_not_fit_is_refused(changes):
    strip, layers = block_strip(32, 4)
    pool = torch.zeros(layers, 40, 36, dtype=torch.uint8, device=DEVICE)
    flat = torch.zeros(3 * strip.block_bytes, dtype=torch.uint8, device=DEVICE)
    kernels.gather(pool, strip, flat)
    with pytest.raises(ValueError):
        kernels.gather(pool, dataclasses.replace(strip, **changes), flat)
    with pytest.raises(ValueError):
        kernels.scatter(flat[:-13], strip, pool)
    with pytest.raises(ValueError, match="bytes"):
        kernels.gather(pool.float(), strip, flat)
