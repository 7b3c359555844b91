"""Sorted picks; routed experts of many rows against float64, in both stored orders."""

import pytest
import torch

from deepdraft.kernels import prefill_unpacked
from deepdraft.kernels.native import fragments
from deepdraft.kernels.prefill_experts import (
    PLAN,
    ExpertPlan,
    few_picks,
    sort_picks,
    sorted_down,
    sorted_up,
)
from deepdraft.kernels.prefill_unpacked import PlainPlan, plain_experts, unpack_experts
from deepdraft.ops import gemm
from deepdraft.ops import moe as reference
from deepdraft.quant import formats
from tests.kernels.cases import close_sum, grid, poisoned
from tests.kernels.interpreter import DEVICE
from tests.kernels.test_moe import LIMIT, expert_weights, tiled
from tests.kernels.test_prefill_gemm import ORDERS, quantised

SMALL = ExpertPlan(wide=32, tall=16, groups=2, warps=4, stages=2)
# (experts, picks, hidden, width)
SHAPES = grid([(4, 2, 64, 32), (3, 2, 96, 96)], [(24, 6, 5120, 2304), (24, 6, 5120, 288)])


def plan():
    return SMALL if DEVICE == "cpu" else PLAN


def stored(order, parts):
    """w13 and w2 in one of the stored orders."""
    if order == "tiled":
        return tiled(parts)
    shape = fragments.StreamPlan(1, 1, 8, 2, 1, 2)
    w1, w3, w2 = parts
    return fragments.stream_gate_up(w1, w3, shape), fragments.stream_mxfp4(*w2, shape)


def routing(rows, experts, k, seed=0):
    """Uneven picks: the last expert takes part in every row, the first one in few."""
    generator = torch.Generator().manual_seed(seed)
    picks = torch.stack(
        [torch.randperm(experts - 1, generator=generator)[: k - 1] for _ in range(rows)]
    )
    picks = torch.cat((torch.full((rows, 1), experts - 1), picks), 1)
    return picks.int().to(DEVICE), (torch.rand(rows, k, generator=generator) + 0.1).to(DEVICE)


def run(x, picks, weights, w13, w2, *, way="sorted"):
    experts = w13.values.shape[0]
    if way == "sorted":
        found = sort_picks(picks, experts, tall=plan().tall)
        h = sorted_up(x, found, weights, w13, limit=LIMIT, plan=plan())
        return h, found, sorted_down(h, found, w2, rows=len(x), plan=plan())
    own = PlainPlan(16, 64, 64, 4, 1, programs=3) if DEVICE == "cpu" else prefill_unpacked.PLAN
    found = sort_picks(picks, experts, tall=own.tall)
    h = torch.empty(picks.numel(), w2.cols, dtype=torch.bfloat16, device=DEVICE)
    y = torch.empty(picks.numel(), w2.rows, dtype=torch.bfloat16, device=DEVICE)
    at = found.order, found.tiles, found.ends
    space = torch.empty(2 * w13.rows * w13.cols, dtype=torch.bfloat16, device=DEVICE)
    shared = {"picks": picks.shape[1], "plan": own}
    for first in range(0, experts, 2):  # two at once
        count = min(2, experts - first)
        up = unpack_experts(w13, first, count, space, together=True)
        plain_experts(x, up, first, *at, h, weights=weights, limit=LIMIT, **shared)
    for first in range(0, experts, 2):
        count = min(2, experts - first)
        down = unpack_experts(w2, first, count, space, together=False)
        plain_experts(h, down, first, *at, y, **shared)
    return h, found, y.view(*picks.shape, w2.rows)


def by_pick(h, found):
    """[R * K, F] from the order of experts back to row * K + pick."""
    out = torch.empty_like(h)
    out[found.order.long()] = h
    return out


