"""Recounts: the counters of a run, counted anew from its task rows.

A recount first compares the rows with the counters as they are, and changes nothing if they agree.
Else it puts its token on the run's row, which keeps new items of the epoch from appearing, closes
the items there are, and counts the rows again: no process can count in between. One write then sets
the base and raises the epoch. A process whose item was closed drops what it could not write, since
the recount may have counted it, and has the run counted once more.

If a task is found in work after all, or the count fails, nothing was counted: the next epoch begins
with the sum of the closed items as its base, `carried`, and processes go on counting there.

A fold moves into the base what processes have counted that have not written for long. One
transaction adds the values of items to the base, raises the number of folds on the run's row, and
marks the items with that number. A reader whose row has that number leaves them out; one that read
the row before counts them. A process that comes back finds its item closed, and goes on in the next
with what the item lacks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import NamedTuple

import anyio
import msgspec

from conveyor.aio.concurrency import for_each
from conveyor.aio.resilience import log_and_continue
from conveyor.domain.failure_groups import MOST_GROUPS, MOST_SAMPLES
from conveyor.domain.ids import task_index
from conveyor.domain.model import RunStats, RunStatus, Spend, TaskFailure, TaskStatus
from conveyor.domain.result_shape import ResultShape, ShapeCounter
from conveyor.domain.states import LIVE_RUN_STATES, live_run_status
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.client import (
    Item,
    Plain,
    Query,
    Table,
    contention_error,
    decodes_row,
)
from conveyor.prod.dynamodb.counter_sums import (
    NOTHING,
    GroupCount,
    ProcessItem,
    encode_values,
    process_items,
    sum_values,
)
from conveyor.prod.dynamodb.failure_groups import FailureSample, note_failures
from conveyor.prod.dynamodb.run_rows import (
    COUNTED,
    RECOUNTING,
    TRIES,
    Change,
    DynamoRunRows,
    RunPlace,
    RunRow,
    RunVersionConflict,
    counters,
)
from conveyor.prod.dynamodb.schema import TIME_TO_LIVE, task_partition, task_sort_key
from conveyor.prod.dynamodb.task_rows import (
    BodyKind,
    EventSpend,
    read_body_kind,
    read_problem,
    read_spends,
)

KEPT_FOR = 2 * 86_400
"""Seconds that an item stays after its values have moved to the row: a process that was suspended
reads there what it had counted."""

_TALLY_FIELDS = (
    "task_id",
    "status",
    "updated_at",
    "claimed_until",
    "events",
    "shed_spend",
    "result",
    "error",
    "failure",
    "failure_group",
    "source_run_id",
)
_log = logging.getLogger("conveyor.counters")


class RecountResult(NamedTuple):
    """A run after a recount; None if it is gone. `done` is False if the recount has to wait for a
    live claim or for the end of the ingestion."""

    row: RunRow | None
    done: bool


async def recount(records: DynamoRunRows, run_id: str, *, now: int) -> RunRow | None:
    """Set a run's counters to what its rows say if they disagree, and update its status. Return the
    row afterwards; None if it is gone.

    Leaves a run alone that ingests, is deleted or has a live claim. Raises
    ConveyorError(unavailable) if the run changes faster than it is counted, DamagedRow for a row
    that cannot be counted.
    """
    place = await records.places.find(run_id)
    return None if place is None else (await recount_at(records, place, now=now)).row


async def recount_at(records: DynamoRunRows, place: RunPlace, *, now: int) -> RecountResult:
    """Recount a run by its place; see `recount`."""
    recounting = _Recount(records, place, records.table.clock.new_id())
    try:
        result = await recounting.run(now)
    except BaseException:
        with anyio.CancelScope(shield=True):
            await log_and_continue(
                _log, f"ending the recount of run {place.run_id} failed", recounting.abandon
            )
        raise
    if result.done:
        return result
    await recounting.abandon()
    return RecountResult(await records.read_at(place), done=False)


class _Recount:
    """One recount, under its token. `is_open`: some recount has closed items, and not opened the
    next epoch yet. `has_closed`: this one has closed all of them since its token came on the row.
    """

    def __init__(self, records: DynamoRunRows, place: RunPlace, token: str) -> None:
        self._records = records
        self._place = place
        self._token = token
        self._is_open = False
        self._has_closed = False

    async def run(self, now: int) -> RecountResult:
        """Count until the rows agree with the counters, or the counters are set."""
        records = self._records
        for _ in range(TRIES):
            bare = await records.read_bare(self._place)
            if bare is None or bare.run.status is RunStatus.DELETED:
                return RecountResult(bare, done=True)
            self._is_open = bool(bare.recounting)
            row = await records.summed_anew(bare)
            tally = None if row.run.ingesting else await _tally_rows(records, row, now)
            if tally is None:
                return RecountResult(row, done=False)
            try:
                if self._has_all(row):
                    row = await _write(records, row, tally, now=now)
                    self._is_open = False
                elif row.recounting or not _counters_match(tally, row):
                    await self._close(row)
                    continue
            except RunVersionConflict:
                continue
            return RecountResult(await records.write_late_status(row, now=now), done=True)
        raise contention_error()

    async def abandon(self) -> None:
        """Let processes go on counting, if items are closed; nothing was counted."""
        for _ in range(TRIES):
            bare = await self._records.read_bare(self._place) if self._is_open else None
            if bare is None or not bare.recounting:
                return
            row = await self._records.summed_anew(bare)
            try:
                # This recount, or another one, may have been cut off before all items were closed.
                if not self._has_all(row):
                    await self._close(row)
                    continue
                change = _new_base(row, counters(row.run.stats, row.groups), carried=True)
                await _next_epoch(self._records, row, change, now=row.run.updated_at)
            except RunVersionConflict:
                continue
            return
        raise contention_error()

    async def _close(self, row: RunRow) -> None:
        """Keep new items from appearing, then close those there are. Takes over from a recount that
        was cut off. Raises RunVersionConflict."""
        # The run itself has not changed, so it keeps its time.
        begun = Change(sets={RECOUNTING: self._token})
        # The write may arrive although its answer is lost.
        self._is_open, self._has_closed = True, False
        row = await self._records.change(row, begun, now=row.run.updated_at)
        table = self._records.table

        async def close(item: ProcessItem) -> None:
            await _update_item(table, item, "SET closed = :yes", yes=True)

        items = await process_items(table, row.run.run_id, row.parts, row.counter_epoch)
        await for_each(close, [item for item in items if not item.closed])
        self._has_closed = True

    def _has_all(self, row: RunRow) -> bool:
        """Tell whether all items of a run's epoch are closed under this token."""
        return row.recounting == self._token and self._has_closed


