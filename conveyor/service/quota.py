"""The limit on unfinished jobs a caller, off unless set."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.states import LIVE_RUN_STATES
from conveyor.ports.records import Jobs

_PAGE = 100


class ActiveJobQuota:
    """Holds a process to at most `limit` jobs under way a caller; 0 means no limit."""

    def __init__(self, jobs: Jobs, *, limit: int) -> None:
        self._jobs = jobs
        self._limit = limit
        self._counting = anyio.Lock()

    @asynccontextmanager
    async def room_for_one(self, caller_id: str) -> AsyncIterator[None]:
        """Create the job inside: no other submit of this process is counted meanwhile.

        Raises ConveyorError(quota_exceeded) on entry.
        """
        if not self._limit:
            yield
            return
        async with self._counting:
            if await self._active(caller_id) >= self._limit:
                raise ConveyorError(
                    ErrorCode.QUOTA_EXCEEDED, f"at most {self._limit} jobs may be unfinished"
                )
            yield

    async def _active(self, caller_id: str) -> int:
        """How many jobs of a caller have a run under way, counted up to the limit."""
        active = 0
        before: str | None = None
        while active < self._limit:
            views = await self._jobs.list_jobs(caller_id, status=None, before=before, limit=_PAGE)
            runs = [view.latest_run for view in views if view.latest_run is not None]
            active += sum(run.status in LIVE_RUN_STATES for run in runs)
            if len(views) < _PAGE:
                break
            before = views[-1].job.job_id
        return active
