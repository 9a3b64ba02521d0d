"""The parts of a store that only the API uses. No API runs in a simulation, so they raise."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import JobStatus, JobView, Run, RunStatus, TaskSpec, TaskStatus
from conveyor.domain.run_events import RunFinished
from conveyor.ports.exports import Export
from conveyor.ports.ingestion import Ingesting, StagedRows
from conveyor.ports.inputs import JobInput
from conveyor.ports.outbox import OutboxEntry
from conveyor.ports.records import Appended, IdempotencyScope, KeyClaim, Rerun, StoredResponse
from conveyor.ports.sweeping import EndedRun, QuietRun


def not_simulated(what: str) -> ConveyorError:
    """Build the error of an operation that needs an API."""
    return ConveyorError(ErrorCode.UNAVAILABLE, f"{what} is not simulated")


class UnsimulatedJobs:
    """The part of the jobs port that no worker calls."""

    async def list_jobs(
        self, caller: str, *, status: JobStatus | None, before: str | None, limit: int
    ) -> list[JobView]:
        """Raise ConveyorError(unavailable)."""
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
        answer: Callable[[Appended], StoredResponse],
        once: IdempotencyScope | None,
    ) -> StoredResponse:
        """Raise ConveyorError(unavailable)."""
        raise not_simulated("adding tasks")

    async def close_job(self, caller: str, job_id: str, *, now: int) -> JobView:
        """Raise ConveyorError(unavailable)."""
        raise not_simulated("closing a job")

    async def delete_job(self, caller: str, job_id: str, *, now: int) -> list[str]:
        """Raise ConveyorError(unavailable)."""
        raise not_simulated("deleting a job")

    async def purge_job(self, job_id: str) -> None:
        """Do nothing: no job is ever deleted here."""


class UnsimulatedRuns:
    """The part of the runs port that no worker calls."""

    async def list_runs(
        self, caller: str, job_id: str, *, before: int | None, limit: int
    ) -> list[Run]:
        """Raise ConveyorError(unavailable)."""
        raise not_simulated("listing runs")

    async def rerun(
        self,
        caller: str,
        job_id: str,
        run_id: str,
        *,
        statuses: frozenset[TaskStatus] | None,
        window_start: int,
        large_from: int,
        now: int,
        answer: Callable[[Rerun], StoredResponse],
        once: IdempotencyScope | None,
    ) -> StoredResponse:
        """Raise ConveyorError(unavailable)."""
        raise not_simulated("a rerun")

    async def delete_run(self, caller: str, job_id: str, run_id: str, *, now: int) -> None:
        """Raise ConveyorError(unavailable)."""
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
        """Raise ConveyorError(unavailable)."""
        raise not_simulated("an idempotency key")

    async def release_idempotency_key(self, scope: str, *, created_id: str, lapses_at: int) -> None:
        """Raise ConveyorError(unavailable)."""
        raise not_simulated("an idempotency key")


class UnsimulatedIngestion:
    """The ingestion port of a world where all rows exist from the start."""

    async def ingesting(self, run_id: str) -> Ingesting | None:
        """Return None: no run ingests."""
        return None

    async def write_rows(self, run_id: str, rows: StagedRows, *, now: int) -> bool:
        """Return False: no run ingests."""
        return False

    async def copy_rows(
        self, run_id: str, *, first_index: int, end_index: int, now: int
    ) -> list[tuple[int, str]] | None:
        """Return None: no run ingests."""
        return None

    async def finish_ingest(self, run_id: str, *, now: int) -> RunStatus | None:
        """Return None: no run ingests."""
        return None

    async def fail_ingest(self, run_id: str, *, detail: str, now: int) -> bool:
        """Return False: no run ingests."""
        return False

    async def stuck_ingests(self, *, before: int) -> list[tuple[str, str]]:
        """Return nothing: no run ingests."""
        return []


class UnsimulatedInputs:
    """The inputs port of a world without uploads, and so without slots."""

    async def create_input(self, job_input: JobInput) -> None:
        """Raise ConveyorError(unavailable)."""
        raise not_simulated("an upload")

    async def get_input(self, input_id: str) -> JobInput | None:
        """Return None: there is no slot."""
        return None

    async def input_uploaded(self, input_id: str, *, size: int) -> bool:
        """Return False: there is no slot."""
        return False

    async def expired_inputs(self, *, now: int, limit: int) -> list[str]:
        """Return nothing: there is no slot."""
        return []

    async def drop_input(self, input_id: str) -> None:
        """Do nothing: there is no slot."""


class UnsimulatedExports:
    """The exports port of a world without downloads, and so without exports."""

    async def create_export(self, export: Export) -> None:
        """Raise ConveyorError(unavailable)."""
        raise not_simulated("an export")

    async def get_export(self, export_id: str) -> Export | None:
        """Return None: there is no export."""
        return None

    async def begin_export(self, export_id: str, *, now: int) -> Export | None:
        """Return None: there is no export."""
        return None

    async def touch_export(self, export_id: str, *, now: int) -> None:
        """Do nothing: there is no export."""

    async def end_export(
        self, export_id: str, *, size: int | None, error: str | None, now: int
    ) -> bool:
        """Return False: there is no export."""
        return False

    async def unfinished_exports(self, *, before: int) -> list[Export]:
        """Return nothing: there is no export."""
        return []

    async def expired_exports(self, *, now: int, limit: int) -> list[Export]:
        """Return nothing: there is no export."""
        return []

    async def drop_export(self, export_id: str) -> None:
        """Do nothing: there is no export."""


class UnsimulatedSweeping:
    """The sweeping port of a world without a sweeper: lost things stay lost."""

    async def claim_sweep(self, *, now: int, lapses_at: int) -> bool:
        """Return False: no sweep is ever claimed."""
        return False

    async def quiet_runs(self, *, before: int) -> list[QuietRun]:
        """Return nothing: there is no sweeper."""
        return []

    async def reconcile_run(self, run_id: str, *, now: int) -> RunStatus | None:
        """Return None: counters and rows never differ here."""
        return None

    async def due_references(
        self, run_id: str, *, after: int, limit: int, now: int
    ) -> list[tuple[int, str]]:
        """Return nothing: there is no sweeper."""
        return []

    async def ended_runs(self, *, before: int, after: str, limit: int) -> list[EndedRun]:
        """Return nothing: there is no sweeper."""
        return []

    async def mark_swept(self, run_id: str) -> None:
        """Do nothing: there is no sweeper."""

    async def mark_queue_dropped(self, run_id: str) -> None:
        """Do nothing: there is no sweeper."""

    async def expire_run(self, run_id: str, *, now: int) -> list[str]:
        """Return nothing: no run expires."""
        return []

    async def tidy(self, *, now: int) -> int:
        """Return 0: no write is ever interrupted."""
        return 0


class UnsimulatedOutbox:
    """The outbox port of a world where nobody waits for a run, and so without entries."""

    async def due_entries(self, *, now: int, limit: int) -> list[str]:
        """Return nothing: there is no entry."""
        return []

    async def lease_entry(self, run_id: str, *, now: int, lapses_at: int) -> OutboxEntry | None:
        """Return None: there is no entry."""
        return None

    async def fix_payload(self, notice: OutboxEntry, ending: RunFinished, *, now: int) -> bool:
        """Return False: there is no entry."""
        return False

    async def reschedule_entry(self, notice: OutboxEntry, *, due_at: int, attempts: int) -> None:
        """Do nothing: there is no entry."""

    async def drop_entry(self, notice: OutboxEntry) -> None:
        """Do nothing: there is no entry."""


class UnsimulatedCallbacks:
    """The callbacks port of a world where nobody waits for a run."""

    async def send_heartbeat(self, task_token: str) -> None:
        """Raise ConveyorError(unavailable)."""
        raise not_simulated("a callback")

    async def send_success(self, task_token: str, *, output: str) -> None:
        """Raise ConveyorError(unavailable)."""
        raise not_simulated("a callback")

    async def send_failure(self, task_token: str, *, error: str, cause: str) -> None:
        """Raise ConveyorError(unavailable)."""
        raise not_simulated("a callback")
