"""The runs port on DynamoDB: `DynamoRuns` at the end, after the classes that it passes calls to.

- `Deletion` turns jobs and runs into tombstones, and removes tombstones.
- `DynamoGenerations` keeps the queue generation on the run's row, outside of its version.
- `DispatchReads` discovers runs with work through an index, which lags behind its table by
  milliseconds as a rule. Readers repeat, and start each read a margin before the last one; a single
  run is read from its own row.
- `RecentChanges` reads runs by their last change, through the same index.
- `Tombstones` lists deleted runs, and notes when their scrub was last under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from typing import Any, NamedTuple

import msgspec
from msgspec import structs

from conveyor.aio.concurrency import for_each
from conveyor.domain.errors import ConveyorError, ErrorCode, not_found
from conveyor.domain.model import DispatchableRun, JobStatus, Run, RunFailure, RunStatus
from conveyor.domain.states import LIVE_RUN_STATES, RUN_TRANSITIONS
from conveyor.ports.queues import MOST_HOST_QUEUES
from conveyor.ports.records import (
    ChangedRun,
    DispatchChange,
    IdempotencyScope,
    Rerun,
    RerunRequest,
    RunPosition,
    StoredResponse,
)
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.client import (
    Item,
    Plain,
    Query,
    Table,
    Tagged,
    UnreadableRow,
    conflicting_item,
    contention_error,
    decode_intact,
    decodes_row,
    keys_of,
)
from conveyor.prod.dynamodb.counter_sums import remove_process_items
from conveyor.prod.dynamodb.deliveries import drop_deliveries_of
from conveyor.prod.dynamodb.failure_groups import remove_group_items
from conveyor.prod.dynamodb.job_rows import JobReads, JobRow, job_part, next_version
from conveyor.prod.dynamodb.rerun import DynamoReruns
from conveyor.prod.dynamodb.run_rows import (
    HOST_QUEUES,
    HOSTS,
    RUNS_PER_PAGE,
    TRIES,
    Change,
    DynamoRunRows,
    RunRow,
    RunVersionConflict,
    dependent_runs,
    list_run_rows,
    read_run_row,
)
from conveyor.prod.dynamodb.schema import (
    BY_DISPATCH,
    BY_OWNER,
    END,
    INDEXES,
    PARTITION_KEY,
    SORT_KEY,
    SPREAD,
    Key,
    all_partitions,
    by_time,
    caller_of,
    export_item_key,
    export_mark_key,
    fire_key,
    has_more,
    job_key,
    place_key,
)
from conveyor.prod.sqs.registry import Generation

MOST_RUNS = 99
"""Runs that one transaction deletes beside their job."""
DELETE_RUN = Change(status=RunStatus.DELETED)
EXPIRE_RUN = Change(status=RunStatus.DELETED, sets={"expired": True})


class Deletion:
    """Deletes and purges jobs and runs."""

    def __init__(self, records: DynamoRunRows, job_reads: JobReads) -> None:
        self._records = records
        self._table = records.table
        self._job_reads = job_reads

    async def delete_job(self, caller: str, job_id: str, *, now: int) -> list[str]:
        """Turn the job and its runs to `deleted`; see `Jobs.delete_job`.

        One transaction takes the job and its newest 99 runs, a live one among them; further
        transactions take older runs. The next call completes a deletion that was cut off.
        """
        losses = 0
        while True:
            job = (await self._job_reads.require(caller, job_id)).job
            rows = [row async for row in list_run_rows(self._table, job_id)]
            left = [row for row in rows if row.run.status is not RunStatus.DELETED][:MOST_RUNS]
            parts = self._deletion_parts(job, left, now)
            if not parts:
                return [row.run.run_id for row in reversed(rows)]
            try:
                await self._table.transact(parts, token=self._table.clock.new_id())
            except AwsRefused as refused:
                losses += 1
                if not refused.is_condition:
                    raise
                if losses == TRIES:
                    raise contention_error() from None
            else:
                for row in left:
                    await _make_end_due(self._records, row, now=now)

    async def delete_run(self, caller: str, job_id: str, run_id: str, *, now: int) -> None:
        """Turn a run to `deleted`; see `Runs.delete_run`."""
        await self._job_reads.require(caller, job_id)
        for _ in range(TRIES):
            row = await self._records.read(run_id)
            if row is None or row.run.job_id != job_id:
                raise not_found("run")
            if row.run.status is RunStatus.DELETED:
                return
            await self._refuse_dependents(row)
            try:
                await write_tombstone(self._records, row, now=now)
            except RunVersionConflict:
                continue
            return
        raise contention_error()

    async def purge_run(self, run_id: str) -> None:
        """Remove the tombstone of a deleted run with its exports, pins, failure groups and what
        processes have counted; see `Runs.purge_run`."""
        row = await self._records.read(run_id)
        if row is None or row.run.status is not RunStatus.DELETED:
            return
        await self._table.delete_many(await self._exports_of(row))
        await self._table.delete_many(await self._pins_of(row))
        await remove_group_items(self._table, run_id)
        await remove_process_items(self._table, run_id, row.parts)
        parts = [self._table.delete_part(key) for key in (row.place.key, place_key(run_id))]
        await self._table.transact(parts, token=self._table.clock.new_id())

    async def purge_job(self, job_id: str) -> None:
        """Remove the tombstone of a deleted job that has no runs, last of all that is left of it;
        see `Jobs.purge_job`."""
        async for _ in list_run_rows(self._table, job_id, limit=1):
            return
        item = await self._table.get(job_key(job_id))
        if item is None or item.get("status") != JobStatus.DELETED:
            return
        await drop_deliveries_of(self._table, item["caller"], job_id)
        await self._delete_fires(job_id)
        try:
            await self._table.delete(
                job_key(job_id),
                condition="#status = :deleted",
                deleted=str(JobStatus.DELETED),
            )
        except AwsRefused as refused:
            if not refused.is_condition:
                raise

    async def _delete_fires(self, job_id: str) -> None:
        fires = fire_key(job_id, "")
        async for page in self._table.pages(Query(fires.pk, begins_with=fires.sk, keys_only=True)):
            await self._table.delete_many(keys_of(page.items))

    def _deletion_parts(self, job: JobRow, rows: list[RunRow], now: int) -> list[dict[str, Any]]:
        parts = [self._records.change_part(row, DELETE_RUN, now=now) for row in rows]
        if job.job.status is not JobStatus.DELETED:
            parts.append(
                job_part(self._table, job, next_version(job, now=now, status=JobStatus.DELETED))
            )
        return parts

    async def _refuse_dependents(self, row: RunRow) -> None:
        for other_id in await dependent_runs(self._table, row.run.job_id, row.run.run_id):
            other = await self._records.read(other_id)
            if other is not None and other.run.status is not RunStatus.DELETED:
                raise ConveyorError(
                    ErrorCode.RUN_HAS_DESCENDANTS,
                    "a newer run still uses this run's results; delete that run first",
                )

    async def _exports_of(self, row: RunRow) -> list[Key]:
        """Return the keys of a deleted run's exports and their marks. Strongly read, because an
        index may lack an export of a moment ago; a deleted run gets no more of them."""
        found: list[Key] = []
        mark = export_mark_key(row.run.job_id, row.run.run_id, "")
        async for page in self._table.pages(Query(mark.pk, begins_with=mark.sk, keys_only=True)):
            for key in keys_of(page.items):
                found += [key, export_item_key(key.sk.rpartition("#")[2])]
        return found

    async def _pins_of(self, row: RunRow) -> list[Key]:
        found: list[Key] = []
        partition = row.place.key.pk
        async for page in self._table.pages(Query(partition, begins_with="Pin#", keys_only=True)):
            found += [key for key in keys_of(page.items) if key.sk.endswith(f"#{row.run.run_id}")]
        return found


async def write_tombstone(records: DynamoRunRows, row: RunRow, *, now: int) -> None:
    """Turn a run to `deleted` and make the newest other run the job's latest, in one transaction
    under the versions of both. Makes one try; raises RunVersionConflict."""
    await _write_tombstone(records, row, DELETE_RUN, now=now, last_takes_job=False)


async def delete_ended_run(records: DynamoRunRows, row: RunRow, *, now: int) -> None:
    """Write a tombstone as `write_tombstone` does, and delete the job if no other run is left, and
    none will be made. Its settled rows are left to their time to live."""
    await _write_tombstone(records, row, EXPIRE_RUN, now=now, last_takes_job=True)


async def _write_tombstone(
    records: DynamoRunRows, row: RunRow, change: Change, *, now: int, last_takes_job: bool
) -> None:
    table = records.table
    parts = [records.change_part(row, change, now=now)]
    job = await JobReads(records).job(row.run.job_id)
    if job is not None:
        other = await _newest_other(table, row)
        fields: dict[str, Any] = {"latest_run_id": None if other is None else other.run.run_id}
        if other is None and last_takes_job and job.job.goes_with_its_runs:
            fields["status"] = JobStatus.DELETED
        sequence = 0 if other is None else other.run.run_sequence
        after = structs.replace(next_version(job, now=now, **fields), latest_run_sequence=sequence)
        parts.append(job_part(table, job, after))
    try:
        await table.transact(parts, token=table.clock.new_id())
    except AwsRefused as refused:
        if not refused.is_condition:
            raise
        raise RunVersionConflict from None
    await _make_end_due(records, row, now=now)


async def _make_end_due(records: DynamoRunRows, row: RunRow, *, now: int) -> None:
    """Make the outbox entries due of a run that was just turned to `deleted`, from its row before
    that: at its first end, even if the process that ended it died before it could."""
    run = structs.replace(row.run, status=RunStatus.DELETED) if row.live else row.run
    ended_at = row.ended_at or max(row.run.updated_at, now)
    await records.make_end_due(structs.replace(row, run=run, ended_at=ended_at))


async def _newest_other(table: Table, row: RunRow) -> RunRow | None:
    """Find the newest other run. Read after the job: deleting a run moves its job's version too."""
    async for other in list_run_rows(table, row.run.job_id):
        if other.run.run_id != row.run.run_id and other.run.status is not RunStatus.DELETED:
            return other
    return None


