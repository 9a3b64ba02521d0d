"""Job rows: their attributes, reads together with the latest run, and changes of a job by itself.

A job is stored as one JSON text beside the attributes that conditions and indexes use, and changes
under its version. `JobReads` reads a job and its latest run so that the two agree. `JobCloser`
closes a job and completes its run if all tasks have ended. `WebhookSetter` sets and removes the
webhook of a job.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import structs

from conveyor.domain.errors import ConveyorError, ErrorCode, not_found
from conveyor.domain.model import Job, JobStatus, JobView, RunStatus
from conveyor.domain.states import LIVE_RUN_STATES, live_run_status
from conveyor.domain.webhooks import Webhook
from conveyor.ports.outbox import Subscriber
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.client import (
    Item,
    Table,
    UnreadableRow,
    contention_error,
    decode_intact,
    decodes_row,
    merge_json,
)
from conveyor.prod.dynamodb.outbox_rows import WAITING, late_webhook_part
from conveyor.prod.dynamodb.run_rows import (
    TRIES,
    Change,
    DynamoRunRows,
    RunPlace,
    RunRow,
    read_run_row,
)
from conveyor.prod.dynamodb.schema import (
    ROW_SHAPE,
    Key,
    after_all_times,
    by_time,
    caller_jobs,
    caller_schedules,
    job_key,
    run_key,
    schedules,
)

_job = msgspec.json.Decoder(Job)


class JobRow(msgspec.Struct, frozen=True):
    """A job as read. `latest_run_sequence` is the number of the run `latest_run_id`, 0 if there is
    none. `text` is the JSON as stored, "" for a new job."""

    job: Job
    latest_run_sequence: int
    text: str = ""

    def __repr__(self) -> str:
        # The text holds secrets that the job's own repr leaves out.
        return f"JobRow({self.job!r}, {self.latest_run_sequence})"


def job_item(row: JobRow) -> Item:
    """Make the item of a new job."""
    job = row.job
    attributes = _mutable_attributes(row)
    jobs_of = caller_jobs if job.scheduling is None else caller_schedules
    return {
        "shape": ROW_SHAPE,
        "job_id": job.job_id,
        "caller": job.caller,
        "gsi1pk": jobs_of(job.caller),
        "gsi1sk": job.job_id,
        **{name: value for name, value in attributes.items() if value is not None},
    }


@decodes_row
def read_job_row(item: Item) -> JobRow:
    """Decode a job. Raises DamagedRow."""
    text, sequence = item["job"], item["latest_run_sequence"]
    if type(sequence) is not int:
        raise TypeError("latest_run_sequence")
    return JobRow(_job.decode(text), sequence, text)


def job_part(table: Table, known: JobRow, after: JobRow) -> dict[str, Any]:
    """Describe the rewriting of a job within a transaction; it is refused if the version has
    changed."""
    attributes = _mutable_attributes(after)
    sets = {name: value for name, value in attributes.items() if value is not None}
    update = "SET " + ", ".join(f"#{name} = :{name}" for name in sets)
    if removes := attributes.keys() - sets.keys():
        update += " REMOVE " + ", ".join(sorted(removes))
    return table.update_part(
        job_key(known.job.job_id),
        update,
        condition="#version = :known_version",
        known_version=known.job.version,
        **sets,
    )


def next_version(row: JobRow, *, now: int, **fields: Any) -> JobRow:
    """Return the next version of a job, with other fields."""
    job = row.job
    after = structs.replace(
        job, updated_at=max(job.updated_at, now), version=job.version + 1, **fields
    )
    return structs.replace(row, job=after)


def _mutable_attributes(row: JobRow) -> Item:
    """Return the attributes that changes of a job rewrite; None removes one."""
    return {
        "job": merge_json(row.text, row.job),
        "status": str(row.job.status),
        "version": row.job.version,
        "latest_run_sequence": row.latest_run_sequence,
        **_schedule_keys(row.job),
    }


def _schedule_keys(job: Job) -> dict[str, str | None]:
    """Return the index keys that find a scheduled job by when it is looked at next, None once it is
    deleted. No change makes another job a scheduled one."""
    if job.scheduling is None:
        return {}
    if job.status is JobStatus.DELETED:
        return {"gsi2pk": None, "gsi2sk": None}
    due_at = job.scheduling.due_at
    place = after_all_times(job.job_id) if due_at is None else by_time(due_at, job.job_id)
    return {"gsi2pk": schedules(job.job_id), "gsi2sk": place}


class JobAndRun(NamedTuple):
    """A job and its latest run; None if all runs were deleted."""

    job: JobRow
    run: RunRow | None

    @property
    def job_view(self) -> JobView:
        """The job and run as ports return them."""
        return JobView(self.job.job, None if self.run is None else self.run.run)


class JobReads:
    """Reads jobs and their latest runs strongly.

    Reads the job before its run. A change of the job that shows on the run moves both in one
    transaction; if the run shows a change that the job does not, the job is read again.
    """

    def __init__(self, records: DynamoRunRows) -> None:
        self._records = records
        self._table = records.table

    async def job(self, job_id: str) -> JobRow | None:
        """Read a job by its id."""
        item = await self._table.get(job_key(job_id))
        self._table.records_read += item is not None
        return None if item is None else read_job_row(item)

    async def jobs(self, job_ids: Iterable[str]) -> dict[str, Job]:
        """Read jobs of any callers by their ids; leave out those that are unreadable."""
        items = await self._table.get_many([job_key(job_id) for job_id in job_ids])
        self._table.records_read += len(items)
        return {row.job.job_id: row.job for row in decode_intact(read_job_row, items.values())}

    async def find(self, caller: str, job_id: str) -> JobAndRun | None:
        """Read a caller's job with its latest run; None if the caller has no such job."""
        job = await self.job(job_id)
        for _ in range(TRIES):
            if job is None or job.job.caller != caller:
                return None
            run = await self._latest(job)
            if _is_consistent(job, run):
                return JobAndRun(job, _unless_deleted(run))
            again = await self.job(job_id)
            if again is not None and again.job.version == job.job.version:
                return JobAndRun(job, _unless_deleted(run))
            job = again
        raise contention_error()

    async def require(self, caller: str, job_id: str) -> JobAndRun:
        """Read as `find` does. Raises ConveyorError(not_found)."""
        view = await self.find(caller, job_id)
        if view is None:
            raise not_found("job")
        return view

    async def require_latest_run(self, caller: str, job_id: str) -> RunRow:
        """Read the latest run of a caller's job. Raises ConveyorError: not_found, no_prior_run."""
        run = (await self.require(caller, job_id)).run
        if run is None:
            raise ConveyorError(ErrorCode.NO_PRIOR_RUN, "the job has no run that is not deleted")
        return run

    async def find_many(self, caller: str, job_ids: Sequence[str]) -> list[JobAndRun]:
        """Read those of the jobs that belong to the caller, in the given order; leave out jobs that
        are unreadable, or whose run is."""
        items = await self._table.get_many([job_key(job_id) for job_id in job_ids])
        found = [items[key] for key in map(job_key, job_ids) if key in items]
        jobs = {
            row.job.job_id: row
            for row in decode_intact(read_job_row, found)
            if row.job.caller == caller
        }
        runs = await self._table.get_many(list(_latest_keys(jobs.values())))
        self._table.records_read += len(items) + len(runs)
        rows = await self._records.summed_all(decode_intact(read_run_row, runs.values()))
        views: list[JobAndRun | None] = []
        for job_id, job in jobs.items():
            key = run_key(job_id, job.latest_run_sequence)
            if key in runs and key not in rows:
                continue
            try:
                run = None if key not in rows else await self._records.with_late_status(rows[key])
                certain = _is_consistent(job, run)
                views.append(
                    JobAndRun(job, _unless_deleted(run))
                    if certain
                    else await self.find(caller, job_id)
                )
            except UnreadableRow:
                continue
        return [view for view in views if view is not None]

    async def _latest(self, job: JobRow) -> RunRow | None:
        if not job.latest_run_sequence:
            return None
        item = await self._table.get(run_key(job.job.job_id, job.latest_run_sequence))
        self._table.records_read += item is not None
        return await self._read(item)

    async def _read(self, item: Item | None) -> RunRow | None:
        return None if item is None else await self._records.with_late_status(read_run_row(item))


