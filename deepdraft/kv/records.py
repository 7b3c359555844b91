"""Records of a pool to bytes of the layout table and back, wherever the pool lies.

Owns: the strips of a block and of a checkpoint, the copy between a device and the host.
Knows nothing of: number formats (bytes are only moved), which state may be captured.

On a GPU one kernel a plane re-orders into a buffer there, which one copy brings to the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from deepdraft.kernels.strips import Strip
from deepdraft.kv.errors import SnapshotError
from deepdraft.kv.layout import Layout, Span
from deepdraft.models.state import SequenceState
from deepdraft.ops import repack

Piece = tuple[Tensor, Strip]
"""Records uint8 [L, N, B] and where they go."""


def holds_records(state: object) -> TypeGuard[SequenceState]:
    """The sequence's pool holds packed records, not values."""
    return isinstance(state, SequenceState) and state.pool.dtype == torch.uint8


def capture_blocks(layout: Layout, state: SequenceState, first: int, out: np.ndarray) -> None:
    """Whole blocks first, first + 1, ... into `out`, contiguous host memory."""
    count = out.size // layout.block_bytes
    _capture(block_pieces(layout, state, first, count, state.num_tokens), out)


def restore_blocks(
    layout: Layout, state: SequenceState, first: int, source: np.ndarray, num_tokens: int
) -> None:
    """Whole blocks first, first + 1, ... into the pool, up to the entries of `num_tokens`."""
    count = source.size // layout.block_bytes
    _restore(block_pieces(layout, state, first, count, num_tokens), source)


def capture_checkpoint(
    layout: Layout, state: SequenceState, spans: tuple[Span, ...], pending: Span, out: np.ndarray
) -> None:
    """Window and compressor rows into `out`. Raises SnapshotError for NaN in the latter."""
    at = torch.arange(pending.first, pending.end)
    for rows in state.pool.pending.values() if len(pending) else ():
        where = state.slot * state.pool.pending_ring + at % state.pool.pending_ring
        if not torch.isfinite(rows[where.to(rows.device)]).all():
            raise SnapshotError("rows hold NaN or infinities: nothing was stored")
    _capture(checkpoint_pieces(layout, state, spans, pending), out)


def restore_checkpoint(
    layout: Layout, state: SequenceState, spans: tuple[Span, ...], pending: Span, source: np.ndarray
) -> None:
    """The inverse of `capture_checkpoint`."""
    _restore(checkpoint_pieces(layout, state, spans, pending), source)


def block_pieces(
    layout: Layout, state: SequenceState, first: int, count: int, num_tokens: int
) -> Iterator[Piece]:
    """Blocks first .. first + count of global KV, as far as `num_tokens` reach."""
    for plane, data_at, scale_at in layout.offsets():
        per_block = layout.block_tokens // plane.ratio
        there = num_tokens // plane.ratio - first * per_block
        pool = (state.pool.main if plane.kind == "main" else state.pool.index)[plane.layer]
        yield (
            pool[None],
            Strip(
                base=int(state.entry_row(plane.layer, 0)),
                first=first * per_block,
                ring=0,
                count=max(0, min(count * per_block, there)),
                blocks=count,
                per_block=per_block,
                block_bytes=layout.block_bytes,
                layer_bytes=0,
                data_at=data_at,
                scale_at=scale_at,
                data_bytes=plane.data_bytes,
                scale_bytes=plane.scale_bytes,
            ),
        )


def checkpoint_pieces(
    layout: Layout, state: SequenceState, spans: tuple[Span, ...], pending: Span
) -> Iterator[Piece]:
    """Window groups and compressor rows, in stored order."""
    pool, at = state.pool, 0

    def strip(span: Span, ring: int, layer_bytes: int, data: int, scale: int) -> Strip:
        rows = len(span)
        return Strip(
            base=state.slot * ring,
            first=span.first,
            ring=ring,
            count=rows,
            blocks=1,
            per_block=rows,
            block_bytes=0,
            layer_bytes=layer_bytes,
            data_at=at,
            scale_at=at + rows * data,
            data_bytes=data,
            scale_bytes=scale,
        )

    for group, span in zip(layout.windows, spans, strict=True):
        if not len(span) or not group.layers:
            continue
        size = len(span) * (group.data_bytes + group.scale_bytes)
        records = pool.window[group.first_layer : group.first_layer + group.layers]
        yield records, strip(span, pool.ring, size, group.data_bytes, group.scale_bytes)
        at += group.layers * size
    for plane in layout.pending if len(pending) else ():
        rows = pool.pending[plane.layer].view(torch.uint8)[None]
        yield rows, strip(pending, pool.pending_ring, 0, plane.data_bytes, 0)
        at += len(pending) * plane.data_bytes


def _capture(pieces: Iterator[Piece], out: np.ndarray) -> None:
    with torch.inference_mode():
        flat: Tensor | None = None
        target = torch.from_numpy(out.reshape(-1))
        for pool, strip in pieces:
            if flat is None:
                on_host = pool.device.type == "cpu"
                flat = target if on_host else torch.empty_like(target, device=pool.device)
            _mover(pool).gather(pool, strip, flat)
        if flat is not None and flat is not target:
            target.copy_(flat)


def _restore(pieces: Iterator[Piece], source: np.ndarray) -> None:
    with torch.inference_mode():
        flat: Tensor | None = None
        for pool, strip in pieces:
            if not strip.count:
                continue
            if flat is None:
                flat = torch.from_numpy(source.reshape(-1)).to(pool.device)
            _mover(pool).scatter(flat, strip, pool)


def _mover(pool: Tensor) -> Any:
    if pool.device.type == "cpu":
        return repack
    from deepdraft.kernels import repack as kernels  # needs triton

    return kernels