GENERATION = "queue_generation"
GENERATION_MOVED_BY = "queue_moved_by"
"""The attribute with the token of the last move of the generation, whose answer may have been
lost."""

_NO_GENERATION = Generation(0, live=False)


class DynamoGenerations:
    """Generations of runs' queues, and of the queues of their hosts. They leave the run's version
    alone, since no decision about the run depends on them."""

    def __init__(self, records: DynamoRunRows) -> None:
        self._records = records
        self._table = records.table

    async def current(self, run_id: str, host: int | None = None) -> Generation:
        """Read the current generation."""
        place = await self._records.places.find(run_id)
        item = None if place is None else await self._table.get(place.key)
        return _read_generation(item, host)

    async def follow(self, run_id: str, known: int, host: int | None = None) -> Generation:
        """Raise the generation of a live run from `known` to `known` + 1, unless another process
        has; return the current one."""
        place = await self._records.places.find(run_id)
        if place is None:
            return _NO_GENERATION
        token = self._table.clock.new_id()
        update = f"SET {GENERATION} = :next, {GENERATION_MOVED_BY} = :token"
        condition = f"{GENERATION} = :known"
        values: dict[str, Plain] = {"next": known + 1, "token": token, "known": known}
        if host is not None:
            of_host = f"{HOST_QUEUES}.h{host}"
            update = f"SET {of_host} = :next"
            condition = f"{of_host}[0] = :known" if known else f"attribute_not_exists({of_host})"
            # Without its list of queues a run has none for hosts, and the update is refused.
            condition = f"attribute_exists({HOST_QUEUES}) AND {condition}"
            values = {"next": [known + 1, token], **({"known": known} if known else {})}
        live = {f"live_{number}": str(status) for number, status in enumerate(LIVE_RUN_STATES)}
        among = ", ".join(f":{name}" for name in live)
        try:
            item = await self._table.update(
                place.key,
                update,
                condition=f"{condition} AND #status IN ({among})",
                **values,
                **live,
            )
        except AwsRefused as refused:
            if not refused.is_condition:
                raise
            return _read_generation(conflicting_item(refused), host, token=token)
        return _read_generation(item, host, token=token)


