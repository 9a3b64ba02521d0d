"""What every part of the service stands on, and how it finds a caller's job or run."""

from __future__ import annotations

from dataclasses import dataclass

from conveyor.domain.errors import not_found
from conveyor.domain.model import JobStatus, JobView, Run, RunStatus
from conveyor.ports.binding import Binding
from conveyor.ports.clock import Clock
from conveyor.service.keys import Keyring
from conveyor.service.options import ServiceOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The ports, the clock, the options and the keys."""

    binding: Binding
    clock: Clock
    options: ServiceOptions
    keyring: Keyring

    async def live_job(self, caller_id: str, job_id: str) -> JobView:
        """The caller's job. Raises ConveyorError(not_found), also where it is being deleted."""
        view = await self.binding.jobs.get_job(caller_id, job_id)
        if view is None or view.job.status is JobStatus.DELETED:
            raise not_found("job")
        return view

    async def live_run(
        self, caller_id: str, job_id: str, run_id: str | None
    ) -> tuple[JobView, Run]:
        """The caller's job and one of its runs, the latest where `run_id` is None.

        Raises ConveyorError(not_found), also where one of them is being deleted.
        """
        view = await self.live_job(caller_id, job_id)
        run = view.latest_run
        if run_id is not None and (run is None or run.run_id != run_id):
            run = await self.binding.runs.get_run(caller_id, job_id, run_id)
        if run is None or run.status is RunStatus.DELETED:
            raise not_found("run")
        return view, run
