"""The outbox port on DynamoDB.

An entry is leased by one conditional write, which its token makes safe to repeat. The run is read
strongly after the lease. A run that ends later leaves `ended_at` on the leased entry, and giving
the lease back makes the entry due at that end.
"""

from __future__ import annotations

from typing import NamedTuple

from conveyor.domain.run_events import RunFinished
from conveyor.ports.outbox import CLOCKS_APART, LONGEST_LEASE, EntryKey, Outbox, OutboxEntry
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.client import (
    Item,
    Query,
    conflicting_item,
    decode_intact,
    decodes_row,
    keys_of,
)
from conveyor.prod.dynamodb.outbox_rows import (
    encode_run_event,
    read_entry_key,
    read_outbox_item,
)
from conveyor.prod.dynamodb.run_rows import DynamoRunRows
from conveyor.prod.dynamodb.schema import BY_DISPATCH, END, OUTBOX, by_time, notice_key

LEASE_HELD = "leased_until = :lease"
LEASE_FREE = (
    "due_at <= :now AND "
    "(attribute_not_exists(leased_until) OR leased_until <= :now OR leased_until > :most)"
)
NO_UNSENT_END = "(attribute_not_exists(ended_at) OR attribute_exists(ending))"


class DynamoOutbox(Outbox):
    """The outbox port. `leased_until` identifies a lease: no later one ends at the same instant."""

    def __init__(self, records: DynamoRunRows) -> None:
        self._records = records
        self._table = records.table

    async def due_entries(self, *, now: int, limit: int) -> list[EntryKey]:
        """Find due entries by index; the items, read strongly, tell which of them are leased. An
        entry that moves while its index is read is found twice, and counts as it was read last."""
        found: dict[EntryKey, _DueEntry] = {}
        async for page in self._table.pages(
            Query(
                OUTBOX,
                index=BY_DISPATCH,
                between=(by_time(0, ""), by_time(now, END)),
                limit=limit,
                keys_only=True,
            )
        ):
            items = await self._table.get_many(keys_of(page.items))
            entries = decode_intact(_read_due_entry, items.values())
            found |= {one.key: one for one in entries if one.is_due(now)}
            if len(found) >= limit:
                break
        return [one.key for one in sorted(found.values())[:limit]]

    async def lease_entry(self, key: EntryKey, *, now: int, lapses_at: int) -> OutboxEntry | None:
        token = self._table.clock.new_id()
        try:
            item = await self._table.update(
                notice_key(*key),
                "SET leased_until = :lapses_at, leased_by = :token",
                condition=LEASE_FREE,
                lapses_at=lapses_at,
                token=token,
                now=now,
                most=lapses_at + CLOCKS_APART,
            )
        except AwsRefused as refused:
            found = _refused_item(refused)
            if found is None or found.get("leased_by") != token:
                return None
            # The token is this call's own: an earlier try wrote it, and its answer was lost.
            item = found
        # Read after the lease: a later end finds the lease, and shows when it is given back.
        row = await self._records.read(key.run_id)
        if row is None:
            return read_outbox_item(item, None, 0)
        row = await self._records.with_late_status(row)
        return read_outbox_item(item, row.run, row.ended_at)

    async def fix_payload(self, entry: OutboxEntry, ending: RunFinished, *, now: int) -> bool:
        text = encode_run_event(ending)
        try:
            await self._table.update(
                notice_key(*entry.key),
                "SET ending = :ending, decided_at = :now",
                condition=f"{LEASE_HELD} AND attribute_not_exists(ending)",
                ending=text,
                now=now,
                lease=entry.lease,
            )
        except AwsRefused as refused:
            found = _refused_item(refused)
            # The same payload under the same lease is this call's own: its answer was lost.
            return (
                found is not None
                and found.get("leased_until") == entry.lease
                and found.get("ending") == text
            )
        return True

    async def reschedule_entry(self, entry: OutboxEntry, *, due_at: int, attempts: int) -> None:
        try:
            await self._release(
                entry, f"{LEASE_HELD} AND {NO_UNSENT_END}", due_at=due_at, attempts=attempts
            )
        except AwsRefused as refused:
            found = _refused_item(refused)
            if found is None or found.get("leased_until") != entry.lease:
                return
            ended_at: int = found["ended_at"]
            try:
                await self._release(entry, LEASE_HELD, due_at=ended_at, attempts=attempts)
            except AwsRefused as lost:
                _refused_item(lost)

    async def drop_entry(self, entry: OutboxEntry) -> None:
        try:
            await self._table.delete(
                notice_key(*entry.key), condition=LEASE_HELD, lease=entry.lease
            )
        except AwsRefused as refused:
            _refused_item(refused)

    async def _release(
        self, entry: OutboxEntry, condition: str, *, due_at: int, attempts: int
    ) -> None:
        await self._table.update(
            notice_key(*entry.key),
            "SET due_at = :due_at, attempts = :attempts, gsi2sk = :place "
            "REMOVE leased_until, leased_by",
            condition=condition,
            due_at=due_at,
            attempts=attempts,
            place=by_time(due_at, entry.run_id),
            lease=entry.lease,
        )


class _DueEntry(NamedTuple):
    """An entry's due time, key and lease."""

    due_at: int
    key: EntryKey
    leased_until: int

    def is_due(self, now: int) -> bool:
        """Return whether the entry can be leased."""
        return self.due_at <= now and not now < self.leased_until <= now + LONGEST_LEASE


@decodes_row
def _read_due_entry(item: Item) -> _DueEntry:
    return _DueEntry(int(item["due_at"]), read_entry_key(item), int(item.get("leased_until", 0)))


def _refused_item(refused: AwsRefused) -> Item | None:
    """Return the item that failed the condition. Raises any other refusal."""
    if not refused.is_condition:
        raise refused
    return conflicting_item(refused)
