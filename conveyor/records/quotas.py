"""Limits on the jobs of a caller, and on its tasks a day, if they are set."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

from conveyor.aio.keyed_locks import KeyedLocks
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.states import LIVE_RUN_STATES
from conveyor.ports.records import JobReader

PAGE = 100
"""Jobs read at a time."""
LEAST_COUNTED = 1_000
COUNTED_PER_JOB = 10
"""The quota reads a caller's newest 1,000 jobs, or ten for each allowed one if that is more: the
cost of a submit does not grow with all jobs of its caller."""


DAY = 86_400_000
"""Milliseconds in a day of UTC."""


def day_of(now: int) -> int:
    """Return the number of the day of UTC in which an instant lies."""
    return now // DAY


def daily_limit_reached(limit: int, now: int) -> ConveyorError:
    """Build the refusal of tasks that would be more than a caller's `limit` a day."""
    end = (day_of(now) + 1) * DAY
    ends_at = datetime.fromtimestamp(end // 1_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    tasks = "1 task" if limit == 1 else f"{limit} tasks"
    return ConveyorError(
        ErrorCode.QUOTA_EXCEEDED,
        f"at most {tasks} a day are accepted (CONVEYOR_CALLER_DAILY_TASKS); "
        f"this day ends at {ends_at}",
        retry_after=-(-(end - now) // 1_000),
    )


class _JobQuota(ABC):
    """Limits jobs of each caller, within one process; a `limit` of 0 means no limit."""

    _counted: str

    def __init__(self, jobs: JobReader, *, limit: int) -> None:
        self._jobs = jobs
        self._limit = limit
        self._locks = KeyedLocks()

    @asynccontextmanager
    async def room_for_one(self, caller_id: str) -> AsyncIterator[None]:
        """Create the job inside: this process counts no other submit of this caller meanwhile.

        Raises ConveyorError(quota_exceeded) on entry.
        """
        if not self._limit:
            yield
            return
        async with self._locks.lock(caller_id):
            if await self._is_full(caller_id):
                jobs = "1 job" if self._limit == 1 else f"{self._limit} jobs"
                raise ConveyorError(ErrorCode.QUOTA_EXCEEDED, f"at most {jobs} may {self._counted}")
            yield

    @abstractmethod
    async def _is_full(self, caller_id: str) -> bool: ...


class ActiveJobQuota(_JobQuota):
    """Limits the unfinished jobs of each caller: those with a live run."""

    _counted = "be unfinished"

    async def _is_full(self, caller_id: str) -> bool:
        """Return whether the newest jobs of a caller reach the limit; reads no page beyond that."""
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


class ScheduledJobQuota(_JobQuota):
    """Limits the scheduled jobs of each caller: all that are not deleted."""

    _counted = "have a schedule"

    async def _is_full(self, caller_id: str) -> bool:
        left = self._limit
        before: str | None = None
        while left > 0:
            limit = min(PAGE, left)
            views = await self._jobs.list_jobs(
                caller_id, status=None, before=before, limit=limit, scheduled=True
            )
            if len(views) < limit:
                return False
            left -= limit
            before = views[-1].job.job_id
        return True
