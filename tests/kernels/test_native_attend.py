"""attend.cu against float64 and other rows: the kernel itself on a GPU, its source on a CPU."""

import functools
from unittest import mock

import pytest
import torch

from deepdraft.kernels.native import attend
from tests.kernels.cases import grid
from tests.kernels.emulated import CAN_RUN
from tests.kernels.emulated.sources import Emulated, switched
from tests.kernels.test_attention import Case

pytestmark = pytest.mark.skipif(not CAN_RUN, reason="needs a CUDA device, or g++")


def emulated(device, pairs, heads):
    return Emulated("attend", attend.macros(pairs, heads), 256)


def emulated_combiner(device, pairs, chunks, window):
    return Emulated("combine", attend.combine_macros(pairs, chunks, window), 128)


def switched_on(test):
    """The decorated test with the kernel in place of Triton's."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        with switched(attend, True, emulated, _combiner=emulated_combiner):
            test(*args, **kwargs)

    return run


# (heads, channels, rotary pairs, window, selected)
@pytest.mark.parametrize(
    "shape",
    grid(
        [(3, 512, 32, 64, 0), (20, 512, 32, 20, 70)],
        [(64, 512, 32, 128, 512), (8, 512, 32, 128, 512)],
    ),
)
@switched_on
def test_chunks(shape):
    case = Case(shape)
    got, want = case.run().double(), case.reference()
    # A probability that rounds the other way moves the sum by 2**-9 of one key.
    torch.testing.assert_close(got, want, rtol=2.0**-7, atol=2.0**-6)
    assert (got == want).double().mean() >= 0.99


@switched_on
def test_bits_do_not_depend_on_other_rows():
    case = Case((5, 512, 32, 20, 70), rows=3)
    full = case.run()
    assert torch.equal(case.run([2]), full[[2]])
    case.q[0] = float("nan")
    assert torch.equal(case.run([2, 0])[0], full[2])


@pytest.mark.parametrize(
    "shape", grid([(20, 512, 32, 20, 70)], [(64, 512, 32, 128, 512), (64, 512, 32, 133, 0)])
)
@switched_on
def test_chunks_combined_in_cuda(shape):
    case = Case(shape, rows=3)
    case.window_rows[2], case.main_rows[2] = -1, -1  # no key at all
    got = case.run()
    with mock.patch.object(attend, "_MOST_CHUNKS", 0):
        triton = case.run()
    # The same arithmetic; exponentials may differ in their last bit.
    assert (got == triton).double().mean() > 0.999
    torch.testing.assert_close(got.double(), triton.double(), rtol=2.0**-7, atol=2.0**-6)
    case.q[0] = float("nan")
    assert torch.equal(case.run([2, 1, 0])[:2], got[[2, 1]])


@switched_on
def test_other_shapes_are_left_to_triton():
    assert attend.fits(512, 32, 32768) and not attend.fits(64, 16, 160)
    case = Case((2, 64, 16, 8, 0))
    torch.testing.assert_close(case.run().double(), case.reference(), rtol=2.0**-7, atol=2.0**-6)
