"""The jobs port: submit, append to, close, delete and read jobs."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence

from msgspec import structs

from conveyor.dev.sqlite.database import Database
from conveyor.dev.sqlite.idempotency import store_answer, stored_answer
from conveyor.dev.sqlite.outbox import insert_entries
from conveyor.dev.sqlite.rows import (
    SELECT_VIEW,
    insert_job,
    insert_run,
    insert_tasks,
    to_json,
    view_from,
)
from conveyor.dev.sqlite.states import (
    RUN_CHANGED,
    accept_tasks,
    end_of_tasks,
    find_job,
    find_place,
    find_view,
    move_job,
    move_run,
    need_view,
)
from conveyor.domain import ids
from conveyor.domain.errors import ConveyorError, ErrorCode, not_found
from conveyor.domain.model import Job, JobStatus, JobView, NewTask, Run, TaskSpec
from conveyor.domain.shards import shards_of
from conveyor.domain.states import LIVE_RUN_STATES, live_run_status
from conveyor.domain.webhooks import Webhook
from conveyor.ports.binding import Jobs
from conveyor.ports.records import Appended, AppendRequest, IdempotencyScope, StoredResponse


class SqliteJobs(Jobs):
    """The jobs port. A caller has `daily_tasks` accepted a day; 0 means no limit."""

    def __init__(self, database: Database, *, daily_tasks: int = 0) -> None:
        self._database = database
        self._daily_tasks = daily_tasks

    async def create_job(
        self,
        job: Job,
        run: Run | None,
        tasks: Sequence[NewTask],
        *,
        answer: StoredResponse,
        once: IdempotencyScope | None,
    ) -> None:
        def create(connection: sqlite3.Connection) -> None:
            if stored_answer(connection, once) is not None:
                raise ConveyorError(ErrorCode.CONFLICT, "the request has been answered already")
            try:
                insert_job(connection, job)
                place = None if run is None else insert_run(connection, run, shards_of(job))
            except sqlite3.IntegrityError:
                raise ConveyorError(ErrorCode.CONFLICT, "the job exists already") from None
            if run is not None and place is not None:
                self._accept(connection, job.caller, run.stats.total, run.created_at)
                insert_tasks(connection, place, tasks, now=run.created_at)
                insert_entries(connection, job, run)
            store_answer(connection, once, answer)

        await self._database.write(create)

    async def get_job(self, caller: str, job_id: str) -> JobView | None:
        return await self._database.read_record(lambda reader: find_view(reader, caller, job_id))

    async def find_job(self, job_id: str) -> Job | None:
        return await self._database.read_record(lambda reader: find_job(reader, job_id))

    async def list_jobs(
        self,
        caller: str,
        *,
        status: JobStatus | None,
        before: str | None,
        limit: int,
        scheduled: bool | None = None,
    ) -> list[JobView]:
        wanted = "jobs.status <> 'deleted'" if status is None else "jobs.status = :status"
        below = "" if before is None else "AND jobs.job_id < :before"
        kind = "" if scheduled is None else "AND (jobs.scheduling IS NOT NULL) = :scheduled"
        sql = (
            f"{SELECT_VIEW} WHERE jobs.caller = :caller AND {wanted} {below} {kind} "
            "ORDER BY jobs.job_id DESC LIMIT :limit"
        )
        values = {
            "caller": caller,
            "status": status,
            "before": before,
            "limit": limit,
            "scheduled": scheduled,
        }
        return await self._database.read_records(
            lambda reader: [view_from(row) for row in reader.execute(sql, values)]
        )

    async def append_tasks(
        self,
        request: AppendRequest,
        *,
        answer: Callable[[Appended], StoredResponse],
        once: IdempotencyScope | None,
    ) -> StoredResponse:
        caller, job_id, now = request.caller, request.job_id, request.now

        def append(connection: sqlite3.Connection) -> StoredResponse:
            earlier = stored_answer(connection, once)
            if earlier is not None:
                return earlier
            view = need_view(connection, caller, job_id)
            run = _open_run(view)
            if run.stats.total + len(request.specs) > request.max_tasks:
                raise ConveyorError(
                    ErrorCode.QUOTA_EXCEEDED,
                    f"the run would hold more than {request.max_tasks} tasks",
                )
            self._accept(connection, caller, len(request.specs), now)
            _add(connection, run, request.specs, now=now)
            if request.last_batch:
                end_of_tasks(connection, need_view(connection, caller, job_id), now=now)
            after = need_view(connection, caller, job_id)
            made = answer(Appended(after, len(request.specs), run.next_index))
            store_answer(connection, once, made)
            return made

        return await self._database.write(append)

    async def close_job(self, caller: str, job_id: str, *, now: int) -> JobView:
        def close(connection: sqlite3.Connection) -> JobView:
            view = need_view(connection, caller, job_id)
            if view.job.status is JobStatus.DELETED:
                raise not_found("job")
            end_of_tasks(connection, view, now=now)
            return need_view(connection, caller, job_id)

        return await self._database.write(close)

    async def set_webhook(
        self, caller: str, job_id: str, webhook: Webhook | None, *, now: int
    ) -> Job:
        def change(connection: sqlite3.Connection) -> Job:
            view = need_view(connection, caller, job_id)
            if view.job.status is JobStatus.DELETED:
                raise not_found("job")
            if webhook != view.job.webhook:
                connection.execute(
                    "UPDATE jobs SET webhook = ?, webhook_number = ?, "
                    "updated_at = max(updated_at, ?), version = version + 1 WHERE job_id = ?",
                    (
                        None if webhook is None else to_json(webhook),
                        view.job.number_of(webhook),
                        now,
                        job_id,
                    ),
                )
            job = need_view(connection, caller, job_id).job
            run = view.latest_run
            if run is not None and run.status in LIVE_RUN_STATES:
                insert_entries(
                    connection,
                    structs.replace(job, callback=None),
                    structs.replace(run, created_at=now),
                )
            return job

        return await self._database.write(change)

    async def delete_job(self, caller: str, job_id: str, *, now: int) -> list[str]:
        def delete(connection: sqlite3.Connection) -> list[str]:
            job = need_view(connection, caller, job_id).job
            move_job(connection, job, JobStatus.DELETED, now=now)
            connection.execute("UPDATE jobs SET fires_at = NULL WHERE job_id = ?", (job_id,))
            connection.execute(
                f"UPDATE runs SET status = 'deleted', {RUN_CHANGED} "
                "WHERE job_id = :job_id AND status <> 'deleted'",
                {"now": now, "job_id": job_id},
            )
            rows = connection.execute(
                "SELECT run_id FROM runs WHERE job_id = ? ORDER BY run_sequence", (job_id,)
            )
            return [run_id for (run_id,) in rows]

        return await self._database.write(delete)

    async def purge_job(self, job_id: str) -> None:
        await self._database.write(lambda connection: purge_jobs(connection, job_id))

    def _accept(self, connection: sqlite3.Connection, caller: str, tasks: int, now: int) -> None:
        accept_tasks(connection, caller, tasks, limit=self._daily_tasks, now=now)


_PURGED = """
    SELECT job_id, caller FROM jobs
    WHERE status = 'deleted' AND (?1 IS NULL OR job_id = ?1)
        AND NOT EXISTS (SELECT 1 FROM runs WHERE runs.job_id = jobs.job_id)
