"""The limit on unfinished jobs a caller, off unless set."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.states import LIVE_RUN_STATES
from conveyor.ports.records import Jobs
from conveyor.ports.turns import Turns

PAGE = 100
"""Jobs that one look takes."""
LEAST_COUNTED = 1_000
COUNTED_PER_JOB = 10
"""Of a caller the newest 1,000 jobs are looked at, or ten for each one allowed where that is more:
what a submit costs does not grow with all that its caller has ever run."""


class ActiveJobQuota:
    """Holds a process to at most `limit` jobs under way a caller; 0 means no limit."""

    def __init__(self, jobs: Jobs, *, limit: int) -> None:
        self._jobs = jobs
        self._limit = limit
        self._turns = Turns()

    @asynccontextmanager
    async def room_for_one(self, caller_id: str) -> AsyncIterator[None]:
        """Create the job inside: no other submit of this caller is counted in this process
        meanwhile. Raises ConveyorError(quota_exceeded) on entry.
        """
        if not self._limit:
            yield
            return
        async with self._turns.of(caller_id):
            if await self._is_full(caller_id):
                raise ConveyorError(
                    ErrorCode.QUOTA_EXCEEDED, f"at most {self._limit} jobs may be unfinished"
                )
            yield

    async def _is_full(self, caller_id: str) -> bool:
        """Whether the limit is met by the newest jobs of a caller; no page is read beyond that."""
        active = 0
        left = max(LEAST_COUNTED, COUNTED_PER_JOB * self._limit)
        before: str | None = None
        while active < self._limit and left > 0:
            limit = min(PAGE, left)
            views = await self._jobs.list_jobs(caller_id, status=None, before=before, limit=limit)
            runs = [view.latest_run for view in views if view.latest_run is not None]
            active += sum(run.status in LIVE_RUN_STATES for run in runs)
            if len(views) < limit:
                break
            left -= limit
            before = views[-1].job.job_id
        return active >= self._limit
