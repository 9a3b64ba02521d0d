"""The deliveries port: a row holds the record as JSON, beside what conditions and indexes use."""

from __future__ import annotations

import sqlite3

import msgspec
from msgspec import structs

from conveyor.dev.sqlite.database import Database
from conveyor.domain.deliveries import EventDelivery
from conveyor.ports.deliveries import Deliveries, DeliveryFilter
from conveyor.ports.outbox import LONGEST_LEASE

_INSERT = """
    INSERT OR IGNORE INTO deliveries (caller, delivery_id, job_id, created_at, status, updated_at,
        due_at, leased_until, version, record)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
_CHANGE = """
    UPDATE deliveries SET status = ?, updated_at = ?, due_at = ?, leased_until = ?, version = ?,
        record = ?
    WHERE caller = ? AND delivery_id = ? AND version = ?
"""
_DUE = """
    SELECT record FROM deliveries
    WHERE status = 'pending' AND due_at <= :now
        AND (leased_until <= :now OR leased_until > :most)
    ORDER BY due_at LIMIT :limit
"""
_LEASED = """
    SELECT record FROM deliveries INDEXED BY deliveries_by_due
    WHERE status = 'pending' AND leased_until > 0
"""
_OLD = """
    DELETE FROM deliveries WHERE (caller, delivery_id) IN (
        SELECT caller, delivery_id FROM deliveries
        WHERE status <> 'pending' AND updated_at < ? LIMIT ?)
"""
_encoder = msgspec.json.Encoder()
_deliveries = msgspec.json.Decoder(EventDelivery)


class SqliteDeliveries(Deliveries):
    """The deliveries port."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def get_delivery(self, caller: str, delivery_id: str) -> EventDelivery | None:
        row = await self._database.read(
            lambda reader: reader.execute(
                "SELECT record FROM deliveries WHERE caller = ? AND delivery_id = ?",
                (caller, delivery_id),
            ).fetchone()
        )
        return None if row is None else _deliveries.decode(row[0])

    async def list_deliveries(self, wanted: DeliveryFilter, *, limit: int) -> list[EventDelivery]:
        conditions = ["caller = :caller", "created_at >= :since"]
        for name, sql in _CONDITIONS.items():
            if getattr(wanted, name) is not None:
                conditions.append(sql)
        statement = (
            f"SELECT record FROM deliveries {_index(wanted)} WHERE {' AND '.join(conditions)} "
            "ORDER BY delivery_id DESC LIMIT :limit"
        )
        values = {**structs.asdict(wanted), "limit": limit}
        return await self._database.read(
            lambda reader: _decoded(reader.execute(statement, values).fetchall())
        )

    async def create_delivery(self, delivery: EventDelivery) -> bool:
        values = (
            delivery.caller,
            delivery.delivery_id,
            delivery.job_id,
            delivery.created_at,
            *_changing(delivery),
        )
        return await self._database.write(
            lambda connection: connection.execute(_INSERT, values).rowcount == 1
        )

    async def change_delivery(self, before: EventDelivery, after: EventDelivery) -> bool:
        return await self._database.write(lambda connection: _change(connection, before, after))

    async def due_deliveries(self, *, now: int, limit: int) -> list[EventDelivery]:
        values = {"now": now, "most": now + LONGEST_LEASE, "limit": limit}
        return await self._database.read(
            lambda reader: _decoded(reader.execute(_DUE, values).fetchall())
        )

    async def drop_old_deliveries(self, *, before: int, limit: int) -> int:
        return await self._database.write(
            lambda connection: connection.execute(_OLD, (before, limit)).rowcount
        )


_CONDITIONS = {
    "job_id": "job_id = :job_id",
    "status": "status = :status",
    "until": "created_at < :until",
    "before": "delivery_id < :before",
}


def _index(wanted: DeliveryFilter) -> str:
    """Choose the index that leaves the fewest rows to be looked at; the key is that of callers."""
    if wanted.job_id is not None:
        return "INDEXED BY deliveries_by_job"
    return "INDEXED BY deliveries_by_creation" if wanted.since else ""


def _change(connection: sqlite3.Connection, before: EventDelivery, after: EventDelivery) -> bool:
    values = (*_changing(after), before.caller, before.delivery_id, before.version)
    return connection.execute(_CHANGE, values).rowcount == 1


def _changing(delivery: EventDelivery) -> tuple[object, ...]:
    """Return the columns that a change rewrites."""
    return (
        delivery.status,
        delivery.updated_at,
        delivery.due_at,
        delivery.leased_until,
        delivery.version,
        _encoder.encode(delivery).decode(),
    )


def _decoded(rows: list[tuple[str]]) -> list[EventDelivery]:
    return [_deliveries.decode(record) for (record,) in rows]


def release_deliveries(connection: sqlite3.Connection) -> None:
    """End the leases of an earlier process."""
    rows = connection.execute(_LEASED).fetchall()
    for leased in _decoded(rows):
        _change(connection, leased, structs.replace(leased, leased_until=0))
