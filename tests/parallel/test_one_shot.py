"""The one-shot sum: tags, order, bounded waits; ranks in turn in Triton's interpreter."""

import importlib.util

import pytest
import torch

from deepdraft.errors import EngineError
from deepdraft.parallel.group import rank_order_sum

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed: the one-shot sum stays untested", allow_module_level=True)

from tests.kernels.interpreter import DEVICE  # isort: skip  (before triton)
from deepdraft.parallel.one_shot import OneShot, raise_for  # isort: skip

CAPACITY = 700


def ranks(size: int, *, limit: int = 3) -> list[OneShot]:
    """All ranks in one memory."""
    boxes = [torch.zeros(2, size, CAPACITY, dtype=torch.int64, device=DEVICE) for _ in range(size)]
    addresses = [box.data_ptr() for box in boxes]
    return [OneShot(rank, addresses, boxes[rank], limit=limit) for rank in range(size)]


def parts(size: int, n: int, seed: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    scale = 10.0 ** torch.randint(-3, 4, (size, n), generator=g)
    return list((torch.randn(size, n, generator=g) * scale).to(DEVICE))


def exchange(group: list[OneShot], xs: list[torch.Tensor], slot: int, *, silent: int = -1):
    """Every rank pushes, in an order of its own, then every rank collects."""
    order = sorted(range(len(group)), key=lambda rank: (rank * 5 + slot) % 7)
    for rank in order:
        if rank != silent:
            group[rank].sum(xs[rank], slot, phase="push")
    return [group[rank].sum(xs[rank], slot, phase="collect") for rank in range(len(group))]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_rank_order_sum_on_every_rank(size):
    group = ranks(size)
    for step in range(2):
        for slot, n in enumerate((5, 256, 513, 1, 640)):
            xs = parts(size, n, 100 * step + slot)
            for out in exchange(group, xs, slot):
                assert torch.equal(out, rank_order_sum(xs))
        for rank in group:
            rank.advance(5)
    assert [int(rank.count) for rank in group] == [10] * size
    for rank in group:
        rank.check()


def test_a_value_depends_on_its_own_place_only():
    """Fewer rows give the same bits."""
    xs = parts(4, 600, 1)
    whole = exchange(ranks(4), xs, 0)[2]
    part = exchange(ranks(4), [x[:90].contiguous() for x in xs], 0)[2]
    assert torch.equal(part, whole[:90])


def test_tags_wrap_around():
    group = ranks(2)
    for rank in group:
        rank.count.fill_(2**31 - 2)
    for slot in range(4):
        xs = parts(2, 33, slot)
        assert all(torch.equal(out, rank_order_sum(xs)) for out in exchange(group, xs, slot))


def test_words_of_an_earlier_exchange_do_not_count():
    """Rank 1 is silent in the third exchange; its words of the first lie in the same mailbox."""
    group = ranks(3)
    for slot in range(2):
        exchange(group, parts(3, 20, slot), slot)
    outs = exchange(group, parts(3, 20, 9), 2, silent=1)
    assert outs[0].isnan().all() and outs[2].isnan().all()
    assert [int(group[r].error) for r in (0, 2)] == [2, 2]
    with pytest.raises(EngineError, match="rank 1 did not answer"):
        group[0].check()
    # From now on nobody waits: even with no limit to speak of, the next exchange returns at once.
    group[0].limit = 1 << 30
    assert group[0].sum(parts(3, 20, 3)[0], 3, phase="collect").isnan().all()
    group[0].error.zero_()
    group[0].limit = 3
    xs = parts(3, 20, 4)
    assert torch.equal(exchange(group, xs, 4)[0], rank_order_sum(xs))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_the_rank_that_made_a_nan_says_so(bad):
    group, xs = ranks(4), parts(4, 300, 2)
    xs[3][290] = bad
    outs = exchange(group, xs, 0)
    assert [int(rank.error) for rank in group] == [0, 0, 0, 256 + 3]
    assert all(not bool(out[290].isfinite()) and bool(out[:290].isfinite().all()) for out in outs)
    with pytest.raises(EngineError, match="rank 3 produced NaN"):
        raise_for(259)


def test_what_it_does_not_take():
    (first, _) = ranks(2)
    for x in (
        torch.zeros(CAPACITY + 1),
        torch.zeros(3, dtype=torch.float64),
        torch.zeros(4, 2).t(),
    ):
        with pytest.raises(ValueError, match="at most 700 contiguous float32"):
            first.sum(x.to(DEVICE), 0)
    with pytest.raises(ValueError, match=r"int64 \[2, 2, n\]"):
        OneShot(0, [0, 0], torch.zeros(2, 3, 8, dtype=torch.int64))
