"""The development store: open a SQLite file, bring it to the present schema, and close it."""

from __future__ import annotations

import sqlite3
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from conveyor.dev.call_table import BegunCalls
from conveyor.dev.sqlite.database import Connection, Database, open_reader, open_writer
from conveyor.dev.sqlite.exports import SqliteExports
from conveyor.dev.sqlite.idempotency import SqliteIdempotency
from conveyor.dev.sqlite.ingestion import SqliteIngestion
from conveyor.dev.sqlite.inputs import SqliteInputs
from conveyor.dev.sqlite.jobs import SqliteJobs
from conveyor.dev.sqlite.outbox import SqliteOutbox
from conveyor.dev.sqlite.rows import index_of
from conveyor.dev.sqlite.runs import SqliteRuns
from conveyor.dev.sqlite.schema import migrate
from conveyor.dev.sqlite.signing_keys import SqliteSigningKeys
from conveyor.dev.sqlite.states import find_place
from conveyor.dev.sqlite.sweeping import SqliteSweeping
from conveyor.dev.sqlite.tasks import SqliteTasks

_LIVE = """(
    SELECT status FROM runs WHERE run_no <= claims.task_key >> 35 ORDER BY run_no DESC LIMIT 1
) IN ('running', 'pending')"""
"""A condition: the claim belongs to a live run. The run of a claim has the greatest number up to
the claim's."""


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
        try:
            return self.path.with_name(self.path.name + "-wal").stat().st_size
        except FileNotFoundError:
            return 0

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
            return connection.execute("UPDATE claims SET claimed_until = ?", (now,)).rowcount

        return await self.database.write(void)

    async def known_runs(self) -> set[str]:
        """List the ids of all runs, tombstones included."""
        rows = await self.database.read(
            lambda reader: reader.execute("SELECT run_id FROM runs").fetchall()
        )
        return {run_id for (run_id,) in rows}

    async def aclose(self) -> None:
        """Finish the queued operations and close. Later calls of any port raise unavailable."""
        await self.database.aclose()


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


async def open_store(path: Path, *, now: int, max_readers: int = 2) -> SqliteStore:
    """Open the store of a file, or create it. Claims stay as they are until `void_claims`.

    Removes idempotency keys that had expired by `now`, and tombstones of jobs without a run.
    Raises ConveyorError(unavailable) where the file cannot be used or is of another schema.
    """

    def prepare(connection: sqlite3.Connection) -> None:
        migrate(connection)
        connection.execute("DELETE FROM idempotency_keys WHERE expires_at <= ?", (now,))
        connection.execute(
            "DELETE FROM jobs WHERE status = 'deleted' "
            "AND NOT EXISTS (SELECT 1 FROM runs WHERE runs.job_id = jobs.job_id)"
        )

    async with AsyncExitStack() as opened:
        writer = await open_writer(path, prepare)
        opened.push_async_callback(writer.close)
        readers: list[Connection] = []
        for _ in range(max_readers):
            readers.append(await open_reader(path))
            opened.push_async_callback(readers[-1].close)
        opened.pop_all()
    database = Database(writer, readers)
    return SqliteStore(
        path,
        database,
        SqliteJobs(database),
        SqliteRuns(database),
        SqliteIdempotency(database),
        SqliteTasks(database),
        ingestion=SqliteIngestion(database),
        inputs=SqliteInputs(database),
        exports=SqliteExports(database),
        sweeping=SqliteSweeping(database),
        outbox=SqliteOutbox(database),
        signing_keys=SqliteSigningKeys(database),
    )
