"""Find jobs and runs, move their status, and count the rows of runs.

Each function runs inside the caller's transaction. A status only moves where the transition tables
allow it. The rows of a run are the truth, and its counters a cache of them.
"""

from __future__ import annotations

import sqlite3

import msgspec

from conveyor.dev.sqlite.failure_groups import recount_groups
from conveyor.dev.sqlite.rows import (
    FAILED,
    SELECT_JOB,
    SELECT_RUN,
    SELECT_VIEW,
    SUCCESSFUL,
    UNFINISHED,
    KeyRange,
    job_from,
    run_from,
    shape_from,
    to_json,
    view_from,
)
from conveyor.domain.errors import ConveyorError, ErrorCode, not_found
from conveyor.domain.model import Job, JobStatus, JobView, Run, RunStatus
from conveyor.domain.result_shape import SIZE_BOUNDS, ResultShape, ShapeCounter
from conveyor.domain.shards import Shards, ShardScheme
from conveyor.domain.states import JOB_TRANSITIONS, RUN_TRANSITIONS, live_run_status

_COUNT = """
    SELECT count(*) FROM tasks INDEXED BY tasks_by_state
    WHERE state = ? AND task_key > ? AND task_key <= ?
"""
_FAILURES = """
    SELECT coalesce(h.failure, 'other'), failed.failure_group, count(*)
    FROM (SELECT task_key, failure_group FROM tasks INDEXED BY tasks_by_state
          WHERE state = 2 AND task_key > ? AND task_key <= ?) failed
    LEFT JOIN histories h USING (task_key) GROUP BY 1, 2
"""
_SIZE_CLASS = " ".join(
    f"WHEN h.result ->> 'size' < {bound} THEN {low}"
    for low, bound in zip((0, *SIZE_BOUNDS), SIZE_BOUNDS, strict=False)
)
_BODIES = f"""
    SELECT CASE {_SIZE_CLASS} ELSE {SIZE_BOUNDS[-1]} END, h.result ->> 'content_type', count(*),
        min(h.task_key & 34359738367)
    FROM histories h
    WHERE h.task_key > ? AND h.task_key <= ? AND h.result IS NOT NULL GROUP BY 1, 2 ORDER BY 4
"""
"""Bodies by the least size of their class and by Content-Type, the first tasks' first."""


class RowCounts(msgspec.Struct, frozen=True):
    """The rows of a run by state, and the failed ones by reason and by the group in their row."""

    unfinished: int
    successful: int
    failed: int
    failure_reasons: dict[str, int]
    groups: dict[str, int]

    @property
    def total(self) -> int:
        """The number of all rows."""
        return self.unfinished + self.successful + self.failed


def count_rows(connection: sqlite3.Connection, place: KeyRange) -> RowCounts:
    """Count the rows of a run; only the failed ones are read, the others come from an index."""
    counts = dict.fromkeys((UNFINISHED, SUCCESSFUL, FAILED), 0)
    reasons: dict[str, int] = {}
    groups: dict[str, int] = {}
    for shard in range(place.shards.count):
        low, high = place.of_shard(shard)
        for state in counts:
            (count,) = connection.execute(_COUNT, (state, low, high)).fetchone()
            counts[state] += count
        for reason, group, count in connection.execute(_FAILURES, (low, high)):
            reasons[reason] = reasons.get(reason, 0) + count
            if group is not None:
                groups[group] = groups.get(group, 0) + count
    return RowCounts(counts[UNFINISHED], counts[SUCCESSFUL], counts[FAILED], reasons, groups)


def count_bodies(connection: sqlite3.Connection, place: KeyRange) -> ResultShape:
    """Count the bodies of a run anew; reads every row that has one."""
    counter = ShapeCounter.of(ResultShape())
    for shard in range(place.shards.count):
        for size, content_type, count, _ in connection.execute(_BODIES, place.of_shard(shard)):
            counter.add(size, content_type, count)
    return counter.shape()


def write_counts(connection: sqlite3.Connection, place: KeyRange, counts: RowCounts) -> None:
    """Set the counters of a run, its failure groups and, where it lacks or exceeds the successful
    tasks, the shape of its results."""
    (shape,) = connection.execute(
        "SELECT shape FROM runs WHERE run_no = ?", (place.run_no,)
    ).fetchone()
    if sum(shape_from(shape).sizes) != counts.successful:
        connection.execute(
            "UPDATE runs SET shape = ? WHERE run_no = ?",
            (to_json(count_bodies(connection, place)), place.run_no),
        )
    recount_groups(connection, place, counts.groups)
    connection.execute(
        "UPDATE runs SET total = ?, successful = ?, failed = ?, failure_reasons = ? "
        "WHERE run_no = ?",
        (
            counts.total,
            counts.successful,
            counts.failed,
            to_json(counts.failure_reasons),
            place.run_no,
        ),
    )


