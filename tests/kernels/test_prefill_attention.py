"""Sparse attention of many rows against the float64 reference; bits against other rows."""

import pytest
import torch

from deepdraft.kernels import prefill_attention as kernels
from deepdraft.ops import cache
from deepdraft.ops.attention import sink_attention
from deepdraft.ops.prefill import running_sink_attention
from deepdraft.quant import records
from tests.kernels.cases import grid, rows_of
from tests.kernels.interpreter import DEVICE

# (heads, channels, rotary pairs, window, selected)
SHAPES = grid(
    [(2, 64, 16, 20, 70), (4, 32, 8, 8, 0), (3, 96, 16, 70, 12)],
    [(64, 512, 32, 128, 512), (8, 512, 32, 128, 512), (64, 512, 32, 128, 0)],
)


class Case:
    def __init__(self, shape, rows=3, seed=0):
        heads, channels, pairs, window, selected = self.shape = shape
        generator = torch.Generator().manual_seed(seed)
        self.q = rows_of(rows, heads * channels + 32, seed=seed + 1, spread=0.5)
        angle = torch.randn(rows, pairs, generator=generator) * 3
        self.cos, self.sin = angle.cos().to(DEVICE), angle.sin().to(DEVICE)
        entries = torch.randn(2, window + selected + 9 + rows, channels, generator=generator) * 2
        self.window = records.pack_fp8_group32(entries[0, : rows + window - 1]).to(DEVICE)
        self.main = records.pack_fp4_e4m3_group16(entries[1]).to(DEVICE)
        self.first = torch.tensor([window - 1, window // 3, 0, 0, 0][:rows], dtype=torch.int32)
        self.first = self.first.to(DEVICE)
        some = [torch.randperm(len(entries[1]), generator=generator) for _ in range(rows)]
        self.lists = torch.stack([order[:selected].sort().values for order in some]).int()
        if selected:
            self.lists[1, selected // 3 :] = -1
            self.lists[0] = -1
        self.lists = self.lists.to(DEVICE)
        self.sink = torch.randn(heads, generator=generator).to(DEVICE)
        self.scale = channels**-0.5

    def run(self, rows=slice(None), first_row=0, unpacked_from=None, **main):
        if self.shape[4]:
            main |= {"main": self.main, "main_rows": self.lists[rows].contiguous()}
        if unpacked_from is not None:
            records = self.main[unpacked_from:].contiguous()
            space = self.q.new_full((len(records) + 3, self.shape[1]), 7.0)
            main["main"] = kernels.main_values(records, space)
            main["first_main"] = unpacked_from
        q, cos, sin, first = (
            t[rows].contiguous() for t in (self.q, self.cos, self.sin, self.first)
        )
        keys = kernels.window_values(self.window[first_row:].contiguous())
        return kernels.attend_rows(
            q, cos, sin, keys, first, self.sink, places=self.shape[3], scale=self.scale, **main
        )

    def keys(self, dtype=torch.float64):
        """All places of every row, each part filled up to whole turns, and which there are."""
        window, rows = self.shape[3], len(self.q)
        at = torch.arange(rows)[:, None] + torch.arange(window)
        own = cache.unpack("window", self.window, dtype)[at]
        there = torch.arange(window) >= self.first[:, None].cpu()
        parts = [(own.cpu(), there)]
        if self.shape[4]:
            lists = self.lists.long().cpu()
            gathered = cache.unpack("main", self.main.cpu()[lists.clamp(min=0)], dtype)
            parts.append((gathered, lists >= 0))
        keys, valid = [], []
        for values, mask in parts:
            missing = -values.shape[1] % kernels.PLAN.keys
            keys.append(torch.nn.functional.pad(values, (0, 0, 0, missing)))
            valid.append(torch.nn.functional.pad(mask, (0, missing)))
        return torch.cat(keys, 1), torch.cat(valid, 1)

    def turned(self):
        heads, channels, *_ = self.shape
        q = self.q[:, : heads * channels].double().cpu().view(-1, heads, channels)
        return cache.bf16(cache.rotate_pairs(q, self.cos.double().cpu(), self.sin.double().cpu()))

    def reference(self):
        keys, valid = self.keys()
        sink = self.sink.double().cpu()
        o = running_sink_attention(
            self.turned(), keys, valid, sink, self.scale, turn=kernels.PLAN.keys
        )
        cos, sin = self.cos.double().cpu(), self.sin.double().cpu()
        return cache.bf16(cache.rotate_pairs(cache.bf16(o), cos, -sin))


@pytest.mark.parametrize("shape", SHAPES)
def test_attention(shape):
    case = Case(shape)
    got, want = case.run().double().cpu(), case.reference()
    # A probability that rounds the other way moves the sum by 2**-9 of one key.
    torch.testing.assert_close(got, want, rtol=2.0**-7, atol=2.0**-6)
    assert (got == want).double().mean() >= 0.9


def test_the_reference_is_attention():
    """Up to the rounding of probabilities, against one softmax over all keys and the sink."""
    case = Case((2, 64, 16, 20, 70))
    keys, valid = case.keys()
    sink = case.sink.double().cpu()
    o = running_sink_attention(case.turned(), keys, valid, sink, case.scale, turn=kernels.PLAN.keys)
    zero = torch.zeros(len(keys), 1, 64, dtype=torch.float64)
    bias = torch.where(valid, 0.0, -torch.inf).double().unsqueeze(1).expand(-1, 2, -1)
    sink = sink.view(1, 2, 1).expand(len(keys), -1, -1)
    whole = sink_attention(
        case.turned(), torch.cat((keys, zero), 1), torch.cat((bias, sink), 2), case.scale
    )
    torch.testing.assert_close(o, whole, rtol=2.0**-7, atol=2.0**-7)


@pytest.mark.parametrize("shape", [(2, 64, 16, 20, 70), (3, 96, 16, 70, 12)])
def test_entries_unpacked_first_give_the_same_bits(shape):
    case = Case(shape)
    case.lists = torch.where(case.lists >= 0, case.lists.clamp(min=2), -1)
    assert torch.equal(case.run(unpacked_from=2), case.run())


def test_turns_without_an_entry_change_no_bit():
    case = Case((2, 64, 16, 20, 70))
    counts = (case.lists >= 0).sum(1, dtype=torch.int32)
    assert counts.tolist() == [0, 23, 70]
    assert torch.equal(case.run(counts=counts), case.run())


def test_main_values_are_exact():
    case = Case((3, 96, 16, 8, 12))
    got = kernels.main_values(case.main, case.q.new_empty(len(case.main), 96))
    want = cache.unpack("main", case.main)
    assert torch.equal(torch.cat((want[:, ::2], want[:, 1::2]), 1), got.float())
    with pytest.raises(ValueError, match="do not unpack"):
        kernels.main_values(case.main, case.q.new_empty(3, 96))


def test_window_values_are_exact():
    case = Case((2, 96, 16, 8, 0))
    got = kernels.window_values(case.window)
    want = cache.unpack("window", case.window)
    assert torch.equal(torch.cat((want[:, ::2], want[:, 1::2]), 1), got.float())


def test_a_row_without_keys_is_zero():
    case = Case((2, 64, 16, 8, 0), rows=2)
    case.first.fill_(8)
    assert not case.run().any()


def test_bits_do_not_depend_on_the_chunk_or_other_rows():
    case = Case((2, 64, 16, 20, 70))
    full = case.run()
    # The same rows where a chunk begins with the second one.
    assert torch.equal(case.run(slice(1, 3), 1), full[1:])
    case.q[0] = float("nan")
    case.lists[0] = 0
    assert torch.equal(case.run()[1:], full[1:])


def test_wrong_operands_are_refused():
    case = Case((2, 64, 16, 8, 8))
    keys = kernels.window_values(case.window)
    args = case.q, case.cos, case.sin, keys, case.first, case.sink
    with pytest.raises(ValueError, match="no main record"):
        kernels.attend_rows(*args, places=8, scale=1.0, main=case.window, main_rows=case.lists)
    with pytest.raises(ValueError, match="one at least is read"):
        none = keys[:0]
        kernels.attend_rows(*args, places=8, scale=1.0, main=none, main_rows=case.lists)
    with pytest.raises(ValueError, match="do not do for 3 rows"):
        kernels.attend_rows(*args, places=9, scale=1.0)
    with pytest.raises(ValueError, match="no window record"):
        kernels.window_values(case.main)
