"""The gateway that keeps the limits of hosts, over a gateway that counts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import anyio
import pytest

from conveyor.dev.pacing import MemoryPacing
from conveyor.dev.permits import MemoryPermits
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.hosts import HostRules
from conveyor.domain.model import WaitReason
from conveyor.gateway.polite import (
    HOST_KEY,
    PATIENCE,
    PoliteGateway,
    PoliteOptions,
)
from conveyor.ports.gateway import Gateway, Postponed, ScrapeRequest, Success
from conveyor.ports.permits import usable_part
from conveyor.testing.clock import FakeClock
from tests.unit.dispatch_world import BrokenLedger

LEASE = 30.0
URL = "http://a.example/"
HOST = HOST_KEY + "a.example:80"


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


class TimedGateway(Gateway):
    """Calls that take `seconds`; `starts` are when they began."""

    def __init__(self, clock: FakeClock, seconds: float) -> None:
        self._clock = clock
        self.seconds = seconds
        self.starts: list[float] = []
        self.in_flight = self.peak = 0
        self.closed = False

    def scrape(self, request: ScrapeRequest) -> AbstractAsyncContextManager[Success]:
        return self._answer()

    async def aclose(self) -> None:
        self.closed = True

    @asynccontextmanager
    async def _answer(self) -> AsyncIterator[Success]:
        self.starts.append(self._clock.monotonic())
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        try:
            await self._clock.sleep(self.seconds)
            yield Success(b"body", "text/plain")
        finally:
            self.in_flight -= 1


class Bench:
    """Workers over one ledger, which may be disturbed."""

    def __init__(self, *, limit: int = 0, rate: float = 0.0, seconds: float = 1.0) -> None:
        self.clock = FakeClock()
        self.permits = MemoryPermits(self.clock)
        self.ledger = BrokenLedger(self.permits, self.clock)
        self.pacing = MemoryPacing(self.clock)
        self.site = TimedGateway(self.clock, seconds)
        self.rules = HostRules(limit=limit, rate=rate)
        self.workers = [self._worker(name) for name in ("w1", "w2")]
        self.ended: list[str] = []
        self.waits: list[WaitReason] = []

    def _worker(self, name: str) -> PoliteGateway:
        return PoliteGateway(
            self.site,
            self.ledger,
            self.pacing,
            self.clock,
            rules=lambda: self.rules,
            options=PoliteOptions(holder=name, lease=LEASE, heartbeat=10.0),
        )

    async def call(self, worker: int = 0, *, has_waited: bool = True, url: str = URL) -> None:
        """Make one call, and note how it ended."""
        try:
            request = ScrapeRequest(url=url, api_key="k", has_waited=has_waited)
            async with self.workers[worker].scrape(request) as success:
                assert success.content == b"body"
            self.ended.append("ok")
        except Postponed as postponed:
            self.waits.append(postponed.waiting)
            self.ended.append(f"{postponed.retry_after:g}")
        except ConveyorError as error:
            self.ended.append(error.code)

    async def run(self, calls: int, seconds: float, *, has_waited: bool = True) -> None:
        """Make calls of all workers at once, and let time pass."""
        async with anyio.create_task_group() as group:
            for number in range(calls):

                async def call(worker: int = number % 2) -> None:
                    await self.call(worker, has_waited=has_waited)

                group.start_soon(call)
            await self.clock.advance(seconds)
            group.cancel_scope.cancel()


async def test_calls_of_all_workers_stay_within_the_limit_and_reach_it() -> None:
    bench = Bench(limit=3)
    await bench.run(12, 12.0)
    assert bench.ended == ["ok"] * 12
    assert bench.site.peak == 3
    assert bench.permits.total(HOST) == 0, "every permit is given back"


async def test_starts_of_all_workers_are_the_rate_apart() -> None:
    bench = Bench(rate=4.0)
    await bench.run(9, 4.0)
    assert bench.ended == ["ok"] * 9
    assert bench.site.starts == pytest.approx([0.25 * number for number in range(9)])


async def test_a_call_that_would_wait_long_is_put_off_to_a_place_in_the_line() -> None:
    bench = Bench(limit=1, seconds=5.0)
    async with anyio.create_task_group() as group:
        group.start_soon(bench.call)
        await bench.clock.advance(5.1)
        group.start_soon(bench.call)
        await bench.clock.advance(0.1)
        for _ in range(2):
            group.start_soon(lambda: bench.call(has_waited=False))
            await bench.clock.advance(2 * PATIENCE)
        assert len(bench.site.starts) == 2, "neither was made"
        assert [float(wait) for wait in bench.ended[1:]] == pytest.approx([5.0, 8.0], abs=0.5)
        await bench.clock.advance(5.0)
    assert bench.ended[3:] == ["ok"]
    assert bench.waits == [WaitReason.HOST_LIMIT] * 2


async def test_a_call_behind_others_that_wait_is_put_off_at_once() -> None:
    bench = Bench(rate=0.5)
    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(bench.call)
        await bench.clock.advance(0)
        await bench.call(has_waited=False)
        assert len(bench.ended) == 1
        assert float(bench.ended[0]) > 2.0
        await bench.clock.advance(10.0)
    assert bench.ended[1:] == ["ok"] * 3


async def test_a_long_call_keeps_its_permit() -> None:
    bench = Bench(limit=1, seconds=100.0)
    async with anyio.create_task_group() as group:
        group.start_soon(bench.call)
        for _ in range(98):
            await bench.clock.advance(1.0)
            assert bench.permits.total(HOST) == 1
        await bench.clock.advance(5.0)
    assert bench.ended == ["ok"]


async def test_a_call_is_cut_off_before_the_ledger_may_give_its_permit_away() -> None:
    bench = Bench(limit=2, seconds=1_000.0)
    async with anyio.create_task_group() as group:
        group.start_soon(bench.call)
        await bench.clock.advance(0.0)
        assert bench.site.in_flight == 1
        bench.ledger.away = lambda _request: True
        await bench.clock.advance(usable_part(LEASE) - 0.01)
        assert bench.site.in_flight == 1
        await bench.clock.advance(0.01)
        assert bench.site.in_flight == 0
    assert bench.ended == [ErrorCode.UNAVAILABLE]


async def test_a_permit_comes_back_when_a_call_is_cancelled() -> None:
    bench = Bench(limit=2, rate=1.0, seconds=1_000.0)
    await bench.run(6, 5.0)
    assert (bench.site.peak, bench.site.in_flight) == (2, 0)
    assert bench.permits.total(HOST) == 0


async def test_a_host_without_limits_costs_no_call() -> None:
    bench = Bench()
    await bench.run(20, 1.0)
    assert bench.ended == ["ok"] * 20
    assert (bench.site.peak, bench.ledger.calls) == (20, 0)


async def test_it_closes_the_gateway_behind_it() -> None:
    bench = Bench(limit=1)
    await bench.workers[0].aclose()
    assert bench.site.closed
