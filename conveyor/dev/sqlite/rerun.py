"""Reruns: a new run made from the rows of the latest one, in one transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from conveyor.dev.sqlite.answers import store_answer, stored_answer
from conveyor.dev.sqlite.rows import (
    FAILED,
    INDEX_BITS,
    INDEX_MASK,
    SUCCESSFUL,
    insert_run,
    key_range,
    to_json,
)
from conveyor.dev.sqlite.states import find_run, move_job, need_latest_run, need_view, run_number
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import JobStatus, Run, RunStatus, TaskStatus
from conveyor.domain.states import LIVE_RUN_STATES
from conveyor.ports.records import Answer, Once, Rerun

_CHUNK = 10_000
"""Indexes copied by one statement: bounds what SQLite holds aside while it copies."""

_MATCHES = {
    TaskStatus.PENDING: "(t.state = 0 AND c.task_key IS NULL)",
    TaskStatus.PROCESSING: "(t.state = 0 AND c.task_key IS NOT NULL)",
    TaskStatus.SUCCESSFUL: "t.state = 1",
    TaskStatus.FAILED: "t.state = 2",
}
_SOURCE = """
    FROM tasks t LEFT JOIN claims c ON c.task_key = t.task_key
    WHERE t.task_key > :low AND t.task_key <= :high
"""
_KEY = f"t.task_key + ((:new_no - :old_no) << {INDEX_BITS})"
_COPY_FRESH = f"""
    INSERT INTO tasks (task_key, state, task_id, created_at, updated_at, spec)
    SELECT {_KEY}, 0, t.task_id, :now, :now, t.spec {_SOURCE} AND ({{matching}})
"""
_COPY_INHERITED = f"""
    INSERT INTO tasks (task_key, state, task_id, created_at, updated_at, attempts, interruptions,
        source_run_id, spec)
    SELECT {_KEY}, t.state, t.task_id, :now, :now, t.attempts, t.interruptions,
        coalesce(t.source_run_id, :old_id), t.spec
    {_SOURCE} AND t.state > 0 AND NOT ({{matching}})
"""
_COPY_ENDINGS = f"""
    INSERT INTO histories (task_key, events, result, error, failure)
    SELECT {_KEY}, '', h.result, h.error, h.failure
    FROM histories h JOIN tasks t USING (task_key)
    LEFT JOIN claims c ON c.task_key = t.task_key
    WHERE t.task_key > :low AND t.task_key <= :high AND t.state > 0 AND NOT ({{matching}})
"""


@dataclass(frozen=True, slots=True)
class RerunRequest:
    """What the port's method was asked for; see there."""

    caller: str
    job_id: str
    run_id: str
    statuses: frozenset[TaskStatus] | None
    window_start: int
    now: int


class _Copied(NamedTuple):
    retried: int
    inherited: int


def make_rerun(
    connection: sqlite3.Connection,
    request: RerunRequest,
    answer: Callable[[Rerun], Answer],
    once: Once | None,
) -> Answer:
    """Make the run, unless it exists, and render its answer. Raises as the port says."""
    earlier = stored_answer(connection, once)
    if earlier is not None:
        return earlier
    view = need_view(connection, request.caller, request.job_id)
    made = find_run(connection, request.run_id)
    if made is None:
        source = need_latest_run(connection, request.caller, request.job_id)
        source_no = run_number(connection, source.run_id)
        assert source_no is not None
        _refuse(connection, request, source, source_no)
        move_job(connection, view.job, JobStatus.CLOSED, now=request.now)
        _make(connection, request, source, source_no, sequence=view.job.run_count + 1)
    elif made.job_id != request.job_id:
        raise ConveyorError(ErrorCode.CONFLICT, "the run exists already, of another job")
    rendered = answer(_describe(connection, request))
    store_answer(connection, once, rendered)
    return rendered


def _refuse(
    connection: sqlite3.Connection, request: RerunRequest, source: Run, source_no: int
) -> None:
    if source.status in LIVE_RUN_STATES:
        raise ConveyorError(ErrorCode.RUN_NOT_TERMINAL, f"the latest run is {source.status}")
    low, high = key_range(source_no)
    busy = connection.execute(
        "SELECT 1 FROM claims WHERE task_key > ? AND task_key <= ? AND claimed_until > ? LIMIT 1",
        (low, high, request.now),
    ).fetchone()
    if busy is not None:
        raise ConveyorError(ErrorCode.RUN_NOT_TERMINAL, "the latest run still has calls under way")
    if request.statuses is not None and source.created_at < request.window_start:
        raise ConveyorError(
            ErrorCode.PARTIAL_RERUN_WINDOW_EXPIRED, "the latest run is too old for a partial rerun"
        )


