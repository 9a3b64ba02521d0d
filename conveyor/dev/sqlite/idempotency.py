"""The idempotency port, and the answers of idempotent requests.

The transaction that does the work of a request stores its answer too.
"""

from __future__ import annotations

import sqlite3

from conveyor.dev.sqlite.database import Database
from conveyor.ports.records import (
    ClaimedKey,
    Idempotency,
    IdempotencyScope,
    KeyClaim,
    KeyInUse,
    KeyMismatch,
    StoredResponse,
)


def stored_answer(
    connection: sqlite3.Connection, once: IdempotencyScope | None
) -> StoredResponse | None:
    """Find the answer under a key. Where there is one, the work must not be done again."""
    if once is None:
        return None
    row = connection.execute(
        "SELECT status, body FROM idempotency_keys WHERE scope = ? AND status IS NOT NULL",
        (once.scope,),
    ).fetchone()
    return None if row is None else StoredResponse(*row)


def store_answer(
    connection: sqlite3.Connection, once: IdempotencyScope | None, answer: StoredResponse
) -> None:
    """Store an answer under its key."""
    if once is not None:
        connection.execute(
            "UPDATE idempotency_keys SET status = ?, body = ? WHERE scope = ?",
            (answer.status, answer.body, once.scope),
        )


_SWEPT_PER_CLAIM = 4
"""Expired keys removed with each new one: more than one, so that they never pile up."""


class SqliteIdempotency(Idempotency):
    """The idempotency port."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def claim_idempotency_key(
        self,
        scope: str,
        *,
        fingerprint: bytes,
        created_id: str,
        now: int,
        lapses_at: int,
        expires_at: int,
    ) -> KeyClaim:
        def claim(connection: sqlite3.Connection) -> KeyClaim:
            _sweep(connection, now)
            row = connection.execute(
                "SELECT fingerprint, created_id, lapses_at, status, body "
                "FROM idempotency_keys WHERE scope = ? AND expires_at > ?",
                (scope, now),
            ).fetchone()
            if row is None:
                connection.execute(
                    "INSERT OR REPLACE INTO idempotency_keys "
                    "(scope, fingerprint, created_id, lapses_at, expires_at) "
                    "VALUES (?, ?, ?, ?, ?)",
                    (scope, fingerprint, created_id, lapses_at, expires_at),
                )
                return ClaimedKey(created_id, taken_over=False)
            known, earlier_id, lapsed_at, status, body = row
            if known != fingerprint:
                return KeyMismatch()
            if status is not None:
                return StoredResponse(status, body)
            if lapsed_at > now:
                return KeyInUse()
            connection.execute(
                "UPDATE idempotency_keys SET lapses_at = ?, expires_at = ? WHERE scope = ?",
                (lapses_at, expires_at, scope),
            )
            return ClaimedKey(earlier_id, taken_over=True)

        return await self._database.write(claim)

    async def release_idempotency_key(self, scope: str, *, created_id: str, lapses_at: int) -> None:
        def release(connection: sqlite3.Connection) -> None:
            connection.execute(
                "DELETE FROM idempotency_keys "
                "WHERE scope = ? AND status IS NULL AND created_id = ? AND lapses_at = ?",
                (scope, created_id, lapses_at),
            )

        await self._database.write(release)

    async def answer_idempotency_key(
        self, scope: str, *, created_id: str, answer: StoredResponse
    ) -> None:
        values = (answer.status, answer.body, scope, created_id)
        await self._database.write(
            lambda connection: connection.execute(
                "UPDATE idempotency_keys SET status = ?, body = ? "
                "WHERE scope = ? AND status IS NULL AND created_id = ?",
                values,
            )
        )


def _sweep(connection: sqlite3.Connection, now: int) -> None:
    connection.execute(
        "DELETE FROM idempotency_keys WHERE scope IN "
        "(SELECT scope FROM idempotency_keys WHERE expires_at <= ? ORDER BY expires_at LIMIT ?)",
        (now, _SWEPT_PER_CLAIM),
    )
