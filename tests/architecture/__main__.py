"""Print the figures of the architecture and keep their table in docs/architecture.md."""

from __future__ import annotations

import argparse
import sys

from tests.architecture.figures import Figures, measure
from tests.architecture.rules import MOST_PARAMETERS
from tests.architecture.source import ROOT
from tests.architecture.walk import files_one_url_passes

DOCUMENT = ROOT / "docs" / "architecture.md"
BEGIN = "<!-- figures: begin (written by scripts/architecture) -->"
END = "<!-- figures: end -->"

_MOVING = ("| lines of code", "| files that one URL passes")
"""Rows that may differ from a new measurement: any edit changes the first, a race the second."""


def with_table(document: str, table: str) -> str:
    """Return the document with the table between the two markers. ValueError without both."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the document needs the lines {BEGIN} and {END}")
    return f"{before}{begin}\n\n{table}\n\n{end}{after}"


def is_stale(document: str, table: str) -> bool:
    """Compare the table of the document with a new one, but for the rows that move."""
    old, new = (
        [row for row in text.splitlines() if not row.startswith(_MOVING)]
        for text in (document, with_table(document, table))
    )
    return old != new


def details(figures: Figures) -> str:
    """Render what is behind the figures, one finding a line."""
    lines = [f"cycle: {', '.join(group)}" for group in figures.cycles]
    lines += [f"upward: {arrow}" for arrow in figures.upward]
    lines += [
        f"one importer: {one.name} ({one.code_lines} lines), imported by {one.importer}"
        for one in figures.lonely
    ]
    lines += [f"one URL passes: {path}" for path in figures.passed]
    lines += [f"shared name: {name}" for name in figures.shared]
    lines += [f"more than {MOST_PARAMETERS} parameters: {name}" for name in figures.long_signatures]
    lines += [f"takes a whole Binding: {name}" for name in figures.with_binding]
    return "\n".join(lines)


def main() -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/architecture", description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the table is out of date")
    parser.add_argument("--verbose", action="store_true", help="list what the figures count")
    options = parser.parse_args()
    figures = measure(files_one_url_passes())
    table = figures.table()
    print(table)
    if options.verbose:
        print(f"\n{details(figures)}")
    document = DOCUMENT.read_text()
    if options.check:
        if is_stale(document, table):
            print("docs/architecture.md is out of date: run scripts/architecture", file=sys.stderr)
            return 1
        return 0
    DOCUMENT.write_text(with_table(document, table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
