"""Tiles of stored weights as bf16 matrices, for the products of many rows.

Owns: where a row and a column of a matrix lie in both stored orders (`layout.Tiled`,
`native.fragments.Streamed`), so that prompts and decode steps read the same bytes. Values are
exact: E4M3 and E2M1 codes times a power of two are bf16 numbers.
Knows nothing of: rows of a batch, products.

Letters: N output rows, G groups of 32 columns, P groups of a step, B rows of a stored tile.
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from deepdraft.kernels.attention import spread, unpack_pairs
from deepdraft.kernels.layout import Tiled
from deepdraft.kernels.native.fragments import Streamed
from deepdraft.kernels.rounding import from_e2m1, from_e4m3, from_e8m0, to_bf16_rne
from deepdraft.kernels.runtime import INTERPRET

FP8, BF16 = tl.constexpr(0), tl.constexpr(1)


@dataclass(frozen=True, slots=True)
class Stored:
    """How a kernel finds the weights of a matrix; `tile` 0: fragment order."""

    values: Tensor
    scales: Tensor
    tile: int
    bf16: bool
    rows: int
    """Rows that are stored, padding included."""


def stored(w: Tiled | Streamed) -> Stored:
    """The pointers and the order of a matrix."""
    if isinstance(w, Streamed):
        return Stored(w.values, w.scales, 0, False, w.rows)
    scales = w.values if w.scales is None else w.scales
    rows = w.rows if w.kind != "bf16" else w.values.shape[0] * w.plan.tile
    return Stored(w.values, scales, w.plan.tile, w.kind == "bf16", rows)


@triton.jit
def fragment_values(byte):
    """Bytes [.., 16 n] in fragment order -> values of the first and of the second half of a tile's
    rows, bf16 [.., 16 n]: four of each for four bytes, columns in order; exact.

    A byte holds one code in the bits 7 3 2 1 and one in 0 6 5 4; odd bytes are of the first half.
    The magnitude's bits stand where a bf16 number has the end of its exponent and the begin of its
    mantissa: that is 2**-126 times the value, zeros and the subnormal 0.5 too.
    """
    if INTERPRET:
        shape: tl.constexpr = byte.shape
        code = tl.reshape(byte, (byte.numel // 4, 2, 2))
        one = ((code >> 4) & 0x08) | ((code >> 1) & 0x07)
        two = ((code << 3) & 0x08) | ((code >> 4) & 0x07)
        both = tl.permute(tl.join(one, two), (0, 3, 1, 2))
        second, first = tl.split(to_bf16_rne(from_e2m1(both)))
        return tl.reshape(first, shape), tl.reshape(second, shape)
    else:
        return tl.inline_asm_elementwise(
            """
            { .reg .b32 s, m, a, b, c, d, by;
              mov.b32 by, 0x7E807E80;
              shr.u32 m, $4, 3;                        and.b32 m, m, 0x01C001C0;
              lop3.b32 a, $4, 0x80008000, m, 0xEA;     mul.bf16x2 $0, a, by;
              shl.b32 s, $4, 7;  shr.u32 m, $4, 6;     and.b32 m, m, 0x01C001C0;
              lop3.b32 b, s, 0x80008000, m, 0xEA;      mul.bf16x2 $1, b, by;
              shl.b32 s, $4, 8;  shl.b32 m, $4, 5;     and.b32 m, m, 0x01C001C0;
              lop3.b32 c, s, 0x80008000, m, 0xEA;      mul.bf16x2 $2, c, by;
              shl.b32 s, $4, 15; shl.b32 m, $4, 2;     and.b32 m, m, 0x01C001C0;
              lop3.b32 d, s, 0x80008000, m, 0xEA;      mul.bf16x2 $3, d, by; }
            """,
            "=&r,=&r,=&r,=&r,r",
            [byte],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )


@triton.jit
def line_scales(word, HALF: tl.constexpr):
    """Of words [N] of four E8M0 bytes: scales of a half's two tiles for 16 values, bf16 [N, 16].
    Byte 0 counts as zero."""
    n: tl.constexpr = word.numel
    first = ((word >> (8 * HALF)) & 0xFF) << 7
    second = ((word >> (16 + 8 * HALF)) & 0xFF) << 7
    both = tl.join(first, second).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.reshape(tl.broadcast_to(both[:, :, None], (n, 2, 8)), (n, 16))


@triton.jit
def scaled_pairs(x, scale):
    """As `attention.scaled_bf16`, two neighbours by one instruction."""
    if INTERPRET:
        return to_bf16_rne(x.to(tl.float32) * scale.to(tl.float32))
    else:
        return tl.inline_asm_elementwise(
            "mul.bf16x2 $0, $1, $2;", "=r,r,r", [x, scale.to(tl.bfloat16)],
            dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def dense_tile(
    w_ptr, ws_ptr, n, n_group, first, G, N,
    KIND: tl.constexpr, TILE: tl.constexpr, BN: tl.constexpr, P: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Rows n [BN] (whole groups of 32: n_group [BN / 32]), groups first.. of a dense matrix: bf16
    [BN, 32 P]. MASKED: groups from G on are zeros. Rows from N on are zeros."""
    if TILE == 0:
        # Thread by thread as `fragments` says: [units, groups, 2 tiles, 32 threads, 16 bytes].
        line = tl.arange(0, BN * P * 2)
        unit, group = tl.min(n_group, axis=0) + line // (P * 64), first + line // 64 % P
        at = ((unit.to(tl.int64) * G + group) * 64 + line % 64)[:, None] * 16
        here = unit * 32 < N
        if MASKED:
            here = here & (group < G)
        codes = tl.load(w_ptr + at + tl.arange(0, 16)[None, :], mask=here[:, None], other=0)
        codes = tl.reshape(codes, (BN // 32, P, 2, 8, 4, 2, 8))
        codes = tl.reshape(tl.permute(codes, (0, 3, 2, 5, 1, 4, 6)), (BN, P * 32))
    else:
        k = first * 32 + tl.arange(0, P * 32)
        row_at = (n // TILE).to(tl.int64) * G * (TILE * 32) + (n % TILE) * 32
        at = row_at[:, None] + (k // 32 * (TILE * 32) + k % 32)[None, :]
        here = (n < N)[:, None]
        if MASKED:
            here = here & (k < G * 32)[None, :]
        codes = tl.load(w_ptr + at, mask=here, other=0)
    if KIND == BF16:
        return codes
    else:
        group = first + tl.arange(0, P)
        if TILE == 0:
            scale_at = n_group[:, None] * G + group[None, :]
        else:
            H: tl.constexpr = TILE // 32
            scale_at = (n_group // H * G)[:, None] * H + group[None, :] * H + n_group[:, None] % H
        known = (n_group * 32 < N)[:, None] & (group < G)[None, :]
        scale = from_e8m0(tl.load(ws_ptr + scale_at, mask=known, other=0))
        wide = tl.broadcast_to(scale[:, None, :, None], (BN // 32, 32, P, 32))
        return to_bf16_rne(from_e4m3(codes) * tl.reshape(wide, (BN, P * 32)))


@triton.jit
def pair_rows(i, HALF: tl.constexpr, TILE: tl.constexpr):
    """Row of the matrix of which a byte's row i holds part HALF (0, 1), where the two parts of a
    byte are rows of one map."""
    if TILE == 0:
        return i // 16 * 32 + (i % 16 // 2) * 4 + HALF * 2 + i % 2
    else:
        return i // TILE * (2 * TILE) + i % TILE + HALF * TILE


@triton.jit
def pair_scales(ws_ptr, base, i, first, G, HALF: tl.constexpr, TILE: tl.constexpr,
                P: tl.constexpr):  # fmt: skip
    """Scales of part HALF of byte rows i: fp32 [BN, P]; base: groups of what lies before them."""
    group = first + tl.arange(0, P)
    if TILE == 0:
        at = (base + i // 16 * G)[:, None] + group[None, :]
        at = at * 32 + (i % 16 // 2 * 4 + HALF * 2 + i % 2)[:, None]
    else:
        at = (base + i // TILE * G)[:, None] + group[None, :]
        at = (at * 2 + HALF) * TILE + (i % TILE)[:, None]
    return from_e8m0(tl.load(ws_ptr + at, mask=(group < G)[None, :], other=0))


@triton.jit
def pair_tile(
    w_ptr, ws_ptr, base, i0, first, G,
    TILE: tl.constexpr, BN: tl.constexpr, P: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Byte rows i0.. (BN of them), groups first.. of one expert's MXFP4 matrix: both parts, bf16
    [BN, 32 P]. Gate and up maps: part 0 is the gate's channel i, part 1 the up map's; else
    `pair_rows`. base: groups of the experts before, counted by stored tile, int64."""
    i = i0 + tl.arange(0, BN)
    if TILE == 0:
        # Thread by thread as `fragments` says: [units, groups, 32 threads, 16 bytes].
        line = tl.arange(0, BN // 16 * P * 32)
        unit, group, thread = line // (P * 32), line // 32 % P, line % 32
        at = ((base + (i0 // 16 + unit) * G + first + group) * 512 + thread * 16)[:, None]
        at = at + tl.arange(0, 16)[None, :]
        if MASKED:
            byte = tl.load(w_ptr + at, mask=(first + group < G)[:, None], other=0)
        else:
            byte = tl.load(w_ptr + at)
        # One word holds the scales of a line: tile 0 of both halves, then tile 1.
        word_at = ((base + (i0 // 16 + unit) * G + first + group) * 8 + thread // 4) * 4
        word_ptr = (ws_ptr + word_at).to(tl.pointer_type(tl.uint32))
        word = tl.load(word_ptr, mask=first + group < G, other=0)
        one, two = fragment_values(byte)
        first_half = scaled_pairs(one, line_scales(word, 0))
        second_half = scaled_pairs(two, line_scales(word, 1))
        both = tl.join(first_half, second_half)
        both = tl.reshape(both, (BN // 16, P, 8, 4, 2, 2, 2, 2, 2))
        # unit, group, row, thread of it, tile, step, pair, column, half
        both = tl.permute(both, (0, 2, 8, 1, 3, 5, 6, 7, 4))
        return tl.split(tl.reshape(both, (BN, P * 32, 2)))
    else:
        k = first * 32 + tl.arange(0, P * 32)
        row_at = (base + i // TILE * G) * (TILE * 32) + i % TILE * 32
        at = row_at[:, None] + (k // 32 * (TILE * 32) + k % 32)[None, :]
        if MASKED:
            byte = tl.load(w_ptr + at, mask=(k < G * 32)[None, :], other=0)
        else:
            byte = tl.load(w_ptr + at)
        low, high = unpack_pairs(byte)
        low = scaled_pairs(low, spread(pair_scales(ws_ptr, base, i, first, G, 0, TILE, P), 32))
        high = scaled_pairs(high, spread(pair_scales(ws_ptr, base, i, first, G, 1, TILE, P), 32))
        return low, high
