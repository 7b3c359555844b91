"""route.cu against the Triton kernels: the kernel itself on a GPU, its source on a CPU."""

import pytest
import torch

from deepdraft.kernels import layout, moe, routing
from deepdraft.kernels.native import route
from tests.kernels.cases import grid, poisoned, rows_of
from tests.kernels.emulated import CAN_RUN
from tests.kernels.emulated.sources import Emulated, switched
from tests.kernels.interpreter import DEVICE

pytestmark = pytest.mark.skipif(not CAN_RUN, reason="needs a CUDA device, or g++")


def emulated(device, experts, picks):
    return Emulated("route", route.macros(experts, picks), 512)


class Case:
    def __init__(self, shape, rows=8):
        self.experts, self.k, hidden = shape
        self.v = rows_of(rows, hidden, seed=1, spread=0.5)
        generator = torch.Generator().manual_seed(2)
        w = torch.randn(self.experts, hidden, generator=generator) * 2 * hidden**-0.5
        self.w = layout.tile_bf16(w.to(DEVICE))
        self.bias = (torch.randn(self.experts, generator=generator) * 0.1).to(DEVICE)
        self.positions = torch.arange(rows, dtype=torch.int32, device=DEVICE)
        self.positions[2] = -1

    def run(self, on=True, forced=None):
        with switched(route, on, emulated):
            return routing.route_rows(
                self.v, self.w, self.bias, self.positions, k=self.k, scale=1.5, temperature=0.8,
                forced=forced,
            )  # fmt: skip


# (experts, picks, hidden)
SHAPES = grid([(16, 2, 96), (5, 5, 32), (70, 6, 640)], [(384, 6, 5120), (96, 6, 5120)])


@pytest.mark.parametrize("shape", SHAPES)
def test_as_the_triton_kernels(shape):
    case = Case(shape, rows=16)
    for _ in range(2):  # the counters are zero again
        picks, weights, listed = case.run()
        want_picks, want_weights, want = case.run(on=False)
        assert torch.equal(picks, want_picks) and not case.w.arrivals.any()
        torch.testing.assert_close(weights, want_weights, rtol=2e-5, atol=1e-7)
        assert torch.equal(listed.experts, want.experts) and torch.equal(listed.slots, want.slots)


def test_a_list_of_forced_picks():
    case = Case((16, 3, 64))
    generator = torch.Generator().manual_seed(2)
    forced = torch.stack([torch.randperm(16, generator=generator)[:3] for _ in range(8)])
    forced = forced.int().to(DEVICE)
    forced[6:] = -1
    picks, _, listed = case.run(forced=forced)
    want = moe.expert_list(forced)
    assert torch.equal(picks, case.run()[0])
    assert torch.equal(listed.experts, want.experts) and torch.equal(listed.slots, want.slots)


def test_routes_do_not_depend_on_other_rows():
    case = Case((40, 3, 64))
    picks, weights, _ = case.run()
    case.v = poisoned(case.v, 5)
    again, others, listed = case.run()
    assert torch.equal(again[5], picks[5]) and torch.equal(others[5], weights[5])
    assert bool(((again >= -1) & (again < 40)).all()) and int(listed.experts.max()) < 40


def test_equal_scores_go_to_the_lower_expert():
    case = Case((40, 3, 64))
    case.v.zero_()
    case.bias.zero_()
    assert case.run()[0][[0, 1, 3]].tolist() == [[0, 1, 2]] * 3


def test_wrong_rows_are_refused():
    case = Case((16, 3, 64))
    case.v = case.v[:, :32].contiguous()
    with pytest.raises(ValueError, match="no 8 n rows of the router's 64"):
        case.run()
