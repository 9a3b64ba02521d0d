"""A worker's own troubles, which only a new process ends: a loop that stands still, and a call that
its gateway has lost. A service that is away is none of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from conveyor.engine.telemetry import LOOK, STILL_AFTER, LoopLag, TaskFigures, Telemetry
from conveyor.gateway.watch import OVERDUE_AFTER, WatchedGateway
from conveyor.ports.blobs import Content
from conveyor.ports.gateway import Gateway, ScrapeRequest, Success
from conveyor.testing.clock import FakeClock

REQUEST = ScrapeRequest("https://example.com/", "key", timeout=180.0)
LOST = 180.0 + OVERDUE_AFTER


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class LosingGateway(Gateway):
    """A gateway that answers after `before` seconds, and then gives a piece every `between`,
    whatever the timeout of a call is."""

    def __init__(self, clock: FakeClock, *, before: float, between: float = 0.0) -> None:
        self.closed = False
        self._clock = clock
        self._before = before
        self._between = between

    @asynccontextmanager
    async def scrape(self, request: ScrapeRequest) -> AsyncIterator[Success]:
        await self._clock.sleep(self._before)
        content: Content = self._pieces() if self._between else b"body"
        yield Success(content, "text/html")

    async def aclose(self) -> None:
        self.closed = True

    async def _pieces(self) -> AsyncIterator[bytes]:
        for piece in (b"bo", b"dy"):
            await self._clock.sleep(self._between)
            yield piece


async def test_a_loop_that_does_not_come_round_is_told_and_one_that_does_is_not() -> None:
    clock = FakeClock()
    lag = LoopLag(clock)
    async with anyio.create_task_group() as group:
        group.start_soon(lag.run)
        await clock.advance(10 * STILL_AFTER)
        assert lag.trouble() == ""
        group.cancel_scope.cancel()

    await clock.advance(STILL_AFTER - LOOK)
    assert lag.trouble() == ""
    await clock.advance(LOOK)
    assert lag.trouble() == "the loop has not turned for 30 s"


async def scraped(gateway: WatchedGateway) -> bytes:
    async with gateway.scrape(REQUEST) as success:
        if isinstance(success.content, bytes):
            return success.content
        return b"".join([piece async for piece in success.content])


async def test_a_call_that_outlives_its_deadline_is_told_until_it_ends() -> None:
    clock = FakeClock()
    gateway = WatchedGateway(LosingGateway(clock, before=LOST + 10.0), clock)
    async with anyio.create_task_group() as group:
        group.start_soon(scraped, gateway)
        await clock.advance(LOST - 1.0)
        assert (gateway.trouble(), gateway.in_flight) == ("", 1)
        await clock.advance(1.0)
        assert gateway.trouble() == "a call is 30 s beyond its deadline"
        await clock.advance(10.0)

    assert (gateway.trouble(), gateway.in_flight) == ("", 0)


async def test_a_body_that_never_ends_is_told_too() -> None:
    clock = FakeClock()
    gateway = WatchedGateway(LosingGateway(clock, before=1.0, between=LOST), clock)
    bodies: list[bytes] = []

    async def scrape() -> None:
        bodies.append(await scraped(gateway))

    async with anyio.create_task_group() as group:
        group.start_soon(scrape)
        await clock.advance(LOST)
        assert gateway.trouble() == "a call is 30 s beyond its deadline"
        await clock.advance(2 * LOST)

    assert bodies == [b"body"]
    assert gateway.trouble() == ""


@pytest.mark.parametrize("between", [0.0, 1.0])
async def test_a_store_that_does_not_take_a_body_is_no_trouble_of_the_worker(
    between: float,
) -> None:
    """The call is still in flight: its answer waits to be kept."""
    clock = FakeClock()
    gateway = WatchedGateway(LosingGateway(clock, before=1.0, between=between), clock)

    async def scrape_and_store() -> None:
        async with gateway.scrape(REQUEST) as success:
            if not isinstance(success.content, bytes):
                await anext(success.content)
            await clock.sleep(10 * LOST)

    async with anyio.create_task_group() as group:
        group.start_soon(scrape_and_store)
        await clock.advance(5 * LOST)
        assert (gateway.trouble(), gateway.in_flight) == ("", 1)
        group.cancel_scope.cancel()


async def test_a_call_that_is_cut_off_leaves_nothing_behind() -> None:
    clock = FakeClock()
    gateway = WatchedGateway(LosingGateway(clock, before=1e6), clock)
    async with anyio.create_task_group() as group:
        group.start_soon(scraped, gateway)
        await clock.advance(1.0)
        group.cancel_scope.cancel()

    await clock.advance(10 * LOST)
    assert (gateway.trouble(), gateway.in_flight) == ("", 0)


async def test_a_watched_gateway_is_closed_with_its_own() -> None:
    clock = FakeClock()
    inner = LosingGateway(clock, before=0.0)
    await WatchedGateway(inner, clock).aclose()

    assert inner.closed


async def test_ended_tasks_and_cut_calls_are_told_since_the_line_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    telemetry = Telemetry()
    progress = TaskFigures(telemetry)
    with caplog.at_level("INFO", "conveyor.engine"):
        for states, fenced in ((["successful", "failed"], 0), (["successful"], 3), ([], 0)):
            for state in states:
                telemetry.task_ended(state)
            telemetry.fenced(fenced)
            await progress.tell()

    told = [(vars(one)["ended"], vars(one)["fenced"]) for one in caplog.records]
    assert told == [(2, 0), (1, 3), (0, 0)]
