"""The tasks port on DynamoDB: claims, settlements and pages of a run's task rows.

`DynamoTasks` finds the row of a task and passes claims to `Claims`, settlements to `settle_row` and
`Counters`, and lists to `TaskPages`. A page is one strong query of a shard that reads no row beyond
those asked for. The run's next index tells whether anything follows a full page; it is read only if
the page comes near the highest index known.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from cachetools import LRUCache

from conveyor.aio.concurrency import for_each, for_each_collect
from conveyor.domain import ids
from conveyor.domain.failure_groups import FailureGroups
from conveyor.domain.model import Event, GroupFilter, JobStatus, RunStatus, Task, TaskStatus
from conveyor.domain.shards import ShardScheme
from conveyor.domain.task_rules import (
    TERMINAL_TASK_STATES,
    Deferred,
    Released,
    Settlement,
    settlement_change,
)
from conveyor.ports.tasks import Claim, KeptTask, NotClaimable, Settled, TaskPage
from conveyor.prod.dynamodb.claims import ClaimCall, Claims, settle_row
from conveyor.prod.dynamodb.client import (
    ALL_ITEMS,
    SPARE_DAYS,
    Item,
    PlaceholderValue,
    RowFilter,
    Table,
    decodes_row,
    keys_of,
)
from conveyor.prod.dynamodb.counters import Counters
from conveyor.prod.dynamodb.failure_groups import read_failure_groups, remove_group_items
from conveyor.prod.dynamodb.row_expiry import RowExpiry
from conveyor.prod.dynamodb.run_reads import APART_BY_PROCESS, LEAST_APART, RunReads
from conveyor.prod.dynamodb.run_rows import DynamoRunRows, RunPlace
from conveyor.prod.dynamodb.schema import TIME_TO_LIVE, Key, job_key
from conveyor.prod.dynamodb.task_rows import (
    MAX_SCANNED,
    TASK_NAMES,
    Reference,
    find_references,
    host_of_task,
    last_scanned_index,
    query_after,
    read_events,
    read_task,
)

MOST_REMEMBERED = 10_000
"""Runs whose next index is cached."""
MERGED_IN_MEMORY = 1_000
"""References of a merged list held in memory, about, of all shards together."""

MOST_OPERANDS = 100
"""Values that DynamoDB takes in one IN."""

_KEPT_NAMES = (*TASK_NAMES, "result_ttl_days")
"""The attributes of a job, a run and a task that a kept task is read from."""

ALL_STATUSES = frozenset(TaskStatus)
UNFINISHED = ALL_STATUSES - TERMINAL_TASK_STATES


@decodes_row
def _result_days(run: Item) -> int:
    """Decode for how many days a run keeps results. Raises DamagedRow."""
    days = run["result_ttl_days"]
    if type(days) is not int:
        raise TypeError("result_ttl_days")
    return days


class TaskPages:
    """Reads pages of task rows, and removes rows. `rows_read` and `rows_returned` count since the
    start."""

    def __init__(self, table: Table, reads: RunReads) -> None:
        self.rows_read = 0
        self.rows_returned = 0
        self._table = table
        self._reads = reads
        self._next_indexes: dict[str, int] = {}
        self._scrubbed_to: LRUCache[str, int] = LRUCache(MOST_REMEMBERED)

    async def get(self, place: RunPlace, task_id: str) -> Item | None:
        """Read one row strongly; None if the text is not a task id."""
        if not ids.is_task_id(task_id):
            return None
        item = await self._table.get(place.task_key(task_id))
        if item is not None:
            self.count(1, 1)
            if await self._is_left_over(place, [item]):
                return None
        return item

    async def page(
        self,
        place: RunPlace,
        shard: int,
        wanted: RowFilter,
        *,
        after: int,
        limit: int,
        most_read: int | None,
    ) -> TaskPage:
        """Read a page of one shard; see `Tasks.page_tasks`.

        Each query for a rare status reads more rows than the one before. Few queries then find it,
        and read at most about twice the rows between two rows of that status.
        """
        is_filtered = wanted is not ALL_ITEMS
        most = most_read if most_read is not None else ids.MAX_INDEX
        items: list[Item] = []
        read, at, more = 0, after, True
        size = min(limit, most)
        while more and len(items) < limit and read < most:
            page = await query_after(self._table, place, shard, at, limit=size, where=wanted)
            items += page.items
            read += page.read
            more = page.last is not None
            at = last_scanned_index(page, at)
            size_wanted = limit - len(items)
            if is_filtered:
                size_wanted = min(max(size_wanted, 2 * size), MAX_SCANNED)
            size = min(size_wanted, most - read)
        is_cut = len(items) > limit
        del items[limit:]
        if await self._is_left_over(place, items):
            return TaskPage([], None, read)
        tasks = [read_task(place.run_id, item) for item in items]
        self.count(read, len(tasks))
        if not is_cut and not (more and await self._may_have_more(place, at)):
            return TaskPage(tasks, None, read)
        return TaskPage(tasks, tasks[-1].index if len(tasks) == limit else at, read)

    async def unfinished(self, place: RunPlace, after: int, limit: int) -> list[tuple[int, str]]:
        """Find references of rows that are not terminal; see `Tasks.unfinished_after`."""
        found: list[tuple[int, str]] = []
        async for row in find_references(
            self._table,
            place,
            _filter(UNFINISHED),
            after=after,
            piece=min(limit, MERGED_IN_MEMORY),
            count=self.count,
        ):
            found.append((row.index, row.task_id))
            if len(found) == limit:
                break
        return found

    async def scrub(self, place: RunPlace, limit: int) -> int:
        """Remove at most `limit` rows, about as many of each shard, and return their number: 0 only
        if none is left. Then the items of the failure groups go too."""
        found: list[Key] = []
        share = ceil(limit / place.shards.count)

        async def find(shard: int) -> None:
            page = await query_after(self._table, place, shard, -1, limit=share, keys_only=True)
            found.extend(keys_of(page.items))

        await for_each(find, range(place.shards.count))
        del found[limit:]
        await self._table.delete_many(found)
        if not found:
            await remove_group_items(self._table, place.run_id)
        return len(found)

    async def scrub_unsettled(self, place: RunPlace, limit: int) -> int:
        """Remove at most `limit` rows without a time to live, and return their number: 0 only if
        none is left. Then the items of the failure groups go too."""
        after = self._scrubbed_to.get(place.run_id, -1)
        found: list[Reference] = []
        unsettled = RowFilter("attribute_not_exists(#ttl)", {})
        async for row in find_references(
            self._table, place, unsettled, after=after, piece=min(limit, MERGED_IN_MEMORY)
        ):
            found.append(row)
            if len(found) == limit:
                break
        await self._table.delete_many([place.task_key(row.task_id) for row in found])
        if found:
            self._scrubbed_to[place.run_id] = found[-1].index
        else:
            self._scrubbed_to.pop(place.run_id, None)
            await remove_group_items(self._table, place.run_id)
        return len(found)

    async def _may_have_more(self, place: RunPlace, index: int) -> bool:
        """Return whether a shard may have a row after an index of it."""
        step = place.shards.count if place.shards.scheme is ShardScheme.STRIPE else 1
        if index + step < self._next_indexes.get(place.run_id, 0):
            return True
        row = await self._reads.read_fresh(place)
        if row is None:
            return False
        if len(self._next_indexes) >= MOST_REMEMBERED:
            self._next_indexes.clear()
        # The next index only ever grows, so an old value stays a lower bound.
        self._next_indexes[place.run_id] = row.run.next_index
        return index + step < row.run.next_index

    async def _is_left_over(self, place: RunPlace, items: Sequence[Item]) -> bool:
        """Return whether rows outlived their run: retention has deleted it, and left them to their
        time to live. Reads the run only if one of them is old enough for that."""
        before = self._table.clock.now() // 1_000 + SPARE_DAYS * 86_400
        if not any(item.get(TIME_TO_LIVE, before + 1) <= before for item in items):
            return False
        row = await self._reads.read_fresh(place)
        return row is None or row.expired

    def count(self, read: int, returned: int) -> None:
        """Count rows read, and those of them that were wanted."""
        self.rows_read += read
        self.rows_returned += returned


def _filter(statuses: frozenset[TaskStatus]) -> RowFilter:
    """Return the filter for rows in these statuses."""
    if statuses == ALL_STATUSES:
        return ALL_ITEMS
    values = {f"status_{number}": str(status) for number, status in enumerate(sorted(statuses))}
    marks = ", ".join(f":{name}" for name in values)
    return RowFilter(f"#status IN ({marks})", values)


def _group_filter(groups: GroupFilter) -> RowFilter:
    """Return the filter for failed rows that `groups` takes; it takes some."""
    values: dict[str, PlaceholderValue] = {"failed": str(TaskStatus.FAILED)}
    either = []
    if groups.named:
        either.append(_in_groups(sorted(groups.named), "named", values))
    if groups.outside is not None:
        outside = _in_groups(sorted(groups.outside), "kept", values)
        either.append(f"NOT ({outside})" if outside else "#status = :failed")
    return RowFilter(f"#status = :failed AND ({' OR '.join(either)})", values)


def _in_groups(group_ids: Sequence[str], mark: str, values: dict[str, PlaceholderValue]) -> str:
    """Return the condition that a row is of one of the groups, and add its values."""
    values |= {f"{mark}{number}": group_id for number, group_id in enumerate(group_ids)}
    marks = [f":{mark}{number}" for number in range(len(group_ids))]
    pieces = [marks[start : start + MOST_OPERANDS] for start in range(0, len(marks), MOST_OPERANDS)]
    return " OR ".join(f"failure_group IN ({', '.join(piece)})" for piece in pieces)


class DynamoTasks:
    """The tasks port. Belongs to one event loop.

    `worker` names this process; no other process, now or later, has the same name. `flush_interval`
    is the least time in seconds between two writes of what it has counted in a run; where it is 0,
    reads of a run are not kept apart either. `patience` is the time in seconds during which a
    settlement is retried while the table is unavailable.
    """

    def __init__(
        self, records: DynamoRunRows, *, worker: str, flush_interval: float, patience: float = 0.0
    ) -> None:
        self._records = records
        self._table = records.table
        self._patience = patience
        self._places = records.places
        self._counters = Counters(records, worker=worker, flush_interval=flush_interval)
        self._keeps_apart = flush_interval > 0
        self._reads = RunReads(records, self._reads_apart)
        self._expiry = RowExpiry(self._table, self._reads)
        self._claims = Claims(self._table, self._reads, self._counters, self._expiry)
        self._pages = TaskPages(self._table, self._reads)

    @property
    def rows_read(self) -> int:
        """Task rows read for pages since the start."""
        return self._pages.rows_read

    @property
    def rows_returned(self) -> int:
        """Task rows returned for pages since the start."""
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
        found = await self._find(run_id, task_id)
        if found is None:
            return NotClaimable()
        place, key = found
        token = self._table.clock.new_id()
        return await self._claims.claim(
            ClaimCall(place, task_id, key, worker, now, claimed_until, max_interruptions, token)
        )

    async def release_claim(self, run_id: str, task_id: str, *, worker: str) -> None:
        found = await self._find(run_id, task_id)
        if found is not None:
            await self._claims.release(found[1], worker)
            self._counters.end_claim(found[0], task_id, counts=False)

    async def renew_claims(
        self, claims: Sequence[tuple[str, str, int]], *, claimed_until: int
    ) -> None:
        async def renew(claim: tuple[str, str, int]) -> None:
            run_id, task_id, claim_number = claim
            found = await self._find(run_id, task_id)
            if found is not None:
                self._counters.extend_claim(found[0], task_id, claimed_until)
                await self._claims.renew(found[1], claim_number, claimed_until=claimed_until)

        await for_each_collect(renew, claims)

    async def settle_task(
        self, run_id: str, task_id: str, claim_number: int, settlement: Settlement, *, now: int
    ) -> Settled:
        found = await self._find(run_id, task_id)
        if found is None:
            place = await self._places.find(run_id)
            return Settled(False, None if place is None else await self._status(place))
        place, key = found
        # Take the epoch before the row moves, so that a recount between the two is noticed.
        epoch = self._counters.epoch(place)
        if epoch is None:
            if await self._status(place) is None:
                return Settled(applied=False, run_status=None)
            epoch = self._counters.epoch(place)
            assert epoch is not None  # the run was just seen
        # A caller that gives a claim back does not wait for an unavailable table.
        gives_back = isinstance(settlement, Released | Deferred)
        patience = 0.0 if gives_back else self._patience
        change = settlement_change(settlement, now=now)
        ends = await self._expiry.time_to_live(place, now=now)
        try:
            applied = await settle_row(
                self._table,
                key,
                claim_number,
                change,
                now=now,
                patience=patience,
                time_to_live=ends,
            )
        except BaseException:
            self._counters.end_claim(place, task_id, counts=True)
            self._counters.mark_counters_uncertain(place)
            raise
        delta = change.delta if applied else None
        self._counters.end_claim(place, task_id, counts=delta is not None)
        if delta is not None:
            return await self._counters.add(place, task_id, delta, epoch=epoch)
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
        groups: GroupFilter | None = None,
    ) -> TaskPage:
        place = await self._places.find(run_id)
        wanted = ALL_STATUSES if statuses is None else statuses
        if groups is not None and (
            TaskStatus.FAILED not in wanted or not (groups.named or groups.outside is not None)
        ):
            return TaskPage([], None, 0)
        start = -1 if after is None else after
        if place is None or not wanted or start >= ids.MAX_INDEX:
            return TaskPage([], None, 0)
        if not 0 <= shard < place.shards.count:
            return TaskPage([], None, 0)
        where = _filter(wanted) if groups is None else _group_filter(groups)
        return await self._pages.page(
            place, shard, where, after=start, limit=limit, most_read=most_read
        )

    async def get_task(self, run_id: str, task_id: str) -> Task | None:
        place = await self._places.find(run_id)
        item = None if place is None else await self._pages.get(place, task_id)
        return None if item is None else read_task(run_id, item)

    async def get_kept_task(self, job_id: str, run_id: str, task_id: str) -> KeptTask | None:
        place = await self._places.find(run_id)
        if place is None or place.job_id != job_id or not ids.is_task_id(task_id):
            return None
        keys = (job_key(job_id), place.key, place.task_key(task_id))
        found = await self._table.get_many(keys, names=_KEPT_NAMES)
        if len(found) < len(keys):
            return None
        job, run, task = (found[key] for key in keys)
        self._table.records_read += 2
        self._pages.count(1, 1)
        days = _result_days(run)
        if job["status"] == JobStatus.DELETED or run["status"] == RunStatus.DELETED:
            return None
        return KeptTask(read_task(run_id, task), days)

    async def failure_groups(self, run_id: str) -> FailureGroups | None:
        row = await self._records.read(run_id)
        self._table.records_read += row is not None
        return None if row is None else await read_failure_groups(self._table, row)

    async def task_history(self, run_id: str, task_id: str) -> list[Event] | None:
        place = await self._places.find(run_id)
        item = None if place is None else await self._pages.get(place, task_id)
        return None if item is None else read_events(item)

    async def unfinished_after(self, run_id: str, after: int, limit: int) -> list[tuple[int, str]]:
        place = await self._places.find(run_id)
        if place is None or after >= ids.MAX_INDEX:
            return []
        return await self._pages.unfinished(place, after, limit)

    async def task_hosts(self, run_id: str, tasks: Sequence[tuple[int, str]]) -> list[str]:
        place = await self._places.find(run_id)
        if place is None:
            return [""] * len(tasks)
        keys = [place.task_key(task_id) for _, task_id in tasks]
        items = await self._table.get_many(keys)
        self._pages.count(len(items), len(items))
        return [host_of_task(items[key]) if key in items else "" for key in keys]

    async def scrub_tasks(self, run_id: str, limit: int) -> int:
        place = await self._places.find(run_id)
        row = None if place is None else await self._reads.read_fresh(place)
        if place is None or row is None or row.run.status is not RunStatus.DELETED:
            return 0
        if row.expired:
            return await self._pages.scrub_unsettled(place, limit)
        return await self._pages.scrub(place, limit)

    async def aclose(self) -> None:
        """Write pending additions if the table can be reached. No call may follow."""
        await self._counters.aclose()

    def _reads_apart(self, place: RunPlace) -> float:
        """Return the seconds between the beginnings of two reads of a run's row."""
        if not self._keeps_apart:
            return 0.0
        return max(LEAST_APART, APART_BY_PROCESS * self._counters.processes(place))

    async def _find(self, run_id: str, task_id: str) -> tuple[RunPlace, Key] | None:
        """Find the key of a task's row; None if it cannot exist."""
        place = await self._places.find(run_id)
        if place is None or not ids.is_task_id(task_id):
            return None
        return place, place.task_key(task_id)

    async def _status(self, place: RunPlace) -> RunStatus | None:
        """Read the status of a run after this call; None if it is gone or deleted."""
        row = await self._reads.read_fresh(place)
        if row is None or row.run.status is RunStatus.DELETED:
            return None
        self._counters.observe(row)
        self._expiry.note(row)
        return row.run.status
