"""The runs port on one DynamoDB table.

Deleting: jobs and runs turned to tombstones, and tombstones removed at the end.

Which of a run's queues is the present one, kept on the run's row beside its version.

Which runs may have work: what workers discover, through an index by the time of change.

On AWS an index lags behind its table, by milliseconds as a rule. A reader looks again and again,
and begins each look a margin before the last one; a single run is read from its own row.

Tombstones: the rows of deleted runs, and since when nobody is at work on their scrub.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import structs

from conveyor.aio.concurrency import for_each
from conveyor.domain.errors import ConveyorError, ErrorCode, not_found
from conveyor.domain.model import DispatchableRun, JobStatus, Run, RunFailure, RunStatus
from conveyor.domain.states import LIVE_RUN_STATES, RUN_TRANSITIONS
from conveyor.ports.records import (
    DispatchChange,
    IdempotencyScope,
    Rerun,
    RerunRequest,
    StoredResponse,
)
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.client import (
    Item,
    Query,
    Table,
    UnreadableRow,
    changed_too_often,
    condition_met,
    keys_of,
    readable,
    whole,
)
from conveyor.prod.dynamodb.job_rows import JobReads, JobRow, job_part, moved
from conveyor.prod.dynamodb.rerun import DynamoReruns
from conveyor.prod.dynamodb.run_rows import (
    PIECE,
    TRIES,
    Change,
    DynamoRunRows,
    RunMoved,
    RunRow,
    dependants,
    read_run_row,
    runs_of,
)
from conveyor.prod.dynamodb.schema import (
    BY_DISPATCH,
    BY_OWNER,
    END,
    Key,
    by_time,
    every,
    export_item_key,
    exported_key,
    job_key,
    place_key,
)
from conveyor.prod.sqs.registry import Generation

MOST_RUNS = 99
"""Runs that one transaction takes beside their job."""
DELETED = Change(status=RunStatus.DELETED)


class Deletion:
    """Deletes jobs and runs."""

    def __init__(self, records: DynamoRunRows, views: JobReads) -> None:
        self._records = records
        self._table = records.table
        self._views = views

    async def delete_job(self, caller: str, job_id: str, *, now: int) -> list[str]:
        """Turn the job and all its runs to `deleted`; see `Jobs.delete_job`.

        The newest runs, a live one among them, go together with the job; of a job of more than 99,
        the others right after. A call that was cut off there is completed by the next one.
        """
        losses = 0
        while True:
            job = (await self._views.need(caller, job_id)).job
            rows = [row async for row in runs_of(self._table, job_id)]
            parts = self._end_of_job(job, rows, now)
            if not parts:
                return [row.run.run_id for row in reversed(rows)]
            try:
                await self._table.transact(parts, token=self._table.clock.new_id())
            except AwsRefused as refused:
                losses += 1
                if not refused.is_condition:
                    raise
                if losses == TRIES:
                    raise changed_too_often() from None
            else:
                for row in rows:
                    await _tell_end(self._records, row, now=now)

    async def delete_run(self, caller: str, job_id: str, run_id: str, *, now: int) -> None:
        """Turn a run to `deleted`; see `Runs.delete_run`."""
        await self._views.need(caller, job_id)
        for _ in range(TRIES):
            row = await self._records.read(run_id)
            if row is None or row.run.job_id != job_id:
                raise not_found("run")
            if row.run.status is RunStatus.DELETED:
                return
            await self._refuse_pinned(row)
            try:
                await bury(self._records, row, now=now)
            except RunMoved:
                continue
            return
        raise changed_too_often()

    async def purge_run(self, run_id: str) -> None:
        """Remove the tombstone of a deleted run, with what hangs on it; see `Runs.purge_run`."""
        row = await self._records.read(run_id)
        if row is None or row.run.status is not RunStatus.DELETED:
            return
        await self._table.delete_many(await self._exports_of(row))
        await self._table.delete_many(await self._pins_held_by(row))
        parts = [self._table.delete_part(key) for key in (row.place.key, place_key(run_id))]
        await self._table.transact(parts, token=self._table.clock.new_id())

    async def purge_job(self, job_id: str) -> None:
        """Remove the tombstone of a deleted job without runs; see `Jobs.purge_job`."""
        async for _ in runs_of(self._table, job_id, limit=1):
            return
        try:
            await self._table.delete(
                job_key(job_id),
                condition="#status = :deleted",
                deleted=str(JobStatus.DELETED),
            )
        except AwsRefused as refused:
            if not refused.is_condition:
                raise

    def _end_of_job(
        self, job: JobRow, newest_first: list[RunRow], now: int
    ) -> list[dict[str, Any]]:
        standing = [row for row in newest_first if row.run.status is not RunStatus.DELETED]
        parts = [self._records.part(row, DELETED, now=now) for row in standing[:MOST_RUNS]]
        if job.job.status is not JobStatus.DELETED:
            parts.append(job_part(self._table, job, moved(job, now=now, status=JobStatus.DELETED)))
        return parts

    async def _refuse_pinned(self, row: RunRow) -> None:
        for other_id in await dependants(self._table, row.run.job_id, row.run.run_id):
            other = await self._records.read(other_id)
            if other is not None and other.run.status is not RunStatus.DELETED:
                raise ConveyorError(
                    ErrorCode.RUN_HAS_DESCENDANTS, "a newer run shows results that this run owns"
                )

    async def _exports_of(self, row: RunRow) -> list[Key]:
        """The exports of a deleted run, which gets no more of them, with their marks: read
        strongly, as an index does not know yet of one that was made a moment before."""
        found: list[Key] = []
        mark = exported_key(row.run.job_id, row.run.run_id, "")
        async for page in self._table.pages(Query(mark.pk, begins_with=mark.sk, keys_only=True)):
            for key in keys_of(page.items):
                found += [key, export_item_key(key.sk.rpartition("#")[2])]
        return found

    async def _pins_held_by(self, row: RunRow) -> list[Key]:
        found: list[Key] = []
        partition = row.place.key.pk
        async for page in self._table.pages(Query(partition, begins_with="Pin#", keys_only=True)):
            found += [key for key in keys_of(page.items) if key.sk.endswith(f"#{row.run.run_id}")]
        return found


async def bury(records: DynamoRunRows, row: RunRow, *, now: int) -> None:
    """Turn a run to `deleted` and let its job's latest run be the newest other one, in one
    transaction under the versions of both. One try; raises RunMoved."""
    await _bury(records, row, now=now, last_takes_job=False)


async def delete_ended(records: DynamoRunRows, row: RunRow, *, now: int) -> None:
    """`bury`, with its job too where no other run of it is left."""
    await _bury(records, row, now=now, last_takes_job=True)


async def _bury(records: DynamoRunRows, row: RunRow, *, now: int, last_takes_job: bool) -> None:
    table = records.table
    parts = [records.part(row, DELETED, now=now)]
    job = await JobReads(records).job(row.run.job_id)
    if job is not None:
        other = await _newest_other(table, row)
        fields: dict[str, Any] = {"latest_run_id": None if other is None else other.run.run_id}
        if other is None and last_takes_job:
            fields["status"] = JobStatus.DELETED
        sequence = 0 if other is None else other.run.run_sequence
        after = structs.replace(moved(job, now=now, **fields), latest_run_sequence=sequence)
        parts.append(job_part(table, job, after))
    try:
        await table.transact(parts, token=table.clock.new_id())
    except AwsRefused as refused:
        if not refused.is_condition:
            raise
        raise RunMoved from None
    await _tell_end(records, row, now=now)


async def _tell_end(records: DynamoRunRows, row: RunRow, *, now: int) -> None:
    """Tell the end of a run whose row, as it was before, has just been turned to `deleted`: its
    first end, also where whoever brought that about did not come to tell it."""
    run = structs.replace(row.run, status=RunStatus.DELETED) if row.live else row.run
    ended_at = row.ended_at or max(row.run.updated_at, now)
    await records.tell_end(structs.replace(row, run=run, ended_at=ended_at))


async def _newest_other(table: Table, row: RunRow) -> RunRow | None:
    """Read after the job was: whoever deletes one of a job's runs moves the job too."""
    async for other in runs_of(table, row.run.job_id):
        if other.run.run_id != row.run.run_id and other.run.status is not RunStatus.DELETED:
            return other
    return None


