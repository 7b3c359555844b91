"""The record of prompts that ranks share, and what four and eight GPUs would take.

    python3 bench/prefill_share_record.py OUT --shared FILE... [--one FILE]

`--shared`: of bench/prefill_share_gpu.py, later files win; `--one`: of bench/prefill_share_one.py.
The projection is arithmetic on measured parts: the last rank's chunks, timed by itself on one GPU,
and what the exchanges take longer over NVLink than they do there.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

LINK, MATRIX = 340e9, 0.72e15
"""Bytes a second of one GPU to its peers (20 layers' copies of a chunk on two H200), and operations
a second of a shared expert's product."""
LAYERS, HIDDEN, PICKED = 20, 5120, 48
SHARED_FLOP = 2 * 3 * HIDDEN * 2304
BARRIER_S, BARRIERS = 15e-6, 4


def projection(chunks: dict[str, Any], ranks: int, rows: int, tokens: int) -> dict[str, float]:
    """Seconds of a prompt: of one rank by itself, of exchanges, in all."""
    last = {
        int(found[1]): float(line["ms"])
        for name, line in chunks.items()
        if (found := re.fullmatch(rf"rank {ranks - 1}, context (\d+)", name))
    }
    starts = np.arange(0, tokens, rows)
    alone = float(np.interp(starts, sorted(last), [last[c] for c in sorted(last)]).sum() / 1e3)
    middle = next(line["us"] for line in chunks.values() if "us" in line)
    local = middle.get("push_sums_kernel", 0.0) / 1e6 / LAYERS
    part = rows / ranks
    inputs = (ranks - 1) * part * (2 * HIDDEN + PICKED) / LINK
    beside = part * SHARED_FLOP / MATRIX
    sums = (ranks - 1) * part * 2 * HIDDEN / LINK
    more = max(0.0, inputs - beside) + max(0.0, sums - local) + BARRIERS * BARRIER_S
    exchanges = more * LAYERS * len(starts)
    return {
        "one rank by itself, s": round(alone, 2),
        "exchanges beyond that, s": round(exchanges, 2),
        "projection, s": round(alone + exchanges, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--shared", type=Path, nargs="+", required=True)
    parser.add_argument("--one", type=Path)
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    found: dict[str, Any] = {
        "what": "a prompt's rows shared by two H200, random weights of the published shape, a pool "
        "of 96 experts, chunks of 32,768 rows",
        "commit": options.commit,
    }
    for file in options.shared:
        found |= json.loads(file.read_text())
    rows, tokens = found["settings"]["rows"], found["settings"]["tokens"]
    two, one = (found.get(f"{tokens} tokens, s, {name}") for name in ("shared", "one GPU"))
    if two and one:
        found["times as fast as one GPU"] = round(one / two, 3)
    if options.one is not None:
        lone = json.loads(options.one.read_text())
        found["ranks by themselves"] = {
            name: {key: {k: v for k, v in line.items() if k == "ms"} for key, line in value.items()}
            for name, value in lone.items()
            if "ranks" in name
        }
        found["projection (not measured; 2 to compare with the measurement)"] = {
            name.partition(" ")[0]: projection(value, int(name.split()[0]), rows, tokens)
            for name, value in lone.items()
            if "ranks" in name
        }
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({k: v for k, v in found.items() if "project" in k or "fast" in k}, indent=1))


if __name__ == "__main__":
    main()
