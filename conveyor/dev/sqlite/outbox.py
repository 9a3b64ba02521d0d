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
from conveyor.ports.outbox import (
    CLOCKS_APART,
    LONGEST_LEASE,
    EntryKey,
    Outbox,
    OutboxEntry,
    Subscriber,
)

_DUE = """
    SELECT run_id, subscriber FROM notices
    WHERE due_at <= :now AND (leased_until <= :now OR leased_until > :most)
    ORDER BY due_at LIMIT :limit
"""
_LEASE = """
    UPDATE notices SET leased_until = :lapses_at
    WHERE run_id = :run_id AND subscriber = :subscriber AND due_at <= :now
        AND (leased_until <= :now OR leased_until > :most)
"""
_PUT_OFF = """
    UPDATE notices SET leased_until = 0, attempts = :attempts, due_at = iif(
        ending IS NULL AND NOT EXISTS (
            SELECT 1 FROM runs
            WHERE runs.run_id = notices.run_id AND status IN ('running', 'pending')
        ), due_at, :due_at)
    WHERE run_id = :run_id AND subscriber = :subscriber AND leased_until = :lease
"""
"""If the run has ended and the payload is not fixed yet, the entry stays due at the time of that
end."""

_endings = msgspec.json.Decoder(RunFinished)


class SqliteOutbox(Outbox):
    """The outbox port."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def due_entries(self, *, now: int, limit: int) -> list[EntryKey]:
        values = {"now": now, "most": now + LONGEST_LEASE, "limit": limit}
        rows = await self._database.read(lambda reader: reader.execute(_DUE, values).fetchall())
        return [EntryKey(run_id, Subscriber(subscriber)) for run_id, subscriber in rows]

    async def lease_entry(self, key: EntryKey, *, now: int, lapses_at: int) -> OutboxEntry | None:
        def lease(connection: sqlite3.Connection) -> OutboxEntry | None:
            values = {
                **key._asdict(),
                "now": now,
                "lapses_at": lapses_at,
                "most": lapses_at + CLOCKS_APART,
            }
            taken = connection.execute(_LEASE, values).rowcount
            return _leased(connection, key) if taken else None

        return await self._database.write(lease)

    async def fix_payload(self, entry: OutboxEntry, ending: RunFinished, *, now: int) -> bool:
        values = (to_json(ending), now, *entry.key, entry.lease)
        return await self._database.write(
            lambda connection: (
                connection.execute(
                    "UPDATE notices SET ending = ?, decided_at = ? "
                    "WHERE run_id = ? AND subscriber = ? AND leased_until = ? AND ending IS NULL",
                    values,
                ).rowcount
                == 1
            )
        )

    async def reschedule_entry(self, entry: OutboxEntry, *, due_at: int, attempts: int) -> None:
        values = {
            **entry.key._asdict(),
            "lease": entry.lease,
            "due_at": due_at,
            "attempts": attempts,
        }
        await self._database.write(lambda connection: connection.execute(_PUT_OFF, values))

    async def drop_entry(self, entry: OutboxEntry) -> None:
        values = (*entry.key, entry.lease)
        await self._database.write(
            lambda connection: connection.execute(
                "DELETE FROM notices WHERE run_id = ? AND subscriber = ? AND leased_until = ?",
                values,
            )
        )


def insert_entries(connection: sqlite3.Connection, job: Job, run: Run) -> None:
    """Write the entries of a job's new run: for its callback if it is the first one, and for its
    webhook. One that is there waits for the present webhook from now on."""
    waiting: list[tuple[Subscriber, str | None, int]] = []
    if job.callback is not None and run.run_sequence == 1:
        waiting.append((Subscriber.CALLBACK, to_json(job.callback), 0))
    if job.webhook is not None:
        waiting.append((Subscriber.WEBHOOK, None, job.webhook_number))
    connection.executemany(
        "INSERT INTO notices (run_id, job_id, due_at, subscriber, callback, webhook_number) "
        "VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
        "webhook_number = excluded.webhook_number",
        [(run.run_id, job.job_id, run.created_at, *one) for one in waiting],
    )


def _leased(connection: sqlite3.Connection, key: EntryKey) -> OutboxEntry:
    job_id, callback, lease, ended_as, ended_at, ending, decided_at, attempts, number = (
        connection.execute(
            "SELECT job_id, callback, leased_until, ended_as, ended_at, ending, decided_at, "
            "attempts, webhook_number FROM notices WHERE run_id = ? AND subscriber = ?",
            key,
        ).fetchone()
    )
    return OutboxEntry(
        job_id=job_id,
        run_id=key.run_id,
        subscriber=key.subscriber,
        callback=None if callback is None else callback_from(callback),
        lease=lease,
        run=find_run(connection, key.run_id),
        ended_as=None if ended_as is None else RunStatus(ended_as),
        ended_at=ended_at,
        ending=None if ending is None else _endings.decode(ending),
        decided_at=decided_at,
        attempts=attempts,
        webhook_number=number,
    )
