"""Forms that no GPU has confirmed yet (`kernels.native.trials`), on one GPU, in one call.

    python bench/trials_gpu.py --json FILE [--seconds 200] [--parts step,whole] [--try a+b,c]

step   layers and head of the published shape, 6 rows and 22 experts: every form alone, then the
       best together, taken one by one for as long as each makes the step faster; bits against the
       usual form where a form promises them
whole  the whole step with what was kept at 1, 2, 4, 6, 8 rows beside the usual one at 6; rows
       alone; right drafts; a timeline and a profile

Weights are loaded once; plans are exchanged in place. Whether a form is right at all is the
business of tests/kernels (`kernel_worker.py check`); run them first. `kept` in FILE is what to put
into DEEPDRAFT_TRIALS. The GPU must be idle otherwise.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

import numpy as np  # noqa: E402
import torch  # noqa: E402

from deepdraft.kernels import runtime  # noqa: E402
from deepdraft.kernels.native import (  # noqa: E402
    attend,
    boundary,
    build,
    fragments,
    route,
    stream,
    trials,
)
from deepdraft.kernels.native.fragments import Streamed  # noqa: E402

Names = frozenset[str]
ALONE = ("combine", "query", "held+fenced", "voted", "ordered", "fresh")
"""Tried alone."""
SAME_BITS = frozenset({"ordered", "fresh", "voted", "held", "fenced", "lanes"})
"""Forms that promise the usual bits; the others sum in another order or take other exponentials."""
PLANS = frozenset({"query"})
"""Forms that are plans of weights."""
ROWS = ((6, 22), (1, 6), (2, 11), (4, 18), (8, 25))
DENSE = {
    (1792, 5120): (stream.FP8_ROWS, 0), (32768, 1280): (stream.FP8_ROWS, 0),
    (36864, 1280): (stream.FP8_ROWS, 0), (8192, 4096): (stream.BF16_ROWS, 2),
    (5120, 8192): (stream.FP8_ROWS, 0), (4608, 5120): (stream.FP8_ROWS, 0),
    (5120, 2304): (stream.FP8_ROWS, 0),
}  # fmt: skip
"""A layer's dense products (rows, columns): how their rows lie, what comes out."""
LEAST_GAIN = 0.997
"""A form is kept where the step takes at most so much of its time without it."""


def parted(text: str) -> Names:
    return frozenset(text.split("+"))


def greedy(forms: Iterable[Names], time: Callable[[Names], float | None]) -> Names:
    """Forms that make the step faster one on top of the other, the best alone first. `time`: ms
    with some of them, None where they failed or their bits are wrong."""
    kept: Names = frozenset()
    best = time(kept)
    if best is None:
        return kept
    alone = {form: ms for form in forms if (ms := time(form)) is not None}
    for form in sorted(alone, key=lambda f: alone[f]):
        ms = time(kept | form)
        if ms is not None and ms < LEAST_GAIN * best:
            kept, best = kept | form, ms
    return kept


def replanned(part: Any) -> Any:
    """Weights with the plans that are in force now: their bytes lie the same way in all of them."""
    if isinstance(part, Streamed):
        plan_of = (
            fragments.dense_stream_plan if part.kind == "fp8" else fragments.expert_stream_plan
        )
        plan = plan_of(part.rows, part.cols)
        return part if plan is None else replace(part, plan=plan)
    if isinstance(part, tuple) and type(part) is tuple:
        return tuple(replanned(p) for p in part)
    if is_dataclass(part) and not isinstance(part, type) and type(part).__name__ != "V41Args":
        changed = {
            f.name: new
            for f in fields(part)
            if f.init and (new := replanned(old := getattr(part, f.name))) is not old
        }
        return replace(part, **changed) if changed else part
    return part


def wanted() -> list[tuple[str, dict[str, int]]]:
    """Sources and macros that the step needs with every form."""
    found: dict[str, tuple[str, dict[str, int]]] = {}

    def add(file: str, made: dict[str, int]) -> None:
        found[repr((file, sorted(made.items())))] = file, made

    for names in ((), ("query",)):
        with trials.using(*names):
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


