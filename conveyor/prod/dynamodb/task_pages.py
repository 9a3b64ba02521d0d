"""Reading rows of a run by index, shard by shard, and removing them.

One query a page, strongly read, that touches no row beyond those it was asked for. Whether
anything follows a full page is told by the run's next index, which is read only where the page
comes near the highest one known.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

import msgspec

from conveyor.domain import ids
from conveyor.domain.gather import ShardRead, ShardRows, stream
from conveyor.domain.model import TaskStatus
from conveyor.domain.shards import ShardScheme
from conveyor.domain.states import TERMINAL_TASK_STATES
from conveyor.ports.tasks import TaskPage
from conveyor.prod.dynamodb.items import Item, Page, Table
from conveyor.prod.dynamodb.keys import Key, task_partition, task_sort_key
from conveyor.prod.dynamodb.places import Place
from conveyor.prod.dynamodb.run_reads import RunReads
from conveyor.prod.dynamodb.table import PARTITION_KEY, SORT_KEY
from conveyor.prod.dynamodb.task_items import read_task
from conveyor.prod.dynamodb.values import untag_all
from conveyor.prod.together import side_by_side

MOST_TOUCHED = 1_000
"""Rows that one query of a filtered list touches, at most."""
MOST_REMEMBERED = 10_000
"""Runs whose next index is remembered."""
MOST_HELD = 1_000
"""References of a merged list in memory, of all shards together, about."""
END = "~"
"""Sorts behind every task id."""

ALL = frozenset(TaskStatus)
UNFINISHED = ALL - TERMINAL_TASK_STATES


class Reference(msgspec.Struct, frozen=True):
    """A row by its index and its task's id."""

    index: int
    task_id: str


class TaskPages:
    """Rows of runs. `rows_read` and `rows_returned` count since the start."""

    def __init__(self, table: Table, reads: RunReads) -> None:
        self.rows_read = 0
        self.rows_returned = 0
        self._table = table
        self._reads = reads
        self._next_indexes: dict[str, int] = {}

    async def one(self, place: Place, task_id: str) -> Item | None:
        """One row, strongly read; None for a text that is no task id."""
        if not ids.is_task_id(task_id):
            return None
        item = await self._table.get(place.task(task_id))
        if item is not None:
            self._count(1, 1)
        return item

    async def page(
        self,
        place: Place,
        shard: int,
        statuses: frozenset[TaskStatus],
        *,
        after: int,
        limit: int,
        most_read: int | None,
    ) -> TaskPage:
        """A page of one shard; see `Tasks.page_tasks`.

        Each query for a rare status touches more rows than the one before: few queries find it,
        and at most about twice the rows between two of its kind are touched for one.
        """
        is_filtered = statuses < ALL
        most = most_read if most_read is not None else ids.MAX_INDEX
        items: list[Item] = []
        read, at, more = 0, after, True
        size = min(limit, most)
        while more and len(items) < limit and read < most:
            page = await self._query(place, shard, at, size, _filter(statuses))
            items += page.items
            read += page.read
            more = page.last is not None
            at = _last_touched(page, at)
            wanted = limit - len(items)
            if is_filtered:
                wanted = min(max(wanted, 2 * size), MOST_TOUCHED)
            size = min(wanted, most - read)
        is_cut = len(items) > limit
        del items[limit:]
        tasks = [read_task(place.run_id, item) for item in items]
        self._count(read, len(tasks))
        if not is_cut and not (more and await self._may_follow(place, at)):
            return TaskPage(tasks, None, read)
        return TaskPage(tasks, tasks[-1].index if len(tasks) == limit else at, read)

    async def unfinished(self, place: Place, after: int, limit: int) -> list[tuple[int, str]]:
        """References of rows that are not terminal; see `Tasks.unfinished_after`."""
        sizes = [0] * place.shards.count

        async def read(wanted: ShardRead) -> ShardRows[Reference]:
            size = max(wanted.limit, sizes[wanted.shard])
            at = max(wanted.after, after)
            page = await self._query(
                place, wanted.shard, at, size, {**_filter(UNFINISHED), "keys_only": True}
            )
            rows = [_reference(item) for item in page.items]
            if 2 * len(rows) < page.read:
                sizes[wanted.shard] = min(2 * size, MOST_TOUCHED)
            self._count(page.read, len(rows))
            goes_on = page.last is not None
            return ShardRows(rows, _last_touched(page, at) if goes_on else None, page.read)

        found: list[tuple[int, str]] = []
        async for row in stream(read, place.shards, piece=min(limit, MOST_HELD)):
            found.append((row.index, row.task_id))
            if len(found) == limit:
                break
        return found

    async def scrub(self, place: Place, limit: int) -> int:
        """Remove at most `limit` rows, about as many of each shard; how many went, 0 only where
        none is left."""
        found: list[Key] = []
        share = ceil(limit / place.shards.count)

        async def find(shard: int) -> None:
            page = await self._query(place, shard, -1, share, {"keys_only": True})
            found.extend(Key(item[PARTITION_KEY], item[SORT_KEY]) for item in page.items)

        await side_by_side(find, range(place.shards.count))
        del found[limit:]
        await self._table.delete_many(found)
        return len(found)

    async def _query(
        self, place: Place, shard: int, after: int, size: int, query: Mapping[str, Any]
    ) -> Page:
        low = ids.encode_index(min(after + 1, ids.MAX_INDEX))
        return await self._table.page(
            task_partition(place.job_id, place.shards, shard),
            between=(task_sort_key(place.run_id, low), task_sort_key(place.run_id, END)),
            limit=size,
            **query,
        )

    async def _may_follow(self, place: Place, index: int) -> bool:
        """Whether a shard may have a row behind this one of it."""
        step = place.shards.count if place.shards.scheme is ShardScheme.STRIPE else 1
        if index + step < self._next_indexes.get(place.run_id, 0):
            return True
        row = await self._reads.fresh(place)
        if row is None:
            return False
        if len(self._next_indexes) >= MOST_REMEMBERED:
            self._next_indexes.clear()
        # It only ever grows.
        self._next_indexes[place.run_id] = row.run.next_index
        return index + step < row.run.next_index

    def _count(self, read: int, returned: int) -> None:
        self.rows_read += read
        self.rows_returned += returned


def _filter(statuses: frozenset[TaskStatus]) -> dict[str, Any]:
    """Arguments of a query that returns rows in these statuses."""
    if statuses == ALL:
        return {}
    values = {f"status_{number}": str(status) for number, status in enumerate(sorted(statuses))}
    marks = ", ".join(f":{name}" for name in values)
    return {"filtered": f"#status IN ({marks})", "names": {"#status": "status"}, **values}


def _last_touched(page: Page, before: int) -> int:
    """The index of the last row that a query touched, returned or not."""
    if page.last is not None:
        return _reference(untag_all(page.last)).index
    return _reference(page.items[-1]).index if page.items else before


def _reference(item: Item) -> Reference:
    task_id: str = item[SORT_KEY].rpartition("#")[2]
    return Reference(ids.task_index(task_id), task_id)
