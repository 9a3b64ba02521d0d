"""The failure groups of runs: counted with the counters, read with `failed`, and counted anew.

A group begins only while every failed task of its run lies in one, so that the count of a group is
that of all the rows which bear its id. What the groups lack of `failed` lies in none of them. The
counts of a run lie in one row, apart from what does not change: a settlement writes that row alone.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from conveyor.dev.sqlite.rows import KeyRange, KeyStatement, RowsStatement
from conveyor.domain.failure_groups import (
    MOST_GROUPS,
    MOST_SAMPLES,
    FailureGroup,
    FailureGroups,
    FailureKind,
    failure_kind,
)
from conveyor.domain.model import GroupFilter, Problem, TaskFailure

_READ = KeyStatement("SELECT run_no, counts FROM failure_counts WHERE run_no IN ({keys})")
_WRITE = RowsStatement(
    """
    INSERT INTO failure_counts (run_no, counts)
    SELECT * FROM ({rows}) WHERE column1 IS NOT NULL
    ON CONFLICT (run_no) DO UPDATE SET counts = excluded.counts
    """,
    width=2,
)
_BEGIN = RowsStatement(
    """
    INSERT OR REPLACE INTO failure_groups (run_no, group_id, first_at, reason, code, status, detail,
        task_ids)
    SELECT * FROM ({rows}) WHERE column1 IS NOT NULL
    """,
    width=8,
)
_ADD_SAMPLE = """
    UPDATE failure_groups SET task_ids = json_insert(task_ids, '$[#]', ?)
    WHERE run_no = ? AND group_id = ?
"""
_OF_RUN = """
    SELECT r.failed, g.group_id, e.value ->> 0, g.first_at, e.value ->> 1, g.task_ids, g.reason,
        g.code, g.status, g.detail
    FROM runs r LEFT JOIN failure_counts c ON c.run_no = r.run_no
    LEFT JOIN json_each(c.counts) e
    LEFT JOIN failure_groups g ON g.run_no = r.run_no AND g.group_id = e.key
    WHERE r.run_id = ? ORDER BY e.value ->> 0 DESC, g.first_at, g.group_id
"""
_COPY = """
    INSERT INTO failure_groups (run_no, group_id, first_at, reason, code, status, detail, task_ids)
    SELECT ?1, group_id, first_at, reason, code, status, detail, task_ids
    FROM failure_groups
    WHERE run_no = ?2 AND group_id NOT IN (SELECT value FROM json_each(?3))
"""
_KEEP = """
    DELETE FROM failure_groups
    WHERE run_no = ? AND group_id NOT IN (SELECT value FROM json_each(?))
"""
_FIRST_ROWS = f"""
    SELECT * FROM (
        SELECT t.task_key, t.task_id, t.failure_group, h.failure, h.error,
            min(t.updated_at) OVER (PARTITION BY t.failure_group) AS first_at,
            max(t.updated_at) OVER (PARTITION BY t.failure_group) AS last_at,
            row_number() OVER (PARTITION BY t.failure_group ORDER BY t.task_key & 34359738367) AS n
        FROM tasks t INDEXED BY tasks_by_state JOIN histories h ON h.task_key = t.task_key
        WHERE t.state = 2 AND t.task_key > ? AND t.task_key <= ?
        AND t.failure_group IN (SELECT value FROM json_each(?))
    ) WHERE n <= {MOST_SAMPLES} ORDER BY task_key & 34359738367
