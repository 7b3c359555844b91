"""Routed MXFP4 experts of many rows: picks sorted by expert, then one product a tile of them.

Contracts and references: `deepdraft.ops.moe` (routed_up, routed_down). A program multiplies one
tile of an expert's weights, unpacked to bf16 on the way, with up to `tall` picks of that expert.
Which picks share a tile changes no row's bits: a pick is one column of the product.

Letters: R rows, K picks of a row, E experts, D hidden, F expert width, T row tiles.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepdraft.kernels.gemv import dot_bf16
from deepdraft.kernels.layout import GROUP, Tiled
from deepdraft.kernels.moe import swiglu
from deepdraft.kernels.native.fragments import Streamed
from deepdraft.kernels.prefill_gemm import quantized_values
from deepdraft.kernels.prefill_weights import pair_rows, pair_tile, stored
from deepdraft.kernels.rounding import round_bf16, to_bf16_rne
from deepdraft.kernels.runtime import check, launch, next_power


@dataclass(frozen=True, slots=True)
class ExpertPlan:
    """A program's tile: `wide` byte rows (two rows of weights each), `tall` picks, `groups` of 32
    columns a step (a power of two). Never a function of the row count."""

    wide: int = 128
    tall: int = 128
    groups: int = 2
    warps: int = 8
    stages: int = 3


PLAN = ExpertPlan()


def few_picks(plan: ExpertPlan, each: float) -> ExpertPlan:
    """The plan for `each` picks of an expert on average: tiles that few of them fill, which are
    lower and narrower, so that one program unpacks while another one multiplies. A tile's sides
    change no bit."""
    tall = min(plan.tall, next_power(int(1.6 * each), 16))
    return replace(
        plan, tall=tall, wide=min(plan.wide, 64), warps=min(plan.warps, 4), stages=plan.stages + 1
    )


@dataclass(frozen=True, slots=True)
class SortedPicks:
    """Picks by expert. `order` int32 [R * K]: row * K + pick, ascending within an expert, picks of
    -1 last; `tiles` int32 [3, T]: expert (-1: none), first place, place behind the last; `ends`
    int32 [E]: tiles of an expert and those before it."""

    order: Tensor
    tiles: Tensor
    tall: int
    ends: Tensor


# ---- kernels -------------------------------------------------------------------------------


@triton.jit
def places_below(expert_ptr, e, COUNT, STEPS: tl.constexpr):
    """How many of the sorted experts of COUNT picks are below e (any shape): int32."""
    low, high = e * 0, e * 0 + COUNT
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        below = tl.load(expert_ptr + middle, mask=low < high, other=0) < e
        found = below & (low < high)
        high = tl.where(found | (low >= high), high, middle)
        low = tl.where(found, middle + 1, low)
    return low


@triton.jit
def tile_table_kernel(
    expert_ptr, tile_ptr, end_ptr, COUNT, E, TILES, TALL,
    STEPS: tl.constexpr, EP: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The tiles of sorted picks, by one program."""
    e = tl.arange(0, EP)
    first = places_below(expert_ptr, e, COUNT, STEPS)
    last = places_below(expert_ptr, e + 1, COUNT, STEPS)
    tiles = tl.where(e < E, (last - first + TALL - 1) // TALL, 0)
    ends = tl.cumsum(tiles, axis=0)
    tl.store(end_ptr + e, ends, mask=e < E)
    for number in range(0, tl.max(tiles, axis=0)):
        at, mine = tile_ptr + ends - tiles + number, number < tiles
        tl.store(at, e, mask=mine)
        tl.store(at + TILES, first + number * TALL, mask=mine)
        tl.store(at + 2 * TILES, last, mask=mine)
    for start in range(tl.sum(tiles, axis=0), TILES, N):
        at = start + tl.arange(0, N)
        tl.store(tile_ptr + at, tl.full((N,), -1, tl.int32), mask=at < TILES)


@triton.jit
def pair_products(
    w_ptr, ws_ptr, base, i0, x_ptr, x_at, mine, G, TILE: tl.constexpr, BN: tl.constexpr,
    BM: tl.constexpr, P: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Both weight rows of BN byte rows from `i0` on times BM picks, whose values begin at `x_at`:
    two float32 [BN, BM]. `mine` [BM]: picks that are there."""
    one, two = tl.zeros((BN, BM), tl.float32), tl.zeros((BN, BM), tl.float32)
    for step in range((G + P - 1) // P):
        first = step * P
        w_one, w_two = pair_tile(w_ptr, ws_ptr, base, i0, first, G, TILE, BN, P, MASKED)
        k = first * 32 + tl.arange(0, P * 32)
        here = mine[None, :]
        if MASKED:
            here = here & (k < G * 32)[:, None]
        x = tl.load(x_ptr + x_at[None, :] + k[:, None], mask=here, other=0.0)
        one = dot_bf16(w_one, x, one)
        two = dot_bf16(w_two, x, two)
    return one, two


@triton.jit
def sorted_up_kernel(
    w_ptr, ws_ptr, x_ptr, order_ptr, weight_ptr, tile_ptr, h_ptr, D, F, K, TILES, EXPERT_TILES,
    LIMIT, TILE: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, P: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(1)
    expert = tl.load(tile_ptr + number)
    if expert < 0:
        return
    m = tl.load(tile_ptr + TILES + number) + tl.arange(0, BM)
    mine = m < tl.load(tile_ptr + 2 * TILES + number)
    pick = tl.load(order_ptr + m, mask=mine, other=0)
    x_at = (pick // K).to(tl.int64) * D
    G = D // 32
    base = expert.to(tl.int64) * EXPERT_TILES * G
    i0 = tl.program_id(0) * BN
    gate, up = pair_products(w_ptr, ws_ptr, base, i0, x_ptr, x_at, mine, G, TILE, BN, BM, P, MASKED)
    weight = tl.load(weight_ptr + pick, mask=mine, other=0.0)
    f = swiglu(round_bf16(gate), round_bf16(up), LIMIT) * weight[None, :]
    f = quantized_values(tl.reshape(tl.trans(round_bf16(f)), (BM * BN // 32, 32)))
    at = m.to(tl.int64)[:, None] * F + (i0 + tl.arange(0, BN))[None, :]
    tl.store(h_ptr + at, to_bf16_rne(tl.reshape(f, (BM, BN))), mask=mine[:, None])


@triton.jit
def sorted_down_kernel(
    w_ptr, ws_ptr, h_ptr, order_ptr, tile_ptr, y_ptr, D, F, TILES, EXPERT_TILES,
    TILE: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, P: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(1)
    expert = tl.load(tile_ptr + number)
    if expert < 0:
        return
    m = tl.load(tile_ptr + TILES + number) + tl.arange(0, BM)
    mine = m < tl.load(tile_ptr + 2 * TILES + number)
    h_at = m.to(tl.int64) * F
    G = F // 32
    base = expert.to(tl.int64) * EXPERT_TILES * G
    i0 = tl.program_id(0) * BN
    one, two = pair_products(w_ptr, ws_ptr, base, i0, h_ptr, h_at, mine, G, TILE, BN, BM, P, MASKED)
    pick = tl.load(order_ptr + m, mask=mine, other=0)
    y_at = pick.to(tl.int64)[:, None] * D
    if TILE == 0:
        # Rows of a unit: 4 g + 2 half + j; neighbours are stored together.
        both = tl.join(tl.trans(to_bf16_rne(one)), tl.trans(to_bf16_rne(two)))
        both = tl.permute(tl.reshape(both, (BM, BN // 16, 8, 2, 2)), (0, 1, 2, 4, 3))
        at = y_at + (2 * i0 + tl.arange(0, 2 * BN))[None, :]
        tl.store(y_ptr + at, tl.reshape(both, (BM, 2 * BN)), mask=mine[:, None])
    else:
        i = i0 + tl.arange(0, BN)
        at = y_at + pair_rows(i, 0, TILE)[None, :]
        tl.store(y_ptr + at, to_bf16_rne(tl.trans(one)), mask=mine[:, None])
        at = y_at + pair_rows(i, 1, TILE)[None, :]
        tl.store(y_ptr + at, to_bf16_rne(tl.trans(two)), mask=mine[:, None])


# ---- launches ------------------------------------------------------------------------------


def sort_picks(picks: Tensor, experts: int, *, tall: int = PLAN.tall) -> SortedPicks:
    """picks int32 [R, K], -1 where a row does not count -> the work of the two products. Nothing
    here waits for the device; T is the most tiles that so many picks can need."""
    device = check(picks)
    flat = picks.flatten()
    by_expert, order = torch.sort(torch.where(flat < 0, experts, flat), stable=True)
    count = flat.shape[0] // tall + min(experts, flat.shape[0])
    tiles = torch.empty(3, count, dtype=torch.int32, device=device)
    ends = torch.empty(experts, dtype=torch.int32, device=device)
    launch(
        tile_table_kernel, (1,), by_expert, tiles, ends, flat.shape[0], experts, count, tall,
        STEPS=flat.shape[0].bit_length(), EP=next_power(experts), N=1024, num_warps=8,
    )  # fmt: skip
    return SortedPicks(order.int(), tiles, tall, ends)


def sorted_up(
    x: Tensor, picks: SortedPicks, weights: Tensor, w13: Tiled | Streamed, *, limit: float,
    plan: ExpertPlan = PLAN,
) -> Tensor:  # fmt: skip
    """x bfloat16 [R, D] (quantised values) through the up half of its picked experts: bfloat16
    [R * K, F] in the order of `picks`, quantised values again (contract: ops.moe.routed_up).

    weights float32 [R, K]; w13 [E, 2F, D], gate and up as `moe.routed_up` takes them. Places of
    picks that are -1 are left as they were.
    """
    (rows, hidden), width = x.shape, w13.rows // 2
    h = torch.empty(picks.order.shape[0], width, dtype=torch.bfloat16, device=x.device)
    if weights.shape != (rows, picks.order.shape[0] // rows):
        raise ValueError(f"{weights.shape=} are not those of {picks.order.shape[0]} picks")
    grid, stored_at, options = _work(x, picks, w13, plan, least=GROUP)
    launch(
        sorted_up_kernel, grid, *stored_at, x, picks.order, weights, picks.tiles, h,
        hidden, width, weights.shape[1], picks.tiles.shape[1], _stored_tiles(w13), limit,
        **options,
    )  # fmt: skip
    return h


def sorted_down(
    h: Tensor, picks: SortedPicks, w2: Tiled | Streamed, *, rows: int, plan: ExpertPlan = PLAN
) -> Tensor:
    """h as `sorted_up` gives it through the down half of the same experts, back in the order of the
    rows: bfloat16 [R, K, D] (contract: ops.moe.routed_down)."""
    count, width = h.shape
    if count % rows or count != picks.order.shape[0]:
        raise ValueError(f"{count} picks are not those of {rows} rows")
    y = torch.empty(rows, count // rows, w2.rows, dtype=torch.bfloat16, device=h.device)
    grid, stored_at, options = _work(h, picks, w2, plan, least=16)
    launch(
        sorted_down_kernel, grid, *stored_at, h, picks.order, picks.tiles, y,
        w2.rows, width, picks.tiles.shape[1], _stored_tiles(w2), **options,
    )  # fmt: skip
    return y


def _stored_tiles(w: Tiled | Streamed) -> int:
    """Tiles (or units) of one expert that are stored one after another."""
    return w.values.shape[1]


def _work(
    x: Tensor, picks: SortedPicks, w: Tiled | Streamed, plan: ExpertPlan, *, least: int
) -> tuple[tuple[int, int], tuple[Tensor, Tensor], dict[str, int]]:
    """The grid of a product, its weights and its options."""
    if w.kind != "fp4" or w.cols != x.shape[1] or x.dtype != torch.bfloat16:
        raise ValueError(
            f"bf16 rows of {w.cols} values are wanted for these {w.kind} experts, got {x.dtype} "
            f"of {x.shape[1]}"
        )
    if picks.tall != plan.tall:
        raise ValueError(f"picks sorted for tiles of {picks.tall} rows, not {plan.tall}")
    found = stored(w)
    check(x, picks.order, picks.tiles, found.values, found.scales)
    pairs, wide = w.rows // 2, plan.wide
    while pairs % wide:
        wide //= 2
    if wide < least:
        raise ValueError(f"{w.rows} rows of an expert are no multiple of {2 * least}")
    groups = w.cols // GROUP
    options = {
        "TILE": found.tile, "BN": wide, "BM": plan.tall, "P": plan.groups,
        "MASKED": groups % plan.groups != 0, "num_warps": plan.warps, "num_stages": plan.stages,
    }  # fmt: skip
    return (pairs // wide, picks.tiles.shape[1]), (found.values, found.scales), options
