"""Rows of a state pool to bytes of the layout table and back, bit for bit.

Owns: the gather and scatter between `SequenceState` and blocks or checkpoints, the row formats,
and the rules for when a state may be captured.
Knows nothing of: slabs, files, hashes, which prefix to reuse.

States are V4.1's (`SequenceState`) or other families' (`models.sequence`): the accessors below know
both, everything else works on planes and positions.

Pools of floating dtype hold dequantised rows. On the published grids (numerics qsim, quant) a row
packs into its record without loss; every packed row is unpacked again and compared, so a row off
the grid is refused instead of rounded. Pools of uint8 hold records and are only re-ordered, on
the device where they lie (`records`).
"""

from __future__ import annotations

from typing import cast

import msgspec
import numpy as np
import torch
from torch import Tensor

from deepdraft.errors import StateError
from deepdraft.kv import records as pools
from deepdraft.kv.errors import SnapshotError
from deepdraft.kv.layout import (
    Layout,
    PendingPlane,
    Plane,
    RowFormat,
    Span,
    WindowGroup,
)
from deepdraft.kv.plan import Geometry
from deepdraft.models.sequence import Sequence, SequencePool
from deepdraft.models.state import SequenceState, StatePool
from deepdraft.quant import formats, records

Bytes = np.ndarray
State = SequenceState | Sequence
Pool = StatePool | SequencePool
_PACK = {
    "fp8_group32": (records.pack_fp8_group32, records.unpack_fp8_group32),
    "fp4_e4m3_group16": (records.pack_fp4_e4m3_group16, records.unpack_fp4_e4m3_group16),
    "mxfp4_group32": (records.pack_mxfp4_group32, records.unpack_mxfp4_group32),
}
_FLOAT = {torch.float32: "f32", torch.float64: "f64"}
_INTEGER = {torch.float32: torch.int32, torch.float64: torch.int64}


class Checkpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a checkpoint's bytes hold: positions of each window group, and how they were made."""

    position: int
    """Tokens whose forward pass was complete."""
    spans: tuple[Span, Span, Span]
    """Encoder, decoder, drafter. An absent group is empty."""
    floors: tuple[int, int, int]
    """Window rows below these positions do not exist in this sequence."""
    pending: Span
    decoder_replayed: bool
    """The decoder's and drafter's rows come from a bounded replay, not from whole windows."""

    @property
    def has_decoder(self) -> bool:
        """The decoder can continue from here."""
        return self.spans[1].end == self.position

    @property
    def has_drafter(self) -> bool:
        """The drafter can continue from here."""
        return self.spans[2].end == self.position


# ---- rows ----------------------------------------------------------------------------------


def _bits(x: Tensor) -> Tensor:
    return x.view(_INTEGER[x.dtype])


