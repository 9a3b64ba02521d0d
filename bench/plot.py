"""Draws a plot as SVG text: bars in groups, panels side by side, a logarithmic scale that begins at
1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

# Most readers can tell these apart, whatever their colour vision, and in grey (Okabe and Ito).
COLOURS = ("#d55e00", "#e69f00", "#56b4e9", "#009e73", "#0072b2", "#cc79a7")
INK, FAINT, PAPER = "#222222", "#d9d9d9", "#fdfdfb"

PANEL_WIDTH, PANEL_HEIGHT, PANEL_GAP = 440, 300, 40
LEFT, TOP, BOTTOM, RIGHT = 66, 92, 62, 20
LEAST_BAR = 2.0
"""In pixels, so that a bar of 1 is visible."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One set of axes. `values[group][series]`, None where nothing was measured."""

    title: str
    groups: Sequence[str]
    values: Sequence[Sequence[float | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Panels under one title and one legend."""

    title: str
    subtitle: str
    x_label: str
    y_label: str
    series: Sequence[str]
    panels: Sequence[Panel]


def svg(plot: Plot) -> str:
    """Draw the document. The same plot gives the same text."""
    width = LEFT + RIGHT + len(plot.panels) * (PANEL_WIDTH + PANEL_GAP) - PANEL_GAP
    height = TOP + PANEL_HEIGHT + BOTTOM
    top = _top(plot)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="system-ui, sans-serif" role="img">',
        f"<title>{escape(plot.title)}</title>",
        f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
        _text(LEFT, 26, plot.title, size=17, weight="600"),
        _text(LEFT, 45, plot.subtitle, size=12),
        *_legend(plot.series),
        _text(18, TOP + PANEL_HEIGHT / 2, plot.y_label, anchor="middle", turned=True),
    ]
    for number, panel in enumerate(plot.panels):
        left = LEFT + number * (PANEL_WIDTH + PANEL_GAP)
        parts += _panel(panel, left, top, plot.x_label)
    return "\n".join([*parts, "</svg>", ""])


def _top(plot: Plot) -> int:
    """Return the power of ten where the scale ends."""
    values = [
        value
        for panel in plot.panels
        for group in panel.values
        for value in group
        if value is not None
    ]
    return max(1, math.ceil(math.log10(max([1.0, *values])) - 1e-9))


def _panel(panel: Panel, left: float, top: int, x_label: str) -> list[str]:
    base = TOP + PANEL_HEIGHT
    middle = left + PANEL_WIDTH / 2
    parts = [_text(middle, TOP - 8, panel.title, anchor="middle", weight="600")]
    for power in range(top + 1):
        y = base - PANEL_HEIGHT * power / top
        parts.append(_line(left, y, left + PANEL_WIDTH, y, FAINT if power else INK))
        parts.append(_text(left - 6, y + 4, f"{10**power:,}", anchor="end", size=11))
    slot = PANEL_WIDTH / max(len(panel.groups), 1)
    for place, (name, values) in enumerate(zip(panel.groups, panel.values, strict=True)):
        start = left + place * slot
        parts += _bars(values, start + slot * 0.06, slot * 0.88, top)
        parts.append(_text(start + slot / 2, base + 18, name, anchor="middle"))
    return [*parts, _text(middle, base + 42, x_label, anchor="middle")]


def _bars(values: Sequence[float | None], left: float, width: float, top: int) -> list[str]:
    base = TOP + PANEL_HEIGHT
    each = width / len(values)
    parts = []
    for place, value in enumerate(values):
        if value is None:
            continue
        height = max(PANEL_HEIGHT * math.log10(max(value, 1.0)) / top, LEAST_BAR)
        x = left + place * each
        parts.append(
            f'<rect x="{x:.1f}" y="{base - height:.1f}" width="{each - 2:.1f}" '
            f'height="{height:.1f}" fill="{COLOURS[place % len(COLOURS)]}"/>'
        )
        middle = x + (each - 2) / 2
        parts.append(_text(middle, base - height - 4, number(value), anchor="middle", size=9))
    return parts


def number(value: float) -> str:
    """Format the figure above a bar, narrowly."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _legend(series: Sequence[str]) -> list[str]:
    parts, x = [], float(LEFT)
    for place, name in enumerate(series):
        colour = COLOURS[place % len(COLOURS)]
        parts.append(f'<rect x="{x:.1f}" y="56" width="11" height="11" fill="{colour}"/>')
        parts.append(_text(x + 16, 66, name, size=12))
        x += 34 + 6.8 * len(name)
    return parts


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" '
        'stroke-width="1"/>'
    )


def _text(
    x: float,
    y: float,
    words: str,
    *,
    size: int = 13,
    anchor: str = "start",
    weight: str = "400",
    turned: bool = False,
) -> str:
    turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
        f'font-weight="{weight}" fill="{INK}"{turn}>{escape(words)}</text>'
    )
