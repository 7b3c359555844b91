"""The stages between a step's products, on a GPU: each fused form against what it replaces.

    python bench/chain_gpu.py --json FILE [--seconds 200] [--parts check,small,step]

check  the tests of the fused stages and of the CUDA C++ ones (no pytest needed)
small  us of each stage alone: graphs of 20 launches, median of 7
step   the published shape, 6 rows and 22 experts a layer: the layers with every fused stage alone,
       with all, with programmatic launch; bits against the first; then the whole step
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from kernel_timed import PUBLISHED, Operands, Timed, attention_timed  # noqa: E402
from kernel_worker import timed_us  # noqa: E402
from step_results import Results  # noqa: E402

from deepdraft.kernels import (  # noqa: E402
    attention,
    cache,
    gemv,
    gemv_quant,
    index,
    latents,
    layout,
    mhc,
    moe,
    routing,
    runtime,
)
from deepdraft.kernels.native import boundary, plans, route, stages, stream  # noqa: E402
from deepdraft.proof.bench_step import StepBench  # noqa: E402

TESTS = (
    "test_fused", "test_native_attend", "test_native_boundary", "test_native_route",
    "test_native_select", "test_attention", "test_mhc", "test_cache", "test_step_ends",
)  # fmt: skip
PLANS = ((16, 64, 4, 3),)


def check(name: str) -> dict:
    """One test module."""
    import mini_pytest

    mini_pytest.install()
    found = mini_pytest.run(importlib.import_module(f"tests.kernels.{name}"))
    torch.cuda.synchronize()
    return found


# ---- stages alone --------------------------------------------------------------------------


def us(name: str, run: Callable[[], object], size: int = 0) -> float:
    return round(timed_us(Timed(name, size, lambda i: run()), False), 2)


def attention_times(o: Operands) -> dict:
    out: dict[str, object] = {}
    for rows in (6, 1):
        for plan in PLANS if rows == 6 else PLANS[:1]:
            case = attention_timed(o, rows, 64, attention.AttentionPlan(*plan))
            out[f"r={rows} plan {plan}"] = round(timed_us(case, False), 2)
        stages.use(["attend"])
        try:
            out[f"r={rows} native"] = round(timed_us(attention_timed(o, rows, 64), False), 2)
        finally:
            stages.use([])
    return out


def boundary_times(o: Operands) -> dict:
    s, out = o.sizes, {}
    x, y, picked = o.halves(8, 4, s.hidden), o.halves(8, s.hidden), o.halves(8, 6, s.hidden)
    norm, coef = torch.ones(s.hidden, device=o.device), o.floats(8, 24).sigmoid()
    runs = {
        "attention": lambda: mhc.boundary(x, norm, y=y, coef=coef),
        "experts": lambda: mhc.boundary(x, norm, y=picked, shared=y, coef=coef),
    }
    for name, run in runs.items():
        out[name] = us(name, run)
        stages.use(["boundary"])
        try:
            for cluster in (1, 2, 4, 8) if s.hidden < 5000 else (2, 4, 8):
                boundary.CLUSTER = cluster
                out[f"{name} cluster {cluster}"] = us(name, run)
        finally:
            stages.use([])
            boundary.CLUSTER = 8
    return out


def route_times(o: Operands) -> dict:
    s, out = o.sizes, {}
    logits, bias = o.floats(8, s.experts), o.floats(s.experts, spread=0.01)
    live = torch.arange(8, dtype=torch.int32, device=o.device)
    counters = torch.zeros(16, dtype=torch.int32, device=o.device)
    settings = {"k": s.picks, "scale": 1.5, "temperature": 1.0}
    out["route"] = us("route", lambda: routing.route(logits, bias, live, **settings))
    picks, _ = routing.route(logits, bias, live, **settings)
    out["list"] = us("list", lambda: moe.expert_list(picks))
    for warps in (4, 8):
        routing.ROUTE_WARPS = warps
        run = partial(routing.route_listed, logits, bias, live, counters, **settings)
        out[f"route_listed {warps} warps"] = us("route_listed", run)
    routing.ROUTE_WARPS = 4
    copies = 200
    plan = layout.dense_plan(s.experts, s.hidden)
    gates = o.dense("bf16", s.experts, s.hidden, plan, copies)
    v = o.halves(8, s.hidden)

    def time(run: Callable[[layout.Tiled], object]) -> float:
        return round(timed_us(Timed("", 0, lambda i: run(gates[i]), copies), False), 2)

    out["router"] = time(lambda w: gemv.gemv(v, w, dtype=torch.float32))
    rows = partial(routing.route_rows, v)
    out["router, route_listed"] = time(lambda w: rows(w, bias, live, **settings))
    stages.use(["route"])
    try:
        for own in (3, 4, 6, 8):
            route.OWN = own
            route._kernel.cache_clear()
            out[f"native {own} experts a block"] = time(lambda w: rows(w, bias, live, **settings))
    finally:
        stages.use([])
        route.OWN = 8
        route._kernel.cache_clear()
    return out


def select_times(o: Operands) -> dict:
    out: dict[str, float] = {}
    for places in (16384, 36864, 102400):
        scores, reach = o.floats(8, places), o.ints([places] * 6 + [0] * 2)
        run = partial(index.select_top, scores, reach, reach, o.sizes.topk, skip=o.sizes.topk)
        out[f"{places}"] = us("select", run)
        stages.use(["select"])
        try:
            out[f"{places} native"] = us("select", run)
        finally:
            stages.use([])
    return out


def score_times(o: Operands) -> dict:
    from kernel_timed import index_timed

    out: dict[str, float] = {}
    for places in (18432, 262144):
        for rows in (8, 3, 2, 1):
            index.SCORE_ROWS = rows
            case = next(iter(index_timed(o, 6, places)))
            out[f"{places}, {rows} rows a program"] = round(timed_us(case, False), 2)
    index.SCORE_ROWS = 8
    return out


def latent_times(o: Operands) -> dict:
    s = o.sizes
    x = o.halves(8, s.q_lora + s.head_dim)
    q_norm, kv_norm = (torch.ones(n, device=o.device) for n in (s.q_lora, s.head_dim))
    cos, sin = o.positions(8)
    dest = torch.arange(8, dtype=torch.int32, device=o.device)
    window = o.bytes(8, cache.record_bytes("window", s.head_dim))
    common = {"norm_eps": 1e-20}
    write = partial(cache.write_entries, "window", x, kv_norm, cos, sin, dest, window,
                    start=s.q_lora, **common)  # fmt: skip
    return {
        "norm": us("norm", lambda: mhc.norm_rows(x, q_norm, s.q_lora, **common)),
        "write": us("write", write),
        "split_latents": us("both", lambda: latents.split_latents(
            x, q_norm, kv_norm, cos, sin, dest, window, **common)),
    }  # fmt: skip


def quantised_times(o: Operands) -> dict:
    s = o.sizes
    rows, cols = s.o_lora * s.o_groups, s.heads * s.head_dim // s.o_groups
    plan = layout.dense_plan(rows, cols, s.o_groups)
    copies = 20
    weights = o.dense("fp8", rows, cols, plan, copies)
    x = o.halves(8, cols * s.o_groups)

    def time(run: Callable[[layout.Tiled], object]) -> float:
        return round(timed_us(Timed("", 0, lambda i: run(weights[i]), copies), False), 2)

    return {
        "wo_a": time(lambda w: gemv.gemv(x, w, blocks=s.o_groups)),
        "wo_a, quantise": time(lambda w: gemv.quantize_rows(gemv.gemv(x, w, blocks=s.o_groups))),
        "quantised": time(lambda w: gemv_quant.gemv_quantized(x, w, blocks=s.o_groups)),
    }


def timeline_of(bench: StepBench) -> list:
    """Kernels of one replay of the layers around the middle: name, start, us, stream."""
    from torch.profiler import ProfilerActivity, profile

    bench.set_rows(6, 22)
    captured = bench.capture()
    captured.graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        captured.graph.replay()
        torch.cuda.synchronize()
    trace = Path(tempfile.mkdtemp()) / "trace.json"
    profiler.export_chrome_trace(str(trace))
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("cat") == "kernel"]
    events.sort(key=lambda e: e["ts"])
    middle = events[len(events) // 2 : len(events) // 2 + 90]
    begin = middle[0]["ts"]
    return [
        [e["name"][:24], round(e["ts"] - begin, 2), round(e["dur"], 2), e["args"].get("stream")]
        for e in middle
    ]


# ---- the step ------------------------------------------------------------------------------


STAGES = stages.STAGES


class Step:
    """Layers and head of the published shape with some stages fused."""

    def __init__(self, args: argparse.Namespace) -> None:
        from step_published import Published

        self.p = Published(args)
        self.reference: torch.Tensor | None = None
        self.best: tuple[float, tuple[str, ...], bool] = (1e9, (), False)

    def use(self, chosen: tuple[str, ...], pdl: bool) -> None:
        stages.use(chosen)
        runtime.use_programmatic_launch(pdl)

    def variant(self, chosen: tuple[str, ...], pdl: bool) -> dict:
        from deepdraft.proof.bench_step import time_graph

        bench = self.p.bench
        self.use(chosen, pdl)
        bench.rng = np.random.default_rng(5)
        bench.set_rows(6, 22)
        captured = bench.capture()
        captured.graph.replay()
        torch.cuda.synchronize()
        logits = captured.logits[:6].clone()
        if self.reference is None:
            self.reference = logits
        timed = time_graph(captured.graph.replay, replays=10)
        if timed.median < self.best[0]:
            self.best = timed.median, chosen, pdl
        gap = (logits - self.reference).double().norm() / self.reference.double().norm()
        return {
            "ms": round(timed.median, 4), "best": round(timed.best, 4),
            "same_bits": bool(torch.equal(logits, self.reference)), "relative": float(gap),
        }  # fmt: skip

    def ends(self, results: Results) -> None:
        """The whole step with the fastest form so far."""
        _, chosen, pdl = self.best
        self.use(chosen, pdl)
        results.data["best"] = {"stages": chosen, "pdl": pdl}
        for rows, experts in ((6, 22), (1, 6)):
            run = partial(self.p.whole, rows, experts)
            results.stage(f"whole rows {rows} experts {experts}", run)
        results.stage("rows", self.p.rows_equal)
        results.stage("timeline", self.timeline, needs=10)
        results.stage("profile", lambda: self.p.profile(6, 22), needs=10)

    def timeline(self) -> list:
        return timeline_of(self.p.bench)


def step(args: argparse.Namespace, results: Results) -> None:
    made: list[Step] = []
    results.stage("load", lambda: made.append(Step(args)) or made[0].p.loaded())
    if not made:
        return
    s = made[0]
    results.stage("compile", s.p.compile)
    alone = [(name,) for name in STAGES] if args.each else []
    for chosen in () if args.brief else ((), *alone, STAGES):
        name = " ".join(chosen) or "none"
        results.stage(f"layers {name}", partial(s.variant, chosen, False), needs=10)
    results.stage("layers all pdl", partial(s.variant, STAGES, True), needs=10)
    if args.brief:
        s.use(*s.best[1:])
        results.stage("timeline", s.timeline)
        return
    results.stage("layers none pdl", partial(s.variant, (), True), needs=10)
    s.ends(results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--parts", default="check,small,step")
    parser.add_argument("--tests", help="these modules of tests/kernels only")
    parser.add_argument("--each", action="store_true", help="every fused stage alone, too")
    parser.add_argument("--brief", action="store_true", help="of the step the fastest form only")
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--pool", type=int, default=96)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--native", default="none", help="streamed weights: none, experts, all")
    parser.add_argument("--plans", type=Path, help="their plans, as native_gpu.py tuned them")
    args = parser.parse_args()
    os.environ[stream.SETTING] = args.native
    if args.plans is not None and args.plans.exists():
        from native_gpu import best_of

        plans.MEASURED.clear()
        plans.MEASURED.update(best_of(args.plans))
    results = Results(args.json, args.seconds)
    results.data["native"] = args.native
    parts = args.parts.split(",")
    if "check" in parts:
        for name in args.tests.split(",") if args.tests else TESTS:
            results.stage(f"check {name}", partial(check, name))
    if "small" in parts:
        o = Operands("cuda", PUBLISHED)
        timed = (
            attention_times,
            boundary_times,
            route_times,
            select_times,
            latent_times,
            score_times,
        )
        for run in (*timed, quantised_times):
            results.stage(run.__name__, partial(run, o))
        del o
        torch.cuda.empty_cache()
    if "step" in parts:
        step(args, results)
    results.save()


if __name__ == "__main__":
    main()
