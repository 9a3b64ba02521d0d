"""The answer of an idempotent request, stored by the very transaction that does its work."""

from __future__ import annotations

import sqlite3

from conveyor.ports.records import Answer, Once


def stored_answer(connection: sqlite3.Connection, once: Once | None) -> Answer | None:
    """The answer that stands under a key already: its work is done and must not be done again."""
    if once is None:
        return None
    row = connection.execute(
        "SELECT status, body FROM idempotency_keys WHERE scope = ? AND status IS NOT NULL",
        (once.scope,),
    ).fetchone()
    return None if row is None else Answer(*row)


def store_answer(connection: sqlite3.Connection, once: Once | None, answer: Answer) -> None:
    """Keep an answer under its key."""
    if once is not None:
        connection.execute(
            "UPDATE idempotency_keys SET status = ?, body = ? WHERE scope = ?",
            (answer.status, answer.body, once.scope),
        )
