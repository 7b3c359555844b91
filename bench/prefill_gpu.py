"""One script for a GPU host: prompts, checked and timed.

    python bench/prefill_gpu.py --json FILE [--seconds 540] [--only kernels,chunks,...]

kernels  each kernel at the published sizes: plans, share of the ceilings, cuBLAS beside ours
chunks   the encoder at contexts 0, 256K and 1M, by kernel; an estimate of 1M tokens from them
prompts  1K, 8K, 64K tokens to the logits; memory against the plan
million  1M tokens in one go, where there is time
checks   rows around the thresholds and at 1M tokens against float64; the bundled model's state
         and logits against the CPU's
tests    tests/kernels/test_prefill_* (published sizes too)

Random weights of the published shape, a pool of 96 experts. Results are written after every stage;
a stage that fails is reported, the rest runs. `--dry-run` runs everything with tiny sizes in
Triton's interpreter on a CPU (times mean nothing then).
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from step_results import Results  # noqa: E402

STAGES = ("kernels", "chunks", "prompts", "million", "checks", "tests")
TESTS = ("gemm", "unpacked", "experts", "index", "attention", "streams")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--only", default=",".join(STAGES))
    parser.add_argument("--pool", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--rows", type=int, default=32768, help="of a chunk")
    parser.add_argument("--kernel-rows", type=int, default=8192)
    parser.add_argument("--kernel-seconds", type=float, default=1e9, help="kernels stop here")
    parser.add_argument("--plans", type=Path, help="results of the kernels: their best plans")
    parser.add_argument("--on-the-way", action="store_true", help="nothing is unpacked first")
    parser.add_argument("--dry-run", action="store_true")
    return parser.parse_args()


def clock(dry: bool) -> Callable[[Callable[[], object]], float]:
    """Seconds of a call."""
    if not dry:
        from deepdraft.proof.bench_prefill import timed

        return timed

    def once(run: Callable[[], object]) -> float:
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin

    return once


def run_tests(results: Results) -> None:
    import mini_pytest

    mini_pytest.install()
    for name in TESTS:
        module = importlib.import_module(f"tests.kernels.test_prefill_{name}")
        results.stage(f"test_{name}", lambda m=module: mini_pytest.run(m))


def checks(results: Results, args, sizes, device: str, plans) -> None:
    import prefill_checks

    rows = 8 if args.dry_run else 64
    for name in ("index", "attention"):
        run = getattr(prefill_checks, f"check_{name}")
        results.stage(
            f"check_{name}",
            lambda r=run: r(sizes, device, tokens=args.tokens, rows=rows, plans=plans),
        )
    results.stage(
        "check_cache",
        lambda: prefill_checks.check_cache(sizes, device, tokens=args.tokens, rows=rows),
    )
    if not args.dry_run:
        import prefill_demo

        run = prefill_demo.check_demo
        results.stage("demo", lambda: run(device, count=4, length=400, chunk=256, plans=None))


def loaded(results: Results, args, sizes, ceilings, plans, device: str) -> None:
    """What needs a model."""
    import torch

    from deepdraft.models.v41_prefill_plan import plan_prefill, workspace_bytes
    from deepdraft.proof import bench_prefill

    parts = args.only.split(",")
    bench = results.stage(
        "load",
        lambda: bench_prefill.PrefillBench(
            sizes, tokens=args.tokens, chunk=args.rows, device=device, plans=plans
        ),
        needs=30,
    )
    assert isinstance(bench, bench_prefill.PrefillBench), "the weights could not be made"
    results.data["load"] = {"seconds": bench.load_seconds, "GB": bench.weights.nbytes / 1e9}
    results.data["library_has_the_same_bits"] = bench.library
    with torch.inference_mode():
        if "kernels" in parts:
            import prefill_kernels

            if args.dry_run:
                prefill_kernels.MOST = 2
            whole, results.seconds = results.seconds, min(results.seconds, args.kernel_seconds)
            bench.prefill.chunk = args.kernel_rows
            prefill_kernels.run(results, bench, ceilings, plans, clock(args.dry_run), args.tokens)
            results.seconds, bench.prefill.chunk = whole, args.rows
        if args.dry_run:
            results.stage("chunk", lambda: clock(True)(bench.chunk(40)))
            results.stage("prompt", lambda: bench.prompt(20))
            return
        if "chunks" in parts:
            contexts = [0, args.tokens // 4, args.tokens - args.rows]
            lines = results.stage(
                "chunks", lambda: bench_prefill.chunks(bench, ceilings, contexts), needs=30
            )
            if isinstance(lines, list):
                results.data["estimate_s"] = bench_prefill.long_prompt_estimate(lines, args.tokens)
        if "prompts" in parts:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            lengths = (1024, 8192, 65536)
            results.stage(
                "prompts", lambda: bench_prefill.prompts(bench, ceilings, lengths), needs=30
            )
            results.data["memory"] = {
                "taken_GB": (torch.cuda.max_memory_allocated() - before) / 1e9,
                "planned_GB": workspace_bytes(sizes, args.rows) / 1e9,
            }
        if "million" in parts:
            free = torch.cuda.mem_get_info()[0] - (4 << 30)
            bench.prefill.chunk = plan_prefill(sizes, args.tokens, free, state=False).rows
            results.data["million_chunk"] = bench.prefill.chunk
            results.stage(
                "million",
                lambda: bench_prefill.prompts(bench, ceilings, (args.tokens,)),
                needs=1.05 * float(results.data.get("estimate_s", 60)),
            )


def main() -> None:
    args = parse()
    results = Results(args.json, args.seconds)
    if args.dry_run:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        import warnings

        import numpy as np

        np.seterr(all="ignore")
        warnings.simplefilter("ignore", RuntimeWarning)
        importlib.import_module("tests.kernels.interpreter")
    import torch
    import triton

    from deepdraft.engine.dummy import dummy_args
    from deepdraft.models.v41_prefill_layers import Plans
    from deepdraft.proof import bench_prefill
    from deepdraft.proof.bench_step_main import copy_rate, read_args

    results.data["versions"] = {"torch": torch.__version__, "triton": triton.__version__}
    results.data["settings"] = {"pool": args.pool, "tokens": args.tokens, "rows": args.rows}
    plans, device = Plans(), "cuda"
    if args.dry_run:
        from tests.kernels import prefill_tiny

        sizes, plans, device = prefill_tiny.args(), prefill_tiny.PLANS, "cpu"
        args.tokens, args.rows, args.kernel_rows = 64, 16, 16
        ceilings = bench_prefill.Ceilings(1e9, 1e9)
    else:
        results.data["device"] = torch.cuda.get_device_name()
        sizes = dummy_args(read_args(None), expert_pool=args.pool, engram_rows=1 << 21)
        ceilings = bench_prefill.Ceilings(bench_prefill.matrix_rate(), copy_rate())
    if args.plans is not None and args.plans.is_file():
        known = json.loads(args.plans.read_text()).get("best", {})
        for name, values in known.items() if isinstance(known, dict) else ():
            if hasattr(plans, name):
                plan = dataclasses.replace(getattr(plans, name), **values)
                plans = dataclasses.replace(plans, **{name: plan})
    if args.on_the_way:
        plans = dataclasses.replace(plans, plain_rows=1 << 40, plain_picks=1 << 40)
    results.data["plans"] = dataclasses.asdict(plans)
    results.data["ceilings"] = dataclasses.asdict(ceilings)
    parts = args.only.split(",")
    if {"kernels", "chunks", "prompts", "million"} & set(parts):
        loaded(results, args, sizes, ceilings, plans, device)
    if "checks" in parts:
        if not args.dry_run:
            torch.cuda.empty_cache()
        checks(results, args, sizes, device, plans)
    if "tests" in parts and not args.dry_run:
        run_tests(results)
    results.save()
    print(f"{results.data['seconds']} s")


if __name__ == "__main__":
    main()