ATTRIBUTE = "queue_generation"
MOVED_BY = "queue_moved_by"
"""Holds the token of the call that moved the number last: its answer may have been lost."""

_GONE = Generation(0, live=False)


class DynamoGenerations:
    """Generations of the queues of runs. Moves without the run's version: no decision about the run
    hangs on it."""

    def __init__(self, records: DynamoRunRows) -> None:
        self._records = records
        self._table = records.table

    async def current(self, run_id: str) -> Generation:
        """The present one."""
        place = await self._records.places.find(run_id)
        return _GONE if place is None else _read(await self._table.get(place.key))

    async def follow(self, run_id: str, known: int) -> Generation:
        """Make the number of a live run `known` + 1, unless another did so before; the present
        one."""
        place = await self._records.places.find(run_id)
        if place is None:
            return _GONE
        token = self._table.clock.new_id()
        live = {f"live_{number}": str(status) for number, status in enumerate(LIVE_RUN_STATES)}
        among = ", ".join(f":{name}" for name in live)
        try:
            item = await self._table.update(
                place.key,
                f"SET {ATTRIBUTE} = :next, {MOVED_BY} = :token",
                condition=f"{ATTRIBUTE} = :known AND #status IN ({among})",
                next=known + 1,
                token=token,
                known=known,
                **live,
            )
        except AwsRefused as refused:
            if not refused.is_condition:
                raise
            return _read(condition_met(refused), token=token)
        return _read(item, token=token)


