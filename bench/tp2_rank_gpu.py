"""One rank of several alone on a GPU: its part of the step, exchanges that it makes with itself.

    python3 bench/tp2_rank_gpu.py --json FILE [--tp 2] [--seconds 55] [--parts check,times,replays]

The rank's mailbox is its peers', too: what it sends comes back as the other ranks' words. So all
launches, sums and waits of a step of several ranks run; what is missing is the way over NVLink and
the time that one rank waits for a slower one. Times are no substitute for two GPUs.

check    logits: exchange inside the boundary against kernels of its own, plain and programmatic
times    whole steps (6 rows first), kernels of their own, no exchange; a timeline
trials   forms of the step, layers and head (two ranks)
replays  the captured step again and again against launches one behind the other, bit for bit
"""

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import numpy as np  # noqa: E402
import torch  # noqa: E402
import tp2_step_gpu as two  # noqa: E402

from deepdraft.engine.dummy import dummy_args  # noqa: E402
from deepdraft.kernels.native import attend, boundary, build, fragments, stream  # noqa: E402
from deepdraft.kernels.one_shot import OneShot, Ticket  # noqa: E402
from deepdraft.kernels.runtime import use_programmatic_launch  # noqa: E402
from deepdraft.models.v41_joins import OwnTables, RankJoins  # noqa: E402
from deepdraft.models.v41_step import Lanes  # noqa: E402
from deepdraft.proof.bench_step import time_graph  # noqa: E402
from deepdraft.proof.step_bytes import step_bytes  # noqa: E402

DENSE = {
    (1792, 5120): (stream.FP8_ROWS, 0), (16384, 1280): (stream.FP8_ROWS, 0),
    (20480, 1280): (stream.FP8_ROWS, 0), (4096, 4096): (stream.BF16_ROWS, 2),
    (5120, 4096): (stream.FP8_ROWS, 1), (2304, 5120): (stream.FP8_ROWS, 0),
    (5120, 1152): (stream.FP8_ROWS, 0), (5120, 15360): (stream.FP8_ROWS, 0),
}  # fmt: skip
"""Dense products of a rank (rows, columns): how their rows lie, what comes out."""
PLANS = {
    "shared13": ("experts", (2304, 5120), (
        (2, 2, 16, 1, 5, 3, 0), (2, 2, 16, 1, 5, 3, 0, 1), (2, 2, 8, 1, 10, 3, 0),
        (4, 2, 8, 1, 5, 3, 0, 1), (5, 1, 8, 1, 4, 4, 0, 1), (10, 2, 16, 1, 1, 3, 0, 1),
    )),
    "wo_b": ("attention", (5120, 4096), (
        (2, 2, 16, 1, 4, 3, 0), (2, 2, 16, 1, 4, 3, 0, 1), (4, 2, 16, 1, 2, 3, 0, 1),
        (4, 2, 8, 1, 4, 3, 0, 1), (8, 2, 8, 1, 2, 3, 0, 1),
    )),
    "wo_a": ("attention", (4096, 4096), ((8, 2, 8, 1, 2, 2, 0, 1), (4, 2, 16, 1, 2, 3, 0, 1))),
    "w_query": ("attention", (16384, 1280), ((10, 2, 4, 2, 1, 3, 0, 1), (5, 5, 8, 1, 1, 2, 0, 1))),
    "shared2": ("experts", (5120, 1152), ((9, 3, 4, 1, 1, 2, 0), (9, 3, 4, 2, 1, 2, 0, 1))),
}  # fmt: skip
"""Other plans of a rank's slices: where the map lies, its shape. With one part of its columns a
block, 160 units of the output map are two turns of 132 blocks, of which the second is mostly
empty."""


def itself(size: int) -> OneShot:
    """Rank 0, whose words for another rank lie where those of that rank are expected."""
    stride = two.CAPACITY + two.DATA
    own = torch.zeros(2, size, stride, dtype=torch.int64, device="cuda")
    boxes = [own.data_ptr() + 8 * stride * rank for rank in range(size)]
    return OneShot(0, boxes, own, data=two.DATA)