"""


def purge_jobs(connection: sqlite3.Connection, job_id: str | None = None) -> None:
    """Remove the tombstone of a job without a run, or of all such jobs, with what goes with it."""
    for purged, caller in connection.execute(_PURGED, (job_id,)).fetchall():
        connection.execute(
            "DELETE FROM deliveries WHERE job_id = ? AND +caller = ?", (purged, caller)
        )
        connection.execute("DELETE FROM fires WHERE job_id = ?", (purged,))
        connection.execute("DELETE FROM jobs WHERE job_id = ?", (purged,))


def _open_run(view: JobView) -> Run:
    """Find the run that takes more tasks. Raises ConveyorError where no run does."""
    run = view.latest_run
    if view.job.status is not JobStatus.OPEN or run is None or run.status not in LIVE_RUN_STATES:
        raise ConveyorError(ErrorCode.JOB_NOT_OPEN, "the job takes no more tasks")
    if run.ingesting:
        raise ConveyorError(
            ErrorCode.RUN_NOT_TERMINAL, "the tasks of the submit are still being written"
        )
    if run.last_batch_received:
        raise ConveyorError(ErrorCode.LAST_BATCH_RECEIVED, "the last batch has been received")
    return run


def _add(connection: sqlite3.Connection, run: Run, specs: Sequence[TaskSpec], *, now: int) -> None:
    """Write rows of new tasks, and add their number to the run's counters."""
    if not specs:
        return
    place = find_place(connection, run.run_id)
    assert place is not None
    first = run.next_index
    tasks = (
        NewTask(index, ids.task_id(run.run_id, index), spec)
        for index, spec in enumerate(specs, start=first)
    )
    insert_tasks(connection, place, tasks, now=now)
    connection.execute(
        "UPDATE runs SET total = total + ?1, next_index = next_index + ?1, "
        "updated_at = max(updated_at, ?2) WHERE run_no = ?3",
        (len(specs), now, place.run_no),
    )
    stats = structs.replace(run.stats, total=run.stats.total + len(specs))
    move_run(connection, run, live_run_status(stats, job_closed=False), now=now)
