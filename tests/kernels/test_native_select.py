"""select.cu: the tests of the Triton selections, and scores of every kind."""

import functools

import pytest
import torch

from deepdraft.kernels import index as kernels
from deepdraft.kernels.native import select
from deepdraft.ops import index as reference
from tests.kernels import test_index as of_triton
from tests.kernels.cases import grid
from tests.kernels.emulated import CAN_RUN
from tests.kernels.emulated.sources import Emulated, switched

pytestmark = pytest.mark.skipif(not CAN_RUN, reason="needs a CUDA device, or g++")


def emulated(device, most, gather):
    return Emulated("select", select.macros(most, gather), select.THREADS)


def switched_on(test):
    @functools.wraps(test)
    def run(*args, **kwargs):
        with switched(select, True, emulated):
            test(*args, **kwargs)

    return run


BOTH = grid(
    [
        ("smooth", 200),
        ("ties", 200),
        ("equal", 200),
        ("close", 200),
        ("ties", 5000),
        ("close", 5000),
    ],
    [(kind, n) for kind in of_triton.KINDS for n in (16384, 36864, 49152)],
)


@pytest.mark.parametrize("case", BOTH)
@switched_on
def test_the_best_entries(case):
    kind, count = case
    of_triton.test_the_best_entries(kind, (count, min(512, count // 12), 64))


@pytest.mark.parametrize("kind", of_triton.KINDS)
@switched_on
def test_two_levels(kind):
    of_triton.test_two_levels(kind, (90, 5, 4, 16, 16))


@switched_on
def test_bits_do_not_depend_on_other_rows():
    of_triton.test_bits_do_not_depend_on_other_rows()


@switched_on
def test_long_rows_of_any_scores():
    scores = of_triton.scores_of("smooth", 2, 25_000)
    scores[0, ::7] = float("nan")
    scores[0, 5:9] = torch.inf
    scores[1, 1000:] = -torch.inf
    reach, base = of_triton.ints(25_000, 24_000), of_triton.ints(3, 0)
    got = kernels.select_top(scores, base, reach, 2048, skip=0)
    want = scores.masked_fill(scores.isnan(), -torch.inf)
    want = reference.select_top(reference.mask_unreachable(want, reach.long()), 2048)
    assert torch.equal(got.entries.long(), want) and got.counts.tolist() == [2048, 1000]