def prebuild() -> None:
    """Compile what the step needs in CUDA C++ side by side; it finds it in the cache."""
    wanted = []
    plans = [(shape, fragments.dense_stream_plan(*shape)) for shape in DENSE]
    plans += [
        (shape, fragments.StreamPlan(*plan))
        for _, shape, all_of in PLANS.values()
        for plan in all_of
    ]
    for shape, plan in plans:
        if plan is not None:
            kind, output = DENSE[shape]
            wanted.append(("stream.cu", stream.macros(kind, plan, output)))
    for kind, shape in ((stream.UP, (2304, 5120)), (stream.DOWN, (5120, 1152))):
        plan = fragments.expert_stream_plan(*shape)
        assert plan is not None
        wanted.append(("stream.cu", stream.macros(kind, plan, 0)))
    ticket = Ticket(0, (0, 0), 0, 0, 0, 0, 0, 0)
    wanted += [("boundary.cu", boundary.macros(4, picks, ticket)) for picks in (0, 3, 6)]
    wanted += [("attend.cu", attend.macros(32, heads)) for heads in (16, 32)]

    def one(found: tuple[str, dict[str, int]]) -> None:
        with contextlib.suppress(build.BuildError):  # said again where it is used
            build.cubin(*found, "sm_90a")

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(one, wanted))


def with_plan(weights, part: str, name: str, shape: tuple[int, int], plan: fragments.StreamPlan):
    """The model's weights with another plan of one map of every layer."""
    layers = []
    for w in weights.layers:
        whole = getattr(w, part)
        matrix = getattr(whole, name)
        if (matrix.rows, matrix.cols) == shape:
            matrix = dataclasses.replace(matrix, plan=plan)
            w = dataclasses.replace(w, **{part: dataclasses.replace(whole, **{name: matrix})})
        layers.append(w)
    return dataclasses.replace(weights, layers=tuple(layers))


