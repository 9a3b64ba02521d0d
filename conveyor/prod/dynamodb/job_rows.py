"""A job's own row: what is in it, and how it is read and rewritten.

A job with its latest run, read so that the two go together.

Closing a job: no task comes any more, and a drained run is complete.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import structs

from conveyor.domain.errors import ConveyorError, ErrorCode, not_found
from conveyor.domain.model import Job, JobStatus, JobView, RunStatus
from conveyor.domain.states import LIVE_RUN_STATES, live_run_status
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.client import (
    Item,
    Table,
    UnreadableRow,
    changed_too_often,
    readable,
    rewritten,
    whole,
)
from conveyor.prod.dynamodb.run_rows import (
    TRIES,
    Change,
    DynamoRunRows,
    RunPlace,
    RunRow,
    read_run_row,
)
from conveyor.prod.dynamodb.schema import ROW_SHAPE, Key, caller_jobs, job_key, run_key

_job = msgspec.json.Decoder(Job)


class JobRow(msgspec.Struct, frozen=True):
    """A job as it was read. `latest_run_sequence` is the number of the run that `latest_run_id`
    names, 0 where there is none. `text` is the whole of it as it lies there, "" for a new one."""

    job: Job
    latest_run_sequence: int
    text: str = ""

    def __repr__(self) -> str:
        # The text holds what the job's own repr leaves out.
        return f"JobRow({self.job!r}, {self.latest_run_sequence})"


def job_item(row: JobRow) -> Item:
    """The item of a new job: the whole of it as one text, and what conditions and indexes look
    at."""
    job = row.job
    return {
        "shape": ROW_SHAPE,
        "job_id": job.job_id,
        "caller": job.caller,
        "gsi1pk": caller_jobs(job.caller),
        "gsi1sk": job.job_id,
        **_changing(row),
    }


@whole
def read_job_row(item: Item) -> JobRow:
    """A job from its item. Raises DamagedRow."""
    text, sequence = item["job"], item["latest_run_sequence"]
    if type(sequence) is not int:
        raise TypeError("latest_run_sequence")
    return JobRow(_job.decode(text), sequence, text)


def job_part(table: Table, known: JobRow, after: JobRow) -> dict[str, Any]:
    """The rewriting of a job as a part of a transaction, refused where it has changed meanwhile."""
    attributes = _changing(after)
    return table.update_part(
        job_key(known.job.job_id),
        "SET " + ", ".join(f"#{name} = :{name}" for name in attributes),
        condition="#version = :known_version",
        known_version=known.job.version,
        **attributes,
    )


def moved(row: JobRow, *, now: int, **fields: Any) -> JobRow:
    """A job with other fields, as its next version."""
    job = row.job
    after = structs.replace(
        job, updated_at=max(job.updated_at, now), version=job.version + 1, **fields
    )
    return structs.replace(row, job=after)


def _changing(row: JobRow) -> Item:
    """The attributes that a job's changes move."""
    return {
        "job": rewritten(row.text, row.job),
        "status": str(row.job.status),
        "version": row.job.version,
        "latest_run_sequence": row.latest_run_sequence,
    }


class JobAndRun(NamedTuple):
    """A job and its latest run; None where every run was deleted."""

    job: JobRow
    run: RunRow | None

    @property
    def public(self) -> JobView:
        """As the ports say it."""
        return JobView(self.job.job, None if self.run is None else self.run.run)


