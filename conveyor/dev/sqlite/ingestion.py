"""The ingestion port: rows of large runs, one transaction for each stretch.

A stretch of staged rows goes into the database as JSON text: no row becomes a Python object, and
the interpreter's lock is free while SQLite writes.
"""

from __future__ import annotations

import sqlite3

from conveyor.dev.sqlite.database import Database
from conveyor.dev.sqlite.rerun import RunCopy
from conveyor.dev.sqlite.rows import INDEX_BITS, KeyRange, politeness_from
from conveyor.dev.sqlite.states import (
    count_rows,
    find_job,
    find_place,
    find_run,
    move_run,
    write_counts,
)
from conveyor.dev.sqlite.tasks import UNFINISHED, merged_references
from conveyor.domain.errors import CallInFlight, not_found
from conveyor.domain.hosts import Politeness
from conveyor.domain.model import JobStatus, Run, RunFailure, RunStatus, TaskStatus
from conveyor.domain.shards import ShardScheme
from conveyor.domain.states import LIVE_RUN_STATES, live_run_status
from conveyor.ports.binding import Ingestion
from conveyor.ports.ingestion import Ingesting, StagedRows
from conveyor.ports.maintenance import StuckIngest

_SHARD = {
    ShardScheme.STRIPE: "(:first + key) % :count",
    ShardScheme.FNV32A: "fnv32a(value ->> 0) % :count",
}
_WRITE = f"""
    INSERT OR IGNORE INTO tasks (task_key, state, task_id, created_at, updated_at, spec)
    SELECT :run_no + {{shard}} << {INDEX_BITS} | (:first + key), 0, value ->> 0, :now, :now,
        value -> 1
    FROM json_each(:rows)
"""
_MOVE = """
    UPDATE runs SET ingest_next = max(ingest_next, ?), updated_at = max(updated_at, ?)
    WHERE run_no = ?
"""
_END = """
    UPDATE runs SET ingesting = 0, inherited = inherited_copied, updated_at = max(updated_at, ?)
    WHERE run_no = ?
"""


