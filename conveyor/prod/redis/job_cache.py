"""A cache of jobs in Redis, between the workers and the store.

A worker that meets a job for the first time needs its template: parameters, limits, the caller's
key. If hundreds of workers start on one job, only one of them reads the store. The caller's key
stays sealed as in the store, and the cache leaves out task tokens: Redis never sees a secret in the
clear.
"""

from __future__ import annotations

from zlib import crc32

import msgspec

from conveyor.domain.errors import ConveyorError
from conveyor.domain.model import Job
from conveyor.ports.records import JobLookup
from conveyor.prod.redis.server import RedisServer

KEPT = 900
"""Seconds for which Redis keeps a job: a sealed key may outlive its job for that long."""
SHAPE = f"{crc32(','.join(Job.__struct_fields__).encode()):08x}"
"""A digest of the fields of a job, part of each key: versions with different fields do not read
each other's entries, as a field that one left out would seem to have its default."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Job).decode


class CachedJobs:
    """Finds jobs in Redis, or else in the store.

    The immutable fields of a cached job are right, but its callback may be missing. Its status,
    version and latest run are up to a quarter of an hour old: callers that need them ask the store.
    If Redis does not answer, or holds an unreadable entry, the store answers as without a cache.
    """

    def __init__(self, jobs: JobLookup, server: RedisServer, *, environment: str) -> None:
        self._jobs = jobs
        self._server = server
        self._prefix = f"conveyor:{environment}:job:{SHAPE}:"

    async def find_job(self, job_id: str) -> Job | None:
        if self._server.resting:
            return await self._jobs.find_job(job_id)
        cached = await self._cached(job_id)
        if cached is not None:
            return cached
        job = await self._jobs.find_job(job_id)
        if job is not None and not self._server.resting:
            await self._cache(job)
        return job

    async def _cached(self, job_id: str) -> Job | None:
        try:
            text = await self._server.get(self._prefix + job_id)
            return None if text is None else _decode(text)
        except (ConveyorError, msgspec.MsgspecError, UnicodeDecodeError):
            return None

    async def _cache(self, job: Job) -> None:
        value = _encode(msgspec.structs.replace(job, callback=None))
        try:
            await self._server.put(self._prefix + job.job_id, value, seconds=KEPT)
        except ConveyorError:
            return
