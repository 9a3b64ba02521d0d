"""Reads jobs and runs, one at a time or in pages, and closes, stops, pauses and deletes them.

Pages come newest first.
"""

from __future__ import annotations

from conveyor.domain.api_keys import UnsealError
from conveyor.domain.deliveries import MOST_JUDGED, EventDelivery
from conveyor.domain.errors import ConveyorError, ErrorCode, not_found
from conveyor.domain.model import JobStatus, Run
from conveyor.domain.states import LIVE_RUN_STATES
from conveyor.ports.deliveries import DeliveryFilter
from conveyor.service.callers import Caller
from conveyor.service.context import Context, template_is_fixed
from conveyor.service.deliveries import drop_owed
from conveyor.service.notifier import WorkNotifier
from conveyor.service.responses import job_body, run_body
from conveyor.service.results import Cursors, bad_cursor
from conveyor.service.schemas import JobBody, JobsPage, RunBody, RunsPage, present

MAX_PAGE = 100
DEFAULT_PAGE = 50
JOB_TYPES = ("regular", "scheduled")


class JobQueries:
    """Reads jobs and runs."""

    def __init__(self, context: Context, cursors: Cursors) -> None:
        self._context = context
        self._cursors = cursors

    async def get_job(self, caller_id: str, job_id: str) -> JobBody:
        """Return a job, also while it is being deleted. Raises ConveyorError(not_found)."""
        view = await self._context.jobs.get_job(caller_id, job_id)
        if view is None:
            raise not_found("job")
        newest: list[EventDelivery] = []
        if view.job.webhook is not None:
            newest = await self._context.deliveries.list_deliveries(
                DeliveryFilter(caller=caller_id, job_id=job_id), limit=MOST_JUDGED
            )
        waits = await self._context.waits.look()
        return job_body(view, self._context.outage(), newest, waits=waits)

    async def list_jobs(
        self,
        caller_id: str,
        *,
        status: JobStatus | None,
        job_type: str | None,
        cursor: str | None,
        limit: int,
    ) -> JobsPage:
        """Return a page of jobs. Raises ConveyorError(invalid_argument) for a bad cursor."""
        scope = f"jobs:{caller_id}:{status}:{job_type}"
        before = self._cursors.decode(cursor, scope=scope) if cursor is not None else None
        views = await self._context.jobs.list_jobs(
            caller_id,
            status=status,
            before=before,
            limit=limit + 1,
            scheduled=None if job_type is None else job_type == "scheduled",
        )
        following = None
        if len(views) > limit:
            following = self._cursors.encode(views[limit - 1].job.job_id, scope=scope)
        waits = await self._context.waits.look()
        shown = [job_body(view, waits=waits) for view in views[:limit]]
        return JobsPage(shown, present(following))

    async def get_run(self, caller_id: str, job_id: str, run_id: str) -> RunBody:
        """Return a run, also while it is being deleted. Raises ConveyorError(not_found)."""
        await self._context.live_job(caller_id, job_id)
        run = await self._context.runs.get_run(caller_id, job_id, run_id)
        if run is None:
            raise not_found("run")
        return await self.show(run)

    async def show(self, run: Run) -> RunBody:
        """Return a run that was read, as the wire shows it by itself."""
        waits = await self._context.waits.look()
        return run_body(run, self._context.outage(), waits=waits)

    async def list_runs(
        self, caller_id: str, job_id: str, *, cursor: str | None, limit: int
    ) -> RunsPage:
        """Return a page of runs. Raises ConveyorError: not_found; invalid_argument for a bad
        cursor."""
        await self._context.live_job(caller_id, job_id)
        scope = f"runs:{job_id}"
        before = self._before(cursor, scope) if cursor is not None else None
        runs: list[Run] = await self._context.runs.list_runs(
            caller_id, job_id, before=before, limit=limit + 1
        )
        following = None
        if len(runs) > limit:
            following = self._cursors.encode(str(runs[limit - 1].run_sequence), scope=scope)
        waits = await self._context.waits.look()
        shown = [run_body(run, waits=waits) for run in runs[:limit]]
        return RunsPage(shown, present(following))

    def _before(self, cursor: str, scope: str) -> int:
        position = self._cursors.decode(cursor, scope=scope)
        if not position.isdecimal():
            raise bad_cursor()
        return int(position)