async def _write(records: DynamoRunRows, row: RunRow, tally: _Tally, *, now: int) -> RunRow:
    """Set the counters from the rows, and open the next epoch. Raises RunVersionConflict."""
    await tally.note_new_groups(records.table, row)
    run, stats = row.run, tally.stats()
    status = None
    if run.status in LIVE_RUN_STATES:
        status = live_run_status(stats, job_closed=run.last_batch_received)
    change = _new_base(row, counters(stats, tally.group_counts(row)), carried=False)
    return await _next_epoch(
        records, row, change._replace(status=None if status is run.status else status), now=now
    )


def _new_base(row: RunRow, counted: Item, *, carried: bool) -> Change:
    """Make the change that sets the base to these counters and opens the next epoch."""
    base = row.base.stats(total=row.run.stats.total, inherited=row.run.stats.inherited)
    gone = counters(base, row.base.groups).keys() - counted.keys()
    sets: dict[str, Plain] = {
        **counted,
        "counter_epoch": row.counter_epoch + 1,
        "carried": carried,
    }
    # Nobody has counted in the next epoch yet.
    if not row.live:
        sets[COUNTED] = encode_values(NOTHING)
    return Change(
        sets=sets,
        removes=[*sorted(gone), RECOUNTING],
        condition=f"{RECOUNTING} = :token AND counter_epoch = :seen_epoch",
        values={"token": row.recounting, "seen_epoch": row.counter_epoch},
    )


async def _next_epoch(records: DynamoRunRows, row: RunRow, change: Change, *, now: int) -> RunRow:
    if change.carries_sum:
        change = change._replace(sets={**change.sets, COUNTED: encode_values(NOTHING)})
    after = await records.change(row, change, now=now)
    old = await process_items(records.table, row.run.run_id, row.parts, row.counter_epoch)
    expires_at = records.table.clock.now() // 1_000 + KEPT_FOR

    async def retire(item: ProcessItem) -> None:
        await _update_item(
            records.table, item, f"SET #{TIME_TO_LIVE} = :expires_at", expires_at=expires_at
        )

    await for_each(retire, old)
    return after


async def _update_item(table: Table, item: ProcessItem, update: str, **values: Plain) -> None:
    try:
        await table.update(item.key, update, condition="attribute_exists(pk)", **values)
    except AwsRefused as refused:
        if not refused.is_condition:
            raise


