"""The report of `deepdraft bench speed` as one HTML page: plots, tables, machine, no script.

Owns: the page. Knows nothing of: how the numbers were measured. Everything is inline; the page
asks for nothing and works from a file.
"""

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from deepdraft.proof.svg import Bar, Points, bars, lines, shown

Record = Mapping[str, Any]

_STYLE = Path(__file__).with_name("report.css")


def html_report(record: Record) -> str:
    """The page for a record of `bench_speed.measure`, with machine, commit and date in it."""
    names = [target["name"] for target in record["targets"]]
    parts = [_head(record), _heads(record), _key(names)]
    if "classes" in record:
        parts.append(_classes(record["classes"], names))
    if "prefill" in record:
        parts.append(_prefill(record["prefill"], names))
    if "concurrency" in record:
        parts.append(_concurrency(record["concurrency"], names))
    parts += [_latency(record, names), _failures(record), _machine(record)]
    raw = json.dumps(record, indent=1)
    parts.append(f"<details><summary>All numbers</summary><pre>{escape(raw)}</pre></details>")
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>deepdraft bench speed, {escape(str(record.get('date', '')))}</title>\n"
        f"<style>{_STYLE.read_text()}</style></head>\n<body><main>\n"
        + "\n".join(parts)
        + "\n</main></body>"
        "</html>\n"
    )