def _latest_keys(jobs: Iterable[JobRow]) -> Iterable[Key]:
    return (
        run_key(job.job.job_id, job.latest_run_sequence) for job in jobs if job.latest_run_sequence
    )


def _unless_deleted(run: RunRow | None) -> RunRow | None:
    return None if run is None or run.run.status is RunStatus.DELETED else run


def _is_consistent(job: JobRow, run: RunRow | None) -> bool:
    """Return whether the run, read later, shows no change that the job lacks."""
    if not job.latest_run_sequence:
        return True
    if _unless_deleted(run) is None:
        return job.job.status is JobStatus.DELETED
    assert run is not None
    return job.job.status is not JobStatus.OPEN or not run.run.last_batch_received


class JobCloser:
    """Closes jobs, and completes their drained runs."""

    def __init__(self, records: DynamoRunRows, job_reads: JobReads) -> None:
        self._records = records
        self._job_reads = job_reads

    async def close(self, caller: str, job_id: str, *, now: int) -> JobView:
        """Close a job; see `Jobs.close_job`."""
        for _ in range(TRIES):
            view = await self._job_reads.require(caller, job_id)
            match view.job.job.status:
                case JobStatus.DELETED:
                    raise not_found("job")
                case JobStatus.CLOSED:
                    return view.job_view
            parts, after = self._parts(view, now)
            try:
                await self._records.table.transact(parts, token=self._records.table.clock.new_id())
            except AwsRefused as refused:
                if not refused.is_condition:
                    raise
                continue
            run = (
                None
                if view.run is None
                else await complete_if_drained(self._records, view.run.place, now=now)
            )
            return JobAndRun(after, run).job_view
        raise contention_error()

    def _parts(self, view: JobAndRun, now: int) -> tuple[list[dict[str, Any]], JobRow]:
        after = closed_job(view.job, now=now)
        parts = [job_part(self._records.table, view.job, after)]
        if view.run is not None:
            parts.append(self._records.change_part(view.run, _last_batch_change(view.run), now=now))
        return parts, after