class _LiveClaimFound(Exception):
    """A task of the run is being worked."""


class _TaskRow(msgspec.Struct, frozen=True):
    """The attributes of a task row that a recount reads."""

    task_id: str
    status: TaskStatus
    updated_at: int
    claimed_until: int
    events: list[str]
    shed_spend: str | None = None
    result: str | None = None
    error: str | None = None
    failure: TaskFailure = TaskFailure.OTHER
    failure_group: str | None = None
    source_run_id: str | None = None


class _TallyEntry(NamedTuple):
    """The share of one row in a tally."""

    place: int
    row: _TaskRow
    spent: list[EventSpend]
    body: BodyKind | None


@decodes_row
def _read_tally_entry(item: Item) -> _TallyEntry:
    """Decode the share of a task's item. Raises DamagedRow."""
    row = msgspec.convert(item, _TaskRow)
    spent = read_spends(row.events, row.shed_spend)
    body = (
        read_body_kind(row.result) if row.result and row.status is TaskStatus.SUCCESSFUL else None
    )
    return _TallyEntry(task_index(row.task_id), row, spent, body)


@dataclass(slots=True)
class _TalliedGroup:
    """The failed rows of one group: their number, the first few as they came, and the latest
    instant."""

    count: int = 0
    last_at: int = 0
    samples: list[_TaskRow] = field(default_factory=list)

    def add(self, row: _TaskRow) -> None:
        self.count += 1
        self.last_at = max(self.last_at, row.updated_at)
        if len(self.samples) < MOST_SAMPLES:
            self.samples.append(row)


@dataclass(slots=True)
class _Tally:
    """The rows counted so far. Adds up money in decimal digits, as DynamoDB does.

    Groups and media types that the run counts by name keep their place; rows of others get one
    while there is room. `groups` holds all those that the run keeps, also without a row.
    """

    groups: dict[str, _TalliedGroup]
    shape: ShapeCounter
    total: int = 0
    inherited: int = 0
    ended: dict[TaskStatus, int] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    credits: int = 0
    cost: Decimal = Decimal(0)

    @classmethod
    def of(cls, row: RunRow) -> _Tally:
        """Begin a tally of a run's rows."""
        names = dict.fromkeys(row.run.stats.shape.types, 0)
        return cls(
            {group_id: _TalliedGroup() for group_id in row.groups},
            ShapeCounter.of(ResultShape(types=names)),
        )

    def add(self, counted: _TallyEntry) -> None:
        self.total += 1
        row = counted.row
        self.ended[row.status] = self.ended.get(row.status, 0) + 1
        self.inherited += row.source_run_id is not None
        if counted.body is not None:
            self.shape.add(counted.body.size, counted.body.content_type)
        if row.status is TaskStatus.FAILED:
            self.reasons[row.failure] = self.reasons.get(row.failure, 0) + 1
            self._add_to_group(row)
        for spend in counted.spent:
            self.credits += spend.credits
            self.cost += spend.cost

    def _add_to_group(self, row: _TaskRow) -> None:
        group_id = row.failure_group
        if group_id is None:
            return
        if group_id not in self.groups and len(self.groups) < MOST_GROUPS:
            self.groups[group_id] = _TalliedGroup()
        if group_id in self.groups:
            self.groups[group_id].add(row)

    def stats(self) -> RunStats:
        shape = self.shape.shape()
        types = {name: count for name, count in shape.types.items() if count}
        return RunStats(
            total=self.total,
            successful=self.ended.get(TaskStatus.SUCCESSFUL, 0),
            failed=self.ended.get(TaskStatus.FAILED, 0),
            failure_reasons=self.reasons,
            spend=Spend(self.credits, float(self.cost)),
            inherited=self.inherited,
            shape=ResultShape(shape.sizes, types),
        )

    def group_counts(self, row: RunRow) -> dict[str, GroupCount]:
        """Return the groups that have rows. Those that the run keeps have their latest failure from
        there, as an inherited row has the time of its copy."""
        return {
            group_id: GroupCount(
                group.count,
                row.groups[group_id].last_at if group_id in row.groups else group.last_at,
            )
            for group_id, group in self.groups.items()
            if group.count
        }

    async def note_new_groups(self, table: Table, row: RunRow) -> None:
        """Write the items of the groups that the run does not keep yet."""
        for group_id in self.groups.keys() - row.groups.keys():
            failures = [
                FailureSample.of(one.task_id, one.failure, read_problem(one.error), one.updated_at)
                for one in self.groups[group_id].samples
                if one.error is not None
            ]
            if failures:
                await note_failures(table, row.run.run_id, failures, begins=True)