def _read(item: Item | None, *, token: str = "") -> Generation:
    if item is None:
        return _GONE
    return Generation(
        item[ATTRIBUTE],
        live=item["status"] in LIVE_RUN_STATES,
        moved=bool(token) and item.get(MOVED_BY) == token,
    )


class DispatchReads:
    """The discovering part of the runs port."""

    def __init__(self, records: DynamoRunRows) -> None:
        self._records = records

    async def dispatchable_runs(self) -> list[DispatchableRun]:
        """Every run that is running and not paused, as far as the index knows, by run id."""
        items = await read_all(self._records.table, every("active"), index=BY_DISPATCH)
        found = {change.run_id: change.run for change in readable(_change, items)}
        return [run for _, run in sorted(found.items()) if run is not None]

    async def dispatch_changes(self, *, since: int) -> list[DispatchChange]:
        """Runs whose status or pause was changed at or after `since`, as far as the index knows, in
        the order of the changes."""
        items = await read_all(
            self._records.table,
            [*every("active"), *every("idle")],
            index=BY_DISPATCH,
            between=(by_time(since, ""), END),
        )
        # A run on its way from one partition to another may be found in both.
        items.sort(key=lambda item: str(item["gsi2sk"]))
        return list({change.run_id: change for change in readable(_change, items)}.values())

    async def dispatchable_run(self, run_id: str) -> DispatchableRun | None:
        """One run, if it is running and not paused, strongly read. One of a newer shape, or a
        damaged one, is none of this process's."""
        try:
            row = await self._records.read(run_id)
        except UnreadableRow:
            return None
        if row is None or row.run.status is not RunStatus.RUNNING or row.run.paused:
            return None
        return _dispatchable(row)


async def read_all(
    table: Table,
    partitions: list[str],
    *,
    index: str,
    between: tuple[str, str] | None = None,
    keys_only: bool = False,
) -> list[Item]:
    """Return the items of several partitions of an index, read all at once; see `Query`."""
    found: list[Item] = []

    async def read(partition: str) -> None:
        async for page in table.pages(
            Query(partition, index=index, between=between, keys_only=keys_only)
        ):
            found.extend(page.items)

    await for_each(read, partitions)
    return found


@whole
def _change(item: Item) -> DispatchChange:
    """What the index says of a run. It holds the whole row, so that nothing is read twice."""
    works = RunStatus(item["status"]) is RunStatus.RUNNING and not item["paused"]
    run = {name: item[name] for name in DispatchableRun.__struct_fields__}
    # One that is not what it should be is found here, not by whoever shares out slots.
    read = msgspec.convert(run, DispatchableRun)
    return DispatchChange(read.run_id, read if works else None)


def _dispatchable(row: RunRow) -> DispatchableRun:
    return DispatchableRun(
        run_id=row.run.run_id,
        job_id=row.run.job_id,
        priority=row.priority,
        max_inflight=row.max_inflight,
        created_at=row.run.created_at,
    )


class Tombstones:
    """The rows of deleted runs."""

    def __init__(self, records: DynamoRunRows) -> None:
        self._records = records
        self._table = records.table

    async def all(self, *, before: int | None) -> list[tuple[str, str]]:
        """(job_id, run_id) by run id; see `Runs.deleted_runs`. No index knows when one was touched:
        that is read from the rows."""
        items = await read_all(self._table, every("deleted"), index=BY_OWNER)
        if before is None:
            found = dict(readable(_of_index, items))
        else:
            rows = await self._table.get_many(list(dict.fromkeys(keys_of(items))))
            found = {
                row.run.run_id: row.run.job_id
                for row in readable(read_run_row, rows.values())
                if row.run.status is RunStatus.DELETED and row.run.updated_at < before
            }
        return [(found[run_id], run_id) for run_id in sorted(found)]

    async def touch(self, run_id: str, *, now: int) -> None:
        """Note that a scrub is under way; see `Runs.touch_tombstone`. Leaves the row's version
        alone: no decision hangs on when one was touched."""
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


@whole
def _of_index(item: Item) -> tuple[str, str]:
    return str(item["run_id"]), str(item["job_id"])


