"""CUDA C++ products again and again over fresh memory: is every result the first one, bit for bit?

    python bench/product_stress_gpu.py --json FILE [--seconds 60] [--forms usual,voted] [--dry]

A graph has one launch for each of some 6 GB of matrices of one shape; all results are compared on
the device with those of launches that ran one by one. Each shape is replayed plainly and with
programmatic launch; per form: replays, results with other bits, microseconds of a launch. `where`:
of the first wrong result the columns and both values.

--dry runs tiny shapes on a CPU (tests/kernels/emulated).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from deepdraft.kernels import gemv, moe, runtime  # noqa: E402
from deepdraft.kernels.native import build, fragments, stream, trials  # noqa: E402
from deepdraft.kernels.native.fragments import Streamed, StreamPlan  # noqa: E402

QUERY = StreamPlan(5, 1, 8, 1, 1, 5, 0, 1)
CASES: dict[str, tuple[str, int, int, int, StreamPlan | None]] = {
    "wq_b, five tasks a block": ("fp8", 36864, 1280, 1, QUERY),
    "wq_b, TP 2": ("fp8", 16384, 1280, 1, QUERY),
    "up": ("up", 4608, 5120, 1, None),
    "wq_b": ("fp8", 36864, 1280, 1, None),
    "wo_b": ("fp8", 5120, 8192, 1, None),
    "wo_a": ("bf16", 8192, 4096, 8, None),
    "shared": ("fp8", 4608, 5120, 1, None),
    "w_in": ("fp8", 1792, 5120, 1, None),
    "main_proj": ("fp8", 5120, 15360, 1, None),
    "down": ("down", 5120, 2304, 1, None),
}
"""What its rows are, rows, columns, blocks, the plan where it is not the usual one."""
TINY: dict[str, tuple[str, int, int, int, StreamPlan | None]] = {
    "dense": ("fp8", 960, 320, 1, StreamPlan(5, 1, 2, 1, 1, 5, 0, 1)),
    "up": ("up", 64, 64, 1, StreamPlan(2, 2, 1, 2, 1, 1, 1, 1)),
}
EXPERTS, PICKS = 22, 6


def chosen(form: str) -> list[str]:
    return [name for name in form.split("+") if name != "usual"]


class Device:
    """Where it runs, and what a graph is there."""

    def __init__(self, *, dry: bool) -> None:
        self.dry, self.name = dry, "cpu" if dry else "cuda"
        self.random = torch.Generator(self.name).manual_seed(0)

    def bytes(self, *shape: int, low: int = 0, high: int = 256) -> Tensor:
        return torch.randint(
            low, high, shape, dtype=torch.uint8, device=self.name, generator=self.random
        )

    def rows(self, width: int) -> Tensor:
        x = torch.randn(8, width, device=self.name, generator=self.random)
        return x.bfloat16()

    def wait(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def captured(self, run: Callable[[], None]) -> Callable[[], object]:
        if self.dry:
            return run
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(graph):
            run()
        return graph.replay


def matrix(device: Device, kind: str, rows: int, cols: int, plan: StreamPlan | None) -> Streamed:
    """Random codes in fragment order, no NaN among them."""
    groups, units = cols // 32, rows // 32
    if kind in ("fp8", "bf16"):
        plan = plan or fragments.dense_stream_plan(rows, cols)
        values = device.bytes(units, groups, 2, 32, 16) & 0xF7
        scales = device.bytes(units, groups, low=117, high=122)
        size = 2 * units if plan is not None and plan.split > 1 else 1
        form = "fp8"
    else:
        plan = plan or fragments.expert_stream_plan(rows, cols)
        values = device.bytes(EXPERTS, units, groups, 32, 16)
        scales = device.bytes(EXPERTS, units, groups, 8, 4, low=118, high=123)
        size, form = 1, "fp4"
    assert plan is not None
    arrivals = torch.zeros(size, dtype=torch.int32, device=device.name)
    return Streamed(form, rows, cols, plan, values, scales, arrivals)


def prebuild(forms: list[str], names: list[str]) -> None:
    """Compile all of it side by side."""
    kinds = {"fp8": stream.FP8_ROWS, "bf16": stream.BF16_ROWS, "up": stream.UP, "down": stream.DOWN}
    wanted = []
    for form in forms:
        with trials.using(*chosen(form)):
            for kind, rows, cols, _, plan in (CASES[name] for name in names):
                experts = kind in ("up", "down")
                plans = fragments.expert_stream_plan if experts else fragments.dense_stream_plan
                found = plan or plans(rows, cols)
                assert found is not None
                more = {n.upper(): 1 for n in ("ordered", "fresh") if trials.on(n)}
                wanted.append({**stream.macros(kinds[kind], found, 0), **more})
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda made: build.cubin("stream.cu", made, "sm_90a"), wanted))


def launches(device: Device, name: str, amount: int) -> list[Callable[[], Tensor]]:
    """One product for each matrix of so many bytes in all."""
    kind, rows, cols, blocks, plan = (TINY if device.dry else CASES)[name]
    first = matrix(device, kind, rows, cols, plan)
    count = max(2, min(160, amount // first.nbytes))
    found: list[Callable[[], Tensor]] = []
    if kind in ("up", "down"):
        order = torch.arange(8 * PICKS, device=device.name).view(8, PICKS) % EXPERTS
        listed = moe.expert_list(order.int())
        weights = torch.full((8, PICKS), 0.25, device=device.name)
    for at in range(count):
        w = first if at == 0 else matrix(device, kind, rows, cols, plan)
        x = device.rows(cols * blocks)
        if kind == "up":
            quant = gemv.quantize_rows(x)
            found.append(
                lambda w=w, x=quant: moe.routed_up(x, listed, weights, w, limit=10.0)  # type: ignore[misc]
            )
        elif kind == "down":
            h = x.repeat(PICKS, 1)
            found.append(lambda w=w, h=h: moe.routed_down(h, listed, w, picks=PICKS))
        else:
            given = gemv.quantize_rows(x) if kind == "fp8" else x
            found.append(lambda w=w, x=given: gemv.gemv(x, w, blocks=blocks))
    return found


def bits(t: Tensor) -> Tensor:
    return t.view(torch.int16)


def stressed(
    device: Device, runs: list[Callable[[], Tensor]], *, programmatic: bool, seconds: float
) -> dict:
    """Replays for so long: how many results had other bits than one by one."""
    want = []
    for run in runs:
        want.append(run().clone())
        device.wait()
    wrong = torch.zeros(len(runs), dtype=torch.int64, device=device.name)
    outputs: list[Tensor] = []

    def graph() -> None:
        outputs[:] = [run() for run in runs]
        for at, (got, right) in enumerate(zip(outputs, want, strict=True)):
            wrong[at] += (bits(got) != bits(right)).any()

    runtime.use_programmatic_launch(programmatic)
    try:
        graph()
        device.wait()
        replay = device.captured(graph)
        alone = device.captured(lambda: outputs.__setitem__(slice(None), [run() for run in runs]))
    finally:
        runtime.use_programmatic_launch(False)
    replay()
    device.wait()
    kept = list(outputs)
    found: dict = {}
    begin, replays = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds and replays < (2 if device.dry else 100_000):
        before = int(wrong.sum())
        for _ in range(1 if device.dry else 20):
            replay()
            replays += 1
        if int(wrong.sum()) > before and "where" not in found:
            found |= where(kept, want)
    if not device.dry:
        begin = time.perf_counter()
        for _ in range(5):
            alone()
        device.wait()
        found["us"] = round(1e6 * (time.perf_counter() - begin) / 5 / len(runs), 2)
    found |= {"replays": replays, "launches": replays * len(runs), "wrong": int(wrong.sum())}
    found["finite"] = all(bool(torch.isfinite(w).all()) for w in want)
    return found


def where(got: list[Tensor], want: list[Tensor]) -> dict:
    """Of the first result that is wrong still: rows, columns, values."""
    for one, right in zip(got, want, strict=True):
        apart = (bits(one) != bits(right)).flatten(0, -2)
        if apart.any():
            columns = apart.any(0).nonzero()[:, 0]
            rows = apart.any(1).nonzero()[:, 0]
            some = columns[:64]
            values = [t.flatten(0, -2)[rows[:4]][:, some].tolist() for t in (right, one)]
            return {
                "where": {"rows": rows.tolist(), "columns": some.tolist(), "values": values,
                          "count": int(apart.sum())}
            }  # fmt: skip
    return {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--forms", default="usual,voted")
    parser.add_argument("--only", default="", help="cases, by name")
    parser.add_argument("--each", type=float, default=1.0, help="seconds of one case")
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    begin = time.perf_counter()
    device = Device(dry=args.dry)
    results: dict = {"device": "cpu" if args.dry else torch.cuda.get_device_name()}
    names = [n for n in args.only.split(";") if n] or list(TINY if args.dry else CASES)
    if not args.dry:
        prebuild(args.forms.split(","), names)
    for name in names:
        runs = launches(device, name, 1 << 14 if args.dry else 6_000_000_000)
        for form in args.forms.split(","):
            for programmatic in (False, True):
                if time.perf_counter() - begin > args.seconds - 2 * args.each - 1:
                    continue
                key = f"{name}, {form}{', programmatic' if programmatic else ''}"
                with trials.using(*chosen(form)):
                    results[key] = stressed(
                        device, runs, programmatic=programmatic, seconds=args.each
                    )
                print("--", key, json.dumps(results[key])[:600], flush=True)
                args.json.write_text(json.dumps(results, indent=1) + "\n")
        del runs
        if not args.dry:
            torch.cuda.empty_cache()
    results["seconds"] = round(time.perf_counter() - begin, 1)
    args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    if "--dry" in sys.argv:
        import tests.kernels.interpreter  # noqa: F401
        from tests.kernels.emulated import on_cpu

        on_cpu(main)()
    else:
        main()
