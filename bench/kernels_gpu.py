"""One script for a GPU host: check every kernel, its rows, and time it.

    python bench/kernels_gpu.py --json FILE [--parts ceilings,check,rows,time,tune] [--only NAME]

check   the tests of tests/kernels, large cases included (no pytest needed), in parallel processes
rows    bits of every kernel's rows for 1..16 rows, permuted, beside poisoned rows, and twice over
time    us, GB/s and the share of the copy rate measured in the same run; CUDA graphs, median of 7
tune    plans of the weight products; the best is to be frozen in deepdraft/kernels/layout.py

Needs torch, triton, numpy, safetensors, click. `--dry-run` runs everything with tiny sizes in
Triton's interpreter on a CPU (times are meaningless then).
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(Path(__file__).resolve().parent))
PARTS = ("ceilings", "check", "rows", "time")
MODULES = (
    "test_rounding", "test_gemv", "test_moe", "test_mhc", "test_cache", "test_attention",
    "test_index", "test_step_ends",
)  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}, tune")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, interpreter, no GPU")
    parser.add_argument("--module", help=argparse.SUPPRESS)  # one test module, in a child
    return parser.parse_args()


# ---- check ---------------------------------------------------------------------------------


def run_module(name: str) -> None:
    """In a child process: the tests of one module; the result is the last line printed."""
    import mini_pytest

    mini_pytest.install()
    import tests.kernels.interpreter  # noqa: F401  before any kernel

    result = mini_pytest.run(importlib.import_module(f"tests.kernels.{name}"))
    print(json.dumps(result), flush=True)


def check(args: argparse.Namespace) -> dict:
    command = [sys.executable, "-W", "ignore", __file__, "--module"]
    environment = dict(os.environ, CUDA_VISIBLE_DEVICES="") if args.dry_run else dict(os.environ)
    children = {}
    for name in MODULES:
        if args.only in name:
            children[name] = subprocess.Popen(
                [*command, name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                env=environment, cwd=ROOT,
            )  # fmt: skip
            if args.dry_run:
                children[name].wait()
    results = {}
    for name, child in children.items():
        output = child.communicate()[0]
        lines = output.strip().splitlines()
        try:
            results[name] = json.loads(lines[-1])
        except (IndexError, ValueError):
            results[name] = {"passed": 0, "failed": [f"the module did not finish: {lines[-3:]}"]}
        failed = results[name]["failed"]
        if failed:
            print(output)
        print(f"check {name:18} {results[name]}"[:300], flush=True)
    return results


# ---- rows ----------------------------------------------------------------------------------


def same_bits(got, want) -> bool:
    """Bitwise equality: NaN equals itself, -0 is not 0."""
    import torch

    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    kind = integer[got.element_size()]
    return torch.equal(got.contiguous().view(kind), want.contiguous().view(kind))


def check_rows(operands, args: argparse.Namespace) -> dict:
    from kernel_timed import row_cases

    counts = (1, 9) if args.dry_run else range(1, 17)
    results = {}
    for case in row_cases(operands):
        if args.only not in case.name:
            continue
        everyone = list(range(16))
        full = case.run(everyone)
        wrong = []
        selections = [list(range(r)) for r in counts]
        selections += [[r] for r in ((5,) if args.dry_run else everyone)]
        selections += [everyone[::-1], everyone, [3, 11, 7]]
        for rows in selections:
            for number, (got, want) in enumerate(zip(case.run(rows), full, strict=True)):
                if not same_bits(got[: len(rows)], want[rows]):
                    wrong.append(f"rows {rows}, output {number}")
        results[case.name] = {"selections": len(selections), "wrong": wrong}
        print(f"rows {case.name:20} {'equal' if not wrong else f'WRONG {wrong[:4]}'}", flush=True)
    return results


# ---- time ----------------------------------------------------------------------------------


def timed_us(case, dry: bool) -> float:
    """Microseconds of one launch: a graph of at least 20, replayed; median of 7."""
    import torch

    if dry:
        start = time.perf_counter()
        for i in range(case.copies):
            case.launch(i)
        return (time.perf_counter() - start) * 1e6 / case.copies
    case.launch(0)
    torch.cuda.synchronize()
    launches = max(20, case.copies)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            case.launch(i % case.copies)
    graph.replay()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(7):
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / launches)
    del graph
    return statistics.median(times)


def ceilings(dry: bool) -> dict:
    """Copy and read rates in bytes a second, the gap between tiny kernels of a graph in us."""
    import torch
    from kernel_timed import Timed

    if dry:
        return {"copy": 1e9, "read": 1e9, "gap_us": 1.0}
    source = torch.empty(2**30, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(source)
    size = source.nbytes
    copy = timed_us(Timed("copy", 2 * size, lambda i: target.copy_(source)), dry)
    read = timed_us(Timed("read", size, lambda i: source.view(1024, -1).amax(1)), dry)
    one = torch.zeros(1, device="cuda")
    gap = timed_us(Timed("gap", 0, lambda i: one.add_(1.0)), dry)
    result = {"copy": 2 * size / copy * 1e6, "read": size / read * 1e6, "gap_us": gap}
    print(
        f"copy {result['copy'] / 1e12:.2f} TB/s, read {result['read'] / 1e12:.2f}, gap {gap:.2f} us"
    )
    return result


def report(case, us: float, rate: float) -> dict:
    floor = case.bytes / rate * 1e6
    line = {
        "us": round(us, 2),
        "MB": round(case.bytes / 1e6, 3),
        "GB_per_s": round(case.bytes / us / 1e3, 1),
        "share_of_copy": round(floor / us, 3),
    }
    print(
        f"time {case.name:36} {us:9.2f} us {line['MB']:9.2f} MB {line['GB_per_s']:7.0f} GB/s "
        f"{100 * line['share_of_copy']:5.1f} %",
        flush=True,
    )
    return line


def release() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def time_all(operands, args: argparse.Namespace, rate: float) -> dict:
    from kernel_timed import timed_cases

    results = {}
    for case in timed_cases(operands):
        if args.only in case.name:
            results[case.name] = report(case, timed_us(case, args.dry_run), rate)
        del case
        release()
    return results


def tune(operands, args: argparse.Namespace, rate: float) -> dict:
    import kernel_timed as kt

    s, results = operands.sizes, {}

    def note(name: str, plan, case) -> None:
        try:
            us = timed_us(case, args.dry_run)
        except Exception as e:  # a plan that does not compile or fit is no plan
            print(f"tune {name} {plan}: {type(e).__name__}: {e}"[:160], flush=True)
            return
        results.setdefault(name, []).append({"us": round(us, 2), **vars_of(plan)})

    for part in s.slices:
        for shape in kt.dense_shapes(s, part):
            name, kind, rows, cols, blocks = shape
            if kind == "bf16" or blocks > 1 or args.only not in name:
                continue
            for plan in kt.dense_variants(rows, cols):
                note(f"{name} 1/{part}", plan, kt.dense_timed(operands, shape, "", plan))
                release()
        width = s.width // part
        for up in (True, False):
            rows, cols = (2 * width, s.hidden) if up else (s.hidden, width)
            name = f"experts {'up' if up else 'down'} {width}"
            if args.only not in name:
                continue
            for plan in kt.expert_variants(rows, cols):
                plans = (plan, None) if up else (None, plan)
                for case in kt.expert_timed(operands, width, [(6, 22)], *plans):
                    if case.name.startswith(name):
                        note(name, plan, case)
                release()
    for name, tried in results.items():
        tried.sort(key=lambda r: r["us"])
        print(f"tune {name}: {tried[:3]}", flush=True)
    return results


def vars_of(plan) -> dict:
    return {k: getattr(plan, k) for k in ("tile", "step", "split", "warps", "stages")}


def main() -> None:
    args = parse()
    if args.dry_run or args.module:
        import warnings

        import numpy as np

        np.seterr(all="ignore")
        warnings.simplefilter("ignore", RuntimeWarning)
    if args.module:
        run_module(args.module)
        return
    parts = args.parts.split(",")
    results: dict = {"parts": parts, "dry_run": args.dry_run}
    start = time.perf_counter()
    if args.dry_run:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        import tests.kernels.interpreter  # noqa: F401
    import torch

    if not args.dry_run and not torch.cuda.is_available():
        raise SystemExit("no CUDA device; --dry-run checks the script itself on a CPU")
    import triton

    results["versions"] = {"torch": torch.__version__, "triton": triton.__version__}
    results["device"] = "cpu" if args.dry_run else torch.cuda.get_device_name()

    def save() -> None:
        results["seconds"] = round(time.perf_counter() - start, 1)
        if args.json:
            args.json.write_text(json.dumps(results, indent=1))

    if "check" in parts:
        results["check"] = check(args)
        save()
    import kernel_timed as kt

    sizes = kt.TINY if args.dry_run else kt.PUBLISHED
    operands = kt.Operands("cpu" if args.dry_run else "cuda", sizes)
    if "rows" in parts:
        results["rows"] = check_rows(operands, args)
        save()
        release()
    if {"ceilings", "time", "tune"} & set(parts):
        results["ceilings"] = ceilings(args.dry_run)
        save()
        release()
        rate = results["ceilings"]["copy"]
        if "time" in parts:
            results["time"] = time_all(operands, args, rate)
            save()
        if "tune" in parts:
            results["tune"] = tune(operands, args, rate)
    save()
    bad = [n for n, r in results.get("check", {}).items() if r["failed"]]
    bad += [n for n, r in results.get("rows", {}).items() if r["wrong"]]
    print(f"{results['seconds']} s; " + (f"WRONG: {', '.join(bad)}" if bad else "all right"))
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
