"""Draws a flame graph as SVG text: what calls what, each frame as wide as its CPU, roots below."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from xml.sax.saxutils import escape

from bench.plot import INK, PAPER

WIDTH, MARGIN, ROW = 1_200, 10, 17
TOP = 84
LEGEND_COLUMNS = 6
LEAST = 0.0015
"""Frames narrower than this part of the whole are left out."""
_LETTER = 6.3
"""The width of a letter, in pixels."""
# Light enough for black letters; neighbours in the list differ in grey too.
COLOURS = (
    "#f4a582",
    "#fddbc7",
    "#92c5de",
    "#d1e5f0",
    "#a6dba0",
    "#e7d4e8",
    "#fee08b",
    "#c2a5cf",
    "#b8e186",
    "#f1b6da",
    "#cccccc",
    "#80cdc1",
    "#dfc27d",
    "#bababa",
)


class Box(NamedTuple):
    """A frame of a stack: its words, and the part of the table that it counts for."""

    words: str
    part: str


class Flame(NamedTuple):
    """A stack, outermost first, and its cost."""

    stack: tuple[Box, ...]
    cost: float


@dataclass(slots=True)
class _Node:
    cost: float = 0.0
    above: dict[Box, _Node] = field(default_factory=dict)


def svg(title: str, subtitle: str, unit: str, flames: Iterable[Flame]) -> str:
    """Draw the document. The same stacks give the same text."""
    root = _Node()
    for flame in flames:
        node = root
        node.cost += flame.cost
        for box in flame.stack:
            node = node.above.setdefault(box, _Node())
            node.cost += flame.cost
    parts = sorted({box.part for box in _boxes(root)})
    colours = {part: COLOURS[place % len(COLOURS)] for place, part in enumerate(parts)}
    top = TOP + ROW * -(-len(parts) // LEGEND_COLUMNS)
    base = top + ROW * _depth(root, root.cost * LEAST)
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {base + MARGIN}" '
        f'width="{WIDTH}" height="{base + MARGIN}" font-family="system-ui, sans-serif" '
        f'font-size="11" fill="{INK}" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{base + MARGIN}" fill="{PAPER}"/>',
        f'<text x="{MARGIN}" y="28" font-size="17" font-weight="600">{escape(title)}</text>',
        f'<text x="{MARGIN}" y="48" font-size="12">{escape(subtitle)}</text>',
        *_legend(colours),
    ]
    scale = (WIDTH - 2 * MARGIN) / (root.cost or 1.0)
    _draw(drawn, root, MARGIN, base, (scale, root.cost * LEAST, unit, colours))
    return "\n".join([*drawn, "</svg>", ""])


def _boxes(node: _Node) -> Iterable[Box]:
    for box, child in node.above.items():
        yield box
        yield from _boxes(child)


def _depth(node: _Node, least: float) -> int:
    return max(
        (1 + _depth(child, least) for child in node.above.values() if child.cost >= least),
        default=0,
    )


def _legend(colours: dict[str, str]) -> list[str]:
    room = (WIDTH - 2 * MARGIN) / LEGEND_COLUMNS
    drawn = []
    for place, (part, colour) in enumerate(colours.items()):
        x = MARGIN + place % LEGEND_COLUMNS * room
        y = 60 + place // LEGEND_COLUMNS * ROW
        drawn.append(f'<rect x="{x:.0f}" y="{y}" width="11" height="11" fill="{colour}"/>')
        drawn.append(f'<text x="{x + 16:.0f}" y="{y + 10}">{escape(part)}</text>')
    return drawn


def _draw(
    drawn: list[str],
    node: _Node,
    x: float,
    base: float,
    look: tuple[float, float, str, dict[str, str]],
) -> None:
    """Draw what a frame called, left to right by name, above it."""
    scale, least, unit, colours = look
    for box, child in sorted(node.above.items()):
        width = child.cost * scale
        if child.cost >= least:
            y = base - ROW
            drawn.append(
                f"<g><title>{escape(box.words)}: {child.cost:.1f} {escape(unit)}</title>"
                f'<rect x="{x:.1f}" y="{y}" width="{max(width - 0.5, 0.5):.1f}" '
                f'height="{ROW - 1}" fill="{colours[box.part]}"/>'
                f"{_words(box.words, x, y, width)}</g>"
            )
            _draw(drawn, child, x, y, look)
        x += width


def _words(words: str, x: float, y: float, width: float) -> str:
    letters = int((width - 4) / _LETTER)
    if letters < 3:
        return ""
    shown = words if len(words) <= letters else f"{words[: letters - 1]}…"
    return f'<text x="{x + 2:.1f}" y="{y + 12}">{escape(shown)}</text>'


def shorten(stacks: Sequence[tuple[Box, ...]]) -> int:
    """Return the number of outermost frames that all of some stacks have in common, at most all
    but one of the shortest."""
    if not stacks:
        return 0
    most = max(min(map(len, stacks)) - 1, 0)
    first = stacks[0]
    return next(
        (place for place in range(most) if any(one[place] != first[place] for one in stacks)), most
    )
