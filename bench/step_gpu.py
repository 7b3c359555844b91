"""One script for a GPU host: the whole decode step, checked and timed.

    python bench/step_gpu.py --json FILE --seconds 540 [--only published,golden,demo]

golden     set A: every layer against the CPU reference, rows bit by bit, drafted = plain
demo       the bundled model against the CPU's quant mode, drafted = plain, accepted drafts
published  random weights of the published shape, 40 layers, a pool of 96 experts: graph times by
           rows and routing, time by kernel, stages left out, host gap; then 18 layers x 384

The first two run in child processes while the third loads and compiles; nothing is timed before
they are done. Results are written after every stage; a stage that fails is reported, the rest runs.
`--dry-run` runs everything with tiny sizes in Triton's interpreter on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from step_results import BEGIN, Results  # noqa: E402


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--only", default="golden,demo,published")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--pool", type=int, default=96)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--prompts", type=int, default=100)
    return parser.parse_args()


def spawn(args: argparse.Namespace, name: str) -> subprocess.Popen:
    """A child process for one checkpoint; its results lie beside ours."""
    path = args.json.with_name(f"{args.json.stem}-{name}.json")
    command = [sys.executable, "-W", "ignore", __file__, "--child", name, "--json", str(path)]
    command += ["--seconds", str(min(230.0, args.seconds * 0.45)), "--prompts", str(args.prompts)]
    command += ["--dry-run"] if args.dry_run else []
    log = path.with_suffix(".log").open("w")
    return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)


def main() -> None:
    args = parse()
    results = Results(args.json, args.seconds)
    if args.dry_run:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        import warnings

        import numpy as np

        np.seterr(all="ignore")
        warnings.simplefilter("ignore", RuntimeWarning)
        import tests.kernels.interpreter  # noqa: F401
    import torch
    import triton

    results.data["versions"] = {"torch": torch.__version__, "triton": triton.__version__}
    if args.child:
        import step_checks

        getattr(step_checks, f"child_{args.child}")(args, results)
        results.save()
        return
    if not args.dry_run:
        results.data["device"] = torch.cuda.get_device_name()
    parts = args.only.split(",")
    children = {name: spawn(args, name) for name in ("golden", "demo") if name in parts}

    def wait() -> None:
        """For the children: they share the GPU, so nothing is timed beside them."""
        until = BEGIN + min(240.0, args.seconds * 0.5)
        for name, child in children.items():
            try:
                child.wait(max(1.0, until - time.perf_counter()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
                results.data[f"{name}_process"] = "killed: out of time"
            path = args.json.with_name(f"{args.json.stem}-{name}.json")
            results.data[name] = json.loads(path.read_text()) if path.exists() else None
            log = path.with_suffix(".log")
            print(f"== {name}: {log.read_text()[-3000:]}", flush=True)
        children.clear()
        results.save()

    if "published" in parts and not args.dry_run:
        import step_published

        step_published.run(args, results, wait)
    wait()
    results.save()
    print(f"{results.data['seconds']} s")


if __name__ == "__main__":
    main()