class SqliteIngestion(Ingestion):
    """The ingestion port."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def ingesting(self, run_id: str) -> Ingesting | None:
        def read(reader: sqlite3.Connection) -> Ingesting | None:
            run = find_run(reader, run_id)
            if run is None or run.ingest is None or not _goes_on(run):
                return None
            return Ingesting(
                job_id=run.job_id,
                run_id=run_id,
                live=run.status in LIVE_RUN_STATES,
                ingest=run.ingest,
                rerun_of=run.rerun_of,
                politeness=_politeness(reader, run.job_id),
            )

        return await self._database.read(read)

    async def write_rows(self, run_id: str, rows: StagedRows, *, now: int) -> bool:
        def write(connection: sqlite3.Connection) -> bool:
            if _live_run(connection, run_id) is None:
                return False
            place = _place(connection, run_id)
            values = {
                "run_no": place.run_no,
                "count": place.shards.count,
                "first": rows.first_index,
                "now": now,
                "rows": rows.rows,
            }
            connection.execute(_WRITE.format(shard=_SHARD[place.shards.scheme]), values)
            connection.execute(_MOVE, (rows.first_index + rows.count, now, place.run_no))
            return True

        return await self._database.write(write)

    async def copy_rows(
        self, run_id: str, *, first_index: int, end_index: int, now: int
    ) -> list[tuple[int, str]] | None:
        def copy(connection: sqlite3.Connection) -> list[tuple[int, str]] | None:
            run = _live_run(connection, run_id)
            if run is None or run.rerun_of is None or run.ingest is None:
                return None
            place, source = _place(connection, run_id), find_place(connection, run.rerun_of)
            if source is None:
                raise not_found("run")
            made = RunCopy(source, run.rerun_of, place, run.ingest.statuses, run.ingest.groups)
            _copy(connection, run, made, max(first_index, run.ingest.next_index), end_index, now)
            connection.execute(_MOVE, (end_index, now, place.run_no))
            count = end_index - first_index
            found = merged_references(
                connection, place, UNFINISHED, after=first_index - 1, limit=count
            )
            return [reference for reference in found.rows if reference[0] < end_index]

        return await self._database.write(copy)

    async def finish_ingest(self, run_id: str, *, now: int) -> RunStatus | None:
        def finish(connection: sqlite3.Connection) -> RunStatus | None:
            run = find_run(connection, run_id)
            if run is None or run.status is RunStatus.DELETED:
                return None
            if run.ingesting:
                _finish(connection, run, now)
                run = find_run(connection, run_id)
            return None if run is None else run.status

        return await self._database.write(finish)

    async def fail_ingest(self, run_id: str, *, detail: str, now: int) -> bool:
        def fail(connection: sqlite3.Connection) -> bool:
            run = _live_run(connection, run_id)
            if run is None:
                return False
            place = _place(connection, run_id)
            move_run(connection, run, RunStatus.FAILED, now=now)
            connection.execute(
                "UPDATE runs SET failure_reason = ?, failure_detail = ? WHERE run_no = ?",
                (RunFailure.INGEST_FAILED, detail, place.run_no),
            )
            write_counts(connection, place, count_rows(connection, place))
            connection.execute(_END, (now, place.run_no))
            return True

        return await self._database.write(fail)

    async def stuck_ingests(self, *, before: int) -> list[StuckIngest]:
        sql = (
            "SELECT job_id, run_id, coalesce(ingest ->> 'template', 0) "
            "FROM runs INDEXED BY runs_by_ingesting "
            "WHERE ingesting AND status <> 'deleted' AND updated_at < ? ORDER BY run_no"
        )
        found = await self._database.read(lambda reader: reader.execute(sql, (before,)).fetchall())
        return [StuckIngest(job_id, run_id, bool(template)) for job_id, run_id, template in found]


def _goes_on(run: Run) -> bool:
    return run.ingesting and run.status is not RunStatus.DELETED


def _live_run(connection: sqlite3.Connection, run_id: str) -> Run | None:
    """Find a run; None where no row may be written to it any more."""
    run = find_run(connection, run_id)
    return run if run is not None and run.ingesting and run.status in LIVE_RUN_STATES else None


def _politeness(reader: sqlite3.Connection, job_id: str) -> Politeness | None:
    job = reader.execute("SELECT politeness FROM jobs WHERE job_id = ?", (job_id,)).fetchone()
    return None if job is None else politeness_from(job[0])


def _place(connection: sqlite3.Connection, run_id: str) -> KeyRange:
    place = find_place(connection, run_id)
    assert place is not None  # the run was just read
    return place


def _copy(
    connection: sqlite3.Connection, run: Run, copy: RunCopy, first: int, end: int, now: int
) -> None:
    """Copy the part of a stretch that lies after the checkpoint."""
    if first >= end:
        return
    held = copy.held(connection, first_index=first, end_index=end, now=now)
    if held is not None:
        raise CallInFlight(copy.source_id, held)
    copied = copy.run(connection, first_index=first, end_index=end, now=now)
    connection.execute(
        "UPDATE runs SET inherited_copied = inherited_copied + ? WHERE run_no = ?",
        (copied.inherited, copy.target.run_no),
    )
    if copy.statuses is None or copy.statuses & {TaskStatus.PENDING, TaskStatus.PROCESSING}:
        return
    # The counters of the plan miss the tasks that ended after it was made. Added to the total, they
    # keep it above the number of tasks that workers end while the run ingests.
    late = copy.ended_since(connection, first_index=first, end_index=end, since=run.created_at)
    connection.execute(
        "UPDATE runs SET total = total + ? WHERE run_no = ?", (late, copy.target.run_no)
    )


def _finish(connection: sqlite3.Connection, run: Run, now: int) -> None:
    """End an ingestion once and for all.

    The total of a live submit is set to its planned end. The counters of a rerun, and of a run that
    was cut short, are set to those of its rows.
    """
    place = _place(connection, run.run_id)
    assert run.ingest is not None
    live = run.status in LIVE_RUN_STATES
    if live and run.ingest.next_index < run.ingest.end:
        raise ValueError(f"run {run.run_id} has rows that are not written yet")
    if live and run.rerun_of is None:
        connection.execute(
            "UPDATE runs SET total = ? WHERE run_no = ?", (run.ingest.end, place.run_no)
        )
    else:
        # It was cut short, or rows of the source have changed since its counters were planned.
        write_counts(connection, place, count_rows(connection, place))
    connection.execute(_END, (now, place.run_no))
    if run.ingest.statuses is None:
        # Every row starts afresh, so the run needs no body of the source any more.
        connection.execute("DELETE FROM run_sources WHERE run_id = ?", (run.run_id,))
    after = find_run(connection, run.run_id)
    job = find_job(connection, run.job_id)
    if after is None or job is None or not live:
        return
    closed = job.status is not JobStatus.OPEN
    move_run(connection, after, live_run_status(after.stats, job_closed=closed), now=now)