def test_picks_are_sorted_into_tiles():
    picks = torch.tensor([[2, 0], [2, 1], [-1, -1], [2, 0], [2, 5]], dtype=torch.int32)
    small = ExpertPlan(tall=2)
    found = sort_picks(picks.to(DEVICE), 6, tall=small.tall)
    order = found.order.tolist()
    assert order == [1, 7, 3, 0, 2, 6, 8, 9, 4, 5]
    live = [t for t in zip(*found.tiles.tolist(), strict=True) if t[0] >= 0]
    assert live == [(0, 0, 2), (1, 2, 3), (2, 3, 7), (2, 5, 7), (5, 7, 8)]
    flat = picks.flatten()
    for expert, first, end in live:
        assert all(flat[order[at]] == expert for at in range(first, min(first + 2, end)))


def test_few_picks_have_lower_tiles():
    talls = [few_picks(PLAN, each).tall for each in (0.1, 8, 16, 30, 64, 500)]
    assert talls == [16, 16, 32, 64, 128, 128]
    assert few_picks(PLAN, 8).wide == 64 and few_picks(SMALL, 1).wide == SMALL.wide


def test_no_pick_makes_no_tile():
    found = sort_picks(torch.full((3, 2), -1, dtype=torch.int32, device=DEVICE), 4, tall=SMALL.tall)
    assert bool((found.tiles[0] == -1).all())


