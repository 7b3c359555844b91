"""Index queries, scores and selections against the reference, ties and thresholds included."""

import pytest
import torch

from deepdraft.kernels import index as kernels
from deepdraft.ops import cache
from deepdraft.ops import index as reference
from deepdraft.quant import records
from deepdraft.quant.simulate import fake_mxfp4_group32
from tests.kernels.cases import close_sum, grid, rows_of
from tests.kernels.interpreter import DEVICE

# (heads, channels, pairs, entries)
SHAPES = grid([(2, 32, 16, 150), (5, 96, 8, 70)], [(32, 128, 32, 16384), (4, 128, 32, 5000)])
BASE = 3


def ints(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def operands(shape, rows=3, seed=0):
    heads, channels, pairs, entries = shape
    generator = torch.Generator().manual_seed(seed)
    q = rows_of(rows, heads * channels + 32, seed=seed + 1)
    angle = torch.randn(rows, pairs, generator=generator) * 3
    keys = records.pack_mxfp4_group32(torch.randn(entries + BASE, channels, generator=generator))
    weights = torch.randn(rows, heads + 1, generator=generator).to(DEVICE)
    return q, angle.cos().to(DEVICE), angle.sin().to(DEVICE), keys.to(DEVICE), weights


@pytest.mark.parametrize("shape", SHAPES)
def test_queries_and_scores(shape):
    heads, channels, _, entries = shape
    q, cos, sin, keys, weights = operands(shape)
    queries = kernels.index_queries(q, cos, sin, heads=heads, channels=channels, start=32)
    turned = q[:, 32:].float().view(3, heads, channels)
    want = fake_mxfp4_group32(cache.bf16(cache.rotate_pairs(turned, cos, sin)))
    assert (queries.float() == want).double().mean() >= 0.98
    scale = (channels * heads) ** -0.5
    reach = ints(entries, entries // 3, 0)
    scores = kernels.index_scores(
        queries, weights, keys, ints(BASE, 0, 0), reach,
        capacity=entries, weight_scale=scale, weight_start=1,
    )  # fmt: skip
    w = cache.bf16(cache.bf16(weights[:, 1:]).float() * scale).double()
    for row, base in ((0, BASE), (1, 0)):
        stored = cache.unpack("index", keys[base : base + int(reach[row])], torch.float64)
        each = queries[row : row + 1].double()
        exact = reference.index_scores(each, w[row : row + 1], stored)
        size = reference.index_scores(each.abs(), w[row : row + 1].abs(), stored.abs())
        close_sum(scores[row : row + 1, : int(reach[row])], exact, size, channels + heads)


def entries_by_blocks(scores, reach, block, keep):
    kept = reference.candidate_blocks(scores, reach.long(), block=block, keep=keep)
    return [row.nonzero().flatten().tolist() for row in kept]


def listed(rows):
    return [[int(e) for e in row if e >= 0] for row in rows]


def scores_of(kind, rows, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if kind == "smooth":
        scores = torch.randn(rows, count, generator=generator)
    elif kind == "ties":
        # The best are zeros of both signs, which are equal; the cut lies among them.
        scores = torch.randint(-2, 1, (rows, count), generator=generator) * 0.5
        scores[:, ::2] = scores[:, ::2].abs() * -1.0
    elif kind == "equal":
        scores = torch.full((rows, count), -1.25)
    else:  # values that differ in their lowest bits only
        bits = 0x3F800000 + torch.randint(0, 9, (rows, count), generator=generator).int()
        scores = bits.view(torch.float32)
    return scores.to(DEVICE)


KINDS = ("smooth", "ties", "equal", "close")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "shape", grid([(200, 16, 64)], [(16384, 512, 4096), (300_000, 512, 4096), (5000, 512, 4096)])
)
def test_the_best_entries(kind, shape):
    count, k, tile = shape
    scores = scores_of(kind, 4, count)
    reach = ints(count, k + 1, k // 2, 0)
    base = ints(0, 1000, 5, 0)
    got = kernels.select_top(scores, base, reach, k, skip=k // 2, tile=tile)
    masked = reference.mask_unreachable(scores, reach.long())
    want = reference.select_top(masked, k)
    assert torch.equal(got.entries.long(), want)
    expected = torch.where(want >= 0, want + base.long().unsqueeze(1), -1)
    assert torch.equal(got.address.long(), expected)
    assert got.counts.tolist() == [k, k, k // 2, 0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "shape", grid([(200, 8, 6, 16, 16), (90, 5, 4, 16, 16)], [(100_000, 8, 2048, 512, 4096)])
)
def test_two_levels(kind, shape):
    count, block, keep, k, tile = shape
    scores = scores_of(kind, 3, count, seed=1)
    reach = ints(count, count // 2 + 3, k)
    skip = min(k, block * keep)
    blocks = kernels.candidate_blocks(scores, reach, block=block, keep=keep, skip=skip, tile=tile)
    masked = reference.mask_unreachable(scores, reach.long())
    want = entries_by_blocks(masked, reach, block, keep)
    assert listed(blocks.numbers) == want
    assert blocks.counts.tolist() == [len(row) for row in want]
    # Second level: other scores, restricted to the blocks.
    second = scores_of(kind, 3, count, seed=2)
    kept = reference.candidate_blocks(masked, reach.long(), block=block, keep=keep)
    expected = reference.select_top(
        reference.restrict_to_blocks(
            reference.mask_unreachable(second, reach.long()), kept, block=block
        ),
        k,
    )
    entry = blocks.numbers.clamp(min=0).long().unsqueeze(-1) * block
    entry = (entry + torch.arange(block, device=DEVICE)).flatten(1)
    placed = second.gather(1, entry.clamp(max=count - 1))
    placed = placed.masked_fill(entry >= reach.unsqueeze(1), -torch.inf)
    got = kernels.select_top(placed, ints(0, 0, 0), reach, k, skip=skip, blocks=blocks, tile=tile)
    assert torch.equal(got.entries.long(), expected)


def test_scores_in_blocks_are_those_of_their_entries():
    shape = (2, 32, 16, 100)
    q, cos, sin, keys, weights = operands(shape)
    queries = kernels.index_queries(q, cos, sin, heads=2, channels=32)
    args, reach = (queries, weights, keys, ints(0, BASE, 0)), ints(97, 41, 10)
    full = kernels.index_scores(*args, reach, capacity=100, weight_scale=0.3)
    numbers = torch.tensor([[1, 3, 12], [0, 2, 5], [0, 1, -1]], dtype=torch.int32, device=DEVICE)
    blocks = kernels.Blocks(numbers, ints(3, 3, 2), 8)
    got = kernels.index_scores(*args, reach, capacity=24, weight_scale=0.3, blocks=blocks, skip=12)
    for row in (0, 1):  # row 2 is skipped
        entry = (numbers[row, :, None] * 8 + torch.arange(8, device=DEVICE)).flatten()
        alive = entry < reach[row]
        assert torch.equal(got[row][alive], full[row][entry[alive].long()])
        assert bool((got[row][~alive] == -torch.inf).all())


def test_bits_do_not_depend_on_other_rows():
    shape = (2, 32, 16, 70)
    q, cos, sin, keys, weights = operands(shape)
    reach = ints(70, 33, 70)

    def run(at):
        queries = kernels.index_queries(q[at], cos[at], sin[at], heads=2, channels=32)
        scores = kernels.index_scores(
            queries, weights[at], keys, ints(0, 2, 1)[at], reach[at],
            capacity=70, weight_scale=0.3,
        )  # fmt: skip
        found = kernels.select_top(scores, ints(0, 2, 1)[at], reach[at], 16, skip=0, tile=64)
        return scores[-1], found.entries[-1]

    full = run([0, 1, 2])
    assert all(torch.equal(g, f) for g, f in zip(run([2]), full, strict=True))
    q[0] = float("nan")
    assert all(torch.equal(g, f) for g, f in zip(run([0, 2]), full, strict=True))


def test_impossible_thresholds_are_refused():
    scores, reach = torch.zeros(1, 64, device=DEVICE), ints(64)
    with pytest.raises(ValueError, match="do not fit 8 places"):
        kernels.select_top(scores, reach, reach, 8, skip=9)
    with pytest.raises(ValueError, match="do not hold"):
        kernels.candidate_blocks(scores, reach, block=8, keep=2, skip=17)


def test_scores_do_not_depend_on_the_rows_beside():
    """Rows of one sequence, of others, and rows that do not count, in one program and several."""
    shape = (5, 96, 8, 300)
    q, cos, sin, keys, weights = operands(shape, rows=7)
    queries = kernels.index_queries(q, cos, sin, heads=5, channels=96, start=32)
    base, reach = ints(BASE, BASE, 0, BASE, 1, 0, 0), ints(290, 300, 0, 17, 140, 129, 300)

    def run(at):
        picked = (t[at].contiguous() for t in (queries, weights))
        return kernels.index_scores(
            *picked, keys, base[at], reach[at], capacity=300, weight_scale=0.05, weight_start=1
        )

    full = run(list(range(7)))
    for at in ([3], [6, 1, 0], [2, 5, 4, 3, 1]):
        got = run(at)
        for i, row in enumerate(at):
            n = int(reach[row])
            assert torch.equal(got[i, :n], full[row, :n]), (at, row)