def _read_generation(item: Item | None, host: int | None, *, token: str = "") -> Generation:
    if item is None:
        return _NO_GENERATION
    hosts = {int(name[1:]): queue for name, queue in item.get(HOST_QUEUES, {}).items()}
    number, moved_by = item[GENERATION], item.get(GENERATION_MOVED_BY)
    if host is not None:
        number, moved_by = hosts.get(host, (0, None))
    return Generation(
        number,
        live=item["status"] in LIVE_RUN_STATES,
        moved=bool(token) and moved_by == token,
        hosts={one: generation for one, (generation, _) in hosts.items()},
    )


class DispatchReads:
    """Discovers runs that may have work; the `Dispatchable` part of the runs port."""

    def __init__(self, records: DynamoRunRows) -> None:
        self._records = records

    async def dispatchable_runs(self) -> list[DispatchableRun]:
        """Read all runs with work from the index, in order of run ids."""
        items = await query_all(self._records.table, all_partitions("active"), index=BY_DISPATCH)
        found = {change.run_id: change.run for change in await self._changes(items)}
        return [run for _, run in sorted(found.items()) if run is not None]

    async def dispatch_changes(self, *, since: int) -> list[DispatchChange]:
        """Read runs changed at or after `since` from the index, in the order of the changes."""
        items = await query_all(
            self._records.table,
            [*all_partitions("active"), *all_partitions("idle")],
            index=BY_DISPATCH,
            between=(by_time(since, ""), END),
        )
        # A run that moves between partitions may be found in both: the later entry counts.
        items.sort(key=lambda item: str(item["gsi2sk"]))
        return list({change.run_id: change for change in await self._changes(items)}.values())

    async def _changes(self, items: list[Item]) -> list[DispatchChange]:
        """Decode entries of the dispatch index. The runs of which it does not have everything are
        read from their rows, all at once."""
        changes = decode_intact(_read_change, items)
        working = {change.run_id for change in changes if change.run is not None}
        keys = {
            item["run_id"]: Key(item[PARTITION_KEY], item[SORT_KEY])
            for item in items
            if item.get("run_id") in working and has_more(item[INDEXES[BY_DISPATCH][1]])
        }
        if not keys:
            return changes
        found = await self._records.table.get_many(list(keys.values()))
        self._records.table.records_read += len(found)
        rows = {row.run.run_id: row for row in decode_intact(read_run_row, found.values())}
        return [
            DispatchChange(change.run_id, _unless_idle(rows.get(change.run_id)))
            if change.run_id in keys
            else change
            for change in changes
        ]

    async def dispatchable_run(self, run_id: str) -> DispatchableRun | None:
        """Read one run strongly; None if it has no work, or is unreadable for this version."""
        try:
            row = await self._records.read(run_id)
        except UnreadableRow:
            return None
        return _unless_idle(row)


