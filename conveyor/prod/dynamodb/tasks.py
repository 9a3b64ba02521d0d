"""The tasks port on one DynamoDB table.

Reading rows of a run by index, shard by shard, and removing them.

One query a page, strongly read, that touches no row beyond those it was asked for. Whether
anything follows a full page is told by the run's next index, which is read only where the page
comes near the highest one known.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from conveyor.aio.concurrency import for_each, for_each_collect
from conveyor.domain import ids
from conveyor.domain.model import Event, RunStatus, Task, TaskStatus
from conveyor.domain.shards import ShardScheme
from conveyor.domain.task_rules import TERMINAL_TASK_STATES, Released, Settlement, settlement_change
from conveyor.ports.tasks import Claim, NotClaimable, Settled, TaskPage
from conveyor.prod.dynamodb.claims import ClaimCall, Claims, settle_row
from conveyor.prod.dynamodb.client import ALL_ITEMS, Item, RowFilter, Table, keys_of
from conveyor.prod.dynamodb.counters import Counters
from conveyor.prod.dynamodb.run_rows import DynamoRunRows, RunPlace, RunReads
from conveyor.prod.dynamodb.schema import Key
from conveyor.prod.dynamodb.task_rows import (
    MOST_TOUCHED,
    last_touched,
    read_events,
    read_task,
    references,
    rows_after,
)

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

    async def one(self, place: RunPlace, task_id: str) -> Item | None:
        """One row, strongly read; None for a text that is no task id."""
        if not ids.is_task_id(task_id):
            return None
        item = await self._table.get(place.task(task_id))
        if item is not None:
            self._count(1, 1)
        return item

    async def page(
        self,
        place: RunPlace,
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
            page = await rows_after(
                self._table, place, shard, at, limit=size, where=_filter(statuses)
            )
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

    async def unfinished(self, place: RunPlace, after: int, limit: int) -> list[tuple[int, str]]:
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

    async def scrub(self, place: RunPlace, limit: int) -> int:
        """Remove at most `limit` rows, about as many of each shard; how many went, 0 only where
        none is left."""
        found: list[Key] = []
        share = ceil(limit / place.shards.count)

        async def find(shard: int) -> None:
            page = await rows_after(self._table, place, shard, -1, limit=share, keys_only=True)
            found.extend(keys_of(page.items))

        await for_each(find, range(place.shards.count))
        del found[limit:]
        await self._table.delete_many(found)
        return len(found)

    async def _may_follow(self, place: RunPlace, index: int) -> bool:
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


def _filter(statuses: frozenset[TaskStatus]) -> RowFilter:
    """Return a filter that lets rows in these statuses pass."""
    if statuses == ALL:
        return ALL_ITEMS
    values = {f"status_{number}": str(status) for number, status in enumerate(sorted(statuses))}
    marks = ", ".join(f":{name}" for name in values)
    return RowFilter(f"#status IN ({marks})", values)


class DynamoTasks:
    """The tasks port. Belongs to one event loop.

    `worker` names this process: no other one, later ones included, has the same name.
    `flush_interval`: seconds between the beginnings of two additions to one run's counters.
    `patience`: seconds for which a settlement is tried again where the table is away.
    """

    def __init__(
        self, records: DynamoRunRows, *, worker: str, flush_interval: float, patience: float = 0.0
    ) -> None:
        self._table = records.table
        self._patience = patience
        self._places = records.places
        self._reads = RunReads(records)
        self._counters = Counters(records, worker=worker, flush_interval=flush_interval)
        self._claims = Claims(self._table, self._reads, self._counters)
        self._pages = TaskPages(self._table, self._reads)

    @property
    def rows_read(self) -> int:
        """Task rows touched for pages since the start."""
        return self._pages.rows_read

    @property
    def rows_returned(self) -> int:
        """Task rows returned for them."""
        return self._pages.rows_returned

    async def claim_task(
        self,
        run_id: str,
        task_id: str,
        *,
        worker: str,
        now: int,
        claimed_until: int,
        max_interruptions: int,
    ) -> Claim:
        """Claim a pending task, or one whose claim has lapsed, of a live run."""
        found = await self._find(run_id, task_id)
        if found is None:
            return NotClaimable()
        token = self._table.clock.new_id()
        return await self._claims.claim(
            ClaimCall(*found, worker, now, claimed_until, max_interruptions, token)
        )

    async def release_claim(self, run_id: str, task_id: str, *, worker: str) -> None:
        """Undo a claim made under this very `worker` name; else without effect."""
        found = await self._find(run_id, task_id)
        if found is not None:
            await self._claims.release(found[1], worker)

    async def renew_claims(
        self, claims: Sequence[tuple[str, str, int]], *, claimed_until: int
    ) -> None:
        """Extend claims, given as (run_id, task_id, claim_number); lost ones are passed over, and
        what fails for one is raised after all others were renewed."""

        async def renew(claim: tuple[str, str, int]) -> None:
            run_id, task_id, claim_number = claim
            found = await self._find(run_id, task_id)
            if found is not None:
                await self._claims.renew(found[1], claim_number, claimed_until=claimed_until)

        await for_each_collect(renew, claims)

    async def settle_task(
        self, run_id: str, task_id: str, claim_number: int, settlement: Settlement, *, now: int
    ) -> Settled:
        """Move a claimed row on, if the claim is still the caller's, and account for it."""
        found = await self._find(run_id, task_id)
        if found is None:
            place = await self._places.find(run_id)
            return Settled(False, None if place is None else await self._status(place))
        place, key = found
        # An epoch that was known before the row moves: see `counters`.
        epoch = self._counters.epoch(place)
        if epoch is None:
            if await self._status(place) is None:
                return Settled(applied=False, run_status=None)
            epoch = self._counters.epoch(place)
            assert epoch is not None  # the run was just seen
        # Who only undoes a claim goes on to something else, or ends.
        patience = 0.0 if isinstance(settlement, Released) else self._patience
        change = settlement_change(settlement, now=now)
        try:
            applied = await settle_row(
                self._table, key, claim_number, change, now=now, patience=patience
            )
        except BaseException:
            self._counters.doubt(place)
            raise
        if applied and change.delta is not None:
            return await self._counters.add(place, change.delta, epoch=epoch)
        return Settled(applied, await self._status(place))

    async def page_tasks(
        self,
        run_id: str,
        *,
        shard: int = 0,
        statuses: frozenset[TaskStatus] | None,
        after: int | None,
        limit: int,
        most_read: int | None = None,
    ) -> TaskPage:
        """At most `limit` rows of a shard with an index above `after`; None as statuses means all.

        A filtered page touches rows that it does not return, within `most_read`.
        """
        place = await self._places.find(run_id)
        wanted = ALL if statuses is None else statuses
        start = -1 if after is None else after
        if place is None or not wanted or start >= ids.MAX_INDEX:
            return TaskPage([], None, 0)
        if not 0 <= shard < place.shards.count:
            return TaskPage([], None, 0)
        return await self._pages.page(
            place, shard, wanted, after=start, limit=limit, most_read=most_read
        )

    async def get_task(self, run_id: str, task_id: str) -> Task | None:
        """One row."""
        place = await self._places.find(run_id)
        item = None if place is None else await self._pages.one(place, task_id)
        return None if item is None else read_task(run_id, item)

    async def task_history(self, run_id: str, task_id: str) -> list[Event] | None:
        """The events of a task, oldest first; None where there is no such task."""
        place = await self._places.find(run_id)
        item = None if place is None else await self._pages.one(place, task_id)
        return None if item is None else read_events(item)

    async def unfinished_after(self, run_id: str, after: int, limit: int) -> list[tuple[int, str]]:
        """(index, task_id) of rows that are not terminal, in order, with an index above `after`."""
        place = await self._places.find(run_id)
        if place is None or after >= ids.MAX_INDEX:
            return []
        return await self._pages.unfinished(place, after, limit)

    async def scrub_tasks(self, run_id: str, limit: int) -> int:
        """Remove at most `limit` rows of a deleted run, events with them; how many went."""
        place = await self._places.find(run_id)
        row = None if place is None else await self._reads.fresh(place)
        if place is None or row is None or row.run.status is not RunStatus.DELETED:
            return 0
        return await self._pages.scrub(place, limit)

    async def aclose(self) -> None:
        """Add to the counters what is pending, if the store can be reached. No call may follow."""
        await self._counters.aclose()

    async def _find(self, run_id: str, task_id: str) -> tuple[RunPlace, Key] | None:
        """Where a task's row lies; None where it cannot exist."""
        place = await self._places.find(run_id)
        if place is None or not ids.is_task_id(task_id):
            return None
        return place, place.task(task_id)

    async def _status(self, place: RunPlace) -> RunStatus | None:
        """Where a run stands, read after this call; None where it is gone or deleted."""
        row = await self._reads.fresh(place)
        if row is None or row.run.status is RunStatus.DELETED:
            return None
        self._counters.seen(row)
        return row.run.status
