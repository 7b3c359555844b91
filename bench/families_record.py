"""Golden sets, times of `parity` and of `doctor`: bench/results/f-figures.json.

    python bench/families_record.py --golden DIR --reference-python FILE [--only golden parity ...]

Each command runs as a user runs it, in a process of its own: wall time, and processor time with all
its children. `golden`: the sets of the families in DIR. `parity`: against transformers on each tiny
family, with JSON and the page. `doctor`: headers of 96,085 tensors in 48 sparse files of the
published V4.1 shapes. A part that is measured alone is put beside those of an earlier record.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SETS = ("llama-a", "deepseek-v2-a", "deepseek-v3-a", "deepseek-v32-a", "deepseek-v4-a")
KINDS = ("llama", "v2", "v2-lite", "v3", "v32", "v4")


def command(*words: str | Path) -> dict[str, Any]:
    """What a command says as JSON, how it ended, and what it took."""
    before, start = os.times(), time.perf_counter()
    done = subprocess.run(
        [str(Path(sys.executable).with_name("deepdraft")), *map(str, words)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    wall, after = time.perf_counter() - start, os.times()
    if not done.stdout.startswith("{"):
        raise SystemExit(f"{words}: {done.stderr[-2000:]}")
    used = after.children_user + after.children_system
    used -= before.children_user + before.children_system
    return {
        "said": json.loads(done.stdout),
        "exit": done.returncode,
        "seconds": round(wall, 1),
        "processor_seconds": round(used, 1),
    }


def golden(options: argparse.Namespace, root: Path) -> list[dict[str, Any]]:
    """The worst relative error of logits, and whether tokens and bits are equal."""
    rows = []
    for name in SETS:
        found = command("golden", options.golden / name, "--json")
        outcomes = found.pop("said")["arrays"]
        logits = {o["array"]: o["error"] for o in outcomes if o["array"].endswith("_logits")}
        same = {o["array"]: o["verdict"] for o in outcomes if o["array"] not in logits}
        rows.append({"set": name, **found, "logits": logits, "identical": same})
    return rows


def parity(options: argparse.Namespace, root: Path) -> list[dict[str, Any]]:
    """Each tiny family against transformers."""
    from deepdraft.proof.tiny_write import write_tiny

    rows = []
    for kind in KINDS:
        path, page = write_tiny(root / kind, kind), root / f"{kind}.html"
        python = options.reference_python
        more = ("--reference-python", python, "--json", "--html", page)
        found = command("parity", path, "--reference", "hf", *more)
        said = found.pop("said")
        kept = {key: said[key] for key in ("passed", "tokens", "findings")}
        rows.append({"kind": kind, **found, **kept, "page_bytes": page.stat().st_size})
    return rows


def doctor(options: argparse.Namespace, root: Path) -> list[dict[str, Any]]:
    """Static checks on published shapes, whose tokenizer is missing."""
    from tests.doctor.sparse import write_sparse

    config = json.loads((ROOT / "tests/checkpoint/data/v41-config.json").read_text())
    count = write_sparse(root / "published", config, 48)
    found = command("doctor", root / "published", "--static", "--json")
    causes = [finding["cause"] for finding in found.pop("said")["findings"]]
    return [{"tensors": count, "files": 48, **found, "findings": causes}]


PARTS = {"golden": golden, "parity": parity, "doctor": doctor}


def main() -> None:
    """Measures and writes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--golden", type=Path)
    parser.add_argument("--reference-python")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results/f-figures.json")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))

    from deepdraft.proof.bench import provenance

    report = json.loads(options.out.read_text()) if options.out.is_file() else {}
    for part in options.only:
        with tempfile.TemporaryDirectory() as root:
            rows = PARTS[part](options, Path(root))
        report[part] = {**provenance(), "rows": rows}
        for row in rows:
            print(part, json.dumps(row), flush=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