class Alone:
    """The bench of rank 0, and what it measures."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.begin = options, time.monotonic()
        self.report: dict[str, object] = {"torch": torch.__version__, "context": two.CONTEXT}
        compiling = threading.Thread(target=prebuild)
        if options.tp == 2:
            compiling.start()
        self.exchange, tables = itself(options.tp), []

        def joins(own: list[OwnTables]) -> RankJoins:
            tables.extend(own)
            return RankJoins(self.exchange, own)

        args = dummy_args(two.full_args(), expert_pool=options.pool, engram_rows=4_000_000)
        self.bench = two.RankBench(args, 0, options.tp, joins)
        torch.cuda.synchronize()
        self.note("load_s", round(time.monotonic() - self.begin, 1))
        self.none = two.NoExchange(options.tp, tables)
        if options.tp == 2:
            compiling.join()
        self.note("compiled_s", round(time.monotonic() - self.begin, 1))

    def note(self, name: str, value: object) -> None:
        self.report[name] = value
        self.options.json.write_text(json.dumps(self.report, indent=1) + "\n")
        print(f"-- {name}: {json.dumps(value)}"[:400], flush=True)

    def left(self) -> float:
        return self.options.seconds - (time.monotonic() - self.begin)

    def rows(self, rows: int, experts: int) -> None:
        self.bench.rng = np.random.default_rng(1)
        self.bench.set_rows(rows, experts)

    def captured(self, *, programmatic: bool = True, apart: bool = False):
        use_programmatic_launch(programmatic)
        self.exchange.apart = apart
        found = self.bench.capture()
        self.exchange.apart = False
        use_programmatic_launch(True)
        return found

    def check(self) -> None:
        self.rows(6, 22)
        wanted = None
        for name, how in (
            ("kernels of their own", {"programmatic": False, "apart": True}),
            ("in the boundary", {"programmatic": False}),
            ("kernels of their own, programmatic", {"apart": True}),
            ("in the boundary, programmatic", {}),
        ):
            step = self.captured(**how)
            step.graph.replay()
            logits = step.logits[:6].clone()
            wanted = logits if wanted is None else wanted
            self.exchange.check()
            self.note(
                f"{name}: finite, logits as of kernels of their own",
                [bool(logits.isfinite().all()), torch.equal(logits, wanted)],
            )
            del step

    def whole(self, name: str, rows: int, experts: int) -> None:
        loop = self.bench.whole(rows, experts)
        assert loop.graph is not None
        ms = time_graph(loop.graph.replay, replays=10)
        counted = step_bytes(
            self.bench.args, rows=rows, experts=experts, context=two.CONTEXT, draft=rows > 1
        )
        limit = counted.limit_ms(4.3e12, self.options.tp)
        self.note(
            f"{name}, rows {rows} experts {experts}",
            {"ms": round(ms.median, 3), "best": round(ms.best, 3), "limit_ms": round(limit, 3)},
        )
        self.exchange.check()

    def times(self) -> None:
        use_programmatic_launch(True)
        self.whole("in the boundary", *two.ROWS[0])
        usual = self.bench.joins
        self.bench.joins = self.none
        self.whole("no exchange", *two.ROWS[0])
        self.bench.joins, self.exchange.apart = usual, True
        self.whole("kernels of their own", *two.ROWS[0])
        self.exchange.apart = False
        with contextlib.suppress(RuntimeError):
            self.note("timeline", two.timeline(self.bench, self.options, 0, "alone"))
        for rows, experts in two.ROWS[1:]:
            if self.left() > 25:
                self.whole("in the boundary", rows, experts)

    def layers(self) -> float:
        self.rows(6, 22)
        step = self.captured()
        return round(time_graph(step.graph.replay, replays=6).median, 4)

    def trials(self) -> None:
        self.bench.step.joins = self.bench.joins
        weights = self.bench.weights
        self.note("layers and head", self.layers())
        for name, change in two.TRIALS.items():
            with change(self.bench):
                self.note(f"trial: {name}", self.layers())
        best = self.layers()
        for name, (part, shape, plans) in PLANS.items():
            kept = weights
            for plan in plans:
                if self.left() < 3:
                    break
                made = fragments.StreamPlan(*plan)
                self.bench.step.weights = with_plan(weights, part, name, shape, made)
                try:
                    ms = self.layers()
                    logits = self.bench.once()[:6]
                    self.note(f"trial: {name} {plan}", [ms, bool(logits.isfinite().all())])
                except ValueError as error:
                    self.note(f"trial: {name} {plan}", str(error)[:200])
                    continue
                if ms < best:
                    best, kept = ms, self.bench.step.weights
            weights = kept
        self.bench.step.weights = weights
        self.note("layers and head with the best of each", self.layers())
        self.bench.step.weights = self.bench.weights
        self.note("layers and head again", self.layers())

    def replays(self) -> None:
        caches = self.bench.caches
        state = [caches.window_rows, *caches.main.values(), *caches.index.values()]
        self.bench.step.joins = self.bench.joins
        self.rows(6, 22)
        lanes, self.bench.step.lanes = self.bench.step.lanes, Lanes(self.bench.device, on=False)
        plain = self.captured(programmatic=False, apart=True)
        self.bench.step.lanes = lanes
        plain.graph.replay()
        logits, kept = plain.logits[:6].clone(), [part.clone() for part in state]
        step = self.captured()
        differ = torch.zeros(2, dtype=torch.int64, device="cuda")  # logits, state
        done = 0
        while done < self.options.replays and self.left() > 3:
            for _ in range(50):
                step.graph.replay()
                got = step.logits[:6].view(torch.int32)
                differ[0] += (got != logits.view(torch.int32)).any()
                for part, other in zip(state, kept, strict=True):
                    differ[1] += (part != other).any()
            torch.cuda.synchronize()
            done += 50
        self.exchange.check()
        self.note("replays", {"replays": done, "logits, state differ": differ.tolist()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=55)
    parser.add_argument("--parts", default="check,times,replays")
    parser.add_argument("--pool", type=int, default=96)
    parser.add_argument("--replays", type=int, default=2000)
    bench = Alone(parser.parse_args())
    for part in bench.options.parts.split(","):
        try:
            getattr(bench, part)()
        except Exception as error:
            bench.note(f"{part} failed", f"{type(error).__name__}: {error}"[:400])


if __name__ == "__main__":
    main()
