"""Scores and selection in one pass against a sort of float64 scores, ties included."""

import pytest
import torch

from deepdraft.kernels import index as step_kernels
from deepdraft.kernels.prefill_index import (
    PLAN,
    Candidates,
    IndexPlan,
    held_places,
    key_values,
    stream_top,
)
from deepdraft.ops import cache
from deepdraft.ops import index as reference
from deepdraft.quant import records
from tests.kernels.cases import grid
from tests.kernels.interpreter import DEVICE

SMALL = IndexPlan(rows=2, entries=16, turns=2, held=64)
# (rows, heads, channels, entries, selected)
SHAPES = grid(
    [(5, 2, 32, 150, 16), (3, 3, 96, 70, 8)],
    [(64, 32, 128, 40_000, 512), (16, 32, 128, 300_000, 512), (9, 4, 128, 5000, 512)],
)
BASE = 3


def plan():
    return SMALL if DEVICE == "cpu" else PLAN


class Case:
    """Keys of whole numbers and queries of few values, so that scores are exact and often equal;
    `smooth`: random ones."""

    def __init__(self, shape, kind, seed=0):
        rows, heads, channels, count, self.k = shape
        generator = torch.Generator().manual_seed(seed)

        def whole(low, high, *size):
            return torch.randint(low, high, size, generator=generator).float()

        if kind == "smooth":
            keys = torch.randn(count + BASE, channels, generator=generator)
            q = torch.randn(rows, heads, channels, generator=generator)
            weights = torch.randn(rows, heads + 1, generator=generator)
        else:
            keys, q = whole(-2, 3, count + BASE, channels), whole(-1, 2, rows, heads, channels)
            weights = whole(-2, 3, rows, heads + 1)
            if kind == "rising":  # every entry beats all before it
                step = torch.arange(count + BASE).float().clamp(max=6)
                keys = torch.zeros_like(keys)
                keys[:, 0] = step
                keys[:, 1] = (torch.arange(count + BASE) // 7 % 7).float()
                q = torch.zeros_like(q)
                q[:, :, :2] = 1.0
                weights = weights.abs() + 1
            elif kind == "equal":
                keys = keys[:1].expand_as(keys).clone()
        self.keys = records.pack_mxfp4_group32(keys).to(DEVICE)
        self.q, self.weights = q.bfloat16().to(DEVICE), weights.to(DEVICE)
        if kind == "smooth":
            flat = records.unpack_mxfp4_group32(records.pack_mxfp4_group32(q))
            self.q = flat.bfloat16().to(DEVICE)
        reach = torch.tensor([count, self.k + 1, self.k // 2, 0, count // 2 + 1, 1])
        self.reach = reach.repeat(-(-rows // 6))[:rows].int().to(DEVICE)
        self.base = torch.full((rows,), BASE, dtype=torch.int32, device=DEVICE)
        self.scale = 0.25

    def run(self, at=None, **options):
        at = slice(None) if at is None else at
        q, w, base, reach = (
            t[at].contiguous() for t in (self.q, self.weights, self.base, self.reach)
        )
        return stream_top(
            q, w, self.keys, base, reach, self.k, weight_scale=self.scale, weight_start=1,
            **{"skip": self.k // 2, "plan": plan(), **options},
        )  # fmt: skip

    def scores(self):
        """float64, -inf beyond the reach."""
        w = cache.bf16(cache.bf16(self.weights[:, 1:]).float() * self.scale).double()
        keys = cache.unpack("index", self.keys[BASE:], torch.float64)
        scores = reference.index_scores(self.q.double(), w, keys)
        return reference.mask_unreachable(scores, self.reach.long())


@pytest.mark.parametrize("kind", ["few", "rising", "equal"])
@pytest.mark.parametrize("shape", SHAPES)
def test_exact_scores_give_the_set_of_a_sort(kind, shape):
    case = Case(shape, kind)
    got, want = case.run(), reference.select_top(case.scores(), case.k)
    assert torch.equal(got.entries.long(), want)
    assert torch.equal(got.address.long(), torch.where(want >= 0, want + BASE, -1))
    assert torch.equal(got.counts.long(), (want >= 0).sum(1))


@pytest.mark.parametrize("shape", SHAPES)
def test_random_scores_differ_at_narrow_gaps_only(shape):
    case = Case(shape, "smooth")
    got, scores = case.run(), case.scores()
    want = reference.select_top(scores, case.k)
    for row in range(len(want)):
        ours, theirs = ({int(e) for e in s[row] if e >= 0} for s in (got.entries, want))
        assert len(ours) == len(theirs)
        for left, right in zip(sorted(ours - theirs), sorted(theirs - ours), strict=True):
            gap = (scores[row, left] - scores[row, right]).abs()
            assert gap <= 2.0**-20 * scores[row].abs().nan_to_num(posinf=0).max()


def test_a_set_is_that_of_the_decode_step():
    shape = (5, 2, 32, 150, 16)
    case = Case(shape, "smooth", seed=4)
    scores = step_kernels.index_scores(
        case.q, case.weights, case.keys, case.base, case.reach, capacity=150,
        weight_scale=case.scale, weight_start=1,
    )  # fmt: skip
    want = step_kernels.select_top(scores, case.base, case.reach, 16, skip=8, tile=64)
    got = case.run()
    assert torch.equal(got.entries, want.entries) and torch.equal(got.address, want.address)
    assert torch.equal(got.counts, want.counts)


@pytest.mark.parametrize("kind", ["few", "smooth"])
def test_keys_unpacked_first_give_the_same_set(kind):
    shape = (5, 2, 32, 150, 16)
    case = Case(shape, kind, seed=6)
    want, own = case.run(), case.keys[BASE:].contiguous()
    values = key_values(own, case.q.new_empty(len(own) + 3, shape[2]))
    exact = cache.unpack("index", own)
    assert torch.equal(values.float(), torch.cat((exact[:, ::2], exact[:, 1::2]), 1))
    case.keys = values
    got = case.run()
    assert torch.equal(got.entries, want.entries) and torch.equal(got.address, want.address)
    with pytest.raises(ValueError, match="do not unpack"):
        key_values(own, case.q.new_empty(3, shape[2]))


def test_few_entries_are_taken_whatever_their_scores():
    case = Case((4, 2, 32, 60, 16), "smooth")
    case.weights.fill_(float("nan"))  # of a query: a GPU's maximum with 0 drops it
    case.reach.copy_(torch.tensor([8, 3, 0, 60]))
    got = case.run()
    assert got.counts.tolist() == [8, 3, 0, 0]  # what is NaN is never chosen
    assert got.entries[0].tolist() == [*range(8), *[-1] * 8]


def test_a_set_depends_neither_on_tiles_nor_on_other_rows():
    case = Case((6, 2, 32, 150, 16), "smooth", seed=2)
    full = case.run()
    for rows, entries, turns, held in ((1, 32, 1, 64), (4, 16, 3, 64)):
        other = case.run(plan=IndexPlan(rows=rows, entries=entries, turns=turns, held=held))
        assert torch.equal(other.entries, full.entries)
    for at in ([4], [4, 0, 1]):
        got = case.run(at)
        assert torch.equal(got.entries, full.entries[at])
    case.q[0] = float("nan")
    assert torch.equal(case.run().entries[4], full.entries[4])


def test_work_space_is_used_again():
    case = Case((5, 2, 32, 150, 16), "few", seed=3)
    space = Candidates.of(5, 16, case.q.device, plan())
    rows = -(-5 // plan().rows) * plan().rows
    assert space.keys.shape == (rows, held_places(16, plan()))
    space.keys.fill_(-1), space.entries.fill_(12345)
    want = reference.select_top(case.scores(), 16)
    for _ in range(2):
        assert torch.equal(case.run(held=space).entries.long(), want)


def test_wrong_operands_are_refused():
    case = Case((5, 2, 32, 40, 16), "few")
    with pytest.raises(ValueError, match="do not fit 16 places"):
        case.run(skip=17)
    with pytest.raises(ValueError, match="48 must fit"):
        case.run(plan=IndexPlan(rows=2, entries=16, turns=2, held=32))
    small = Candidates.of(1, 16, case.q.device, plan())
    with pytest.raises(ValueError, match="do not do for 5"):
        case.run(held=small)
