"""Sparse attention over packed records against the float64 reference."""

import pytest
import torch

from deepdraft.kernels import attention as kernels
from deepdraft.ops import cache
from deepdraft.ops.attention import chunked_sink_attention
from deepdraft.quant import records
from tests.kernels.cases import grid, rows_of
from tests.kernels.interpreter import DEVICE

# (heads, channels, rotary pairs, window, selected)
SHAPES = grid(
    [(2, 64, 16, 64, 64), (4, 32, 8, 20, 0), (3, 96, 16, 8, 70)],
    [
        (64, 512, 32, 128, 512),
        (32, 512, 32, 128, 512),
        (8, 512, 32, 128, 512),
        (64, 512, 32, 133, 0),
    ],
)


class Case:
    def __init__(self, shape, rows=2, seed=0):
        heads, channels, pairs, window, selected = shape
        generator = torch.Generator().manual_seed(seed)
        self.q = rows_of(rows, heads * channels + 32, seed=seed + 1, spread=0.5)
        angle = torch.randn(rows, pairs, generator=generator) * 3
        self.cos, self.sin = angle.cos().to(DEVICE), angle.sin().to(DEVICE)
        entries = torch.randn(2, window + selected + 9, channels, generator=generator) * 2
        self.window = records.pack_fp8_group32(entries[0]).to(DEVICE)
        self.main = records.pack_fp4_e4m3_group16(entries[1]).to(DEVICE)

        def places(count):
            order = torch.randperm(len(self.window), generator=generator)[:count].sort().values
            return torch.stack([order + r for r in range(rows)]).int() % len(self.window)

        self.window_rows, self.main_rows = places(window), places(selected)
        self.window_rows[0, : window // 2] = -1  # an early position
        if selected:
            self.main_rows[1, selected // 3 :] = -1
            if selected > 64:
                self.main_rows[0] = -1  # chunks without any key
        self.window_rows, self.main_rows = (
            t.to(DEVICE).contiguous() for t in (self.window_rows, self.main_rows)
        )
        self.sink = torch.randn(heads, generator=generator).to(DEVICE)
        self.shape, self.scale = shape, channels**-0.5

    def run(self, at=None):
        at = slice(None) if at is None else at
        main = {}
        if self.shape[4]:
            main = {"main": self.main, "main_rows": self.main_rows[at].contiguous()}
        args = (t[at].contiguous() for t in (self.q, self.cos, self.sin))
        rows = self.window_rows[at].contiguous()
        return kernels.sparse_attention(
            *args, self.window, rows, self.sink, scale=self.scale, **main
        )

    def reference(self):
        heads, channels, *_ = self.shape
        chunk = kernels.CHUNK_KEYS
        parts = [("window", self.window, self.window_rows)]
        if self.shape[4]:
            parts.append(("main", self.main, self.main_rows))
        keys, valid = [], []
        for kind, stored, rows in parts:
            rows = torch.nn.functional.pad(rows, (0, -rows.shape[1] % chunk), value=-1).long()
            valid.append(rows >= 0)
            gathered = stored[rows.clamp(min=0)]
            keys.append(cache.unpack(kind, gathered, torch.float64))
        q = self.q[:, : heads * channels].double().view(-1, heads, channels)
        cos, sin = self.cos.double(), self.sin.double()
        q = cache.bf16(cache.rotate_pairs(q, cos, sin))
        o = chunked_sink_attention(
            q, torch.cat(keys, 1), torch.cat(valid, 1), self.sink.double(), self.scale, chunk=chunk
        )
        return cache.bf16(cache.rotate_pairs(cache.bf16(o), cos, -sin))


@pytest.mark.parametrize("shape", SHAPES)
def test_attention(shape):
    case = Case(shape)
    got, want = case.run().double(), case.reference()
    # A probability that rounds the other way moves the sum by 2**-9 of one key.
    torch.testing.assert_close(got, want, rtol=2.0**-7, atol=2.0**-6)
    assert (got == want).double().mean() >= 0.9


def test_a_row_without_keys_is_zero():
    case = Case((2, 64, 16, 8, 0))
    case.window_rows.fill_(-1)
    assert not case.run().any()


def test_the_sink_takes_its_share():
    case = Case((2, 32, 8, 8, 0))
    without = case.run().double()
    case.sink += 50.0
    assert bool((case.run().double().abs() < 1e-6 + without.abs() * 1e-6).all())


def test_bits_do_not_depend_on_other_rows():
    case = Case((2, 64, 16, 20, 70), rows=3)
    full = case.run()
    assert torch.equal(case.run([2]), full[[2]])
    case.q[0] = float("nan")
    assert torch.equal(case.run([2, 0])[0], full[2])


def test_wrong_records_are_refused():
    case = Case((2, 64, 16, 8, 8))
    with pytest.raises(ValueError, match="no main record"):
        kernels.sparse_attention(
            case.q, case.cos, case.sin, case.window, case.window_rows, case.sink,
            scale=1.0, main=case.window, main_rows=case.main_rows,
        )  # fmt: skip
