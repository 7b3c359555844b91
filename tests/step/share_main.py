"""Ranks as processes exchange a chunk's rows many times, each as fast or slow as chance has it:
`python share_main.py DIR`. DIR holds the file `memory`, which all map."""

import random
import sys
import time
from pathlib import Path

import numpy as np
import torch

import tests.kernels.interpreter  # noqa: F401
from deepdraft.kernels.prefill_share import sum_of_picks
from deepdraft.models.v41_prefill_chunk import Chunk
from deepdraft.models.v41_prefill_share import Regions, RowShare, part_of, rows_each
from deepdraft.parallel.group import ProcessGroup
from deepdraft.parallel.peers import OneProcessMemory
from deepdraft.parallel.rank import Rank, run_rank, this_rank
from tests.kernels.test_prefill_share import Part, args

ROWS, LAYERS = 40, 6
CHUNKS = ((0, 40), (40, 21), (61, 3))


def values(seed: int, *shape: int) -> torch.Tensor:
    """What every rank can tell that another one sends."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def codes(seed: int, like: torch.Tensor, rows: int) -> torch.Tensor:
    """The same of bytes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (rows, like.shape[1]), dtype=torch.uint8, generator=generator)


class Layer:
    """The exchanges of one layer on one rank."""

    def __init__(self, share: RowShare, chunk: Part, seed: int, dice: random.Random) -> None:
        self.share, self.chunk, self.seed, self.dice = share, chunk, seed, dice
        begin = chunk.first - chunk.offset
        self.own = part_of(begin, chunk.total, share.size, share.rank)
        self.begin, self.count = begin, self.own.stop - self.own.start

    def dawdle(self) -> None:
        time.sleep(self.dice.choice((0, 0, 0.001, 0.004)))

    def mine(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's rows of x, in a buffer of its chunk."""
        out = torch.full((self.chunk.rows, *x.shape[1:]), -1).to(x.dtype)
        out[: self.count] = x[self.own]
        return out

    def attention(self, *, tables: bool, entries: bool) -> None:
        share, chunk, seed, total = self.share, self.chunk, self.seed, self.chunk.total
        if tables:
            parts = [values(seed + r, total, 12) for r in range(share.size)]
            found = share.table_values(parts[share.rank], chunk)
            self.dawdle()
            want = torch.cat(parts, 1)[self.own]
            assert torch.equal(found[: self.count, : want.shape[1]], want), "tables"
        region = share.window(0, torch.empty(0))
        want, at = codes(seed, region, 5 + total), slice(5 + self.own.start, 5 + self.own.stop)
        region[:5], region[at] = want[:5], want[at]
        share.fill_window(region, 5, chunk)
        if entries:
            made = (self.begin + total) // 2 - self.begin // 2
            held = []
            for number, name in enumerate(("main", "index")):
                whole = codes(seed + number, share.regions.of(name, share.rank), made)
                ends = (self.begin + n for n in (self.own.start, self.own.stop))
                some = slice(*(end // 2 - self.begin // 2 for end in ends))
                part = torch.zeros_like(whole)
                part[some] = whole[some]
                held.append((whole, part))
            share.fill_entries(held[0][1], held[1][1], chunk, ratio=2)
            assert all(torch.equal(a, b) for a, b in held), "entries"
        self.dawdle()
        assert torch.equal(region[: 5 + total], want), "window"

    def experts(self, hidden: int, picks: int) -> None:
        share, chunk, total = self.share, self.chunk, self.chunk.total
        v, w = values(self.seed, total, hidden), values(self.seed + 1, total, picks).float()
        share.send_inputs(self.mine(v), chunk)
        self.dawdle()
        share.send_picks(self.mine(w.int()), self.mine(w), chunk)
        found = share.routed(v, w, w, chunk)
        self.dawdle()
        for got, want in zip(found, (v, w.int(), w), strict=True):
            assert torch.equal(got[:total], want), "inputs"
        made = [values(self.seed + 2 + r, total, picks, hidden) for r in range(share.size)]
        sums = share.sums(made[share.rank], chunk)
        self.dawdle()
        want = torch.stack([sum_of_picks(y) for y in made], 1)[self.own]
        assert torch.equal(sums[: self.count], want), "sums"


def work(me: Rank) -> None:
    np.seterr(all="ignore")  # integers that wrap are no mistake in a kernel
    group = ProcessGroup(me.rank, me.size, me.store, pulse=me.pulse)
    whole = np.memmap(Path(sys.argv[1]) / "memory", dtype=np.uint8, mode="r+")
    parts = list(torch.from_numpy(whole).view(me.size, -1))
    share = RowShare(group, Regions(args(), ROWS, OneProcessMemory(parts, group)))
    dice = random.Random(me.rank)
    with me.pulse.step():
        for first, total in CHUNKS:
            own = part_of(first, total, me.size, me.rank)
            rows = -(-max(own.stop - own.start, rows_each(first, total, me.size)) // 16) * 16
            chunk = Part(first + own.start, own.start, total, rows)
            for number in range(LAYERS):
                layer = Layer(share, chunk, 1000 * first + 10 * number, dice)
                layer.attention(tables=number in (1, 4), entries=number in (2, 4))
                layer.experts(args().hidden_size, args().num_experts_per_tok)
    (Path(sys.argv[1]) / f"done-{me.rank}").touch()
    group.gather(torch.zeros(1))


assert {"first", "offset", "total", "rows"} <= set(dir(Chunk))  # what `Part` stands for

if __name__ == "__main__":
    rank = this_rank()
    assert rank is not None
    run_rank(rank, work)
