"""Copying task rows of one run into another run of its job, for reruns.

`RowCopy` inserts fresh rows, and inherited ones with their result; an existing row stays, so a copy
can be repeated. `Counts` adds up such rows. `refuse_live_claims` and `has_live_claim` keep rows out
that a worker still works.

A small rerun writes its rows before the run itself. An intent covers them: the transaction that
makes the run removes an unmarked intent, while `abandon_intent` marks the intent before it removes
rows, as for a new job. A caller who does not know the outcome of a rerun asks for it again under
the same run id; the intent then passes to the second call, and the first can no longer make the
run.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from conveyor.aio.concurrency import for_each
from conveyor.domain import ids
from conveyor.domain.errors import CallInFlight, ConveyorError, ErrorCode
from conveyor.domain.model import GroupFilter, RunStats, TaskFailure, TaskSpec, TaskStatus
from conveyor.domain.result_shape import SIZE_CLASSES, ResultShape, counted_type, size_class
from conveyor.domain.task_rules import TERMINAL_TASK_STATES
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.client import (
    Item,
    Query,
    RowFilter,
    Table,
    conflicting_item,
    decodes_row,
    row_time_to_live,
)
from conveyor.prod.dynamodb.run_rows import RunPlace, RunRow
from conveyor.prod.dynamodb.schema import (
    END,
    PARTITION_KEY,
    SORT_KEY,
    Key,
    failure_group_key,
    intent_key,
    place_key,
    task_partition,
    task_sort_key,
)
from conveyor.prod.dynamodb.submitting import INTENT_STANDS, intent_item
from conveyor.prod.dynamodb.task_rows import (
    inherited_item,
    insert_items,
    new_task_item,
    read_body_kind,
    remove_rows,
)

LONGEST_CALL = 3_600_000
"""Milliseconds after the end of a run during which a call of it may still be in flight. Claims are
not renewed beyond the timeout of their calls, which is minutes."""


async def refuse_live_claims(table: Table, row: RunRow, *, now: int) -> None:
    """Raise CallInFlight if a task of an ended run has a claim that has not lapsed.

    Reads the run's rows up to the first one under a claim, and none if all tasks have ended or the
    run ended long ago.
    """
    # Counters never run ahead of the rows.
    all_ended = row.run.stats.completed >= row.run.stats.total
    if all_ended or now - row.ended_at > LONGEST_CALL:
        return
    held = RowFilter(
        "#status = :processing AND claimed_until > :now",
        {"processing": str(TaskStatus.PROCESSING), "now": now},
    )

    async def check(shard: int) -> None:
        partition = task_partition(row.run.job_id, row.shards, shard)
        begin = task_sort_key(row.run.run_id, "")
        async for page in table.pages(
            Query(partition, begins_with=begin, where=held, keys_only=True)
        ):
            for item in page.items:
                raise CallInFlight(row.run.run_id, item[SORT_KEY].removeprefix(begin))

    await for_each(check, range(row.shards.count))


@decodes_row
def has_live_claim(item: Item, now: int) -> bool:
    """Return whether a task's item, with `status` and `claimed_until`, has a claim that has not
    lapsed. Raises DamagedRow."""
    if item["status"] != TaskStatus.PROCESSING:
        return False
    until: int = item["claimed_until"]
    return until > now


_FRESH_FIELDS = ("task_id", "spec", "status", "claimed_until")
_INHERITED_FIELDS = (
    *_FRESH_FIELDS,
    "attempts",
    "interruptions",
    "source_run_id",
    "result",
    "error",
    "failure",
    "failure_group",
)
_SUMMARY_FIELDS = ("task_id", "status", "source_run_id", "result", "failure", "failure_group")
_BLANK_ROW = new_task_item("", TaskSpec(url=""), now=0)


NO_SIZES = (0,) * SIZE_CLASSES


class Counts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Rows of a run as they were written: `fresh` ones to be worked, and inherited ones by result;
    failed ones by reason and group too, bodies of successful ones by size class and media type."""

    fresh: int = 0
    successful: int = 0
    failed: int = 0
    reasons: dict[str, int] = {}
    groups: dict[str, int] = {}
    sizes: tuple[int, ...] = NO_SIZES
    types: dict[str, int] = {}

    @property
    def inherited(self) -> int:
        """Rows that were copied with their result."""
        return self.successful + self.failed

    @property
    def total(self) -> int:
        """All rows."""
        return self.fresh + self.inherited

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.fresh + other.fresh,
            self.successful + other.successful,
            self.failed + other.failed,
            sum_maps(self.reasons, other.reasons),
            sum_maps(self.groups, other.groups),
            tuple(map(sum, zip(self.sizes, other.sizes, strict=True))),
            sum_maps(self.types, other.types),
        )

    def stats(self) -> RunStats:
        """Return the counters of a run of which no task has been worked yet."""
        return RunStats(
            total=self.total,
            successful=self.successful,
            failed=self.failed,
            failure_reasons=self.reasons,
            inherited=self.inherited,
            shape=ResultShape(self.sizes, self.types),
        )


