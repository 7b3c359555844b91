"""attend_rows.cu: the tests of the Triton kernel, on the shape that it is written for."""

import functools

import pytest
import torch

from deepdraft.kernels import prefill_attention
from deepdraft.kernels.native import attend_rows
from tests.kernels import test_prefill_attention as of_triton
from tests.kernels.cases import grid
from tests.kernels.emulated import CAN_RUN
from tests.kernels.emulated.sources import Emulated, switched
from tests.kernels.interpreter import DEVICE

pytestmark = pytest.mark.skipif(not CAN_RUN, reason="needs a CUDA device, or g++")


def emulated(device):
    return Emulated("attend_rows", attend_rows.macros(), attend_rows.THREADS)


def switched_on(test):
    @functools.wraps(test)
    def run(*args, **kwargs):
        with switched(attend_rows, True, emulated, _blocks=lambda device: 2):
            test(*args, **kwargs)

    return run


# (heads, channels, rotary pairs, window, selected)
SHAPES = grid(
    [(64, 512, 32, 64, 70), (64, 512, 32, 64, 0)], [(64, 512, 32, 128, n) for n in (512, 500, 0)]
)


@pytest.mark.parametrize("shape", SHAPES)
@switched_on
def test_attention(shape):
    case = of_triton.Case(shape)
    lists = case.lists
    case.lists = torch.where(lists >= 0, lists.clamp(min=2), -1)
    counts = (lists >= 0).sum(1, dtype=torch.int32) if shape[4] else None
    options = {"unpacked_from": 2, "counts": counts} if shape[4] else {}
    got, want = case.run(**options), case.reference()
    torch.testing.assert_close(got.double().cpu(), want, rtol=2.0**-7, atol=2.0**-6)
    assert (got.double().cpu() == want).double().mean() >= 0.9
    # Rows alone, and without the counts.
    options.pop("counts", None)
    for row in range(3):
        alone = case.run(slice(row, row + 1), row, **options)
        assert torch.equal(alone[0], got[row])


@switched_on
def test_empty_places_may_hold_anything():
    case = of_triton.Case((64, 512, 32, 64, 70))
    case.lists = torch.where(case.lists >= 0, case.lists.clamp(min=2), -1)
    want = case.run(unpacked_from=2)[1]
    case.window[:22] = 0x7F  # NaN, before what row 1 sees and where row 0 sees nothing
    assert torch.equal(case.run(unpacked_from=2)[1], want)


def test_only_what_it_is_written_for():
    device, plan = torch.device(DEVICE), prefill_attention.PLAN
    with switched(attend_rows, True, emulated):
        assert prefill_attention.takes_values(device, 64, 512, 32, 128, plan)
        for shape in (
            (32, 512, 32, 128),
            (64, 256, 32, 128),
            (64, 512, 16, 128),
            (64, 512, 32, 20),
        ):
            assert not prefill_attention.takes_values(device, *shape, plan)
    with switched(attend_rows, False, emulated):
        assert not prefill_attention.takes_values(device, 64, 512, 32, 128, plan)
