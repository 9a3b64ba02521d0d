"""The tables and columns of SQLite, as the statements of the schema describe them; and the
pragmas."""

from __future__ import annotations

import re
from collections.abc import Iterable

_TABLE = re.compile(r"CREATE TABLE (\w+) \(")
_ADDED = re.compile(r"ALTER TABLE (\w+) ADD COLUMN")
_DROPPED = re.compile(r"ALTER TABLE (\w+) DROP COLUMN (\w+)")
_COLUMN = re.compile(r"(?:ALTER TABLE \w+ ADD COLUMN )?([a-z]\w*) [A-Z]")

Meanings = dict[str, tuple[str, dict[str, str]]]
"""Each table: what a row is, and what each column holds."""


def read_meanings(statements: Iterable[str]) -> Meanings:
    """Read the comments of the statements that make tables and columns."""
    found: Meanings = {}
    for statement in statements:
        if made := _TABLE.search(statement):
            texts = _comments(statement)
            found[made[1]] = (texts.pop(""), texts)
        elif added := _ADDED.search(statement):
            found[added[1]][1].update(_comments(statement))
        elif dropped := _DROPPED.search(statement):
            del found[dropped[1]][1][dropped[2]]
    return found


def _comments(statement: str) -> dict[str, str]:
    """Sort the comments of a statement by column; the empty name has those before any column."""
    column, texts = "", dict[str, str]()
    for line in statement.splitlines():
        code, _, comment = line.strip().partition("--")
        if named := _COLUMN.match(code):
            column = named[1]
        if comment:
            texts[column] = f"{texts.get(column, '')} {comment.strip()}".strip()
    return texts


WRITER, READER = "writer", "reader"

PRAGMAS: tuple[tuple[str, str, str], ...] = (
    ("journal_mode", WRITER, "readers never wait for the writer"),
    ("synchronous", WRITER, "1, NORMAL: a flush at each checkpoint instead of each commit"),
    ("wal_autocheckpoint", WRITER, "never on the loop's thread; from 2000 pages on its own"),
    ("journal_size_limit", WRITER, "bytes to which a log that has grown shrinks again"),
    ("cache_size", WRITER, "bounded memory; a negative number is KiB"),
    ("application_id", WRITER, "marks a file of Conveyor 0.1.0 or later"),
    ("user_version", WRITER, "the schema's version"),
    ("cache_size", READER, "bounded memory, for each reader"),
    ("query_only", READER, "only the writer writes"),
)
"""The pragmas: name, connection, and reason."""
