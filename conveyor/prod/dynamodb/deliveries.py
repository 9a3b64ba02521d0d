"""The deliveries port on DynamoDB: one item a delivery, in the partition of its caller.

The record is one JSON text, beside the attributes that conditions, filters and indexes use. Every
write is a transaction, for its token: a repetition after a lost answer writes nothing and succeeds,
whatever has happened to the item since. One index finds the deliveries of a job, another the
pending ones by their due time, and all others by their last change.

Ids begin with the end of the run, so a list from an instant on ends soon before it. A delivery that
was made more than LATE after its run's end has a mark of its own, by which such a list finds it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from ulid import ULID

from conveyor.aio.concurrency import for_each
from conveyor.domain.deliveries import Delivery, DeliveryStatus
from conveyor.ports.deliveries import Deliveries, DeliveryFilter
from conveyor.ports.outbox import LONGEST_LEASE
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.client import (
    Item,
    Page,
    PlaceholderValue,
    Query,
    RowFilter,
    Table,
    UnreadableRow,
    decode_intact,
    decodes_row,
    keys_of,
    merge_json,
)
from conveyor.prod.dynamodb.schema import (
    BEGIN,
    BY_DISPATCH,
    BY_OWNER,
    DELIVERIES,
    END,
    ENDED_DELIVERIES,
    ROW_SHAPE,
    Key,
    by_time,
    deliveries_of,
    delivery_key,
    late_delivery_key,
)

LATE = 3_600_000
"""Milliseconds between a run's end and its delivery, from which the delivery has a mark."""
MOST_READ = 100
"""Deliveries that one query of a list reads."""
SIDE_BY_SIDE = 10
"""Deliveries removed at a time."""

_record = msgspec.json.Decoder(Delivery)


class DynamoDeliveries(Deliveries):
    """The deliveries port. `Deletion.purge_job` removes the deliveries of a job."""

    def __init__(self, table: Table) -> None:
        self._table = table

    async def get_delivery(self, caller: str, delivery_id: str) -> Delivery | None:
        item = await self._table.get(delivery_key(caller, delivery_id))
        return None if item is None else _read(item)

    async def list_deliveries(self, wanted: DeliveryFilter, *, limit: int) -> list[Delivery]:
        """Read pages until enough are found. Those of one job are found by index, which may lack a
        delivery of a moment ago."""
        found: list[Delivery] = []
        async for items in self._listed(wanted, limit):
            found += [one for one in decode_intact(_read, items) if _is_wanted(one, wanted)]
            if len(found) >= limit:
                break
        return found[:limit]

    async def create_delivery(self, delivery: Delivery) -> bool:
        key = delivery_key(delivery.caller, delivery.delivery_id)
        item = new_delivery_item(delivery)
        parts = [self._table.put_part(key, item, condition="attribute_not_exists(pk)")]
        if _is_late(delivery):
            mark: Item = {"shape": ROW_SHAPE, "created_at": delivery.created_at}
            parts.append(self._table.put_part(_mark_of(key), mark))
        return await self._write(parts)

    async def change_delivery(self, before: Delivery, after: Delivery) -> bool:
        key = delivery_key(before.caller, before.delivery_id)
        # Read for its text, which may hold fields of a later version.
        item = await self._table.get(key)
        if item is None or _read(item).version != before.version:
            return False
        attributes = _changing(after, item["delivery"])
        part = self._table.update_part(
            key,
            "SET " + ", ".join(f"#{name} = :{name}" for name in attributes),
            condition="#version = :known_version",
            known_version=before.version,
            **attributes,
        )
        return await self._write([part])

    async def due_deliveries(self, *, now: int, limit: int) -> list[Delivery]:
        """Find due deliveries by index; the items, read strongly, tell which are still due."""
        found: list[Delivery] = []
        async for page in self._table.pages(
            Query(
                DELIVERIES,
                index=BY_DISPATCH,
                between=(by_time(0, ""), by_time(now, END)),
                limit=limit,
                keys_only=True,
            )
        ):
            items = await self._table.get_many(keys_of(page.items))
            found += [one for one in decode_intact(_read, items.values()) if _is_due(one, now)]
            if len(found) >= limit:
                break
        found.sort(key=lambda delivery: delivery.due_at)
        return found[:limit]

    async def drop_old_deliveries(self, *, before: int, limit: int) -> int:
        dropped: list[Key] = []

        async def drop(key: Key) -> None:
            # The index lags: the condition judges the item as it is.
            part = self._table.delete_part(
                key,
                condition="#status <> :pending AND updated_at < :before",
                pending=str(DeliveryStatus.PENDING),
                before=before,
            )
            try:
                if await self._write([part, self._table.delete_part(_mark_of(key))]):
                    dropped.append(key)
            except UnreadableRow:
                return

        async for page in self._table.pages(
            Query(
                ENDED_DELIVERIES,
                index=BY_DISPATCH,
                between=(by_time(0, ""), by_time(before - 1, END)),
                limit=limit,
                keys_only=True,
            )
        ):
            keys = [key for key in keys_of(page.items) if _is_delivery(key)]
            await for_each(drop, keys[: limit - len(dropped)], limit=SIDE_BY_SIDE)
            if len(dropped) >= limit:
                break
        return len(dropped)

    async def _write(self, parts: Sequence[dict[str, Any]]) -> bool:
        """Write a transaction; return False if a condition was not met."""
        try:
            await self._table.transact(parts, token=self._table.clock.new_id())
        except AwsRefused as refused:
            if not refused.is_condition:
                raise
            return False
        return True

    async def _listed(self, wanted: DeliveryFilter, limit: int) -> AsyncIterator[list[Item]]:
        """Read deliveries that may be wanted, newest first, page by page."""
        floor, before = _floor(wanted.since), wanted.before or END
        if floor < before:
            async for page in self._pages(_query(wanted, floor, before), limit):
                yield await self._items(page) if wanted.job_id is not None else page.items
        if not floor:
            return
        marks = Query(
            late_delivery_key(wanted.caller, "").pk,
            between=(
                late_delivery_key("", "").sk,
                late_delivery_key("", min(floor, before)).sk,
            ),
            where=RowFilter("created_at >= :since", {"since": wanted.since}),
            forward=False,
            keys_only=True,
        )
        async for page in self._pages(marks, limit):
            yield await self._items(page)

    async def _pages(self, query: Query, size: int) -> AsyncIterator[Page]:
        """Read a query to its end; each page reads twice as much as the one before."""
        while True:
            page = await self._table.page(replace(query, limit=size))
            yield page
            if page.last is None:
                return
            query, size = replace(query, start=page.last), min(2 * size, MOST_READ)

    async def _items(self, page: Page) -> list[Item]:
        """Read the deliveries of index entries or marks strongly, in the same order."""
        keys = [_delivery_of(key) for key in keys_of(page.items)]
        items = await self._table.get_many(keys)
        return [items[key] for key in keys if key in items]


