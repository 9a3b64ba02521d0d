"""Database files as earlier versions wrote them, by the schema's steps and plain statements."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from conveyor.dev.sqlite.rows import INDEX_BITS, to_json
from conveyor.dev.sqlite.schema import APPLICATION_ID, STEPS
from conveyor.domain import ids
from conveyor.domain.model import Callback, Problem, StoredBody, TaskFailure
from conveyor.testing.clock import FakeClock
from tests.conformance.world import CALLER, spec

BEFORE_WEBHOOKS = 5
"""The version of the schema whose notices are for callbacks alone."""
BEFORE_GROUPS = 7
"""The version of the schema whose failed rows are in no group."""
BEFORE_GROUPS_IN_TASKS = 10
"""The version of the schema that keeps the group of a failed task with its history."""
_JOB = """
    INSERT INTO jobs (job_id, caller, status, created_at, updated_at, params, format, max_inflight,
        priority, max_attempts, result_ttl_days, task_shard_count, shard_scheme, sealed_key,
        latest_run_id, run_count, version, callback)
    VALUES (?, ?, 'closed', ?3, ?3, '{}', 'html', 100, 5, 3, 14, 1, 'stripe', ?4, ?5, 1, 1, ?6)
"""
_RUN = """
    INSERT INTO runs (run_id, job_id, run_sequence, status, created_at, updated_at, trigger, paused,
        last_batch_received, next_index, total, successful, failed, failure_reasons, credits, cost,
        version, dispatch_changed_at)
    VALUES (?, ?, 1, 'running', ?3, ?3, 'manual', 0, 1, ?4, ?4, 0, 0, '{}', 0, 0.0, 1, ?3)
"""
_TASK = """
    INSERT INTO tasks (task_key, state, task_id, created_at, updated_at, spec)
    VALUES (?1, 0, ?2, ?4, ?4, ?3)
"""
_NOTICE = "INSERT INTO notices (run_id, job_id, callback, due_at) VALUES (?, ?, ?, ?)"


class EarlierFile:
    """A file at an earlier version of the schema."""

    def __init__(self, connection: sqlite3.Connection, clock: FakeClock) -> None:
        self.connection = connection
        self._clock = clock

    def submit(self, count: int, *, token: str | None = None, sealed: bytes = b"") -> str:
        """Write a job with a run of `count` tasks, and a notice for a task token; return the id of
        the run."""
        now = self._clock.now()
        job_id, run_id = self._clock.new_id(), self._clock.new_id()
        callback = None if token is None else to_json(Callback(token))
        execute = self.connection.execute
        execute(_JOB, (job_id, CALLER, now, sealed, run_id, callback))
        run_no = execute(_RUN, (run_id, job_id, now, count)).lastrowid
        assert run_no is not None
        for index in range(count):
            key = run_no << INDEX_BITS | index
            execute(_TASK, (key, ids.task_id(run_id, index), to_json(spec(index)), now))
        if callback is not None:
            execute(_NOTICE, (run_id, job_id, callback, now))
        return run_id

    def fail(self, run_id: str, index: int, problem: Problem, failure: TaskFailure) -> None:
        """End a task as failed, as a version without groups did."""
        (run_no,) = self.connection.execute(
            "SELECT run_no FROM runs WHERE run_id = ?", (run_id,)
        ).fetchone()
        key = run_no << INDEX_BITS | index
        self.change("UPDATE tasks SET state = 2, attempts = 1 WHERE task_key = ?", key)
        self.change(
            "INSERT INTO histories (task_key, events, error, failure) VALUES (?, '', ?, ?)",
            key,
            to_json(problem),
            failure,
        )
        self.change(
            "UPDATE runs SET failed = failed + 1, failure_reasons = json_set(failure_reasons, "
            "'$.' || ?2, ifnull(failure_reasons ->> ?2, 0) + 1) WHERE run_id = ?1",
            run_id,
            failure,
        )

    def succeed(self, run_id: str, index: int, body: StoredBody) -> None:
        """End a task as successful, as a version without shapes did."""
        (run_no,) = self.connection.execute(
            "SELECT run_no FROM runs WHERE run_id = ?", (run_id,)
        ).fetchone()
        key = run_no << INDEX_BITS | index
        self.change("UPDATE tasks SET state = 1, attempts = 1 WHERE task_key = ?", key)
        self.change(
            "INSERT INTO histories (task_key, events, result) VALUES (?, '', ?)",
            key,
            to_json(body),
        )
        self.change("UPDATE runs SET successful = successful + 1 WHERE run_id = ?", run_id)

    def change(self, statement: str, *values: object) -> None:
        """Change a row, as the earlier version would have."""
        assert self.connection.execute(statement, values).rowcount == 1


def write_earlier_file(
    path: Path, clock: FakeClock, *, version: int, fill: Callable[[EarlierFile], None]
) -> None:
    """Make a file by the first `version` steps of the schema, and fill it."""
    with closing(sqlite3.connect(path)) as connection:
        for step in STEPS[:version]:
            for statement in step:
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {version}")
        fill(EarlierFile(connection, clock))
        connection.commit()
