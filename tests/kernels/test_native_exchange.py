"""boundary.cu of several ranks: the bits of the one-shot exchange and the boundary behind it.

The ranks are threads, each with its source's emulator. (On one GPU a rank that waits would keep the
other from loading kernels and memory; `bench/tp2_step_gpu.py` compares whole steps on two.)
"""

import threading
from unittest import mock

import pytest
import torch

from deepdraft.errors import EngineError
from deepdraft.kernels import mhc
from deepdraft.kernels.native import boundary
from deepdraft.kernels.one_shot import OneShot
from deepdraft.parallel.group import rank_order_sum
from tests.kernels.cases import rows_of
from tests.kernels.emulated import CAN_RUN
from tests.kernels.emulated.sources import switched
from tests.kernels.interpreter import DEVICE
from tests.kernels.test_native_boundary import CLUSTER, EPS, emulated

pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" or not CAN_RUN, reason="needs g++, and no CUDA device"
)
S, D, R = 2, 128, 8
PATIENT = 400_000


def group(size, limit=PATIENT):
    boxes = [torch.zeros(2, size, R * D, dtype=torch.int64) for _ in range(size)]
    addresses = [box.data_ptr() for box in boxes]
    return [OneShot(rank, addresses, boxes[rank], limit=limit) for rank in range(size)]


def operands(number, rank, picks):
    """What the ranks have in common, and this one's part."""
    g = torch.Generator().manual_seed(number)
    common = {
        "x": rows_of(R * S, D, seed=number).view(R, S, D),
        "norm": torch.rand(D, generator=g) + 0.5,
        "coef": torch.rand(R, (2 + S) * S, generator=g),
    }
    seed = 1000 * number + 10 * rank
    if picks:
        y = rows_of(R * picks, D, seed=seed).view(R, picks, D)
        return common, {"y": y, "shared": rows_of(R, D, seed=seed + 1)}
    return common, {"y": torch.randn(R, D, generator=torch.Generator().manual_seed(seed))}


def wanted(number, size, picks):
    """The sum first, then the boundary alone."""
    totals = []
    for rank in range(size):
        common, own = operands(number, rank, picks)
        parts = [own["y"]] if not picks else [*own["y"].unbind(1), own["shared"]]
        totals.append(rank_order_sum([part.float() for part in parts]))
    return mhc.boundary(**common, y=rank_order_sum(totals).bfloat16(), norm_eps=EPS)


def launch(exchange, number, picks, **changed):
    common, own = operands(number, exchange.rank, picks)
    common |= changed
    return mhc.boundary(**common, **own, norm_eps=EPS, exchange=exchange)


def flat(result):
    out, u, quantised = result
    return [out, u, quantised.codes, quantised.scales]


def side_by_side(works):
    """Each in a thread of its own; what they return."""
    results = [None] * len(works)

    def one(i):
        results[i] = works[i]()

    threads = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()
    return results


def live(*positions):
    rows = [*positions, *[-1] * (R - len(positions))]
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize("size", [2, 3])
def test_bits_of_the_exchange_and_the_boundary(size):
    """Steps of exchanges, with picks and without; the counter goes on from step to step."""
    ranks = group(size)
    plan = [(n, picks) for n, picks in enumerate((0, 3, 0, 0, 3))]
    with switched(boundary, True, emulated, CLUSTER=CLUSTER):

        def work(rank):
            found = []
            for step in range(2):
                found += [flat(launch(rank, 10 * step + n, picks)) for n, picks in plan]
                rank.count += rank._slot  # as `finish`; the interpreter takes one thread at a time
                rank._slot = 0
            return found

        found = side_by_side([lambda rank=rank: work(rank) for rank in ranks])
        for rank in range(size):
            got = iter(found[rank])
            for step in range(2):
                for n, picks in plan:
                    for part, want in zip(
                        next(got), flat(wanted(10 * step + n, size, picks)), strict=True
                    ):
                        assert torch.equal(part, want)
    for rank in ranks:
        rank.check()


