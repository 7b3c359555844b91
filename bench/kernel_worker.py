"""A child process of bench/kernels_gpu.py: some cases, one line of JSON before and after each.

    python bench/kernel_worker.py PART [--module M] [--shard I/N] [--skip FILE] [--dry]

Owns: running cases one by one, so that the parent knows which one hung or broke the device. A
faulty kernel poisons its process: the worker then leaves with status 3 and is started again
without that case.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]
BROKEN_DEVICE = 3
PLAN_FIELDS = ("tile", "step", "split", "warps", "stages", "registers")


def say(**fields: object) -> None:
    print("@", json.dumps(fields), flush=True)


class Worker:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.skip = set(json.loads(args.skip.read_text())) if args.skip else set()
        self.plans = json.loads(args.plans.read_text()) if args.plans else {}
        self.index, self.count = map(int, args.shard.split("/"))
        self.seen = 0

    def each(self, name: str, run: Callable[[], dict]) -> None:
        """One case, unless it was done before or is another shard's."""
        self.seen += 1
        if name in self.skip or (self.seen - 1) % self.count != self.index:
            return
        if self.args.only not in name:
            return
        say(start=name)
        begun = time.perf_counter()
        try:
            result = run()
        except Exception as e:
            text = f"{type(e).__name__}: {e}"
            say(case=name, error=text[-600:], seconds=round(time.perf_counter() - begun, 2))
            if "CUDA" in text or "Accelerator" in type(e).__name__:
                sys.stdout.flush()
                os._exit(BROKEN_DEVICE)
            return
        say(case=name, seconds=round(time.perf_counter() - begun, 2), **result)


# ---- parts ---------------------------------------------------------------------------------


def check(worker: Worker) -> None:
    import mini_pytest

    mini_pytest.install()
    import tests.kernels.interpreter  # noqa: F401  before any kernel

    module = importlib.import_module(f"tests.kernels.{worker.args.module}")
    for name, run in mini_pytest.calls(module):

        def one(run=run) -> dict:
            run()
            synchronize()
            return {"passed": True}

        worker.each(f"{worker.args.module}.{name}", one)


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def release() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def operands(dry: bool):
    import torch

    if not dry and not torch.cuda.is_available():
        raise SystemExit("no CUDA device; --dry-run checks the script itself on a CPU")
    import kernel_timed as kt

    return kt.Operands("cpu" if dry else "cuda", kt.TINY if dry else kt.PUBLISHED)


def same_bits(got, want) -> bool:
    """Bitwise equality: NaN equals itself, -0 is not 0."""
    import torch

    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    kind = integer[got.element_size()]
    return torch.equal(got.contiguous().view(kind), want.contiguous().view(kind))


def rows(worker: Worker) -> None:
    from kernel_timed import row_cases

    from deepdraft.kernels import runtime

    dry = worker.args.dry
    counts = (1, 9) if dry else range(1, 17)

    def one(case) -> dict:
        everyone = list(range(16))
        runtime.use_programmatic_launch(False)
        full = case.run(everyone)
        synchronize()
        runtime.use_programmatic_launch(True)  # the same bits are asked for
        wrong = []
        selections = [list(range(r)) for r in counts]
        selections += [[r] for r in ((5,) if dry else everyone)]
        selections += [everyone[::-1], everyone, [3, 11, 7]]
        for chosen in selections:
            for number, (got, want) in enumerate(zip(case.run(chosen), full, strict=True)):
                if not same_bits(got[: len(chosen)], want[chosen]):
                    wrong.append(f"rows {chosen}, output {number}")
        return {"selections": len(selections), "wrong": wrong}

    for case in row_cases(operands(dry)):
        worker.each(case.name, lambda case=case: one(case))
        release()


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


def measured(case, dry: bool) -> dict:
    us = timed_us(case, dry)
    return {
        "us": round(us, 2),
        "MB": round(case.bytes / 1e6, 3),
        "GB_per_s": round(case.bytes / us / 1e3, 1),
    }


