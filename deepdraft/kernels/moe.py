"""Routed MXFP4 experts: the list of distinct experts, the up and the down products.

Contracts and references: `deepdraft.ops.moe` (routed_up, routed_down). A program streams one tile
of one expert past 8 batch rows and keeps the products of those rows that picked it; which experts
run, and in which order, changes no row's bits.

Letters: R batch rows, K picks of a row, E experts, D hidden, F expert width, L = 8 K places of a
row tile's list.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepdraft.kernels.gemv import QuantRows, dot_fp8, quantize_groups
from deepdraft.kernels.layout import GROUP, Tiled
from deepdraft.kernels.native import stream
from deepdraft.kernels.native.fragments import Streamed
from deepdraft.kernels.rounding import from_e8m0, round_bf16, to_bf16_rne
from deepdraft.kernels.runtime import (
    INTERPRET,
    ROW_TILE,
    check,
    launch,
    next_power,
    prefetch_l2,
    wait_for_inputs,
)


@dataclass(frozen=True, slots=True)
class ExpertList:
    """The distinct experts of each row tile. `experts` int32 [R/8, L]: numbers, -1 beyond the
    last; `slots` int32 [R/8, L, 8]: which pick of each row it is, -1 where it is none."""

    experts: Tensor
    slots: Tensor


# ---- device helpers ------------------------------------------------------------------------


@triton.jit
def unpack_e2m1(w):
    """Bytes of two E2M1 codes -> E4M3 codes (uint8) of 2**-6 times the low and the high one."""
    if INTERPRET:
        low = ((w << 4) & 0x80) | ((w << 2) & 0x1C)
        high = (w & 0x80) | ((w >> 2) & 0x1C)
    else:
        low, high = tl.inline_asm_elementwise(
            """
            { .reg .b32 t, u;
              shl.b32 t, $2, 4;
              shr.u32 u, t, 2;  and.b32 u, u, 0x1C1C1C1C;  lop3.b32 $0, t, 0x80808080, u, 0xEA;
              shr.u32 u, $2, 2; and.b32 u, u, 0x1C1C1C1C;  lop3.b32 $1, $2, 0x80808080, u, 0xEA; }
            """,
            "=r,=r,r",
            [w],
            dtype=(tl.uint8, tl.uint8),
            is_pure=True,
            pack=4,
        )
    return low, high


@triton.jit
def swiglu(gate, up, LIMIT):
    """silu(min(gate, limit)) * clip(up, +-limit), fp32."""
    gate = tl.minimum(gate, LIMIT)
    return gate / (1.0 + tl.exp(-gate)) * tl.minimum(tl.maximum(up, -LIMIT), LIMIT)


@triton.jit
def expert_sums(
    w_ptr, ws_ptr, x_ptr, xs_ptr, x_at, xs_at, XS_STRIDE, mine, G,
    TILE: tl.constexpr, P: tl.constexpr, T: tl.constexpr, GATHERED: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Products of one tile (both nibbles) with 8 rows: two fp32 [TILE, T].

    w_ptr and ws_ptr: the tile's codes and scales; x_at, xs_at [T]: where each row's codes and
    scales start. GATHERED: rows outside `mine` are not read and count as zeros.
    """
    p, n, j = tl.arange(0, P), tl.arange(0, TILE), tl.arange(0, 32)
    w_at = p[:, None, None] * TILE * 32 + n[None, :, None] * 32 + j[None, None, :]
    x_at = x_at[None, None, :] + p[:, None, None] * 32 + j[None, :, None]
    xs_at = xs_at[None, :] + p[:, None] * XS_STRIDE
    ws_at = p[:, None] * 2 * TILE + n[None, :]
    low_sum = tl.zeros((P, TILE, T), tl.float32)
    high_sum = tl.zeros((P, TILE, T), tl.float32)
    zero = tl.zeros((P, TILE, T), tl.float32)
    inside = (p < G)[:, None]
    low_code = tl.load(ws_ptr + ws_at, mask=inside, other=0)
    high_code = tl.load(ws_ptr + ws_at + TILE, mask=inside, other=0)
    scale = tl.load(xs_ptr + xs_at, mask=inside & mine[None, :], other=0.0)
    for step in range((G + P - 1) // P):
        done = step * P
        here = (p < G - done)[:, None, None]
        if MASKED:
            w = tl.load(w_ptr + w_at + done * TILE * 32, mask=here, other=0)
        else:
            w = tl.load(w_ptr + w_at + done * TILE * 32)
        if GATHERED:
            x = tl.load(x_ptr + x_at + done * 32, mask=here & mine[None, None, :], other=0)
        elif MASKED:
            x = tl.load(x_ptr + x_at + done * 32, mask=here, other=0)
        else:
            x = tl.load(x_ptr + x_at + done * 32)
        low_factor = from_e8m0(low_code)[:, :, None] * scale[:, None, :]
        high_factor = from_e8m0(high_code)[:, :, None] * scale[:, None, :]
        # Scales are read one step ahead.
        later = (p < G - done - P)[:, None]
        ws_next = ws_ptr + ws_at + (done + P) * 2 * TILE
        low_code = tl.load(ws_next, mask=later, other=0)
        high_code = tl.load(ws_next + TILE, mask=later, other=0)
        at = xs_ptr + xs_at + (done + P) * XS_STRIDE
        scale = tl.load(at, mask=later & mine[None, :], other=0.0)
        low, high = unpack_e2m1(w)
        low_sum += dot_fp8(low, x, zero) * low_factor
        high_sum += dot_fp8(high, x, zero) * high_factor
    # unpack_e2m1 gives 2**-6 of a code
    return tl.sum(low_sum, axis=0) * 64.0, tl.sum(high_sum, axis=0) * 64.0


# ---- kernels -------------------------------------------------------------------------------


@triton.jit
def expert_list_kernel(
    picks_ptr, experts_ptr, slots_ptr, K, L, T: tl.constexpr, LP: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    wait_for_inputs(PDL)
    row_tile = tl.program_id(0)
    i = tl.arange(0, LP)
    pick = tl.load(picks_ptr + row_tile * L + i, mask=i < L, other=-1)
    same = (pick[:, None] == pick[None, :]) & (pick >= 0)[None, :]
    # The first place at which each pick's expert stands; picks of -1 have none.
    first_place = tl.min(tl.where(same, i[None, :], LP), axis=1)
    is_first = first_place == i
    earlier = tl.sum((is_first[None, :] & (i[None, :] < first_place[:, None])).to(tl.int32), axis=1)
    count = tl.sum(is_first.to(tl.int32), axis=0)
    experts_ptr += row_tile * L
    slots_ptr += row_tile * L * T
    tl.store(experts_ptr + i, tl.full((LP,), -1, tl.int32), mask=(i < L) & (i >= count))
    tl.store(experts_ptr + earlier, pick, mask=is_first)
    t = tl.arange(0, T)
    empty = tl.full((LP, T), -1, tl.int32)
    tl.store(slots_ptr + i[:, None] * T + t[None, :], empty, mask=(i < L)[:, None])
    tl.debug_barrier()
    tl.store(slots_ptr + earlier * T + i // K, i % K, mask=pick >= 0)


@triton.jit
def combine_pairs(
    part_ptr, arrive_ptr, part, low, high, SPLIT: tl.constexpr, TILE: tl.constexpr, T: tl.constexpr
):  # fmt: skip
    """As gemv.combine_parts, for two sums. part_ptr: SPLIT times 2 * TILE * T places."""
    at = tl.arange(0, TILE)[:, None] * T + tl.arange(0, T)[None, :]
    own = part_ptr + part * (2 * TILE * T) + at
    tl.store(own, low)
    tl.store(own + TILE * T, high)
    tl.debug_barrier()
    last = tl.atomic_add(arrive_ptr, 1, sem="acq_rel") == SPLIT - 1
    if last:
        low = tl.load(part_ptr + at, cache_modifier=".cg")
        high = tl.load(part_ptr + at + TILE * T, cache_modifier=".cg")
        for s in range(1, SPLIT):
            other = part_ptr + s * (2 * TILE * T) + at
            low += tl.load(other, cache_modifier=".cg")
            high += tl.load(other + TILE * T, cache_modifier=".cg")
        tl.store(arrive_ptr, 0)
    return last, low, high


@triton.jit
def tile_sums(
    w_ptr, ws_ptr, x_ptr, xs_ptr, part_ptr, arrive_ptr, x_at, xs_at, XS_STRIDE, mine, G, tile,
    number, part, TILE: tl.constexpr, P: tl.constexpr, SPLIT: tl.constexpr, T: tl.constexpr,
    GATHERED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Products of a tile: whether this program has them, and two fp32 [TILE, T]. tile: of all the
    experts' tiles; number: of this launch's."""
    steps = (G + P - 1) // P
    per_part = (steps + SPLIT - 1) // SPLIT
    first = part * per_part * P
    groups = min(G, first + per_part * P) - first
    start = tile.to(tl.int64) * G + first
    low, high = expert_sums(
        w_ptr + start * TILE * 32, ws_ptr + start * 2 * TILE, x_ptr + first * 32,
        xs_ptr + first * XS_STRIDE, x_at, xs_at, XS_STRIDE, mine, groups,
        TILE, P, T, GATHERED, MASKED,
    )  # fmt: skip
    if SPLIT == 1:
        return True, low, high
    else:
        return combine_pairs(
            part_ptr + number.to(tl.int64) * SPLIT * 2 * TILE * T, arrive_ptr + number, part,
            low, high, SPLIT, TILE, T,
        )  # fmt: skip


@triton.jit
def expert_up_kernel(
    w_ptr, ws_ptr, x_ptr, xs_ptr, part_ptr, arrive_ptr, experts_ptr, slots_ptr, weights_ptr,
    codes_ptr, scales_ptr, D, F, R, K, L, LIMIT,
    TILE: tl.constexpr, P: tl.constexpr, SPLIT: tl.constexpr, T: tl.constexpr,
    MASKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    place, row_tile = tl.program_id(1), tl.program_id(2)
    tile, part = tl.program_id(0) // SPLIT, tl.program_id(0) % SPLIT
    tiles = tl.num_programs(0) // SPLIT
    expert = tl.load(experts_ptr + row_tile * L + place)
    if expert < 0:
        return
    t = tl.arange(0, T)
    rows = row_tile * T + t
    slot = tl.load(slots_ptr + (row_tile * L + place) * T + t)
    have, gate, up = tile_sums(
        w_ptr, ws_ptr, x_ptr, xs_ptr, part_ptr, arrive_ptr, rows * D, rows, R, slot >= -1, D // 32,
        expert * tiles + tile, (row_tile * L + place) * tiles + tile, part,
        TILE, P, SPLIT, T, False, MASKED,
    )  # fmt: skip
    if not have:
        return
    mine = slot >= 0
    pick = rows * K + slot
    weight = tl.load(weights_ptr + pick, mask=mine, other=0.0)
    f = swiglu(round_bf16(gate), round_bf16(up), LIMIT) * weight[None, :]
    # Groups of 32 channels; a tile holds whole groups.
    f = tl.reshape(tl.trans(round_bf16(f)), (T * (TILE // 32), 32))
    codes, scales = quantize_groups(f)
    group = tl.arange(0, T * (TILE // 32))
    row = group // (TILE // 32)
    group_slot = tl.load(slots_ptr + (row_tile * L + place) * T + row)
    group_pick = (row_tile * T + row) * K + group_slot
    channel = tile * TILE + (group % (TILE // 32)) * 32
    at = group_pick.to(tl.int64) * F + channel
    kept = group_slot >= 0
    j = tl.arange(0, 32)
    tl.store(codes_ptr + at[:, None] + j[None, :], codes, mask=kept[:, None])
    tl.store(scales_ptr + (channel // 32) * (R * K) + group_pick, scales, mask=kept)


@triton.jit
def expert_down_kernel(
    w_ptr, ws_ptr, x_ptr, xs_ptr, part_ptr, arrive_ptr, experts_ptr, slots_ptr, y_ptr,
    D, F, R, K, L, AHEAD,
    TILE: tl.constexpr, P: tl.constexpr, SPLIT: tl.constexpr, T: tl.constexpr,
    MASKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    place, row_tile = tl.program_id(1), tl.program_id(2)
    tile, part = tl.program_id(0) // SPLIT, tl.program_id(0) % SPLIT
    tiles = tl.num_programs(0) // SPLIT
    if PDL:
        # The list is older than the kernel before this one; what is read here moves bytes only.
        early = tl.load(experts_ptr + row_tile * L + place, cache_modifier=".cg")
        if early >= 0:
            first = (F // 32 * part // SPLIT) * TILE * 32
            start = (early * tiles + tile).to(tl.int64) * F * TILE + first
            prefetch_l2(w_ptr + start, min(F * TILE // SPLIT // 16 * 16, AHEAD))
    wait_for_inputs(PDL)
    expert = tl.load(experts_ptr + row_tile * L + place)
    if expert < 0:
        return
    t = tl.arange(0, T)
    slot = tl.load(slots_ptr + (row_tile * L + place) * T + t)
    mine = slot >= 0
    pick = (row_tile * T + t) * K + slot
    have, low, high = tile_sums(
        w_ptr, ws_ptr, x_ptr, xs_ptr, part_ptr, arrive_ptr, pick * F, pick, R * K, mine, F // 32,
        expert * tiles + tile, (row_tile * L + place) * tiles + tile, part,
        TILE, P, SPLIT, T, True, MASKED,
    )  # fmt: skip
    if not have:
        return
    n = tile * 2 * TILE + tl.arange(0, TILE)
    at = pick[None, :] * D + n[:, None]
    tl.store(y_ptr + at, to_bf16_rne(low), mask=mine[None, :])
    tl.store(y_ptr + at + TILE, to_bf16_rne(high), mask=mine[None, :])


@triton.jit
def swiglu_kernel(h_ptr, codes_ptr, scales_ptr, F, R, LIMIT, GB: tl.constexpr, PDL: tl.constexpr):
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    g = tl.program_id(1) * GB + tl.arange(0, GB)
    at = g[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = g < F // 32
    h_ptr += row.to(tl.int64) * 2 * F
    gate = tl.load(h_ptr + at, mask=inside[:, None], other=0.0).to(tl.float32)
    up = tl.load(h_ptr + F + at, mask=inside[:, None], other=0.0).to(tl.float32)
    codes, scales = quantize_groups(round_bf16(swiglu(gate, up, LIMIT)))
    tl.store(codes_ptr + row.to(tl.int64) * F + at, codes, mask=inside[:, None])
    tl.store(scales_ptr + g * R + row, scales, mask=inside)


# ---- launches ------------------------------------------------------------------------------


def expert_list(picks: Tensor) -> ExpertList:
    """picks int32 [R, K] (8 divides R; -1 where a row must not count) -> the distinct experts."""
    device = check(picks)
    rows, k = picks.shape
    if rows % ROW_TILE or picks.dtype != torch.int32:
        raise ValueError(f"picks must be int32 with a multiple of {ROW_TILE} rows: {picks.shape}")
    places = ROW_TILE * k
    experts = torch.empty(rows // ROW_TILE, places, dtype=torch.int32, device=device)
    slots = torch.empty(*experts.shape, ROW_TILE, dtype=torch.int32, device=device)
    padded = next_power(places)
    launch(
        expert_list_kernel, (rows // ROW_TILE,), picks, experts, slots, k, places,
        T=ROW_TILE, LP=padded,
    )  # fmt: skip
    return ExpertList(experts, slots)


def _grid(w: Tiled, listed: ExpertList, device: torch.device) -> tuple[tuple[int, ...], Tensor]:
    """Programs of a launch, and room for the parts of their sums."""
    plan, (row_tiles, places) = w.plan, listed.experts.shape
    tiles = w.rows // (2 * plan.tile)
    grid = tiles * plan.split, places, row_tiles
    if plan.split == 1:
        return grid, w.arrivals
    if w.arrivals.numel() < tiles * places * row_tiles:
        raise ValueError(f"{row_tiles * ROW_TILE} rows are more than there are counters for")
    size = tiles * places * row_tiles * plan.split * 2 * plan.tile * ROW_TILE
    return grid, torch.empty(size, dtype=torch.float32, device=device)


def _options(w: Tiled) -> dict[str, int]:
    plan = w.plan
    limit = {"maxnreg": plan.registers} if plan.registers else {}
    return {
        **limit,
        "TILE": plan.tile, "P": plan.step, "SPLIT": plan.split, "T": ROW_TILE,
        "MASKED": w.cols // GROUP % plan.step != 0,
        "num_warps": plan.warps, "num_stages": plan.stages,
    }  # fmt: skip


def routed_up(
    x: QuantRows, listed: ExpertList, weights: Tensor, w13: Tiled | Streamed, *, limit: float
) -> QuantRows | Tensor:
    """x [R, D] through the up half of its picked experts: FP8 [R * K, F] (contract: ops.moe).

    weights float32 [R, K]; w13 [E, 2F, D] tiled from `layout.interleave_pair`. Rows of picks that
    are -1 are left as they were. Of streamed weights: the bfloat16 values before quantisation.
    """
    rows, hidden = x.codes.shape
    k = weights.shape[1]
    _check_experts(w13, listed, rows, k, hidden)
    if isinstance(w13, Streamed):
        return stream.routed_up(
            x.codes, x.scales, listed.experts, listed.slots, weights, w13, limit=limit
        )
    plan = w13.plan
    if plan.tile % GROUP:
        raise ValueError(f"up tiles hold whole groups of {GROUP} channels, got {plan.tile=}")
    device = check(x.codes, x.scales, listed.experts, listed.slots, weights, w13.values)
    width = w13.rows // 2
    codes = torch.empty(rows * k, width, dtype=torch.uint8, device=device)
    scales = torch.empty(width // GROUP, rows * k, dtype=torch.float32, device=device)
    grid, parts = _grid(w13, listed, device)
    launch(
        expert_up_kernel, grid,
        w13.values, w13.scales, x.codes, x.scales, parts, w13.arrivals, listed.experts,
        listed.slots, weights, codes, scales,
        hidden, width, rows, k, listed.experts.shape[1], limit, **_options(w13),
    )  # fmt: skip
    return QuantRows(codes, scales)


def routed_down(
    h: QuantRows | Tensor, listed: ExpertList, w2: Tiled | Streamed, *, picks: int
) -> Tensor:
    """h as `routed_up` gives it [R * K, F] through the down half of the same experts: bfloat16
    [R, K, D] (contract: ops.moe). `picks`: K."""
    total, width = h.shape if isinstance(h, Tensor) else h.codes.shape
    rows, hidden = total // picks, w2.rows
    _check_experts(w2, listed, rows, picks, width)
    if isinstance(w2, Streamed) and isinstance(h, Tensor):
        y = stream.routed_down(h, listed.experts, listed.slots, w2, picks=picks)
        return y.view(rows, picks, hidden)
    if isinstance(w2, Streamed) or isinstance(h, Tensor):
        raise ValueError("both maps of an expert are streamed, or neither is")
    device = check(h.codes, h.scales, listed.experts, listed.slots, w2.values)
    y = torch.empty(rows, picks, hidden, dtype=torch.bfloat16, device=device)
    grid, parts = _grid(w2, listed, device)
    launch(
        expert_down_kernel, grid,
        w2.values, w2.scales, h.codes, h.scales, parts, w2.arrivals, listed.experts, listed.slots,
        y, hidden, width, rows, picks, listed.experts.shape[1], w2.plan.ahead, **_options(w2),
    )  # fmt: skip
    return y


def swiglu_rows(h: Tensor, *, limit: float) -> QuantRows:
    """h bfloat16 [R, 2F] (gate, then up) -> FP8 [R, F]: the shared expert's activation."""
    device = check(h)
    rows, width = h.shape[0], h.shape[1] // 2
    if rows % ROW_TILE or width % GROUP or h.dtype != torch.bfloat16:
        raise ValueError(f"h must be bfloat16 [multiple of 8, 2 x multiple of 32]: {h.shape}")
    codes = torch.empty(rows, width, dtype=torch.uint8, device=device)
    scales = torch.empty(width // GROUP, rows, dtype=torch.float32, device=device)
    per_program = min(16, next_power(width // GROUP))
    grid = (rows, triton.cdiv(width // GROUP, per_program))
    launch(swiglu_kernel, grid, h, codes, scales, width, rows, limit, GB=per_program)
    return QuantRows(codes, scales)


def _check_experts(w: Tiled | Streamed, listed: ExpertList, rows: int, k: int, cols: int) -> None:
    if w.kind != "fp4" or w.cols != cols:
        raise ValueError(f"rows of {cols} values do not fit {w.kind} experts of {w.cols} columns")
    if listed.experts.shape != (rows // ROW_TILE, ROW_TILE * k):
        raise ValueError(f"the expert list {listed.experts.shape} is not one of {rows} x {k} picks")
