"""The signing keys port: one row a slot."""

from __future__ import annotations

import sqlite3

from conveyor.dev.sqlite.database import Database
from conveyor.domain.errors import candidate_pending, no_candidate
from conveyor.ports.signing_keys import SigningKey, SigningKeys, SigningSlots

_ACTIVE, _CANDIDATE = "active", "candidate"
_SELECT = "SELECT slot, kid, created_at, sealed FROM signing_keys WHERE caller = ?"


class SqliteSigningKeys(SigningKeys):
    """The signing keys port."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def get_signing_keys(self, caller: str) -> SigningSlots:
        return await self._database.read(lambda reader: _slots(reader, caller))

    async def every_signing_key(self) -> list[tuple[str, SigningKey]]:
        """Return each caller with each of its keys, newest first."""

        def find(reader: sqlite3.Connection) -> list[tuple[str, SigningKey]]:
            rows = reader.execute(
                "SELECT caller, kid, created_at, sealed FROM signing_keys ORDER BY kid DESC"
            )
            return [(caller, SigningKey(*fields)) for caller, *fields in rows]

        return await self._database.read(find)

    async def add_signing_key(self, caller: str, key: SigningKey) -> None:
        def add(connection: sqlite3.Connection) -> None:
            slots = _slots(connection, caller)
            if slots.candidate is not None:
                raise candidate_pending()
            slot = _ACTIVE if slots.active is None else _CANDIDATE
            connection.execute(
                "INSERT INTO signing_keys (caller, slot, kid, created_at, sealed) "
                "VALUES (?, ?, ?, ?, ?)",
                (caller, slot, key.kid, key.created_at, key.sealed),
            )

        await self._database.write(add)

    async def promote_signing_key(self, caller: str, kid: str) -> SigningKey:
        def promote(connection: sqlite3.Connection) -> SigningKey:
            slots = _slots(connection, caller)
            if slots.active is not None and slots.active.kid == kid:
                return slots.active
            if slots.candidate is None or slots.candidate.kid != kid:
                raise no_candidate()
            connection.execute(
                "DELETE FROM signing_keys WHERE caller = ? AND slot = ?", (caller, _ACTIVE)
            )
            connection.execute(
                "UPDATE signing_keys SET slot = ? WHERE caller = ? AND kid = ?",
                (_ACTIVE, caller, kid),
            )
            return slots.candidate

        return await self._database.write(promote)

    async def drop_signing_key(self, caller: str, kid: str) -> None:
        def drop(connection: sqlite3.Connection) -> None:
            connection.execute(
                "DELETE FROM signing_keys WHERE caller = ? AND slot = ? AND kid = ?",
                (caller, _CANDIDATE, kid),
            )

        await self._database.write(drop)


def _slots(connection: sqlite3.Connection, caller: str) -> SigningSlots:
    rows = connection.execute(_SELECT, (caller,)).fetchall()
    keys = {slot: SigningKey(kid, created_at, sealed) for slot, kid, created_at, sealed in rows}
    return SigningSlots(keys.get(_ACTIVE), keys.get(_CANDIDATE))
