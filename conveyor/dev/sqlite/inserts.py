"""Writing many task rows at once."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from itertools import islice

from conveyor.dev.sqlite.rows import Place, to_json
from conveyor.dev.sqlite.values import MOST_ROWS, RowsStatement
from conveyor.domain.model import NewTask

_INSERT = RowsStatement(
    "INSERT INTO tasks (task_key, state, created_at, updated_at, task_id, spec) "
    "SELECT column1, 0, column2, column2, column3, column4 FROM ({rows}) "
    "WHERE column1 IS NOT NULL",
    width=4,
)


def insert_tasks(
    connection: sqlite3.Connection, place: Place, tasks: Iterable[NewTask], *, now: int
) -> None:
    """Write pending rows. Raises sqlite3.IntegrityError where an index is taken."""
    rows = _rows(place, tasks, now)
    while part := list(islice(rows, MOST_ROWS)):
        _INSERT.execute(connection, part)


def _rows(place: Place, tasks: Iterable[NewTask], now: int) -> Iterator[tuple[int, int, str, str]]:
    for task in tasks:
        yield place.key(task.task_id, task.index), now, task.task_id, to_json(task.spec)
