"""CUDA C++ products again and again over fresh memory: is every result the first one, bit for bit?

    python bench/product_stress_gpu.py --json FILE [--seconds 60] [--beside] [--dry]

A graph has one launch for each of some 6 GB of matrices of one shape, alone or (--beside) beside
the product of a bf16 map of 11 MB (Triton's kernel) on another stream, as the step has it; all
results are compared on the device with those of launches that ran one by one. Each shape is
replayed plainly and with programmatic launch: replays, results with other bits,
microseconds of a launch. `where`: of the first wrong results the columns, and which group's weights
were other ones: zeros, those of the next unit of 32 rows (a place of the ring was overwritten too
early) or of the one before (read too early).

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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from deepdraft.kernels import gemv, layout, moe, runtime  # noqa: E402
from deepdraft.kernels.native import build, fragments, stream  # noqa: E402
from deepdraft.kernels.native.fragments import Streamed, StreamPlan  # noqa: E402
from deepdraft.quant import formats  # noqa: E402

CASES: dict[str, tuple[str, int, int, int, StreamPlan | None]] = {
    "wq_b": ("fp8", 36864, 1280, 1, None),
    "wq_b, TP 2": ("fp8", 16384, 1280, 1, None),
    "up": ("up", 4608, 5120, 1, None),
    "wo_b": ("fp8", 5120, 8192, 1, None),
    "wo_a": ("bf16", 8192, 4096, 8, None),
    "shared": ("fp8", 4608, 5120, 1, None),
    "w_in": ("fp8", 1792, 5120, 1, None),
    "main_proj": ("fp8", 5120, 15360, 1, None),
    "engram": ("fp8", 25600, 6144, 1, None),
    "down": ("down", 5120, 2304, 1, None),
}
"""What its rows are, rows, columns, blocks, the plan where it is not the usual one."""
TINY: dict[str, tuple[str, int, int, int, StreamPlan | None]] = {
    "dense": ("fp8", 960, 320, 1, StreamPlan(5, 1, 2, 1, 1, 5, 0, 1)),
    "up": ("up", 64, 64, 1, StreamPlan(2, 2, 1, 2, 1, 1, 1, 1)),
}
EXPERTS, PICKS = 22, 6
WAYS = ((False, False), (True, False), (False, True), (True, True))
"""Programmatic launch, beside another product."""


class Device:
    """Where it runs, and what a graph is there."""

    def __init__(self, *, dry: bool) -> None:
        self.dry, self.name = dry, "cpu" if dry else "cuda"
        self.random = torch.Generator(self.name).manual_seed(0)
        self.side = None if dry else torch.cuda.Stream()

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

    def beside(self, number: int) -> Callable[[], Callable[[], Tensor]]:
        """Starts a bf16 product on another stream; what it returns joins it."""
        rows, cols = (64, 320) if self.dry else (1088, 5120)
        weight = torch.randn(rows, cols, device=self.name, generator=self.random)
        maps = [layout.tile_bf16(weight + i) for i in range(number)]
        u, turn = self.rows(cols), iter(range(1 << 30))

        def start() -> Callable[[], Tensor]:
            w = maps[next(turn) % number]
            if self.dry:
                found = gemv.gemv(u, w, dtype=torch.float32)
                return lambda: found
            side, main = self.side, torch.cuda.current_stream()
            side.wait_stream(main)
            with torch.cuda.stream(side):
                found = gemv.gemv(u, w, dtype=torch.float32)

            def join() -> Tensor:
                main.wait_stream(side)
                return found

            return join

        return start

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


def prebuild(names: list[str]) -> None:
    """Compile all of it side by side."""
    kinds = {"fp8": stream.FP8_ROWS, "bf16": stream.BF16_ROWS, "up": stream.UP, "down": stream.DOWN}
    wanted = []
    for kind, rows, cols, _, plan in (CASES[name] for name in names):
        experts = kind in ("up", "down")
        plans = fragments.expert_stream_plan if experts else fragments.dense_stream_plan
        found = plan or plans(rows, cols)
        assert found is not None
        wanted.append(stream.macros(kinds[kind], found, 0))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda made: build.cubin("stream.cu", made, "sm_90a"), wanted))


@dataclass(slots=True)
class Product:
    """A launch, and for dense maps its parts."""

    run: Callable[[], Tensor]
    w: Streamed
    x: gemv.QuantRows | None = None

    def __call__(self) -> Tensor:
        return self.run()


def launches(device: Device, name: str, amount: int) -> list[Product]:
    """One product for each matrix of so many bytes in all."""
    kind, rows, cols, blocks, plan = (TINY if device.dry else CASES)[name]
    first = matrix(device, kind, rows, cols, plan)
    count = max(2, min(160, amount // first.nbytes))
    found: list[Product] = []
    if kind in ("up", "down"):
        order = torch.arange(8 * PICKS, device=device.name).view(8, PICKS) % EXPERTS
        listed = moe.expert_list(order.int())
        weights = torch.full((8, PICKS), 0.25, device=device.name)
    for at in range(count):
        w = first if at == 0 else matrix(device, kind, rows, cols, plan)
        x = device.rows(cols * blocks)
        if kind == "up":
            quant = gemv.quantize_rows(x)
            run = partial(moe.routed_up, quant, listed, weights, w, limit=10.0)
            found.append(Product(run, w))
        elif kind == "down":
            h = x.repeat(PICKS, 1)
            found.append(Product(partial(moe.routed_down, h, listed, w, picks=PICKS), w))
        else:
            quant = gemv.quantize_rows(x) if kind == "fp8" else None
            run = partial(gemv.gemv, x if quant is None else quant, w, blocks=blocks)
            found.append(Product(run, w, quant))
    return found


def bits(t: Tensor) -> Tensor:
    return t.view(torch.int16)


def stressed(
    device: Device,
    runs: list[Product],
    *,
    programmatic: bool,
    seconds: float,
    beside: Callable[[], Callable[[], Tensor]] | None = None,
) -> dict:
    """Replays for so long: how many results had other bits than one by one."""
    want = []
    for run in runs:
        want.append(run().clone())
        device.wait()
    wrong = torch.zeros(len(runs), dtype=torch.int64, device=device.name)
    outputs: list[Tensor] = []

    def all_runs() -> None:
        outputs.clear()
        for run in runs:
            join = None if beside is None else beside()
            outputs.append(run())
            if join is not None:
                join()

    def graph() -> None:
        all_runs()
        for at, (got, right) in enumerate(zip(outputs, want, strict=True)):
            wrong[at] += (bits(got) != bits(right)).any()

    runtime.use_programmatic_launch(programmatic)
    try:
        graph()
        device.wait()
        replay = device.captured(graph)
        kept = list(outputs)
        alone = device.captured(all_runs)
    finally:
        runtime.use_programmatic_launch(False)
    found: dict = {"where": []}
    begin, replays = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds and replays < (2 if device.dry else 100_000):
        before = int(wrong.sum())
        for _ in range(1 if device.dry else 20):
            replay()
            replays += 1
        if int(wrong.sum()) > before and len(found["where"]) < 6:
            found["where"] += where(kept, want, runs)
    if not device.dry:
        begin = time.perf_counter()
        for _ in range(5):
            alone()
        device.wait()
        found["us"] = round(1e6 * (time.perf_counter() - begin) / 5 / len(runs), 2)
    found |= {"replays": replays, "launches": replays * len(runs), "wrong": int(wrong.sum())}
    found["finite"] = all(bool(torch.isfinite(w).all()) for w in want)
    return found


def where(got: list[Tensor], want: list[Tensor], runs: list[Product]) -> list[dict]:
    """Of results that are wrong still: rows, columns of each unit, whose weights they were."""
    found = []
    for one, right, run in zip(got, want, runs, strict=True):
        apart = (bits(one) != bits(right)).flatten(0, -2)
        if not apart.any() or len(found) == 3:
            continue
        units = (apart.any(0).nonzero()[:, 0] // 32).unique().tolist()
        for unit in units[:2]:
            here = slice(32 * unit, 32 * unit + 32)
            columns = apart[:, here].any(0).nonzero()[:, 0]
            note: dict = {"unit": unit, "rows": int(apart[:, here].any(1).sum()),
                          "columns": columns.tolist()}  # fmt: skip
            if run.x is not None and run.w.kind == "fp8":
                delta = (one.double() - right.double())[:, here][:, columns]
                note |= explained(delta, run.w, run.x, unit, columns)
            found.append(note)
    return found


def explained(
    delta: Tensor, w: Streamed, x: gemv.QuantRows, unit: int, columns: Tensor
) -> dict[str, object]:
    """Which group of columns, taken from which unit instead, explains a difference [R, n] best, and
    what share of it is left then."""
    groups = w.cols // 32
    scales = x.scales.t().double()  # [R, G]
    rows = formats.decode_e4m3(x.codes, torch.float64).view(-1, groups, 32) * scales[:, :, None]

    def contributions(number: int) -> Tensor:
        """[G, R, n] of a unit's weights; scales are in registers, so they are the right ones."""
        part = replace(
            w, rows=32, values=w.values[number : number + 1], scales=w.scales[unit : unit + 1]
        )
        codes, own = fragments.unstream(part)
        weight = formats.dequantize_fp8_tile(codes, own, torch.float64)[columns]
        return torch.einsum("rgk,ngk->grn", rows, weight.view(-1, groups, 32))

    own, best = contributions(unit), (float("inf"), "", -1)
    last = w.rows // 32 - 1
    others = {"zeros": None, "the next": min(unit + 1, last), "the one before": max(unit - 1, 0)}
    for name, number in others.items():
        other = torch.zeros_like(own) if number is None else contributions(number)
        left = (delta[None] - (other - own)).flatten(1).norm(dim=1) / delta.norm()
        group = int(left.argmin())
        best = min(best, (float(left[group]), name, group))
    return {"left": round(best[0], 3), "weights": best[1], "group": best[2]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--only", default="", help="cases, by name")
    parser.add_argument("--each", type=float, default=1.0, help="seconds of one case")
    parser.add_argument("--beside", action="store_true", help="also beside another product")
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    begin = time.perf_counter()
    device = Device(dry=args.dry)
    results: dict = {"device": "cpu" if args.dry else torch.cuda.get_device_name()}
    names = [n for n in args.only.split(";") if n] or list(TINY if args.dry else CASES)
    if not args.dry:
        prebuild(names)
    beside = device.beside(2 if args.dry else 24) if args.beside else None
    for name in names:
        runs = launches(device, name, 1 << 14 if args.dry else 6_000_000_000)
        for programmatic, side in WAYS if args.beside else WAYS[:2]:
            if time.perf_counter() - begin > args.seconds - 2 * args.each - 1:
                continue
            key = f"{name}{', programmatic' * programmatic}{', beside' * side}"
            results[key] = stressed(
                device, runs, programmatic=programmatic, seconds=args.each,
                beside=beside if side else None,
            )  # fmt: skip
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
