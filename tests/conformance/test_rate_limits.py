"""The contract of every rate limit: a bucket of tokens a caller, refilled at a steady rate."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator

import anyio
import pytest

from conveyor.dev.rate_limit import MOST_CALLERS, MemoryRateLimit
from conveyor.ports.rate_limit import RateLimit
from conveyor.prod.redis.rate_limit import RedisRateLimit
from conveyor.prod.redis.server import RedisServer
from conveyor.testing.clock import FakeClock
from tests.conformance.emulators import address

RATE, BURST = 4.0, 3


@pytest.fixture(params=["memory", "redis"])
async def limit(request: pytest.FixtureRequest, clock: FakeClock) -> AsyncIterator[RateLimit]:
    if request.param == "memory":
        yield MemoryRateLimit(clock, rate=RATE, burst=BURST)
        return
    server = RedisServer(address("CONVEYOR_TEST_REDIS"), clock, timeout=60.0)
    yield RedisRateLimit(
        server,
        environment=f"test-{secrets.token_hex(6)}",
        rate=RATE,
        burst=BURST,
        instant=lambda: round(clock.monotonic() * 1_000),
    )
    await server.aclose()


async def passed(limit: RateLimit, requests: int, caller: str = "a") -> int:
    """Count the requests, of `requests`, that pass."""
    waits = [await limit.take(caller) for _ in range(requests)]
    return waits.count(0.0)


async def test_a_burst_passes_and_no_more(limit: RateLimit) -> None:
    assert await passed(limit, 10) == BURST


async def test_who_is_turned_away_learns_when_to_come_again(
    limit: RateLimit, clock: FakeClock
) -> None:
    await passed(limit, BURST)
    assert await limit.take("a") == pytest.approx(0.25)
    await clock.advance(0.1)
    assert await limit.take("a") == pytest.approx(0.15)
    await clock.advance(0.15)
    assert await limit.take("a") == 0.0
    assert await limit.take("a") > 0.0


async def test_tokens_come_back_at_the_rate_and_never_above_the_burst(
    limit: RateLimit, clock: FakeClock
) -> None:
    await passed(limit, BURST)
    await clock.advance(0.5)
    assert await passed(limit, 10) == 2
    await clock.advance(60)
    assert await passed(limit, 10) == BURST


async def test_over_a_long_time_as_many_pass_as_the_rate_says(
    limit: RateLimit, clock: FakeClock
) -> None:
    total = 0
    for _ in range(100):
        total += await passed(limit, 2)
        await clock.advance(0.1)
    assert BURST + RATE * 9.9 - 1 <= total <= BURST + RATE * 10


async def test_callers_have_buckets_of_their_own(limit: RateLimit) -> None:
    await passed(limit, BURST)
    assert await passed(limit, 10, "b") == BURST
    assert await passed(limit, 10) == 0


async def test_requests_at_once_share_one_bucket(limit: RateLimit) -> None:
    waits: list[float] = []

    async def take() -> None:
        waits.append(await limit.take("a"))

    async with anyio.create_task_group() as group:
        for _ in range(20):
            group.start_soon(take)
    assert waits.count(0.0) == BURST


async def test_one_process_remembers_a_bounded_number_of_callers(clock: FakeClock) -> None:
    limit = MemoryRateLimit(clock, rate=RATE, burst=1)
    for number in range(MOST_CALLERS + 1):
        await limit.take(f"caller-{number}")
    assert await limit.take("caller-0") == 0.0
    assert await limit.take(f"caller-{MOST_CALLERS}") > 0.0
