"""What the rows of a run say: the truth that its counters are a cache of.

Rows are counted page by page while others may write. What makes that safe: the counts are written
only if no addition, and no change of the run, came between; and with them the epoch is raised, so
that additions for rows that moved before it was known are refused, whether they were counted or
not. Whoever is refused counts again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, NamedTuple

import msgspec

from conveyor.aio.concurrency import side_by_side
from conveyor.domain.ids import task_index
from conveyor.domain.model import RunStats, RunStatus, Spend, TaskFailure, TaskStatus
from conveyor.domain.states import LIVE_RUN_STATES, live_run_status
from conveyor.prod.dynamodb.items import Item, changed_too_often
from conveyor.prod.dynamodb.keys import task_partition, task_sort_key
from conveyor.prod.dynamodb.places import Place
from conveyor.prod.dynamodb.run_items import REASON, RunRow, counters
from conveyor.prod.dynamodb.run_records import TRIES, Change, RunMoved, RunRecords
from conveyor.prod.dynamodb.shapes import whole

MOST_SEQUENCES = 200
"""Processes whose last number a run's row may hold. Where there are more a recount forgets them
all, also if the counters are right: no addition of the epoch before is taken any more."""

_NAMES = ("task_id", "status", "failure", "events", "claimed_until")


class Recounted(NamedTuple):
    """A run after it was recounted, None where it is gone. `done` is False where it could not be
    recounted yet, because a task of it is being worked or its rows are still being written."""

    row: RunRow | None
    done: bool


async def recount(records: RunRecords, run_id: str, *, now: int) -> RunRow | None:
    """Set a run's counters to what its rows say where they disagree, or where too many processes
    have counted, and let its status follow; the row then, None where it is gone.

    A run that is ingesting or deleted, or that has a task under a live claim, is left as it is.
    Raises ConveyorError(unavailable) where the run changes faster than it is counted, Damaged where
    one of its rows cannot be counted.
    """
    place = await records.places.find(run_id)
    return None if place is None else (await recount_at(records, place, now=now)).row


async def recount_at(records: RunRecords, place: Place, *, now: int) -> Recounted:
    """`recount` by a run's place."""
    for _ in range(TRIES):
        row = await records.read_at(place)
        if row is None or row.run.status is RunStatus.DELETED:
            return Recounted(row, done=True)
        if row.run.ingesting:
            return Recounted(row, done=False)
        stats = await _count(records, row, now)
        if stats is None:
            return Recounted(row, done=False)
        try:
            if not _agree(stats, row.run.stats):
                row = await records.change(row, _correction(row, stats), now=now)
            elif is_crowded(row):
                # Nothing of the run itself has moved: it keeps its time.
                at = row.run.updated_at
                row = await records.change(row, _correction(row, stats), now=at)
        except RunMoved:
            continue
        return Recounted(await records.settle_status(row, now=now), done=True)
    raise changed_too_often()


def is_crowded(row: RunRow) -> bool:
    """Whether more processes have counted in a run than its row should hold, which each addition
    pays for."""
    return len(row.sequences) > MOST_SEQUENCES


class _LiveClaim(Exception):
    """A task is being worked."""


class _Money(msgspec.Struct, frozen=True):
    credits: int = 0
    cost: Decimal = Decimal(0)


class _Spent(msgspec.Struct, frozen=True):
    """What a recount wants to know of an event."""

    spend: _Money = _Money()


_spent = msgspec.json.Decoder(_Spent)


class _TaskRow(msgspec.Struct, frozen=True):
    """What a recount wants to know of a task's row."""

    task_id: str
    status: TaskStatus
    claimed_until: int
    events: list[str]
    failure: str = str(TaskFailure.OTHER)


class _Counted(NamedTuple):
    """What a row adds to a tally."""

    place: int
    row: _TaskRow
    spent: list[_Money]


@whole
def _read_counted(item: Item) -> _Counted:
    """Of a task's item. Raises Damaged."""
    row = msgspec.convert(item, _TaskRow)
    spent = [_spent.decode(text).spend for text in row.events]
    if not all(spend.cost.is_finite() for spend in spent):
        raise ValueError("not an amount of money")
    return _Counted(task_index(row.task_id), row, spent)


@dataclass(slots=True)
class _Tally:
    """Rows counted so far. Money is added up as the table itself does it: in decimal digits."""

    total: int = 0
    ended: dict[TaskStatus, int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    credits: int = 0
    cost: Decimal = Decimal(0)

    def add(self, counted: _Counted) -> None:
        self.total += 1
        status, reason = counted.row.status, counted.row.failure
        self.ended[status] = self.ended.get(status, 0) + 1
        if status is TaskStatus.FAILED:
            self.reasons[reason] = self.reasons.get(reason, 0) + 1
        for spend in counted.spent:
            self.credits += spend.credits
            self.cost += spend.cost

    def stats(self) -> RunStats:
        return RunStats(
            total=self.total,
            successful=self.ended.get(TaskStatus.SUCCESSFUL, 0),
            failed=self.ended.get(TaskStatus.FAILED, 0),
            failure_reasons=self.reasons,
            spend=Spend(self.credits, float(self.cost)),
        )


async def _count(records: RunRecords, row: RunRow, now: int) -> RunStats | None:
    """Count every shard at once; None where a task is under a live claim. Raises Damaged."""
    place, tally = row.place, _Tally()
    query: dict[str, Any] = {
        "begins_with": task_sort_key(place.run_id, ""),
        "projection": ", ".join(f"#{name}" for name in _NAMES),
    }

    async def count(shard: int) -> None:
        partition = task_partition(place.job_id, place.shards, shard)
        async for page in records.table.pages(partition, **query):
            for item in page.items:
                one = _read_counted(item)
                if one.row.status is TaskStatus.PROCESSING and one.row.claimed_until > now:
                    raise _LiveClaim
                # What is being added is not counted yet, nor what was reserved since this began.
                if one.place < row.run.next_index and row.holds(one.place):
                    tally.add(one)

    try:
        await side_by_side(count, range(place.shards.count))
    except _LiveClaim:
        return None
    return tally.stats()


def _agree(counted: RunStats, kept: RunStats) -> bool:
    """Whether nothing is to be corrected."""
    return msgspec.structs.replace(counted, spend=kept.spend) == kept and (
        counted.spend.credits == kept.spend.credits
        and math.isclose(counted.spend.cost, kept.spend.cost, rel_tol=1e-9, abs_tol=1e-9)
    )


def _correction(row: RunRow, stats: RunStats) -> Change:
    """Counts as they are written: with the epoch raised, unless an addition came between."""
    run = row.run
    status = None
    if run.status in LIVE_RUN_STATES:
        status = live_run_status(stats, job_closed=run.last_batch_received)
    gone = run.stats.failure_reasons.keys() - stats.failure_reasons.keys()
    return Change(
        status=None if status is run.status else status,
        sets={**counters(stats), "counter_epoch": row.counter_epoch + 1, "sequences": {}},
        removes=[f"{REASON}{reason}" for reason in sorted(gone)],
        condition="flushes = :seen_flushes AND counter_epoch = :seen_epoch",
        values={"seen_flushes": row.flushes, "seen_epoch": row.counter_epoch},
    )
