"""The schedules port: scheduled jobs that are due, their changes, and the record of their fires.

A scheduled job is a job whose `scheduling` is set; it is made by `JobWriter.create_job`, without a
run. Its index entry (when it is due) follows from the job itself: a job that is not deleted is due
at `scheduling.due_at`. Instants are in milliseconds since the epoch.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from conveyor.domain.model import Job, Run
from conveyor.domain.scheduling import FireRecord
from conveyor.ports.records import IdempotencyScope, StoredResponse


class ScheduleChange(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a scheduled job: `after` replaces the job as it was read, `before`.

    `run` is a new run of the job with an `ingest` to be done, whose id and number `after` names as
    its latest; if the job has a webhook, the step writes its entry in the outbox. `fires` are rows
    to write; one whose id is there already replaces that row. `answer` is stored under `once`.
    """

    before: Job
    after: Job
    run: Run | None = None
    fires: tuple[FireRecord, ...] = ()
    answer: StoredResponse | None = None
    once: IdempotencyScope | None = None


class FireUpkeep(Protocol):
    """Removal of old rows of fires, for the sweeper. Those of a job go with it (`JobPurge`)."""

    async def drop_old_fires(self, *, before: int, limit: int) -> int:
        """Remove at most `limit` rows that were last changed before `before`; return their number.
        A store whose items have a time to live may do nothing."""
        ...


class Schedules(FireUpkeep, Protocol):
    """Scheduled jobs, for the API and for workers that fire them."""

    async def change_schedule(self, change: ScheduleChange) -> bool:
        """Make the change in one step; return False and change nothing if the job is no longer at
        the version of `before`, or gone.

        `after.version` is that of `before` plus one. Of several calls that name one version a
        single one returns True, though all write the same. A store that repeats its own write after
        a lost answer has to know it again as its own. Changes nothing, and raises ConveyorError:
        conflict if the request under `once` was answered already, or the run exists;
        quota_exceeded if the caller's tasks of the day would be more than its limit.
        """
        ...

    async def due_schedules(self, *, now: int, limit: int) -> list[Job]:
        """Return at most `limit` scheduled jobs of all callers whose `due_at` is `now` or earlier,
        longest due first; deleted jobs are left out."""
        ...

    async def list_schedules(self, *, after: str, limit: int) -> list[Job]:
        """Return at most `limit` scheduled jobs of all callers that are not deleted, in order of
        their id, which is above `after`."""
        ...

    async def list_fires(self, job_id: str, *, before: str | None, limit: int) -> list[FireRecord]:
        """Return at most `limit` rows of a job, newest first by id, strictly below `before`."""
        ...
