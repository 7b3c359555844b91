"""The report of `parity` as one HTML page with inline SVG: no script, nothing fetched.

Owns: the page and its plots. Knows nothing of: how figures come about.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from deepdraft.proof.parity.bisect import TOLERANCE

if TYPE_CHECKING:
    from deepdraft.proof.parity.run import Result

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 860, 220, 64, 28
_FLOOR = 1e-9
_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;
color:#1c1e21}h1{font-size:1.3rem}h2{font-size:1.05rem;margin-top:2rem}table{border-collapse:collapse}
td,th{padding:.2rem .8rem .2rem 0;text-align:left;vertical-align:top}.pass{color:#18794e}
.fail{color:#c62a2f}svg{width:100%;height:auto}svg text{font:11px system-ui,sans-serif;fill:#60646c}
.finding{border-left:3px solid #c62a2f;padding:.1rem 0 .1rem 1rem;margin:1rem 0}"""
_COLOURS = {"input": "#8d8d8d", "attention": "#0d74ce", "MLP": "#d6409f"}


def write_html(path: Path, result: Result) -> None:
    """Writes the page."""
    path.write_text(page(result), encoding="utf-8")


def page(result: Result) -> str:
    """The page."""
    state = "pass" if result.passed else "fail"
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8">',
        f"<title>parity: {_text(result.checkpoint)}</title><style>{_STYLE}</style>",
        f'<h1>{_text(result.checkpoint)}<br><span class="{state}">'
        f"{'agrees with' if result.passed else 'differs from'}</span> {_text(result.reference)}"
        "</h1>",
        _figures(result),
    ]
    for f in result.findings:
        parts.append(
            f'<div class="finding"><b>{_text(f.cause)}</b><br>{_text(f.what)}<br>'
            f"<small>{_text(f.evidence)}</small><br>Fix: {_text(f.fix)}</div>"
        )
    if m := result.measures:
        n = len(m.by_position)
        parts += [
            "<h2>Error by position</h2>",
            "<p>Largest logit difference over the deviation of the reference's logits; dashed: "
            "tolerance.</p>",
            _log_plot({"dl": ("#0d74ce", list(enumerate(m.by_position)))}, n, "position"),
            "<h2>Margin and best token by position</h2>",
            "<p>The reference's best logit over its second, in deviations. Red: our best token "
            "is another one.</p>",
            _margins(m.margins, m.agrees),
        ]
    if result.layers:
        series = {
            part: (
                colour,
                [(row["layer"], row[part]) for row in result.layers if part in row],
            )
            for part, colour in _COLOURS.items()
        }
        parts += [
            "<h2>Error by layer</h2>",
            _log_plot(series, len(result.layers), "layer", dots=True),
        ]
    return "\n".join(parts) + "\n"


def _text(value: object) -> str:
    return html.escape(str(value))


def _figures(result: Result) -> str:
    rows: list[tuple[str, str]] = [("family", result.family), ("tokens", str(result.tokens))]
    if m := result.measures:
        rows += [
            ("dl", f"{m.dl:.3g} (first 8 positions {m.dl_short:.3g})"),
            ("mean KL", f"{m.mean_kl:.3g}"),
            ("best token equal", f"{m.top1:.2%}"),
        ]
    if g := result.greedy:
        same = g.first_difference is None
        rows.append(("greedy tokens", "equal" if same else f"part at {g.first_difference}"))
    if result.place:
        rows.append(("first wrong", result.place.text))
    for name, values in result.dtypes.items():
        rows.append((name, f"mean KL {values['mean_kl']:.3g}, dl {values['dl']:.3g}"))
    rows += [("note", note) for note in result.notes]
    rows += [(name, str(value)) for name, value in result.about.items() if name != "seconds"]
    cells = "".join(f"<tr><th>{_text(k)}</th><td>{_text(v)}</td></tr>" for k, v in rows)
    return f"<table>{cells}</table>"


def _x(value: float, count: int) -> float:
    return _LEFT + (_WIDTH - _LEFT - 10) * (value / max(1, count - 1))


def _log_plot(
    series: dict[str, tuple[str, list[tuple[int, float]]]],
    count: int,
    label: str,
    *,
    dots: bool = False,
) -> str:
    values = [v for _, points in series.values() for _, v in points if math.isfinite(v)]
    top = max([*values, TOLERANCE * 10, _FLOOR])
    high, low = math.ceil(math.log10(top)), math.log10(_FLOOR)

    def y(value: float) -> float:
        value = top if not math.isfinite(value) else max(value, _FLOOR)
        return (
            _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - 8) * (math.log10(value) - low) / (high - low)
        )

    body = [_axis(y, range(int(low), high + 1, 2), count, label)]
    limit = y(TOLERANCE)
    body.append(
        f'<line x1="{_LEFT}" x2="{_WIDTH - 10}" y1="{limit:.1f}" y2="{limit:.1f}" '
        'stroke="#c62a2f" stroke-dasharray="4 4"/>'
    )
    for number, (name, (colour, points)) in enumerate(series.items()):
        at = [(_x(i, count), y(v)) for i, v in points]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in at)
        body.append(f'<polyline points="{line}" fill="none" stroke="{colour}"/>')
        if dots:
            body += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in at]
            body.append(
                f'<text x="{_LEFT + 8 + 90 * number}" y="18" style="fill:{colour}">{name}</text>'
            )
    return _svg(body)


def _axis(y: Callable[[float], float], powers: range, count: int, label: str) -> str:
    parts = []
    for power in powers:
        height = y(10.0**power)
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - 10}" y1="{height:.1f}" y2="{height:.1f}" '
            f'stroke="#e8e8ec"/><text x="8" y="{height + 4:.1f}">1e{power}</text>'
        )
    parts.append(f'<text x="{_LEFT}" y="{_HEIGHT - 8}">{label} 0</text>')
    parts.append(
        f'<text x="{_WIDTH - 10}" y="{_HEIGHT - 8}" text-anchor="end">{max(0, count - 1)}</text>'
    )
    return "".join(parts)


def _margins(margins: list[float], agrees: list[bool]) -> str:
    top = max([m for m in margins if math.isfinite(m)], default=1.0) or 1.0
    body = [
        f'<text x="8" y="18">{top:.2g}</text><text x="8" y="{_HEIGHT - _BOTTOM}">0</text>',
        f'<text x="{_LEFT}" y="{_HEIGHT - 8}">position 0</text>',
    ]
    for i, (margin, same) in enumerate(zip(margins, agrees, strict=True)):
        if not math.isfinite(margin):
            continue
        x, height = _x(i, len(margins)), (_HEIGHT - _BOTTOM - 8) * margin / top
        colour = "#8ec8f6" if same else "#c62a2f"
        base = _HEIGHT - _BOTTOM
        body.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{base}" y2="{base - max(height, 1):.1f}" '
            f'stroke="{colour}"/>'
        )
    return _svg(body)


def _svg(body: list[str]) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(body)}</svg>'
    )
