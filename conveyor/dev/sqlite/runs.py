"""The runs port: read, stop, pause, fail, rerun and delete runs, and find those with work."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from conveyor.dev.sqlite.database import Database
from conveyor.dev.sqlite.expiring import remove_exports_of_run
from conveyor.dev.sqlite.failure_groups import remove_groups
from conveyor.dev.sqlite.rerun import make_rerun
from conveyor.dev.sqlite.rows import (
    JOB_COLUMNS,
    JOB_WIDTH,
    RUN_COLUMNS,
    SELECT_RUN,
    columns_of,
    hosts_from,
    job_from,
    politeness_from,
    run_from,
    to_json,
)
from conveyor.dev.sqlite.states import (
    RUN_CHANGED,
    find_run,
    move_run,
    need_latest_run,
    need_view,
)
from conveyor.domain.errors import ConveyorError, ErrorCode, not_found
from conveyor.domain.model import DispatchableRun, Run, RunFailure, RunStatus
from conveyor.domain.states import LIVE_RUN_STATES
from conveyor.ports.binding import Runs
from conveyor.ports.queues import MOST_HOST_QUEUES
from conveyor.ports.records import (
    ChangedRun,
    DispatchChange,
    IdempotencyScope,
    Rerun,
    RerunRequest,
    RunPosition,
    StoredResponse,
)

_OF_CALLER = f"{SELECT_RUN} JOIN jobs USING (job_id) WHERE jobs.caller = ? AND jobs.job_id = ?"
_DISPATCH_COLUMNS = (
    "runs.run_id, runs.job_id, jobs.priority, jobs.max_inflight, runs.created_at, "
    "runs.traceparent, jobs.caller, jobs.politeness, runs.hosts"
)
_MAY_HAVE_WORK = "runs.status = 'running' AND NOT runs.paused"
_DISPATCHABLE = (
    f"SELECT {_DISPATCH_COLUMNS} FROM runs JOIN jobs USING (job_id) WHERE {_MAY_HAVE_WORK}"
)
CHANGES = f"""
    SELECT {_MAY_HAVE_WORK}, {_DISPATCH_COLUMNS}
    FROM runs INDEXED BY runs_by_dispatch_change CROSS JOIN jobs USING (job_id)
    WHERE runs.dispatch_changed_at >= ? ORDER BY runs.dispatch_changed_at
