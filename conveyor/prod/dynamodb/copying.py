"""Copying rows of one run into another of the same job: fresh ones, and inherited ones with their
ends. A row that is there already stays as it is, so that a copy can be repeated.

Which task of a run that has ended is still being worked.

The rows of a small rerun, written before the run that leads to them.

An intent stands for them until the run is made, or they are taken back: as for a new job, whoever
takes rows back marks it first, and the run is made only under an unmarked one. A rerun may be asked
for again under the same run id, by a caller who does not know what became of the first: the intent
then passes to the second, and the first can no longer make the run.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from conveyor.aio.concurrency import for_each
from conveyor.domain import ids
from conveyor.domain.errors import CallInFlight, ConveyorError, ErrorCode
from conveyor.domain.model import TaskSpec, TaskStatus
from conveyor.domain.task_rules import TERMINAL_TASK_STATES
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.client import Item, Query, RowFilter, Table, condition_met, whole
from conveyor.prod.dynamodb.counters import Counts
from conveyor.prod.dynamodb.run_rows import RunPlace, RunRow
from conveyor.prod.dynamodb.schema import (
    END,
    SORT_KEY,
    Key,
    intent_key,
    place_key,
    task_partition,
    task_sort_key,
)
from conveyor.prod.dynamodb.submitting import INTENDED, intent_item
from conveyor.prod.dynamodb.task_rows import (
    inherited_item,
    insert_items,
    new_task_item,
    remove_rows,
)

LONGEST_CALL = 3_600_000
"""Milliseconds after the end of a run in which a call of it may still be under way: a claim is not
renewed beyond the timeout of its call, which is minutes."""


async def refuse_live_claims(table: Table, row: RunRow, *, now: int) -> None:
    """Raise CallInFlight where a task of an ended run is under a claim that has not lapsed.

    Reads all of the run's rows, up to the first such task, but only where some have not ended and
    the run has not for long.
    """
    # An end is counted after it has happened, never before.
    all_ended = row.run.stats.completed >= row.run.stats.total
    if all_ended or now - row.ended_at > LONGEST_CALL:
        return
    held = RowFilter(
        "#status = :processing AND claimed_until > :now",
        {"processing": str(TaskStatus.PROCESSING), "now": now},
    )

    async def look(shard: int) -> None:
        partition = task_partition(row.run.job_id, row.shards, shard)
        begin = task_sort_key(row.run.run_id, "")
        async for page in table.pages(
            Query(partition, begins_with=begin, where=held, keys_only=True)
        ):
            for item in page.items:
                raise CallInFlight(row.run.run_id, item[SORT_KEY].removeprefix(begin))

    await for_each(look, range(row.shards.count))


@whole
def is_held(item: Item, now: int) -> bool:
    """Whether a task's item, of which `status` and `claimed_until` were read, is under a claim that
    has not lapsed. Raises DamagedRow."""
    if item["status"] != TaskStatus.PROCESSING:
        return False
    until: int = item["claimed_until"]
    return until > now


_FRESH = ("task_id", "spec", "status", "claimed_until")
_WITH_ENDS = (
    *_FRESH,
    "attempts",
    "interruptions",
    "source_run_id",
    "result",
    "error",
    "failure",
)
_SEEN = ("task_id", "status", "source_run_id", "failure")
_BLANK = new_task_item("", TaskSpec(url=""), now=0)


@dataclass(slots=True)
class Rows:
    """Rows of a run: what they count as, and the references of those that are to be worked.

    `sources` are the runs that own a body of theirs, `end` is one more than the highest index.
    """

    counts: Counts = Counts()
    references: list[tuple[int, str]] = field(default_factory=list)
    sources: set[str] = field(default_factory=set)
    end: int = 0

    @whole
    def add(self, item: Item) -> None:
        """Take one row more into account. Raises DamagedRow."""
        index = ids.task_index(item["task_id"])
        self.end = max(self.end, index + 1)
        if item["status"] not in TERMINAL_TASK_STATES:
            self.references.append((index, item["task_id"]))
        source = item.get("source_run_id")
        if source is None:
            self.counts += Counts(fresh=1)
        else:
            self.counts = self.counts.with_end(item["status"], item.get("failure"))
            self.sources.add(source)


@dataclass(slots=True)
class ItemsCopied:
    """What a copy meant to write, and what of it was not there before, as far as the answers tell.

    `rows` tells how the run's rows are only where everything was inserted. `held` is a task of the
    source whose call is still under way: neither it nor what follows it in its shard was copied.
    """

    rows: Rows = field(default_factory=Rows)
    keys: list[Key] = field(default_factory=list)
    inserted: list[Key] = field(default_factory=list)
    held: str | None = None

    @property
    def all_inserted(self) -> bool:
        """Whether no row was there before."""
        return len(self.inserted) == len(self.keys)


@dataclass(frozen=True, slots=True)
class ItemCopy:
    """From which run into which, and which rows start afresh; None as statuses: all of them."""

    table: Table
    source: RunRow
    target: RunPlace
    statuses: frozenset[TaskStatus] | None

    async def run(self, *, first: int, end: int, now: int) -> ItemsCopied:
        """Copy the rows with an index from `first` below `end`, every shard at once, each up to
        the page that has a row under a live claim."""
        copied = ItemsCopied()
        names = _FRESH if self.statuses is None else _WITH_ENDS

        async def copy(shard: int) -> None:
            source = self.source.place
            async for found in _stretch(self.table, source, shard, names, first=first, end=end):
                held = next((item for item in found if is_held(item, now)), None)
                if held is not None:
                    copied.held = held["task_id"]
                    return
                rows = [row for item in found if (row := self._row(item, now)) is not None]
                for row in rows:
                    copied.rows.add(row)
                items = [(self.target.task(row["task_id"]), row) for row in rows]
                copied.keys += [key for key, _ in items]
                copied.inserted += await insert_items(self.table, items)

        await for_each(copy, range(self.source.shards.count))
        copied.rows.references.sort()
        return copied

    @whole
    def _row(self, item: Item, now: int) -> Item | None:
        """The row that comes of one of the source's; None where that is left out. Raises
        DamagedRow."""
        index = ids.task_index(item["task_id"])
        # What was only being added when the source ended is no part of it.
        if index >= self.source.run.next_index or not self.source.holds(index):
            return None
        if self.statuses is None or item["status"] in self.statuses:
            return fresh_item(item["task_id"], item["spec"], now=now)
        if item["status"] in TERMINAL_TASK_STATES:
            return inherited_item(item, self.source.run.run_id, now=now)
        return None


async def rows_of(table: Table, place: RunPlace, *, first: int, end: int) -> Rows:
    """The rows of a run with an index from `first` below `end`, as they are."""
    rows = Rows()

    async def read(shard: int) -> None:
        async for found in _stretch(table, place, shard, _SEEN, first=first, end=end):
            for item in found:
                rows.add(item)

    await for_each(read, range(place.shards.count))
    rows.references.sort()
    return rows


def fresh_item(task_id: str, spec: str, *, now: int) -> Item:
    """The row of a task that nobody has claimed yet, from the JSON text of its spec."""
    return {**_BLANK, "task_id": task_id, "spec": spec, "created_at": now, "updated_at": now}


async def _stretch(
    table: Table, place: RunPlace, shard: int, names: Sequence[str], *, first: int, end: int
) -> AsyncIterator[list[Item]]:
    if first >= end:
        return
    low, high = ids.encode_index(first), ids.encode_index(end - 1) + END
    async for page in table.pages(
        Query(
            task_partition(place.job_id, place.shards, shard),
            between=(task_sort_key(place.run_id, low), task_sort_key(place.run_id, high)),
            projection=", ".join(f"#{name}" for name in names),
        )
    ):
        yield page.items


_OWN = f"{INTENDED} AND #holder = :holder"


class Intent(NamedTuple):
    """That one call, `holder`, writes the rows of a run that lies at `place`."""

    place: RunPlace
    holder: str
    is_first: bool

    @property
    def key(self) -> Key:
        """Where it lies."""
        return intent_key(self.place.job_id, self.place.run_id)


async def intend(table: Table, place: RunPlace, source: RunRow, *, holder: str, now: int) -> Intent:
    """Take on the writing of a run's rows.

    What was written of another source is removed first. Raises ConveyorError(unavailable) where
    somebody else has taken it on meanwhile, or is taking rows back.
    """
    key = intent_key(place.job_id, place.run_id)
    found = await table.get(key)
    if found is not None and found["rerun_of"] != source.run.run_id:
        if not await take_back(table, Intent(place, found["holder"], is_first=False)):
            raise busy()
        found = None
    item: Item = {
        **intent_item(place, now=now),
        "rerun_of": source.run.run_id,
        "holder": holder,
    }
    try:
        if found is None:
            await table.put(key, item, condition="attribute_not_exists(pk)")
        else:
            await table.update(
                key,
                "SET " + ", ".join(f"#{name} = :{name}" for name in item),
                condition=f"{INTENDED} AND #holder = :seen",
                seen=found["holder"],
                **item,
            )
    except AwsRefused as refused:
        if not refused.is_condition:
            raise
        there = condition_met(refused)
        if there is None or there.get("holder") != holder or "abandoned" in there:
            raise busy() from None
        # It was written, and its answer lost.
    return Intent(place, holder, is_first=found is None)


async def write(
    table: Table,
    intent: Intent,
    source: RunRow,
    statuses: frozenset[TaskStatus] | None,
    *,
    now: int,
) -> Rows:
    """Copy the source's rows; the rows that there are then. Raises CallInFlight."""
    copy = ItemCopy(table, source, intent.place, statuses)
    end = source.run.next_index
    copied = await copy.run(first=0, end=end, now=now)
    if copied.held is not None:
        raise CallInFlight(source.run.run_id, copied.held)
    if intent.is_first and copied.all_inserted:
        return copied.rows
    return await rows_of(table, intent.place, first=0, end=end)


