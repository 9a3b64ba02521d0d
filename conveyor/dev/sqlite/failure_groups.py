"""The failure groups of runs: counted with the counters, read with `failed`, and counted anew.

A group begins only while every failed task of its run lies in one, so that the count of a group is
that of all the rows which bear its id. What the groups lack of `failed` lies in none of them.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from conveyor.dev.sqlite.rows import KeyRange, RowsStatement
from conveyor.domain.failure_groups import (
    MOST_GROUPS,
    MOST_SAMPLES,
    FailureGroup,
    FailureGroups,
    FailureKind,
    failure_kind,
)
from conveyor.domain.model import GroupFilter, Problem, TaskFailure

_TOUCHED = """
    SELECT g.run_no, g.group_id, g.count, g.first_at, g.last_at, g.task_ids
    FROM json_each(?) wanted CROSS JOIN failure_groups g
    ON g.run_no = wanted.value ->> 0 AND g.group_id = wanted.value ->> 1
"""
_SUM = "SELECT count(*), coalesce(sum(count), 0) FROM failure_groups WHERE run_no = ?"
_WRITE = RowsStatement(
    """
    INSERT INTO failure_groups (run_no, group_id, count, first_at, last_at, task_ids, reason, code,
        status, detail)
    SELECT * FROM ({rows}) WHERE column1 IS NOT NULL
    ON CONFLICT (run_no, group_id) DO UPDATE SET count = excluded.count,
        first_at = excluded.first_at, last_at = excluded.last_at, task_ids = excluded.task_ids
    """,
    width=10,
)
_OF_RUN = """
    SELECT r.failed, g.group_id, g.count, g.first_at, g.last_at, g.task_ids, g.reason, g.code,
        g.status, g.detail
    FROM runs r LEFT JOIN failure_groups g ON g.run_no = r.run_no
    WHERE r.run_id = ? ORDER BY g.count DESC, g.first_at, g.group_id
"""
_COPY = """
    INSERT INTO failure_groups (run_no, group_id, count, first_at, last_at, reason, code, status,
        detail, task_ids)
    SELECT ?1, group_id, count, first_at, last_at, reason, code, status, detail, task_ids
    FROM failure_groups
    WHERE run_no = ?2 AND group_id NOT IN (SELECT value FROM json_each(?3))
"""
_RECOUNT = RowsStatement(
    """
    WITH written AS ({rows})
    UPDATE failure_groups SET count = column3 FROM written
    WHERE run_no = written.column1 AND group_id = written.column2
    """,
    width=3,
)
_FIRST_ROWS = f"""
    SELECT * FROM (
        SELECT t.task_key, t.task_id, h.failure_group, h.failure, h.error,
            min(t.updated_at) OVER (PARTITION BY h.failure_group) AS first_at,
            max(t.updated_at) OVER (PARTITION BY h.failure_group) AS last_at,
            row_number() OVER (PARTITION BY h.failure_group ORDER BY t.task_key & 34359738367) AS n
        FROM tasks t INDEXED BY tasks_by_state JOIN histories h ON h.task_key = t.task_key
        WHERE t.state = 2 AND t.task_key > ? AND t.task_key <= ?
        AND h.failure_group IN (SELECT value FROM json_each(?))
    ) WHERE n <= {MOST_SAMPLES} ORDER BY task_key & 34359738367
