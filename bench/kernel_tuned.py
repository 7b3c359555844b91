"""Plans worth timing for every product and for attention.

Owns: which plans are tried for which shape, and how each becomes a case of `kernel_timed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from kernel_timed import Operands, Timed, dense_shapes, dense_timed, expert_timed

from deepdraft.kernels import layout

WAYS = ((4, 4), (4, 2), (8, 4), (2, 2))
"""Groups of a step and warps that share them."""


def dense_variants(rows: int, cols: int, blocks: int, kind: str) -> Iterator[layout.Plan]:
    """Plans worth timing for one dense shape."""
    for tile in (b for b in (32, 64) if rows // blocks % b == 0):
        for step, warps in WAYS[:3]:
            steps = -(-cols // 32 // step)
            wanted = {-(-n // (rows // tile)) for n in (264, 512, 1024)}
            for split in sorted({-(-steps // -(-steps // w)) for w in wanted if w <= steps}):
                yield layout.Plan(tile, step, split, warps, 3)


def expert_variants(rows: int, cols: int, up: bool) -> Iterator[layout.Plan]:
    for tile in (b for b in (32, 64) if rows // 2 % b == 0):
        for step, warps in WAYS:
            steps = -(-cols // 32 // step)
            for split in (1, 2, 4):
                if split > 1 and steps // split < 4:
                    continue
                plan = layout.Plan(tile, step, split, warps, 3)
                yield plan
                if (step, warps) == (4, 4):
                    yield replace(plan, registers=96 if tile == 64 else 64)


def tune_cases(
    o: Operands,
) -> Iterator[tuple[str, tuple[str, int, int], layout.Plan, Callable[[], Timed]]]:
    """(shape, its key in `plans.MEASURED`, plan, how to make its case), the most valuable first."""
    s = o.sizes
    last = max(s.slices)
    for part in sorted(s.slices, key=lambda p: (p != 1, p != last, p)):
        width = s.width // part
        for up in (True, False):
            rows, cols = (2 * width, s.hidden) if up else (s.hidden, width)
            for plan in expert_variants(rows, cols, up):
                plans = (plan, None) if up else (None, plan)

                def experts(width=width, plans=plans, up=up) -> Timed:
                    two = list(expert_timed(o, width, [(6, 22)], *plans))
                    return two[0 if up else 1]

                name = f"experts {'up' if up else 'down'} {width}"
                yield name, ("expert", rows, cols), plan, experts
        for shape in dense_shapes(s, part):
            name, kind, rows, cols, blocks = shape
            full = -(-rows // 32) * 32
            for plan in dense_variants(full, cols, blocks, kind):
                make = partial(dense_timed, o, shape, "", plan)
                yield f"{name} 1/{part}", ("dense", full, cols), plan, make