def ceilings(worker: Worker) -> None:
    """Copy and read rates in bytes a second, the gap between tiny kernels of a graph in us."""
    import torch
    from kernel_timed import Timed

    dry = worker.args.dry
    if dry:
        worker.each("ceilings", lambda: {"copy": 1e9, "read": 1e9, "gap_us": 1.0})
        return

    def one() -> dict:
        source = torch.empty(2**30, dtype=torch.float32, device="cuda").normal_()
        target = torch.empty_like(source)
        size = source.nbytes
        copy = timed_us(Timed("copy", 2 * size, lambda i: target.copy_(source)), dry)
        read = timed_us(Timed("read", size, lambda i: source.view(4096, -1).amax(1)), dry)
        tiny = torch.zeros(1, device="cuda")
        gap = timed_us(Timed("gap", 0, lambda i: tiny.add_(1.0)), dry)
        return {
            "copy": 2 * size / copy * 1e6,
            "read": size / read * 1e6,
            "gap_us": gap,
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
        }

    worker.each("ceilings", one)


def time_part(worker: Worker) -> None:
    from kernel_timed import timed_groups

    o = operands(worker.args.dry)
    plans = {name: plan_of(p) for name, p in worker.plans.items()}
    for group, cases in timed_groups(o, plans):
        if group in worker.skip or (plans and not group.startswith("weights")):
            continue
        say(start=group)
        try:
            for case in cases():
                worker.each(case.name, lambda case=case: measured(case, worker.args.dry))
                del case
                release()
        except Exception as e:
            say(case=group, error=f"{type(e).__name__}: {e}"[-600:], seconds=0)
            if "CUDA" in str(e):
                os._exit(BROKEN_DEVICE)


def plan_of(fields: dict):
    from deepdraft.kernels.layout import Plan

    return Plan(**{k: fields[k] for k in PLAN_FIELDS})


def tune(worker: Worker) -> None:
    from kernel_tuned import tune_cases

    for name, key, plan, make in tune_cases(operands(worker.args.dry)):
        fields = {k: getattr(plan, k) for k in PLAN_FIELDS}
        label = f"{name}|{'/'.join(map(str, fields.values()))}"
        worker.each(
            label,
            lambda make=make, name=name, key=key, fields=fields: {
                "shape": name, "key": key, **measured(make(), worker.args.dry), **fields,
            },
        )  # fmt: skip
        release()


def launched(case) -> dict:
    case.launch(0)
    return {}


def ran(case) -> dict:
    case.run([0, 1])
    return {}


def compile_part(worker: Worker) -> None:
    """Fill Triton's cache with what another part (--module) launches; no device is touched."""
    if worker.args.dry:
        return
    import kernel_timed as kt
    import kernels_sass
    from kernel_tuned import tune_cases

    kernels_sass.capture([])
    o = kt.MetaOperands(kt.PUBLISHED)
    if worker.args.module == "tune":
        for name, _, plan, make in tune_cases(o):
            worker.each(f"compile {name} {plan}", lambda make=make: launched(make()))
    elif worker.args.module == "rows":
        for case in kt.row_cases(o):
            worker.each(f"compile {case.name}", lambda case=case: ran(case))
    else:
        for _, cases in kt.timed_groups(o, {}):
            for case in cases():
                worker.each(f"compile {case.name}", lambda case=case: launched(case))


PARTS = {
    "check": check, "compile": compile_part, "rows": rows, "ceilings": ceilings,
    "time": time_part, "tune": tune,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--module", default="")
    parser.add_argument("--shard", default="0/1")
    parser.add_argument("--skip", type=Path)
    parser.add_argument("--plans", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--pdl", action="store_true", help="programmatic launch")
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    if args.dry:
        import warnings

        import numpy as np

        np.seterr(all="ignore")
        warnings.simplefilter("ignore", RuntimeWarning)
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        import tests.kernels.interpreter  # noqa: F401  before any kernel
    if args.pdl:
        from deepdraft.kernels import runtime

        runtime.use_programmatic_launch(True)
    PARTS[args.part](Worker(args))
    say(finished=args.part)


if __name__ == "__main__":
    main()
