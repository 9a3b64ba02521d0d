"""The records ports: jobs, runs and idempotency keys, one role for each kind of caller.

One adapter implements all of them over one store. Each write becomes visible at once and entirely,
or not at all. `caller` is the keyed hash of an API key; to a caller, another caller's job does not
exist.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
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
from conveyor.domain.webhooks import Webhook


class StoredResponse(msgspec.Struct, frozen=True):
    """A 2xx answer: the status and the very bytes, sent now and repeated by a replay."""

    status: int
    body: bytes


class IdempotencyScope(msgspec.Struct, frozen=True):
    """The idempotency key of a write, stored with the write's answer or not at all.

    `scope` is a digest of caller, method, path and key.
    """

    scope: str


class AppendRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The tasks to add to a job; `last_batch` closes the job too.

    The run may hold `max_tasks` at most. `now` is in milliseconds since the epoch.
    """

    caller: str
    job_id: str
    specs: Sequence[TaskSpec]
    last_batch: bool
    max_tasks: int
    now: int


class Appended(msgspec.Struct, frozen=True):
    """The result of adding tasks: the job and run after it, and the number of tasks added, whose
    indexes begin with `first_index`."""

    view: JobView
    accepted: int
    first_index: int


class RerunRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The new run `run_id` to make from the latest one of a job.

    `statuses` selects the tasks to start afresh; None selects all. With `groups`, ids of failure
    groups, only the failed tasks of those start afresh. A partial rerun needs a source
    that was created at or after `window_start`. The rows of a source of `large_from` tasks or more
    are left to ingestion.
    """

    caller: str
    job_id: str
    run_id: str
    statuses: frozenset[TaskStatus] | None
    window_start: int
    large_from: int
    now: int
    groups: frozenset[str] | None = None
    traceparent: str | None = None


class Rerun(msgspec.Struct, frozen=True):
    """The result of a rerun: the job and new run, and the numbers of rows reset and inherited."""

    view: JobView
    rerun_of: str
    retried: int
    inherited: int


class DispatchChange(msgspec.Struct, frozen=True):
    """A run that may have become dispatchable or ceased to be; `run` is None if it is not now."""

    run_id: str
    run: DispatchableRun | None


# -- jobs --


class JobLookup(Protocol):
    """Lookup of a job without its caller, for workers, and for signed links, whose signature stands
    for the caller."""

    async def find_job(self, job_id: str) -> Job | None:
        """Return a job of any caller by its id, deleted ones included; None once it is gone."""
        ...


class JobReader(JobLookup, Protocol):
    """Reading of jobs, for the API."""

    async def get_job(self, caller: str, job_id: str) -> JobView | None:
        """Return a job and its latest run, also while the job is being deleted; None once it is
        gone.

        The latest run is the newest that is not deleted; of a deleted job, the newest that is left.
        """
        ...

    async def list_jobs(
        self,
        caller: str,
        *,
        status: JobStatus | None,
        before: str | None,
        limit: int,
        scheduled: bool | None = None,
    ) -> list[JobView]:
        """Return at most `limit` jobs of a caller, newest first by job_id, strictly below `before`.

        With a `status`, return only jobs in it; without one, leave out deleted jobs. `scheduled`
        chooses between scheduled and regular jobs; None takes both.
        """
        ...


class JobWriter(Protocol):
    """Writing of jobs, for the API."""

    async def create_job(
        self,
        job: Job,
        run: Run | None,
        tasks: Sequence[NewTask],
        *,
        answer: StoredResponse,
        once: IdempotencyScope | None,
    ) -> None:
        """Write a job, its first run, every task and, under `once`, the answer: all or nothing.

        A run with an `ingest` comes without tasks; a scheduled job comes without a run. If the job
        has a `callback` or a `webhook`, the same step writes the run's entries in the outbox.
        Changes nothing, and raises ConveyorError: conflict if the job_id exists; quota_exceeded if
        the caller's tasks of the day would be more than its limit.
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

        Indexes are assigned in order and never twice, even if many callers add at once. `answer`
        renders the result of this very write, and the same step stores its response under `once`.
        Raises ConveyorError: not_found; job_not_open; last_batch_received; run_not_terminal while
        rows of the run are being ingested; quota_exceeded if the run would hold more than
        `max_tasks`, or the caller's tasks of the day would be more than its limit.
        """
        ...

    async def close_job(self, caller: str, job_id: str, *, now: int) -> JobView:
        """Refuse further tasks; complete the run at once if all its tasks have ended.

        Idempotent. Raises ConveyorError(not_found), also for a deleted job.
        """
        ...

    async def set_webhook(
        self, caller: str, job_id: str, webhook: Webhook | None, *, now: int
    ) -> Job:
        """Set or remove the webhook of a job, and return the job after it.

        If its latest run is live and has no entry in the outbox for a webhook, write one with it,
        due at once: a run that ended before owes nothing. A webhook that is set where there is none
        has the next number, which the entry of a live run gets as well; that of a run which ended
        before keeps its own. Idempotent. Raises
        ConveyorError(not_found), also for a deleted job.
        """
        ...

    async def delete_job(self, caller: str, job_id: str, *, now: int) -> list[str]:
        """Turn a job and all its runs to `deleted` (the tombstone); return the ids of its runs.

        Idempotent while the tombstone exists. Raises ConveyorError(not_found) after that.
        """
        ...


# -- runs --


class Dispatchable(Protocol):
    """Discovery of runs that may have work, for workers."""

    async def dispatchable_runs(self) -> list[DispatchableRun]:
        """Return every run that is running and not paused."""
        ...

    async def dispatch_changes(self, *, since: int) -> list[DispatchChange]:
        """Return runs whose status or pause was changed at or after `since`, as they are now.

        `since` is compared with the clocks of the writers, so a reader leaves a margin. Runs whose
        tombstone has been removed meanwhile are left out.
        """
        ...

    async def dispatchable_run(self, run_id: str) -> DispatchableRun | None:
        """Return one run if it is running and not paused, else None."""
        ...


class RunHosts(Protocol):
    """The hosts of a run that have a queue of their own."""

    async def add_hosts(self, run_id: str, hosts: Sequence[str], *, now: int) -> tuple[str, ...]:
        """Append the hosts that a live run does not have yet, as far as it has fewer than
        MOST_HOST_QUEUES; return all of them, none if the run is gone. Discovery sees the change."""
        ...


class WorkerRuns(Dispatchable, RunHosts, Protocol):
    """Discovery, hosts and failure of runs, for workers."""

    async def fail_run(self, run_id: str, *, reason: RunFailure, detail: str, now: int) -> bool:
        """End a live run as `failed`; return True if this call ended it, False if it was terminal
        or gone."""
        ...


class RunLookup(Protocol):
    """Lookup of one run of a job."""

    async def get_run(self, caller: str, job_id: str, run_id: str | None) -> Run | None:
        """Return a run by id, deleted ones included; for a `run_id` of None, the latest run that is
        not deleted. Return None if it does not exist."""
        ...


class RunPosition(msgspec.Struct, frozen=True):
    """A place in the list of runs by their last change: the instant, then the run."""

    changed_at: int
    run_id: str


class ChangedRun(msgspec.Struct, frozen=True):
    """A run with its job, and its place in the list."""

    job: Job
    run: Run
    position: RunPosition


class RunChanges(Protocol):
    """The runs of all callers, or of one, by their last change of status or pause, for overviews
    and streams. Deleted runs, and those of deleted jobs, are left out."""

    async def changed_runs(
        self,
        caller: str | None,
        *,
        before: RunPosition | None,
        limit: int,
        live: bool | None = None,
    ) -> list[ChangedRun]:
        """Return at most `limit` runs, the latest change first, strictly below `before`. `live` of
        True means live ones alone, of False ended ones alone. `caller` of None means all callers.
        """
        ...


class RunWrites(Protocol):
    """Word of the writes to runs, for streams, where one process alone writes."""

    def on_write(self, tell: Callable[[Collection[str], bool], None]) -> None:
        """Call a function after writes: with the ids of the runs, and with True if one of them is
        new or changed its status or pause. Some of the writes may have been undone."""
        ...


class RunReader(RunLookup, Protocol):
    """Reading of runs, for the API."""

    async def list_runs(
        self, caller: str, job_id: str, *, before: int | None, limit: int
    ) -> list[Run]:
        """Return at most `limit` runs of a job that are not deleted, newest first, with a
        run_sequence below `before`."""
        ...


class RunWriter(Protocol):
    """Writing of runs, for the API."""

    async def stop_run(self, caller: str, job_id: str, *, now: int) -> Run:
        """End the latest run as `stopped`. Once this returns, no task of the run can be claimed.

        Idempotent on a stopped run. Raises ConveyorError: not_found; run_not_stoppable if the run
        ended otherwise; no_prior_run if every run was deleted.
        """
        ...

    async def pause_run(self, caller: str, job_id: str, *, paused: bool, now: int) -> Run:
        """Set or clear the latest run's pause. Idempotent.

        Raises ConveyorError: not_found; conflict if the run is terminal; no_prior_run if every run
        was deleted.
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

        Without statuses every task starts afresh under its old id. With statuses, matching rows
        start afresh, other terminal rows are copied with the run that owns their body in
        source_run_id, and other rows are left out; the new run pins the runs whose bodies it uses.
        If the job has a webhook, the same step writes the new run's entry in the outbox.

        If the latest run has `large_from` tasks or more, read and write no row here: give the new
        run an `ingest` to be done, and the totals that it will have. If statuses name only one of
        pending and processing, the totals presume the unfinished tasks of both kinds.

        `answer` renders the result of this very write, and the same step stores its response under
        `once`. If the run_id exists already, answer from that run and make no other.
        Raises ConveyorError: not_found; run_not_terminal, also while rows of the latest run are
        still being written, and, as CallInFlight, while a task of a run with fewer than
        `large_from` tasks is under a live claim; no_prior_run; no_matching_tasks;
        partial_rerun_window_expired if statuses are given and the source run was created before
        `window_start`; quota_exceeded if the tasks that start afresh, with the caller's others of
        the day, would be more than its limit.
        """
        ...

    async def delete_run(self, caller: str, job_id: str, run_id: str, *, now: int) -> None:
        """Turn a run to `deleted` and make the newest other run the job's latest one. Idempotent.

        Raises ConveyorError: not_found; run_has_descendants while another run that is not deleted
        pins it.
        """
        ...


class ApiRuns(RunReader, RunWriter, RunChanges, RunHosts, Protocol):
    """Reading and writing of runs, for the API."""


# -- idempotency keys --


class ClaimedKey(msgspec.Struct, frozen=True):
    """A claimed key. The request goes on, and gives `created_id` to the record it creates: its own
    id, or the earlier claimer's if `taken_over`."""

    created_id: str
    taken_over: bool


