"""Jobs kept in Redis between workers and the store: sealed, for a while, and never needed."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from conveyor.clock import SystemClock
from conveyor.domain.api_keys import KeySealer
from conveyor.domain.model import Job, JobStatus
from conveyor.prod.redis.job_cache import KEPT, SHAPE, CachedJobs
from conveyor.prod.redis.rate_limit import RedisRateLimit
from conveyor.prod.redis.server import RedisServer
from conveyor.records.job_templates import JobTemplates
from conveyor.testing.clock import START, FakeClock
from tests.conformance.redis_process import RedisProcess

API_KEY = "the-key-of-a-caller"
SEALER = KeySealer([b"a secret of the fleet"])
NAME = f"conveyor:cache:job:{SHAPE}:JOB"
PATIENCE = 60.0
"""Seconds for an answer of a server that does answer, on however busy a machine."""


def job(job_id: str = "JOB") -> Job:
    return Job(
        job_id=job_id,
        caller="caller",
        status=JobStatus.OPEN,
        created_at=START,
        updated_at=START,
        params={"js_render": "true"},
        metadata={"team": "ü"},
        sealed_key=SEALER.seal(API_KEY, caller="caller", nonce=b"n" * 12),
    )


class CountedJobs:
    """A store of one job that counts how often it is asked."""

    def __init__(self) -> None:
        self.jobs = {"JOB": job()}
        self.asked = 0

    async def find_job(self, job_id: str) -> Job | None:
        self.asked += 1
        return self.jobs.get(job_id)


@pytest.fixture
def redis_process(tmp_path: Path) -> Iterator[RedisProcess]:
    process = RedisProcess(tmp_path)
    yield process
    process.close()


@pytest.fixture
async def server(redis_process: RedisProcess, clock: FakeClock) -> AsyncIterator[RedisServer]:
    opened = RedisServer(redis_process.url, clock, timeout=PATIENCE)
    yield opened
    await opened.aclose()


@pytest.fixture
async def hasty(redis_process: RedisProcess, clock: FakeClock) -> AsyncIterator[RedisServer]:
    """A connection that soon gives up on a server that answers nothing."""
    opened = RedisServer(redis_process.url, clock, timeout=PATIENCE)
    opened._timeout = 0.3
    yield opened
    await opened.aclose()


@pytest.fixture
def store() -> CountedJobs:
    return CountedJobs()


@pytest.fixture
def cache(server: RedisServer, store: CountedJobs) -> CachedJobs:
    return CachedJobs(store, server, environment="cache")


async def test_the_store_is_asked_once_for_all_workers(
    cache: CachedJobs, store: CountedJobs, server: RedisServer
) -> None:
    other = CachedJobs(store, server, environment="cache")
    assert await cache.find_job("JOB") == job()
    assert await other.find_job("JOB") == job()
    assert store.asked == 1


async def test_templates_come_from_the_cache_whole(
    cache: CachedJobs, store: CountedJobs, server: RedisServer
) -> None:
    first = await JobTemplates(cache, SEALER).get("JOB")
    second = await JobTemplates(CachedJobs(store, server, environment="cache"), SEALER).get("JOB")
    assert first is not None
    assert second is not None
    assert (second.job, second.api_key) == (job(), API_KEY)
    assert store.asked == 1


async def test_redis_never_sees_the_key_in_the_clear_and_forgets_the_job(
    cache: CachedJobs, redis_process: RedisProcess
) -> None:
    await cache.find_job("JOB")
    keys = redis_process.command("KEYS", "*")
    assert keys == [NAME.encode()]
    kept = redis_process.command("GET", NAME)
    assert isinstance(kept, bytes)
    assert job().sealed_key in kept
    assert API_KEY.encode() not in kept
    seconds = redis_process.command("TTL", NAME)
    assert isinstance(seconds, int)
    assert 0 < seconds <= KEPT


async def test_environments_do_not_share_a_cache(
    cache: CachedJobs, store: CountedJobs, server: RedisServer
) -> None:
    await cache.find_job("JOB")
    await CachedJobs(store, server, environment="another").find_job("JOB")
    assert store.asked == 2


async def test_that_there_is_no_such_job_is_not_kept(cache: CachedJobs, store: CountedJobs) -> None:
    assert await cache.find_job("LATER") is None
    store.jobs["LATER"] = job("LATER")
    assert await cache.find_job("LATER") == job("LATER")


@pytest.mark.parametrize("rubbish", ["", "rubbish", "\x81\xa1x", "\x80"])
async def test_what_cannot_be_read_is_read_from_the_store(
    cache: CachedJobs, redis_process: RedisProcess, rubbish: str
) -> None:
    redis_process.command("SET", NAME, rubbish)
    assert await cache.find_job("JOB") == job()


@pytest.mark.parametrize("how", ["kill", "pause"])
async def test_work_goes_on_without_redis_which_is_left_alone_for_a_moment(
    cache: CachedJobs,
    store: CountedJobs,
    hasty: RedisServer,
    redis_process: RedisProcess,
    clock: FakeClock,
    how: str,
) -> None:
    await cache.find_job("JOB")
    getattr(redis_process, how)()
    left = CachedJobs(store, hasty, environment="cache")
    assert await left.find_job("JOB") == job()
    rested = hasty.resting
    for _ in range(50):
        assert await left.find_job("JOB") == job()
    assert store.asked == 52
    await clock.advance(1)
    assert (rested, hasty.resting) == (True, False)
    if how == "pause":
        redis_process.go_on()
        hasty._timeout = PATIENCE
        assert await left.find_job("JOB") == job()
        assert store.asked == 52


@pytest.mark.parametrize("how", ["kill", "pause"])
async def test_requests_pass_while_redis_is_away(redis_process: RedisProcess, how: str) -> None:
    server = RedisServer(redis_process.url, SystemClock(), timeout=PATIENCE)
    limit = RedisRateLimit(server, environment=secrets.token_hex(4), rate=0.001, burst=1)
    assert await limit.take("a") == 0.0
    assert await limit.take("a") > 0.0
    getattr(redis_process, how)()
    server._timeout = 0.2
    assert [await limit.take("a") for _ in range(100)] == [0.0] * 100
    await server.aclose()
