"""Job templates: the parts of jobs that never change, which a worker reads once and keeps."""

from __future__ import annotations

import msgspec
from cachetools import LRUCache

from conveyor.domain.api_keys import KeySealer
from conveyor.domain.model import Job
from conveyor.ports.records import JobLookup
from conveyor.records.blob_keys import lifecycle_class

CAPACITY = 1_000


class JobTemplate(msgspec.Struct, frozen=True):
    """A job, and its caller's key in the clear: for memory alone, never shown."""

    job: Job
    api_key: str
    lifecycle_days: int

    def __repr__(self) -> str:
        return f"JobTemplate({self.job.job_id})"


class JobTemplates:
    """The most recently used templates."""

    def __init__(self, jobs: JobLookup, sealer: KeySealer) -> None:
        self._jobs = jobs
        self._sealer = sealer
        self._kept: LRUCache[str, JobTemplate] = LRUCache(CAPACITY)

    async def get(self, job_id: str) -> JobTemplate | None:
        """Find the template of a job; None where the job is gone. Raises UnsealError."""
        try:
            return self._kept[job_id]
        except KeyError:
            job = await self._jobs.find_job(job_id)
        if job is None:
            return None
        api_key = self._sealer.unseal(job)
        template = JobTemplate(job, api_key, lifecycle_class(job.result_ttl_days))
        self._kept[job_id] = template
        return template
