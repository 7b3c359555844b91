"""Cache writes: the bytes of every record format against the reference."""

import pytest
import torch

from deepdraft.kernels import cache as kernels
from deepdraft.ops import cache as reference
from tests.kernels.cases import grid, poisoned, rows_of
from tests.kernels.interpreter import DEVICE

EPS = 1e-20
# (kind, channels, rotary pairs)
SHAPES = grid(
    [("window", 64, 16), ("main", 64, 16), ("index", 32, 16), ("main", 96, 8), ("window", 160, 80)],
    [("window", 512, 32), ("main", 512, 32), ("index", 128, 32)],
)


def tables(rows, pairs, seed=0):
    generator = torch.Generator().manual_seed(seed)
    angle = torch.randn(rows, pairs, generator=generator) * 3
    return angle.cos().to(DEVICE), angle.sin().to(DEVICE)


def norm_weight(channels):
    generator = torch.Generator().manual_seed(9)
    return (torch.rand(channels, generator=generator) * 2 - 0.5).to(DEVICE)


def empty_cache(kind, channels, entries=12):
    return torch.full((entries, kernels.record_bytes(kind, channels)), 7, dtype=torch.uint8).to(
        DEVICE
    )


def at(*rows):
    return torch.tensor(rows, dtype=torch.int32, device=DEVICE)


def check_records(kind, got, want):
    """Bytes equal but for a rotation or norm that rounded the other way."""
    equal = (got == want).double().mean()
    assert equal >= 0.97, f"{equal:.4f} of the bytes are equal"
    values, exact = (reference.unpack(kind, r, torch.float64) for r in (got, want))
    group = kernels.GROUPS[kind]
    scale = exact.unflatten(-1, (-1, group)).abs().amax(-1).repeat_interleave(group, -1)
    step = 2.0**-3 if kind == "window" else 0.34
    assert bool(((values - exact).abs() <= step * scale + 1e-30).all())


@pytest.mark.parametrize("shape", SHAPES)
def test_records(shape):
    kind, channels, pairs = shape
    x = rows_of(4, channels + 32, seed=channels)
    x[1] *= 1e-4
    cos, sin = tables(4, pairs)
    norm, stored = norm_weight(channels), empty_cache(kind, channels)
    latent = kernels.write_entries(
        kind, x, norm, cos, sin, at(5, -1, 0, 11), stored, norm_eps=EPS, latent=True
    )
    want, z = reference.entry(kind, x[:, :channels].float(), norm, cos, sin, norm_eps=EPS)
    torch.testing.assert_close(latent.float(), z, rtol=2.0**-7, atol=1e-30)
    assert (latent.float() == z).double().mean() >= 0.98
    check_records(kind, stored[[5, 0, 11]], want[[0, 2, 3]])
    untouched = [e for e in range(12) if e not in (5, 0, 11)]
    assert bool((stored[untouched] == 7).all())


@pytest.mark.parametrize("kind", ["window", "main", "index"])
def test_exact_values_give_equal_bytes(kind):
    # Ones of both signs have a mean square of exactly one, and nothing turns: the record is that
    # of the weights, which reach from the smallest scale to the largest.
    size = torch.exp2(torch.arange(64) // 16 * 6 - 11.0)
    norm = (torch.randn(64, generator=torch.Generator().manual_seed(1)) * size).bfloat16().float()
    norm[:16] = 0
    x = torch.ones(2, 64)
    x[1, ::2] = -1
    still = torch.ones(2, 16), torch.zeros(2, 16)
    stored = empty_cache(kind, 64)
    args = [t.to(DEVICE) for t in (x.bfloat16(), norm, *still)]
    kernels.write_entries(kind, *args, at(1, 2), stored, norm_eps=0.0)
    want, _ = reference.entry(kind, x, norm, *still, norm_eps=0.0)
    values = reference.unpack(kind, stored[1:3].cpu())
    assert torch.equal(values, reference.unpack(kind, want))
    assert torch.equal(stored[1:3].cpu(), want)


def test_pairs_are_pooled():
    channels = 64
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4, 2 * channels, generator=generator).to(DEVICE)
    ring = torch.randn(6, 2 * channels, generator=generator).to(DEVICE)
    old = ring.clone()
    cos, sin = tables(4, 16)
    norm, stored = norm_weight(channels), empty_cache("main", channels)
    # Rows 1 and 2 pool with the row before them, 0 with ring row 4, 3 with ring row 0.
    kernels.write_entries(
        "main", x, norm, cos, sin, at(3, 4, 5, 6), stored, norm_eps=EPS,
        pending=(ring, at(-5, 0, 1, -1), at(2, 3, -1, 5)),
    )  # fmt: skip
    before = torch.stack((old[4], x[0], x[1], old[0]))
    pooled = reference.pool_pair(before, x)
    want, _ = reference.entry("main", pooled, norm, cos, sin, norm_eps=EPS)
    check_records("main", stored[3:7], want)
    assert torch.equal(ring[[2, 3, 5]], x[[0, 1, 3]])
    assert torch.equal(ring[[0, 1, 4]], old[[0, 1, 4]])


def test_bits_do_not_depend_on_other_rows():
    x, norm = rows_of(5, 64, seed=2), norm_weight(64)
    cos, sin = tables(5, 16)

    def run(rows):
        stored = empty_cache("window", 64)
        dest = torch.arange(len(rows), dtype=torch.int32, device=DEVICE)
        kernels.write_entries(
            "window", x[rows], norm, cos[rows], sin[rows], dest, stored, norm_eps=EPS
        )
        return stored[: len(rows)]

    full = run([0, 1, 2, 3, 4])
    assert torch.equal(run([3]), full[[3]])
    assert torch.equal(run([4, 1]), full[[4, 1]])
    x = poisoned(x, 3)
    assert torch.equal(run([0, 1, 2, 3, 4])[3], full[3])


def test_wrong_record_sizes_are_refused():
    x, norm = rows_of(2, 64, seed=0), norm_weight(64)
    cos, sin = tables(2, 16)
    with pytest.raises(ValueError, match="records of 66 bytes"):
        kernels.write_entries(
            "window", x, norm, cos, sin, at(0, 1), empty_cache("main", 64), norm_eps=EPS
        )