def sum_maps(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """Add numbers by name; leave out zeros."""
    total = dict(one)
    for name, number in other.items():
        total[name] = total.get(name, 0) + number
    return {name: number for name, number in total.items() if number}


class Selection(NamedTuple):
    """The choice of a source's tasks that start afresh: those in `statuses`, None being all, and of
    the failure groups that `groups` takes, where it is set."""

    statuses: frozenset[TaskStatus] | None
    groups: GroupFilter | None = None

    @property
    def leaves_failures(self) -> bool:
        """True if failed tasks may be inherited."""
        afresh = self.statuses
        return afresh is not None and (TaskStatus.FAILED not in afresh or self.groups is not None)

    def takes(self, status: str, group_id: str | None) -> bool:
        """Tell whether a task starts afresh."""
        if self.statuses is not None and status not in self.statuses:
            return False
        return self.groups is None or self.groups.takes(group_id)


class KnownNames(NamedTuple):
    """The failure groups and media types of inherited rows that a run counts by name. Rows of other
    groups count as failed alone; other types begin while there is room."""

    groups: frozenset[str]
    types: frozenset[str]

    @classmethod
    def of_source(cls, source: RunRow) -> KnownNames:
        """Take the names over from the run that is copied."""
        return cls(frozenset(source.groups), frozenset(source.run.stats.shape.types))


class RowSummary:
    """Rows of a run: their counts, and the references of those to be worked.

    `sources` are the runs that own bodies of the rows, `end` is the highest index plus one.
    """

    def __init__(self, names: KnownNames) -> None:
        self.counts = Counts()
        self.references: list[tuple[int, str]] = []
        self.sources: set[str] = set()
        self.end = 0
        self._groups = names.groups
        self._types = dict.fromkeys(names.types, 0)

    @decodes_row
    def add(self, item: Item) -> None:
        """Add one row. Raises DamagedRow."""
        index = ids.task_index(item["task_id"])
        self.end = max(self.end, index + 1)
        if item["status"] not in TERMINAL_TASK_STATES:
            self.references.append((index, item["task_id"]))
        source = item.get("source_run_id")
        if source is None:
            self.counts += Counts(fresh=1)
        else:
            self.counts += self._inherited(item)
            self.sources.add(source)

    def _inherited(self, item: Item) -> Counts:
        """Count one row that was copied with its result."""
        if item["status"] != TaskStatus.SUCCESSFUL:
            group_id = item.get("failure_group")
            return Counts(
                failed=1,
                reasons={item.get("failure") or str(TaskFailure.OTHER): 1},
                groups={group_id: 1} if group_id in self._groups else {},
            )
        if "result" not in item:
            return Counts(successful=1)
        body = read_body_kind(item["result"])
        name = counted_type(body.content_type, self._types)
        self._types.setdefault(name, 0)
        of_size = size_class(body.size)
        sizes = tuple(int(number == of_size) for number in range(SIZE_CLASSES))
        return Counts(successful=1, sizes=sizes, types={name: 1})


@dataclass(slots=True)
class CopyResult:
    """The rows that a copy meant to write, and those whose insertion was confirmed.

    `rows` describes the run's rows only if all of them were inserted. `in_flight` is a task of the
    source under a live claim: the copy stopped before it in its shard.
    """

    rows: RowSummary
    keys: list[Key] = field(default_factory=list)
    inserted: list[Key] = field(default_factory=list)
    in_flight: str | None = None

    @property
    def all_inserted(self) -> bool:
        """True if none of the rows existed before."""
        return len(self.inserted) == len(self.keys)


@dataclass(frozen=True, slots=True)
class RowCopy:
    """A copy from `source` into `target`, of which the `chosen` rows start afresh."""

    table: Table
    source: RunRow
    target: RunPlace
    chosen: Selection
    names: KnownNames

    async def run(self, *, first: int, end: int, now: int) -> CopyResult:
        """Copy the rows with an index from `first` below `end`, all shards concurrently. A shard
        stops at the page with a row under a live claim."""
        copied = CopyResult(RowSummary(self.names))
        names = _FRESH_FIELDS if self.chosen.statuses is None else _INHERITED_FIELDS

        async def copy(shard: int) -> None:
            source = self.source.place
            async for found in _pages_by_index(
                self.table, source, shard, names, first=first, end=end
            ):
                in_flight = next((item for item in found if has_live_claim(item, now)), None)
                if in_flight is not None:
                    copied.in_flight = in_flight["task_id"]
                    return
                rows = [row for item in found if (row := self._row(item, now)) is not None]
                for row in rows:
                    copied.rows.add(row)
                items = [(self.target.task_key(row["task_id"]), row) for row in rows]
                copied.keys += [key for key, _ in items]
                copied.inserted += await insert_items(self.table, items)

        await for_each(copy, range(self.source.shards.count))
        copied.rows.references.sort()
        return copied

    @decodes_row
    def _row(self, item: Item, now: int) -> Item | None:
        """Make the target's row from one of the source's; None leaves it out. Raises DamagedRow."""
        index = ids.task_index(item["task_id"])
        # Additions that were under way when the source ended are not part of it.
        if index >= self.source.run.next_index or not self.source.contains_index(index):
            return None
        if self.chosen.takes(item["status"], item.get("failure_group")):
            return fresh_item(item["task_id"], item["spec"], now=now)
        if item["status"] in TERMINAL_TASK_STATES:
            ends = row_time_to_live(self.table, self.source.result_ttl_days, now=now)
            return inherited_item(item, self.source.run.run_id, now=now, time_to_live=ends)
        return None


async def summarize_rows(
    table: Table, place: RunPlace, names: KnownNames, *, first: int, end: int
) -> RowSummary:
    """Read the rows of a run with an index from `first` below `end`."""
    rows = RowSummary(names)

    async def read(shard: int) -> None:
        async for found in _pages_by_index(
            table, place, shard, _SUMMARY_FIELDS, first=first, end=end
        ):
            for item in found:
                rows.add(item)

    await for_each(read, range(place.shards.count))
    rows.references.sort()
    return rows


def fresh_item(task_id: str, spec: str, *, now: int) -> Item:
    """Make the row of a new pending task from the JSON text of its spec."""
    return {**_BLANK_ROW, "task_id": task_id, "spec": spec, "created_at": now, "updated_at": now}


async def _pages_by_index(
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


_IS_HOLDER = f"{INTENT_STANDS} AND #holder = :holder"


class Intent(NamedTuple):
    """The intent of one call, `holder`, that writes rows of the run at `place`."""

    place: RunPlace
    holder: str
    is_first: bool

    @property
    def key(self) -> Key:
        """Key of the intent."""
        return intent_key(self.place.job_id, self.place.run_id)


async def write_intent(
    table: Table, place: RunPlace, source: RunRow, *, holder: str, now: int
) -> Intent:
    """Write the intent of a run's rows, or take it over from an earlier call.

    First removes rows that were copied from another source. Raises ConveyorError(unavailable) if
    another call has taken the intent meanwhile, or is removing rows.
    """
    key = intent_key(place.job_id, place.run_id)
    found = await table.get(key)
    if found is not None and found["rerun_of"] != source.run.run_id:
        if not await abandon_intent(table, Intent(place, found["holder"], is_first=False)):
            raise concurrent_rerun_error()
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
                condition=f"{INTENT_STANDS} AND #holder = :seen",
                seen=found["holder"],
                **item,
            )
    except AwsRefused as refused:
        if not refused.is_condition:
            raise
        existing = conflicting_item(refused)
        if existing is None or existing.get("holder") != holder or "abandoned" in existing:
            raise concurrent_rerun_error() from None
        # An earlier try wrote it, and its answer was lost.
    return Intent(place, holder, is_first=found is None)


async def copy_source_rows(
    table: Table,
    intent: Intent,
    source: RunRow,
    chosen: Selection,
    *,
    now: int,
) -> RowSummary:
    """Copy the source's rows and return the rows that the run then has. Raises CallInFlight."""
    names = KnownNames.of_source(source)
    copy = RowCopy(table, source, intent.place, chosen, names)
    end = source.run.next_index
    copied = await copy.run(first=0, end=end, now=now)
    if copied.in_flight is not None:
        raise CallInFlight(source.run.run_id, copied.in_flight)
    if intent.is_first and copied.all_inserted:
        return copied.rows
    return await summarize_rows(table, intent.place, names, first=0, end=end)


async def carry_groups(
    table: Table, intent: Intent, items: Mapping[str, Item], group_ids: Iterable[str]
) -> None:
    """Give a run, under its intent, items of the failure groups of its source."""
    run_id = intent.place.run_id
    found = [
        (failure_group_key(run_id, group_id), _without_key(items[group_id]))
        for group_id in group_ids
        if group_id in items
    ]
    await insert_items(table, found)


def _without_key(item: Item) -> Item:
    return {name: value for name, value in item.items() if name not in (PARTITION_KEY, SORT_KEY)}


def delete_intent_part(table: Table, intent: Intent) -> dict[str, Any]:
    """Describe the removal of an intent in the transaction that makes its run; it is refused if
    another call holds the intent."""
    return table.delete_part(intent.key, condition=_IS_HOLDER, holder=intent.holder)


async def abandon_intent(table: Table, intent: Intent) -> bool:
    """Remove the rows of an intent; return False if another call holds it or the run was made. The
    sweeper finishes a removal that is cut off."""
    token = table.clock.new_id()
    try:
        await table.update(
            intent.key,
            "SET abandoned = :token",
            condition=_IS_HOLDER,
            holder=intent.holder,
            token=token,
        )
    except AwsRefused as refused:
        if not refused.is_condition:
            raise
        existing = conflicting_item(refused)
        if existing is None:
            return await _abandon_missing_intent(table, intent, token)
        if existing.get("abandoned") != token:
            return False
    await remove_rows(table, intent.place)
    await table.delete(intent.key)
    return True


async def _abandon_missing_intent(table: Table, intent: Intent, token: str) -> bool:
    """Remove rows whose intent is gone, unless it went with the making of the run. Otherwise
    another call has removed the rows, and this one may have written more since. A marked intent
    keeps others out meanwhile."""
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
        existing = conflicting_item(refused)
        if existing is None or existing.get("abandoned") != token:
            return False
    is_made = await table.get(place_key(place.run_id)) is not None
    if not is_made:
        await remove_rows(table, place)
    await table.delete(intent.key)
    return not is_made


def concurrent_rerun_error() -> ConveyorError:
    """Return the error for a run that another call makes at the same time."""
    return ConveyorError(
        ErrorCode.UNAVAILABLE, "another request is making this very run", retry_after=1
    )
