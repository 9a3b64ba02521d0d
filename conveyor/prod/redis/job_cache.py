"""Jobs by id, kept in Redis between the workers and the store.

A worker that meets a job for the first time needs its template: parameters, limits, the caller's
key. Where hundreds of workers start on one job, one of them reads the store. The key stays sealed
as it is in the store: Redis never sees it in the clear.
"""

from __future__ import annotations

import msgspec

from conveyor.domain.errors import ConveyorError
from conveyor.domain.model import Job
from conveyor.ports.records import FindsJobs
from conveyor.prod.redis.server import RedisServer

KEPT = 900
"""Seconds that a job is kept; so long a sealed key may outlive its job here."""
SHAPE = 1
"""The version of what is kept, in the key: old and new processes do not read each other's."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Job).decode


class CachedJobs:
    """Finds jobs in Redis, and those that are not there in the store.

    A job that is found is right in what never changes. Its status, version and latest run are those
    of some moment of the last quarter of an hour: whoever needs them asks the store. Where Redis is
    away, or holds what cannot be read, the store is asked as if there were no cache.
    """

    def __init__(self, jobs: FindsJobs, server: RedisServer, *, environment: str) -> None:
        self._jobs = jobs
        self._server = server
        self._prefix = f"conveyor:{environment}:job:{SHAPE}:"

    async def find_job(self, job_id: str) -> Job | None:
        """A job by id alone; None where the store has none."""
        if self._server.resting:
            return await self._jobs.find_job(job_id)
        kept = await self._kept(job_id)
        if kept is not None:
            return kept
        job = await self._jobs.find_job(job_id)
        if job is not None and not self._server.resting:
            await self._keep(job)
        return job

    async def _kept(self, job_id: str) -> Job | None:
        try:
            text = await self._server.get(self._prefix + job_id)
            return None if text is None else _decode(text)
        except (ConveyorError, msgspec.MsgspecError, UnicodeDecodeError):
            return None

    async def _keep(self, job: Job) -> None:
        try:
            await self._server.put(self._prefix + job.job_id, _encode(job), seconds=KEPT)
        except ConveyorError:
            return