def _make(
    connection: sqlite3.Connection,
    request: RerunRequest,
    source: Run,
    source_no: int,
    *,
    sequence: int,
) -> None:
    run_no = insert_run(
        connection,
        Run(
            run_id=request.run_id,
            job_id=request.job_id,
            run_sequence=sequence,
            status=RunStatus.RUNNING,
            created_at=request.now,
            updated_at=request.now,
            last_batch_received=True,
            rerun_of=source.run_id,
        ),
    )
    copied = _copy(connection, request, source, source_no, run_no)
    if not copied.retried:
        raise ConveyorError(ErrorCode.NO_MATCHING_TASKS, "the latest run has no such task")
    _seed_counters(connection, run_no, copied)
    low, high = key_range(run_no)
    connection.execute(
        "INSERT INTO run_sources (run_id, source_run_id) SELECT DISTINCT ?, source_run_id "
        "FROM tasks WHERE task_key > ? AND task_key <= ? AND source_run_id IS NOT NULL",
        (request.run_id, low, high),
    )
    connection.execute(
        "UPDATE jobs SET latest_run_id = ?, run_count = ?, updated_at = max(updated_at, ?), "
        "version = version + 1 WHERE job_id = ?",
        (request.run_id, sequence, request.now, request.job_id),
    )


def _copy(
    connection: sqlite3.Connection,
    request: RerunRequest,
    source: Run,
    source_no: int,
    run_no: int,
) -> _Copied:
    statuses = request.statuses
    matching = "1" if statuses is None else " OR ".join(_MATCHES[one] for one in sorted(statuses))
    values = {"old_no": source_no, "new_no": run_no, "old_id": source.run_id, "now": request.now}
    retried = inherited = 0
    for start in range(0, source.next_index, _CHUNK):
        low, _ = key_range(source_no, start - 1)
        values |= {"low": low, "high": low + _CHUNK}
        for_this = {"matching": matching}
        retried += connection.execute(_COPY_FRESH.format(**for_this), values).rowcount
        if statuses is not None:
            inherited += connection.execute(_COPY_INHERITED.format(**for_this), values).rowcount
            connection.execute(_COPY_ENDINGS.format(**for_this), values)
    return _Copied(retried, inherited)


def _seed_counters(connection: sqlite3.Connection, run_no: int, copied: _Copied) -> None:
    """What the copied rows say, as the new run's counters."""
    low, high = key_range(run_no)
    (last_key,) = connection.execute(
        "SELECT max(task_key) FROM tasks WHERE task_key > ? AND task_key <= ?", (low, high)
    ).fetchone()
    ended = {SUCCESSFUL: 0, FAILED: 0}
    reasons: dict[str, int] = {}
    for state, failure, count in connection.execute(
        "SELECT t.state, h.failure, count(*) FROM tasks t LEFT JOIN histories h USING (task_key) "
        "WHERE t.task_key > ? AND t.task_key <= ? AND t.state > 0 GROUP BY 1, 2",
        (low, high),
    ):
        ended[state] += count
        if failure is not None:
            reasons[failure] = count
    connection.execute(
        "UPDATE runs SET next_index = ?, total = ?, successful = ?, failed = ?, "
        "failure_reasons = ?, inherited = ? WHERE run_no = ?",
        (
            (last_key & INDEX_MASK) + 1,
            copied.retried + copied.inherited,
            ended[SUCCESSFUL],
            ended[FAILED],
            to_json(reasons),
            copied.inherited,
            run_no,
        ),
    )


def _describe(connection: sqlite3.Connection, request: RerunRequest) -> Rerun:
    view = need_view(connection, request.caller, request.job_id)
    total, inherited, rerun_of = connection.execute(
        "SELECT total, inherited, rerun_of FROM runs WHERE run_id = ?", (request.run_id,)
    ).fetchone()
    return Rerun(view, rerun_of=rerun_of, retried=total - inherited, inherited=inherited)
