"""Write the fastest plan of each shape into deepdraft/kernels/plans.py.

    python bench/freeze_plans.py RESULTS.json

RESULTS: what kernels_gpu.py wrote with part tune. Bits of sums change with a plan.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

PLANS = Path(__file__).resolve().parents[1] / "deepdraft" / "kernels" / "plans.py"
FIELDS = ("tile", "step", "split", "warps", "stages", "registers")


def main() -> None:
    tuned = json.loads(Path(sys.argv[1]).read_text()).get("tune", {})
    table = {}
    for tried in tuned.values():
        best = min(tried, key=lambda r: r["us"])
        table[tuple(best["key"])] = tuple(best[f] for f in FIELDS)
    if not table:
        raise SystemExit("no plan was timed")
    text = PLANS.read_text()
    head, tail = text.split("MEASURED", 1)
    tail = tail[tail.index('"""') :]
    rows = "".join(
        f'    ("{kind}", {rows}, {cols}): {plan},\n'
        for (kind, rows, cols), plan in sorted(table.items())
    )
    kinds = "dict[tuple[str, int, int], tuple[int, int, int, int, int, int]]"
    PLANS.write_text(f"{head}MEASURED: {kinds} = {{\n{rows}}}\n{tail}")
    print(f"{len(table)} plans written")


if __name__ == "__main__":
    main()