def _small_scale_records(x: Tensor, record: Tensor) -> Tensor:
    """Groups of 16 whose E4M3 scale is subnormal: packing may choose another scale than the one
    the values were rounded with. The true one is among the nine smallest codes: try them."""
    width = x.shape[-1]
    groups = x.unflatten(-1, (-1, 16))
    bad = (records.unpack_fp4_e4m3_group16(record, x.dtype) != x).unflatten(-1, (-1, 16)).any(-1)
    data, scales = record.split((width // 2, width // 16), dim=-1)
    data, scales = data.clone().unflatten(-1, (-1, 8)), scales.clone()
    lost = groups[bad]
    for code in range(1, 10):
        codes = torch.full((lost.shape[0],), code, dtype=torch.uint8, device=x.device)
        scale = formats.decode_e4m3(codes, x.dtype)[:, None]
        packed = formats.pack_nibbles(formats.encode_e2m1(lost / scale))
        fits = (formats.decode_e2m1_pairs(packed, x.dtype) * scale == lost).all(-1)
        where = bad.nonzero()[fits]
        data[tuple(where.T)] = packed[fits]
        scales[tuple(where.T)] = codes[fits]
    return torch.cat((data.flatten(-2), scales), dim=-1)


def encode_rows(rows: Tensor, row_format: RowFormat) -> tuple[Bytes, Bytes]:
    """Rows [n, width] -> data [n, d] and scales [n, s] bytes.

    Raises SnapshotError when the format cannot hold the rows exactly.
    """
    if row_format in ("f32", "f64"):
        if _FLOAT.get(rows.dtype) != row_format:
            raise SnapshotError(f"the layout stores {row_format}, the pool holds {rows.dtype}")
        if not torch.isfinite(rows).all():
            raise SnapshotError("rows hold NaN or infinities: nothing was stored")
        raw = rows.contiguous().cpu().view(torch.uint8).numpy()
        return raw, raw[:, :0]
    pack, unpack = _PACK[row_format]
    record = pack(rows)
    back = unpack(record, rows.dtype)
    if row_format == "fp4_e4m3_group16" and not torch.equal(back, rows):
        record = _small_scale_records(rows, record)
        back = unpack(record, rows.dtype)
    if not torch.equal(_bits(back), _bits(rows)):
        raise SnapshotError(f"rows do not lie on the grid of {row_format}: nothing was stored")
    raw = record.contiguous().cpu().numpy()
    groups = 16 if row_format == "fp4_e4m3_group16" else 32
    per_group = 32 if row_format == "fp8_group32" else groups // 2
    data = raw.shape[1] * per_group // (per_group + 1)
    return raw[:, :data], raw[:, data:]


def decode_rows(data: Bytes, scales: Bytes, row_format: RowFormat, dtype: torch.dtype) -> Tensor:
    """Inverse of `encode_rows`, for a pool of `dtype`."""
    if row_format in ("f32", "f64"):
        if _FLOAT.get(dtype) != row_format:
            raise SnapshotError(f"the layout stores {row_format}, the pool holds {dtype}")
        return torch.from_numpy(np.array(data, copy=True)).view(dtype)
    record = torch.from_numpy(np.concatenate((data, scales), axis=1))
    return _PACK[row_format][1](record, dtype)


# ---- where rows lie ------------------------------------------------------------------------


def layout_of(pool: Pool, *, packed: bool = False, block_tokens: int = 128) -> Layout:
    """The table of a pool. `packed`: V4.1's rows lie on the published grids. Raises ConfigError."""
    wide = pool.dtype == torch.float64
    if isinstance(pool, SequencePool):
        return Layout.of_kinds(list(pool.kinds.values()), wide=wide, block_tokens=block_tokens)
    return Layout.of(pool.args, packed=packed, wide=wide, block_tokens=block_tokens)


def geometry_of(pool: Pool) -> Geometry:
    """How far back the windows of a pool's sequences reach."""
    if isinstance(pool, SequencePool):
        window = max((kind.ring for kind in pool.kinds.values()), default=0)
        return Geometry(window, 0, 0, pool.slack)
    args = pool.args
    return Geometry(args.sliding_window, args.decoder_start, args.num_hidden_layers, pool.slack)


def device_of(pool: Pool) -> torch.device:
    """Where a pool's rows lie."""
    return pool.device if isinstance(pool, SequencePool) else pool.window.device


def _plane_rows(pool: Pool, plane: Plane | WindowGroup | PendingPlane, layer: int) -> Tensor:
    """All rows of a layer, of every sequence: [rows, width]."""
    if isinstance(pool, SequencePool):
        return pool.rows["window" if isinstance(plane, WindowGroup) else plane.kind][layer]
    if isinstance(plane, WindowGroup):
        return pool.window[layer]
    if isinstance(plane, PendingPlane):
        return pool.pending[layer]
    return (pool.main if plane.kind == "main" else pool.index)[layer]


def _first_row(state: State, plane: Plane, entry: int) -> int:
    """Where an entry of a plane lies; later ones follow it."""
    if isinstance(state, Sequence):
        return state.slot * state.pool.entries[plane.kind] + entry
    return int(state.entry_row(plane.layer, entry))


def _ring_rows(state: State, plane: WindowGroup | PendingPlane, span: Span) -> Tensor:
    """Where positions of a ring lie."""
    positions = np.arange(span.first, span.end)
    if isinstance(state, Sequence):
        name = "window" if isinstance(plane, WindowGroup) else plane.kind
        return state.address(state.pool.kinds[name], positions)
    if isinstance(plane, WindowGroup):
        rows = state.ring_row(positions)
    else:
        ring = state.pool.pending_ring
        rows = state.slot * ring + positions % ring
    return torch.from_numpy(rows).to(state.pool.window.device)


# ---- blocks --------------------------------------------------------------------------------


def capture_blocks(layout: Layout, state: State, first: int, out: Bytes) -> None:
    """Blocks first, first + 1, ... of a sequence's global KV into `out` (whole blocks, uint8).

    Places beyond the sequence's entries become zero.
    """
    if pools.holds_records(state):
        pools.capture_blocks(layout, state, first, out)
        return
    blocks = out.reshape(-1, layout.block_bytes)
    count = blocks.shape[0]
    for plane, data_at, scale_at in layout.offsets():
        per_block = layout.block_tokens // plane.ratio
        have = min(count * per_block, state.num_tokens // plane.ratio - first * per_block)
        start = _first_row(state, plane, first * per_block)
        rows = _plane_rows(state.pool, plane, plane.layer)[start : start + have]
        for piece, at, size in zip(
            encode_rows(rows, plane.format),
            (data_at, scale_at),
            (plane.data_bytes, plane.scale_bytes),
            strict=True,
        ):
            full = np.zeros((count * per_block, size), dtype=np.uint8)
            full[:have] = piece
            blocks[:, at : at + per_block * size] = full.reshape(count, per_block * size)


def restore_blocks(
    layout: Layout, state: State, first: int, source: Bytes, num_tokens: int
) -> None:
    """Whole blocks first, first + 1, ... into the pool, up to the entries of `num_tokens`."""
    if pools.holds_records(state):
        pools.restore_blocks(layout, state, first, source, num_tokens)
        return
    blocks = source.reshape(-1, layout.block_bytes)
    count = blocks.shape[0]
    for plane, data_at, scale_at in layout.offsets():
        per_block = layout.block_tokens // plane.ratio
        have = min(count * per_block, num_tokens // plane.ratio - first * per_block)
        if have <= 0:
            continue
        data, scales = (
            blocks[:, at : at + per_block * size].reshape(count * per_block, size)[:have]
            for at, size in ((data_at, plane.data_bytes), (scale_at, plane.scale_bytes))
        )
        rows = _plane_rows(state.pool, plane, plane.layer)
        start = _first_row(state, plane, first * per_block)
        rows[start : start + have] = decode_rows(data, scales, plane.format, rows.dtype)


# ---- checkpoints ---------------------------------------------------------------------------


def checkpoint_of(layout: Layout, state: State, at: int | None = None) -> Checkpoint:
    """What a checkpoint of the first `at` tokens (None: all) taken now would hold.

    A few tokens back, as far as spare rows reach, everything is still there. Raises StateError
    when none can be taken.
    """
    have, pool = state.num_tokens, state.pool
    n = have if at is None else at
    if not 0 < n <= have:
        raise StateError(f"no checkpoint at {n} of {have} tokens; an empty sequence has none")
    if state.replay_from is not None:
        raise StateError("the windows of this sequence are not there yet: prefill first")
    if state.written - n > pool.slack:
        raise StateError(
            f"a checkpoint at {n} was asked for after {state.written} tokens, more than the "
            f"{pool.slack} spare rows: run on before storing"
        )
    first_pending = max(0, n - layout.pending_rows)
    pending = Span(first_pending, n) if layout.pending else Span(0, 0)
    none = Span(0, 0)
    if isinstance(state, Sequence):
        if n < state.resumed:
            raise StateError(f"the windows of this sequence begin at {state.resumed}, not at {n}")
        window = Span(max(0, n - layout.window), n) if layout.windows[1].layers else none
        return Checkpoint(n, (none, window, none), (0, 0, 0), pending, False)
    if state.encoder_floor > n:
        raise StateError(f"the windows of this sequence begin at {state.encoder_floor}, not at {n}")
    oldest = max(0, n - layout.window)

    def span(floor: int, tokens: int, layers: int) -> Span:
        there = tokens >= n and floor <= n and layers > 0
        return Span(max(oldest, floor), n) if there else none

    floors = (state.encoder_floor, min(state.decoder_floor, n), min(state.drafter_floor, n))
    groups = layout.windows
    spans = (
        span(state.encoder_floor, have, groups[0].layers),
        span(state.decoder_floor, state.decoder_tokens, groups[1].layers),
        span(state.drafter_floor, state.drafter_tokens, groups[2].layers),
    )
    return Checkpoint(n, spans, floors, pending, state.origin != "exact")


def _pieces(
    layout: Layout, info: Checkpoint
) -> list[tuple[WindowGroup | PendingPlane, int, Span, int, int, int]]:
    """(plane, layer, positions, offset of data, offset of scales, end) in stored order."""
    out: list[tuple[WindowGroup | PendingPlane, int, Span, int, int, int]] = []
    at = 0
    for group, span in zip(layout.windows, info.spans, strict=True):
        for layer in range(group.first_layer, group.first_layer + group.layers):
            scales = at + len(span) * group.data_bytes
            end = scales + len(span) * group.scale_bytes
            if len(span):
                out.append((group, layer, span, at, scales, end))
            at = end
    for plane in layout.pending:
        last = info.pending.end
        span = Span(max(info.pending.first, last - plane.rows), last)
        end = at + len(span) * plane.data_bytes
        out.append((plane, plane.layer, span, at, end, end))
        at = end
    return out


def capture_checkpoint(layout: Layout, state: State, info: Checkpoint, out: Bytes) -> None:
    """The bytes of a checkpoint into `out` (`layout.checkpoint_bytes` of them)."""
    pool = state.pool
    if pools.holds_records(state):
        pools.capture_checkpoint(layout, state, info.spans, info.pending, out)
        return
    for plane, layer, span, at, scale_at, end in _pieces(layout, info):
        rows = _plane_rows(pool, plane, layer).index_select(0, _ring_rows(state, plane, span))
        data, scales = encode_rows(rows, plane.format)
        out[at:scale_at] = data.reshape(-1)
        out[scale_at:end] = scales.reshape(-1)


def restore_checkpoint(layout: Layout, state: State, info: Checkpoint, source: Bytes) -> None:
    """Window and compressor rows of a checkpoint into the pool; counters are not touched."""
    pool = state.pool
    if pools.holds_records(state):
        pools.restore_checkpoint(layout, state, info.spans, info.pending, source)
        return
    for plane, layer, span, at, scale_at, end in _pieces(layout, info):
        n = len(span)
        data = source[at:scale_at].reshape(n, -1)
        scales = source[scale_at:end].reshape(n, -1)
        rows = _plane_rows(pool, plane, layer)
        rows[_ring_rows(state, plane, span)] = decode_rows(data, scales, plane.format, rows.dtype)


def adopt_prefix(state: Sequence, token_ids: list[int]) -> None:
    """Set the counters of another family's sequence to: these tokens' rows are all there."""
    state.token_ids[:] = token_ids
    state.written = state.resumed = len(token_ids)
    # An engine tells the drafter before it stores; rows that it was not told of are zero.
    state.fed, state.tail = (0, len(token_ids)), None


def adopt_checkpoint(
    state: State, info: Checkpoint, token_ids: list[int], *, decoder: bool, exact: bool
) -> None:
    """Set a sequence's counters as they were when the checkpoint was taken.

    `decoder` False leaves the decoder (and drafter) at zero, so that the next prefill in mode
    `encoder` replays the decoder as a cold run does.
    """
    n, pool = info.position, state.pool
    if isinstance(state, Sequence):
        adopt_prefix(state, token_ids[:n])
        return
    state.token_ids[:] = token_ids[:n]
    state.encoder_floor = info.floors[0]
    if decoder:
        state.decoder_tokens, state.decoder_floor = n, info.floors[1]
        # A drafter that had fallen behind has lost its rings: an unfed one behaves the same.
        state.drafter_tokens = n if info.has_drafter else 0
        state.drafter_floor = info.floors[2] if info.has_drafter else 0
    else:
        state.decoder_tokens = state.decoder_floor = 0
        state.drafter_tokens = state.drafter_floor = 0
    # Rings hold exactly the last window: claim that more was overwritten, so that taking back
    # tokens stops where the rows do.
    state.written = n + pool.slack
    state.replay_from, state.tail = None, None
    if not exact:
        state.origin = "encoder-replayed"
    else:
        state.origin = "decoder-replayed" if decoder and info.decoder_replayed else "exact"


def adopt_global(
    state: SequenceState, token_ids: list[int], *, replay_from: int, exact: bool
) -> None:
    """Set a sequence's counters to: global KV is there, windows start at `replay_from`."""
    state.token_ids[:] = token_ids
    state.replay_from = replay_from
    state.encoder_floor = replay_from
    state.decoder_tokens = state.decoder_floor = 0
    state.drafter_tokens = state.drafter_floor = 0
    state.written = len(token_ids)
    state.tail = None
    state.origin = "exact" if exact else "encoder-replayed"


def pool_matches(layout: Layout, pool: Pool) -> bool:
    """The pool's rows have the layout's shapes."""
    packed = layout.planes[0].format not in ("f32", "f64")
    return layout == layout_of(pool, packed=packed, block_tokens=layout.block_tokens) and (
        packed or _FLOAT.get(pool.dtype) == cast(str, layout.planes[0].format)
    )