class Tried:
    """Layers of the published shape with some forms."""

    def __init__(self, args: argparse.Namespace) -> None:
        from step_published import Published

        trials.use(())
        self.p = Published(args)
        self.reference: torch.Tensor | None = None
        self.plans: Names = frozenset()
        self.ms: dict[Names, float | None] = {}
        runtime.use_programmatic_launch(True)

    def use(self, names: Names) -> None:
        trials.use(names)
        bench, chosen = self.p.bench, names & PLANS
        if chosen != self.plans:
            bench.weights = bench.step.weights = replanned(bench.weights)
            self.plans = chosen

    def run(self, names: Names) -> dict:
        from deepdraft.proof.bench_step import time_graph

        bench = self.p.bench
        self.use(names)
        bench.rng = np.random.default_rng(5)
        bench.set_rows(6, 22)
        captured = bench.capture()
        captured.graph.replay()
        torch.cuda.synchronize()
        logits = captured.logits[:6].clone()
        again = []
        for _ in range(5):
            captured.graph.replay()
            again.append(captured.logits[:6].clone())
        twice = all(bool(torch.equal(other, logits)) for other in again)
        if self.reference is None:
            self.reference = logits
        same = bool(torch.equal(logits, self.reference))
        timed = time_graph(captured.graph.replay, replays=10)
        right = twice and bool(torch.isfinite(logits).all()) and (same or not names <= SAME_BITS)
        self.ms[names] = timed.median if right else None
        return {
            "ms": round(timed.median, 4), "best": round(timed.best, 4), "same_bits": same,
            "twice": twice, "right": right, "finite": bool(torch.isfinite(logits).all()),
            "rows_apart": [int((other != logits).any(1).sum()) for other in again],
        }  # fmt: skip

    def timer(self, results: Any) -> Callable[[Names], float | None]:
        def time(names: Names) -> float | None:
            if names not in self.ms:
                results.stage(f"layers {'+'.join(sorted(names)) or 'usual'}",
                              partial(self.run, names), needs=6)  # fmt: skip
            return self.ms.get(names)

        return time

    def whole(self, results: Any, kept: Names) -> None:
        """The step with the drafter; what must hold with the forms that were kept."""
        from chain_gpu import timeline_of

        p = self.p
        for rows, experts in ROWS:
            run = partial(p.whole, rows, experts)
            results.stage(f"whole rows {rows} experts {experts}", run)
        results.stage("rows", p.rows_equal)
        results.stage("timeline", partial(timeline_of, p.bench))
        results.stage("profile", partial(p.profile, 6, 22))
        if kept:
            self.use(frozenset())
            results.stage("whole rows 6 experts 22, usual", partial(p.whole, 6, 22))
            self.use(kept)
        results.stage("accepts", p.accepts, needs=25)


def main() -> None:
    from step_results import Results

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--parts", default="step,whole")
    parser.add_argument("--try", dest="forms", default=",".join(ALONE), help="forms to try")
    parser.add_argument("--kept", default="", help="without part step: these forms are used")
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--pool", type=int, default=96)
    parser.add_argument("--context", type=int, default=32768)
    args = parser.parse_args()
    os.environ[stream.SETTING] = "all"
    results = Results(args.json, args.seconds)
    results.data["device"] = torch.cuda.get_device_name()
    built = threading.Thread(target=prebuild, args=(wanted(),))
    built.start()
    made: list[Tried] = []
    results.stage("load", lambda: made.append(Tried(args)) or made[0].p.loaded())
    if not made:
        raise SystemExit("no weights")
    tried = made[0]
    tried.use(frozenset())
    results.stage("compile", tried.p.compile)
    built.join()
    kept = parted(args.kept) if args.kept else frozenset()
    if "step" in args.parts:
        kept = greedy(map(parted, args.forms.split(",")), tried.timer(results))
        results.data["kept"] = sorted(kept)
        results.data["layers_ms"] = {"usual": tried.ms.get(frozenset()), "kept": tried.ms.get(kept)}
        print(f"-- kept: {','.join(sorted(kept)) or 'nothing'}", flush=True)
    tried.use(kept)
    if "whole" in args.parts:
        tried.whole(results, kept)
    results.save()


if __name__ == "__main__":
    main()