def closed_job(job: JobRow, *, now: int) -> JobRow:
    """Return an open job as closed."""
    return next_version(job, now=now, status=JobStatus.CLOSED)


async def complete_if_drained(
    records: DynamoRunRows, place: RunPlace, *, now: int
) -> RunRow | None:
    """Read a run of a job that was just closed and update its status, since its counters may have
    moved after the decision. Return the row afterwards; None if it is gone."""
    row = await records.read_at(place)
    if row is None:
        return None
    await records.make_end_due(row)
    return await records.write_late_status(row, now=now)


def _last_batch_change(row: RunRow) -> Change:
    run = row.run
    status = run.status
    if status in LIVE_RUN_STATES:
        status = live_run_status(run.stats, job_closed=True, ingesting=run.ingesting)
    return Change(
        status=None if status is run.status else status, sets={"last_batch_received": True}
    )


class WebhookSetter:
    """Sets and removes webhooks of jobs."""

    def __init__(self, records: DynamoRunRows, job_reads: JobReads) -> None:
        self._records = records
        self._table = records.table
        self._job_reads = job_reads

    async def set(self, caller: str, job_id: str, webhook: Webhook | None, *, now: int) -> Job:
        """Set or remove the webhook; see `JobWriter.set_webhook`."""
        for _ in range(TRIES):
            view = await self._job_reads.require(caller, job_id)
            if view.job.job.status is JobStatus.DELETED:
                raise not_found("job")
            parts, after = self._parts(view, webhook, now)
            if not parts:
                return after.job
            try:
                await self._table.transact(parts, token=self._table.clock.new_id())
            except AwsRefused as refused:
                if not refused.is_condition:
                    raise
                continue
            return after.job
        raise contention_error()

    def _parts(
        self, view: JobAndRun, webhook: Webhook | None, now: int
    ) -> tuple[list[dict[str, Any]], JobRow]:
        """Describe the change of the job, if it is one, and the entry of a live run. Under the
        version of that run, so that a run which has ended meanwhile owes nothing."""
        parts: list[dict[str, Any]] = []
        after = view.job
        if webhook != view.job.job.webhook:
            number = view.job.job.number_of(webhook)
            after = next_version(view.job, now=now, webhook=webhook, webhook_number=number)
            parts.append(job_part(self._table, view.job, after))
        if webhook is not None and view.run is not None and view.run.live:
            change = Change(sets={WAITING[Subscriber.WEBHOOK]: True})
            parts.append(self._records.change_part(view.run, change, now=now))
            run_id = view.run.run.run_id
            parts.append(late_webhook_part(self._table, after.job, run_id, now=now))
        return parts, after
