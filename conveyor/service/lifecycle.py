"""Closing, stopping, pausing and deleting."""

from __future__ import annotations

from conveyor.service.announcing import Announcer
from conveyor.service.context import Context
from conveyor.service.shapes import JobBody, RunBody
from conveyor.service.wire import job_body, run_body


class Lifecycle:
    """The operations that move a job or run to another state. Each of them is idempotent."""

    def __init__(self, context: Context, announcer: Announcer) -> None:
        self._context = context
        self._jobs = context.binding.jobs
        self._runs = context.binding.runs
        self._announcer = announcer

    async def close(self, caller_id: str, job_id: str) -> JobBody:
        """No task comes any more. Raises ConveyorError(not_found)."""
        view = await self._jobs.close_job(caller_id, job_id, now=self._context.clock.now())
        if view.latest_run is not None:
            self._announcer.run_changed(view.latest_run.run_id)
        return job_body(view)

    async def stop(self, caller_id: str, job_id: str) -> RunBody:
        """End the latest run. Raises ConveyorError: not_found; run_not_stoppable; no_prior_run."""
        await self._context.live_job(caller_id, job_id)
        run = await self._runs.stop_run(caller_id, job_id, now=self._context.clock.now())
        await self._announcer.run_ended(run.run_id)
        return run_body(run)

    async def pause(self, caller_id: str, job_id: str, *, paused: bool) -> RunBody:
        """Hold the latest run, or let it go on. Raises ConveyorError: not_found; conflict;
        no_prior_run."""
        await self._context.live_job(caller_id, job_id)
        run = await self._runs.pause_run(
            caller_id, job_id, paused=paused, now=self._context.clock.now()
        )
        self._announcer.run_changed(run.run_id)
        return run_body(run)

    async def delete_job(self, caller_id: str, job_id: str) -> None:
        """Make a job a tombstone and have it scrubbed. Raises ConveyorError(not_found)."""
        run_ids = await self._jobs.delete_job(caller_id, job_id, now=self._context.clock.now())
        for run_id in run_ids:
            await self._announcer.run_deleted(job_id, run_id)
        if not run_ids:
            await self._jobs.purge_job(job_id)

    async def delete_run(self, caller_id: str, job_id: str, run_id: str) -> None:
        """Make a run a tombstone and have it scrubbed. Raises ConveyorError: not_found;
        run_has_descendants."""
        await self._context.live_job(caller_id, job_id)
        await self._runs.delete_run(caller_id, job_id, run_id, now=self._context.clock.now())
        await self._announcer.run_deleted(job_id, run_id)
