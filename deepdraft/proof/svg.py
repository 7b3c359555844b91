"""Plain SVG diagrams for reports: grouped bars with whiskers, and lines. No library, no script.

Owns: the drawing. Knows nothing of: what the numbers mean. Colours come from CSS classes `c0`,
`c1` .. of the page around it, so that one picture serves light and dark.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, BAR_HEIGHT, GROUP_GAP, LABELS = 720, 15, 14, 150


@dataclass(frozen=True, slots=True)
class Bar:
    """A value with the span that most values lie in."""

    value: float
    low: float
    high: float


def nice(value: float) -> float:
    """The next number at or above a value whose quarters are round."""
    if value <= 0:
        return 1.0
    unit = 10 ** math.floor(math.log10(value))
    return next(k * unit for k in (1, 2, 4, 6, 8, 10) if k * unit >= value * 0.9999)


def shown(value: float) -> str:
    """A number with as many digits as say something."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def bars(
    groups: Sequence[tuple[str, Sequence[Bar | None]]], names: Sequence[str], unit: str
) -> str:
    """Horizontal bars, one group for each label, one bar for each name. Whiskers: low to high."""
    most = max((b.high for _, own in groups for b in own if b is not None), default=0.0)
    top = nice(most)
    plot = WIDTH - LABELS - 74
    parts, y = [], 4.0
    for label, own in groups:
        height = BAR_HEIGHT * len(own) + 2 * (len(own) - 1)
        parts.append(
            f'<text class="l" x="{LABELS - 12}" y="{y + height / 2 + 4:.1f}" '
            f'text-anchor="end">{escape(label)}</text>'
        )
        for i, bar in enumerate(own):
            if bar is not None:
                parts += _bar(bar, LABELS, y, plot / top, i, f"{label}, {names[i]}", unit)
            y += BAR_HEIGHT + 2
        y += GROUP_GAP
    height = y - GROUP_GAP + 24
    grid = []
    for k in range(5):
        x = LABELS + plot * k / 4
        grid.append(f'<line class="g" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height - 20:.1f}"/>')
        grid.append(
            f'<text class="a" x="{x:.1f}" y="{height - 5:.1f}" text-anchor="middle">'
            f"{top * k / 4:,.6g}</text>"
        )
    return _svg(height, f"{unit} by group", [*grid, *parts])


def _bar(
    bar: Bar, x: float, y: float, scale: float, colour: int, name: str, unit: str
) -> list[str]:
    width = max(1.0, bar.value * scale)
    middle = y + BAR_HEIGHT / 2
    low, high = x + bar.low * scale, x + bar.high * scale
    title = f"{name}: {shown(bar.value)} {unit} ({shown(bar.low)} to {shown(bar.high)})"
    return [
        f'<g><title>{escape(title)}</title><rect class="c{colour}" x="{x}" y="{y:.1f}" '
        f'width="{width:.1f}" height="{BAR_HEIGHT}" rx="2"/>'
        f'<path class="w" d="M{low:.1f} {middle:.1f}H{high:.1f}M{low:.1f} {middle - 4:.1f}v8'
        f'M{high:.1f} {middle - 4:.1f}v8"/></g>',
        f'<text class="v" x="{max(x + width, high) + 8:.1f}" y="{middle + 4:.1f}">'
        f"{shown(bar.value)}</text>",
    ]


Points = Sequence[tuple[float, Bar]]


def lines(series: Sequence[tuple[str, Points]], x_name: str, y_name: str) -> str:
    """Lines over a logarithmic x, with the span of each point as a whisker."""
    height, left, bottom, top_gap = 280.0, 62.0, 42.0, 24.0
    xs = sorted({x for _, points in series for x, _ in points})
    most = max((b.high for _, points in series for _, b in points), default=0.0)
    top = nice(most)
    low_x, high_x = math.log(xs[0]), math.log(xs[-1])

    def at(x: float, y: float) -> tuple[float, float]:
        share = 0.5 if high_x == low_x else (math.log(x) - low_x) / (high_x - low_x)
        px = left + 16 + share * (WIDTH - left - 50)
        return px, height - bottom - (height - bottom - top_gap) * y / top

    parts = [f'<text class="a" x="0" y="12">{escape(y_name)}</text>']
    for k in range(5):
        _, y = at(xs[0], top * k / 4)
        parts.append(f'<line class="g" x1="{left}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="a" x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">'
            f"{top * k / 4:,.6g}</text>"
        )
    for x in xs:
        px, _ = at(x, 0)
        parts.append(
            f'<text class="a" x="{px:.1f}" y="{height - bottom + 18:.1f}" text-anchor="middle">'
            f"{x:,.0f}</text>"
        )
    parts.append(
        f'<text class="a" x="{WIDTH / 2}" y="{height - 4}" text-anchor="middle">'
        f"{escape(x_name)}</text>"
    )
    for i, (name, points) in enumerate(series):
        path = " ".join("{:.1f},{:.1f}".format(*at(x, b.value)) for x, b in points)
        parts.append(f'<polyline class="s{i}" points="{path}"/>')
        for x, bar in points:
            px, py = at(x, bar.value)
            low, high = at(x, bar.low)[1], at(x, bar.high)[1]
            title = f"{name}, {x:,.0f}: {shown(bar.value)} ({shown(bar.low)} to {shown(bar.high)})"
            parts.append(
                f"<g><title>{escape(title)}</title>"
                f'<path class="w" d="M{px:.1f} {low:.1f}V{high:.1f}"/>'
                f'<circle class="c{i}" cx="{px:.1f}" cy="{py:.1f}" r="4"/></g>'
            )
    return _svg(height, f"{y_name} by {x_name}", parts)


def _svg(height: float, title: str, parts: Sequence[str]) -> str:
    label = escape(title, {'"': "&quot;"})
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{label}">\n'
        + "\n".join(parts)
        + "\n</svg>"
    )