@pytest.mark.parametrize(
    "order,way", [*((order, "sorted") for order in ORDERS), ("tiled", "plain")]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_experts(shape, order, way):
    experts, k, hidden, width = shape
    rows = 21 if DEVICE == "cpu" else 600
    parts = expert_weights(shape)
    x = quantised(rows, hidden, seed=1)
    picks, weights = routing(rows, experts, k)
    h, found, y = run(x, picks, weights, *stored(order, parts), way=way)
    exact = (formats.dequantize_mxfp4(*p, torch.float64) for p in parts)
    w1, w3, w2 = (w.to(DEVICE) for w in exact)
    got = by_pick(h, found).double().view(rows, k, width)
    for some in torch.arange(rows).split(8):  # the references gather weights
        at = picks[some].long()
        f = reference.routed_up(x[some].double(), at, weights[some].double(), w1, w3, limit=LIMIT)
        groups = f.unflatten(-1, (-1, 32)).abs()
        error = (got[some] - f).unflatten(-1, (-1, 32)).abs()
        # The last rounding of a sum may fall either way, and then half an E4M3 step is taken of a
        # number that is up to three bf16 steps off (once in some million values).
        scale = groups.amax(-1, keepdim=True)
        bound = (2.0**-4 + 2.0**-5) * groups + scale * 2.0**-9
        assert bool((error <= bound).all()), (
            f"{int((error > bound).sum())} values off by up to {float((error / bound).max()):.3g}"
        )
        want = gemm.quantize_rows(f.flatten(0, 1).float().cpu()).dequantize(torch.float64)
        same = (got[some].flatten(0, 1).cpu() == want).double().mean()
        assert same >= 0.97, f"{same:.4f} of the values are equal"
        down = reference.routed_down(got[some], at, w2)
        size = reference.routed_down(got[some].abs(), at, w2.abs())
        close_sum(y[some], down, size + 2.0**15 * down.abs(), width)


@pytest.mark.parametrize("order", ORDERS)
def test_bits_do_not_depend_on_other_rows(order):
    shape = (4, 2, 64, 64)
    w13, w2 = stored(order, expert_weights(shape))
    x = quantised(24, 64, seed=2)
    picks, weights = routing(24, 4, 2)

    def of(rows, at):
        return run(rows, picks[at].contiguous(), weights[at].contiguous(), w13, w2)[2]

    full = of(x, list(range(24)))
    for at in ([0], [23, 4, 0, 7, 21]):
        assert torch.equal(of(x[at].contiguous(), at), full[at])
    got = of(poisoned(x, 17), list(range(24)))
    assert torch.equal(got[17], full[17])


def test_rows_that_do_not_count_reach_nobody():
    w13, w2 = stored("tiled", expert_weights((4, 2, 64, 32)))
    x = quantised(9, 64, seed=3)
    picks, weights = routing(9, 4, 2)
    full = run(x, picks, weights, w13, w2)[2]
    picks[4:6] = -1
    x[4:6] = float("nan")
    got = run(x, picks, weights, w13, w2)[2]
    live = [0, 1, 2, 3, 6, 7, 8]
    assert torch.equal(got[live], full[live])


@pytest.mark.parametrize("shape", [SHAPES[0], *SHAPES[2:]])
def test_unpacked_first_the_bits_are_the_same(shape):
    experts, k, hidden, width = shape
    w13, w2 = stored("tiled", expert_weights(shape))
    rows = 18 if DEVICE == "cpu" else 3000
    x = quantised(rows, hidden, seed=5)
    picks, weights = routing(rows, experts, k)
    (h, found, y), (g, other, z) = (
        run(x, picks, weights, w13, w2, way=way) for way in ("sorted", "plain")
    )
    h, g = by_pick(h, found), by_pick(g, other)
    if DEVICE == "cpu" or width % 64 == 0:
        assert torch.equal(h, g) and torch.equal(y, z)
    else:
        # Tiles of less than 64 rows of weights are multiplied by an older instruction of a GPU,
        # which sums in another order.
        same = (h == g).double().mean()
        assert same >= 0.97, f"{same:.4f} of the values are equal"


def test_both_orders_give_the_same_sums():
    parts = expert_weights((3, 2, 64, 32))
    x = quantised(8, 64, seed=4)
    picks, weights = routing(8, 3, 2)
    one, two = (run(x, picks, weights, *stored(order, parts))[2] for order in ORDERS)
    if DEVICE == "cpu":  # other tiles may sum in another order on a GPU
        assert torch.equal(one, two)
    torch.testing.assert_close(one.float(), two.float(), rtol=2.0**-7, atol=2.0**-7)


def test_wrong_operands_are_refused():
    w13, w2 = stored("tiled", expert_weights((3, 2, 64, 32)))
    picks, weights = routing(8, 3, 2)
    found = sort_picks(picks, 3, tall=plan().tall)
    x = quantised(8, 64, seed=0)
    with pytest.raises(ValueError, match="are not those of"):
        sorted_up(x, found, weights[:4].contiguous(), w13, limit=1.0, plan=plan())
    with pytest.raises(ValueError, match="bf16 rows of 32 values"):
        sorted_down(quantised(16, 64, seed=1), found, w2, rows=8, plan=plan())
    with pytest.raises(ValueError, match="sorted for tiles"):
        sorted_up(x, found, weights, w13, limit=1.0, plan=ExpertPlan(tall=32))


def test_tables_of_tiles_hold_every_pick_once():
    generator = torch.Generator().manual_seed(0)
    for rows, each, experts, tall, left_out in (
        (64, 6, 24, 16, 0.4),
        (3, 2, 5, 16, 1.0),
        (90, 6, 8, 64, 0),
    ):
        picks = torch.randint(0, experts, (rows, each), generator=generator).int()
        picks[torch.rand(rows, each, generator=generator) < left_out] = -1
        found = sort_picks(picks.to(DEVICE), experts, tall=tall)
        counts = [int((picks == e).sum()) for e in range(experts)]
        tiles = [-(-n // tall) for n in counts]
        assert found.ends.tolist() == torch.tensor(tiles).cumsum(0).tolist()
        table = found.tiles.t().tolist()
        live, rest = table[: sum(tiles)], table[sum(tiles) :]
        assert [e for e, *_ in live] == [e for e, n in enumerate(tiles) for _ in range(n)]
        assert all(e == -1 for e, *_ in rest)
        held = [i for _, first, last in live for i in range(first, min(first + tall, last))]
        assert held == list(range(sum(counts)))
