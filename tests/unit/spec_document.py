"""SPEC.md as the tests read it: tables found by their first heading cells, read row by row; and the
rows that such a table, or another list of the project, has too few, too many or wrong."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
SPEC = (ROOT / "SPEC.md").read_text(encoding="utf-8")

Row = list[str]


def _cells(line: str) -> Row:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


def tables(text: str = SPEC) -> Iterator[tuple[Row, list[Row]]]:
    """Every table as (heading cells, rows)."""
    block: list[str] = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            block.append(line)
        elif block:
            yield _cells(block[0]), [_cells(row) for row in block[2:]]
            block = []


def table(*heading: str, text: str = SPEC) -> list[Row]:
    """The rows of every table whose heading begins with these cells; at least one."""
    rows = [
        row
        for found, body in tables(text)
        if tuple(found[: len(heading)]) == heading
        for row in body
    ]
    assert rows, f"SPEC.md has no table headed {' | '.join(heading)}"
    return rows


def section(title: str) -> str:
    """The text under a heading, up to the next of the same or a higher level. Its number may be
    left out."""
    found = re.search(rf"^(#+) (?:[\d.]+ )?{re.escape(title)}$", SPEC, re.MULTILINE)
    assert found is not None, f"SPEC.md has no heading {title}"
    rest = SPEC[found.end() :]
    following = re.search(rf"^#{{1,{len(found[1])}}} ", rest, re.MULTILINE)
    return rest[: following.start()] if following else rest


def names(cell: str) -> list[str]:
    """Return the words of a text between backticks."""
    return re.findall(r"`([^`\n]+)`", cell)


def name(cell: str) -> str:
    """The one name that a cell has between backticks."""
    (found,) = names(cell)
    return found


def once(rows: Iterable[str]) -> set[str]:
    """Return the rows as a set, after checking that no row is there twice."""
    listed = list(rows)
    assert len(listed) == len(set(listed)), sorted(row for row in listed if listed.count(row) > 1)
    return set(listed)


def differences(where: str, told: Collection[object], right: Collection[object]) -> list[str]:
    """Return a line for each row that a file lacks, has for nothing, or has wrong.

    `where` names the file and its table. Of mappings the values are compared too.
    """
    lines = [f"{where}: there is no row for {row}" for row in right if row not in told]
    lines += [f"{where}: the row for {row} belongs to nothing" for row in told if row not in right]
    if isinstance(told, Mapping) and isinstance(right, Mapping):
        lines += [
            f"{where}: the row for {row} says {told[row]}, where {right[row]} is right"
            for row in right
            if row in told and told[row] != right[row]
        ]
    return lines
