"""Both ranks of a step of two at once on one GPU: do late ranks, or many replays, change a bit?

    python bench/tp2_one_gpu.py --json FILE [--seconds 100] [--replays 100]

Two ranks in one process, each with its part of the weights, its caches and a stream, exchange by
mailboxes in the same memory while both run. Truth: the ranks in turn, launch by launch. Then each
rank's step is captured and replayed side by side, plainly and with programmatic launch, with and
without delays before one rank's replay. Counted on the device: replays with other logits, other
caches. Times mean nothing: the ranks share the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # no queue of one rank behind another's

import numpy as np  # noqa: E402
import torch  # noqa: E402
import tp2_step_gpu as two  # noqa: E402
from torch import Tensor  # noqa: E402

from deepdraft.engine.dummy import dummy_args  # noqa: E402
from deepdraft.errors import EngineError  # noqa: E402
from deepdraft.kernels import runtime  # noqa: E402
from deepdraft.kernels.one_shot import OneShot  # noqa: E402
from deepdraft.models.v41_joins import RankJoins  # noqa: E402
from deepdraft.parallel.group import run_in_turn  # noqa: E402

DEVICE, SIZE = "cuda", 2
CASES = ((8, 25), (6, 35), (4, 18), (6, 22))
CYCLES_PER_US = 1500
SPINS = 3_000_000
"""Polls before a rank is given up, about a second."""


@dataclass(slots=True)
class Side:
    """One rank."""

    bench: two.RankBench
    exchange: OneShot
    stream: torch.cuda.Stream
    state: list[Tensor]


def bits(t: Tensor) -> Tensor:
    return t.view(torch.int32) if t.dtype == torch.float32 else t


def sides(args: argparse.Namespace) -> list[Side]:
    """Weights and caches of both ranks."""
    shape = dummy_args(
        two.full_args(), layers=args.layers, expert_pool=args.pool, engram_rows=2_000_000
    )
    boxes = [
        torch.zeros(2, SIZE, two.CAPACITY, dtype=torch.int64, device=DEVICE) for _ in range(SIZE)
    ]
    found = []
    for rank in range(SIZE):
        exchange = OneShot(rank, [b.data_ptr() for b in boxes], boxes[rank], limit=SPINS)
        bench = two.RankBench(
            shape, rank, SIZE, lambda own, one=exchange: RankJoins(one, own), drafter=False
        )
        c = bench.caches
        state = [c.window_rows, *c.main.values(), *c.index.values(), *c.pending.values()]
        found.append(Side(bench, exchange, torch.cuda.Stream(), state))
    return found


def set_rows(both: list[Side], rows: int, experts: int) -> None:
    for side in both:
        side.bench.rng = np.random.default_rng(1)
        side.bench.set_rows(rows, experts)


def in_turn(both: list[Side], rows: int) -> list[Tensor]:
    """The ranks' logits, launch by launch."""

    def one(meeting) -> Tensor:
        torch.cuda.set_device(0)
        side = both[meeting.rank]

        def between() -> None:
            torch.cuda.synchronize()
            meeting.gather(torch.zeros(1))

        side.exchange.between = between
        with torch.inference_mode():
            logits = side.bench.once()[:rows].clone()
        side.exchange.between = None
        torch.cuda.synchronize()
        side.exchange.check()
        return logits

    return run_in_turn(SIZE, one)


