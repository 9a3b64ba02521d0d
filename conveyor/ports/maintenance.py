"""The maintenance ports: what deletions and a periodic look over the whole store find, set right
and remove."""

from __future__ import annotations

from typing import Protocol

import msgspec

from conveyor.domain.model import RunStatus
from conveyor.ports.exports import Export, ExportTouches
from conveyor.ports.records import JobLookup, RunLookup


class QuietRun(msgspec.Struct, frozen=True):
    """A run in which nothing has moved since `updated_at`."""

    job_id: str
    run_id: str
    updated_at: int


class EndedRun(msgspec.Struct, frozen=True):
    """A run that ended, and when, in milliseconds; `swept` once its bodies were removed for age,
    `queue_dropped` once its queue was dropped after its end by a sweeper."""

    job_id: str
    run_id: str
    ended_at: int
    result_ttl_days: int
    swept: bool
    queue_dropped: bool


class Sweeping(Protocol):
    """Runs as the sweeper finds and mends them."""

    async def claim_sweep(self, *, now: int, lapses_at: int) -> bool:
        """Return whether the caller may sweep: one worker of a fleet at a time, until `lapses_at`.

        An earlier claim that lapses more than a minute after `lapses_at` is of a clock that was set
        back since, and does not count.
        """
        ...

    async def quiet_runs(self, *, before: int) -> list[QuietRun]:
        """Return live runs that are not paused, do not ingest, have tasks that have not ended, and
        in which nothing was written since `before`."""
        ...

    async def reconcile_run(self, run_id: str, *, now: int) -> RunStatus | None:
        """Set a run's counters to the sums of its rows where they disagree, decide again whether it
        is complete, and return its status, None if it is gone. A run that ingests, or has rows
        under a live claim, stays as it is."""
        ...

    async def due_references(
        self, run_id: str, *, after: int, limit: int, now: int
    ) -> list[tuple[int, str]]:
        """Return (index, task_id) of rows of a live run that could be worked now: not terminal,
        under no live claim, not delayed; in order, with an index above `after`."""
        ...

    async def ended_runs(self, *, before: int, after: str, limit: int) -> list[EndedRun]:
        """Return terminal runs, not deleted, that ended before `before`, by run id above `after`.

        A run that other runs draw bodies from counts as ended when the last of those ended.
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
        ids of the runs to be scrubbed.

        Return an empty list, and change nothing, if the run is gone, has not ended, or a run that
        has not ended draws on it. Ended runs that draw on it do not keep it: their copies are past
        their time as well.
        """
        ...

    async def tidy(self, *, now: int) -> int:
        """Remove the leftovers of writes that were cut off between two steps; return how many. 0 if
        each write of this store is one transaction."""
        ...


class JobPurge(Protocol):
    """The last step of deleting a job."""

    async def purge_job(self, job_id: str) -> None:
        """Remove the tombstone of a deleted job if no run of it is left; else without effect."""
        ...


class JobTombstones(JobLookup, JobPurge, Protocol):
    """Deleted jobs as a scrub finds and removes them."""


class RunTombstones(RunLookup, Protocol):
    """Deleted runs as a scrub finds and removes them."""

    async def deleted_runs(self, *, before: int | None = None) -> list[tuple[str, str]]:
        """Return (job_id, run_id) of every tombstone, so that a restart goes on with unfinished
        scrubs; with `before`, of those that were neither made nor touched since."""
        ...

    async def touch_tombstone(self, run_id: str, *, now: int) -> None:
        """Note in `updated_at` that the scrub of a deleted run is under way. Without effect if the
        run is not deleted or gone."""
        ...

    async def purge_run(self, run_id: str) -> None:
        """Remove the tombstone of a deleted run and its exports. Without effect if it is gone."""
        ...


class TaskScrubs(Protocol):
    """Task rows as a scrub removes them."""

    async def scrub_tasks(self, run_id: str, limit: int) -> int:
        """Remove at most `limit` rows of a deleted run, events with them; return how many."""
        ...


class StuckIngests(Protocol):
    """Ingestions that the sweeper starts again."""

    async def stuck_ingests(self, *, before: int) -> list[tuple[str, str]]:
        """Return (job_id, run_id) of runs that ingest and have not moved on since `before`."""
        ...


class InputExpiry(Protocol):
    """Slots that the sweeper removes."""

    async def expired_inputs(self, *, now: int, limit: int) -> list[str]:
        """Return ids of slots past their time."""
        ...

    async def drop_input(self, input_id: str) -> None:
        """Remove a slot. Without effect if it is gone."""
        ...


class ExportUpkeep(ExportTouches, Protocol):
    """Exports that the sweeper starts again or removes."""

    async def unfinished_exports(self, *, before: int) -> list[Export]:
        """Return exports that have not ended and were last touched before `before`."""
        ...

    async def expired_exports(self, *, now: int, limit: int) -> list[Export]:
        """Return exports past their time."""
        ...

    async def drop_export(self, export_id: str) -> None:
        """Remove an export. Without effect if it is gone."""
        ...
