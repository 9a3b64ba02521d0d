"""The deliveries port on DynamoDB: one item a delivery, in the partition of its caller.

The record is one JSON text, beside the attributes that conditions, filters and indexes use. Every
write is a transaction, for its token: a repetition after a lost answer writes nothing and succeeds,
whatever has happened to the item since. An index finds pending ones by their due time, and all
others by their last change. A mark beside the job lets strong reads find the deliveries of it.

Ids begin with the end of the run, so a list from an instant on ends soon before it. A delivery that
was made more than LATE after its run's end has one more mark, by which such a list finds it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from ulid import ULID

from conveyor.aio.concurrency import for_each
from conveyor.domain.deliveries import DeliveryStatus, EventDelivery
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
    BY_DISPATCH,
    DELIVERIES,
    END,
    ENDED_DELIVERIES,
    PARTITION_KEY,
    ROW_SHAPE,
    SORT_KEY,
    Key,
    by_time,
    delivery_key,
    delivery_mark_key,
    late_delivery_key,
)

LATE = 3_600_000
"""Milliseconds between a run's end and its delivery, from which the delivery has a mark."""
MOST_READ = 100
"""Deliveries that one query of a list reads."""
SIDE_BY_SIDE = 10
"""Deliveries removed at a time."""

_record = msgspec.json.Decoder(EventDelivery)


class DynamoDeliveries(Deliveries):
    """The deliveries port. `Deletion.purge_job` removes the deliveries of a job."""

    def __init__(self, table: Table) -> None:
        self._table = table

    async def get_delivery(self, caller: str, delivery_id: str) -> EventDelivery | None:
        item = await self._table.get(delivery_key(caller, delivery_id))
        return None if item is None else _read(item)

    async def list_deliveries(self, wanted: DeliveryFilter, *, limit: int) -> list[EventDelivery]:
        """Read pages until enough are found."""
        found: list[EventDelivery] = []
        async for items in self._listed(wanted, limit):
            found += [one for one in decode_intact(_read, items) if _is_wanted(one, wanted)]
            if len(found) >= limit:
                break
        return found[:limit]

    async def create_delivery(self, delivery: EventDelivery) -> bool:
        key = delivery_key(delivery.caller, delivery.delivery_id)
        item = new_delivery_item(delivery)
        mark = new_mark_item(delivery)
        parts = [
            self._table.put_part(key, item, condition="attribute_not_exists(pk)"),
            self._table.put_part(delivery_mark_key(delivery.job_id, delivery.delivery_id), mark),
        ]
        if _is_late(delivery):
            late = late_delivery_key(delivery.caller, delivery.delivery_id)
            parts.append(self._table.put_part(late, mark))
        return await self._write(parts)

    async def change_delivery(self, before: EventDelivery, after: EventDelivery) -> bool:
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

    async def due_deliveries(self, *, now: int, limit: int) -> list[EventDelivery]:
        """Find due deliveries by index; the items, read strongly, tell which are still due. An
        entry that moves while its index is read is found twice, and counts as it was read last."""
        found: dict[tuple[str, str], EventDelivery] = {}
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
            due = [one for one in decode_intact(_read, items.values()) if _is_due(one, now)]
            found |= {(one.caller, one.delivery_id): one for one in due}
            if len(found) >= limit:
                break
        return sorted(found.values(), key=lambda delivery: delivery.due_at)[:limit]

    async def drop_old_deliveries(self, *, before: int, limit: int) -> int:
        dropped: list[Key] = []

        async def drop(entry: Item) -> None:
            if await self._drop_old(entry, before):
                dropped.append(Key(entry[PARTITION_KEY], entry[SORT_KEY]))

        async for page in self._table.pages(
            Query(
                ENDED_DELIVERIES,
                index=BY_DISPATCH,
                between=(by_time(0, ""), by_time(before - 1, END)),
                limit=limit,
            )
        ):
            await for_each(drop, page.items[: limit - len(dropped)], limit=SIDE_BY_SIDE)
            if len(dropped) >= limit:
                break
        return len(dropped)

    async def _drop_old(self, entry: Item, before: int) -> bool:
        """Remove the delivery of an index entry with its marks; return False if it is not old, or
        unreadable. The index lags: the condition judges the item as it is."""
        try:
            key, job_id = _read_entry(entry)
            part = self._table.delete_part(
                key,
                condition="#status <> :pending AND updated_at < :before",
                pending=str(DeliveryStatus.PENDING),
                before=before,
            )
            late = Key(key.pk, late_delivery_key("", _id_of(key)).sk)
            marks = [late, delivery_mark_key(job_id, _id_of(key))]
            return await self._write([part, *map(self._table.delete_part, marks)])
        except UnreadableRow:
            return False

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
        before = wanted.before or END
        if wanted.job_id is not None:
            marks = delivery_mark_key(wanted.job_id, "")
            async for items in self._marked(marks, before, wanted, limit):
                yield items
            return
        floor = _floor(wanted.since)
        if floor < before:
            async for page in self._pages(_query(wanted, floor, before), limit):
                yield page.items
        if floor:
            marks = late_delivery_key(wanted.caller, "")
            async for items in self._marked(marks, min(floor, before), wanted, limit):
                yield items

    async def _marked(
        self, marks: Key, before: str, wanted: DeliveryFilter, limit: int
    ) -> AsyncIterator[list[Item]]:
        """Read the deliveries of marks strongly, newest first; `marks` is the prefix of their
        keys."""
        query = Query(
            marks.pk,
            between=(marks.sk, f"{marks.sk}{before}"),
            where=RowFilter(
                "caller = :caller AND created_at >= :since",
                {"caller": wanted.caller, "since": wanted.since},
            ),
            forward=False,
            keys_only=True,
        )
        async for page in self._pages(query, limit):
            keys = [delivery_key(wanted.caller, _id_of(mark)) for mark in keys_of(page.items)]
            items = await self._table.get_many(keys)
            yield [items[key] for key in keys if key in items]

    async def _pages(self, query: Query, size: int) -> AsyncIterator[Page]:
        """Read a query to its end; each page reads twice as much as the one before."""
        while True:
            page = await self._table.page(replace(query, limit=size))
            yield page
            if page.last is None:
                return
            query, size = replace(query, start=page.last), min(2 * size, MOST_READ)


