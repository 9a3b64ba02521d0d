"""A job with its latest run, read so that the two go together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from conveyor.domain.errors import ConveyorError, ErrorCode, not_found
from conveyor.domain.model import JobStatus, JobView, RunStatus
from conveyor.prod.dynamodb.items import Item, changed_too_often
from conveyor.prod.dynamodb.job_items import JobRow, read_job_row
from conveyor.prod.dynamodb.keys import Key, job_key, run_key
from conveyor.prod.dynamodb.run_items import RunRow, read_run_row
from conveyor.prod.dynamodb.run_records import TRIES, RunRecords
from conveyor.prod.dynamodb.shapes import Unfit, readable


class View(NamedTuple):
    """A job and its latest run; None where every run was deleted."""

    job: JobRow
    run: RunRow | None

    @property
    def public(self) -> JobView:
        """As the ports say it."""
        return JobView(self.job.job, None if self.run is None else self.run.run)


class Views:
    """Reads jobs, strongly.

    A job and its run are read one after the other. Every change of a job that shows on its run
    moves both in one transaction: where the run tells of such a change, the job is read again.
    """

    def __init__(self, records: RunRecords) -> None:
        self._records = records
        self._table = records.table

    async def job(self, job_id: str) -> JobRow | None:
        """A job by its id alone."""
        item = await self._table.get(job_key(job_id))
        return None if item is None else read_job_row(item)

    async def find(self, caller: str, job_id: str) -> View | None:
        """A caller's job with its latest run."""
        job = await self.job(job_id)
        for _ in range(TRIES):
            if job is None or job.job.caller != caller:
                return None
            run = await self._latest(job)
            if _agree(job, run):
                return View(job, _standing(run))
            again = await self.job(job_id)
            if again is not None and again.job.version == job.job.version:
                return View(job, _standing(run))
            job = again
        raise changed_too_often()

    async def need(self, caller: str, job_id: str) -> View:
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

    async def many(self, caller: str, job_ids: Sequence[str]) -> list[View]:
        """Those of the jobs that are the caller's, in the order given; without those of a newer
        shape, or damaged ones, or with a run of such."""
        items = await self._table.get_many([job_key(job_id) for job_id in job_ids])
        found = [items[key] for key in map(job_key, job_ids) if key in items]
        jobs = {row.job.job_id: row for row in readable(read_job_row, found)}
        runs = await self._table.get_many(list(_latest_keys(jobs.values())))
        views: list[View | None] = []
        for job_id, job in jobs.items():
            if job.job.caller != caller:
                continue
            try:
                run = await self._read(runs.get(run_key(job_id, job.latest_run_sequence)))
                certain = _agree(job, run)
                views.append(
                    View(job, _standing(run)) if certain else await self.find(caller, job_id)
                )
            except Unfit:
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
