"""Packed records between a pool and a stored snapshot: one kernel, both ways.

Contract and reference: `deepdraft.ops.repack`. A program moves a few rows of one layer, in words of
four bytes where every size allows it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepdraft.kernels.runtime import check, launch, next_power
from deepdraft.kernels.strips import Strip

_WORDS = 1024
"""That a program moves, about."""


@triton.jit
def repack_kernel(
    pool_ptr, flat_ptr,
    BASE, FIRST, RING, COUNT, PLACES, PER_BLOCK, BLOCK, LAYER, DATA_AT, SCALE_AT, POOL_LAYER,
    DATA: tl.constexpr, SCALE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    GATHER: tl.constexpr,
):  # fmt: skip
    """Sizes and offsets in words."""
    layer = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    word = tl.arange(0, WIDTH)[None, :]
    at = FIRST + i
    if RING > 0:
        at = at % RING
    record = layer * POOL_LAYER + (BASE + at).to(tl.int64) * (DATA + SCALE)
    row = (i % PER_BLOCK).to(tl.int64)
    block = layer * LAYER + (i // PER_BLOCK).to(tl.int64) * BLOCK
    data = (block + DATA_AT + row * DATA)[:, None] + word
    scale = (block + SCALE_AT + row * SCALE - DATA)[:, None] + word
    pool = pool_ptr + record[:, None] + word
    flat = flat_ptr + tl.where(word < DATA, data, scale)
    inside = word < DATA + SCALE
    live = (i < COUNT)[:, None] & inside
    if GATHER:
        tl.store(flat, tl.load(pool, mask=live, other=0), mask=(i < PLACES)[:, None] & inside)
    else:
        tl.store(pool, tl.load(flat, mask=live, other=0), mask=live)


def gather(pool: Tensor, strip: Strip, out: Tensor) -> None:
    """See `ops.repack.gather`."""
    _move(pool, strip, out, gather=True)


def scatter(source: Tensor, strip: Strip, pool: Tensor) -> None:
    """See `ops.repack.scatter`."""
    _move(pool, strip, source, gather=False)


def _move(pool: Tensor, strip: Strip, flat: Tensor, *, gather: bool) -> None:
    if pool.dtype != torch.uint8 or flat.dtype != torch.uint8 or flat.dim() != 1:
        raise ValueError(f"records and snapshots are bytes, got {pool.dtype}, {flat.dtype}")
    layers, rows, size = pool.shape
    if size != strip.data_bytes + strip.scale_bytes:
        raise ValueError(
            f"a record of {size} bytes is not {strip.data_bytes=} {strip.scale_bytes=}"
        )
    most = strip.ring or strip.first + strip.count
    if strip.base < 0 or strip.first < 0 or strip.base + most > rows:
        raise ValueError(f"{strip} reaches beyond the {rows} records of a layer")
    ends = (
        at + (layers - 1) * strip.layer_bytes + (strip.blocks - 1) * strip.block_bytes + part
        for at, part in (
            (strip.data_at, strip.per_block * strip.data_bytes),
            (strip.scale_at, strip.per_block * strip.scale_bytes),
        )
    )
    if max(ends) > flat.numel() or strip.count > strip.blocks * strip.per_block:
        raise ValueError(f"{strip} reaches beyond {flat.numel()} bytes of a snapshot")
    check(pool, flat)
    strides = (strip.block_bytes, strip.layer_bytes, strip.data_at, strip.scale_at, rows * size)
    sizes = (*strides, strip.data_bytes, strip.scale_bytes, pool.data_ptr(), flat.data_ptr())
    unit = 4 if all(n % 4 == 0 for n in sizes) else 1
    if unit == 4:
        pool, flat = pool.view(torch.int32), flat[: flat.numel() // 4 * 4].view(torch.int32)
    places = strip.blocks * strip.per_block if gather else strip.count
    width = next_power(size // unit)
    tile = max(1, _WORDS // width)
    block, layer, data_at, scale_at, pool_layer = (n // unit for n in strides)
    launch(
        repack_kernel, (triton.cdiv(places, tile), layers),
        pool, flat,
        strip.base, strip.first, strip.ring, strip.count, places, strip.per_block,
        block, layer, data_at, scale_at, pool_layer,
        DATA=strip.data_bytes // unit, SCALE=strip.scale_bytes // unit, WIDTH=width, ROWS=tile,
        GATHER=gather,
    )  # fmt: skip