async def drop_deliveries_of(table: Table, caller: str, job_id: str) -> None:
    """Remove every delivery of a job, found by strong reads; the marks last, so that a repetition
    ends what was cut off."""
    mark = delivery_mark_key(job_id, "")
    async for page in table.pages(Query(mark.pk, begins_with=mark.sk, keys_only=True)):
        marks = keys_of(page.items)
        ids = [_id_of(one) for one in marks]
        await table.delete_many([delivery_key(caller, one) for one in ids])
        await table.delete_many([late_delivery_key(caller, one) for one in ids])
        await table.delete_many(marks)


def new_delivery_item(delivery: EventDelivery) -> Item:
    """Make the item of a new delivery."""
    return {
        "shape": ROW_SHAPE,
        "job_id": delivery.job_id,
        "run_id": delivery.run_id,
        "created_at": delivery.created_at,
        **_changing(delivery, ""),
    }


def new_mark_item(delivery: EventDelivery) -> Item:
    """Make the marks of a new delivery: beside its job, and if it is late."""
    return {"shape": ROW_SHAPE, "caller": delivery.caller, "created_at": delivery.created_at}


@decodes_row
def _read(item: Item) -> EventDelivery:
    return _record.decode(item["delivery"])


def _changing(delivery: EventDelivery, text: str) -> dict[str, PlaceholderValue]:
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


def _is_due(delivery: EventDelivery, now: int) -> bool:
    is_leased = now < delivery.leased_until <= now + LONGEST_LEASE
    return delivery.status is DeliveryStatus.PENDING and delivery.due_at <= now and not is_leased


def _is_late(delivery: EventDelivery) -> bool:
    """Return whether a list from the instant of the delivery on would not find it by its id."""
    return delivery.delivery_id < _floor(delivery.created_at)


def _floor(since: int) -> str:
    """Return an id below those of all deliveries made at `since` or later, but for late ones."""
    instant = since - LATE
    return "" if instant <= 0 else str(ULID.from_bytes(instant.to_bytes(6) + bytes(10)))


def _query(wanted: DeliveryFilter, floor: str, before: str) -> Query:
    """Return the query of a caller's deliveries with an id from `floor` to `before`."""
    condition = "created_at >= :since"
    values: dict[str, PlaceholderValue] = {"since": wanted.since}
    if wanted.status is not None:
        condition += " AND #status = :status"
        values["status"] = str(wanted.status)
    low, high = delivery_key(wanted.caller, floor), delivery_key(wanted.caller, before)
    return Query(
        low.pk,
        between=(low.sk, high.sk),
        where=RowFilter(condition, values),
        forward=False,
        known_only=True,
    )


def _is_wanted(delivery: EventDelivery, wanted: DeliveryFilter) -> bool:
    return (
        delivery.caller == wanted.caller
        and wanted.job_id in (None, delivery.job_id)
        and wanted.status in (None, delivery.status)
        and delivery.created_at >= wanted.since
        and (wanted.until is None or delivery.created_at < wanted.until)
        and (wanted.before is None or delivery.delivery_id < wanted.before)
    )


@decodes_row
def _read_entry(entry: Item) -> tuple[Key, str]:
    """Return the key of a delivery, and its job, from an entry of the index. Raises DamagedRow."""
    return Key(entry[PARTITION_KEY], entry[SORT_KEY]), str(entry["job_id"])


def _id_of(key: Key) -> str:
    """Return the delivery's id from the key of it or of a mark."""
    return key.sk.partition("#")[2]
