"""Packed records between a pool and a stored snapshot: contract and reference.

A pool keeps each row as one record, its data before its scales, in rings for windows. A snapshot
keeps rows in position order, the data of all rows of a block together, then their scales. Bytes are
only moved, so both ways are exact. Kernel: `deepdraft.kernels.repack`.

Letters: L layers, N rows of a layer in the pool, B bytes of a record.
"""

import torch
from torch import Tensor

from deepdraft.kernels.strips import Strip


def gather(pool: Tensor, strip: Strip, out: Tensor) -> None:
    """Rows of pool uint8 [L, N, B] into `out` uint8 [snapshot bytes]. Other bytes stay."""
    rows = pool.new_zeros(pool.shape[0], strip.blocks * strip.per_block, pool.shape[2])
    rows[:, : strip.count] = pool[:, _records(strip)]
    blocked = rows.unflatten(1, (strip.blocks, strip.per_block))
    for place, part in zip(_places(out, strip, pool.shape[0]), _parts(blocked, strip), strict=True):
        place.copy_(part)


def scatter(source: Tensor, strip: Strip, pool: Tensor) -> None:
    """The inverse of `gather`: rows of a snapshot into the pool. Other records stay."""
    blocked = torch.cat(_places(source, strip, pool.shape[0]), dim=-1)
    pool[:, _records(strip)] = blocked.flatten(1, 2)[:, : strip.count]


def _records(strip: Strip) -> Tensor:
    at = torch.arange(strip.first, strip.first + strip.count)
    return strip.base + (at % strip.ring if strip.ring else at)


def _parts(rows: Tensor, strip: Strip) -> tuple[Tensor, ...]:
    return rows.split((strip.data_bytes, strip.scale_bytes), dim=-1)


def _places(flat: Tensor, strip: Strip, layers: int) -> list[Tensor]:
    """Data [L, blocks, per_block, *] and scales of a snapshot, not copied."""
    return [
        flat.as_strided(
            (layers, strip.blocks, strip.per_block, size),
            (strip.layer_bytes, strip.block_bytes, size, 1),
            flat.storage_offset() + at,
        )
        for at, size in (
            (strip.data_at, strip.data_bytes),
            (strip.scale_at, strip.scale_bytes),
        )
    ]
