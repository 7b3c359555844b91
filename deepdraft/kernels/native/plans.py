"""Plans of streamed weights as measured on an H200; other shapes go by the rules in `fragments`."""

MEASURED: dict[tuple[str, int, int], tuple[int, ...]] = {}
"""("dense" or "expert", rows, columns) -> groups, step, across, down, split, depth, fold; ():
the Triton kernel was faster."""
