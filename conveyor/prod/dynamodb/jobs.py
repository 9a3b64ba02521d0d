"""The jobs port on one DynamoDB table."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from conveyor.domain.model import Job, JobStatus, JobView, NewTask, Run
from conveyor.ports.records import Appended, AppendRequest, IdempotencyScope, StoredResponse
from conveyor.prod.dynamodb.client import Query, RowFilter
from conveyor.prod.dynamodb.idempotency import StoredResponses
from conveyor.prod.dynamodb.job_rows import Closing, JobReads
from conveyor.prod.dynamodb.run_rows import DynamoRunRows
from conveyor.prod.dynamodb.runs import Deletion
from conveyor.prod.dynamodb.schema import BY_OWNER, END, INDEXES, caller_jobs
from conveyor.prod.dynamodb.submitting import Addition, JobCreator, TaskAppender

MOST_LISTED = 1_000
"""Jobs of the index that one query touches."""
JOB_ID = INDEXES[BY_OWNER][1]


class DynamoJobs:
    """The jobs port."""

    def __init__(self, records: DynamoRunRows) -> None:
        self._table = records.table
        self._views = JobReads(records)
        answers = StoredResponses(records.table)
        self._submitting = JobCreator(records, answers)
        self._appending = TaskAppender(records, self._views, answers)
        self._closing = Closing(records, self._views)
        self._deleting = Deletion(records, self._views)

    async def create_job(
        self,
        job: Job,
        run: Run,
        tasks: Sequence[NewTask],
        *,
        answer: StoredResponse,
        once: IdempotencyScope | None,
    ) -> None:
        """Write job, first run, every task and, under `once`, the answer."""
        await self._submitting.create(job, run, tasks, answer=answer, once=once)

    async def get_job(self, caller: str, job_id: str) -> JobView | None:
        """The job and its latest run."""
        view = await self._views.find(caller, job_id)
        return None if view is None else view.public

    async def find_job(self, job_id: str) -> Job | None:
        """A job by id alone."""
        row = await self._views.job(job_id)
        return None if row is None else row.job

    async def list_jobs(
        self, caller: str, *, status: JobStatus | None, before: str | None, limit: int
    ) -> list[JobView]:
        """A caller's jobs, newest first.

        Found through an index, which on AWS may miss a job that was made a moment ago; what is
        listed is read strongly.
        """
        condition = "#status <> :status" if status is None else "#status = :status"
        found: list[JobView] = []
        start, size = None, limit
        while len(found) < limit:
            page = await self._table.page(
                Query(
                    caller_jobs(caller),
                    index=BY_OWNER,
                    below=before or END,
                    forward=False,
                    start=start,
                    limit=size,
                    where=RowFilter(condition, {"status": str(status or JobStatus.DELETED)}),
                )
            )
            views = await self._views.many(caller, [item[JOB_ID] for item in page.items])
            found += [view.public for view in views if _is_listed(view.job.job, status)]
            start, size = page.last, min(2 * size, MOST_LISTED)
            if start is None:
                break
        return found[:limit]

    async def append_tasks(
        self,
        request: AppendRequest,
        *,
        answer: Callable[[Appended], StoredResponse],
        once: IdempotencyScope | None,
    ) -> StoredResponse:
        return await self._appending.append(Addition(request, answer, once))

    async def close_job(self, caller: str, job_id: str, *, now: int) -> JobView:
        """No task comes any more; completes the run at once where all its tasks have ended."""
        return await self._closing.close(caller, job_id, now=now)

    async def delete_job(self, caller: str, job_id: str, *, now: int) -> list[str]:
        """Turn the job and all its runs to `deleted`; the ids of its runs."""
        return await self._deleting.delete_job(caller, job_id, now=now)

    async def purge_job(self, job_id: str) -> None:
        """Remove the tombstone of a deleted job, once no run of it is left."""
        await self._deleting.purge_job(job_id)


def _is_listed(job: Job, status: JobStatus | None) -> bool:
    return job.status is not JobStatus.DELETED if status is None else job.status is status