"""


_KINDS = {
    None: ("", "runs.status <> 'deleted'"),
    True: ("live_", "runs.status IN ('running', 'pending')"),
    False: ("ended_", "runs.status NOT IN ('running', 'pending', 'deleted')"),
}
"""The first part of the name, and the condition, of each index of runs by their change."""


@lru_cache
def changed_sql(*, of_caller: bool, live: bool | None, below: bool) -> str:
    """Write the statement of a page of runs by their last change, out of the index of its kind:
    it reads no run that is not on the page."""
    kind, condition = _KINDS[live]
    index = f"{kind}runs{'_of_caller' if of_caller else ''}_by_change"
    conditions = [
        condition,
        *(["runs.caller = :caller"] if of_caller else []),
        *(["(runs.dispatch_changed_at, runs.run_id) < (:changed_at, :run_id)"] if below else []),
    ]
    columns = f"{columns_of('jobs', JOB_COLUMNS)}, {columns_of('runs', RUN_COLUMNS)}"
    return f"""
        SELECT {columns}, runs.dispatch_changed_at
        FROM runs INDEXED BY {index} CROSS JOIN jobs USING (job_id)
        WHERE {" AND ".join(conditions)}
        ORDER BY runs.dispatch_changed_at DESC, runs.run_id DESC LIMIT :limit
    """


class SqliteRuns(Runs):
    """The runs port. A caller has `daily_tasks` accepted a day; 0 means no limit."""

    def __init__(self, database: Database, *, daily_tasks: int = 0) -> None:
        self._database = database
        self._daily_tasks = daily_tasks

    async def get_run(self, caller: str, job_id: str, run_id: str | None) -> Run | None:
        sql = f"{_OF_CALLER} AND runs.run_id = ?"
        values: tuple[str | None, ...] = (caller, job_id, run_id)
        if run_id is None:
            sql = (
                f"{_OF_CALLER} AND runs.status <> 'deleted' ORDER BY runs.run_sequence DESC LIMIT 1"
            )
            values = values[:2]

        def read(reader: sqlite3.Connection) -> Run | None:
            row = reader.execute(sql, values).fetchone()
            return None if row is None else run_from(row)

        return await self._database.read_record(read)

    async def list_runs(
        self, caller: str, job_id: str, *, before: int | None, limit: int
    ) -> list[Run]:
        below = "" if before is None else "AND runs.run_sequence < ?"
        sql = (
            f"{_OF_CALLER} AND runs.status <> 'deleted' {below} "
            "ORDER BY runs.run_sequence DESC LIMIT ?"
        )
        values = (caller, job_id, limit) if before is None else (caller, job_id, before, limit)
        return await self._database.read_records(
            lambda reader: [run_from(row) for row in reader.execute(sql, values)]
        )

    async def stop_run(self, caller: str, job_id: str, *, now: int) -> Run:
        def stop(connection: sqlite3.Connection) -> Run:
            run = need_latest_run(connection, caller, job_id)
            if run.status is RunStatus.STOPPED:
                return run
            if not move_run(connection, run, RunStatus.STOPPED, now=now):
                raise ConveyorError(
                    ErrorCode.RUN_NOT_STOPPABLE, f"the latest run is {run.status} already"
                )
            return need_latest_run(connection, caller, job_id)

        return await self._database.write(stop)

    async def pause_run(self, caller: str, job_id: str, *, paused: bool, now: int) -> Run:
        def pause(connection: sqlite3.Connection) -> Run:
            run = need_latest_run(connection, caller, job_id)
            if run.status not in LIVE_RUN_STATES:
                raise ConveyorError(ErrorCode.CONFLICT, f"the latest run is {run.status} already")
            if run.paused is paused:
                return run
            connection.execute(
                f"UPDATE runs SET paused = :paused, {RUN_CHANGED} WHERE run_id = :run_id",
                {"paused": paused, "now": now, "run_id": run.run_id},
            )
            return need_latest_run(connection, caller, job_id)

        return await self._database.write(pause)

    async def fail_run(self, run_id: str, *, reason: RunFailure, detail: str, now: int) -> bool:
        def fail(connection: sqlite3.Connection) -> bool:
            run = find_run(connection, run_id)
            if run is None or not move_run(connection, run, RunStatus.FAILED, now=now):
                return False
            connection.execute(
                "UPDATE runs SET failure_reason = ?, failure_detail = ? WHERE run_id = ?",
                (reason, detail, run_id),
            )
            return True

        return await self._database.write(fail)

    async def rerun(
        self,
        request: RerunRequest,
        *,
        answer: Callable[[Rerun], StoredResponse],
        once: IdempotencyScope | None,
    ) -> StoredResponse:
        return await self._database.write(
            lambda connection: make_rerun(
                connection, request, answer, once, daily_tasks=self._daily_tasks
            )
        )

    async def delete_run(self, caller: str, job_id: str, run_id: str, *, now: int) -> None:
        def delete(connection: sqlite3.Connection) -> None:
            need_view(connection, caller, job_id)
            run = find_run(connection, run_id)
            if run is None or run.job_id != job_id:
                raise not_found("run")
            if run.status is RunStatus.DELETED:
                return
            _refuse_pinned(connection, run_id)
            move_run(connection, run, RunStatus.DELETED, now=now)
            connection.execute(
                "UPDATE jobs SET updated_at = max(updated_at, ?2), version = version + 1, "
                "latest_run_id = (SELECT run_id FROM runs WHERE job_id = ?1 "
                "AND status <> 'deleted' ORDER BY run_sequence DESC LIMIT 1) WHERE job_id = ?1",
                (job_id, now),
            )

        await self._database.write(delete)

    async def purge_run(self, run_id: str) -> None:
        def purge(connection: sqlite3.Connection) -> None:
            run = find_run(connection, run_id)
            if run is not None and run.status is RunStatus.DELETED:
                remove_groups(connection, run_id)
                connection.execute("DELETE FROM runs WHERE run_id = ?", (run_id,))
                connection.execute("DELETE FROM run_sources WHERE run_id = ?", (run_id,))
                remove_exports_of_run(connection, run_id)

        await self._database.write(purge)

    async def changed_runs(
        self,
        caller: str | None,
        *,
        before: RunPosition | None,
        limit: int,
        live: bool | None = None,
    ) -> list[ChangedRun]:
        sql = changed_sql(of_caller=caller is not None, live=live, below=before is not None)
        values = {
            "caller": caller,
            "changed_at": None if before is None else before.changed_at,
            "run_id": None if before is None else before.run_id,
            "limit": limit,
        }
        rows = await self._database.read_records(
            lambda reader: reader.execute(sql, values).fetchall()
        )
        return [
            ChangedRun(job_from(row), run, RunPosition(row[-1], run.run_id))
            for row in rows
            for run in (run_from(row[JOB_WIDTH:]),)
        ]

    async def dispatchable_runs(self) -> list[DispatchableRun]:
        rows = await self._database.read(lambda reader: reader.execute(_DISPATCHABLE).fetchall())
        return [_dispatchable(row) for row in rows]

    async def dispatch_changes(self, *, since: int) -> list[DispatchChange]:
        rows = await self._database.read(
            lambda reader: reader.execute(CHANGES, (since,)).fetchall()
        )
        return [
            DispatchChange(run[0], _dispatchable(run) if may_have_work else None)
            for may_have_work, *run in rows
        ]

    async def dispatchable_run(self, run_id: str) -> DispatchableRun | None:
        sql = f"{_DISPATCHABLE} AND runs.run_id = ?"
        row = await self._database.read(lambda reader: reader.execute(sql, (run_id,)).fetchone())
        return None if row is None else _dispatchable(row)

    async def add_hosts(self, run_id: str, hosts: Sequence[str], *, now: int) -> tuple[str, ...]:
        def add(connection: sqlite3.Connection) -> tuple[str, ...]:
            found = connection.execute(
                "SELECT hosts, status FROM runs WHERE run_id = ?", (run_id,)
            ).fetchone()
            if found is None:
                return ()
            known, status = hosts_from(found[0]), RunStatus(found[1])
            after = tuple(dict.fromkeys([*known, *hosts]))[:MOST_HOST_QUEUES]
            if after == known or status not in LIVE_RUN_STATES:
                return known
            connection.execute(
                f"UPDATE runs SET hosts = :hosts, {RUN_CHANGED} WHERE run_id = :run_id",
                {"hosts": to_json(after), "now": now, "run_id": run_id},
            )
            return after

        return await self._database.write(add)

    async def deleted_runs(self, *, before: int | None = None) -> list[tuple[str, str]]:
        sql = (
            "SELECT job_id, run_id FROM runs INDEXED BY runs_by_status WHERE status = 'deleted' "
            "AND (?1 IS NULL OR updated_at < ?1) ORDER BY run_no"
        )
        return await self._database.read(lambda reader: reader.execute(sql, (before,)).fetchall())

    async def run_exists(self, run_id: str) -> bool:
        return await self._database.read(lambda reader: find_run(reader, run_id)) is not None

    async def touch_tombstone(self, run_id: str, *, now: int) -> None:
        await self._database.write(
            lambda connection: connection.execute(
                "UPDATE runs SET updated_at = max(updated_at, ?2) "
                "WHERE run_id = ?1 AND status = 'deleted'",
                (run_id, now),
            )
        )


def _refuse_pinned(connection: sqlite3.Connection, run_id: str) -> None:
    pinned = connection.execute(
        "SELECT 1 FROM run_sources JOIN runs USING (run_id) "
        "WHERE run_sources.source_run_id = ? AND runs.status <> 'deleted' LIMIT 1",
        (run_id,),
    ).fetchone()
    if pinned is not None:
        raise ConveyorError(
            ErrorCode.RUN_HAS_DESCENDANTS,
            "a newer run still uses this run's results; delete that run first",
        )


def _dispatchable(row: Sequence[Any]) -> DispatchableRun:
    run_id, job_id, priority, max_inflight, created_at, traceparent, caller, politeness, hosts = row
    return DispatchableRun(
        run_id=run_id,
        job_id=job_id,
        priority=priority,
        max_inflight=max_inflight,
        created_at=created_at,
        traceparent=traceparent,
        caller=caller,
        politeness=politeness_from(politeness),
        hosts=hosts_from(hosts),
    )
