"""Plants every fault and pitfall, examines clean checkpoints, writes bench/results/f-faults.json.

    python bench/faults_record.py --reference-python FILE [--out FILE] [--only-clean]

References are transformers' (run once on each clean checkpoint) and, for `logits only`, what golden
data would tell of them. Takes some minutes of CPU time.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from deepdraft.proof.bench import provenance
from deepdraft.proof.doctor.run import examine as doctor
from deepdraft.proof.faults import FAULTS, KINDS
from deepdraft.proof.faults_pitfalls import PITFALLS
from deepdraft.proof.faults_run import Clean, Verdict, logits_only, make_clean, run_fault
from deepdraft.proof.parity.run import examine as parity
from deepdraft.proof.parity.sources import from_transformers
from deepdraft.proof.tiny_write import write_tiny

CLEAN = [
    (kind, storage, seed)
    for seed in (0, 1)
    for kind in ("llama", "v2", "v2-lite", "v3", "v32", "v4")
    for storage in ("float32", "bfloat16")
][:20]
"""20 checkpoints for doctor, half of them in bfloat16; the first 12 also against transformers."""


def verdicts(cleans: dict[str, Clean], *, logits: bool) -> list[Verdict]:
    """All faults: in the checkpoint and in the engine, or by logits alone in the checkpoint."""
    found = []
    for fault in FAULTS:
        clean = cleans[fault.kind]
        trace = logits_only(clean.trace) if logits else clean.trace
        for planted in ("checkpoint",) if logits else ("checkpoint", "engine"):
            found.append(run_fault(fault, clean, trace, planted=planted))
            print(found[-1].fault, planted, found[-1].parity[:1], found[-1].named, flush=True)
    return found


def summary(found: list[Verdict]) -> dict[str, Any]:
    """Shares over the faults that change the function, and the silent ones."""
    silent = {f.number for f in FAULTS if f.silent}
    loud = [v for v in found if v.fault not in silent]
    return {
        "planted": len(loud),
        "detected": sum(v.detected for v in loud),
        "right_cause_first": sum(v.detected and v.named for v in loud),
        "missed": [f"{v.fault} {v.planted}" for v in loud if not (v.detected and v.named)],
        "silent_ones_silent": not any(v.detected for v in found if v.fault in silent),
    }


def pitfalls() -> list[dict[str, Any]]:
    """Each named pitfall."""
    rows = []
    for pitfall in PITFALLS:
        with tempfile.TemporaryDirectory() as root:
            found = pitfall.run(Path(root))
        rows.append({"name": pitfall.name, "causes": found[:4], "named": pitfall.named(found)})
        print(rows[-1], flush=True)
    return rows


def clean_ones(python: str, against: int) -> list[dict[str, Any]]:
    """Findings on clean checkpoints."""
    rows = []
    for number, (kind, storage, seed) in enumerate(CLEAN):
        with tempfile.TemporaryDirectory() as root:
            style = "transformers5" if seed else "published"
            path = write_tiny(Path(root) / "m", kind, storage=storage, seed=seed, style=style)
            row: dict[str, Any] = {"kind": kind, "storage": storage, "seed": seed, "style": style}
            row["doctor_findings"] = len(doctor(path).findings)
            if number < against:
                start = time.perf_counter()
                result = parity(path, "hf", python=python, dtype="bfloat16")
                row |= {
                    "parity_findings": len(result.findings),
                    "dl": result.measures.dl if result.measures else None,
                    "greedy_equal": result.greedy is not None
                    and result.greedy.first_difference is None,
                    "tokens": result.tokens,
                    "mean_kl": {k: v["mean_kl"] for k, v in result.dtypes.items()},
                    "seconds": round(time.perf_counter() - start, 1),
                }
        rows.append(row)
        print(row, flush=True)
    return rows


def main() -> None:
    """Runs everything."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--reference-python", required=True)
    parser.add_argument("--out", default="bench/results/f-faults.json")
    parser.add_argument("--clean-against-hf", type=int, default=12)
    parser.add_argument("--only-clean", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    python = options.reference_python
    report: dict[str, Any] = provenance()

    def reference(directory: Path, ids: list[int]) -> Any:
        return from_transformers(directory, ids, greedy=0, python=python)

    def save() -> None:
        Path(options.out).write_text(json.dumps(report, indent=1) + "\n")

    if options.only_clean:
        report["clean"] = clean_ones(python, options.clean_against_hf)
        save()
        return
    with tempfile.TemporaryDirectory() as root:
        cleans = {kind: make_clean(Path(root), kind, reference) for kind in KINDS}
        report["reference"] = cleans["v3"].trace.name
        for name, logits in (("whole reference", False), ("logits only", True)):
            found = verdicts(cleans, logits=logits)
            report[name] = {
                "summary": summary(found),
                "faults": [dataclasses.asdict(v) for v in found],
            }
            save()
    report["pitfalls"] = pitfalls()
    save()
    report["clean"] = clean_ones(python, options.clean_against_hf)
    save()


if __name__ == "__main__":
    main()
