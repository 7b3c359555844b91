"""Streamed products in CUDA C++ on one GPU: every plan timed, then whole steps with them.

    python bench/native_gpu.py tune --json FILE      plans of every shape, plain and programmatic
    python bench/native_gpu.py step --json FILE [--plans TUNED] [--native all] [--more]
    python bench/native_gpu.py freeze TUNED          write deepdraft/kernels/native/plans.py

tune   us of each plan beside the Triton kernel with its measured plan, in the same run
step   40 layers of the published shape (bench/step_published.py): side lanes and programmatic
       launch on and off, the whole step at 6 rows and 22 experts, time by kernel
The GPU must be idle otherwise.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

import torch  # noqa: E402

from deepdraft.kernels import gemv, moe, runtime  # noqa: E402
from deepdraft.kernels.native import build, fragments, plans, stream  # noqa: E402
from deepdraft.kernels.native.fragments import Streamed, StreamPlan  # noqa: E402

PLANS = ROOT / "deepdraft" / "kernels" / "native" / "plans.py"
Key = plans.Key
FIELDS = ("groups", "step", "across", "down", "split", "depth", "fold", "bulk", "joined")


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def variants(
    kind: str, cols: int, blocks: int = 1, rows: int = 0, *, bulk: bool = False
) -> Iterator[StreamPlan]:
    """Plans worth timing: with bulk copies, or those in which each warp copies for itself."""
    return shared_rings(kind, cols, blocks, rows) if bulk else own_copies(kind, cols, blocks, rows)


def shared_rings(kind: str, cols: int, blocks: int, rows: int) -> Iterator[StreamPlan]:
    """Plans with bulk copies whose rings hold whole units or even parts of one, as far as shared
    memory goes."""
    for plan in fragments.stream_plans(kind, cols // 32):
        if (blocks > 1 and rows // blocks // 32 % plan.down) or plan.groups < 2:
            continue
        for step in divisors(plan.groups):
            steps = plan.groups // step
            for depth in sorted({*divisors(steps), 2 * steps, 3 * steps}):
                made = replace(plan, step=step, depth=depth, fold=int(kind == "fp4"), bulk=1)
                own = stream.UP if kind == "fp4" else stream.FP8_ROWS
                size = (stream.shared_bytes(own, made) + 1024) * made.blocks
                under_way = depth * step * plan.warps * plan.blocks * (1 if kind == "fp8" else 0.5)
                most = 132 if kind == "fp8" else 176
                if step <= 5 and depth > 1 and size <= 228 * 1024 and 48 <= under_way <= most:
                    yield made


def own_copies(kind: str, cols: int, blocks: int, rows: int) -> Iterator[StreamPlan]:
    """Plans in which each warp copies what it multiplies."""
    for plan in fragments.stream_plans(kind, cols // 32):
        if blocks > 1 and rows // blocks // 32 % plan.down:
            continue
        rings = (3, 4, 6, 12) if kind == "fp8" else (6, 8, 10, 20)
        steps = divisors(plan.groups) if kind == "fp4" else [plan.step]
        for step, ring in itertools.product(steps, rings):
            depth = ring // step
            if step > 3 or depth < 2 or (kind == "fp4" and ring > 2 * plan.groups):
                continue
            if kind == "fp8" and ring > 6 and plan.groups < 4:
                continue
            yield replace(plan, step=step, depth=depth, fold=int(kind == "fp4"))
        if kind == "fp4":
            yield plan


def product(x, w, blocks: int, i: int) -> object:
    return gemv.gemv(x, w[i], blocks=blocks)


def rise(x, lists, weights, w, i: int) -> object:
    return moe.routed_up(x, lists[i], weights, w, limit=10.0)


def fall(h, lists, w, picks: int, i: int) -> object:
    return moe.routed_down(h, lists[i], w, picks=picks)


class Tuner:
    """Operands of one shape, its plans' times."""

    def __init__(self, *, bulk: bool = False, least: int = 0) -> None:
        import kernel_timed as kt

        self.bulk, self.least = bulk, least
        self.kt, self.o = kt, kt.Operands("cuda", kt.PUBLISHED)

    def us(self, timed) -> tuple[float, float]:
        """Plain and programmatic."""
        from kernel_worker import timed_us

        out = []
        for programmatic in (False, True):
            runtime.use_programmatic_launch(programmatic)
            out.append(round(timed_us(timed, False), 2))
        runtime.use_programmatic_launch(False)
        return out[0], out[1]

    def lines(self, name: str, key: Key, plan: object, timed) -> dict:
        plain, programmatic = self.us(timed)
        least = min(plain, programmatic)
        return {
            "name": name, "key": key, "plan": str(plan),
            "us": plain, "programmatic_us": programmatic,
            "share": round(timed.bytes / 4.3e6 / least, 3), "MB": round(timed.bytes / 1e6, 2),
            "fields": [getattr(plan, f) for f in FIELDS] if isinstance(plan, StreamPlan) else [],
        }  # fmt: skip

    def with_usual(self, key: Key, found: Iterator[StreamPlan]) -> Iterator[StreamPlan]:
        """The plan in use, then the others."""
        usual = plans.MEASURED.get(key)
        if self.bulk and usual:
            yield StreamPlan(*usual)
        yield from found

    def dense(self, part: int) -> Iterator[dict]:
        kt, o = self.kt, self.o
        for shape in kt.dense_shapes(o.sizes, part):
            name, kind, rows, cols, blocks = shape
            if kind == "bf16" or rows % (32 * blocks) or rows * cols < self.least:
                continue
            label = f"{name} 1/{part}"
            if not self.bulk:
                timed = kt.dense_timed(o, shape, label)
                yield {**self.lines(label, ("dense", rows, cols), "triton", timed), "triton": True}
                del timed
            copies = kt.copies_of(rows * cols, o.sizes.fresh)
            codes = o.codes(copies, rows // 32, cols // 32, 2, 32, 16)
            scales = o.scale_bytes(copies, rows // 32, cols // 32)
            arrivals = torch.zeros(rows // 32 * 16, dtype=torch.int32, device="cuda")
            x = o.halves(8, cols * blocks) if kind != "fp8" else o.quantised(8, cols)
            found = variants("fp8", cols, blocks, rows, bulk=self.bulk)
            for plan in self.with_usual(("dense", rows, cols), found):
                w = [
                    Streamed("fp8", rows, cols, plan, codes[i], scales[i], arrivals)
                    for i in range(copies)
                ]
                launch = partial(product, x, w, blocks)
                timed = kt.Timed(label, w[0].nbytes, launch, copies)
                yield self.lines(label, ("dense", rows, cols), plan, timed)

    def experts(self, width: int) -> Iterator[dict]:
        kt, o, s = self.kt, self.o, self.o.sizes
        keys = ("expert", 2 * width, s.hidden), ("expert", s.hidden, width)
        if not self.bulk:
            for timed, key in zip(kt.expert_timed(o, width, [(6, 22)]), keys, strict=True):
                name = timed.name.rsplit(" r=", 1)[0]
                yield {**self.lines(name, key, "triton", timed), "triton": True}
            del timed
        each = 3 * width * s.hidden * 17 // 32
        count = min(s.experts, max(96, -(-s.fresh // each)))

        def experts(rows: int, cols: int) -> Streamed:
            return Streamed(
                "fp4", rows, cols, next(fragments.stream_plans("fp4", cols // 32)),
                o.bytes(count, rows // 32, cols // 32, 32, 16),
                o.scale_bytes(count, rows // 32, cols // 32, 8, 4),
                torch.zeros(1, dtype=torch.int32, device="cuda"),
            )  # fmt: skip

        w13, w2 = experts(2 * width, s.hidden), experts(s.hidden, width)
        x, weights = o.quantised(8, s.hidden), torch.full((8, s.picks), 0.25, device="cuda")
        for rows, distinct in ((6, 22),) if self.bulk else ((6, 22), (1, 6), (6, 35)):
            lists = [moe.expert_list(p) for p in kt.pick_sets(o, rows, distinct, count)]
            h = moe.routed_up(x, lists[0], weights, w13, limit=10.0)
            for w, up in ((w13, True), (w2, False)):
                key = "expert", w.rows, w.cols
                for plan in self.with_usual(key, variants("fp4", w.cols, bulk=self.bulk)):
                    if distinct != 22 and plan.step not in (1, 2, 3):
                        continue
                    own = replace(w, plan=plan)
                    name = f"experts {'up' if up else 'down'} {width}"
                    launch = (
                        partial(rise, x, lists, weights, own)
                        if up
                        else partial(fall, h, lists, own, s.picks)
                    )
                    timed = kt.Timed(name, distinct * w.nbytes // count, launch, len(lists))
                    at = "" if distinct == 22 else f" r={rows} D={distinct}"
                    yield self.lines(name + at, ("expert", w.rows, w.cols), plan, timed)


def prebuild(parts: tuple[int, ...], *, bulk: bool = False, least: int = 0) -> dict:
    """Compile every variant of these slices of the published shapes, side by side."""
    import kernel_timed as kt

    begin, wanted, s = time.perf_counter(), set(), kt.PUBLISHED
    for part in parts:
        for _, kind, rows, cols, blocks in kt.dense_shapes(s, part):
            if kind != "bf16" and rows * cols >= least:
                own = stream.FP8_ROWS if kind == "fp8" else stream.BF16_ROWS
                found = variants("fp8", cols, blocks, rows, bulk=bulk)
                wanted |= {(own, p, 0) for p in found}
        for kind, cols in ((stream.UP, s.hidden), (stream.DOWN, s.width // part)):
            wanted |= {(kind, p, 0) for p in variants("fp4", cols, bulk=bulk)}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda v: build.cubin("stream.cu", stream.macros(*v), "sm_90a"), wanted))
    return {"variants": len(wanted), "seconds": round(time.perf_counter() - begin, 1)}


def tune(args: argparse.Namespace) -> None:
    from step_results import Results

    results = Results(args.json, args.seconds)
    parts = tuple(map(int, args.slices.split(",")))
    results.stage("prebuild", lambda: prebuild(parts, bulk=args.bulk, least=args.least))
    tuner = Tuner(bulk=args.bulk, least=args.least)
    found: list[dict] = []
    results.data["tuned"] = found
    order = [("experts", 1), ("dense", 1), ("experts", 8), ("dense", 2), ("experts", 2)]
    order += [("dense", 8), ("experts", 4), ("dense", 4)]
    order = [(what, part) for what, part in order if part in parts]
    for what, part in order:

        def one(what=what, part=part) -> str:
            cases = tuner.experts(2304 // part) if what == "experts" else tuner.dense(part)
            for line in cases:
                found.append(line)
                if results.left() < 5:
                    break
            gc.collect()
            torch.cuda.empty_cache()
            return f"{len(found)} plans so far"

        results.stage(f"{what} 1/{part}", one)
    for _, lines in itertools.groupby(sorted(found, key=lambda r: r["name"]), lambda r: r["name"]):
        tried = sorted(lines, key=lambda r: min(r["us"], r["programmatic_us"]))
        triton = [r for r in tried if r.get("triton")]
        for r in [*tried[:2], *triton]:
            print(
                f"{r['name']:28} {r['us']:8.2f} / {r['programmatic_us']:8.2f} us  "
                f"{100 * r['share']:5.1f} %  {r['plan']}"
            )
    results.save()


def best_of(tuned: Path) -> dict[Key, tuple[int, ...]]:
    """The fastest plan of each shape under programmatic launch; () where it is Triton's."""
    best: dict[Key, dict] = {}
    for r in json.loads(tuned.read_text())["tuned"]:
        key = tuple(r["key"])
        if " D=" in r["name"]:
            continue
        if key not in best or r["programmatic_us"] < best[key]["programmatic_us"]:
            best[key] = r
    return {k: () if r.get("triton") else tuple(r["fields"]) for k, r in best.items()}


def deepen(factor: float) -> None:
    """Rings of dense products so many times as deep, as far as shared memory goes; same bits."""
    for key, fields in plans.MEASURED.items():
        if not fields or key[0] != "dense":
            continue
        plan = StreamPlan(*fields)
        deeper = replace(plan, depth=max(2, round(plan.depth * factor)))
        if (stream.shared_bytes(stream.FP8_ROWS, deeper) + 1024) * deeper.blocks <= 228 * 1024:
            plans.MEASURED[key] = tuple(getattr(deeper, f) for f in FIELDS)


def step(args: argparse.Namespace) -> None:
    from step_published import Published, ceilings
    from step_results import Results

    os.environ[stream.SETTING] = args.native
    if args.plans and args.plans.exists():
        plans.MEASURED.clear()
        plans.MEASURED.update(best_of(args.plans))
    if args.depth != 1.0:
        deepen(args.depth)
    results = Results(args.json, args.seconds)
    results.data["native"], results.data["depth"] = args.native, args.depth
    args.layers, args.pool, args.context = 40, 96, 32768
    made: list[Published] = []
    results.stage("load", lambda: made.append(Published(args)) or made[0].loaded())
    p = made.pop()
    results.stage("compile", p.compile)
    found = results.stage("ceilings", ceilings)
    if isinstance(found, dict):
        p.rate = 1e12 * found["copy_TB_s"]
    for lanes, pdl in ((False, False), (False, True), (True, False), (True, True)):
        name = f"variant lanes {int(lanes)} pdl {int(pdl)}"
        results.stage(name, lambda a=lanes, b=pdl: p.variant(lanes=a, pdl=b), needs=15)
    if args.depth != 1.0:
        return
    results.stage("layers rows 6 experts 22", lambda: p.layers(6, 22))
    results.stage("whole rows 6 experts 22", lambda: p.whole(6, 22))
    results.stage("profile rows 6 experts 22", lambda: p.profile(6, 22))
    results.stage("rows", p.rows_equal)
    results.stage("removal", p.removal, needs=20)
    if args.more:
        for rows, experts in ((1, 6), (6, 35), (8, 25), (2, 11), (4, 18)):
            name = f"whole rows {rows} experts {experts}"
            results.stage(name, lambda r=rows, e=experts: p.whole(r, e))
        results.stage("accepts", p.accepts, needs=40)


def freeze(tuned: Path) -> None:
    text = PLANS.read_text()
    head, tail = text.split("MEASURED", 1)
    tail = tail[tail.index('"""') :]
    rows = "".join(
        f'    ("{kind}", {rows}, {cols}): {plan},\n'
        for (kind, rows, cols), plan in sorted(best_of(tuned).items())
    )
    kinds = "dict[tuple[str, int, int], tuple[int, ...]]"
    PLANS.write_text(f"{head}MEASURED: {kinds} = {{\n{rows}}}\n{tail}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("tune", "step", "freeze"))
    parser.add_argument("tuned", nargs="?", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--plans", type=Path)
    parser.add_argument("--native", default="all")
    parser.add_argument("--depth", type=float, default=1.0, help="of the rings of dense products")
    parser.add_argument("--more", action="store_true")
    parser.add_argument("--slices", default="1,2,4,8", help="of the published shapes")
    parser.add_argument("--least", type=int, default=0, help="values of dense products")
    parser.add_argument("--bulk", action="store_true", help="plans with bulk copies alone")
    args = parser.parse_args()
    if args.part == "freeze":
        freeze(args.tuned)
    else:
        {"tune": tune, "step": step}[args.part](args)


if __name__ == "__main__":
    main()