async def query_all(
    table: Table,
    partitions: list[str],
    *,
    index: str,
    between: tuple[str, str] | None = None,
    keys_only: bool = False,
) -> list[Item]:
    """Query several partitions of an index concurrently; see `Query`."""
    found: list[Item] = []

    async def read(partition: str) -> None:
        async for page in table.pages(
            Query(partition, index=index, between=between, keys_only=keys_only)
        ):
            found.extend(page.items)

    await for_each(read, partitions)
    return found


_DISCOVERED = tuple(
    name
    for name in DispatchableRun.__struct_fields__
    if name not in ("traceparent", "caller", "politeness", "hosts")
)
"""The trace of a run is not in the dispatch index: only who reads the run itself learns it. The
caller is in an entry's place, and so is a mark of runs with politeness."""


@decodes_row
def _read_change(item: Item) -> DispatchChange:
    """Decode an entry of the dispatch index, which projects everything that discovery needs."""
    works = RunStatus(item["status"]) is RunStatus.RUNNING and not item["paused"]
    run = {name: item[name] for name in _DISCOVERED}
    run["caller"] = caller_of(item[INDEXES[BY_DISPATCH][1]]) or ""
    # Convert strictly, so that a damaged entry fails here and not in the dispatcher.
    read = msgspec.convert(run, DispatchableRun)
    return DispatchChange(read.run_id, read if works else None)


def _unless_idle(row: RunRow | None) -> DispatchableRun | None:
    if row is None or row.run.status is not RunStatus.RUNNING or row.run.paused:
        return None
    return _dispatchable(row)


def _dispatchable(row: RunRow) -> DispatchableRun:
    return DispatchableRun(
        run_id=row.run.run_id,
        job_id=row.run.job_id,
        priority=row.priority,
        max_inflight=row.max_inflight,
        created_at=row.run.created_at,
        traceparent=row.run.traceparent,
        caller=row.caller,
        politeness=row.politeness,
        hosts=row.hosts,
    )