"""

_counts = msgspec.json.Decoder(dict[str, list[int]])
_ids = msgspec.json.Decoder(tuple[str, ...])
_problems = msgspec.json.Decoder(Problem)
_encoder = msgspec.json.Encoder()


def compared(groups: GroupFilter) -> tuple[str, str]:
    """Write a filter as the operator of a comparison, and the ids to compare with, as JSON. It
    holds for rows without a group as if theirs were empty text."""
    if groups.outside is None:
        return "IN", _encoder.encode(sorted(groups.named)).decode()
    return "NOT IN", _encoder.encode(sorted(groups.outside - groups.named)).decode()


class FailedRow(msgspec.Struct, frozen=True, gc=False):
    """A task that has just failed."""

    kind: FailureKind
    task_id: str
    detail: str | None
    at: int


@dataclass(slots=True)
class _Group:
    """A group that begins."""

    kind: FailureKind
    detail: str | None
    first_at: int
    task_ids: list[str] = field(default_factory=list)

    def row(self, run_no: int, group_id: str) -> tuple[object, ...]:
        """Return the values of its row."""
        kind, ids = self.kind, _encoder.encode(self.task_ids).decode()
        return (
            run_no, group_id, self.first_at, kind.reason, kind.code, kind.status, self.detail, ids,
        )  # fmt: skip


def count_failures(
    connection: sqlite3.Connection, runs: Sequence[tuple[int, int, Sequence[FailedRow]]]
) -> None:
    """Add failures to the groups of their runs, given as (run_no, `failed` with them, failures)."""
    known = dict(_READ.execute(connection, [run_no for run_no, _, _ in runs]).fetchall())
    written: list[tuple[object, ...]] = []
    begun: list[tuple[object, ...]] = []
    for run_no, failed, failures in runs:
        counts = _counts.decode(known.get(run_no, "{}"))
        groups = _add(connection, run_no, counts, failures, failed - len(failures))
        begun += [group.row(run_no, group_id) for group_id, group in groups.items()]
        written.append((run_no, _encoder.encode(counts).decode()))
    _WRITE.execute(connection, written)
    _BEGIN.execute(connection, begun)


def _add(
    connection: sqlite3.Connection,
    run_no: int,
    counts: dict[str, list[int]],
    failures: Sequence[FailedRow],
    failed: int,
) -> dict[str, _Group]:
    """Add failures to the counts of a run that had `failed` failed tasks before; return the groups
    that begin."""
    begun: dict[str, _Group] = {}
    added = 0
    for failure in failures:
        group_id = failure.kind.group_id
        count = counts.get(group_id)
        if count is None:
            in_groups = sum(count for count, _ in counts.values()) - added
            if in_groups < failed or len(counts) == MOST_GROUPS:
                continue
            count = counts[group_id] = [0, failure.at]
            begun[group_id] = _Group(failure.kind, failure.detail, failure.at)
        count[0] += 1
        added += 1
        if count[1] < failure.at:
            count[1] = failure.at
        if count[0] > MOST_SAMPLES:
            continue
        if group_id in begun:
            begun[group_id].task_ids.append(failure.task_id)
        else:
            connection.execute(_ADD_SAMPLE, (failure.task_id, run_no, group_id))
    return begun


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
    return {group_id: count for group_id, (count, _) in _counts_of(connection, run_no).items()}


def _counts_of(connection: sqlite3.Connection, run_no: int) -> dict[str, list[int]]:
    row = _READ.execute(connection, [run_no]).fetchone()
    return {} if row is None else _counts.decode(row[1])


def _write_counts(
    connection: sqlite3.Connection, run_no: int, counts: Mapping[str, list[int]]
) -> None:
    if counts:
        _WRITE.execute(connection, [(run_no, _encoder.encode(counts).decode())])
    else:
        connection.execute("DELETE FROM failure_counts WHERE run_no = ?", (run_no,))


def copy_groups(
    connection: sqlite3.Connection, source_no: int, target_no: int, *, without: Collection[str] = ()
) -> None:
    """Give a run the groups of another one, but for some."""
    counts = _counts_of(connection, source_no)
    kept = {group_id: count for group_id, count in counts.items() if group_id not in without}
    _write_counts(connection, target_no, kept)
    left_out = _encoder.encode(list(without)).decode()
    connection.execute(_COPY, (target_no, source_no, left_out))


def remove_groups(connection: sqlite3.Connection, run_id: str) -> None:
    """Remove the groups of a run."""
    for table in ("failure_groups", "failure_counts"):
        connection.execute(
            f"DELETE FROM {table} WHERE run_no = (SELECT run_no FROM runs WHERE run_id = ?)",
            (run_id,),
        )


def recount_groups(
    connection: sqlite3.Connection, place: KeyRange, counted: Mapping[str, int]
) -> None:
    """Set the groups of a run to its failed rows, `counted` by their groups: those that it keeps
    get their counts, those without a row go, and others begin where there is room."""
    earlier = _counts_of(connection, place.run_no)
    if not counted and not earlier:
        return
    counts = {
        group_id: [counted[group_id], last_at]
        for group_id, (_, last_at) in earlier.items()
        if group_id in counted
    }
    connection.execute(_KEEP, (place.run_no, _encoder.encode(list(counts)).decode()))
    missing = [group_id for group_id in counted if group_id not in counts]
    if new := missing[: MOST_GROUPS - len(counts)]:
        for group_id, last_at in _begin_from_rows(connection, place, new).items():
            counts[group_id] = [counted[group_id], last_at]
    _write_counts(connection, place.run_no, counts)


def _begin_from_rows(
    connection: sqlite3.Connection, place: KeyRange, group_ids: Sequence[str]
) -> dict[str, int]:
    """Begin groups that have rows already, whose instants are those of the rows; return when the
    last task of each failed."""
    wanted = _encoder.encode(group_ids).decode()
    groups: dict[str, _Group] = {}
    ends: dict[str, int] = {}
    for shard in range(place.shards.count):
        rows = connection.execute(_FIRST_ROWS, (*place.of_shard(shard), wanted)).fetchall()
        for _, task_id, group_id, failure, error, first_at, last_at, _ in rows:
            problem = _problems.decode(error)
            kind = failure_kind(TaskFailure(failure), problem)
            group = groups.setdefault(group_id, _Group(kind, problem.detail, first_at))
            group.first_at = min(group.first_at, first_at)
            ends[group_id] = max(ends.get(group_id, last_at), last_at)
            if len(group.task_ids) < MOST_SAMPLES:
                group.task_ids.append(task_id)
    _BEGIN.execute(
        connection, [group.row(place.run_no, group_id) for group_id, group in groups.items()]
    )
    return ends
