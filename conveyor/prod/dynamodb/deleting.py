"""Deleting: jobs and runs turned to tombstones, and tombstones removed at the end."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from conveyor.domain.errors import ConveyorError, ErrorCode, not_found
from conveyor.domain.model import JobStatus, RunStatus
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.items import Table, changed_too_often, keys_of
from conveyor.prod.dynamodb.job_items import JobRow, job_part, moved
from conveyor.prod.dynamodb.keys import Key, export_item_key, exported_key, job_key, place_key
from conveyor.prod.dynamodb.run_items import RunRow
from conveyor.prod.dynamodb.run_listing import runs_of
from conveyor.prod.dynamodb.run_records import TRIES, Change, RunMoved, RunRecords
from conveyor.prod.dynamodb.sweeping_rows import dependants
from conveyor.prod.dynamodb.views import Views

MOST_RUNS = 99
"""Runs that one transaction takes beside their job."""
DELETED = Change(status=RunStatus.DELETED)


class Deleting:
    """Deletes jobs and runs."""

    def __init__(self, records: RunRecords, views: Views) -> None:
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
        async for page in self._table.pages(mark.pk, begins_with=mark.sk, keys_only=True):
            for key in keys_of(page.items):
                found += [key, export_item_key(key.sk.rpartition("#")[2])]
        return found

    async def _pins_held_by(self, row: RunRow) -> list[Key]:
        found: list[Key] = []
        partition = row.place.key.pk
        async for page in self._table.pages(partition, begins_with="Pin#", keys_only=True):
            found += [key for key in keys_of(page.items) if key.sk.endswith(f"#{row.run.run_id}")]
        return found


async def bury(records: RunRecords, row: RunRow, *, now: int) -> None:
    """Turn a run to `deleted` and let its job's latest run be the newest other one, in one
    transaction under the versions of both. One try; raises RunMoved."""
    await _bury(records, row, now=now, last_takes_job=False)


async def delete_ended(records: RunRecords, row: RunRow, *, now: int) -> None:
    """`bury`, with its job too where no other run of it is left."""
    await _bury(records, row, now=now, last_takes_job=True)


async def _bury(records: RunRecords, row: RunRow, *, now: int, last_takes_job: bool) -> None:
    table = records.table
    parts = [records.part(row, DELETED, now=now)]
    job = await Views(records).job(row.run.job_id)
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


async def _tell_end(records: RunRecords, row: RunRow, *, now: int) -> None:
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
