"""The development store: open a SQLite file, bring it to the present schema, and close it."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Sequence
from contextlib import AsyncExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path

from conveyor.dev.call_table import BegunCalls
from conveyor.dev.sqlite.database import Connection, Database, WriteNotes, open_reader, open_writer
from conveyor.dev.sqlite.deliveries import SqliteDeliveries, release_deliveries
from conveyor.dev.sqlite.expiring import SqliteClosedHosts, SqliteExports, SqliteInputs
from conveyor.dev.sqlite.idempotency import SqliteIdempotency
from conveyor.dev.sqlite.ingestion import SqliteIngestion
from conveyor.dev.sqlite.jobs import SqliteJobs, purge_jobs
from conveyor.dev.sqlite.outbox import SqliteOutbox
from conveyor.dev.sqlite.rows import index_of
from conveyor.dev.sqlite.runs import SqliteRuns
from conveyor.dev.sqlite.schedules import SqliteSchedules
from conveyor.dev.sqlite.schema import migrate, open_unchanged, without_records
from conveyor.dev.sqlite.signing_keys import SqliteSigningKeys
from conveyor.dev.sqlite.states import find_job, find_place
from conveyor.dev.sqlite.sweeping import SqliteSweeping
from conveyor.dev.sqlite.tasks import SqliteTasks
from conveyor.domain.api_keys import KeySealer, UnsealError, fingerprint
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.idle import OpenWork
from conveyor.records.blob_keys import lifecycle_class, result_key

_LIVE = """(
    SELECT status FROM runs WHERE run_no <= claims.task_key >> 35 ORDER BY run_no DESC LIMIT 1
) IN ('running', 'pending')"""
"""A condition: the claim belongs to a live run. The run of a claim has the greatest number up to
the claim's."""

_CLAIMED_BODIES = """
    SELECT r.job_id, r.run_id, t.task_id, c.claim_number, j.result_ttl_days
    FROM claims c JOIN tasks t USING (task_key)
    JOIN runs r ON r.run_no = (SELECT max(run_no) FROM runs WHERE run_no <= c.task_key >> 35)
    JOIN jobs j USING (job_id)
"""

_log = logging.getLogger("conveyor.dev")


@dataclass(frozen=True, slots=True)
class SqliteStore:
    """The records and tasks ports over one file, figures for metrics, and the clean-up at boot."""

    path: Path
    database: Database
    jobs: SqliteJobs
    runs: SqliteRuns
    idempotency: SqliteIdempotency
    tasks: SqliteTasks
    ingestion: SqliteIngestion
    inputs: SqliteInputs
    exports: SqliteExports
    sweeping: SqliteSweeping
    outbox: SqliteOutbox
    signing_keys: SqliteSigningKeys
    deliveries: SqliteDeliveries
    schedules: SqliteSchedules
    closed_hosts: SqliteClosedHosts
    run_writes: WriteNotes

    @property
    def rows_read(self) -> int:
        """The number of task rows that reads have touched."""
        return self.database.rows_read

    @property
    def rows_returned(self) -> int:
        """The number of task rows that reads have returned."""
        return self.database.rows_returned

    @property
    def groups(self) -> int:
        """The number of groups of writes committed."""
        return self.database.groups

    @property
    def operations(self) -> int:
        """The number of writes in these groups."""
        return self.database.operations

    def wal_size(self) -> int:
        """Measure the write-ahead log in bytes; 0 where there is no log."""
        return _size(_log_of(self.path))

    async def agree(self, secrets: Sequence[bytes]) -> None:
        """Note the root secrets, newest first, that jobs depend on from here on.

        Raises ConveyorError(conflict) where the last of them is not the one that names the callers
        of the jobs here: nobody would see their jobs.
        """
        await self.database.write(lambda connection: _agree(connection, secrets))

    async def claimed_bodies(self) -> list[str]:
        """List the keys under which the claims of an earlier process may have left a body. No row
        names one of them, as a body is named by the write that ends its claim."""
        rows = await self.database.read(lambda reader: reader.execute(_CLAIMED_BODIES).fetchall())
        return [
            result_key(job_id, run_id, task_id, number, lifecycle_class(days))
            for job_id, run_id, task_id, number, days in rows
        ]

    async def void_claims(self, now: int, begun: BegunCalls | None = None) -> int:
        """Let every claim lapse at `now`, as its process is gone at boot; return how many there
        were.

        `begun` tells of one ledger's life which calls had begun: its other claims are undone, as if
        never made. Claims of idempotency keys and leases of notices lapse too. Tasks of runs that
        have ended go back to pending and are not counted. The cost grows with the number of claims,
        not of tasks.
        """

        def void(connection: sqlite3.Connection) -> int:
            if begun is not None:
                _undo_unbegun(connection, begun)
            connection.execute(
                "UPDATE tasks SET updated_at = ?, claim_number = (SELECT claim_number FROM claims "
                "WHERE claims.task_key = tasks.task_key) "
                f"WHERE task_key IN (SELECT task_key FROM claims WHERE NOT {_LIVE})",
                (now,),
            )
            connection.execute(f"DELETE FROM claims WHERE NOT {_LIVE}")
            connection.execute(
                "UPDATE idempotency_keys SET lapses_at = ? WHERE status IS NULL AND lapses_at > ?",
                (now, now),
            )
            connection.execute("UPDATE notices SET leased_until = 0 WHERE leased_until > 0")
            release_deliveries(connection)
            return connection.execute("UPDATE claims SET claimed_until = ?", (now,)).rowcount

        return await self.database.write(void)

    async def clear(self) -> None:
        """Delete all rows but those of secrets and signing keys.

        Numbers of runs are not used again, so a late write of a task finds no row.
        """
        await self.database.write(_clear)

    async def fill(self, source: Path) -> None:
        """Take over all rows of another file of the same schema, but those of secrets and signing
        keys; no row is removed. Raises ConveyorError(conflict) where there is data already."""
        await self.database.write(lambda connection: _fill(connection, source))

    async def check_empty(self) -> None:
        """Raise ConveyorError(conflict) where there are jobs, runs, deliveries, exports or
        uploads."""
        await self.database.read(_check_empty)

    async def known_runs(self) -> set[str]:
        """List the ids of all runs, tombstones included."""
        rows = await self.database.read(
            lambda reader: reader.execute("SELECT run_id FROM runs").fetchall()
        )
        return {run_id for (run_id,) in rows}

    async def aclose(self) -> None:
        """Finish the queued operations and close. Later calls of any port raise unavailable."""
        await self.database.aclose()


