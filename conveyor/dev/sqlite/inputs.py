"""The inputs port: a row for each slot for an uploaded file of tasks."""

from __future__ import annotations

import sqlite3

import msgspec

from conveyor.dev.sqlite.database import Database
from conveyor.ports.binding import Inputs
from conveyor.ports.inputs import JobInput


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
