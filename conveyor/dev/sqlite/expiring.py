"""The ports of records that expire: file inputs and exports, a row each; and the hosts that are
closed, for the next process.

An export is removed with its run.
"""

from __future__ import annotations

import sqlite3
from typing import Any

import msgspec

from conveyor.dev.pacing import ClosedHosts
from conveyor.dev.sqlite.database import Database
from conveyor.domain.errors import not_found
from conveyor.ports.binding import Exports, Inputs
from conveyor.ports.exports import Export, ExportFormat, ExportStatus
from conveyor.ports.inputs import JobInput

_COLUMNS = (
    "export_id, job_id, run_id, format, status, created_at, updated_at, expires_at, error, size"
)
_RUN_LIVES = (
    "EXISTS (SELECT 1 FROM runs WHERE runs.run_id = {run_id} AND runs.job_id = {job_id} "
    "AND runs.status <> 'deleted')"
)
_GOES_ON = (
    "export_id = :export_id AND status IN ('pending', 'running') AND expires_at > :now AND "
    + _RUN_LIVES.format(run_id="exports.run_id", job_id="exports.job_id")
)


class SqliteExports(Exports):
    """The exports port."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create_export(self, export: Export) -> None:
        values = (
            export.export_id,
            export.job_id,
            export.run_id,
            export.format,
            export.status,
            export.created_at,
            export.updated_at,
            export.expires_at,
            export.error,
            export.size,
        )

        def create(connection: sqlite3.Connection) -> None:
            written = connection.execute(
                f"INSERT INTO exports ({_COLUMNS}) SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10 "
                f"WHERE {_RUN_LIVES.format(run_id='?3', job_id='?2')}",
                values,
            )
            if written.rowcount != 1:
                raise not_found("run")

        await self._database.write(create)

    async def get_export(self, export_id: str) -> Export | None:
        found = await self._select("WHERE export_id = ?", export_id)
        return found[0] if found else None

    async def latest_exports(self, job_id: str, run_id: str, *, limit: int) -> list[Export]:
        return await self._select(
            "WHERE run_id = ? AND job_id = ? ORDER BY export_id DESC LIMIT ?", run_id, job_id, limit
        )

    async def begin_export(self, export_id: str, *, now: int) -> Export | None:
        sql = (
            "UPDATE exports SET status = 'running', updated_at = max(updated_at, :now) "
            f"WHERE {_GOES_ON} RETURNING {_COLUMNS}"
        )
        values = {"export_id": export_id, "now": now}
        row = await self._database.write(
            lambda connection: connection.execute(sql, values).fetchone()
        )
        return None if row is None else _export_from(row)

    async def touch_export(self, export_id: str, *, now: int) -> None:
        sql = f"UPDATE exports SET updated_at = max(updated_at, :now) WHERE {_GOES_ON}"
        values = {"export_id": export_id, "now": now}
        await self._database.write(lambda connection: connection.execute(sql, values))

    async def end_export(
        self, export_id: str, *, size: int | None, error: str | None, now: int
    ) -> bool:
        sql = (
            "UPDATE exports SET status = :status, size = :size, error = :error, "
            f"updated_at = max(updated_at, :now) WHERE {_GOES_ON}"
        )
        status = ExportStatus.COMPLETED if error is None else ExportStatus.FAILED
        values = {
            "export_id": export_id,
            "status": status,
            "size": size,
            "error": error,
            "now": now,
        }
        return await self._database.write(
            lambda connection: connection.execute(sql, values).rowcount == 1
        )

    async def unfinished_exports(self, *, before: int) -> list[Export]:
        return await self._select(
            "WHERE status IN ('pending', 'running') AND updated_at < ? ORDER BY export_id", before
        )

    async def expired_exports(self, *, now: int, limit: int) -> list[Export]:
        return await self._select(
            "WHERE expires_at <= ? ORDER BY expires_at, export_id LIMIT ?", now, limit
        )

    async def drop_export(self, export_id: str) -> None:
        def drop(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM exports WHERE export_id = ?", (export_id,))

        await self._database.write(drop)

    async def _select(self, clause: str, *values: object) -> list[Export]:
        sql = f"SELECT {_COLUMNS} FROM exports {clause}"
        rows = await self._database.read(lambda reader: reader.execute(sql, values).fetchall())
        return [_export_from(row) for row in rows]


def remove_exports_of_run(connection: sqlite3.Connection, run_id: str) -> None:
    """Remove the exports of a run, inside the caller's transaction."""
    connection.execute("DELETE FROM exports WHERE run_id = ?", (run_id,))


def _export_from(row: tuple[Any, ...]) -> Export:
    return Export(
        export_id=row[0],
        job_id=row[1],
        run_id=row[2],
        format=ExportFormat(row[3]),
        status=ExportStatus(row[4]),
        created_at=row[5],
        updated_at=row[6],
        expires_at=row[7],
        error=row[8],
        size=row[9],
    )


class SqliteInputs(Inputs):
    """The inputs port. A slot is stored as JSON, but for its size, which changes."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create_input(self, job_input: JobInput) -> None:
        slot = msgspec.json.encode(job_input).decode()
        row = (job_input.input_id, job_input.expires_at, job_input.size, slot)

        def create(connection: sqlite3.Connection) -> None:
            connection.execute(
                "INSERT INTO job_inputs (input_id, expires_at, size, slot) VALUES (?, ?, ?, ?)", row
            )

        await self._database.write(create)

    async def get_input(self, input_id: str) -> JobInput | None:
        def read(reader: sqlite3.Connection) -> JobInput | None:
            row = reader.execute(
                "SELECT slot, size FROM job_inputs WHERE input_id = ?", (input_id,)
            ).fetchone()
            if row is None:
                return None
            slot, size = row
            return msgspec.structs.replace(msgspec.json.decode(slot, type=JobInput), size=size)

        return await self._database.read(read)

    async def input_uploaded(self, input_id: str, *, size: int) -> bool:
        return await self._database.write(
            lambda connection: (
                connection.execute(
                    "UPDATE job_inputs SET size = ? WHERE input_id = ?", (size, input_id)
                ).rowcount
                == 1
            )
        )

    async def expired_inputs(self, *, now: int, limit: int) -> list[str]:
        rows = await self._database.read(
            lambda reader: reader.execute(
                "SELECT input_id FROM job_inputs WHERE expires_at <= ? ORDER BY expires_at LIMIT ?",
                (now, limit),
            ).fetchall()
        )
        return [input_id for (input_id,) in rows]

    async def drop_input(self, input_id: str) -> None:
        def drop(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM job_inputs WHERE input_id = ?", (input_id,))

        await self._database.write(drop)


class SqliteClosedHosts(ClosedHosts):
    """The hosts that are closed. Those that are open again are removed as others are added."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, host: str, *, now: int, until: int) -> None:
        def add(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM closed_hosts WHERE closed_until <= ?", (now,))
            connection.execute(
                "INSERT INTO closed_hosts (host, closed_until, lasts) VALUES (?1, ?2, ?2 - ?3) "
                "ON CONFLICT (host) DO UPDATE SET closed_until = excluded.closed_until, "
                "lasts = excluded.lasts WHERE excluded.lasts > min(closed_until - ?3, lasts)",
                (host, until, now),
            )

        await self._database.write(add)

    async def left(self, *, now: int) -> dict[str, float]:
        rows = await self._database.read(
            lambda reader: reader.execute(
                "SELECT host, min(closed_until - ?, lasts) FROM closed_hosts "
                "WHERE closed_until > ?",
                (now, now),
            ).fetchall()
        )
        return {host: left / 1_000 for host, left in rows}
