"""The contract of every pacing adapter: no two starts of a host are closer than their interval."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import redis

from conveyor.dev.pacing import MemoryPacing
from conveyor.dev.permits import MemoryPermits
from conveyor.ports.pacing import HORIZON, IDLE, Pacing
from conveyor.prod.dynamodb.permits import LeasedPacing
from conveyor.prod.redis.pacing import RedisPacing, pacing_key
from conveyor.prod.redis.server import RedisServer
from conveyor.testing.clock import FakeClock
from tests.conformance.emulators import address
from tests.conformance.permit_servers import dynamo_permits

STEP = 0.25


@dataclass
class Bench:
    """An adapter as two workers see it, and the clock it runs by."""

    clock: FakeClock
    one: Pacing
    other: Pacing

    async def start(self, pacing: Pacing, host: str, interval: float) -> float:
        """Ask for a start until there is one; return the virtual second of it."""
        while (wait := await pacing.book(host, interval)) is None:
            await self.clock.advance(STEP / 5)
        return self.clock.monotonic() + wait


async def redis_bench() -> AsyncIterator[Bench]:
    clock = FakeClock()
    url, environment = address("CONVEYOR_TEST_REDIS"), f"test-{secrets.token_hex(6)}"
    server = RedisServer(url, clock, timeout=60.0)

    def instant() -> int:
        return 10**15 + round(clock.monotonic() * 1_000_000)

    pacing = RedisPacing(server, environment=environment, instant=instant)
    assert await pacing.line_up("begins", 1.0) >= 0
    await clock.advance(HORIZON)
    yield Bench(clock, pacing, pacing)
    with redis.Redis.from_url(url) as client:
        client.delete(pacing_key(environment))
    await server.aclose()


@pytest.fixture(params=["memory", "redis", "leases", "dynamodb"])
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    clock = FakeClock()
    if request.param == "redis":
        async for opened in redis_bench():
            yield opened
    elif request.param == "memory":
        pacing = MemoryPacing(clock)
        yield Bench(clock, pacing, pacing)
    else:
        permits = MemoryPermits(clock) if request.param == "leases" else dynamo_permits(clock)
        yield Bench(clock, LeasedPacing(permits, clock), LeasedPacing(permits, clock))


async def test_starts_of_all_workers_are_an_interval_apart(bench: Bench) -> None:
    starts = [await bench.start(who, "a", STEP) for who in (bench.one, bench.other) * 3]
    gaps = [later - earlier for earlier, later in zip(starts, starts[1:], strict=False)]
    assert min(gaps) >= STEP - 1e-6
    assert max(gaps) <= 2 * STEP


async def test_a_pause_is_not_made_up_for(bench: Bench) -> None:
    await bench.start(bench.one, "a", STEP)
    await bench.clock.advance(5.0)
    first = await bench.start(bench.one, "a", STEP)
    second = await bench.start(bench.other, "a", STEP)
    assert second - first >= STEP - 1e-6


async def test_hosts_do_not_wait_for_each_other(bench: Bench) -> None:
    assert await bench.one.book("a", 5.0) == pytest.approx(0, abs=1e-5)
    assert await bench.one.book("b", 5.0) == pytest.approx(0, abs=1e-5)


async def test_nothing_is_booked_beyond_the_horizon(bench: Bench) -> None:
    assert await bench.one.book("a", 2 * HORIZON) is not None
    assert await bench.one.book("a", 2 * HORIZON) is None
    await bench.clock.advance(2 * HORIZON)
    assert await bench.one.book("a", 2 * HORIZON) is not None


async def test_places_in_a_line_are_an_interval_apart_and_book_nothing(bench: Bench) -> None:
    places = [await bench.one.line_up("a", STEP) for _ in range(4)]
    assert places == pytest.approx([STEP, 2 * STEP, 3 * STEP, 4 * STEP], abs=1e-4)
    assert await bench.one.book("a", STEP) == pytest.approx(0, abs=1e-5)


async def test_the_line_of_two_workers_moves_no_faster_than_that_of_one(bench: Bench) -> None:
    await bench.one.line_up("a", STEP)
    places = [await bench.other.line_up("a", STEP) for _ in range(8)]
    gaps = [later - earlier for earlier, later in zip(places, places[1:], strict=False)]
    assert min(gaps) >= STEP - 1e-4


async def test_a_memory_that_may_have_lost_bookings_books_nothing_for_a_while() -> None:
    clock = FakeClock()
    pacing = MemoryPacing(clock, closed_for=HORIZON)
    assert await pacing.book("a", STEP) == HORIZON


async def test_a_redis_that_lost_its_starts_books_none_until_all_before_are_over() -> None:
    async for bench in redis_bench():
        assert isinstance(bench.one, RedisPacing)
        assert await bench.one.book("a", STEP) == 0
        with redis.Redis.from_url(address("CONVEYOR_TEST_REDIS")) as client:
            client.delete(bench.one._key)
        assert await bench.one.book("a", STEP) == pytest.approx(HORIZON)


async def test_the_line_of_a_host_that_was_idle_begins_anew() -> None:
    clock = FakeClock()
    pacing = MemoryPacing(clock)
    await pacing.book("a", STEP)
    for _ in range(1_000):
        await pacing.line_up("a", STEP)
    await clock.advance(2 * IDLE)
    assert await pacing.line_up("a", STEP) == STEP
