"""The unfinished jobs of a caller, counted against a limit."""

from __future__ import annotations

from conveyor.domain.states import LIVE_RUN_STATES
from conveyor.ports.records import JobReader

PAGE = 100
"""Jobs read at a time."""
LEAST_COUNTED = 1_000
COUNTED_PER_JOB = 10
"""A caller's newest 1,000 jobs are read, or ten for each allowed one if that is more: the cost does
not grow with all jobs of its caller."""


async def are_jobs_full(jobs: JobReader, caller_id: str, *, limit: int) -> bool:
    """Return whether the newest jobs of a caller reach the limit of unfinished ones; 0 is no limit.
    Reads no page beyond that."""
    if not limit:
        return False
    active = 0
    left = max(LEAST_COUNTED, COUNTED_PER_JOB * limit)
    before: str | None = None
    while active < limit and left > 0:
        size = min(PAGE, left)
        views = await jobs.list_jobs(caller_id, status=None, before=before, limit=size)
        runs = [view.latest_run for view in views if view.latest_run is not None]
        active += sum(run.status in LIVE_RUN_STATES for run in runs)
        if len(views) < size:
            break
        left -= size
        before = views[-1].job.job_id
    return active >= limit
