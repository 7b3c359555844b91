"""What came of conversations on a fleet: the same figures for a measured run and a simulated one.

Owns: a turn's record, figures by turn and by replica, the comparison of a prediction with a run.
Knows nothing of: servers, clocks, how a turn came about. Runs without torch.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_GROUPS = ((1, 1), (2, 2), (3, 5), (6, 10), (11, 20))
COMPUTED = "none"
"""The cache source of a turn whose prompt was computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnDone:
    """One turn of one conversation."""

    number: int
    """From 1."""
    first_s: float
    """From when it was due to its first text; 0: there was none."""
    end_s: float
    """From when it was due to its end."""
    prompt: int
    """Tokens."""
    cached: int
    """Tokens of the prompt that were not computed."""
    known: int
    """Tokens of the conversation before: the last prompt and the last answer. What could at most be
    reused, where texts become the same tokens again."""
    tokens: int
    """Of the answer."""
    source: str = COMPUTED
    replica: str = ""
    fault: str | None = None


def spread(values: Iterable[float], digits: int = 3) -> dict[str, float] | None:
    """Count, mean, median and 95th percentile; None where there are no values."""
    kept = sorted(values)
    if not kept:
        return None
    return {
        "n": len(kept),
        "mean": round(math.fsum(kept) / len(kept), digits),
        "p50": round(percentile(kept, 0.5), digits),
        "p95": round(percentile(kept, 0.95), digits),
        "max": round(kept[-1], digits),
    }


def percentile(ordered: Sequence[float], share: float) -> float:
    """Of sorted values, linear between the two nearest."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def imbalance(work: Mapping[str, float], replicas: int) -> float | None:
    """How much more than the mean the busiest of `replicas` did, as a share of the mean. One that
    did nothing counts. None where nothing was done."""
    total = math.fsum(work.values())
    if not total or not replicas:
        return None
    return max(work.values()) / (total / max(replicas, len(work))) - 1


def figures(
    turns: Sequence[TurnDone], wall_s: float, *, replicas: int, fetch_bytes: int | None
) -> dict[str, Any]:
    """All figures of one run on `replicas` replicas. `fetch_bytes`: None where it is not known."""
    good = [t for t in turns if t.fault is None]
    work: Counter[str] = Counter()
    requests: Counter[str] = Counter()
    for turn in good:
        work[turn.replica] += turn.prompt - turn.cached + turn.tokens
        requests[turn.replica] += 1
    tokens = sum(t.tokens for t in good)
    later = [t for t in good if t.number > 1]
    uneven = imbalance(work, replicas)
    return {
        "turns": len(turns),
        "good": len(good),
        "faults": dict(sorted(Counter(t.fault for t in turns if t.fault is not None).items())),
        "wall_s": round(wall_s, 3),
        "tokens": tokens,
        "tokens_per_s": round(tokens / wall_s, 2) if wall_s else None,
        "first_token_ms": spread(1e3 * t.first_s for t in good if t.first_s),
        "later_turns": _of(later),
        "by_turn": {
            f"{low}" if low == high else f"{low}-{high}": _of(own)
            for low, high in _GROUPS
            if (own := [t for t in good if low <= t.number <= high])
        },
        "fetch_bytes": fetch_bytes,
        "fetch_bytes_per_later_turn": (
            None if fetch_bytes is None or not later else round(fetch_bytes / len(later))
        ),
        "by_replica": {
            name: {"turns": requests[name], "rows": work[name]} for name in sorted(work)
        },
        "imbalance": None if uneven is None else round(uneven, 4),
    }


def _of(turns: Sequence[TurnDone]) -> dict[str, Any]:
    prompt, known = sum(t.prompt for t in turns), sum(t.known for t in turns)
    cached = sum(t.cached for t in turns)
    return {
        "n": len(turns),
        "prompt_tokens": prompt,
        "reused": round(cached / prompt, 4) if prompt else None,
        "reused_of_known": round(cached / known, 4) if known else None,
        "first_token_ms": spread(1e3 * t.first_s for t in turns if t.first_s),
        "sources": dict(sorted(Counter(t.source for t in turns).items())),
    }


_COMPARED = {
    "first_turn_ms_p50": ("by_turn", "1", "first_token_ms", "p50"),
    "first_token_ms_mean": ("first_token_ms", "mean"),
    "first_token_ms_p95": ("first_token_ms", "p95"),
    "later_first_token_ms_p50": ("later_turns", "first_token_ms", "p50"),
    "later_first_token_ms_p95": ("later_turns", "first_token_ms", "p95"),
    "tokens_per_s": ("tokens_per_s",),
    "engines_busy": ("engines_busy",),
    "later_reused": ("later_turns", "reused"),
    "fetch_bytes_per_later_turn": ("fetch_bytes_per_later_turn",),
}


def compare(measured: Mapping[str, Any], predicted: Mapping[str, Any]) -> dict[str, Any]:
    """Each compared figure measured and predicted, and by what share the prediction is off."""
    out: dict[str, Any] = {}
    for name, path in _COMPARED.items():
        values = [_at(record, path) for record in (measured, predicted)]
        if None in values:
            continue
        real, thought = values
        out[name] = {
            "measured": real,
            "predicted": thought,
            "off": round(thought / real - 1, 4) if real else None,
        }
    return out


def _at(record: Any, path: Sequence[str]) -> Any:
    for key in path:
        record = None if record is None else record.get(key)
    return record
