"""The sweeping port: what a periodic look over the whole store finds, and sets right."""

from __future__ import annotations

from typing import Protocol

import msgspec

from conveyor.domain.model import RunStatus


class QuietRun(msgspec.Struct, frozen=True):
    """A run in which nothing has moved for a while; `updated_at` tells since when."""

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
    """What the sweeper needs of the records."""

    async def claim_sweep(self, *, now: int, lapses_at: int) -> bool:
        """Whether the caller may sweep: one worker of a fleet at a time, until `lapses_at`.

        A claim that lapses more than a minute after `lapses_at` is of a clock that was set back
        since, and does not count.
        """
        ...

    async def quiet_runs(self, *, before: int) -> list[QuietRun]:
        """Live runs that are not paused, do not ingest, have tasks that have not ended, and in
        which nothing was written since `before`."""
        ...

    async def reconcile_run(self, run_id: str, *, now: int) -> RunStatus | None:
        """Set a run's counters to what its rows say where they disagree, and decide again whether
        it is complete; where it stands then, None where it is gone. Rows under a live claim, and
        runs that ingest, leave it as it is."""
        ...

    async def due_references(
        self, run_id: str, *, after: int, limit: int, now: int
    ) -> list[tuple[int, str]]:
        """(index, task_id) of rows of a live run that could be worked now: not terminal, under no
        live claim, not delayed; in order, with an index above `after`."""
        ...

    async def ended_runs(self, *, before: int, after: str, limit: int) -> list[EndedRun]:
        """Terminal runs, not deleted, that ended before `before`, by run id above `after`.

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
        """Turn an ended run to `deleted`, and its job too where no other run of it is left; the ids
        of the runs whose scrub is due.

        None where it is gone, has not ended, or a run that has not ended draws on it. Ended runs
        that do keep it no longer: what they drew is past its time as well.
        """
        ...

    async def tidy(self, *, now: int) -> int:
        """Set right what writes of several steps, cut off between two of them, left behind in this
        store; how many things. 0 where each write is one transaction."""
        ...
