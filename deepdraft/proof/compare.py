"""`deepdraft bench compare A.json B.json`: two records of the same kind, number by number.

Owns: which numbers belong together, whether a difference is more than the spread.
Knows nothing of: how the numbers were made.

Any two records of `deepdraft bench` can be compared. Where a number comes with its spread (records
of `bench speed`), a change counts as more than noise if the spans from the 10th to the 90th
percentile do not meet.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepdraft.errors import ConfigError

_MAX_BYTES = 64 << 20
_MAX_DEPTH = 64
_MORE_IS_BETTER = re.compile(r"_(per_s|tok_s|[gmt]b_s|accept\w*|speedup|tokens_per_step|share_of)_")
_LESS_IS_BETTER = re.compile(
    r"_(ms|us|s|seconds|microseconds|bytes|mb|mib|cost|error|errors|failures|mismatches)_"
)
_SKIPPED = frozenset(
    (
        "machine settings date commit targets seconds costs failures system_fingerprint format what"
    ).split()
)
_LABELS = ("class", "domain", "name", "streams", "wanted_tokens", "rule", "temperature")
"""Keys that tell the entries of a list apart."""


@dataclass(frozen=True, slots=True)
class Number:
    """A finite value of a record, with the span that most values lie in where that is known."""

    value: float
    low: float | None = None
    high: float | None = None
    more_is_better: bool | None = None
    """None: nobody knows."""


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
        if a.low is not None and a.high is not None and b.low is not None and b.high is not None:
            if a.low <= b.high and b.low <= a.high:
                return "within the spread"
        if a.more_is_better is None:
            return "other"
        return "better" if (b.value > a.value) == a.more_is_better else "worse"


def _more_is_better(keys: Sequence[str]) -> bool | None:
    """What the innermost key that says something says. Names of targets and classes are no keys:
    a server may be called "cost"."""
    for key in reversed(keys):
        words = f"_{'_'.join(re.split(r'[^a-z0-9]+', key.lower()))}_"
        if _MORE_IS_BETTER.search(words):
            return True
        if _LESS_IS_BETTER.search(words):
            return False
    return None


def _finite(value: Any) -> float | None:
    """A number as a float; None for anything else, NaN and infinities included."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


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


def numbers(
    value: Any, path: tuple[str, ...] = (), keys: tuple[str, ...] = ()
) -> Iterator[tuple[str, Number]]:
    """Every finite number of a record under a name; lists of plain numbers are single runs and left
    out. `path`: where `value` lies; `keys`: those parts of it that are the record's own words.
    Raises ConfigError for a record nested too deep."""
    if len(path) > _MAX_DEPTH:
        raise ConfigError(f"a record is nested more than {_MAX_DEPTH} deep at {path[0]!r}")
    if isinstance(value, Mapping) and {"p10", "p50", "p90", "n"} <= value.keys():
        middle = _finite(value["p50"])
        if middle is not None:
            span = _finite(value["p10"]), _finite(value["p90"])
            yield " / ".join(path), Number(middle, *span, _more_is_better(keys))
        return
    number = _finite(value)
    if number is not None:
        yield " / ".join(path), Number(number, more_is_better=_more_is_better(keys))
    for name, inner, is_key in _inner(value):
        yield from numbers(inner, (*path, name), (*keys, name) if is_key else keys)


def _inner(value: Any) -> Iterator[tuple[str, Any, bool]]:
    """What an object or a list holds: name, value, whether the name is the record's own word."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key == "by_target" and isinstance(inner, Mapping):
                yield from ((name, own, False) for name, own in inner.items())
            elif key not in _SKIPPED and key not in _LABELS:
                yield key, inner, True
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            if isinstance(inner, Mapping):
                labels = [f"{inner[key]}" for key in _LABELS if key in inner]
                yield ", ".join(labels) or str(i), inner, False


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """The numbers that both records hold, in the order of the first. Raises ConfigError where the
    records are of different kinds or share nothing."""
    kinds = before.get("what"), after.get("what")
    if kinds[0] != kinds[1]:
        raise ConfigError(f"these are different measurements: {kinds[0]!r} and {kinds[1]!r}")
    left, right = dict(numbers(before)), dict(numbers(after))
    changes = [
        Change(name=name, before=number, after=right[name])
        for name, number in left.items()
        if name in right
    ]
    if not changes:
        raise ConfigError(
            "the two records share no number; were they measured with other target names?"
        )
    return changes


def missing(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What only one of the records holds, by the outermost name that the other lacks."""
    found = []
    sides = [list(dict(numbers(record))) for record in (before, after)]
    for own, other, side in ((*sides, "first"), (*sides[::-1], "second")):
        known = {
            parts[:n]
            for parts in (tuple(name.split(" / ")) for name in other)
            for n in range(1, len(parts) + 1)
        }
        lacking: dict[str, None] = {}
        for name in own:
            parts = tuple(name.split(" / "))
            for n in range(1, len(parts) + 1):
                if parts[:n] not in known:
                    lacking[" / ".join(parts[:n])] = None
                    break
        found += [f"only in the {side}: {name}" for name in lacking]
    return found


def differing_conditions(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What else differs: machine, settings, versions. Times of different machines say little."""
    found = []
    for part in ("machine", "settings"):
        a, b = ({} if not isinstance(x := r.get(part), Mapping) else x for r in (before, after))
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
    alone = missing(before, after)
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
        print(json.dumps({"conditions": conditions, "missing": alone, "changes": rows}, indent=2))
        return 0
    print(table(changes))
    for line in conditions:
        print(f"differs too: {line}")
    for line in alone:
        print(line)
    return 0
