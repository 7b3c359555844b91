"""boundary.cu against the Triton kernel: on a GPU as it runs there, on a CPU its source."""

import pytest
import torch

from deepdraft.kernels import mhc
from deepdraft.kernels.native import boundary
from deepdraft.ops import gemm
from tests.kernels.cases import grid, poisoned, rows_of
from tests.kernels.emulated import CAN_RUN
from tests.kernels.emulated.sources import Emulated, switched
from tests.kernels.interpreter import DEVICE

pytestmark = pytest.mark.skipif(not CAN_RUN, reason="needs a CUDA device, or g++")
EPS = 1e-6
CLUSTER = boundary.CLUSTER if DEVICE == "cuda" else 2


def emulated(device, made, threads):
    return Emulated("boundary", made, threads)


def operands(streams, hidden, picks, rows=8):
    x = rows_of(rows * streams, hidden, seed=1).view(rows, streams, hidden)
    coef = torch.rand(rows, (2 + streams) * streams, generator=torch.Generator().manual_seed(2))
    norm = torch.rand(hidden, generator=torch.Generator().manual_seed(3)) + 0.5
    shared = rows_of(rows, hidden, seed=5) if picks else None
    y = rows_of(rows * max(1, picks), hidden, seed=4)
    return {
        "x": x, "norm": norm.to(DEVICE), "y": y.view(rows, picks, hidden) if picks else y,
        "shared": shared, "coef": coef.to(DEVICE),
    }  # fmt: skip


def run(given, on=True):
    with switched(boundary, on, emulated, CLUSTER=CLUSTER):
        out, u, rows = mhc.boundary(**given, norm_eps=EPS)
    return out, u, rows.codes, rows.scales.t()


# (streams, hidden, picks)
@pytest.mark.parametrize(
    "shape", grid([(4, 128, 2), (2, 256, 0), (4, 2048, 6)], [(4, 5120, 6), (4, 5120, 0)])
)
def test_as_the_triton_kernel(shape):
    given = operands(*shape)
    out, u, codes, scales = run(given)
    want, want_u, _, _ = run(given, False)
    # Products and sums may be fused otherwise.
    same = (out == want).double().mean()
    assert same >= 0.999, f"{same:.6f} of the streams are equal"
    assert (u == want_u).double().mean() >= 0.99
    torch.testing.assert_close(u.double(), want_u.double(), rtol=2.0**-6, atol=2.0**-7)
    rows = gemm.quantize_rows(u)
    assert torch.equal(codes, rows.codes) and torch.equal(scales.t(), rows.scales)


def test_bits_do_not_depend_on_other_rows():
    given = operands(4, 256, 2)
    full = run(given)
    others = {k: poisoned(v, 5) if k in ("x", "y", "shared") else v for k, v in given.items()}
    got = run(others)
    assert all(torch.equal(g[5], f[5]) for g, f in zip(got, full, strict=True))


@pytest.mark.parametrize("picks", [0, 2])
def test_the_streams_alone(picks):
    given = operands(4, 128, picks)
    want = run(given)[0]
    with switched(boundary, True, emulated, CLUSTER=CLUSTER):
        out, *none = mhc.boundary(**given | {"norm": None})
    assert torch.equal(out, want) and none == [None, None]


def test_zero_rows_have_the_least_scale():
    given = operands(4, 256, 2)
    for name in ("x", "y", "shared"):
        given[name].zero_()
    _, u, codes, scales = run(given)
    assert not u.any() and not codes.any()
    assert torch.equal(scales.t(), gemm.quantize_rows(u).scales)


def test_other_shapes_are_left_to_triton():
    assert boundary.fits(4096) and not boundary.fits(4096 + 16)
