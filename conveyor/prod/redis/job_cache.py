"""Jobs by id, kept in Redis between the workers and the store.

A worker that meets a job for the first time needs its template: parameters, limits, the caller's
key. Where hundreds of workers start on one job, one of them reads the store. The key stays sealed
as it is in the store, and a task token stays there: Redis never sees a secret in the clear.
"""

from __future__ import annotations

from zlib import crc32

import msgspec

from conveyor.domain.errors import ConveyorError
from conveyor.domain.model import Job
from conveyor.ports.records import JobLookup
from conveyor.prod.redis.server import RedisServer

KEPT = 900
"""Seconds that a job is kept; so long a sealed key may outlive its job here."""
SHAPE = f"{crc32(','.join(Job.__struct_fields__).encode()):08x}"
"""What is kept, in the key: versions that know other fields of a job do not read each other's, as a
field that one of them left out would look like one that has its default."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Job).decode


class CachedJobs:
    """Finds jobs in Redis, and those that are not there in the store.

    A job that is found is right in what never changes, but for its callback, which may be left out.
    Its status, version and latest run are those of some moment of the last quarter of an hour:
    whoever needs them asks the store. Where Redis is away, or holds what cannot be read, the store
    is asked as if there were no cache.
    """

    def __init__(self, jobs: JobLookup, server: RedisServer, *, environment: str) -> None:
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
        told = _encode(msgspec.structs.replace(job, callback=None))
        try:
            await self._server.put(self._prefix + job.job_id, told, seconds=KEPT)
        except ConveyorError:
            return
