"""The captured step again and again on one GPU: is every replay the first one, bit for bit?

    python bench/stress_gpu.py --json FILE [--seconds 190] [--parts step,alone,whole,grid]

What a step gives (logits) and leaves (caches, tokens) is compared on the device, after every
replay, with the same launches one behind the other: in one lane, without programmatic launch.

step   6 rows, 22 experts: many replays, with and without programmatic launch, and the time of one.
       Where bits differ: in one lane, too, and which result of which layer is the first to differ
       (all results are kept then, so no memory serves twice within a step)
alone  routed freely: each row alone against its bits beside the others
whole  times of the whole step (what bench/results/c-step.json holds)
grid   1 to 8 rows, several numbers of experts and contexts

The GPU must be idle otherwise. Random weights of the published shape.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from step_results import Results  # noqa: E402

from deepdraft.kernels import runtime  # noqa: E402
from deepdraft.kernels.native import (  # noqa: E402
    attend,
    boundary,
    build,
    fragments,
    route,
    stream,
)
from deepdraft.models.v41_buffers import RowInputs  # noqa: E402
from deepdraft.models.v41_step import Lanes  # noqa: E402
from deepdraft.proof.bench_step import Capture, time_graph  # noqa: E402

ROWS = ((6, 22), (1, 6), (2, 11), (4, 18), (8, 25), (6, 35), (8, 46))
GRID = ((1, 6), (2, 11), (4, 18), (6, 22), (6, 35), (8, 25))
CONTEXTS = (120, 16376, 32768)
DENSE = {
    (1792, 5120): (stream.FP8_ROWS, 0), (32768, 1280): (stream.FP8_ROWS, 0),
    (36864, 1280): (stream.FP8_ROWS, 0), (8192, 4096): (stream.BF16_ROWS, 2),
    (5120, 8192): (stream.FP8_ROWS, 0), (4608, 5120): (stream.FP8_ROWS, 0),
    (5120, 2304): (stream.FP8_ROWS, 0),
}  # fmt: skip
"""A layer's dense products (rows, columns): how their rows lie, what comes out."""