class DynamoRuns:
    """The runs port."""

    def __init__(self, records: DynamoRunRows) -> None:
        self._records = records
        self._views = JobReads(records)
        self._deleting = Deletion(records, self._views)
        self._dispatch = DispatchReads(records)
        self._reruns = DynamoReruns(records)
        self._tombstones = Tombstones(records)

    async def get_run(self, caller: str, job_id: str, run_id: str | None) -> Run | None:
        """A run by id, deleted ones included; with None, the latest that is not deleted."""
        if run_id is None:
            latest = await self._listed(caller, job_id, below=None, limit=1, known_only=False)
            return latest[0] if latest else None
        row = await self._records.read(run_id)
        if row is None or row.caller != caller or row.run.job_id != job_id:
            return None
        return (await self._records.shown(row)).run

    async def list_runs(
        self, caller: str, job_id: str, *, before: int | None, limit: int
    ) -> list[Run]:
        """Runs of a job that are not deleted, newest first; without those of a newer shape."""
        return await self._listed(caller, job_id, below=before, limit=limit, known_only=True)

    async def stop_run(self, caller: str, job_id: str, *, now: int) -> Run:
        """End the latest run as `stopped`."""

        def stop(run: Run) -> Change | None:
            if run.status is RunStatus.STOPPED:
                return None
            if RunStatus.STOPPED not in RUN_TRANSITIONS[run.status]:
                raise ConveyorError(
                    ErrorCode.RUN_NOT_STOPPABLE, f"the latest run is {run.status} already"
                )
            return Change(status=RunStatus.STOPPED)

        return await self._move_latest(caller, job_id, stop, now=now)

    async def pause_run(self, caller: str, job_id: str, *, paused: bool, now: int) -> Run:
        """Set or clear the latest run's pause."""

        def pause(run: Run) -> Change | None:
            if run.status not in LIVE_RUN_STATES:
                raise ConveyorError(ErrorCode.CONFLICT, f"the latest run is {run.status} already")
            return None if run.paused is paused else Change(paused=paused)

        return await self._move_latest(caller, job_id, pause, now=now)

    async def fail_run(self, run_id: str, *, reason: RunFailure, detail: str, now: int) -> bool:
        """End a live run as `failed`; True where this call did it."""
        failed = Change(
            status=RunStatus.FAILED, sets={"failure_reason": str(reason), "failure_detail": detail}
        )
        row = await self._records.read(run_id)
        if row is None:
            return False
        after = await self._records.decide(
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
        """Turn a run to `deleted` and let the job's latest run be the newest other one."""
        await self._deleting.delete_run(caller, job_id, run_id, now=now)

    async def purge_run(self, run_id: str) -> None:
        """Remove the tombstone of a deleted run."""
        await self._deleting.purge_run(run_id)

    async def dispatchable_runs(self) -> list[DispatchableRun]:
        """Every run that is running and not paused; see `dispatch` on how fresh that is."""
        return await self._dispatch.dispatchable_runs()

    async def dispatch_changes(self, *, since: int) -> list[DispatchChange]:
        """Runs whose status or pause was changed at or after `since`; see `dispatch` on how fresh
        that is."""
        return await self._dispatch.dispatch_changes(since=since)

    async def dispatchable_run(self, run_id: str) -> DispatchableRun | None:
        """One run, if it is running and not paused."""
        return await self._dispatch.dispatchable_run(run_id)

    async def deleted_runs(self, *, before: int | None = None) -> list[tuple[str, str]]:
        """(job_id, run_id) of every tombstone, as far as the index knows, by run id; with `before`,
        of those that nobody has touched since, as their rows say."""
        return await self._tombstones.all(before=before)

    async def touch_tombstone(self, run_id: str, *, now: int) -> None:
        """Note that the scrub of a deleted run is under way."""
        await self._tombstones.touch(run_id, now=now)

    async def _listed(
        self, caller: str, job_id: str, *, below: int | None, limit: int, known_only: bool
    ) -> list[Run]:
        found: list[Run] = []
        async for row in runs_of(
            self._records.table,
            job_id,
            below=below,
            limit=min(limit, PIECE),
            known_only=known_only,
        ):
            if row.caller != caller:
                return []
            if row.run.status is not RunStatus.DELETED:
                found.append((await self._records.shown(row)).run)
                if len(found) == limit:
                    break
        return found

    async def _move_latest(
        self, caller: str, job_id: str, decision: Callable[[Run], Change | None], *, now: int
    ) -> Run:
        """The latest run of a job after what is decided for it."""
        for _ in range(TRIES):
            row = await self._views.need_latest(caller, job_id)
            change = decision(row.run)
            if change is None:
                return row.run
            try:
                return (await self._records.change(row, change, now=now)).run
            except RunMoved:
                continue
        raise changed_too_often()
