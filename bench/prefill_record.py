"""The record of a run of prefill_gpu.py: what docs/prefill.md says of it, in one small file.

    python bench/prefill_record.py DIR --commit ID [--out bench/results/j-prefill.json]

DIR holds j-kernels.json, j-million.json, j-checks.json, j-engine.json, j-branches.json and
j-tests.json as far as they were made.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LEAST_US = 2000.0
"""A kernel that takes less of a chunk is left out."""


def read(directory: Path, name: str) -> dict[str, Any]:
    """One file of the run without stages there was no time for; empty where it was not made."""
    file = directory / f"j-{name}.json"
    values = json.loads(file.read_text()) if file.is_file() else {}
    return {k: v for k, v in values.items() if not (isinstance(v, dict) and "skipped" in v)}


def record(directory: Path, commit: str) -> dict[str, Any]:
    """What is kept."""
    million = read(directory, "million")
    for line in million.get("chunks", []) if isinstance(million.get("chunks"), list) else []:
        line["kernels"] = {
            name: {"ms": round(value["us"] / 1e3, 2), "launches": value["launches"]}
            for name, value in line["kernels"].items()
            if value["us"] >= LEAST_US
        }
    kept = ("ceilings", "chunks", "prompts", "million", "million_chunk", "estimate_s", "memory")
    kernels = read(directory, "kernels")
    for name in ("versions", "settings", "device", "seconds", "load", "plans"):
        kernels.pop(name, None)
    found = {
        "what": "encoder prefill of random weights of the published shape, pool of 96 experts",
        "machine": million.get("device") or "unknown",
        "versions": million.get("versions"),
        "commit": commit,
        "plans": million.get("plans"),
        "library_has_the_same_bits": million.get("library_has_the_same_bits"),
        **{name: million[name] for name in kept if name in million},
        "kernels_of_8192_rows": kernels,
    }
    for name in ("checks", "engine", "branches", "tests"):
        values = read(directory, name)
        for common in ("versions", "settings", "device", "ceilings", "plans", "seconds"):
            values.pop(common, None)
        if values:
            found[name] = values
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "j-prefill.json")
    args = parser.parse_args()
    args.out.write_text(json.dumps(record(args.directory, args.commit), indent=1) + "\n")
    print(args.out)


if __name__ == "__main__":
    main()
