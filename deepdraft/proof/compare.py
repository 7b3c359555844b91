"""`deepdraft bench compare A.json B.json`: two records of the same kind, number by number.

Owns: which numbers belong together, whether a difference is more than the spread.
Knows nothing of: how the numbers were made.

Any two records of `deepdraft bench` can be compared. Where a number comes with its spread (records
of `bench speed`), a change counts as more than noise if the spans from the 10th to the 90th
percentile do not meet.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepdraft.errors import ConfigError

_MAX_BYTES = 64 << 20
_LESS_IS_BETTER = ("_ms", "ms_per_", "_s_", "seconds", "bytes", "_mb", "_us", "cost")
_MORE_IS_BETTER = ("per_s", "accept", "speedup", "tokens_per", "share_of")
_SKIPPED = frozenset(
    "machine settings date commit targets seconds costs system_fingerprint format what".split()
)
_LABELS = ("class", "domain", "name", "streams", "wanted_tokens", "rule", "temperature")
"""Keys that tell the entries of a list apart."""


@dataclass(frozen=True, slots=True)
class Number:
    """A value of a record, with the span that most values lie in where that is known."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One number in both records."""

    name: str
    before: Number
    after: Number

    @property
    def ratio(self) -> float | None:
        """After over before; None from nothing."""
        return self.after.value / self.before.value if self.before.value else None

    @property
    def verdict(self) -> str:
        """better, worse, other (no direction is known), within the spread, or same."""
        a, b = self.before, self.after
        if a.value == b.value:
            return "same"
        spans = (a.low, a.high, b.low, b.high)
        if None not in spans:
            assert a.low is not None and a.high is not None
            assert b.low is not None and b.high is not None
            if a.low <= b.high and b.low <= a.high:
                return "within the spread"
        more = _more_is_better(self.name)
        if more is None:
            return "other"
        return "better" if (b.value > a.value) == more else "worse"


def _more_is_better(name: str) -> bool | None:
    if any(mark in name for mark in _MORE_IS_BETTER):
        return True
    return False if any(mark in f"{name}_" for mark in _LESS_IS_BETTER) else None


def read_record(file: str | Path) -> dict[str, Any]:
    """A record that a bench wrote. Raises ConfigError."""
    path = Path(file)
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"{path} is larger than {_MAX_BYTES} bytes")
        record = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{path} must hold the object that a bench wrote")
    return record


def numbers(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Number]]:
    """Every number of a record under a name; lists of plain numbers are single runs and left
    out."""
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        yield " / ".join(path), Number(float(value))
    elif isinstance(value, Mapping):
        if {"p10", "p50", "p90", "n"} <= value.keys():
            yield " / ".join(path), Number(value["p50"], value["p10"], value["p90"])
            return
        for key, inner in value.items():
            if key not in _SKIPPED and key not in _LABELS:
                yield from numbers(inner, path if key == "by_target" else (*path, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            if isinstance(inner, Mapping):
                labels = [f"{inner[key]}" for key in _LABELS if key in inner]
                yield from numbers(inner, (*path, ", ".join(labels) or str(i)))


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """The numbers that both records hold, in the order of the first. Raises ConfigError where the
    records are of different kinds or share nothing."""
    kinds = before.get("what"), after.get("what")
    if kinds[0] != kinds[1]:
        raise ConfigError(f"these are different measurements: {kinds[0]!r} and {kinds[1]!r}")
    right = dict(numbers(after))
    changes = [
        Change(name=name, before=number, after=right[name])
        for name, number in numbers(before)
        if name in right
    ]
    if not changes:
        raise ConfigError(
            "the two records share no number; were they measured with other target names?"
        )
    return changes


def differing_conditions(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What else differs: machine, settings, versions. Times of different machines say little."""
    found = []
    for part in ("machine", "settings"):
        a, b = before.get(part) or {}, after.get(part) or {}
        for key in dict.fromkeys((*a, *b)):
            if a.get(key) != b.get(key) and key != "load_1min":
                found.append(f"{part} {key}: {a.get(key)} and {b.get(key)}")
    return found


def table(changes: Sequence[Change]) -> str:
    """The changes as text."""
    width = max(len(change.name) for change in changes)
    lines = [f"{'':{width}}  {'before':>12}  {'after':>12}  {'ratio':>7}"]
    for change in changes:
        ratio = "" if change.ratio is None else f"{change.ratio:.3f}"
        lines.append(
            f"{change.name:{width}}  {change.before.value:12,.2f}  {change.after.value:12,.2f}  "
            f"{ratio:>7}  {change.verdict}"
        )
    return "\n".join(lines)


def main(before_file: str, after_file: str, *, as_json: bool = False) -> int:
    """Prints the comparison of two files."""
    before, after = read_record(before_file), read_record(after_file)
    changes = compare(before, after)
    conditions = differing_conditions(before, after)
    if as_json:
        rows = [
            {
                "name": c.name,
                "before": c.before.value,
                "after": c.after.value,
                "ratio": c.ratio,
                "verdict": c.verdict,
            }
            for c in changes
        ]
        print(json.dumps({"conditions": conditions, "changes": rows}, indent=2))
        return 0
    print(table(changes))
    for line in conditions:
        print(f"differs too: {line}")
    return 0
