"""The plot of `deepdraft bench accept`: plain SVG, no library.

Owns: the picture. Knows nothing of: how the numbers were made.
"""

from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")
WIDTH, HEIGHT, MARGIN = 460, 260, 42


class _Panel:
    """One diagram at a place of the picture; x and y run from 0 to 1."""

    def __init__(self, column: int, row: int, title: str, x_name: str, y_name: str) -> None:
        self.x0, self.y0 = column * WIDTH + MARGIN, row * HEIGHT + MARGIN
        self.w, self.h = WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN
        self.parts: list[str] = [
            f'<rect x="{self.x0}" y="{self.y0}" width="{self.w}" height="{self.h}" '
            'fill="none" stroke="#888"/>'
        ]
        self.text(0.5, 1.0, title, dy=-10, bold=True)
        self.text(0.5, 0.0, x_name, dy=32)
        self.text(0.0, 1.0, y_name, dx=4, dy=14, anchor="start")

    def at(self, x: float, y: float) -> tuple[float, float]:
        return round(self.x0 + x * self.w, 1), round(self.y0 + (1 - y) * self.h, 1)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        dx: float = 0,
        dy: float = 0,
        anchor: str = "middle",
        bold: bool = False,
        colour: str = "#222",
    ) -> None:
        px, py = self.at(x, y)
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{px + dx}" y="{py + dy}" text-anchor="{anchor}" fill="{colour}"{weight}>'
            f"{escape(text)}</text>"
        )

    def bar(self, x: float, width: float, y: float, colour: str, title: str) -> None:
        left, top = self.at(x, y)
        self.parts.append(
            f'<rect x="{left}" y="{top}" width="{round(width * self.w, 1)}" '
            f'height="{round(y * self.h, 1)}" fill="{colour}"><title>{escape(title)}</title></rect>'
        )

    def line(
        self, points: Sequence[tuple[float, float]], colour: str, dashed: bool = False
    ) -> None:
        path = " ".join("{},{}".format(*self.at(x, y)) for x, y in points)
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}"{dash}/>')
        if not dashed:
            for x, y in points:
                px, py = self.at(x, y)
                self.parts.append(f'<circle cx="{px}" cy="{py}" r="2.5" fill="{colour}"/>')


def plot(report: Mapping[str, Any]) -> str:
    """The picture of a report of `bench_accept.accept`: bars of accepted length by domain and
    rule for each temperature, and how often came true what confidences say."""
    panels = [
        _lengths(report, temperature, i)
        for i, temperature in enumerate(sorted({r["temperature"] for r in report["runs"]}))
    ]
    panels += [_reliability(report, name, i) for i, name in enumerate(("raw", "calibrated"))]
    columns = max(2, len(panels) - 2)
    body = "\n".join(part for panel in panels for part in panel.parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{columns * WIDTH}" '
        f'height="{2 * HEIGHT + 10}" font-family="sans-serif" font-size="11">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def _lengths(report: Mapping[str, Any], temperature: float, column: int) -> _Panel:
    own = [
        r
        for r in report["runs"]
        if r["temperature"] == temperature
        and r["schedule"] == "all"
        and r["block_size"] == report["block_size"]
    ]
    panel = _Panel(column, 0, f"accepted length, temperature {temperature:g}", "", "")
    domains = list(dict.fromkeys(r["domain"] for r in own))
    rules = list(dict.fromkeys(r["rule"] for r in own))
    most = report["block_size"] + 1
    group, width = 1 / len(domains), 0.8 / len(domains) / len(rules)
    for value in range(1, most + 1):
        panel.text(0.0, value / most, str(value), dx=-12, dy=4)
    for row in own:
        d, r = domains.index(row["domain"]), rules.index(row["rule"])
        x = d * group + 0.1 * group + r * width
        length = row["accepted_length"]
        label = f"{row['domain']}, {row['rule']}: {length:.2f}"
        panel.bar(x, width, length / most, COLOURS[r], label)
    for d, domain in enumerate(domains):
        panel.text((d + 0.5) * group, 0.0, domain, dy=14)
    for r, rule in enumerate(rules):
        panel.text(0.98, 1.0, rule, dy=14 + 13 * r, anchor="end", colour=COLOURS[r])
    return panel


def _reliability(report: Mapping[str, Any], name: str, column: int) -> _Panel:
    panel = _Panel(column, 1, f"confidences, {name}", "said", "came true")
    panel.line([(0, 0), (1, 1)], "#aaa", dashed=True)
    for value in (0.0, 0.5, 1.0):
        panel.text(value, 0.0, f"{value:g}", dy=16)
    for i, own in enumerate(report["reliability"]):
        colour = COLOURS[i % len(COLOURS)]
        bins = [b for b in own[name]["bins"] if b["count"] >= 10]
        panel.line([(b["predicted"], b["observed"]) for b in bins], colour)
        score = own[name]["brier"]
        told = "of no drafts" if score is None else f"{score:.3f}"
        label = f"{own['rule']} T={own['temperature']:g} Brier {told}"
        panel.text(0.98, 0.0, label, dy=-8 - 12 * i, anchor="end", colour=colour)
    return panel
