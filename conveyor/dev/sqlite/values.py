"""Statements over many rows at once.

Each step of a statement gives the interpreter's lock away and has to win it back, which a busy
event loop makes slow: one statement over fifty rows costs one such turn, fifty statements fifty.
Row counts are rounded up and padded with NULL keys, so that few statements need to be prepared.
"""

from __future__ import annotations

import sqlite3
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain

MOST_ROWS = 64
_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, MOST_ROWS)


def rounded(count: int) -> int:
    """The number of rows that a statement for `count` rows (at most MOST_ROWS) is written for."""
    return _SIZES[bisect_left(_SIZES, count)]


class KeyStatement:
    """A statement over a list of keys; `sql` has `{keys}` where the list goes."""

    def __init__(self, sql: str) -> None:
        self.sql: Callable[[int], str] = lru_cache(
            lambda size: sql.format(keys=",".join("?" * size))
        )

    def execute(self, connection: sqlite3.Connection, keys: Sequence[object]) -> sqlite3.Cursor:
        """Run it over at most MOST_ROWS keys."""
        size = rounded(len(keys))
        return connection.execute(self.sql(size), [*keys, *[None] * (size - len(keys))])


class RowsStatement:
    """A statement that writes rows of `width` values; `sql` has `{rows}` where they go.

    The rows are a VALUES clause, its columns named column1 and so on; the statement has to pass
    over those with a NULL in column1.
    """

    def __init__(self, sql: str, *, width: int) -> None:
        row = f"({','.join('?' * width)})"
        self.sql: Callable[[int], str] = lru_cache(
            lambda size: sql.format(rows="VALUES" + ",".join([row] * size))
        )
        self._nothing = (None,) * width

    def execute(self, connection: sqlite3.Connection, rows: Sequence[tuple[object, ...]]) -> None:
        """Run it over the rows, MOST_ROWS at a time."""
        for start in range(0, len(rows), MOST_ROWS):
            part = rows[start : start + MOST_ROWS]
            size = rounded(len(part))
            padding = [self._nothing] * (size - len(part))
            connection.execute(self.sql(size), list(chain.from_iterable([*part, *padding])))
