"""stream_top.cu: the tests of the Triton kernel that select by scores, on shapes that it takes."""

import functools

import pytest
import torch

from deepdraft.kernels import prefill_index
from deepdraft.kernels.native import stream_top
from deepdraft.ops import index as reference
from tests.kernels import test_prefill_index as of_triton
from tests.kernels.cases import grid
from tests.kernels.emulated import CAN_RUN
from tests.kernels.emulated.sources import Emulated, switched
from tests.kernels.interpreter import DEVICE

pytestmark = pytest.mark.skipif(not CAN_RUN, reason="needs a CUDA device, or g++")


def emulated(device):
    return Emulated("stream_top", stream_top.macros(held=320, turns=1), stream_top.THREADS)


def switched_on(test):
    @functools.wraps(test)
    def run(*args, **kwargs):
        with switched(stream_top, True, emulated):
            test(*args, **kwargs)

    return run


# (rows, heads, channels, entries, selected)
SHAPES = grid([(9, 32, 128, 600, 40)], [(64, 32, 128, 40_000, 512), (17, 32, 128, 300_000, 512)])


@pytest.mark.parametrize("kind", ["few", "rising", "equal"])
@pytest.mark.parametrize("shape", SHAPES)
@switched_on
def test_exact_scores_give_the_set_of_a_sort(kind, shape):
    of_triton.test_exact_scores_give_the_set_of_a_sort(kind, shape)


@pytest.mark.parametrize("shape", SHAPES)
@switched_on
def test_random_scores_differ_at_narrow_gaps_only(shape):
    of_triton.test_random_scores_differ_at_narrow_gaps_only(shape)


@switched_on
def test_a_set_does_not_depend_on_other_rows_and_nan_is_never_chosen():
    case = of_triton.Case((6, 32, 128, 150, 16), "smooth", seed=2)
    full = case.run()
    case.q[0] = float("nan")
    case.weights[2] = float("nan")  # few entries: all are taken
    got = case.run([4, 2, 0, 1])
    assert torch.equal(got.entries[[0, 1, 3]], full.entries[[4, 2, 1]])
    assert got.counts.tolist()[:2] == [16, 8]


@switched_on
def test_only_what_it_is_written_for():
    assert prefill_index.reads_records(torch.device(DEVICE), 32, 128)
    assert not prefill_index.reads_records(torch.device(DEVICE), 16, 128)
    with switched(stream_top, False, emulated):
        assert not prefill_index.reads_records(torch.device(DEVICE), 32, 128)
    case = of_triton.Case((3, 32, 128, 1100, 600), "few")
    want = reference.select_top(case.scores(), 600)  # a longer list than it holds: Triton's kernel
    plan = prefill_index.IndexPlan(rows=2, entries=128, turns=2)
    assert torch.equal(case.run(plan=plan).entries.long(), want)
