"""The schedules port: a scheduled job is a row of `jobs`, and its fires are rows of `fires`."""

from __future__ import annotations

import sqlite3

import msgspec

from conveyor.dev.sqlite.database import Database
from conveyor.dev.sqlite.idempotency import store_answer, stored_answer
from conveyor.dev.sqlite.outbox import insert_entries
from conveyor.dev.sqlite.rows import SELECT_JOB, insert_run, job_from, next_fire, to_json
from conveyor.dev.sqlite.states import accept_tasks
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import Job
from conveyor.domain.scheduling import FireRecord
from conveyor.domain.shards import shards_of
from conveyor.ports.schedules import ScheduleChange, Schedules

_CHANGE = """
    UPDATE jobs SET status = ?, updated_at = ?, sealed_key = ?, latest_run_id = ?, run_count = ?,
        scheduling = ?, fires_at = ?, version = ?
    WHERE job_id = ? AND version = ?
"""
_NOTE = """
    INSERT INTO fires (job_id, fire_id, noted_at, record) VALUES (?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET noted_at = excluded.noted_at, record = excluded.record
"""
_OLD = """
    DELETE FROM fires WHERE (job_id, fire_id) IN (
        SELECT job_id, fire_id FROM fires WHERE noted_at < ? LIMIT ?)
"""
_fires = msgspec.json.Decoder(FireRecord)


class SqliteSchedules(Schedules):
    """The schedules port. A caller has `daily_tasks` accepted a day; 0 means no limit."""

    def __init__(self, database: Database, *, daily_tasks: int = 0) -> None:
        self._database = database
        self._daily_tasks = daily_tasks

    async def change_schedule(self, change: ScheduleChange) -> bool:
        return await self._database.write(
            lambda connection: _make(connection, change, daily_tasks=self._daily_tasks)
        )

    async def due_schedules(self, *, now: int, limit: int) -> list[Job]:
        return await self._jobs("fires_at <= ? ORDER BY fires_at LIMIT ?", (now, limit))

    async def list_schedules(self, *, after: str, limit: int) -> list[Job]:
        return await self._jobs(
            "scheduling IS NOT NULL AND status <> 'deleted' AND job_id > ? ORDER BY job_id LIMIT ?",
            (after, limit),
        )

    async def list_fires(self, job_id: str, *, before: str | None, limit: int) -> list[FireRecord]:
        below = "" if before is None else "AND fire_id < :before"
        sql = (
            f"SELECT record FROM fires WHERE job_id = :job_id {below} "
            "ORDER BY fire_id DESC LIMIT :limit"
        )
        values = {"job_id": job_id, "before": before, "limit": limit}
        rows = await self._database.read_records(
            lambda reader: reader.execute(sql, values).fetchall()
        )
        return [_fires.decode(record) for (record,) in rows]

    async def drop_old_fires(self, *, before: int, limit: int) -> int:
        return await self._database.write(
            lambda connection: connection.execute(_OLD, (before, limit)).rowcount
        )

    async def _jobs(self, condition: str, values: tuple[object, ...]) -> list[Job]:
        sql = f"{SELECT_JOB} WHERE {condition}"
        rows = await self._database.read_records(
            lambda reader: reader.execute(sql, values).fetchall()
        )
        return [job_from(row) for row in rows]


def _make(connection: sqlite3.Connection, change: ScheduleChange, *, daily_tasks: int) -> bool:
    if stored_answer(connection, change.once) is not None:
        raise ConveyorError(ErrorCode.CONFLICT, "the request has been answered already")
    after = change.after
    assert after.scheduling is not None
    values = (
        after.status,
        after.updated_at,
        after.sealed_key,
        after.latest_run_id,
        after.run_count,
        to_json(after.scheduling),
        next_fire(after),
        after.version,
        after.job_id,
        change.before.version,
    )
    if connection.execute(_CHANGE, values).rowcount == 0:
        return False
    if change.run is not None:
        try:
            insert_run(connection, change.run, shards_of(after))
        except sqlite3.IntegrityError:
            raise ConveyorError(ErrorCode.CONFLICT, "the run exists already") from None
        accepted, made_at = change.run.stats.total, change.run.created_at
        accept_tasks(connection, after.caller, accepted, limit=daily_tasks, now=made_at)
        insert_entries(connection, after, change.run)
    for fire in change.fires:
        connection.execute(_NOTE, (after.job_id, fire.fire_id, fire.noted_at, to_json(fire)))
    if change.answer is not None:
        store_answer(connection, change.once, change.answer)
    return True