MOST_LOOKED_AT = 1_000
"""Entries of the index that one page of runs by their last change reads, about."""
SPARE = 8
"""Entries read per partition beyond its share, because no share is exact."""


class _Entry(NamedTuple):
    """A run in the index of changes: its place there, which is newer the greater it is, and the key
    of its row."""

    place: str
    key: Key
    run_id: str

    @property
    def position(self) -> RunPosition:
        """The place as the port has it."""
        return RunPosition(int(self.place.partition("#")[0]), self.run_id)


@dataclass(slots=True)
class _ChangeCursor:
    """The position in one partition of the index."""

    partition: str
    entries: deque[_Entry] = field(default_factory=deque)
    last: dict[str, Tagged] | None = None
    done: bool = False


class RecentChanges:
    """Reads runs by their last change, of all callers or of one.

    The index shows where to look, in eight partitions that are merged; rows of runs and jobs found
    there are read strongly. Of one caller's runs, and of live or ended ones, the index is read at
    most MOST_LOOKED_AT entries deep, so a page may be short though more runs follow further down.
    """

    def __init__(self, records: DynamoRunRows, caller: str | None, *, live: bool | None) -> None:
        self._records = records
        self._table = records.table
        self._caller = caller
        self._live = live
        self._looked_at = 0

    async def read(self, before: RunPosition | None, limit: int) -> list[ChangedRun]:
        """Return a page; see `RunChanges.changed_runs`."""
        found: dict[str, ChangedRun] = {}
        async for entries in self._entries(before, limit):
            for changed in await self._runs(entries):
                # A run that moves meanwhile is found twice: the first entry is the later one.
                found.setdefault(changed.run.run_id, changed)
            if len(found) >= limit:
                break
        return list(found.values())[:limit]

    async def _entries(self, before: RunPosition | None, limit: int) -> AsyncIterator[list[_Entry]]:
        """Find entries that may be wanted, latest first, about `limit` at a time."""
        # Runs that have ended are idle.
        kinds = ("idle",) if self._live is False else ("active", "idle")
        cursors = [_ChangeCursor(one) for kind in kinds for one in all_partitions(kind)]
        below = END if before is None else by_time(before.changed_at, before.run_id)
        rare = self._caller is not None or self._live is not None
        share = MOST_LOOKED_AT // len(cursors) if rare else ceil(limit / SPREAD) + SPARE
        ready: list[_Entry] = []
        while True:
            empty = [one for one in cursors if not one.entries and not one.done]
            if empty and self._looked_at >= MOST_LOOKED_AT:
                break
            await for_each(partial(self._look, below=below, limit=share), empty)
            if any(not one.entries and not one.done for one in empty):
                continue
            filled = [one for one in cursors if one.entries]
            if not filled:
                break
            ready.append(max(filled, key=lambda one: one.entries[0].place).entries.popleft())
            if len(ready) >= limit:
                yield ready
                ready = []
        if ready:
            yield ready

    async def _look(self, cursor: _ChangeCursor, *, below: str, limit: int) -> None:
        """Read further in one partition."""
        page = await self._table.page(
            Query(
                cursor.partition,
                index=BY_DISPATCH,
                below=below,
                forward=False,
                limit=limit,
                start=cursor.last,
            )
        )
        self._looked_at += page.read
        cursor.entries.extend(
            entry for item in page.items if (entry := self._wanted(item)) is not None
        )
        cursor.last, cursor.done = page.last, page.last is None

    def _wanted(self, item: Item) -> _Entry | None:
        """Return the entry of a run that may be wanted."""
        place = str(item[INDEXES[BY_DISPATCH][1]])
        caller = caller_of(place)
        status = item.get("status")
        if status == RunStatus.DELETED or not self._is_kind(status):
            return None
        if self._caller is not None and caller not in (None, self._caller):
            return None
        return _Entry(place, Key(item[PARTITION_KEY], item[SORT_KEY]), place.split("#")[1])

    async def _runs(self, entries: Sequence[_Entry]) -> list[ChangedRun]:
        """Read the runs of entries, and their jobs; leave out those that are not wanted."""
        items = await self._table.get_many([entry.key for entry in entries])
        self._table.records_read += len(items)
        rows = {row.place.key: row for row in decode_intact(read_run_row, items.values())}
        kept = await self._records.summed_all(filter(self._takes, rows.values()))
        jobs = await JobReads(self._records).jobs({row.run.job_id for row in kept.values()})
        found: list[ChangedRun] = []
        for entry in entries:
            row = kept.get(entry.key)
            job = None if row is None else jobs.get(row.run.job_id)
            if row is None or job is None or job.status is JobStatus.DELETED:
                continue
            run = (await self._records.with_late_status(row)).run
            if self._is_kind(run.status):
                found.append(ChangedRun(job, run, entry.position))
        return found

    def _is_kind(self, status: object) -> bool:
        return self._live is None or self._live is (status in LIVE_RUN_STATES)

    def _takes(self, row: RunRow) -> bool:
        is_callers = self._caller is None or row.caller == self._caller
        return is_callers and row.run.status is not RunStatus.DELETED