def write_page(path: str, page: str) -> None:
    """Writes a page as it says it is encoded; what has no UTF-8, as half a character in a name
    that a server gave, becomes a question mark and costs no measurement."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(page.encode("utf-8", "replace"))


def _bar(stats: Record | None) -> Bar | None:
    return None if stats is None else Bar(stats["p50"], stats["p10"], stats["p90"])


def _head(record: Record) -> str:
    settings, machine = record["settings"], record.get("machine") or {}
    where = machine.get("gpu") or machine.get("cpu", "an unknown machine")
    load = machine.get("load_1min")
    busy = f", load {load} at the start" if load is not None else ""
    targets = " and ".join(
        f"{escape(t['name'])} ({escape(t['model'])} at {escape(t['host'])})"
        for t in record["targets"]
    )
    return (
        "<h1>Speed of served answers</h1>"
        f'<p class="soft">{targets}. {escape(str(where))}, {machine.get("cores", "?")} cores'
        f"{busy}. {escape(str(record.get('date', '')))}, "
        f"commit {escape(str(record.get('commit')))}, "
        f"temperature {settings['temperature']:g}, {settings['runs']} runs of everything.</p>"
    )


def _heads(record: Record) -> str:
    parts = []
    for i, (name, own) in enumerate(record["tetris"].items()):
        items = []
        figures = [
            (own["tokens_per_s"], "tok/s, known script"),
            (own["accepted_length"], "accepted length"),
            (own["ms_per_step"], "ms a step"),
            (own["first_token_ms"], "ms to the first token"),
        ]
        for stats, what in figures:
            if stats is not None:
                items.append(f"<li><b>{shown(stats['p50'])}</b><span>{what}</span></li>")
        if len(record["tetris"]) > 1:
            parts.append(f'<h3><i class="c{i}"></i>{escape(name)}</h3>')
        parts.append(f'<ul class="heads">{"".join(items)}</ul>')
    return (
        "".join(parts)
        + '<p class="soft">The known script: the Tetris prompt, thinking off, streamed; output '
        "tokens over the time from the first content token to the end. Medians; whiskers below run "
        "from "
        "the 10th to the 90th percentile.</p>"
    )


def _key(names: Sequence[str]) -> str:
    if len(names) < 2:
        return ""
    items = "".join(f'<li><i class="c{i}"></i>{escape(n)}</li>' for i, n in enumerate(names))
    return f'<ul class="key">{items}</ul>'


def _figure(caption: str, svg: str) -> str:
    return f"<figure><figcaption>{escape(caption)}</figcaption>{svg}</figure>"


def _classes(rows: Sequence[Record], names: Sequence[str]) -> str:
    def figure(key: str, unit: str, caption: str) -> str:
        groups = [
            (r["class"], [_bar(r["by_target"].get(n, {}).get(key)) for n in names]) for r in rows
        ]
        if not any(bar for _, own in groups for bar in own):
            return ""
        return _figure(caption, bars(groups, names, unit))

    return (
        "<h2>By class of text</h2>"
        '<p class="soft">Several questions each. Prompts of later runs may come from a server\'s '
        "cache, which the time to the first token shows.</p>"
        + figure("tokens_per_s", "tok/s", "Tokens per second of one answer at a time")
        + figure("accepted_length", "tokens a step", "Accepted length: drafts that stood, plus one")
        + figure("ms_per_step", "ms", "Milliseconds a step")
    )


def _prefill(rows: Sequence[Record], names: Sequence[str]) -> str:
    def series(key: str) -> list[tuple[str, Points]]:
        found: list[tuple[str, Points]] = []
        for name in names:
            points = []
            for row in rows:
                own = row["by_target"].get(name)
                bar = own and _bar(own[key])
                if bar is not None and own["prompt_tokens"] is not None:
                    points.append((max(1.0, own["prompt_tokens"]["p50"]), bar))
            found.append((name, points))
        return [one for one in found if one[1]]

    speed, first = series("tokens_per_s"), series("first_token_ms")
    if not speed:
        return ""
    return (
        "<h2>Prompts by length</h2>"
        '<p class="soft">Prompts that no cache knows, up to the first token.</p>'
        + _figure("Prompt tokens per second", lines(speed, "tokens of the prompt", "tok/s"))
        + _figure("Time to the first token", lines(first, "tokens of the prompt", "ms"))
    )


def _concurrency(rows: Sequence[Record], names: Sequence[str]) -> str:
    def series(key: str) -> list[tuple[str, Points]]:
        found: list[tuple[str, Points]] = []
        for name in names:
            points = [
                (float(r["streams"]), _bar(r["by_target"].get(name, {}).get(key))) for r in rows
            ]
            found.append((name, [(x, bar) for x, bar in points if bar is not None]))
        return [one for one in found if one[1]]

    speed, first = series("total_tokens_per_s"), series("first_token_ms")
    if not speed or not first:
        return ""
    return (
        "<h2>Streams at a time</h2>"
        + _figure("Tokens per second of all streams together", lines(speed, "streams", "tok/s"))
        + _figure("Time to the first token", lines(first, "streams", "ms"))
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(c)}</{tag}>" for c in cells) + "</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    return (
        f'<div class="wide"><table><thead>{row(head, "th")}</thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _latency(record: Record, names: Sequence[str]) -> str:
    sources = [("known script", record["tetris"])]
    sources += [(row["class"], row["by_target"]) for row in record.get("classes", ())]
    rows = []
    for label, by_target in sources:
        for name in names:
            own = by_target[name]
            first, gap, speed = own["first_token_ms"], own["gap_ms"], own["tokens_per_s"]
            cells = [label if len(names) == 1 else f"{label}, {name}"]
            cells += [shown(first[k]) if first else "-" for k in ("p50", "p90")]
            cells += [shown(gap[k]) if gap else "-" for k in ("p50", "p90", "p99", "max")]
            spread = f"{100 * speed['stdev'] / speed['mean']:.0f} %" if speed else "-"
            cells += [spread, str(own["answers"])]
            rows.append(cells)
    head = ["", "first p50", "p90", "gap p50", "p90", "p99", "max", "spread", "answers"]
    return (
        "<h2>Waits</h2>"
        '<p class="soft">Milliseconds to the first token and between chunks of text; spread: '
        "standard deviation of tokens per second over its mean.</p>" + _table(head, rows)
    )


def _failures(record: Record) -> str:
    failures = record.get("failures")
    if not failures:
        return ""
    rows = [[f["target"], f["part"], f["error"]] for f in failures]
    return (
        "<h2>Answers that did not come</h2>"
        '<p class="soft">They are not in the figures above.</p>'
        + _table(["server", "part", "what it said"], rows)
    )


def _machine(record: Record) -> str:
    machine = dict(record.get("machine") or {})
    rows = [[str(k), str(v)] for k, v in machine.items() if v is not None]
    for target in record["targets"]:
        rows.append([f"{target['name']}: model", str(target["model"])])
        rows.append([f"{target['name']}: fingerprint", str(target["system_fingerprint"])])
    rows.append(["took", f"{record['seconds']} s"])
    return "<h2>Machine and versions</h2>" + _table(["", ""], rows)