# `dispatch_changed_at` is `updated_at` as it was at the last change of status or pause, and never
# below the clock of that writer. A reader in the same process takes its mark from the same clock
# before it looks, so its margin only has to cover the time that a write may wait. After the clock
# was set back, the reader's last mark lies in the future. The first look then finds a run that was
# at work within the margin, because that run keeps its higher time; the second look, whose mark is
# of the new clock, finds any other. In return, every look finds a run whose time lies in the
# future, until the clock has caught up.
RUN_CHANGED = """updated_at = max(updated_at, :now), version = version + 1,
    dispatch_changed_at = max(updated_at, :now)"""
"""The assignments that go with every change of a status or a pause; `:now` is the writer's
clock."""


def find_view(connection: sqlite3.Connection, caller: str, job_id: str) -> JobView | None:
    """Find a caller's job with its latest run."""
    row = connection.execute(
        f"{SELECT_VIEW} WHERE jobs.job_id = ? AND jobs.caller = ?", (job_id, caller)
    ).fetchone()
    return None if row is None else view_from(row)


def need_view(connection: sqlite3.Connection, caller: str, job_id: str) -> JobView:
    """Find a caller's job with its latest run. Raises ConveyorError(not_found)."""
    view = find_view(connection, caller, job_id)
    if view is None:
        raise not_found("job")
    return view


def need_latest_run(connection: sqlite3.Connection, caller: str, job_id: str) -> Run:
    """Find a job's latest run that is not deleted. Raises ConveyorError: not_found,
    no_prior_run."""
    run = need_view(connection, caller, job_id).latest_run
    if run is None or run.status is RunStatus.DELETED:
        raise ConveyorError(ErrorCode.NO_PRIOR_RUN, "the job has no run that is not deleted")
    return run


def find_job(connection: sqlite3.Connection, job_id: str) -> Job | None:
    """Find a job by its id alone."""
    row = connection.execute(f"{SELECT_JOB} WHERE job_id = ?", (job_id,)).fetchone()
    return None if row is None else job_from(row)


def find_run(connection: sqlite3.Connection, run_id: str) -> Run | None:
    """Find a run by its id alone."""
    row = connection.execute(f"{SELECT_RUN} WHERE run_id = ?", (run_id,)).fetchone()
    return None if row is None else run_from(row)


def find_place(connection: sqlite3.Connection, run_id: str) -> KeyRange | None:
    """Find the place of a run's rows; None where there is no such run."""
    row = connection.execute(
        "SELECT run_no, shard_count, shard_scheme FROM runs WHERE run_id = ?", (run_id,)
    ).fetchone()
    return None if row is None else KeyRange(row[0], Shards(row[1], ShardScheme(row[2])))


def move_job(connection: sqlite3.Connection, job: Job, status: JobStatus, *, now: int) -> bool:
    """Set a job's status; False, and nothing written, where the transition table forbids it."""
    if status not in JOB_TRANSITIONS[job.status]:
        return False
    connection.execute(
        "UPDATE jobs SET status = ?, updated_at = max(updated_at, ?), version = version + 1 "
        "WHERE job_id = ?",
        (status, now, job.job_id),
    )
    return True


def move_run(connection: sqlite3.Connection, run: Run, status: RunStatus, *, now: int) -> bool:
    """Set a run's status; False, and nothing written, where the transition table forbids it."""
    if status not in RUN_TRANSITIONS[run.status]:
        return False
    connection.execute(
        f"UPDATE runs SET status = :status, {RUN_CHANGED} WHERE run_id = :run_id",
        {"status": status, "now": now, "run_id": run.run_id},
    )
    return True


def end_of_tasks(connection: sqlite3.Connection, view: JobView, *, now: int) -> None:
    """Close an open job to further tasks, and complete its run where all tasks have ended."""
    if not move_job(connection, view.job, JobStatus.CLOSED, now=now):
        return
    run = view.latest_run
    if run is None:
        return
    connection.execute("UPDATE runs SET last_batch_received = 1 WHERE run_id = ?", (run.run_id,))
    status = live_run_status(run.stats, job_closed=True, ingesting=run.ingesting)
    move_run(connection, run, status, now=now)
