"""Reading rows of a run by index, shard by shard, and removing them.

One query a page, strongly read, that touches no row beyond those it was asked for. Whether
anything follows a full page is told by the run's next index, which is read only where the page
comes near the highest one known.
"""

from __future__ import annotations

from math import ceil
from typing import Any

from conveyor.aio.concurrency import side_by_side
from conveyor.domain import ids
from conveyor.domain.model import TaskStatus
from conveyor.domain.shards import ShardScheme
from conveyor.domain.states import TERMINAL_TASK_STATES
from conveyor.ports.tasks import TaskPage
from conveyor.prod.dynamodb.items import Item, Table, keys_of
from conveyor.prod.dynamodb.keys import Key
from conveyor.prod.dynamodb.places import Place
from conveyor.prod.dynamodb.references import MOST_TOUCHED, last_touched, references, rows_after
from conveyor.prod.dynamodb.run_reads import RunReads
from conveyor.prod.dynamodb.task_items import read_task

MOST_REMEMBERED = 10_000
"""Runs whose next index is remembered."""
MOST_HELD = 1_000
"""References of a merged list in memory, of all shards together, about."""

ALL = frozenset(TaskStatus)
UNFINISHED = ALL - TERMINAL_TASK_STATES


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
            page = await rows_after(self._table, place, shard, at, limit=size, **_filter(statuses))
            items += page.items
            read += page.read
            more = page.last is not None
            at = last_touched(page, at)
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
        found: list[tuple[int, str]] = []
        async for row in references(
            self._table,
            place,
            _filter(UNFINISHED),
            after=after,
            piece=min(limit, MOST_HELD),
            count=self._count,
        ):
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
            page = await rows_after(self._table, place, shard, -1, limit=share, keys_only=True)
            found.extend(keys_of(page.items))

        await side_by_side(find, range(place.shards.count))
        del found[limit:]
        await self._table.delete_many(found)
        return len(found)

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
    return {"filtered": f"#status IN ({marks})", **values}
