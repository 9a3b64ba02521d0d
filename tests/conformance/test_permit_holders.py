"""The holders of a job's permits, as an administrator reads them from the ledgers of production."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator

import pytest

from conveyor.ports.permits import LeaseRequest, PermitHolder, Permits
from conveyor.prod.dynamodb.permits import DynamoPermits
from conveyor.prod.redis.permits import RedisPermits
from conveyor.testing.clock import FakeClock
from tests.conformance.permit_servers import VirtualRedis, permits_table

LIMIT, LEASE = 10, 30.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def redis_ledger(clock: FakeClock, anyio_backend: str) -> AsyncIterator[RedisPermits]:
    ledger = VirtualRedis(clock, lease=LEASE)
    yield ledger.permits
    await ledger.aclose()


async def hold(permits: Permits, job_id: str, holder: str, count: int, *, wants: bool) -> None:
    request = LeaseRequest(
        job_id=job_id, holder=holder, count=count, before=0, sequence=1, wants=wants
    )
    assert (await permits.acquire_or_renew(request, limit=LIMIT, lease=LEASE)).granted


async def test_redis_tells_who_holds_what_and_for_how_long(
    redis_ledger: RedisPermits, clock: FakeClock
) -> None:
    await hold(redis_ledger, "JOB", "b", 4, wants=False)
    await clock.advance(10.0)
    await hold(redis_ledger, "JOB", "a", 3, wants=True)
    await hold(redis_ledger, "OTHER", "b", 1, wants=False)

    assert await redis_ledger.holders("JOB") == [
        PermitHolder(holder="a", count=3, wants=True, lapses_in=30.0),
        PermitHolder(holder="b", count=4, wants=False, lapses_in=20.0),
    ]
    await clock.advance(25.0)
    assert [one.holder for one in await redis_ledger.holders("JOB")] == ["a"]
    assert await redis_ledger.holders("NOBODY") == []


async def test_dynamodb_tells_who_holds_what(clock: FakeClock) -> None:
    ledger, job_id = DynamoPermits(permits_table(clock), clock), secrets.token_hex(6)
    await hold(ledger, job_id, "b", 4, wants=False)
    await hold(ledger, job_id, "a", 3, wants=True)

    assert await ledger.holders(job_id) == [
        PermitHolder(holder="a", count=3, wants=True),
        PermitHolder(holder="b", count=4, wants=False),
    ]
    assert await ledger.holders("NOBODY") == []