def bits(t: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in the widest integers that they fill."""
    flat = t.contiguous().view(-1).view(torch.uint8)
    return flat.view(torch.int64) if flat.numel() % 8 == 0 else flat


def wanted() -> list[tuple[str, dict[str, int]]]:
    """Sources and macros that the step needs."""
    found: dict[str, tuple[str, dict[str, int]]] = {}

    def add(file: str, made: dict[str, int]) -> None:
        found[repr((file, sorted(made.items())))] = file, made

    for (rows, cols), (kind, output) in DENSE.items():
        plan = fragments.dense_stream_plan(rows, cols)
        assert plan is not None
        add("stream.cu", stream.macros(kind, plan, output))
    for kind, rows, cols in ((stream.UP, 4608, 5120), (stream.DOWN, 5120, 2304)):
        plan = fragments.expert_stream_plan(rows, cols)
        assert plan is not None
        add("stream.cu", stream.macros(kind, plan, 0))
    add("attend.cu", attend.macros(32, attend.HEADS))
    for chunks in (2, 3, 10):
        add("combine.cu", attend.combine_macros(32, chunks, min(chunks, 2)))
    for picks in (0, 6):
        add("boundary.cu", boundary.macros(4, picks))
    add("route.cu", route.macros(384, 6))
    return list(found.values())


def prebuild(found: list[tuple[str, dict[str, int]]]) -> None:
    """Compile all of it side by side; the step finds it in the cache."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda v: build.cubin(*v, "sm_90a"), found))


class Stress:
    """Steps captured twice: as they are used, and one launch behind the other."""

    def __init__(self, args: argparse.Namespace) -> None:
        from step_published import Published

        self.p = Published(args)
        runtime.use_programmatic_launch(True)

    def at(self, rows: int, experts: int | None, context: int) -> None:
        """Rows after `context` tokens, always the same ones."""
        bench = self.p.bench
        longest, bench.context = bench.context, context
        bench.rng = np.random.default_rng(5)
        bench.set_rows(rows, experts)
        bench.context = longest

    def captured(self, *, programmatic: bool, lanes: bool = True) -> Capture:
        step = self.p.bench.step
        usual = step.lanes
        if not lanes:
            step.lanes = Lanes(self.p.bench.weights.device, on=False)
        runtime.use_programmatic_launch(programmatic)
        try:
            return self.p.bench.capture()
        finally:
            runtime.use_programmatic_launch(True)
            step.lanes = usual

    def state(self) -> dict[str, torch.Tensor]:
        c = self.p.bench.caches
        found = {"window": bits(c.window_rows), "tokens": bits(c.tokens)}
        for name, parts in (("main", c.main), ("index", c.index), ("pending", c.pending)):
            found |= {f"{name} {layer}": bits(part) for layer, part in parts.items()}
        return found

    def counted(
        self, step: Capture, want: torch.Tensor, kept: dict[str, torch.Tensor], replays: int
    ) -> dict:
        """Replays with other logits (by row) or state (by part) than those of the plain step."""
        device = self.p.bench.device
        rows, now = want.shape[0], self.state()
        by_row = torch.zeros(rows, dtype=torch.int64, device=device)
        by_part = torch.zeros(len(now), dtype=torch.int64, device=device)
        wrong, wrong_state = (torch.zeros((), dtype=torch.int64, device=device) for _ in range(2))
        for _ in range(replays):
            step.graph.replay()
            apart = (bits(step.logits[:rows]) != bits(want)).view(rows, -1).any(1)
            by_row += apart
            wrong += apart.any()
            other = torch.stack([(now[name] != part).any() for name, part in kept.items()])
            by_part += other
            wrong_state += other.any()
        parts = {n: c for n, c in zip(kept, by_part.tolist(), strict=True) if c}
        return {
            "replays": replays, "logits_differ": int(wrong), "by_row": by_row.tolist(),
            "state_differs": int(wrong_state), "parts": parts,
        }  # fmt: skip

    def case(
        self, rows: int, experts: int | None, context: int, replays: int,
        *, timed: bool = False, lanes: bool = True, plain: int = 20,
    ) -> dict:  # fmt: skip
        """One step, replayed so often, and `plain` times without programmatic launch: what differs
        from launches one behind the other, in one lane."""
        self.at(rows, experts, context)
        first = self.captured(programmatic=False, lanes=False)
        first.graph.replay()
        self.p.bench.synchronize()
        logits = first.logits[:rows].clone()
        kept = {name: part.clone() for name, part in self.state().items()}
        again = self.counted(first, logits, kept, 3)
        found: dict[str, object] = {"plain_differ": 0}
        if lanes and plain:
            usual = self.counted(self.captured(programmatic=False), logits, kept, plain)
            found = {
                "plain_differ": max(usual["logits_differ"], usual["state_differs"]),
                "plain": plain,
            }
            found |= {"plain_parts": usual["parts"]} if usual["parts"] else {}
        step = self.captured(programmatic=True, lanes=lanes)
        found |= self.counted(step, logits, kept, replays)
        found |= {
            "one_by_one_differ": max(again["logits_differ"], again["state_differs"]),
            "finite": bool(torch.isfinite(logits).all()),
        }
        if timed:
            found["ms"] = round(time_graph(step.graph.replay, replays=10).median, 4)
        return found

    def where(self, most: int, seconds: float) -> dict:
        """The first results that differ, of each replay with other logits."""
        self.at(6, 22, 32768)
        step = self.p.bench.step
        seen: dict[str, torch.Tensor] = {}
        step.observer = lambda name, value: seen.__setitem__(name, value)
        try:
            plain = self.captured(programmatic=False, lanes=False)
            plain.graph.replay()
            self.p.bench.synchronize()
            want = {name: value.clone() for name, value in seen.items()}
            want["logits"] = plain.logits.clone()
            del plain
            seen.clear()
            captured = self.captured(programmatic=True)
        finally:
            step.observer = None
        seen["logits"] = captured.logits
        found: list[list] = []
        begin, done = time.perf_counter(), 0
        while done < most and time.perf_counter() - begin < seconds and len(found) < 12:
            captured.graph.replay()
            done += 1
            if torch.equal(bits(seen["logits"][:6]), bits(want["logits"][:6])):
                continue
            apart = []
            for name, value in seen.items():
                rows = (value[:6].flatten(1) != want[name][:6].flatten(1)).nonzero()
                if len(rows):
                    places = rows[:, 1]
                    apart.append([
                        name, sorted(set(rows[:, 0].tolist())), len(rows),
                        int(places.min()), int(places.max()),
                    ])  # fmt: skip
                    if len(apart) == 1:
                        at = places.unique()[:128]
                        apart[0] += [
                            at.tolist(),
                            [v[:6].flatten(1)[:, at].tolist() for v in (want[name], value)],
                        ]
                if len(apart) == 3:
                    break
            found.append(apart)
        return {"replays": done, "first": found}

    def alone(self, context: int, replays: int) -> dict:
        """Six rows, then each of them alone, routed freely."""
        bench = self.p.bench
        self.at(6, None, context)
        assert bench.inputs is not None
        ids = bench.inputs.ids[:6].tolist()
        six = self.captured(programmatic=True)
        six.graph.replay()
        want = six.logits[:6].clone()
        bench.inputs = RowInputs(1, bench.device)
        bench.inputs.set([(0, context, ids[:1])])
        one = self.captured(programmatic=True)
        wrong = torch.zeros(6, dtype=torch.int64, device=bench.device)
        for i in range(6):
            bench.inputs.set([(0, context + i, ids[i : i + 1])])
            for _ in range(replays):
                one.graph.replay()
                wrong[i] += (bits(one.logits[:1]) != bits(want[i : i + 1])).any()
        return {"replays": 6 * replays, "rows_apart": wrong.tolist()}


def clean(found: object) -> bool:
    """Whether a case saw nothing but the plain step's bits."""
    counts = ("logits_differ", "state_differs", "plain_differ", "one_by_one_differ")
    return isinstance(found, dict) and all(found.get(n) == 0 for n in counts)


def run(stress: Stress, results: Results, args: argparse.Namespace) -> None:
    """All parts."""
    if "step" in args.parts:
        of = partial(stress.case, 6, 22, args.context)
        steady = partial(of, args.replays, plain=args.replays, timed=True)
        if not clean(results.stage("step", steady)):
            results.stage("step in one lane", partial(of, args.replays, lanes=False), needs=20)
            results.stage("where", partial(stress.where, args.replays, 8.0), needs=20)
    if "alone" in args.parts:
        for context in (120, 32768):
            results.stage(f"alone at {context}", partial(stress.alone, context, 20))
    if "whole" in args.parts:
        for rows, experts in ROWS:
            whole = partial(stress.p.whole, rows, experts)
            results.stage(f"whole rows {rows} experts {experts}", whole)
        results.stage("profile", partial(stress.p.profile, 6, 22))
    if "grid" in args.parts:
        for rows, experts in GRID:
            for context in CONTEXTS:
                case = partial(stress.case, rows, experts, context, args.replays // 4)
                results.stage(f"grid rows {rows} experts {experts} at {context}", case)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=190)
    parser.add_argument("--parts", default="step,alone,whole,grid")
    parser.add_argument("--replays", type=int, default=400)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--pool", type=int, default=96)
    parser.add_argument("--context", type=int, default=32768)
    args = parser.parse_args()
    os.environ[stream.SETTING] = "all"
    results = Results(args.json, args.seconds)
    results.data["device"] = torch.cuda.get_device_name()
    built = threading.Thread(target=prebuild, args=(wanted(),))
    built.start()
    made: list[Stress] = []
    results.stage("load", lambda: made.append(Stress(args)) or made[0].p.loaded())
    if not made:
        raise SystemExit("no weights")
    results.stage("compile", made[0].p.compile)
    built.join()
    run(made[0], results, args)
    cases = [f for f in results.data.values() if isinstance(f, dict) and "logits_differ" in f]
    results.data["replays"] = sum(f["replays"] + f.get("plain", 0) for f in cases)
    results.data["clean"] = all(map(clean, cases))
    results.save()
    print(f"-- {results.data['replays']} replays, clean: {results.data['clean']}", flush=True)


if __name__ == "__main__":
    main()
