"""scores.cu and the two levels of select.cu behind it: rows of one and of several sequences."""

import contextlib
import functools
from unittest import mock

import pytest
import torch

from deepdraft.kernels import index as kernels
from deepdraft.kernels.native import scores, select
from deepdraft.ops import cache
from deepdraft.ops import index as reference
from deepdraft.quant import records
from tests.kernels import test_index as of_triton
from tests.kernels import test_native_select as of_select
from tests.kernels.cases import close_sum, grid
from tests.kernels.emulated import CAN_RUN
from tests.kernels.emulated.sources import Emulated, switched
from tests.kernels.interpreter import DEVICE

pytestmark = pytest.mark.skipif(not CAN_RUN, reason="needs a CUDA device, or g++")

ints = of_triton.ints
MOST = 64
"""Scores of a row that one look selects from, in these tests."""


def emulated(device):
    return Emulated("scores", scores.macros(), scores.THREADS)


@contextlib.contextmanager
def both_levels(most=MOST):
    with (
        switched(scores, True, emulated, _blocks=lambda device: 2),
        switched(select, True, of_select.emulated),
        mock.patch.object(select, "MOST", most),
    ):
        yield


def in_two_levels(test):
    @functools.wraps(test)
    def run(*args, **kwargs):
        with both_levels():
            test(*args, **kwargs)

    return run


def operands(entries, rows, dtype=torch.float32):
    generator = torch.Generator().manual_seed(entries)
    keys = records.pack_mxfp4_group32(torch.randn(entries + 3, 128, generator=generator))
    q = records.pack_mxfp4_group32(torch.randn(rows, 32, 128, generator=generator))
    weights = torch.randn(rows, 33, generator=generator).to(DEVICE, dtype)
    return records.unpack_mxfp4_group32(q).bfloat16().to(DEVICE), weights, keys.to(DEVICE)


OPTIONS = {"weight_scale": 0.02, "weight_start": 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entries", grid([130], [16384, 5000]))
@in_two_levels
def test_scores_and_the_best_of_every_32(entries, dtype):
    queries, weights, keys = operands(entries, 5, dtype=dtype)
    keys[::7, 64:] = torch.tensor([100, 131, 127, 120], device=DEVICE)  # scales far apart
    base, reach = ints(3, 3, 0, 3, 0), ints(entries, entries // 3, 0, 33, entries - 1)
    best = torch.full((5, -(-entries // 32)), 9e9, device=DEVICE)
    got = kernels.index_scores(
        queries, weights, keys, base, reach, capacity=entries, best=best, skip=2, **OPTIONS
    )
    w = cache.bf16(cache.bf16(weights[:, 1:]).float() * 0.02).double()
    for row, n in enumerate(reach.tolist()):
        stored = cache.unpack("index", keys[base[row] : base[row] + n], torch.float64)
        each = queries[row : row + 1].double()
        exact = reference.index_scores(each, w[row : row + 1], stored)
        size = reference.index_scores(each.abs(), w[row : row + 1].abs(), stored.abs())
        close_sum(got[row : row + 1, :n], exact, size, 160)
        want = torch.nn.functional.pad(got[row, :n], (0, -n % 32), value=-torch.inf)
        assert torch.equal(best[row, : -(-n // 32)], want.view(-1, 32).amax(1))
        assert bool((best[row, -(-n // 32) :] == 9e9).all())


@in_two_levels
def test_bits_do_not_depend_on_other_rows():
    queries, weights, keys = operands(140, 9)
    base, reach = ints(3, 3, 0, 3, 1, 0, 0, 3, 3), ints(139, 140, 0, 17, 40, 129, 140, 0, 135)

    def run(at):
        picked = (t[at].contiguous() for t in (queries, weights))
        return kernels.index_scores(*picked, keys, base[at], reach[at], capacity=140, **OPTIONS)

    full = run(list(range(9)))
    queries[7] = float("nan")  # does not count
    for at in ([3], [6, 1, 0], [2, 5, 4, 3, 1], [8, 7, 6, 5, 4, 3, 1, 0, 2]):
        got = run(at)
        for i, row in enumerate(at):
            n = int(reach[row])
            assert torch.equal(got[i, :n], full[row, :n]), (at, row)


def scored(kind, rows, count, reach):
    """Scores of a kind, -inf in places that nobody wrote, and the best of every 32."""
    values = of_triton.scores_of(kind, rows, count, seed=3)
    seen = reference.mask_unreachable(values, reach.long())
    best = torch.nn.functional.pad(seen, (0, -count % 32), value=-torch.inf)
    return torch.where(seen > -torch.inf, seen, 9e9), seen, best.view(rows, -1, 32).amax(-1)


CASES = grid([(330, 5, 8, 6)], [(300_000, 512, 8, 2048), (1 << 20, 512, 8, 2048)])


@pytest.mark.parametrize("kind", of_triton.KINDS)
@pytest.mark.parametrize("case", CASES)
def test_two_levels_select_what_one_would(case, kind):
    count, k, block, keep = case
    reach, base = ints(count, count // 2 + 3, k + 1, k, 0), ints(0, 7, 0, 1, 0)
    values, seen, best = scored(kind, 5, count, reach)
    with both_levels(most=MOST if DEVICE == "cpu" else select.MOST):
        got = kernels.select_top(values, base, reach, k, skip=k, best=best)
        blocks = kernels.candidate_blocks(values, reach, block=block, keep=keep, skip=k, best=best)
    want = reference.select_top(seen, k)
    assert torch.equal(got.entries.long(), want)
    at = torch.where(want >= 0, want + base.long().unsqueeze(1), -1)
    assert torch.equal(got.address.long(), at)
    assert got.counts.tolist() == [min(int(r), k) for r in reach]
    kept = of_triton.entries_by_blocks(seen, reach, block, keep)
    assert of_triton.listed(blocks.numbers) == kept
    assert blocks.counts.tolist() == [len(row) for row in kept]


@in_two_levels
def test_room_for_the_best_is_made_for_long_rows_only():
    device = torch.device(DEVICE)
    assert kernels.best_space(3, MOST, 32, 128, device) is None
    assert kernels.best_space(3, 32 * MOST + 1, 32, 128, device) is None
    assert kernels.best_space(3, 100, 16, 128, device) is None
    assert kernels.best_space(3, 100, 32, 128, device).shape == (3, 4)
    queries, weights, keys = operands(40, 2)
    numbers = torch.zeros(2, 1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="with all scores of a row only"):
        kernels.index_scores(
            queries, weights, keys, ints(0, 0), ints(40, 40), capacity=40, **OPTIONS,
            blocks=kernels.Blocks(numbers, ints(1, 1), 8), best=weights,
        )  # fmt: skip