class JobReads:
    """Reads jobs, strongly.

    A job and its run are read one after the other. Every change of a job that shows on its run
    moves both in one transaction: where the run tells of such a change, the job is read again.
    """

    def __init__(self, records: DynamoRunRows) -> None:
        self._records = records
        self._table = records.table

    async def job(self, job_id: str) -> JobRow | None:
        """A job by its id alone."""
        item = await self._table.get(job_key(job_id))
        return None if item is None else read_job_row(item)

    async def find(self, caller: str, job_id: str) -> JobAndRun | None:
        """A caller's job with its latest run."""
        job = await self.job(job_id)
        for _ in range(TRIES):
            if job is None or job.job.caller != caller:
                return None
            run = await self._latest(job)
            if _agree(job, run):
                return JobAndRun(job, _standing(run))
            again = await self.job(job_id)
            if again is not None and again.job.version == job.job.version:
                return JobAndRun(job, _standing(run))
            job = again
        raise changed_too_often()

    async def need(self, caller: str, job_id: str) -> JobAndRun:
        """`find`. Raises ConveyorError(not_found)."""
        view = await self.find(caller, job_id)
        if view is None:
            raise not_found("job")
        return view

    async def need_latest(self, caller: str, job_id: str) -> RunRow:
        """The latest run of a caller's job. Raises ConveyorError: not_found, no_prior_run."""
        run = (await self.need(caller, job_id)).run
        if run is None:
            raise ConveyorError(ErrorCode.NO_PRIOR_RUN, "the job has no run that is not deleted")
        return run

    async def many(self, caller: str, job_ids: Sequence[str]) -> list[JobAndRun]:
        """Those of the jobs that are the caller's, in the order given; without those of a newer
        shape, or damaged ones, or with a run of such."""
        items = await self._table.get_many([job_key(job_id) for job_id in job_ids])
        found = [items[key] for key in map(job_key, job_ids) if key in items]
        jobs = {row.job.job_id: row for row in readable(read_job_row, found)}
        runs = await self._table.get_many(list(_latest_keys(jobs.values())))
        views: list[JobAndRun | None] = []
        for job_id, job in jobs.items():
            if job.job.caller != caller:
                continue
            try:
                run = await self._read(runs.get(run_key(job_id, job.latest_run_sequence)))
                certain = _agree(job, run)
                views.append(
                    JobAndRun(job, _standing(run)) if certain else await self.find(caller, job_id)
                )
            except UnreadableRow:
                continue
        return [view for view in views if view is not None]

    async def _latest(self, job: JobRow) -> RunRow | None:
        if not job.latest_run_sequence:
            return None
        item = await self._table.get(run_key(job.job.job_id, job.latest_run_sequence))
        return await self._read(item)

    async def _read(self, item: Item | None) -> RunRow | None:
        return None if item is None else await self._records.shown(read_run_row(item))


def _latest_keys(jobs: Iterable[JobRow]) -> Iterable[Key]:
    return (
        run_key(job.job.job_id, job.latest_run_sequence) for job in jobs if job.latest_run_sequence
    )


def _standing(run: RunRow | None) -> RunRow | None:
    return None if run is None or run.run.status is RunStatus.DELETED else run


def _agree(job: JobRow, run: RunRow | None) -> bool:
    """Whether the run, read later, tells of no change of the job."""
    if not job.latest_run_sequence:
        return True
    if _standing(run) is None:
        return job.job.status is JobStatus.DELETED
    assert run is not None
    return job.job.status is not JobStatus.OPEN or not run.run.last_batch_received


class Closing:
    """Closes jobs."""

    def __init__(self, records: DynamoRunRows, views: JobReads) -> None:
        self._records = records
        self._views = views

    async def close(self, caller: str, job_id: str, *, now: int) -> JobView:
        """Close a job; see `Jobs.close_job`."""
        for _ in range(TRIES):
            view = await self._views.need(caller, job_id)
            match view.job.job.status:
                case JobStatus.DELETED:
                    raise not_found("job")
                case JobStatus.CLOSED:
                    return view.public
            parts, after = self._parts(view, now)
            try:
                await self._records.table.transact(parts, token=self._records.table.clock.new_id())
            except AwsRefused as refused:
                if not refused.is_condition:
                    raise
                continue
            run = (
                None if view.run is None else await settled(self._records, view.run.place, now=now)
            )
            return JobAndRun(after, run).public
        raise changed_too_often()

    def _parts(self, view: JobAndRun, now: int) -> tuple[list[dict[str, Any]], JobRow]:
        after = closed(view.job, now=now)
        parts = [job_part(self._records.table, view.job, after)]
        if view.run is not None:
            parts.append(self._records.part(view.run, _last(view.run), now=now))
        return parts, after


def closed(job: JobRow, *, now: int) -> JobRow:
    """An open job, closed."""
    return moved(job, now=now, status=JobStatus.CLOSED)


async def settled(records: DynamoRunRows, place: RunPlace, *, now: int) -> RunRow | None:
    """A run whose end was just made possible, with the status that its counters give it: they may
    have moved since that was decided. None where it is gone."""
    row = await records.read_at(place)
    if row is None:
        return None
    await records.tell_end(row)
    return await records.settle_status(row, now=now)


def _last(row: RunRow) -> Change:
    run = row.run
    status = run.status
    if status in LIVE_RUN_STATES:
        status = live_run_status(run.stats, job_closed=True, ingesting=run.ingesting)
    return Change(
        status=None if status is run.status else status, sets={"last_batch_received": True}
    )