async def drop_deliveries_of(table: Table, caller: str, job_id: str) -> None:
    """Remove every delivery of a caller's job."""
    async for page in table.pages(Query(deliveries_of(job_id), index=BY_OWNER, keys_only=True)):
        keys = [key for key in keys_of(page.items) if key.pk == delivery_key(caller, "").pk]
        await table.delete_many([*keys, *map(_mark_of, keys)])


def new_delivery_item(delivery: Delivery) -> Item:
    """Make the item of a new delivery."""
    return {
        "shape": ROW_SHAPE,
        "job_id": delivery.job_id,
        "run_id": delivery.run_id,
        "created_at": delivery.created_at,
        "gsi1pk": deliveries_of(delivery.job_id),
        "gsi1sk": delivery.delivery_id,
        **_changing(delivery, ""),
    }


@decodes_row
def _read(item: Item) -> Delivery:
    return _record.decode(item["delivery"])


def _changing(delivery: Delivery, text: str) -> dict[str, PlaceholderValue]:
    """Return the attributes that a change rewrites; `text` is the record as stored, "" for a new
    one."""
    if delivery.status is DeliveryStatus.PENDING:
        partition, instant = DELIVERIES, delivery.due_at
    else:
        partition, instant = ENDED_DELIVERIES, delivery.updated_at
    return {
        "delivery": merge_json(text, delivery),
        "status": str(delivery.status),
        "updated_at": delivery.updated_at,
        "version": delivery.version,
        "gsi2pk": partition,
        "gsi2sk": by_time(instant, delivery.delivery_id),
    }


def _is_due(delivery: Delivery, now: int) -> bool:
    is_leased = now < delivery.leased_until <= now + LONGEST_LEASE
    return delivery.status is DeliveryStatus.PENDING and delivery.due_at <= now and not is_leased


def _is_late(delivery: Delivery) -> bool:
    """Return whether a list from the instant of the delivery on would not find it by its id."""
    return delivery.delivery_id < _floor(delivery.created_at)


def _floor(since: int) -> str:
    """Return an id below those of all deliveries made at `since` or later, but for late ones."""
    instant = since - LATE
    return "" if instant <= 0 else str(ULID.from_bytes(instant.to_bytes(6) + bytes(10)))


def _query(wanted: DeliveryFilter, floor: str, before: str) -> Query:
    """Return the query of the deliveries with an id from `floor` to `before`."""
    conditions: list[str] = []
    values: dict[str, PlaceholderValue] = {}
    if wanted.status is not None:
        conditions.append("#status = :status")
        values["status"] = str(wanted.status)
    if wanted.job_id is not None:
        return Query(
            deliveries_of(wanted.job_id),
            index=BY_OWNER,
            between=(floor or BEGIN, before),
            where=RowFilter(" AND ".join(conditions), values),
            forward=False,
            keys_only=True,
        )
    low, high = delivery_key(wanted.caller, floor), delivery_key(wanted.caller, before)
    conditions.append("created_at >= :since")
    values["since"] = wanted.since
    return Query(
        low.pk,
        between=(low.sk, high.sk),
        where=RowFilter(" AND ".join(conditions), values),
        forward=False,
        known_only=True,
    )


def _is_wanted(delivery: Delivery, wanted: DeliveryFilter) -> bool:
    return (
        delivery.caller == wanted.caller
        and wanted.job_id in (None, delivery.job_id)
        and wanted.status in (None, delivery.status)
        and delivery.created_at >= wanted.since
        and (wanted.until is None or delivery.created_at < wanted.until)
        and (wanted.before is None or delivery.delivery_id < wanted.before)
    )


def _is_delivery(key: Key) -> bool:
    return _delivery_of(key) == key


def _delivery_of(key: Key) -> Key:
    """Return the key of a delivery from its own or its mark's."""
    return Key(key.pk, delivery_key("", key.sk.partition("#")[2]).sk)


def _mark_of(key: Key) -> Key:
    """Return the key of a delivery's mark from the delivery's."""
    return Key(key.pk, late_delivery_key("", key.sk.partition("#")[2]).sk)
