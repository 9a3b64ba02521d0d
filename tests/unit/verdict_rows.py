"""The rows of SPEC.md's tables of verdicts, as conditions on a status and a code."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from tests.unit.spec_document import Row, names

ANY = range(300, 1_000)
"""Statuses of answers that are no success; the wire reads three digits."""
_REST = ("any other status", "anything else")


@dataclass(frozen=True)
class Condition:
    """One clause of a first cell: these statuses, and a code that is among some or is not."""

    statuses: frozenset[int]
    codes: tuple[str, ...]
    negated: bool
    rank: int

    def holds(self, status: int, code: str) -> bool:
        """Tell whether an answer is of this kind."""
        if status not in self.statuses:
            return False
        return not self.codes or self.negated != any(_matches(code, one) for one in self.codes)


def _matches(code: str, pattern: str) -> bool:
    stem = pattern.removesuffix("…")
    return code.startswith(stem) if stem != pattern else code == pattern


def conditions(cell: str) -> list[Condition]:
    """Read a first cell such as `other 401; 403 with an AUTH… code`; none if it has no status."""
    return [found for clause in cell.split(";") if (found := _condition(clause)) is not None]


def _condition(clause: str) -> Condition | None:
    codes, negated = tuple(names(clause)), "but for" in clause
    if clause.strip().startswith(_REST):
        return Condition(frozenset(ANY), (), False, 0)
    words = re.sub(r"`[^`]*`", "", clause)
    statuses = {int(number) for number in re.findall(r"\b\d{3}\b", words)}
    if not statuses:
        return None
    rank = 3 if codes and not negated else 2
    if "5xx" in words:
        return Condition(frozenset(range(500, 600)) | statuses, codes, negated, 1)
    return Condition(frozenset(statuses), codes, negated, rank)


def row_of(rows: Iterable[Row], status: int, code: str = "") -> Row:
    """Return the row that applies to an answer: exactly one is the most special."""
    fitting = [
        (condition.rank, row)
        for row in rows
        for condition in conditions(row[0])
        if condition.holds(status, code)
    ]
    highest = max(rank for rank, _ in fitting)
    [row] = [row for rank, row in fitting if rank == highest]
    return row