async def _tally_rows(records: DynamoRunRows, row: RunRow, now: int) -> _Tally | None:
    """Count the rows of all shards concurrently; None if a task has a live claim. Raises
    DamagedRow."""
    place, tally = row.place, _Tally.of(row)
    projection = ", ".join(f"#{name}" for name in _TALLY_FIELDS)

    async def count(shard: int) -> None:
        partition = task_partition(place.job_id, place.shards, shard)
        async for page in records.table.pages(
            Query(partition, begins_with=task_sort_key(place.run_id, ""), projection=projection)
        ):
            for item in page.items:
                one = _read_tally_entry(item)
                if one.row.status is TaskStatus.PROCESSING and one.row.claimed_until > now:
                    raise _LiveClaimFound
                # Leave out additions under way, and indexes reserved since the run was read.
                if one.place < row.run.next_index and row.contains_index(one.place):
                    tally.add(one)

    try:
        await for_each(count, range(place.shards.count))
    except _LiveClaimFound:
        return None
    return tally


def _counters_match(tally: _Tally, row: RunRow) -> bool:
    """Return whether counted and stored counters agree."""
    counted, kept = tally.stats(), row.run.stats
    groups = {group_id: group.failed for group_id, group in row.groups.items() if group.failed}
    if {name: group.failed for name, group in tally.group_counts(row).items()} != groups:
        return False
    return msgspec.structs.replace(counted, spend=kept.spend) == kept and (
        counted.spend.credits == kept.spend.credits
        and math.isclose(counted.spend.cost, kept.spend.cost, rel_tol=1e-9, abs_tol=1e-9)
    )


MOST_ITEMS = 100
"""Items of processes that have not written for long which a run may have."""
GONE_AFTER = 15 * 60_000
"""Milliseconds without a write after which a process counts as gone."""
MOST_FOLDED = 90
"""Items that one transaction folds beside the run's row."""

_UNFOLDED = ("total", "inherited")
"""Counters that the base alone has."""


async def fold_items(records: DynamoRunRows, row: RunRow, *, now: int) -> int:
    """Fold the items of a live run that were not written for long, if there are many, and return
    their number. Stops where the run changes meanwhile: a later look goes on."""
    if not row.live or row.recounting:
        return 0
    found = await process_items(records.table, row.run.run_id, row.parts, row.counter_epoch)
    old = [one for one in found if not one.closed and one.values.at <= now - GONE_AFTER]
    if len(old) <= MOST_ITEMS:
        return 0
    done = 0
    for start in range(0, len(old), MOST_FOLDED):
        some = old[start : start + MOST_FOLDED]
        if start:
            again = await records.read_bare(row.place)
            # An ended run carries the sum of its items on its row: they would count twice.
            if again is None or not again.live or again.counter_epoch != row.counter_epoch:
                break
            row = again
        if not await _fold(records, row, some):
            break
        done += len(some)
    return done


async def _fold(records: DynamoRunRows, row: RunRow, items: Sequence[ProcessItem]) -> bool:
    """Fold items into the base of a run, as read; return False if either has changed since."""
    table = records.table
    number = row.folds + 1
    expires_at = table.clock.now() // 1_000 + KEPT_FOR
    marks = [
        table.update_part(
            item.key,
            f"SET closed = :yes, folded = :number, #{TIME_TO_LIVE} = :expires_at",
            condition="seq = :seen AND attribute_not_exists(closed)",
            yes=True,
            number=number,
            expires_at=expires_at,
            seen=item.number,
        )
        for item in items
    ]
    # The run itself has not changed, so it keeps its time.
    moved = records.change_part(row, _into_base(row, items, number), now=row.run.updated_at)
    try:
        await table.transact([moved, *marks], token=table.clock.new_id())
    except AwsRefused as refused:
        if not refused.is_condition:
            raise
        return False
    return True


def _into_base(row: RunRow, items: Sequence[ProcessItem], number: int) -> Change:
    """Make the change that adds items to the base."""
    values = sum_values(row.base, [item.values for item in items])
    before = counters(row.base.stats(total=0, inherited=0), row.base.groups)
    after = counters(values.stats(total=0, inherited=0), values.groups)
    sets: dict[str, Plain] = {name: value for name, value in after.items() if name not in _UNFOLDED}
    return Change(
        sets={**sets, "folds": number},
        removes=sorted(before.keys() - after.keys()),
        condition=f"counter_epoch = :seen_epoch AND attribute_not_exists({RECOUNTING})",
        values={"seen_epoch": row.counter_epoch},
    )