class KeyInUse(msgspec.Struct, frozen=True):
    """A refusal: another request under the key is still running."""


class KeyMismatch(msgspec.Struct, frozen=True):
    """A refusal: the key was used with another body."""


KeyClaim = ClaimedKey | StoredResponse | KeyInUse | KeyMismatch


class Idempotency(Protocol):
    """Idempotency keys, for the API: claimed before the work, answered with it, kept 24 hours."""

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

        Return ClaimedKey if the key is free or its claim has lapsed. Otherwise return KeyMismatch
        if the request that has it came with another fingerprint, StoredResponse if it was answered,
        or KeyInUse.

        A claim lapses at `lapses_at` unless answered; a request that takes it over gets the id that
        the lapsed claim named. An answer stands until `expires_at`.
        """
        ...

    async def release_idempotency_key(self, scope: str, *, created_id: str, lapses_at: int) -> None:
        """Free a key without an answer, whose request failed and created nothing.

        Free it only if its claim names this `created_id` and `lapses_at`: a claim that was taken
        over belongs to another request.
        """
        ...

    async def answer_idempotency_key(
        self, scope: str, *, created_id: str, answer: StoredResponse
    ) -> None:
        """Store the answer of a request whose work took several writes, none of which could store
        it. Idempotent.

        Do nothing if the key is gone, was answered, or its claim does not name this `created_id`.
        """
        ...