def test_no_rank_runs_ahead_where_no_row_counts():
    """Rank 0 stands at the first exchange until rank 1 has sent, though all rows only fill a
    tile; of rows that do not count row 0 alone is exchanged."""
    ranks = group(2)
    for rank in ranks:
        rank.positions = live()
    with switched(boundary, True, emulated, CLUSTER=CLUSTER):
        done = []
        first = threading.Thread(
            target=lambda: done.extend(flat(launch(ranks[0], n, 0)) for n in range(3)), daemon=True
        )
        first.start()
        box = ranks[1]._own
        while int((box[1, 0] >> 32 == 1).sum()) < D:  # its words are there
            assert first.is_alive()
        assert not done and not box[0].any() and not box[1, 0, D:].any()
        others = [flat(launch(ranks[1], n, 0)) for n in range(3)]
        first.join(timeout=120)
        for n, (own, other) in enumerate(zip(done, others, strict=True)):
            want = flat(wanted(n, 2, 0))
            for a, b, c in zip(own[:3], other[:3], want[:3], strict=True):
                assert torch.equal(a[0], c[0]) and torch.equal(b[0], c[0])


def test_rows_that_count_do_not_depend_on_those_that_do_not():
    ranks = group(2)
    for rank in ranks:
        rank.positions = live(7, 8, 9)
    with switched(boundary, True, emulated, CLUSTER=CLUSTER):
        found = side_by_side([lambda rank=rank: flat(launch(rank, 4, 3)) for rank in ranks])
        want = flat(wanted(4, 2, 3))
    for parts in found:
        for part, all_rows in zip(parts[:3], want[:3], strict=True):
            assert torch.equal(part[:3], all_rows[:3])


def test_the_streams_alone():
    ranks = group(2)
    with switched(boundary, True, emulated, CLUSTER=CLUSTER):
        found = side_by_side([lambda rank=rank: launch(rank, 4, 3, norm=None) for rank in ranks])
    want, _, _ = wanted(4, 2, 3)
    assert all(torch.equal(out, want) and none == [None, None] for out, *none in found)


def test_a_silent_rank_is_named_and_nobody_waits_again():
    ranks = group(2, limit=3)
    with switched(boundary, True, emulated, CLUSTER=CLUSTER):
        out = flat(launch(ranks[0], 1, 0))
        assert out[0].isnan().all() and int(ranks[0].error) == 2
        ranks[0].limit = 1 << 30
        assert flat(launch(ranks[0], 2, 3))[1].isnan().all()
    with pytest.raises(EngineError, match="rank 1 did not answer"):
        ranks[0].check()


@pytest.mark.parametrize("picks", [0, 3])
def test_the_rank_that_made_a_nan_says_so(picks):
    ranks = group(2)
    for rank in ranks:
        rank.positions = live(5, 6)

    def spoiled(number, rank, picks, made=operands):
        common, own = made(number, rank, picks)
        if rank == 1:
            own["y"][bad, ..., 17] = float("nan")
        return common, own

    changed = mock.patch.dict(globals(), {"operands": spoiled})
    with changed, switched(boundary, True, emulated, CLUSTER=CLUSTER):
        bad = 5  # fills a tile
        side_by_side([lambda rank=rank: launch(rank, 1, picks) for rank in ranks])
        assert [int(rank.error) for rank in ranks] == [0, 0]
        bad = 1
        found = side_by_side([lambda rank=rank: flat(launch(rank, 2, picks)) for rank in ranks])
    assert [int(rank.error) for rank in ranks] == [256 + 1] * 2
    for out, *_ in found:
        assert out[1].isnan().any() and out[0].isfinite().all()
    with pytest.raises(EngineError, match="rank 1 produced NaN"):
        ranks[0].check()


def test_what_it_does_not_take():
    (first, _) = group(2)
    common, own = operands(1, 0, 0)
    with switched(boundary, True, emulated, CLUSTER=CLUSTER):
        with pytest.raises(ValueError, match="parts are float32"):
            mhc.boundary(**common, y=own["y"].bfloat16(), norm_eps=EPS, exchange=first)
        first._most = R
        with pytest.raises(ValueError, match="exchange fewer rows"):
            mhc.boundary(**common, **own, norm_eps=EPS, exchange=first)
