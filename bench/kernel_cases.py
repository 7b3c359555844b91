"""What the kernel benches run: published shapes, their slices, and random operands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from deepdraft.kernels import gemv, layout


@dataclass
class SassCase:
    """One launch to compile; `weights_per_loop`: weights that one turn of a kernel's loop reads."""

    name: str
    launch: Callable[[], object]
    weights_per_loop: dict[str, int] = field(default_factory=dict)


def meta(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def fake_tiled(kind: str, rows: int, cols: int, plan: layout.Plan | None = None) -> layout.Tiled:
    plan = plan or layout.dense_plan(rows, cols)
    b, g = plan.tile, cols // 32
    values = meta(rows // b, g, b, 32, dtype=torch.bfloat16 if kind == "bf16" else torch.uint8)
    scales = None if kind == "bf16" else meta(rows // b, g // plan.step, b // 32, dtype=torch.int32)
    return layout.Tiled(kind, rows, cols, plan, values, scales, meta(64, dtype=torch.int32))


def dense_case(name: str, rows: int, cols: int, kind: str = "fp8", plan=None) -> SassCase:
    w = fake_tiled("bf16" if kind == "bf16" else "fp8", rows, cols, plan)
    if kind == "fp8":
        x = gemv.QuantRows(meta(8, cols), meta(cols // 32, 8, dtype=torch.float32))
    else:
        x = meta(8, cols, dtype=torch.bfloat16)
    per_loop = w.plan.tile * w.plan.step * 32
    return SassCase(f"{kind} {name}", lambda: gemv.gemv(x, w), {"gemv_kernel": per_loop})


def sass_cases() -> Iterator[SassCase]:
    yield dense_case("wq_b 32768x1280", 32768, 1280)
    yield dense_case("wo_b 5120x8192", 5120, 8192)
    yield dense_case("wq_b 1/8 4096x1280", 4096, 1280)
    yield dense_case("tile 32", 288, 288)
    yield dense_case("wo_a", 8192, 4096, "fp8xbf16")
    yield dense_case("head", 129280, 5120, "bf16")
    x = meta(8, 5120, dtype=torch.bfloat16)
    yield SassCase("quantise 5120", lambda: gemv.quantize_rows(x))
