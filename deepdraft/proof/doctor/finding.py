"""A finding of `doctor` or `parity`, and a list of them as text and JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong."""

    check: str
    cause: str
    """The config key (dotted path), tensor or group of tensors (* for numbers), or file."""
    what: str
    evidence: str
    fix: str
    severity: Severity = "error"


@dataclass(slots=True)
class Report:
    """What was looked at, and what was found."""

    checkpoint: str
    engine: str = "native"
    findings: list[Finding] = field(default_factory=list)
    checks: dict[str, float] = field(default_factory=dict)
    """Check -> seconds."""
    not_run: dict[str, str] = field(default_factory=dict)
    """Check -> why."""

    @property
    def errors(self) -> list[Finding]:
        """Findings that make answers wrong or a load fail."""
        return [f for f in self.findings if f.severity == "error"]

    @property
    def exit_code(self) -> int:
        """0 without errors, else 1."""
        return 1 if self.errors else 0

    def as_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return {
            "checkpoint": self.checkpoint,
            "engine": self.engine,
            "passed": not self.errors,
            "findings": [dataclasses.asdict(f) for f in self.findings],
            "checks": {name: round(s, 3) for name, s in self.checks.items()},
            "not_run": self.not_run,
        }


def sort_findings(findings: list[Finding]) -> list[Finding]:
    """Errors before warnings, otherwise as found."""
    return sorted(findings, key=lambda f: f.severity != "error")


def render(report: Report) -> str:
    """The report for a terminal."""
    lines = [f"{report.checkpoint} (engine {report.engine})"]
    for f in report.findings:
        lines += ["", f"{f.severity}: {f.cause}", f"  {f.what}"]
        if f.evidence:
            lines.append(f"  evidence: {f.evidence}")
        lines.append(f"  fix: {f.fix}")
    lines.append("")
    seconds = sum(report.checks.values())
    lines.append(f"checks: {', '.join(report.checks) or 'none'} ({seconds:.1f} s)")
    lines += [f"not run: {name}: {why}" for name, why in report.not_run.items()]
    errors, count = len(report.errors), len(report.findings)
    lines.append(
        f"{errors} errors, {count - errors} warnings"
        if count
        else "no findings: nothing here contradicts itself (parity compares with a reference)"
    )
    return "\n".join(lines)