def warm(both: list[Side], rows: int) -> None:
    """Every exchange that a step makes, once, without waiting: its kernels are compiled."""
    for side in both:
        one, limit = side.exchange, side.exchange.limit
        one.limit, one.positions = 0, side.bench.inputs.positions
        hidden, vocabulary = side.bench.args.hidden_size, side.bench.args.vocab_size
        x = torch.zeros(rows, hidden, device=DEVICE)
        picks = side.bench.args.num_experts_per_tok
        for slot in (0, 1, 2, 16):  # Triton has a kernel of its own for 1 and multiples of 16
            one._slot = slot
            one.sum_rows(x)
            one._slot = slot
            one.sum_rows(torch.zeros(rows, 5 * hidden, device=DEVICE))
            one._slot = slot
            one.sum_picks(x.bfloat16()[:, None].repeat(1, picks, 1), x.bfloat16())
            one._slot = slot
            one.gather(torch.zeros(rows, vocabulary // SIZE, device=DEVICE))
        one.finish()
        torch.cuda.synchronize()
        one.limit = limit
        one.error.zero_()
    for side in both:
        side.exchange.count.zero_()
        side.exchange._own.zero_()
    torch.cuda.synchronize()


def replayed(both: list[Side], want: list[Tensor], kept: list[list[Tensor]],
             args: argparse.Namespace, rows: int, *, programmatic: bool,
             late: int | None) -> dict:  # fmt: skip
    """Replays of both ranks side by side; rank `late` waits up to 300 us before each."""
    runtime.use_programmatic_launch(programmatic)
    graphs, logits = [], []
    try:
        for side in both:
            graph = torch.cuda.CUDAGraph()
            with torch.inference_mode(), torch.cuda.graph(graph, stream=side.stream):
                logits.append(side.bench.once())
            graphs.append(graph)
    finally:
        runtime.use_programmatic_launch(False)
    wrong = torch.zeros(SIZE, 3, dtype=torch.int64, device=DEVICE)
    first: list[list[int]] = []
    torch.cuda.synchronize()
    rng = random.Random(0)
    for replay in range(args.replays):
        for rank, side in enumerate(both):
            with torch.cuda.stream(side.stream):
                if rank == late:
                    torch.cuda._sleep(rng.randrange(300 * CYCLES_PER_US))
                graphs[rank].replay()
        for rank, side in enumerate(both):
            with torch.cuda.stream(side.stream):
                apart = (bits(logits[rank][:rows]) != bits(want[rank])).any(1)
                wrong[rank, 0] += apart.any()
                other = torch.zeros((), dtype=torch.bool, device=DEVICE)
                for part, before in zip(side.state, kept[rank], strict=True):
                    other |= (bits(part) != bits(before)).any()
                wrong[rank, 1] += other
        if replay % 10 == 9 or replay == 0:
            torch.cuda.synchronize()
            first.append(wrong[:, 0].tolist())
    torch.cuda.synchronize()
    for side in both:
        side.exchange.check()
    counts = wrong.tolist()
    return {
        "replays": args.replays, "logits_differ": [c[0] for c in counts],
        "state_differs": [c[1] for c in counts], "so_far": first if sum(first[-1]) else [],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--replays", type=int, default=100)
    parser.add_argument("--cases", type=int, default=len(CASES))
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--pool", type=int, default=64)
    args = parser.parse_args()
    begin = time.perf_counter()
    results: dict = {"device": torch.cuda.get_device_name()}

    def note(name: str, value: object) -> None:
        results[name] = value
        at = time.perf_counter() - begin
        print(f"-- {name} (at {at:.0f} s): {json.dumps(value)[:500]}", flush=True)
        args.json.write_text(json.dumps(results, indent=1) + "\n")

    both = sides(args)
    note("loaded", round(sum(s.bench.weights.nbytes for s in both) / 1e9, 1))
    for rows, experts in CASES[: args.cases]:
        if time.perf_counter() - begin > args.seconds - 12:
            continue
        set_rows(both, rows, experts)
        want = in_turn(both, rows)
        again = in_turn(both, rows)
        kept = [[part.clone() for part in side.state] for side in both]
        warm(both, 8)
        name = f"rows {rows} experts {experts}"
        finite = all(bool(torch.isfinite(w).all()) for w in want)
        note(
            f"{name}, in turn",
            {
                "ranks equal": torch.equal(*want),
                "twice": [torch.equal(a, b) for a, b in zip(want, again, strict=True)],
                "finite": finite,
            },
        )
        for programmatic in (False, True):
            for late in (None, 0, 1):
                if time.perf_counter() - begin > args.seconds - 6:
                    continue
                way = f"{name}, {'programmatic' if programmatic else 'plain'}, late {late}"
                try:
                    found = replayed(
                        both, want, kept, args, rows, programmatic=programmatic, late=late
                    )
                except EngineError as error:  # the ranks' counts are apart now
                    note(way, {"failed": str(error)})
                    return
                note(way, found)
    note("seconds", round(time.perf_counter() - begin, 1))


if __name__ == "__main__":
    main()
