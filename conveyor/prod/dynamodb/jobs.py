"""The jobs port on DynamoDB: lists jobs, and passes all other calls to the classes that do them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from conveyor.aio.concurrency import for_each
from conveyor.domain.model import Job, JobStatus, JobView, NewTask, Run
from conveyor.domain.webhooks import Webhook
from conveyor.ports.records import Appended, AppendRequest, IdempotencyScope, StoredResponse
from conveyor.prod.dynamodb.client import Query, RowFilter
from conveyor.prod.dynamodb.idempotency import StoredResponses
from conveyor.prod.dynamodb.job_rows import JobAndRun, JobCloser, JobReads, WebhookSetter
from conveyor.prod.dynamodb.run_rows import DynamoRunRows, list_run_rows
from conveyor.prod.dynamodb.runs import Deletion
from conveyor.prod.dynamodb.schema import BY_OWNER, END, INDEXES, caller_jobs, caller_schedules
from conveyor.prod.dynamodb.submitting import Addition, JobCreator, TaskAppender

MOST_LISTED = 1_000
"""Index entries that one query of a list reads."""
JOB_ID = INDEXES[BY_OWNER][1]


class DynamoJobs:
    """The jobs port."""

    def __init__(self, records: DynamoRunRows) -> None:
        self._table = records.table
        self._job_reads = JobReads(records)
        responses = StoredResponses(records.table)
        self._creator = JobCreator(records, responses)
        self._appender = TaskAppender(records, self._job_reads, responses)
        self._closer = JobCloser(records, self._job_reads)
        self._webhooks = WebhookSetter(records, self._job_reads)
        self._deletion = Deletion(records, self._job_reads)

    async def create_job(
        self,
        job: Job,
        run: Run | None,
        tasks: Sequence[NewTask],
        *,
        answer: StoredResponse,
        once: IdempotencyScope | None,
    ) -> None:
        await self._creator.create(job, run, tasks, answer=answer, once=once)

    async def get_job(self, caller: str, job_id: str) -> JobView | None:
        view = await self._job_reads.find(caller, job_id)
        return None if view is None else await self._shown(view)

    async def find_job(self, job_id: str) -> Job | None:
        row = await self._job_reads.job(job_id)
        return None if row is None else row.job

    async def list_jobs(
        self,
        caller: str,
        *,
        status: JobStatus | None,
        before: str | None,
        limit: int,
        scheduled: bool | None = None,
    ) -> list[JobView]:
        """Find jobs by index, and read them strongly. A job made a moment ago may be missing,
        because the index lags behind the table."""

        partitions = {
            None: [caller_jobs(caller), caller_schedules(caller)],
            False: [caller_jobs(caller)],
            True: [caller_schedules(caller)],
        }
        found: list[JobView] = []

        async def find(partition: str) -> None:
            listing = _Listing(caller, partition, status, before, limit)
            found.extend(await self._list(listing))

        await for_each(find, partitions[scheduled])
        found.sort(key=lambda view: view.job.job_id, reverse=True)
        return found[:limit]

    async def _list(self, listing: _Listing) -> list[JobView]:
        found: list[JobView] = []
        start, size = None, listing.limit
        while len(found) < listing.limit:
            page = await self._table.page(
                Query(
                    listing.partition,
                    index=BY_OWNER,
                    below=listing.before or END,
                    forward=False,
                    start=start,
                    limit=size,
                    where=listing.filter,
                )
            )
            job_ids = [item[JOB_ID] for item in page.items]
            views = await self._job_reads.find_many(listing.caller, job_ids)
            listed = [view for view in views if listing.shows(view.job.job)]
            found += [await self._shown(view) for view in listed]
            start, size = page.last, min(2 * size, MOST_LISTED)
            if start is None:
                break
        return found

    async def _shown(self, view: JobAndRun) -> JobView:
        """Show a job; a deleted one with the newest run that is left of it."""
        job = view.job.job
        if job.status is JobStatus.DELETED and view.run is None:
            async for run in list_run_rows(self._table, job.job_id, limit=1):
                return JobView(job, run.run)
        return view.job_view

    async def append_tasks(
        self,
        request: AppendRequest,
        *,
        answer: Callable[[Appended], StoredResponse],
        once: IdempotencyScope | None,
    ) -> StoredResponse:
        return await self._appender.append(Addition(request, answer, once))

    async def close_job(self, caller: str, job_id: str, *, now: int) -> JobView:
        return await self._closer.close(caller, job_id, now=now)

    async def set_webhook(
        self, caller: str, job_id: str, webhook: Webhook | None, *, now: int
    ) -> Job:
        return await self._webhooks.set(caller, job_id, webhook, now=now)

    async def delete_job(self, caller: str, job_id: str, *, now: int) -> list[str]:
        return await self._deletion.delete_job(caller, job_id, now=now)

    async def purge_job(self, job_id: str) -> None:
        await self._deletion.purge_job(job_id)


class _Listing(NamedTuple):
    """The jobs to be listed of one partition of the index."""

    caller: str
    partition: str
    status: JobStatus | None
    before: str | None
    limit: int

    @property
    def filter(self) -> RowFilter:
        """The condition on index entries."""
        condition = "#status <> :status" if self.status is None else "#status = :status"
        return RowFilter(condition, {"status": str(self.status or JobStatus.DELETED)})

    def shows(self, job: Job) -> bool:
        """Return whether a job, as read, is to be listed."""
        if self.status is None:
            return job.status is not JobStatus.DELETED
        return job.status is self.status
