"""The outbox port: entries are rows of `notices`, and a trigger in `schema` makes the one of a run
due when the run ends.
"""

from __future__ import annotations

import sqlite3

import msgspec

from conveyor.dev.sqlite.database import Database
from conveyor.dev.sqlite.rows import callback_from, to_json
from conveyor.dev.sqlite.states import find_run
from conveyor.domain.model import Job, Run, RunStatus
from conveyor.domain.run_events import RunFinished
from conveyor.ports.outbox import CLOCKS_APART, LONGEST_LEASE, Outbox, OutboxEntry

_DUE = """
    SELECT run_id FROM notices
    WHERE due_at <= :now AND (leased_until <= :now OR leased_until > :most)
    ORDER BY due_at LIMIT :limit
"""
_LEASE = """
    UPDATE notices SET leased_until = :lapses_at
    WHERE run_id = :run_id AND due_at <= :now
        AND (leased_until <= :now OR leased_until > :most)
"""
_PUT_OFF = """
    UPDATE notices SET leased_until = 0, attempts = :attempts, due_at = iif(
        ending IS NULL AND NOT EXISTS (
            SELECT 1 FROM runs
            WHERE runs.run_id = notices.run_id AND status IN ('running', 'pending')
        ), due_at, :due_at)
    WHERE run_id = :run_id AND leased_until = :lease
"""
"""If the run has ended and the payload is not fixed yet, the entry stays due at the time of that
end."""

_endings = msgspec.json.Decoder(RunFinished)


class SqliteOutbox(Outbox):
    """The outbox port."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def due_entries(self, *, now: int, limit: int) -> list[str]:
        values = {"now": now, "most": now + LONGEST_LEASE, "limit": limit}
        rows = await self._database.read(lambda reader: reader.execute(_DUE, values).fetchall())
        return [run_id for (run_id,) in rows]

    async def lease_entry(self, run_id: str, *, now: int, lapses_at: int) -> OutboxEntry | None:
        def lease(connection: sqlite3.Connection) -> OutboxEntry | None:
            values = {
                "run_id": run_id,
                "now": now,
                "lapses_at": lapses_at,
                "most": lapses_at + CLOCKS_APART,
            }
            taken = connection.execute(_LEASE, values).rowcount
            return _leased(connection, run_id) if taken else None

        return await self._database.write(lease)

    async def fix_payload(self, entry: OutboxEntry, ending: RunFinished, *, now: int) -> bool:
        values = (to_json(ending), now, entry.run_id, entry.lease)
        return await self._database.write(
            lambda connection: (
                connection.execute(
                    "UPDATE notices SET ending = ?, decided_at = ? "
                    "WHERE run_id = ? AND leased_until = ? AND ending IS NULL",
                    values,
                ).rowcount
                == 1
            )
        )

    async def reschedule_entry(self, entry: OutboxEntry, *, due_at: int, attempts: int) -> None:
        values = {
            "run_id": entry.run_id,
            "lease": entry.lease,
            "due_at": due_at,
            "attempts": attempts,
        }
        await self._database.write(lambda connection: connection.execute(_PUT_OFF, values))

    async def drop_entry(self, entry: OutboxEntry) -> None:
        values = (entry.run_id, entry.lease)
        await self._database.write(
            lambda connection: connection.execute(
                "DELETE FROM notices WHERE run_id = ? AND leased_until = ?", values
            )
        )


def insert_entry(connection: sqlite3.Connection, job: Job, run: Run) -> None:
    """Write the entry of a job's first run if the job has a callback."""
    if job.callback is not None:
        connection.execute(
            "INSERT INTO notices (run_id, job_id, callback, due_at) VALUES (?, ?, ?, ?)",
            (run.run_id, job.job_id, to_json(job.callback), run.created_at),
        )


def _leased(connection: sqlite3.Connection, run_id: str) -> OutboxEntry:
    job_id, callback, lease, ended_as, ending, decided_at, attempts = connection.execute(
        "SELECT job_id, callback, leased_until, ended_as, ending, decided_at, attempts "
        "FROM notices WHERE run_id = ?",
        (run_id,),
    ).fetchone()
    return OutboxEntry(
        job_id=job_id,
        run_id=run_id,
        callback=callback_from(callback),
        lease=lease,
        run=find_run(connection, run_id),
        ended_as=None if ended_as is None else RunStatus(ended_as),
        ending=None if ending is None else _endings.decode(ending),
        decided_at=decided_at,
        attempts=attempts,
    )