def _log_of(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return 0


def _agree(connection: sqlite3.Connection, secrets: Sequence[bytes]) -> None:
    """Write the fingerprints of secrets beside those that are known."""
    if _newest_sealed(connection) is None:
        connection.execute("DELETE FROM root_secrets")
    elif _is_of_another(connection, secrets):
        raise _other_secret()
    connection.executemany(
        "INSERT OR IGNORE INTO root_secrets (fingerprint) VALUES (?)",
        [(fingerprint(secret),) for secret in reversed(secrets)],
    )


def _newest_sealed(connection: sqlite3.Connection) -> str | None:
    """Return the id of the newest job, empty where signing keys alone are sealed; None where
    nothing is."""
    (newest,) = connection.execute("SELECT max(job_id) FROM jobs").fetchone()
    (signs,) = connection.execute("SELECT EXISTS (SELECT 1 FROM signing_keys)").fetchone()
    return newest if newest is not None or not signs else ""


def _is_of_another(connection: sqlite3.Connection, secrets: Sequence[bytes]) -> bool:
    """Tell whether jobs or signing keys were made under another secret than the oldest one."""
    newest = _newest_sealed(connection)
    if newest is None or not secrets:
        return newest is not None
    first = connection.execute("SELECT fingerprint FROM root_secrets ORDER BY number").fetchone()
    if first is None:
        return not _opens(secrets, connection, newest)
    return bool(first[0] != fingerprint(secrets[-1]))


def _other_secret() -> ConveyorError:
    return ConveyorError(
        ErrorCode.CONFLICT,
        "what is in it was made under another root secret; set CONVEYOR_SECRET to that one, or "
        "to a list that ends with it, or unset it if that is the directory's own, in the file "
        "named secret",
    )


def secret_problem(path: Path, secrets: Sequence[bytes]) -> str | None:
    """Say that the records of a file, if it is there, belong to another root secret than these,
    newest first, or to one if there are none; None if they do not, or cannot be read. Changes
    nothing."""
    if not _size(path):
        return None
    with suppress(sqlite3.Error), closing(open_unchanged(path)) as reader:
        return _other_secret().detail if _is_of_another(reader, secrets) else None
    return None


_KEPT = ("root_secrets", "signing_keys")


def _tables(connection: sqlite3.Connection) -> list[str]:
    """List the tables whose rows come and go with the data."""
    found = connection.execute(
        "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite%'"
    ).fetchall()
    return [table for (table,) in found if table not in _KEPT]


def _clear(connection: sqlite3.Connection) -> None:
    # Who watches a run learns that it is gone.
    connection.execute("SELECT count(note_run(run_id, 1)) FROM runs")
    for table in _tables(connection):
        connection.execute(f"DELETE FROM {table}")


_DATA = {
    "jobs": "jobs",
    "runs": "runs",
    "deliveries": "deliveries",
    "exports": "exports",
    "job_inputs": "uploads",
}
"""The tables of what a caller may still ask for, and its name."""


def _check_empty(connection: sqlite3.Connection) -> None:
    for table, name in _DATA.items():
        if connection.execute(f"SELECT EXISTS (SELECT 1 FROM {table})").fetchone() != (0,):
            raise ConveyorError(ErrorCode.CONFLICT, f"there are {name} already")


def _fill(connection: sqlite3.Connection, source: Path) -> None:
    """Add the rows of another file. What is left here of data that is gone, such as answers to
    idempotency keys, stays, but for a row with the same key."""
    _check_empty(connection)
    with closing(open_unchanged(source)) as other:
        for table in (name for name in _tables(connection) if name != "sweeps"):
            listed = connection.execute(f"PRAGMA table_info({table})").fetchall()
            names = ", ".join(column[1] for column in listed)
            marks = ", ".join("?" for _ in listed)
            rows = other.execute(f"SELECT {names} FROM {table}")
            insert = f"INSERT OR REPLACE INTO {table} ({names}) VALUES ({marks})"
            connection.executemany(insert, rows)


def _opens(secrets: Sequence[bytes], connection: sqlite3.Connection, job_id: str) -> bool:
    """Tell whether secrets open the key of a job: a file of an earlier version knows no
    fingerprint."""
    job = find_job(connection, job_id) if job_id else None
    try:
        return job is None or bool(KeySealer(secrets).unseal(job))
    except UnsealError:
        return False


def _undo_unbegun(connection: sqlite3.Connection, begun: BegunCalls) -> None:
    """Undo the claims of a ledger's life whose calls had not begun."""
    called = []
    for run_id, task_id, claim_number in begun.claims:
        place, index = find_place(connection, run_id), index_of(task_id)
        if place is not None and index is not None:
            called.append((place.key(task_id, index), claim_number))
    held = connection.execute(
        "SELECT task_key, claim_number FROM claims WHERE worker GLOB ?", (f"{begun.life}/*",)
    ).fetchall()
    connection.executemany(
        "DELETE FROM claims WHERE task_key = ?",
        [(task_key,) for task_key, _ in set(held).difference(called)],
    )


async def open_store(
    path: Path,
    *,
    now: int,
    max_readers: int = 2,
    may_be_new: bool = True,
    work: OpenWork | None = None,
    daily_tasks: int = 0,
) -> SqliteStore:
    """Open the store of a file, or create it where it `may_be_new`. Claims stay as they are until
    `void_claims`. A caller has `daily_tasks` accepted a day; 0 means no limit.

    Removes idempotency keys that had expired by `now`, and tombstones of jobs without a run.
    Raises ConveyorError(unavailable) where the file cannot be used or is of another schema, and
    then leaves it as it is.
    """
    # SQLite would remove the log of an empty file: it may be all that is left of one.
    if not _size(path) and (not may_be_new or _size(_log_of(path))):
        raise without_records("missing or empty")

    notes = WriteNotes()

    def prepare(connection: sqlite3.Connection) -> None:
        migrate(connection)
        notes.attach(connection)
        connection.execute("DELETE FROM idempotency_keys WHERE expires_at <= ?", (now,))
        purge_jobs(connection)

    async with AsyncExitStack() as opened:
        writer = await open_writer(path, prepare, may_be_new=may_be_new)
        opened.push_async_callback(writer.close)
        readers: list[Connection] = []
        for _ in range(max_readers):
            readers.append(await open_reader(path))
            opened.push_async_callback(readers[-1].close)
        opened.pop_all()
    database = Database(path, writer, readers, notes.pass_on, work=work)
    return _store(path, database, notes, daily_tasks=daily_tasks)


def _store(path: Path, database: Database, notes: WriteNotes, *, daily_tasks: int) -> SqliteStore:
    return SqliteStore(
        path,
        database,
        SqliteJobs(database, daily_tasks=daily_tasks),
        SqliteRuns(database, daily_tasks=daily_tasks),
        SqliteIdempotency(database),
        SqliteTasks(database),
        ingestion=SqliteIngestion(database),
        inputs=SqliteInputs(database),
        exports=SqliteExports(database),
        sweeping=SqliteSweeping(database),
        outbox=SqliteOutbox(database),
        signing_keys=SqliteSigningKeys(database),
        deliveries=SqliteDeliveries(database),
        schedules=SqliteSchedules(database, daily_tasks=daily_tasks),
        closed_hosts=SqliteClosedHosts(database),
        run_writes=notes,
    )
