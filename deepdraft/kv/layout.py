"""Where every byte of a stored sequence lies: one table, whatever the sizes and number formats.

Owns: the planes of a 128-token block, the planes of a checkpoint, their sizes and offsets.
Knows nothing of: tensors, pools, files, hashes.

Global KV (items A to D of architecture notes 8.1) is cut into blocks of `block_tokens` tokens, so
a prefix is one range of bytes. Inside a block come the planes of each KV source in layer order,
main KV before index keys; inside a plane all entries' data, then all entries' scales. A plane of
ratio r has block_tokens / r entries; entry e stands for tokens [r e, r e + r).

A checkpoint holds what a prefix of the blocks does not give: window rows in position order, oldest
first, of the encoder, the decoder and the drafter (E, F, G), and the last two rows of each pair
compressor (H).

Other families have the same table: their token-major kinds are planes, V4's window is the decoder's
group, and the raw values of open groups are pending planes, each with a ring of its own length.
Families whose state is token-major alone have no checkpoints: any prefix is one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from deepdraft.arch import StateKind, V41Args
from deepdraft.errors import ConfigError

RowFormat = Literal["f32", "f64", "fp8_group32", "fp4_e4m3_group16", "mxfp4_group32"]
GroupName = Literal["encoder", "decoder", "drafter"]

PENDING_ROWS = 2
"""Compressor rows of a checkpoint: the last one continues an open pair, the one before it allows
to take back one token."""

MOST_BLOCK_TOKENS = 4096
_ELEMENT = {"f32": 4, "f64": 8}


def row_bytes(row_format: RowFormat, width: int) -> tuple[int, int]:
    """Data and scale bytes of one row of `width` values."""
    if row_format in _ELEMENT:
        return width * _ELEMENT[row_format], 0
    if row_format == "fp8_group32":
        return width, width // 32
    if row_format == "fp4_e4m3_group16":
        return width // 2, width // 16
    return width // 2, width // 32


class Plane(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Main KV or index keys of one source layer inside a block; in other families rows of one
    kind (`StateKind.name`) and layer."""

    layer: int
    kind: str
    ratio: int
    width: int
    format: RowFormat
    data_bytes: int
    scale_bytes: int


class WindowGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Window rows of consecutive layers inside a checkpoint; `first_layer` counts the drafter's
    layers after the backbone's."""

    name: GroupName
    first_layer: int
    layers: int
    width: int
    format: RowFormat
    data_bytes: int
    scale_bytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one position in all layers of the group."""
        return self.layers * (self.data_bytes + self.scale_bytes)


class PendingPlane(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Value and gate rows of one compressor inside a checkpoint, never quantised."""

    layer: int
    width: int
    format: RowFormat
    data_bytes: int
    rows: int = PENDING_ROWS
    """The last so many tokens' rows."""
    kind: str = ""


