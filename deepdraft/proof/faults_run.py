"""Plants the faults one by one, in the checkpoint and in the engine, and judges what is named.

Owns: planting, the clean references, the verdicts. Knows nothing of: the table (`faults`).

(a) The fault lies in the checkpoint's config.json or tensors, the reference is made from the clean
one. (b) The checkpoint is clean and the engine's spec or weight map is faulty. A fault is named if
the first finding of `doctor` or of `parity` has the right key or tensor group as its cause.
"""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from deepdraft.checkpoint.reader import Checkpoint
from deepdraft.checkpoint.section import read_config
from deepdraft.checkpoint.spec import ModelSpec
from deepdraft.errors import ConfigError
from deepdraft.proof.doctor.static import static_checks
from deepdraft.proof.doctor.values import value_checks
from deepdraft.proof.faults import KINDS, Fault
from deepdraft.proof.native import decided_text, probe_length
from deepdraft.proof.parity.reference import Trace
from deepdraft.proof.parity.run import Result, compare
from deepdraft.proof.parity.target import Changed, Target
from deepdraft.proof.tiny_write import write_directory, write_tiny

MakeTrace = Callable[[Path, list[int]], Trace]


@dataclass(frozen=True, slots=True)
class Clean:
    """A clean checkpoint and what a reference computed on it."""

    directory: Path
    checkpoint: Checkpoint
    trace: Trace


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found of one planted fault."""

    fault: int
    kind: str
    text: str
    planted: str
    """checkpoint, or engine."""
    reference: str
    dl: float | None
    dl_short: float | None
    parity: tuple[str, ...]
    """Causes that parity names, the first one first."""
    doctor: tuple[str, ...]
    first_wrong: str
    detected: bool
    named: bool
    seconds: float


def make_clean(root: Path, kind: str, make_trace: MakeTrace, *, tokens: int | None = None) -> Clean:
    """Writes the clean checkpoint of a kind of the study and runs the reference on it."""
    directory = write_tiny(root / kind, **KINDS[kind])
    checkpoint = Checkpoint.open(directory)
    count = tokens or max(384, probe_length(checkpoint.args))
    ids = decided_text(checkpoint, count)
    return Clean(directory, checkpoint, make_trace(directory, ids))


def logits_only(trace: Trace) -> Trace:
    """What golden data tells: logits and their text."""
    return replace(trace, layers={}, spec=None, weights=None, frequencies={}, factors={}, greedy=[])


def run_fault(fault: Fault, clean: Clean, trace: Trace, *, planted: str) -> Verdict:
    """Plants one fault and judges."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="deepdraft-fault-") as scratch:
        if planted == "checkpoint":
            result, doctor = _in_checkpoint(fault, clean, trace, Path(scratch) / "faulty")
        else:
            result, doctor = _in_engine(fault, clean, trace), ()
    found = tuple(f.cause for f in result.findings)
    return Verdict(
        fault=fault.number,
        kind=fault.kind,
        text=fault.text,
        planted=planted,
        reference=trace.name + (", logits only" if trace.weights is None else ""),
        dl=result.measures.dl if result.measures else None,
        dl_short=result.measures.dl_short if result.measures else None,
        parity=found,
        doctor=doctor,
        first_wrong=result.place.text if result.place else "",
        detected=bool(found),
        named=_names(fault, found) or _names(fault, doctor),
        seconds=round(time.perf_counter() - start, 2),
    )


def _names(fault: Fault, causes: Iterable[str]) -> bool:
    """Whether the first cause is a right one: a key as a whole, a tensor group by its beginning."""
    first = next(iter(causes), "")
    if fault.tensors is None:
        return first in fault.causes
    return first.startswith(fault.causes)


def _in_checkpoint(
    fault: Fault, clean: Clean, trace: Trace, path: Path
) -> tuple[Result, tuple[str, ...]]:
    config = faulty_config(fault, read_config(clean.directory / "config.json"))
    tensors = load_file(clean.directory / "model.safetensors")
    if fault.tensors is not None:
        fault.tensors(tensors, clean.checkpoint.args)
    write_directory(path, config, tensors)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(clean.directory / name, path / name)
    facts = static_checks(path)
    findings = list(facts.findings)
    result = Result(str(path), trace.name, config["model_type"], len(trace.ids))
    if not facts.loadable:
        result.findings = [f for f in findings if f.severity == "error"]
        return result, tuple(f.cause for f in findings)
    checkpoint = Checkpoint.open(path)
    findings += value_checks(checkpoint)
    compare(result, Target.of(checkpoint, config), trace)
    return result, tuple(f.cause for f in findings)


def _in_engine(fault: Fault, clean: Clean, trace: Trace) -> Result:
    config = read_config(clean.directory / "config.json")
    target = Target.of(clean.checkpoint, config)
    if fault.config:
        target = target.with_spec(ModelSpec.of(faulty_config(fault, config)))
    if fault.tensors is not None:
        tensors = {name: clean.checkpoint.tensor(name) for name in target.names()}
        before = dict(tensors)
        fault.tensors(tensors, clean.checkpoint.args)
        changed = {name: x for name, x in tensors.items() if x is not before[name]}
        target = Target(clean.checkpoint, target.spec, Changed(clean.checkpoint, changed))
    result = Result(str(clean.directory), trace.name, config["model_type"], len(trace.ids))
    compare(result, target, trace)
    return result


def faulty_config(fault: Fault, config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with the fault's keys."""
    config = copy.deepcopy(config)
    for key, value in fault.config.items():
        *parents, last = key.split(".")
        place = config
        for part in parents:
            place = place[part]
        if value is None:
            if last not in place:
                raise ConfigError(f"fault {fault.number}: there is no {key} to take away")
            del place[last]
        else:
            place[last] = value
    return json.loads(json.dumps(config))
