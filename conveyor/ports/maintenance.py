"""The maintenance ports: deletions, and the periodic sweep that finds, corrects and removes."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import msgspec

from conveyor.domain.hosts import Politeness
from conveyor.domain.model import RunStatus
from conveyor.ports.exports import Export, ExportTouches
from conveyor.ports.records import JobLookup, RunLookup


class QuietRun(msgspec.Struct, frozen=True):
    """A live run without any write since `updated_at`, in milliseconds since the epoch.

    `politeness` is that of its job; `hosts` are those of its hosts that have a queue of their own.
    """

    job_id: str
    run_id: str
    updated_at: int
    politeness: Politeness | None = None
    hosts: tuple[str, ...] = ()


class EndedRun(msgspec.Struct, frozen=True):
    """A run that ended at `ended_at`, in milliseconds since the epoch.

    `swept` is True once its bodies were removed for age, `queue_dropped` once a sweeper has dropped
    its queue after its end. `due_at` is its place among runs for which something is due.
    """

    job_id: str
    run_id: str
    ended_at: int
    result_ttl_days: int
    swept: bool
    queue_dropped: bool
    due_at: int


class DuePosition(NamedTuple):
    """The place of an ended run among those for which something is due."""

    due_at: int
    run_id: str


ENDED_FOR = 3_600_000
"""Milliseconds after its end at which a run is looked at: by then its worker has dropped the queue,
or died before."""


class Sweeping(Protocol):
    """Search and correction of runs, for the sweeper."""

    async def claim_sweep(self, *, now: int, lapses_at: int) -> bool:
        """Claim the sweep until `lapses_at`; return False if it is claimed already.

        So one worker of a fleet sweeps at a time. An earlier claim that lapses more than a minute
        after `lapses_at` was made before a clock was set back, and does not count.
        """
        ...

    async def quiet_runs(self, *, before: int) -> list[QuietRun]:
        """Return live runs that are neither paused nor ingesting, have tasks that have not ended,
        and saw no write since `before`."""
        ...

    async def reconcile_run(self, run_id: str, *, now: int) -> RunStatus | None:
        """Correct a run's counters to the sums of its rows, and decide again whether it is
        complete; return its status, None if it is gone.

        A run that is ingesting, or has rows under a live claim, stays as it is.
        """
        ...

    async def due_references(
        self, run_id: str, *, after: int, limit: int, now: int
    ) -> list[tuple[int, str]]:
        """Return (index, task_id) of at most `limit` rows of a live run that could be worked now:
        not terminal, under no live claim, not delayed. Rows come in order of their index, which is
        above `after`."""
        ...

    async def ended_runs(
        self, *, now: int, row_days: int, after: DuePosition | None, limit: int
    ) -> list[EndedRun]:
        """Return at most `limit` terminal runs for which something is due at `now`, the longest due
        first, behind `after`. What is read does not grow with runs for which nothing is due.

        ENDED_FOR after its end, a queue is due that no sweeper has dropped; after that the bodies,
        once their results have expired; and `row_days` after those the run itself, unless that is
        0. A run whose bodies other runs use counts as ended when the last of those has ended.
        """
        ...

    async def mark_swept(self, run_id: str) -> None:
        """Note that the bodies of an ended run were removed for age."""
        ...

    async def mark_queue_dropped(self, run_id: str) -> None:
        """Note that nothing is left of the queue of an ended run."""
        ...

    async def expire_run(self, run_id: str, *, now: int) -> list[str]:
        """Turn an ended run to `deleted`, and its job too if no other run of it is left; return the
        ids of the runs to be scrubbed. A scheduled job stays without a run, unless its schedule was
        a single `at` that has fired: nothing waits, and no fire follows.

        Change nothing and return an empty list if the run is gone, has not ended, or its bodies are
        used by a run that has not ended. Ended runs that use its bodies do not keep it: their
        copies are past their time as well.
        """
        ...

    async def tidy(self, *, now: int) -> int:
        """Remove the leftovers of writes that were cut off between two steps; return their number,
        which is 0 if each write of this store is one transaction."""
        ...


class JobPurge(Protocol):
    """The last step of deleting a job, for maintenance."""

    async def purge_job(self, job_id: str) -> None:
        """Remove the tombstone of a deleted job if no run of it is left, with the job's deliveries
        and the record of its fires; else do nothing. A repetition ends what was cut off."""
        ...


class JobTombstones(JobLookup, JobPurge, Protocol):
    """Lookup and removal of deleted jobs, for a scrub."""


class RunTombstones(RunLookup, Protocol):
    """Search and removal of deleted runs, for a scrub."""

    async def deleted_runs(self, *, before: int | None = None) -> list[tuple[str, str]]:
        """Return (job_id, run_id) of every tombstone, so that a restart goes on with unfinished
        scrubs; with `before`, only tombstones last written or touched before that instant."""
        ...

    async def run_exists(self, run_id: str) -> bool:
        """Tell whether there is a record of a run, a tombstone included, of whatever job."""
        ...

    async def touch_tombstone(self, run_id: str, *, now: int) -> None:
        """Note in `updated_at` that the scrub of a deleted run is under way. Do nothing if the run
        is not deleted, or gone."""
        ...

    async def purge_run(self, run_id: str) -> None:
        """Remove the tombstone of a deleted run and its exports; do nothing if it is gone."""
        ...


class TaskScrubs(Protocol):
    """Removal of task rows, for a scrub."""

    async def scrub_tasks(self, run_id: str, limit: int) -> int:
        """Remove at most `limit` rows of a deleted run with their events; return their number.

        A store that removes settled rows by their age leaves it those of a run that `expire_run`
        deleted.
        """
        ...


class StuckIngest(NamedTuple):
    """A run whose ingestion stands still. `template`: its rows come from its job's template."""

    job_id: str
    run_id: str
    template: bool = False


class StuckIngests(Protocol):
    """Search for ingestions to start again, for the sweeper."""

    async def stuck_ingests(self, *, before: int) -> list[StuckIngest]:
        """Return the runs that are ingesting and have not moved on since `before`."""
        ...


class InputExpiry(Protocol):
    """Search and removal of expired slots, for the sweeper."""

    async def expired_inputs(self, *, now: int, limit: int) -> list[str]:
        """Return the ids of at most `limit` slots past their time."""
        ...

    async def drop_input(self, input_id: str) -> None:
        """Remove a slot; do nothing if it is gone."""
        ...


class ExportUpkeep(ExportTouches, Protocol):
    """Search for exports to start again or remove, for the sweeper."""

    async def unfinished_exports(self, *, before: int) -> list[Export]:
        """Return exports that have not ended and were last touched before `before`."""
        ...

    async def expired_exports(self, *, now: int, limit: int) -> list[Export]:
        """Return at most `limit` exports past their time."""
        ...

    async def drop_export(self, export_id: str) -> None:
        """Remove an export; do nothing if it is gone."""
        ...