class Span(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Positions [first, end)."""

    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The layout table. Equal tables mean interchangeable bytes (given equal fingerprints)."""

    block_tokens: int
    window: int
    planes: tuple[Plane, ...]
    windows: tuple[WindowGroup, ...]
    pending: tuple[PendingPlane, ...]

    @classmethod
    def of(
        cls, args: V41Args, *, packed: bool, wide: bool = False, block_tokens: int = 128
    ) -> Layout:
        """The table of a model.

        `packed`: rows lie on the published grids (numerics qsim and quant) and are stored as
        records; otherwise as float32, or float64 when `wide`.
        """
        if block_tokens < 2 or block_tokens % 2:
            raise ConfigError(
                f"a cache block must hold an even number of tokens (pair compressor), got "
                f"{block_tokens}; try {block_tokens + block_tokens % 2 or 2}"
            )
        plain: RowFormat = "f64" if wide else "f32"
        main_f: RowFormat = "fp4_e4m3_group16" if packed else plain
        index_f: RowFormat = "mxfp4_group32" if packed else plain
        window_f: RowFormat = "fp8_group32" if packed else plain
        c, ci = args.head_dim, args.index_head_dim
        roles = args.roles
        planes = []
        for source in sorted(args.kv_source_layer_ids):
            ratio = roles[source].ratio
            planes.append(Plane(source, "main", ratio, c, main_f, *row_bytes(main_f, c)))
            planes.append(Plane(source, "index", ratio, ci, index_f, *row_bytes(index_f, ci)))
        layers, start = args.num_hidden_layers, args.decoder_start
        record = (c, window_f, *row_bytes(window_f, c))
        windows = [
            WindowGroup("encoder", 0, start, *record),
            WindowGroup("decoder", start, layers - start, *record),
            WindowGroup("drafter", layers, args.num_nextn_predict_layers, *record),
        ]
        pending = [
            PendingPlane(s, 2 * c, plain, row_bytes(plain, 2 * c)[0])
            for s in sorted(args.kv_source_layer_ids)
            if roles[s].ratio == 2
        ]
        return cls(block_tokens, args.sliding_window, tuple(planes), tuple(windows), tuple(pending))

    @classmethod
    def of_kinds(
        cls, kinds: Sequence[StateKind], *, wide: bool = False, block_tokens: int = 128
    ) -> Layout:
        """The table of another family, from what its sequences keep: float32 rows, or float64 when
        `wide`. Blocks are stretched to whole groups. Raises ConfigError."""
        plain: RowFormat = "f64" if wide else "f32"
        block_tokens = math.lcm(block_tokens, *(kind.ratio for kind in kinds))
        if block_tokens > MOST_BLOCK_TOKENS:
            raise ConfigError(
                f"a cache block would take {block_tokens} tokens to hold whole groups of every "
                f"ratio; at most {MOST_BLOCK_TOKENS}"
            )
        planes, pending = [], []
        window, layers, width = 0, 0, 0
        for kind in kinds:
            data = row_bytes(plain, kind.width)[0]
            if not kind.ring:
                planes += [
                    Plane(layer, kind.name, kind.ratio, kind.width, plain, data, 0)
                    for layer in range(kind.layers)
                ]
            elif kind.name == "window":
                window, layers, width = kind.ring, kind.layers, kind.width
            else:
                pending += [
                    PendingPlane(layer, kind.width, plain, data, kind.ring, kind.name)
                    for layer in range(kind.layers)
                ]
        record = (width, plain, *row_bytes(plain, width))
        windows = (
            WindowGroup("encoder", 0, 0, *record),
            WindowGroup("decoder", 0, layers, *record),
            WindowGroup("drafter", layers, 0, *record),
        )
        return cls(block_tokens, window, tuple(planes), windows, tuple(pending))

    @property
    def rings(self) -> bool:
        """Whether sequences keep more than blocks hold, so that they start at checkpoints only."""
        return bool(self.pending) or any(group.layers for group in self.windows)

    @property
    def pending_rows(self) -> int:
        """Positions that the pending planes of a checkpoint reach back."""
        return max((p.rows for p in self.pending), default=0)

    def plane_bytes(self, plane: Plane) -> int:
        """Bytes of a plane in one block."""
        return self.block_tokens // plane.ratio * (plane.data_bytes + plane.scale_bytes)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return sum(self.plane_bytes(p) for p in self.planes)

    def offsets(self) -> list[tuple[Plane, int, int]]:
        """Each plane with the offsets of its data and of its scales inside a block."""
        out, at = [], 0
        for plane in self.planes:
            out.append((plane, at, at + self.block_tokens // plane.ratio * plane.data_bytes))
            at += self.plane_bytes(plane)
        return out

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens touch; the last one may be partly zero."""
        return -(-num_tokens // self.block_tokens)

    def checkpoint_bytes(self, spans: tuple[Span, ...], pending: Span) -> int:
        """Bytes of a checkpoint that holds these positions of each window group."""
        rows = sum(g.row_bytes * len(s) for g, s in zip(self.windows, spans, strict=True))
        return rows + sum(min(len(pending), p.rows) * p.data_bytes for p in self.pending)
