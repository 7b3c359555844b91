"""Compile the prefill kernels for sm_90 without a GPU and report what the compiler made of them.

    python bench/prefill_sass.py [--json FILE] [--only NAME]

As bench/kernels_sass.py: the real launch functions with tensors without storage, at the published
shapes. Per kernel: registers, spills, shared memory, machine instructions of the longest loop,
which matrix instructions. Needs torch, triton, nothing else.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import kernels_sass
import torch
from kernel_cases import fake_tiled, floats, ints, meta

from deepdraft.kernels import (
    layout,
    prefill_attention,
    prefill_experts,
    prefill_gemm,
    prefill_index,
    prefill_streams,
)
from deepdraft.kernels import prefill_unpacked as plain
from deepdraft.kernels.gemv import QuantRows
from deepdraft.kernels.native import fragments

ROWS = 8192
HIDDEN, WIDTH, PICKS, EXPERTS = 5120, 2304, 6, 384
Launch = Callable[[], object]


def halves(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=torch.bfloat16)


def streamed(kind: str, rows: int, cols: int) -> fragments.Streamed:
    units, groups = rows // 32, cols // 32
    plan = fragments.StreamPlan(1, 1, 8, 2, 1, 2)
    if kind == "fp8":
        values, scales = meta(units, groups, 2, 32, 16), meta(units, groups)
    else:
        values = meta(EXPERTS, units, groups, 32, 16)
        scales = meta(EXPERTS, units, groups, 8, 4)
    return fragments.Streamed(kind, rows, cols, plan, values, scales, ints(1))


def tiled_experts(rows: int, cols: int) -> layout.Tiled:
    plan = layout.expert_plan(rows, cols)
    values = meta(EXPERTS, rows // (2 * plan.tile), cols // 32, plan.tile, 32)
    scales = meta(EXPERTS, rows // (2 * plan.tile), cols // 32, 2, plan.tile)
    return layout.Tiled("fp4", rows, cols, plan, values, scales, ints(1))


def dense(rows: int, cols: int, order: str, **options: object) -> Launch:
    w = streamed("fp8", rows, cols) if order == "streamed" else fake_tiled(order, rows, cols)
    width = cols * options.get("blocks", 1)
    return lambda: prefill_gemm.gemm(halves(ROWS, width), w, **options)


def experts(order: str, which: str) -> Launch:
    make = tiled_experts if order == "tiled" else lambda n, k: streamed("fp4", n, k)
    count = ROWS * PICKS
    tiles = count // prefill_experts.PLAN.tall + EXPERTS
    picks = prefill_experts.SortedPicks(
        ints(count), ints(3, tiles), prefill_experts.PLAN.tall, ints(EXPERTS)
    )
    if which == "up":
        return lambda: prefill_experts.sorted_up(
            halves(ROWS, HIDDEN), picks, floats(ROWS, PICKS), make(2 * WIDTH, HIDDEN), limit=10.0
        )
    return lambda: prefill_experts.sorted_down(
        halves(count, WIDTH), picks, make(HIDDEN, WIDTH), rows=ROWS
    )


def unpacking(order: str, which: str) -> Launch:
    shape = (2 * WIDTH, HIDDEN) if which == "up" else (HIDDEN, WIDTH)
    w = tiled_experts(*shape) if order == "tiled" else streamed("fp4", *shape)
    space = halves(32 * shape[0] * shape[1])
    return lambda: plain.unpack_experts(w, 0, 32, space, together=which == "up")


def plain_experts(which: str) -> Launch:
    count = ROWS * PICKS
    at = ints(count), ints(3, count // plain.PLAN.tall + EXPERTS), ints(EXPERTS)
    if which == "up":
        return lambda: plain.plain_experts(
            halves(ROWS, HIDDEN), halves(32, 2 * WIDTH, HIDDEN), 32, *at, halves(count, WIDTH),
            picks=PICKS, weights=floats(ROWS, PICKS), limit=10.0,
        )  # fmt: skip
    return lambda: plain.plain_experts(
        halves(count, WIDTH), halves(32, HIDDEN, WIDTH), 32, *at, halves(count, HIDDEN),
        picks=PICKS,
    )  # fmt: skip


def cases() -> Iterator[tuple[str, Launch]]:
    """Name and launch of every kernel at the published sizes."""
    for order in ("fp8", "streamed"):
        yield f"dense wq_b {order}", dense(36864, 1280, order)
        yield f"dense wo_a {order}", dense(8192, 4096, order, blocks=8, quantize=True)
        yield f"dense wo_b {order}", dense(HIDDEN, 8192, order)
    for order in ("fp8", "streamed"):
        w = streamed("fp8", 36864, 1280) if order == "streamed" else fake_tiled(order, 36864, 1280)
        yield f"unpack wq_b {order}", lambda w=w: plain.unpack_dense(w, halves(36864 * 1280))
    yield "plain wq_b", lambda: plain.plain_gemm(halves(ROWS, 1280), halves(36864, 1280), 36864)
    yield (
        "plain wo_a",
        lambda: plain.plain_gemm(
            halves(ROWS, 32768), halves(8192, 4096), 8192, blocks=8, quantize=True
        ),
    )
    yield "dense raw bf16", dense(1056, HIDDEN, "bf16", dtype=torch.float32)
    codes = QuantRows(meta(ROWS, 6144), floats(192, ROWS))
    yield "values", lambda: prefill_gemm.values(codes)
    for order in ("tiled", "streamed"):
        for which in ("up", "down"):
            yield f"experts {which} {order}", experts(order, which)
            yield f"unpack {which} {order}", unpacking(order, which)
    for which in ("up", "down"):
        yield f"plain experts {which}", plain_experts(which)
    for name, keys in (("", meta(1 << 19, 68)), (" unpacked", halves(1 << 19, 128))):
        yield (
            f"index{name}",
            lambda keys=keys: prefill_index.stream_top(
                halves(ROWS, 32, 128), floats(ROWS, 1056), keys, ints(ROWS), ints(ROWS), 512,
                weight_scale=0.01, weight_start=1024, skip=512,
            ),
        )  # fmt: skip
    yield "key values", lambda: prefill_index.key_values(meta(1 << 19, 68), halves(1 << 19, 128))
    for name, main in (
        ("", {"main": meta(1 << 19, 288), "main_rows": ints(ROWS, 512)}),
        (" unpacked", {"main": halves(1 << 19, 512), "main_rows": ints(ROWS, 512)}),
        (" window only", {}),
    ):
        yield (
            f"attention{name}",
            lambda main=main: prefill_attention.attend_rows(
                halves(ROWS, 36864), floats(ROWS, 32), floats(ROWS, 32), halves(ROWS + 128, 512),
                ints(ROWS), floats(64), places=128, scale=512**-0.5, **main,
            ),
        )  # fmt: skip
    yield (
        "main values",
        lambda: prefill_attention.main_values(meta(1 << 19, 288), halves(1 << 19, 512)),
    )
    yield "window values", lambda: prefill_attention.window_values(meta(ROWS, 528))
    x, norm, coef = halves(ROWS, 4, HIDDEN), floats(HIDDEN), floats(ROWS, 24)
    mix = prefill_streams.Mix(halves(3, 24, 4 * HIDDEN), floats(24), floats(3))
    settings = {"mix": mix, "iters": 20, "eps": 1e-6, "norm_eps": 1e-20}
    yield (
        "streams after attention",
        lambda: prefill_streams.enter(x, norm, y=halves(ROWS, HIDDEN), coef=coef, **settings),
    )
    yield (
        "streams after experts",
        lambda: prefill_streams.enter(
            x, norm, y=halves(ROWS, PICKS, HIDDEN), shared=halves(ROWS, HIDDEN), coef=coef,
            **settings,
        ),
    )  # fmt: skip
    first = floats(ROWS, 4)
    yield "streams first", lambda: prefill_streams.enter(x, norm, pre=first, **settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    args = parser.parse_args()
    compiled: list = []
    kernels_sass.capture(compiled)
    results = []
    for name, run in cases():
        if args.only not in name:
            continue
        compiled.clear()
        begin = time.perf_counter()
        run()
        seconds = time.perf_counter() - begin
        for kernel_name, kernel, _ in compiled:
            report = {"case": name, "kernel": kernel_name, **kernels_sass.inspect(kernel)}
            results.append(report)
            print(
                f"{name:28} {kernel_name:20} {report['registers']:4} regs {report['spills']:3}"
                f" spills {report['shared_bytes']:6} B shared loop {report['loop_instructions']:5}"
                f" {' '.join(report['mma'])} ({seconds:.1f} s)",
                flush=True,
            )
            if args.only:
                print("   ", report["loop_ops"], report["global_loads"])
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
