"""A new ledger in Redis stays closed for the longest lease of its callers, and logs that."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import pytest

from conveyor.domain.text_rules import rfc3339
from conveyor.ports.permits import LeaseRequest
from conveyor.testing.clock import FakeClock
from tests.conformance.permit_servers import VirtualRedis

LEASE = 30.0
LONGER = 90.0


class Bench:
    """A ledger that its callers found empty a moment ago, under a lease of `LEASE`."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.redis = VirtualRedis(self.clock, lease=LEASE)
        self.redis.come_back_empty()
        self._sequence = 0

    async def grants(self, *, lease: float = LEASE) -> bool:
        """Return whether a new holder gets a permit."""
        self._sequence += 1
        new = LeaseRequest(
            job_id="JOB", holder=f"h{self._sequence}", count=1, before=0, sequence=self._sequence
        )
        return (await self.redis.permits.acquire_or_renew(new, limit=100, lease=lease)).granted


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    opened = Bench()
    yield opened
    await opened.redis.aclose()


async def test_while_it_is_closed_a_longer_lease_keeps_it_closed_for_as_long(bench: Bench) -> None:
    await bench.clock.advance(LEASE - 1)
    assert not await bench.grants(lease=LONGER)
    await bench.clock.advance(LONGER - LEASE)
    assert not await bench.grants()
    await bench.clock.advance(1)
    assert await bench.grants()


async def test_once_it_has_opened_a_longer_lease_closes_it_for_nobody_else(bench: Bench) -> None:
    await bench.clock.advance(LEASE)
    assert not await bench.grants(lease=LONGER)
    assert await bench.grants()
    await bench.clock.advance(LONGER - LEASE)
    assert await bench.grants(lease=LONGER)


async def test_who_looks_in_with_a_short_lease_opens_it_for_nobody_else(bench: Bench) -> None:
    """As `conveyor admin check` does, which may be the first to find it empty."""
    await bench.clock.advance(LEASE)
    bench.redis.come_back_empty(lease=1.0)
    await bench.clock.advance(2.0)
    assert await bench.grants(lease=1.0)
    assert not await bench.grants()
    await bench.clock.advance(LEASE - 2.0)
    assert await bench.grants()


async def test_each_time_that_it_is_closed_is_told_once_and_until_when(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    def until(after: float) -> str:
        return f"until {rfc3339(bench.redis.instant(after))}"

    expected = []
    with caplog.at_level(logging.WARNING, "conveyor.permits"):
        for lease in (LEASE, LEASE, LONGER, LONGER):
            await bench.grants(lease=lease)
        expected += [until(LEASE), until(LONGER)]
        await bench.clock.advance(LONGER)
        await bench.grants()
        bench.redis.come_back_empty()
        await bench.grants()
        expected.append(until(LEASE))
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == len(expected)
    assert all(one in line for one, line in zip(expected, told, strict=True))
