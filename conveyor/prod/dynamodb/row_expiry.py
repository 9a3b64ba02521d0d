"""The time to live of settled task rows.

A row gets it with the write that ends its task: the time that its run may be kept if it ended then,
and SPARE_DAYS. So DynamoDB removes the rows of runs that retention has deleted, at no cost.
`RowExpiry` knows it for the runs of this process. `RowStamps` gives the rows of a run that lasts
long, or is drawn on for long, a later one before they could go.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from cachetools import LRUCache

from conveyor.aio.concurrency import for_each
from conveyor.aio.resilience import log_and_continue
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.client import (
    Plain,
    RowFilter,
    Table,
    UnreadableRow,
    keys_of,
    row_time_to_live,
)
from conveyor.prod.dynamodb.run_reads import MOST_REMEMBERED, RunReads
from conveyor.prod.dynamodb.run_rows import DynamoRunRows, RunPlace, RunRow, StampPosition
from conveyor.prod.dynamodb.schema import Key
from conveyor.prod.dynamodb.task_rows import last_scanned_index, query_after

_DAY = 86_400_000
STAMPED_AFTER = 30 * _DAY
"""Milliseconds after which the rows of a run that has not ended are stamped anew: two days before
the first of them could go too early."""
ROUNDED_BY = _DAY
"""Milliseconds by which rows may differ in the instant of their stamp. A stamping that begins anew
leaves those alone that the one before reached."""
MOST_STAMPED = 10_000
"""Rows read by one step of stamping, about."""

SET_EXPIRY = "#ttl = :time_to_live"
"""The assignment of a time to live in an update."""

_log = logging.getLogger("conveyor.records")


def expiry_values(time_to_live: int | None) -> dict[str, Plain]:
    """Return the values of SET_EXPIRY; none without a time to live."""
    return {} if time_to_live is None else {"time_to_live": time_to_live}


class RowExpiry:
    """Knows how long the results of runs stay, from rows of runs seen before. Belongs to one event
    loop."""

    def __init__(self, table: Table, reads: RunReads) -> None:
        self._table = table
        self._reads = reads
        self._result_days: LRUCache[str, int] = LRUCache(MOST_REMEMBERED)

    def note(self, row: RunRow) -> None:
        """Note a run that was just read."""
        self._result_days[row.run.run_id] = row.result_ttl_days

    async def time_to_live(self, place: RunPlace, *, now: int) -> int | None:
        """Return the time to live of a row that ends now; None if rows are kept for ever."""
        if not self._table.row_days:
            return None
        days = self._result_days.get(place.run_id)
        if days is None:
            row = await self._reads.read_fresh(place)
            # The rows of a run that is gone are on their way out.
            days = 0 if row is None else row.result_ttl_days
            self._result_days[place.run_id] = days
        return row_time_to_live(self._table, days, now=now)


class _Step(NamedTuple):
    """The rows that one step has read, and the end of a stamping."""

    read: int
    is_last: bool


class RowStamps:
    """Gives settled rows of long runs a later time to live, step by step.

    The position reached is on the run's row, a write for each page of rows: whoever sweeps next
    goes on there.
    """

    def __init__(self, records: DynamoRunRows) -> None:
        self._records = records
        self._table = records.table
        self._waiting: dict[Key, tuple[RunPlace, int]] = {}

    def check(self, row: RunRow, *, at: int) -> None:
        """Note a run that is kept as if it ended at `at`, if its rows might go before it."""
        if at - row.rows_stamped_at >= STAMPED_AFTER:
            self._waiting.setdefault(row.place.key, (row.place, at))

    async def go_on(self) -> None:
        """Stamp about MOST_STAMPED rows of the runs noted, the first one first."""
        left = MOST_STAMPED
        for key, (place, at) in list(self._waiting.items()):
            if left <= 0:
                return

            async def step(place: RunPlace = place, at: int = at, most: int = left) -> _Step:
                return await self._step(place, at, most)

            done = await log_and_continue(_log, f"stamping rows of run {place.run_id} failed", step)
            left -= 0 if done is None else done.read
            if done is None or done.is_last:
                # What failed is noted again by the next look at all runs.
                del self._waiting[key]

    async def _step(self, place: RunPlace, at: int, most: int) -> _Step:
        """Stamp rows until about `most` were read."""
        try:
            row = await self._records.read_at(place)
        except UnreadableRow:
            row = None
        if row is None or row.expired or at - row.rows_stamped_at < STAMPED_AFTER:
            return _Step(0, is_last=True)
        reached = row.stamping
        # A position that was written late may be of a stamping that has ended.
        if reached is None or reached.at - row.rows_stamped_at < STAMPED_AFTER:
            reached = StampPosition(at, 0, -1)
        stamp = _Stamp.of(self._table, row, reached.at)
        read = 0
        while read < most:
            shard, after = reached.shard, reached.after
            limit = min(most - read, 1_000)
            page = await query_after(
                self._table, place, shard, after, where=stamp.older, limit=limit, keys_only=True
            )
            await for_each(lambda key: self._write(key, stamp), keys_of(page.items), limit=16)
            read += max(page.read, 1)
            if page.last is not None:
                reached = reached._replace(after=last_scanned_index(page, after))
            elif shard + 1 < place.shards.count:
                reached = reached._replace(shard=shard + 1, after=-1)
            else:
                await self._note_stamped(place, reached.at)
                return _Step(read, is_last=True)
            await self._update(
                place.key,
                "SET stamping = :reached",
                "attribute_exists(pk)",
                {"reached": [*reached]},
            )
        return _Step(read, is_last=False)

    async def _write(self, key: Key, stamp: _Stamp) -> None:
        await self._update(key, stamp.update, "attribute_exists(#ttl)", stamp.values)

    async def _note_stamped(self, place: RunPlace, at: int) -> None:
        # Some rows may have an older stamp, by the rounding.
        await self._update(
            place.key,
            "SET rows_stamped_at = :at REMOVE stamping",
            "attribute_exists(pk)",
            {"at": at - ROUNDED_BY},
        )

    async def _update(
        self, key: Key, update: str, condition: str, values: Mapping[str, Plain]
    ) -> None:
        """Write an item unless it is gone."""
        try:
            await self._table.update(key, update, condition=condition, **values)
        except AwsRefused as refused:
            if not refused.is_condition:
                raise


@dataclass(frozen=True, slots=True)
class _Stamp:
    """A later time to live, and the rows that need it."""

    update: str
    values: dict[str, Plain]
    older: RowFilter

    @classmethod
    def of(cls, table: Table, row: RunRow, at: int) -> _Stamp:
        """Make the stamp of a run's rows as if they ended at `at`. Where rows are kept for ever,
        those that have a time to live lose it."""
        ends = row_time_to_live(table, row.result_ttl_days, now=at)
        if ends is None:
            return cls("REMOVE #ttl", {}, RowFilter("attribute_exists(#ttl)", {}))
        older = RowFilter("#ttl < :least", {"least": ends - ROUNDED_BY // 1_000})
        return cls(f"SET {SET_EXPIRY}", expiry_values(ends), older)
