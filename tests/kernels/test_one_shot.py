"""The one-shot sum: tags, order, bounded waits. Ranks in turn in one memory."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepdraft.errors import EngineError
from deepdraft.kernels.one_shot import OneShot, raise_for
from deepdraft.parallel.group import rank_order_sum, run_in_turn
from tests.kernels.interpreter import DEVICE

CAPACITY = 700


def ranks(size: int, *, limit: int = 3, data: int = 0) -> list[OneShot]:
    """All ranks in one memory, to be run by `in_turn`."""
    shape = 2, size, CAPACITY + data
    boxes = [torch.zeros(shape, dtype=torch.int64, device=DEVICE) for _ in range(size)]
    at = [box.data_ptr() for box in boxes]
    return [OneShot(rank, at, boxes[rank], limit=limit, data=data) for rank in range(size)]


def in_turn(group: list[OneShot], work):
    """work(rank) of every rank; each sends, then all receive."""

    def one(meeting):
        rank = group[meeting.rank]
        rank.between = lambda: meeting.gather(torch.zeros(1))
        return work(rank)

    return run_in_turn(len(group), one)


def parts(size: int, n: int, seed: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    scale = 10.0 ** torch.randint(-3, 4, (size, n), generator=g)
    return list((torch.randn(size, n, generator=g) * scale).to(DEVICE))


def sums(group: list[OneShot], xs: list[torch.Tensor]) -> list[torch.Tensor]:
    return in_turn(group, lambda rank: rank.sum(xs[rank.rank]))


@pytest.mark.parametrize("size", [2, 3, 8])
def test_the_rank_order_sum_on_every_rank(size):
    group = ranks(size)
    lengths = (5, 256, 1, 640) if size < 8 else (3, 130)
    for step in range(2):
        for number, n in enumerate(lengths):
            xs = parts(size, n, 100 * step + number)
            for out in sums(group, xs):
                assert torch.equal(out, rank_order_sum(xs))
        for rank in group:
            rank.finish()
            rank.finish()  # nothing more happened
    assert [int(rank.count) for rank in group] == [2 * len(lengths)] * size
    for rank in group:
        rank.check()


def test_a_value_depends_on_its_own_place_only():
    """Fewer rows give the same bits."""
    xs = parts(4, 600, 1)
    whole = sums(ranks(4), xs)[2]
    part = sums(ranks(4), [x[:90].contiguous() for x in xs])[2]
    assert torch.equal(part, whole[:90])


def test_rows_are_rounded_after_the_sum():
    group, xs = ranks(4), [x.view(3, 100) for x in parts(4, 300, 7)]
    for out in in_turn(group, lambda rank: rank.sum_rows(xs[rank.rank])):
        assert torch.equal(out, rank_order_sum(xs).bfloat16())


def test_picks_are_added_in_order_then_the_shared_expert_then_the_ranks():
    r, k, d, size = 4, 3, 96, 2
    picks = [torch.stack(parts(r, k * d, s)).view(r, k, d).bfloat16() for s in range(size)]
    shared = [torch.stack(parts(r, d, 50 + s)).bfloat16() for s in range(size)]
    outs = in_turn(ranks(size), lambda rank: rank.sum_picks(picks[rank.rank], shared[rank.rank]))
    own = []
    for y, s in zip(picks, shared, strict=True):
        total = y[:, 0].float()
        for i in range(1, k):
            total = total + y[:, i].float()
        own.append(total + s.float())
    for out in outs:
        assert torch.equal(out, rank_order_sum(own).bfloat16())


@pytest.mark.parametrize("data", [0, 300])
def test_parts_side_by_side_in_as_many_exchanges_as_they_need(data):
    r, n = 5, 300  # two rows fit a mailbox
    xs = [torch.stack(parts(r, n, s)) for s in range(3)]
    group = ranks(3, data=data)
    for out in in_turn(group, lambda rank: rank.gather(xs[rank.rank])):
        assert torch.equal(out, torch.cat(xs, 1))
    for rank in group:
        rank.finish()
    assert int(group[0].count) == 3


def test_of_rows_that_do_not_count_the_first_alone_is_gathered():
    xs, group = [torch.stack(parts(4, 1100, s)) for s in range(2)], ranks(2, data=2200)
    for rank in group:
        rank.positions = torch.tensor([-1, 4, -1, 5], dtype=torch.int32, device=DEVICE)
    xs[0][2] = float("nan")
    for step in range(2):
        for out in in_turn(group, lambda rank: rank.gather(xs[rank.rank])):
            assert torch.equal(out[[0, 1, 3]], torch.cat(xs, 1)[[0, 1, 3]])
        words = torch.stack([rank._own[(1 + step) & 1] for rank in group])
        tags = words[:, :, :8] >> 32  # two words a row
        wanted = torch.tensor([[[0] * 8, [1, 1, 1, 1, 0, 0, 1, 1]]], device=DEVICE) * (step + 1)
        assert torch.equal(tags[:1], wanted)
    group[0].check()
    xs[1][3, 1099] = float("inf")
    in_turn(group, lambda rank: rank.gather(xs[rank.rank]))
    assert [int(rank.error) for rank in group] == [256 + 1] * 2

    def silent(rank):
        return rank.between() if rank.rank == 1 else rank.gather(xs[rank.rank])

    group[0].error.zero_()
    out = in_turn(group, silent)[0]
    assert int(group[0].error) == 2 and out[[0, 1, 3], 1100:].isnan().all()


def test_tags_wrap_around():
    group = ranks(2)
    for rank in group:
        rank.count.fill_(2**31 - 2)
    for seed in range(4):
        xs = parts(2, 33, seed)
        assert all(torch.equal(out, rank_order_sum(xs)) for out in sums(group, xs))


def test_words_of_an_earlier_exchange_do_not_count():
    """Rank 1 is silent in the third exchange; its words of the first lie in the same mailbox."""
    group = ranks(3)
    for seed in range(2):
        sums(group, parts(3, 20, seed))

    def silent(rank):
        return rank.between() if rank.rank == 1 else rank.sum(parts(3, 20, 9)[rank.rank])

    outs = in_turn(group, silent)
    assert outs[0].isnan().all() and outs[2].isnan().all()
    assert [int(group[r].error) for r in (0, 2)] == [2, 2]
    with pytest.raises(EngineError, match="rank 1 did not answer"):
        group[0].check()
    # From now on nobody waits: even with no limit to speak of, the next exchange returns at once.
    for rank in group:
        rank.limit = 1 << 30
        rank._slot = 3
    assert in_turn(group, silent)[0].isnan().all()
    for rank in group:
        rank.limit, rank._slot = 3, 4
        rank.error.zero_()
    xs = parts(3, 20, 4)
    assert torch.equal(sums(group, xs)[0], rank_order_sum(xs))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_the_rank_that_made_a_nan_says_so(bad):
    group, xs = ranks(4), parts(4, 300, 2)
    xs[3][290] = bad
    outs = sums(group, xs)
    assert [int(rank.error) for rank in group] == [256 + 3] * 4
    assert all(not bool(out[290].isfinite()) and bool(out[:290].isfinite().all()) for out in outs)
    with pytest.raises(EngineError, match="rank 3 produced NaN"):
        raise_for(259)


def test_nan_in_a_row_that_only_fills_a_tile_is_no_fault():
    group, xs = ranks(2), [x.view(4, 75) for x in parts(2, 300, 2)]
    xs[1][2:] = float("nan")
    for rank in group:
        rank.positions = torch.tensor([7, 8, -1, -1], dtype=torch.int32, device=DEVICE)
    outs = in_turn(group, lambda rank: rank.sum_rows(xs[rank.rank]))
    assert torch.equal(outs[0][:2], rank_order_sum(xs)[:2].bfloat16())
    joined = in_turn(group, lambda rank: rank.gather(xs[rank.rank]))
    assert torch.equal(joined[1][:2], torch.cat(xs, 1)[:2])
    group[1].check()
    xs[0][1, 3] = float("inf")
    in_turn(group, lambda rank: rank.sum_rows(xs[rank.rank]))
    with pytest.raises(EngineError, match="rank 0 produced"):
        group[0].check()


def test_what_it_does_not_take():
    (first, _) = ranks(2)
    for x in (torch.zeros(CAPACITY + 1), torch.zeros(3, dtype=torch.float64)):
        with pytest.raises(ValueError, match="at most 700 float32"):
            first.sum(x.to(DEVICE))
    with pytest.raises(ValueError, match="contiguous"):
        first.sum_rows(torch.zeros(4, 2, device=DEVICE).t())
    with pytest.raises(ValueError, match="bfloat16"):
        first.sum_picks(torch.zeros(2, 3, 4, device=DEVICE), torch.zeros(2, 4, device=DEVICE))
    with pytest.raises(ValueError, match=r"int64 \[2, 2, n\]"):
        OneShot(0, [0, 0], torch.zeros(2, 3, 8, dtype=torch.int64))
    first._most = 1
    with pytest.raises(ValueError, match="do not run at once"):
        first.sum(torch.zeros(600, device=DEVICE))


class Schedule:
    """Ranks in one memory, each as far ahead as the exchange lets it be; `pick` says who is next.

    A rank sends an exchange's words, then may wait for the others': it goes on when all have sent
    theirs, however far they are by then.
    """

    def __init__(self, size, pick):
        self.sent, self.awaits = [0] * size, [False] * size
        self.turn, self.pick, self.ended = None, pick, [False] * size
        self.changed = threading.Condition()

    def ready(self):
        """Ranks that can go on: those that have not sent yet, and those that all have sent to."""
        return [
            rank
            for rank, sent in enumerate(self.sent)
            if not self.ended[rank] and (not self.awaits[rank] or min(self.sent) >= sent)
        ]

    def give(self, rank):
        """Hands the turn on and comes back when it is this rank's again."""
        with self.changed:
            ready = self.ready()
            self.turn = ready[self.pick(len(ready))] if ready else None
            self.changed.notify_all()
            if not self.ended[rank]:
                assert self.changed.wait_for(lambda: self.turn == rank, timeout=60)

    def between(self, rank):
        self.sent[rank] += 1
        self.awaits[rank] = True
        self.give(rank)
        self.awaits[rank] = False
        self.give(rank)

    def run(self, works):
        results = [None] * len(works)

        def one(rank):
            with self.changed:
                assert self.changed.wait_for(lambda: self.turn == rank, timeout=60)
            results[rank] = works[rank]()
            self.ended[rank] = True
            self.give(rank)

        threads = [threading.Thread(target=one, args=(r,), daemon=True) for r in range(len(works))]
        for thread in threads:
            thread.start()
        with self.changed:
            self.turn = self.pick(len(works))
            self.changed.notify_all()
        for thread in threads:
            thread.join(timeout=120)
        return results


@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.integers(2, 3), st.randoms(use_true_random=False))
def test_ranks_may_be_as_far_apart_as_the_words_let_them(size, random):
    """Exchanges of different sizes, two steps of them: no order of the ranks changes a sum."""
    lengths, group, steps = (130, 7, 300), ranks(size), 2
    xs = [[parts(size, n, 10 * step + i) for i, n in enumerate(lengths)] for step in range(steps)]
    schedule = Schedule(size, random.randrange)
    for rank in group:
        rank.between = lambda rank=rank.rank: schedule.between(rank)

    def work(rank):
        outs = []
        for step in xs:
            outs += [rank.sum(exchange[rank.rank]) for exchange in step]
            rank.finish()
        return outs

    found = schedule.run([lambda rank=rank: work(rank) for rank in group])
    for outs in found:
        for out, exchange in zip(outs, [x for step in xs for x in step], strict=True):
            assert torch.equal(out, rank_order_sum(exchange))
    for rank in group:
        rank.check()
