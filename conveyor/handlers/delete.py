"""Scrub a deleted run: remove its rows and bodies in steps, and its tombstone at the end."""

from __future__ import annotations

import logging
from functools import partial

from conveyor.aio.concurrency import Remove, Throttle
from conveyor.aio.resilience import log_and_continue
from conveyor.domain.model import JobStatus, Run, RunStatus
from conveyor.ports.blobs import BlobPurge
from conveyor.ports.clock import Clock
from conveyor.ports.handler import ACKNOWLEDGE, Outcome, Throttled
from conveyor.ports.maintenance import JobTombstones, RunTombstones, TaskScrubs
from conveyor.ports.queues import CONTROL_QUEUE, DeleteMessage, Delivery, Queues
from conveyor.records.blob_keys import (
    BODIES_A_STEP,
    LIFECYCLE_DAYS,
    bodies_below,
    export_prefix,
    run_prefix,
    staged_prefix,
    template_prefix,
)

ROWS_A_STEP = 500

MOST_LONG = 2
"""Long deletions at a time in one worker: the other slots of the control lane are for urgent
work."""
PAUSE = 5.0
"""Seconds until a deletion that had no place is tried again."""

_log = logging.getLogger("conveyor.handlers")


class DeleteHandler:
    """The handler of delete messages.

    Ingestions and exports under way find the tombstone at their next step, and end. A second pass,
    one visibility timeout after the first, removes what they left, and what a worker left that was
    killed between body and settlement. Any step may be done twice, or by two workers at once.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        jobs: JobTombstones,
        runs: RunTombstones,
        tasks: TaskScrubs,
        blobs: BlobPurge,
        queues: Queues,
        visibility: float,
    ) -> None:
        self._clock = clock
        self._jobs = jobs
        self._runs = runs
        self._tasks = tasks
        self._blobs = blobs
        self._queues = queues
        self._pace = Throttle(clock)
        self._visibility = visibility
        self._under_way: set[str] = set()
        self._long = 0

    async def handle(self, delivery: Delivery, _throttled: Throttled) -> Outcome:
        """Remove everything of one run, or a step of it while too many long deletions are under
        way."""
        message = delivery.message
        assert isinstance(message, DeleteMessage)
        run = await self._run(message)
        if run is not None and run.status is not RunStatus.DELETED:
            _log.error(
                "a delete message for a run that is not deleted", extra={"run_id": run.run_id}
            )
            return ACKNOWLEDGE
        if run is None and await self._runs.run_exists(message.run_id):
            _log.error(
                "a delete message for a run of another job", extra={"run_id": message.run_id}
            )
            return ACKNOWLEDGE
        if message.run_id in self._under_way:
            # The one under way does the same; if it is lost, the sweeper sends another message.
            return ACKNOWLEDGE
        self._under_way.add(message.run_id)
        try:
            if run is not None:
                await self._touch(message.run_id)
                await self._queues.drop_run(message.run_id)
            if not await self._scrub(message, has_rows=run is not None):
                return await self._later(message)
        finally:
            self._under_way.discard(message.run_id)
        if run is None:
            # It was purged before, and its job may be left; or it was never written.
            await self._end_job(message.job_id)
            return ACKNOWLEDGE
        if not message.final:
            again = DeleteMessage(message.job_id, message.run_id, final=True)
            await self._queues.send(CONTROL_QUEUE, again, delay=self._visibility)
            return ACKNOWLEDGE
        await self._runs.purge_run(message.run_id)
        await self._end_job(message.job_id)
        return ACKNOWLEDGE

    async def renew(self) -> None:
        """Mark the deletions in work as under way, so that no sweeper sends them again."""
        for run_id in list(self._under_way):
            await log_and_continue(_log, "touching a deletion failed", partial(self._touch, run_id))

    async def _touch(self, run_id: str) -> None:
        await self._runs.touch_tombstone(run_id, now=self._clock.now())

    async def _run(self, message: DeleteMessage) -> Run | None:
        """Find the run, to check that it is a tombstone: a message alone deletes no row.

        None means that nothing names its bodies any more. Ids of runs are never used twice, and no
        message names a run that is still to be written.
        """
        job = await self._jobs.find_job(message.job_id)
        if job is None:
            return None
        return await self._runs.get_run(job.caller, message.job_id, message.run_id)

    async def _end_job(self, job_id: str) -> None:
        """Remove the tombstone of a job once no run of it is left, after the template of a
        scheduled one: nothing would lead to it any more."""
        job = await self._jobs.find_job(job_id)
        if job is None or (job.status is JobStatus.DELETED and job.scheduling is not None):
            remove = bodies_below(self._blobs, template_prefix(job_id))
            while await self._pace.step(remove, BODIES_A_STEP):
                pass
        await self._jobs.purge_job(job_id)

    async def _later(self, message: DeleteMessage) -> Outcome:
        """Send a fresh copy, so that waiting does not wear the message out."""
        await self._queues.send(CONTROL_QUEUE, message, delay=PAUSE)
        return ACKNOWLEDGE

    async def _scrub(self, message: DeleteMessage, *, has_rows: bool) -> bool:
        """Remove rows and bodies; return False if that takes long and there is no place for it."""
        is_long = False
        try:
            for remove, size in self._removals(message, has_rows=has_rows):
                while await self._pace.step(remove, size):
                    if not is_long and self._long >= MOST_LONG:
                        return False
                    if not is_long:
                        self._long += 1
                        is_long = True
            return True
        finally:
            self._long -= is_long

    def _removals(self, message: DeleteMessage, *, has_rows: bool) -> list[tuple[Remove, int]]:
        job_id, run_id = message.job_id, message.run_id
        scrub: Remove = partial(self._tasks.scrub_tasks, run_id)
        prefixes = [
            staged_prefix(job_id, run_id),
            export_prefix(job_id, run_id),
            *(run_prefix(job_id, run_id, days) for days in LIFECYCLE_DAYS),
        ]
        return [
            *([(scrub, ROWS_A_STEP)] if has_rows else []),
            *((bodies_below(self._blobs, prefix), BODIES_A_STEP) for prefix in prefixes),
        ]