class JobCommands:
    """The operations that move a job or run to another state. Each of them is idempotent."""

    def __init__(self, context: Context, notifier: WorkNotifier) -> None:
        self._context = context
        self._jobs = context.jobs
        self._runs = context.runs
        self._notifier = notifier

    async def owner(self, job_id: str) -> Caller:
        """Return the caller of a job, with the key that it was submitted with.

        Raises ConveyorError: not_found; conflict if no secret of this server opens the key.
        """
        job = await self._jobs.find_job(job_id)
        if job is None:
            raise not_found("job")
        try:
            return Caller(job.caller, self._context.keyring.sealer.unseal(job))
        except UnsealError as error:
            raise ConveyorError(ErrorCode.CONFLICT, str(error)) from None

    async def close(self, caller_id: str, job_id: str) -> JobBody:
        """Close a job to further tasks. Raises ConveyorError: not_found; job_not_open on a
        scheduled job."""
        found = await self._jobs.get_job(caller_id, job_id)
        if found is not None and found.job.scheduling is not None:
            raise not_found("job") if found.job.status is JobStatus.DELETED else template_is_fixed()
        view = await self._jobs.close_job(caller_id, job_id, now=self._context.clock.now())
        run = view.latest_run
        if run is not None and run.status in LIVE_RUN_STATES:
            self._notifier.run_changed(run.run_id)
        elif run is not None:
            self._notifier.run_completed(run.run_id)
        return job_body(view, waits=await self._context.waits.look())

    async def stop(self, caller_id: str, job_id: str) -> RunBody:
        """End the latest run. Raises ConveyorError: not_found; run_not_stoppable; no_prior_run."""
        await self._context.live_job(caller_id, job_id)
        run = await self._runs.stop_run(caller_id, job_id, now=self._context.clock.now())
        await self._notifier.run_ended(run.run_id)
        return run_body(run, waits=await self._context.waits.look())

    async def pause(self, caller_id: str, job_id: str, *, paused: bool) -> RunBody:
        """Pause the latest run, or resume it. Raises ConveyorError: not_found; conflict;
        no_prior_run."""
        await self._context.live_job(caller_id, job_id)
        run = await self._runs.pause_run(
            caller_id, job_id, paused=paused, now=self._context.clock.now()
        )
        if paused:
            self._notifier.run_paused(run.run_id)
        else:
            self._notifier.run_changed(run.run_id)
        return run_body(run, waits=await self._context.waits.look())

    async def delete_job(self, caller_id: str, job_id: str) -> None:
        """Make a job a tombstone, have it scrubbed, and drop the events that it owes. Raises
        ConveyorError(not_found)."""
        run_ids = await self._jobs.delete_job(caller_id, job_id, now=self._context.clock.now())
        for run_id in run_ids:
            await self._notifier.run_deleted(job_id, run_id)
        if run_ids:
            await drop_owed(self._context, caller_id, job_id)
            return
        job = await self._jobs.find_job(job_id)
        if job is not None and job.scheduling is not None:
            await self._notifier.job_deleted(job_id)
        else:
            await self._jobs.purge_job(job_id)

    async def delete_run(self, caller_id: str, job_id: str, run_id: str) -> None:
        """Make a run a tombstone and have it scrubbed.

        Raises ConveyorError: not_found; run_has_descendants.
        """
        await self._context.live_job(caller_id, job_id)
        await self._runs.delete_run(caller_id, job_id, run_id, now=self._context.clock.now())
        await self._notifier.run_deleted(job_id, run_id)
