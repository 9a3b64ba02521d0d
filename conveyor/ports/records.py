"""The records ports: jobs, runs and idempotency keys, one role for each kind of caller.

One adapter implements all of them over one store. Each write becomes visible at once and entirely,
or not at all. `caller` is the keyed hash of an API key; another caller's job is absent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from conveyor.domain.model import (
    DispatchableRun,
    Job,
    JobStatus,
    JobView,
    NewTask,
    Run,
    RunFailure,
    TaskSpec,
    TaskStatus,
)


class StoredResponse(msgspec.Struct, frozen=True):
    """A 2xx answer as it goes out and as a replay repeats it: the status and the very bytes."""

    status: int
    body: bytes


class IdempotencyScope(msgspec.Struct, frozen=True):
    """The idempotency key under which a write happens; stored with its answer, or not at all.

    `scope` is a digest of caller, method, path and key.
    """

    scope: str


class AppendRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The tasks to add to a job; with `last_batch` the job is closed too.

    The run may hold `max_tasks` at most.
    """

    caller: str
    job_id: str
    specs: Sequence[TaskSpec]
    last_batch: bool
    max_tasks: int
    now: int


class Appended(msgspec.Struct, frozen=True):
    """What adding tasks did: the job and run after it, and how many tasks were added."""

    view: JobView
    accepted: int
    first_index: int


class RerunRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The new run `run_id` to make from the latest one of a job.

    `statuses`: the tasks to start afresh, None for all. A partial rerun needs a source that was
    created at or after `window_start`. The rows of a source of `large_from` tasks or more are left
    to ingestion.
    """

    caller: str
    job_id: str
    run_id: str
    statuses: frozenset[TaskStatus] | None
    window_start: int
    large_from: int
    now: int


class Rerun(msgspec.Struct, frozen=True):
    """What a rerun did: the job and new run, and how many rows were reset or inherited."""

    view: JobView
    rerun_of: str
    retried: int
    inherited: int


class DispatchChange(msgspec.Struct, frozen=True):
    """A run that may have become dispatchable, or ceased to be: `run` is None where it is not."""

    run_id: str
    run: DispatchableRun | None


# -- jobs --


class JobLookup(Protocol):
    """A job without its caller: for workers, and for signed links, whose signature stands for the
    caller."""

    async def find_job(self, job_id: str) -> Job | None:
        """Return a job by id alone, whoever owns it, deleted ones included; None once it is
        gone."""
        ...


class JobReader(JobLookup, Protocol):
    """Jobs as the API reads them."""

    async def get_job(self, caller: str, job_id: str) -> JobView | None:
        """Return the job and its latest run, also while it is being deleted; None once it is
        gone."""
        ...

    async def list_jobs(
        self, caller: str, *, status: JobStatus | None, before: str | None, limit: int
    ) -> list[JobView]:
        """Return a caller's jobs, newest first by job_id, strictly below `before`; with a `status`,
        only those.

        Without a status, deleted jobs are left out.
        """
        ...


class JobWriter(Protocol):
    """Jobs as the API writes them."""

    async def create_job(
        self,
        job: Job,
        run: Run,
        tasks: Sequence[NewTask],
        *,
        answer: StoredResponse,
        once: IdempotencyScope | None,
    ) -> None:
        """Write job, first run, every task and, under `once`, the answer. All, or nothing.

        A run with an `ingest` comes without tasks. With a `callback` on the job, its entry is in
        the outbox from then on.

        Writing a job_id a second time raises ConveyorError(conflict) and changes nothing.
        """
        ...

    async def append_tasks(
        self,
        request: AppendRequest,
        *,
        answer: Callable[[Appended], StoredResponse],
        once: IdempotencyScope | None,
    ) -> StoredResponse:
        """Add tasks to the first run of an open job, and close the job if the request says so.

        Indexes are given out in order and never twice, however many callers add at once. The answer
        is rendered from what this very write made, and stored under `once` in the same step.
        Raises ConveyorError: not_found; job_not_open; last_batch_received; run_not_terminal while
        rows of the run are being ingested; quota_exceeded where the run would hold more than
        `max_tasks`.
        """
        ...

    async def close_job(self, caller: str, job_id: str, *, now: int) -> JobView:
        """Refuse further tasks; complete the run at once if all its tasks have ended.

        Idempotent. Raises ConveyorError(not_found), also for a deleted job.
        """
        ...

    async def delete_job(self, caller: str, job_id: str, *, now: int) -> list[str]:
        """Turn the job and all its runs to `deleted` (the tombstone); return the ids of its runs.

        Idempotent while the tombstone stands. Raises ConveyorError(not_found) after that.
        """
        ...


# -- runs --


class Dispatchable(Protocol):
    """Runs as a worker discovers them: those that may have work."""

    async def dispatchable_runs(self) -> list[DispatchableRun]:
        """Return every run that is running and not paused."""
        ...

    async def dispatch_changes(self, *, since: int) -> list[DispatchChange]:
        """Return runs whose status or pause was changed at or after `since`, as they are now.

        `since` is compared with the clocks of the writers: a reader leaves a margin. Runs whose
        tombstone has been removed meanwhile are not among them.
        """
        ...

    async def dispatchable_run(self, run_id: str) -> DispatchableRun | None:
        """Return one run, if it is running and not paused."""
        ...


class WorkerRuns(Dispatchable, Protocol):
    """Runs as a worker sees and ends them."""

    async def fail_run(self, run_id: str, *, reason: RunFailure, detail: str, now: int) -> bool:
        """End a live run as `failed`; True if this call did it, False if the run was terminal or
        gone."""
        ...


class RunLookup(Protocol):
    """One run of a job."""

    async def get_run(self, caller: str, job_id: str, run_id: str | None) -> Run | None:
        """Return a run by id, deleted ones included; with None, the latest that is not deleted."""
        ...


class RunReader(RunLookup, Protocol):
    """Runs as the API reads them."""

    async def list_runs(
        self, caller: str, job_id: str, *, before: int | None, limit: int
    ) -> list[Run]:
        """Return runs of a job that are not deleted, newest first, with a run_sequence below
        `before`."""
        ...


class RunWriter(Protocol):
    """Runs as the API writes them."""

    async def stop_run(self, caller: str, job_id: str, *, now: int) -> Run:
        """End the latest run as `stopped`. Once this returns, no task of the run can be claimed.

        Idempotent on a stopped run. Raises ConveyorError: not_found; run_not_stoppable for a run
        that ended otherwise; no_prior_run where every run was deleted.
        """
        ...

    async def pause_run(self, caller: str, job_id: str, *, paused: bool, now: int) -> Run:
        """Set or clear the latest run's pause. Idempotent.

        Raises ConveyorError: not_found; conflict where the run is terminal; no_prior_run.
        """
        ...

    async def rerun(
        self,
        request: RerunRequest,
        *,
        answer: Callable[[Rerun], StoredResponse],
        once: IdempotencyScope | None,
    ) -> StoredResponse:
        """Make a new run from the latest one, and close the job.

        Where the latest run has `large_from` tasks or more, no row is read or written here: the new
        run has an `ingest` to be done, and the totals that it will have. Where statuses name one of
        pending and processing, the totals presume the unfinished tasks of both kinds.

        Without statuses every task starts afresh under its old id. With statuses, matching rows
        start afresh, other terminal rows are copied with the run that owns their body in
        source_run_id, and other rows are left out; the new run pins the runs it draws bodies from.
        The answer is rendered from what this very write made, and stored under `once` in the same
        step. A run_id that exists already is answered, not made again.
        Raises ConveyorError: not_found; run_not_terminal, also while rows of the latest run are
        still being written, and, as CallInFlight, while a task of a run with fewer is under a live
        claim; no_prior_run; no_matching_tasks; partial_rerun_window_expired where statuses are
        given and the source run was created before `window_start`.
        """
        ...

    async def delete_run(self, caller: str, job_id: str, run_id: str, *, now: int) -> None:
        """Turn a run to `deleted` and make the newest other run the job's latest one. Idempotent.

        Raises ConveyorError: not_found; run_has_descendants while another run that is not deleted
        pins it.
        """
        ...


class ApiRuns(RunReader, RunWriter, Protocol):
    """Runs as the API reads and writes them."""


# -- idempotency keys --


class ClaimedKey(msgspec.Struct, frozen=True):
    """The caller may go on, and uses this id for what it creates (an earlier claimer's, if any)."""

    created_id: str
    taken_over: bool


class KeyInUse(msgspec.Struct, frozen=True):
    """Another request under the key is still running."""


class KeyMismatch(msgspec.Struct, frozen=True):
    """The key was used with another body."""


KeyClaim = ClaimedKey | StoredResponse | KeyInUse | KeyMismatch


class Idempotency(Protocol):
    """Idempotency keys: claimed before the work, answered with it, kept 24 hours."""

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
        """Claim a key for one request, or return the state of the request that has it.

        A claim lapses at `lapses_at` unless answered; a request that takes it over gets the id that
        it named. An answer stands until `expires_at`.
        """
        ...

    async def release_idempotency_key(self, scope: str, *, created_id: str, lapses_at: int) -> None:
        """Free a key that has no answer: its request failed and created nothing. Only under the
        very claim that named this id and lapses then: one that was taken over is another's."""
        ...
