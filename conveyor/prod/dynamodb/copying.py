"""Copying rows of one run into another of the same job: fresh ones, and inherited ones with their
ends. A row that is there already stays as it is, so that a copy can be repeated."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from conveyor.aio.concurrency import side_by_side
from conveyor.domain import ids
from conveyor.domain.model import TaskSpec, TaskStatus
from conveyor.domain.states import TERMINAL_TASK_STATES
from conveyor.prod.dynamodb.ingest_counts import Counts
from conveyor.prod.dynamodb.items import Item, Table
from conveyor.prod.dynamodb.keys import END, Key, task_partition, task_sort_key
from conveyor.prod.dynamodb.live_claims import is_held
from conveyor.prod.dynamodb.places import Place
from conveyor.prod.dynamodb.run_items import RunRow
from conveyor.prod.dynamodb.shapes import whole
from conveyor.prod.dynamodb.task_items import inherited_item, new_task_item
from conveyor.prod.dynamodb.task_writes import insert_items

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
        """Take one row more into account. Raises Damaged."""
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
class Copied:
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
class Copy:
    """From which run into which, and which rows start afresh; None as statuses: all of them."""

    table: Table
    source: RunRow
    target: Place
    statuses: frozenset[TaskStatus] | None

    async def run(self, *, first: int, end: int, now: int) -> Copied:
        """Copy the rows with an index from `first` below `end`, every shard at once, each up to
        the page that has a row under a live claim."""
        copied = Copied()
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

        await side_by_side(copy, range(self.source.shards.count))
        copied.rows.references.sort()
        return copied

    @whole
    def _row(self, item: Item, now: int) -> Item | None:
        """The row that comes of one of the source's; None where that is left out. Raises
        Damaged."""
        index = ids.task_index(item["task_id"])
        # What was only being added when the source ended is no part of it.
        if index >= self.source.run.next_index or not self.source.holds(index):
            return None
        if self.statuses is None or item["status"] in self.statuses:
            return fresh_item(item["task_id"], item["spec"], now=now)
        if item["status"] in TERMINAL_TASK_STATES:
            return inherited_item(item, self.source.run.run_id, now=now)
        return None


async def rows_of(table: Table, place: Place, *, first: int, end: int) -> Rows:
    """The rows of a run with an index from `first` below `end`, as they are."""
    rows = Rows()

    async def read(shard: int) -> None:
        async for found in _stretch(table, place, shard, _SEEN, first=first, end=end):
            for item in found:
                rows.add(item)

    await side_by_side(read, range(place.shards.count))
    rows.references.sort()
    return rows


def fresh_item(task_id: str, spec: str, *, now: int) -> Item:
    """The row of a task that nobody has claimed yet, from the JSON text of its spec."""
    return {**_BLANK, "task_id": task_id, "spec": spec, "created_at": now, "updated_at": now}


async def _stretch(
    table: Table, place: Place, shard: int, names: Sequence[str], *, first: int, end: int
) -> AsyncIterator[list[Item]]:
    if first >= end:
        return
    low, high = ids.encode_index(first), ids.encode_index(end - 1) + END
    async for page in table.pages(
        task_partition(place.job_id, place.shards, shard),
        between=(task_sort_key(place.run_id, low), task_sort_key(place.run_id, high)),
        projection=", ".join(f"#{name}" for name in names),
    ):
        yield page.items
