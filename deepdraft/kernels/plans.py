"""Plans of weights as measured on an H200. Written by bench/freeze_plans.py; other shapes go by the
rules in `layout`."""

MEASURED: dict[tuple[str, int, int], tuple[int, int, int, int, int, int]] = {}
"""("dense" or "expert", rows, columns) -> tile, step, split, warps, stages, registers."""
