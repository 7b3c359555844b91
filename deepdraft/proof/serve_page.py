"""The record of `deepdraft bench serve` as one HTML page: plots, tables, no script.

Owns: the page. Knows nothing of: how the numbers were measured.
"""

import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from deepdraft.proof.svg import Bar, bars, lines

Record = Mapping[str, Any]

_STYLE = Path(__file__).with_name("report.css")
_LEVELS = {
    "fixed": "streams at a time",
    "poisson": "requests a second",
    "conversations": "conversations begun a second",
}
_PLOTS = (
    ("first_token_ms", "ms to the first token"),
    ("gap_ms", "ms between chunks"),
    ("stream_tokens_per_s", "tokens a second of a stream"),
)


def page(record: Record) -> str:
    """A complete page that asks for nothing; whiskers run from p10 to p90 of each figure."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    body = [_head(record), _equal(record), *_plots(record), _table(record)]
    raw = json.dumps(record, indent=1)
    body.append(f"<details><summary>All numbers</summary><pre>{escape(raw)}</pre></details>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>deepdraft bench serve</title>\n<style>{_STYLE.read_text()}</style></head>\n"
        "<body><main>\n" + "\n".join(body) + "\n</main></body></html>\n"
    )


def _head(record: Record) -> str:
    settings, machine = record["settings"], record.get("machine") or {}
    targets = ", ".join(
        f"{escape(t['name'])} ({escape(t['model'])} at {escape(t['host'])}, {t['kind']})"
        for t in record["targets"]
    )
    return (
        "<h1>Served answers under load</h1>"
        f'<p class="soft">{targets}. {escape(str(machine.get("cpu", "an unknown machine")))}, '
        f"{machine.get('cores', '?')} cores. {escape(str(record.get('date', '')))}, commit "
        f"{escape(str(record.get('commit')))}. Load: {escape(settings['load'])}, "
        f"{settings['requests']} requests of up to {settings['max_tokens']} tokens a level.</p>"
    )


def _equal(record: Record) -> str:
    equal = record.get("equal")
    if equal is None:
        return "<p>Outputs were not compared.</p>"
    if equal["equal"]:
        return f"<p>Greedy answers to {equal['questions']} questions were equal.</p>"
    told = escape(json.dumps(equal["differences"], indent=1, ensure_ascii=False))
    return f"<p><b>Greedy answers differ</b>; nothing was measured.</p><pre>{told}</pre>"


def _bar(stats: Record | None) -> Bar | None:
    return None if stats is None else Bar(stats["p50"], stats["p10"], stats["p90"])


def _plots(record: Record) -> list[str]:
    loads = record.get("loads", ())
    names = [t["name"] for t in record["targets"]]
    parts = []
    if loads:
        keys = "".join(
            f'<li><i class="c{i % 4}"></i>{escape(name)}</li>' for i, name in enumerate(names)
        )
        parts.append(f'<ul class="key">{keys}</ul>')
    for key, unit in _PLOTS:
        if not any(own[key] for row in loads for own in row["by_target"].values()):
            continue
        x_name = _LEVELS[record["settings"]["load"]]
        if len(loads) == 1:
            own = loads[0]["by_target"]
            drawing = bars([("", [_bar(own[name][key]) for name in names])], names, unit)
        else:
            drawing = lines([(name, _points(loads, name, key)) for name in names], x_name, unit)
        parts.append(f"<figure><figcaption>{unit}</figcaption>{drawing}</figure>")
    return parts


def _points(loads: Any, name: str, key: str) -> list[tuple[float, Bar]]:
    found = ((row["level"], _bar(row["by_target"][name][key])) for row in loads)
    return [(level, bar) for level, bar in found if bar is not None]


def _table(record: Record) -> str:
    rows = []
    for row in record.get("loads", ()):
        for name, own in row["by_target"].items():
            cells = [f"{row['level']:g}", escape(name), f"{own['good']}/{own['requests']}"]
            cells.append(f"{own['total_tokens_per_s'] or 0:.1f}")
            for key, _ in _PLOTS:
                stats = own[key]
                cells += ["–"] * 3 if stats is None else [f"{stats[p]:.1f}" for p in _SHOWN]
            faults = ", ".join(f"{n} {kind}" for kind, n in own["faults"].items())
            cells.append(escape(faults) or "none")
            rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    heads = ["level", "target", "good", "tok/s"]
    heads += [f"{unit}, {p}" for _, unit in _PLOTS for p in _SHOWN] + ["faults"]
    head = "".join(f"<th>{h}</th>" for h in heads)
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


_SHOWN = ("p50", "p90", "p99")