def fulfil(table: Table, intent: Intent) -> dict[str, Any]:
    """The part of the transaction that makes the run which ends an intent; refused where it is not
    this call's any more."""
    return table.delete_part(intent.key, condition=_OWN, holder=intent.holder)


async def take_back(table: Table, intent: Intent) -> bool:
    """Remove the rows again; False where the intent is not its holder's any more, or the run was
    made. Rows that are being taken back when this is cut off are left to the sweeper."""
    token = table.clock.new_id()
    try:
        await table.update(
            intent.key,
            "SET abandoned = :token",
            condition=_OWN,
            holder=intent.holder,
            token=token,
        )
    except AwsRefused as refused:
        if not refused.is_condition:
            raise
        there = condition_met(refused)
        if there is None:
            return await _take_back_late(table, intent, token)
        if there.get("abandoned") != token:
            return False
    await remove_rows(table, intent.place)
    await table.delete(intent.key)
    return True


async def _take_back_late(table: Table, intent: Intent, token: str) -> bool:
    """The intent is gone. Where that was not for the run, another call took the rows back, and this
    one may have written some after that. A marked intent keeps all others away meanwhile."""
    place = intent.place
    item: Item = {
        **intent_item(place, now=table.clock.now()),
        "rerun_of": "",
        "holder": intent.holder,
        "abandoned": token,
    }
    try:
        await table.put(intent.key, item, condition="attribute_not_exists(pk)")
    except AwsRefused as refused:
        if not refused.is_condition:
            raise
        there = condition_met(refused)
        if there is None or there.get("abandoned") != token:
            return False
    is_made = await table.get(place_key(place.run_id)) is not None
    if not is_made:
        await remove_rows(table, place)
    await table.delete(intent.key)
    return not is_made


def busy() -> ConveyorError:
    """What is raised where another call makes the same run."""
    return ConveyorError(
        ErrorCode.UNAVAILABLE, "another request is making this very run", retry_after=1
    )