"""

_ids = msgspec.json.Decoder(tuple[str, ...])
_problems = msgspec.json.Decoder(Problem)
_encoder = msgspec.json.Encoder()


def compared(groups: GroupFilter) -> tuple[str, str]:
    """Write a filter as the operator of a comparison, and the ids to compare with, as JSON. It
    holds for rows without a group as if theirs were empty text."""
    if groups.outside is None:
        return "IN", _encoder.encode(sorted(groups.named)).decode()
    return "NOT IN", _encoder.encode(sorted(groups.outside - groups.named)).decode()


class FailedTask(NamedTuple):
    """A task that has just failed."""

    group_id: str
    kind: FailureKind
    task_id: str
    detail: str | None
    at: int


@dataclass(slots=True)
class _Group:
    """A group while failures are added to it."""

    kind: FailureKind
    detail: str | None
    first_at: int
    last_at: int
    count: int = 0
    task_ids: list[str] = field(default_factory=list)

    def add(self, failure: FailedTask) -> None:
        """Account for one failure."""
        self.count += 1
        self.first_at = min(self.first_at, failure.at)
        self.last_at = max(self.last_at, failure.at)
        if len(self.task_ids) < MOST_SAMPLES:
            self.task_ids.append(failure.task_id)

    def row(self, run_no: int, group_id: str) -> tuple[object, ...]:
        """Return the values of its row."""
        ids = _encoder.encode(self.task_ids).decode()
        times = (self.first_at, self.last_at)
        kind = self.kind
        return (
            run_no, group_id, self.count, *times, ids, kind.reason, kind.code, kind.status,
            self.detail,
        )  # fmt: skip


def count_failures(
    connection: sqlite3.Connection, runs: Sequence[tuple[int, int, Sequence[FailedTask]]]
) -> None:
    """Add failures to the groups of their runs, given as (run_no, `failed` with them, failures)."""
    groups = _touched(connection, runs)
    for run_no, failed, failures in runs:
        room: int | None = None
        for failure in failures:
            group = groups.get((run_no, failure.group_id))
            if group is None:
                if room is None:
                    room = _room(connection, run_no, failed - len(failures))
                if room == 0:
                    continue
                room -= 1
                group = _Group(failure.kind, failure.detail, failure.at, failure.at)
                groups[run_no, failure.group_id] = group
            group.add(failure)
    _WRITE.execute(connection, [group.row(*key) for key, group in groups.items()])


def _touched(
    connection: sqlite3.Connection, runs: Sequence[tuple[int, int, Sequence[FailedTask]]]
) -> dict[tuple[int, str], _Group]:
    """Read the groups that failures belong to, of those that are kept already."""
    wanted = {(run_no, one.group_id): one for run_no, _, failures in runs for one in failures}
    keys = _encoder.encode(list(wanted)).decode()
    return {
        (run_no, group_id): _Group(
            wanted[run_no, group_id].kind, None, first_at, last_at, count, list(_ids.decode(ids))
        )
        for run_no, group_id, count, first_at, last_at, ids in connection.execute(_TOUCHED, (keys,))
    }


def _room(connection: sqlite3.Connection, run_no: int, failed: int) -> int:
    """Return how many groups may begin in a run with that many failed tasks."""
    kept, counted = connection.execute(_SUM, (run_no,)).fetchone()
    return max(MOST_GROUPS - kept, 0) if counted >= failed else 0


def read_groups(connection: sqlite3.Connection, run_id: str) -> FailureGroups | None:
    """Read the groups of a run with its `failed`, in one statement; None where there is no run."""
    rows = connection.execute(_OF_RUN, (run_id,)).fetchall()
    if not rows:
        return None
    return FailureGroups(rows[0][0], [_group(row[1:]) for row in rows if row[1] is not None])


def _group(row: tuple[Any, ...]) -> FailureGroup:
    group_id, count, first_at, last_at, ids, reason, code, status, detail = row
    return FailureGroup(
        group_id=group_id,
        reason=TaskFailure(reason),
        code=code,
        status=status,
        count=count,
        first_at=first_at,
        last_at=last_at,
        detail=detail,
        task_ids=_ids.decode(ids),
    )


def kept_counts(connection: sqlite3.Connection, run_no: int) -> dict[str, int]:
    """Read the counts of the groups that a run keeps, by id."""
    sql = "SELECT group_id, count FROM failure_groups WHERE run_no = ?"
    return dict(connection.execute(sql, (run_no,)).fetchall())


def copy_groups(
    connection: sqlite3.Connection, source_no: int, target_no: int, *, without: Collection[str] = ()
) -> None:
    """Give a run the groups of another one, but for some."""
    left_out = _encoder.encode(list(without)).decode()
    connection.execute(_COPY, (target_no, source_no, left_out))


def remove_groups(connection: sqlite3.Connection, run_id: str) -> None:
    """Remove the groups of a run."""
    connection.execute(
        "DELETE FROM failure_groups WHERE run_no = (SELECT run_no FROM runs WHERE run_id = ?)",
        (run_id,),
    )


def recount_groups(
    connection: sqlite3.Connection, place: KeyRange, counted: Mapping[str, int]
) -> None:
    """Set the groups of a run to its failed rows, `counted` by their groups: those that it keeps
    get their counts, those without a row go, and others begin where there is room."""
    kept = kept_counts(connection, place.run_no)
    _RECOUNT.execute(
        connection, [(place.run_no, group_id, counted.get(group_id, 0)) for group_id in kept]
    )
    connection.execute("DELETE FROM failure_groups WHERE run_no = ? AND count = 0", (place.run_no,))
    room = MOST_GROUPS - sum(group_id in counted for group_id in kept)
    missing = [group_id for group_id in counted if group_id not in kept][:room]
    if missing:
        _begin_from_rows(connection, place, {group_id: counted[group_id] for group_id in missing})


def _begin_from_rows(
    connection: sqlite3.Connection, place: KeyRange, counted: Mapping[str, int]
) -> None:
    """Begin groups that have rows already; their instants are those of the rows."""
    wanted = _encoder.encode(list(counted)).decode()
    groups: dict[str, _Group] = {}
    for shard in range(place.shards.count):
        rows = connection.execute(_FIRST_ROWS, (*place.of_shard(shard), wanted)).fetchall()
        for _, task_id, group_id, failure, error, first_at, last_at, _ in rows:
            problem = _problems.decode(error)
            group = groups.setdefault(
                group_id,
                _Group(
                    failure_kind(TaskFailure(failure), problem),
                    problem.detail,
                    first_at,
                    last_at,
                    counted[group_id],
                ),
            )
            group.first_at = min(group.first_at, first_at)
            group.last_at = max(group.last_at, last_at)
            if len(group.task_ids) < MOST_SAMPLES:
                group.task_ids.append(task_id)
    _WRITE.execute(connection, [group.row(place.run_no, key) for key, group in groups.items()])
