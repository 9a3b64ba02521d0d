"""What only the API asks of a store. No API runs in a simulation, so these refuse, in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import JobStatus, JobView, Run, TaskSpec, TaskStatus
from conveyor.ports.records import Answer, Appended, KeyClaim, Once, Rerun


def not_simulated(what: str) -> ConveyorError:
    """The refusal of something that needs an API."""
    return ConveyorError(ErrorCode.UNAVAILABLE, f"{what} is not simulated")


class UnsimulatedJobs:
    """The part of the jobs port that no worker calls."""

    async def list_jobs(
        self, caller: str, *, status: JobStatus | None, before: str | None, limit: int
    ) -> list[JobView]:
        """Raises ConveyorError(unavailable)."""
        raise not_simulated("listing jobs")

    async def append_tasks(
        self,
        caller: str,
        job_id: str,
        specs: Sequence[TaskSpec],
        *,
        last_batch: bool,
        max_tasks: int,
        now: int,
        answer: Callable[[Appended], Answer],
        once: Once | None,
    ) -> Answer:
        """Raises ConveyorError(unavailable)."""
        raise not_simulated("adding tasks")

    async def close_job(self, caller: str, job_id: str, *, now: int) -> JobView:
        """Raises ConveyorError(unavailable)."""
        raise not_simulated("closing a job")

    async def delete_job(self, caller: str, job_id: str, *, now: int) -> list[str]:
        """Raises ConveyorError(unavailable)."""
        raise not_simulated("deleting a job")

    async def purge_job(self, job_id: str) -> None:
        """Without effect: no job is ever deleted here."""


class UnsimulatedRuns:
    """The part of the runs port that no worker calls."""

    async def list_runs(
        self, caller: str, job_id: str, *, before: int | None, limit: int
    ) -> list[Run]:
        """Raises ConveyorError(unavailable)."""
        raise not_simulated("listing runs")

    async def rerun(
        self,
        caller: str,
        job_id: str,
        run_id: str,
        *,
        statuses: frozenset[TaskStatus] | None,
        window_start: int,
        now: int,
        answer: Callable[[Rerun], Answer],
        once: Once | None,
    ) -> Answer:
        """Raises ConveyorError(unavailable)."""
        raise not_simulated("a rerun")

    async def delete_run(self, caller: str, job_id: str, run_id: str, *, now: int) -> None:
        """Raises ConveyorError(unavailable)."""
        raise not_simulated("deleting a run")


class UnsimulatedIdempotency:
    """The idempotency port, which no worker calls."""

    async def claim_idempotency_key(
        self,
        scope: str,
        *,
        fingerprint: bytes,
        created_id: str,
        now: int,
        lapses_at: int,
        expires_at: int,
    ) -> KeyClaim:
        """Raises ConveyorError(unavailable)."""
        raise not_simulated("an idempotency key")

    async def release_idempotency_key(self, scope: str) -> None:
        """Raises ConveyorError(unavailable)."""
        raise not_simulated("an idempotency key")
