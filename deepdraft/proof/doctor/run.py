"""`deepdraft doctor CHECKPOINT`: runs the checks in order and reports.

Owns: which checks run, and why others do not. Knows nothing of: any check.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from deepdraft.checkpoint.section import read_config
from deepdraft.errors import CheckpointError, ConfigError
from deepdraft.proof.doctor.engines import ENGINES, engine_checks
from deepdraft.proof.doctor.finding import Finding, Report, render, sort_findings
from deepdraft.proof.doctor.static import Facts, static_checks

MAX_DYNAMIC_BYTES = 2 << 30
"""Stored bytes up to which weights are read and the model is run without being asked to."""


def main(
    checkpoint: str,
    *,
    engine: str = "native",
    as_json: bool = False,
    static_only: bool = False,
    full: bool = False,
    accept_keys: Iterable[str] = (),
) -> int:
    """Prints the report; returns 1 if there are errors, else 0."""
    report = examine(
        checkpoint, engine=engine, static_only=static_only, full=full, accept_keys=accept_keys
    )
    print(json.dumps(report.as_json(), indent=2) if as_json else render(report))
    return report.exit_code


def examine(
    checkpoint: str | Path,
    *,
    engine: str = "native",
    static_only: bool = False,
    full: bool = False,
    accept_keys: Iterable[str] = (),
) -> Report:
    """All checks of a checkpoint directory. `full`: whatever its size."""
    if engine not in ENGINES:
        raise ConfigError(f"engine {engine!r} is not known; known: {', '.join(ENGINES)}")
    path, accept = Path(checkpoint), tuple(accept_keys)
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory; give the checkpoint's directory")
    report = Report(str(path), engine)

    def timed(name: str, check: Callable[[], Iterable[Finding]]) -> None:
        start = time.perf_counter()
        report.findings += check()
        report.checks[name] = time.perf_counter() - start

    facts = Facts(path)

    def static() -> Iterable[Finding]:
        nonlocal facts
        # A hundred thousand headers are many small objects, none of them garbage.
        gc.disable()
        try:
            facts = static_checks(path, accept_unknown=accept)
        finally:
            gc.enable()
        return facts.findings

    timed("static", static)
    if facts.spec is not None and engine != "native":
        spec, original = facts.spec, read_config(path / "config.json")
        timed("engine", lambda: engine_checks(spec, original, engine, facts.layout))
    if not static_only and not any(f.check == "tokenizer" for f in facts.findings):
        timed("tokenizer", lambda: _tokenizer(path))
    for name, why in _skipped(facts, static_only, full).items():
        report.not_run[name] = why
    if not report.not_run:
        _read_and_run(path, accept, timed, report)
    report.findings = sort_findings(report.findings)
    return report


def _skipped(facts: Facts, static_only: bool, full: bool) -> dict[str, str]:
    if static_only:
        return {"values, dynamic": "static checks only were asked for"}
    if not facts.loadable or facts.found is None:
        return {"values, dynamic": "the checkpoint cannot be loaded as it is"}
    size = sum(place.end - place.start for place in facts.found.stored.values())
    if size > MAX_DYNAMIC_BYTES and not full:
        return {"values, dynamic": f"{size / 1e9:.1f} GB of weights; ask for them with --full"}
    return {}


def _tokenizer(path: Path) -> Iterable[Finding]:
    from deepdraft.proof.doctor.dynamic import tokenizer_checks

    return tokenizer_checks(path)


def _read_and_run(
    path: Path,
    accept: tuple[str, ...],
    timed: Callable[[str, Callable[[], Iterable[Finding]]], None],
    report: Report,
) -> None:
    # Imported here: the static checks start without torch.
    from deepdraft.checkpoint.reader import Checkpoint
    from deepdraft.proof.doctor.dynamic import dynamic_checks
    from deepdraft.proof.doctor.values import value_checks

    checkpoint = Checkpoint.open(path, accept_unknown=accept)
    timed("values", lambda: value_checks(checkpoint))
    if report.errors:
        report.not_run["dynamic"] = "errors before it"
        return
    timed("dynamic", lambda: dynamic_checks(checkpoint))
