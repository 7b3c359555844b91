"""Where rows lie in a pool of records and in a stored snapshot. Plain numbers, no triton."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """Where `count` rows of each layer lie on both sides; all sizes in bytes.

    In the pool, row i is record base + (first + i) % ring of its layer; ring 0: base + first + i.
    In the snapshot it is row i % per_block of block i // per_block. Blocks begin `block_bytes`
    apart, layers `layer_bytes`; a block's data begin at `data_at`, its scales at `scale_at`.
    """

    base: int
    first: int
    ring: int
    count: int
    blocks: int
    """Of the snapshot; places behind the last row are zero there."""
    per_block: int
    block_bytes: int
    layer_bytes: int
    data_at: int
    scale_at: int
    data_bytes: int
    scale_bytes: int