class Tombstones:
    """Lists and touches the rows of deleted runs."""

    def __init__(self, records: DynamoRunRows) -> None:
        self._records = records
        self._table = records.table

    async def find_all(self, *, before: int | None) -> list[tuple[str, str]]:
        """List (job_id, run_id) by run id; see `Runs.deleted_runs`. With `before`, reads the rows,
        because no index carries their time."""
        items = await query_all(self._table, all_partitions("deleted"), index=BY_OWNER)
        if before is None:
            found = dict(decode_intact(_read_index_entry, items))
        else:
            rows = await self._table.get_many(list(dict.fromkeys(keys_of(items))))
            found = {
                row.run.run_id: row.run.job_id
                for row in decode_intact(read_run_row, rows.values())
                if row.run.status is RunStatus.DELETED and row.run.updated_at < before
            }
        return [(found[run_id], run_id) for run_id in sorted(found)]

    async def touch(self, run_id: str, *, now: int) -> None:
        """Note that a scrub is under way; see `Runs.touch_tombstone`. Leaves the row's version
        alone, since no decision depends on that time."""
        place = await self._records.places.find(run_id)
        if place is None:
            return
        try:
            await self._table.update(
                place.key,
                "SET updated_at = :now",
                condition="#status = :deleted AND updated_at < :now",
                deleted=str(RunStatus.DELETED),
                now=now,
            )
        except AwsRefused as refused:
            if not refused.is_condition:
                raise


@decodes_row
def _read_index_entry(item: Item) -> tuple[str, str]:
    return str(item["run_id"]), str(item["job_id"])


