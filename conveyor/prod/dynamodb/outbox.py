"""The outbox port on one DynamoDB table."""

from __future__ import annotations

from typing import NamedTuple

from conveyor.domain.run_events import RunFinished
from conveyor.ports.outbox import CLOCKS_APART, LONGEST_LEASE, OutboxEntry
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.client import Item, Query, condition_met, keys_of, readable, whole
from conveyor.prod.dynamodb.run_rows import DynamoRunRows, encode_run_event, read_outbox_item
from conveyor.prod.dynamodb.schema import BY_DISPATCH, END, OUTBOX, by_time, notice_key

HELD = "leased_until = :lease"
FREE = (
    "due_at <= :now AND "
    "(attribute_not_exists(leased_until) OR leased_until <= :now OR leased_until > :most)"
)
NOT_ENDED_UNTOLD = "(attribute_not_exists(ended_at) OR attribute_exists(ending))"


class DynamoOutbox:
    """The outbox port. A lease is known by its instant: no later one has the same."""

    def __init__(self, records: DynamoRunRows) -> None:
        self._records = records
        self._table = records.table

    async def due_entries(self, *, now: int, limit: int) -> list[str]:
        """The run ids of notices that are due by `now`, the longest due first.

        The index tells where to look, as late as it is; whether they are leased, the items do.
        """
        found: list[_Standing] = []
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
            notices = readable(_standing, items.values())
            found += [one for one in notices if one.is_due(now)]
            if len(found) >= limit:
                break
        found.sort()
        return [one.run_id for one in found[:limit]]

    async def lease_entry(self, run_id: str, *, now: int, lapses_at: int) -> OutboxEntry | None:
        """Take a notice for one delivery; None where it is not to be had."""
        token = self._table.clock.new_id()
        try:
            item = await self._table.update(
                notice_key(run_id),
                "SET leased_until = :lapses_at, leased_by = :token",
                condition=FREE,
                lapses_at=lapses_at,
                token=token,
                now=now,
                most=lapses_at + CLOCKS_APART,
            )
        except AwsRefused as refused:
            found = _met(refused)
            if found is None or found.get("leased_by") != token:
                return None
            # It was carried out, and its answer lost.
            item = found
        # Read from here on: an end that comes later finds the lease, and is seen when it is given
        # back.
        row = await self._records.read(run_id)
        run = None if row is None else (await self._records.shown(row)).run
        return read_outbox_item(item, run)

    async def fix_payload(self, notice: OutboxEntry, ending: RunFinished, *, now: int) -> bool:
        """Settle what is told; False where the lease was lost, or that was settled before."""
        text = encode_run_event(ending)
        try:
            await self._table.update(
                notice_key(notice.run_id),
                "SET ending = :ending, decided_at = :now",
                condition=f"{HELD} AND attribute_not_exists(ending)",
                ending=text,
                now=now,
                lease=notice.lease,
            )
        except AwsRefused as refused:
            found = _met(refused)
            # Its own, if it is the same under the same lease: only the answer was lost.
            return (
                found is not None
                and found.get("leased_until") == notice.lease
                and found.get("ending") == text
            )
        return True

    async def reschedule_entry(self, notice: OutboxEntry, *, due_at: int, attempts: int) -> None:
        """Give the lease back; due at `due_at`, or at its end where its run has ended untold."""
        try:
            await self._give_back(
                notice, f"{HELD} AND {NOT_ENDED_UNTOLD}", due_at=due_at, attempts=attempts
            )
        except AwsRefused as refused:
            found = _met(refused)
            if found is None or found.get("leased_until") != notice.lease:
                return
            ended_at: int = found["ended_at"]
            try:
                await self._give_back(notice, HELD, due_at=ended_at, attempts=attempts)
            except AwsRefused as lost:
                _met(lost)

    async def drop_entry(self, notice: OutboxEntry) -> None:
        """Remove a notice. Without effect where the lease was lost."""
        try:
            await self._table.delete(notice_key(notice.run_id), condition=HELD, lease=notice.lease)
        except AwsRefused as refused:
            _met(refused)

    async def _give_back(
        self, notice: OutboxEntry, condition: str, *, due_at: int, attempts: int
    ) -> None:
        await self._table.update(
            notice_key(notice.run_id),
            "SET due_at = :due_at, attempts = :attempts, gsi2sk = :place "
            "REMOVE leased_until, leased_by",
            condition=condition,
            due_at=due_at,
            attempts=attempts,
            place=by_time(due_at, notice.run_id),
            lease=notice.lease,
        )


class _Standing(NamedTuple):
    """When a notice is due, of which run, and until when it is leased."""

    due_at: int
    run_id: str
    leased_until: int

    def is_due(self, now: int) -> bool:
        """Whether it can be had."""
        return self.due_at <= now and not now < self.leased_until <= now + LONGEST_LEASE


@whole
def _standing(item: Item) -> _Standing:
    return _Standing(int(item["due_at"]), str(item["run_id"]), int(item.get("leased_until", 0)))


def _met(refused: AwsRefused) -> Item | None:
    """The item that a condition met. Raises any other refusal."""
    if not refused.is_condition:
        raise refused
    return condition_met(refused)