class DynamoRuns:
    """The runs port."""

    def __init__(self, records: DynamoRunRows) -> None:
        self._records = records
        self._job_reads = JobReads(records)
        self._deletion = Deletion(records, self._job_reads)
        self._dispatch = DispatchReads(records)
        self._reruns = DynamoReruns(records)
        self._tombstones = Tombstones(records)

    async def get_run(self, caller: str, job_id: str, run_id: str | None) -> Run | None:
        if run_id is None:
            latest = await self._list(caller, job_id, below=None, limit=1, known_only=False)
            return latest[0] if latest else None
        row = await self._records.read(run_id)
        self._records.table.records_read += row is not None
        if row is None or row.caller != caller or row.run.job_id != job_id:
            return None
        return (await self._records.with_late_status(row)).run

    async def find_run(self, run_id: str) -> Run | None:
        """Return a run of any caller, for an administrator."""
        row = await self._records.read(run_id)
        return None if row is None else (await self._records.with_late_status(row)).run

    async def hosts_of(self, run_id: str) -> tuple[str, ...]:
        """Return the hosts of a run that have a queue of their own, for an administrator."""
        place = await self._records.places.find(run_id)
        row = None if place is None else await self._records.read_bare(place)
        return () if row is None else row.hosts

    async def list_runs(
        self, caller: str, job_id: str, *, before: int | None, limit: int
    ) -> list[Run]:
        # A list leaves out runs of a newer shape.
        return await self._list(caller, job_id, below=before, limit=limit, known_only=True)

    async def stop_run(self, caller: str, job_id: str, *, now: int) -> Run:
        def stop(run: Run) -> Change | None:
            if run.status is RunStatus.STOPPED:
                return None
            if RunStatus.STOPPED not in RUN_TRANSITIONS[run.status]:
                raise ConveyorError(
                    ErrorCode.RUN_NOT_STOPPABLE, f"the latest run is {run.status} already"
                )
            return Change(status=RunStatus.STOPPED)

        return await self._change_latest(caller, job_id, stop, now=now)

    async def pause_run(self, caller: str, job_id: str, *, paused: bool, now: int) -> Run:
        def pause(run: Run) -> Change | None:
            if run.status not in LIVE_RUN_STATES:
                raise ConveyorError(ErrorCode.CONFLICT, f"the latest run is {run.status} already")
            return None if run.paused is paused else Change(paused=paused)

        return await self._change_latest(caller, job_id, pause, now=now)

    async def fail_run(self, run_id: str, *, reason: RunFailure, detail: str, now: int) -> bool:
        failed = Change(
            status=RunStatus.FAILED, sets={"failure_reason": str(reason), "failure_detail": detail}
        )
        row = await self._records.read(run_id)
        if row is None:
            return False
        after = await self._records.change_with_retry(
            row, lambda known: failed if known.live else None, now=now
        )
        return after is not None

    async def rerun(
        self,
        request: RerunRequest,
        *,
        answer: Callable[[Rerun], StoredResponse],
        once: IdempotencyScope | None,
    ) -> StoredResponse:
        return await self._reruns.rerun(request, answer=answer, once=once)

    async def delete_run(self, caller: str, job_id: str, run_id: str, *, now: int) -> None:
        await self._deletion.delete_run(caller, job_id, run_id, now=now)

    async def purge_run(self, run_id: str) -> None:
        await self._deletion.purge_run(run_id)

    async def add_hosts(self, run_id: str, hosts: Sequence[str], *, now: int) -> tuple[str, ...]:
        place = await self._records.places.find(run_id)
        for _ in range(TRIES):
            row = None if place is None else await self._records.read_bare(place)
            if row is None:
                return ()
            after = tuple(dict.fromkeys([*row.hosts, *hosts]))[:MOST_HOST_QUEUES]
            if after == row.hosts or not row.live:
                return row.hosts
            sets: dict[str, Plain] = {HOSTS: list(after)}
            if not row.hosts:
                sets[HOST_QUEUES] = {}
            try:
                # With its status, though it stays as it is, the run moves in the dispatch index.
                change = Change(status=row.run.status, sets=sets)
                return (await self._records.change(row, change, now=now)).hosts
            except RunVersionConflict:
                continue
        raise contention_error()

    async def dispatchable_runs(self) -> list[DispatchableRun]:
        return await self._dispatch.dispatchable_runs()

    async def dispatch_changes(self, *, since: int) -> list[DispatchChange]:
        return await self._dispatch.dispatch_changes(since=since)

    async def dispatchable_run(self, run_id: str) -> DispatchableRun | None:
        return await self._dispatch.dispatchable_run(run_id)

    async def changed_runs(
        self,
        caller: str | None,
        *,
        before: RunPosition | None,
        limit: int,
        live: bool | None = None,
    ) -> list[ChangedRun]:
        return await RecentChanges(self._records, caller, live=live).read(before, limit)

    async def deleted_runs(self, *, before: int | None = None) -> list[tuple[str, str]]:
        return await self._tombstones.find_all(before=before)

    async def run_exists(self, run_id: str) -> bool:
        return await self._records.read(run_id) is not None

    async def touch_tombstone(self, run_id: str, *, now: int) -> None:
        await self._tombstones.touch(run_id, now=now)

    async def _list(
        self, caller: str, job_id: str, *, below: int | None, limit: int, known_only: bool
    ) -> list[Run]:
        found: list[Run] = []
        async for row in list_run_rows(
            self._records.table,
            job_id,
            below=below,
            limit=min(limit, RUNS_PER_PAGE),
            known_only=known_only,
        ):
            if row.caller != caller:
                return []
            if row.run.status is not RunStatus.DELETED:
                found.append((await self._records.with_late_status(row)).run)
                if len(found) == limit:
                    break
        return found

    async def _change_latest(
        self, caller: str, job_id: str, decision: Callable[[Run], Change | None], *, now: int
    ) -> Run:
        """Change the latest run of a job as `decision` says, and return it; retry after lost
        races."""
        for _ in range(TRIES):
            row = await self._job_reads.require_latest_run(caller, job_id)
            change = decision(row.run)
            if change is None:
                return row.run
            try:
                after = await self._records.change(row, change, now=now)
                # What was counted before the change shows in its answer.
                return (await self._records.summed_anew(after)).run
            except RunVersionConflict:
                continue
        raise contention_error()
