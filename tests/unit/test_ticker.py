"""The ticker in virtual time: when it calls, what a failure costs, and how it ends."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import anyio
import pytest

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.engine.worker import JITTER, WAKING, Ticker
from conveyor.testing.clock import FakeClock

INTERVAL = 60.0


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    backend: str = request.param
    return backend


async def _tick_for(clock: FakeClock, seconds: float, act: Callable[[], Awaitable[None]]) -> None:
    ticker = Ticker(act, clock, interval=INTERVAL, what="the work")
    async with anyio.create_task_group() as group:
        group.start_soon(ticker.run)
        await clock.advance(seconds)
        group.cancel_scope.cancel()


async def test_calls_are_an_interval_apart_with_jitter() -> None:
    clock = FakeClock()
    moments = [0.0]

    async def act() -> None:
        moments.append(clock.monotonic())

    await _tick_for(clock, 20 * INTERVAL, act)
    gaps = [after - before for before, after in zip(moments, moments[1:], strict=False)]
    assert 18 <= len(gaps) <= 23
    assert all((1 - JITTER) * INTERVAL <= gap <= (1 + JITTER) * INTERVAL for gap in gaps)
    assert len(set(gaps)) == len(gaps)
    assert clock.pending == 0


async def test_the_next_interval_begins_when_a_call_has_ended() -> None:
    clock = FakeClock()
    under_way = most = calls = 0

    async def act() -> None:
        nonlocal under_way, most, calls
        under_way += 1
        most, calls = max(most, under_way), calls + 1
        await clock.sleep(10 * INTERVAL)
        under_way -= 1

    await _tick_for(clock, 40 * INTERVAL, act)
    assert most == 1
    assert calls in (3, 4)


async def test_a_call_that_fails_costs_itself_and_one_line(
    caplog: pytest.LogCaptureFixture, unforeseen: list[logging.LogRecord]
) -> None:
    clock = FakeClock()
    failures = iter([ConveyorError(ErrorCode.UNAVAILABLE, "disk"), KeyError("thing"), None])
    calls = 0

    async def act() -> None:
        nonlocal calls
        calls += 1
        failure = next(failures)
        if failure is not None:
            raise failure

    with caplog.at_level(logging.WARNING, "conveyor"):
        await _tick_for(clock, 3 * INTERVAL * (1 + JITTER), act)
    assert calls == 3
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "the work failed: unavailable: disk"),
        ("ERROR", "the work failed: KeyError('thing')"),
    ]
    assert [bool(record.exc_info) for record in caplog.records] == [False, True]
    assert unforeseen == caplog.records[1:]
    unforeseen.clear()


async def test_a_ticker_that_never_comes_to_tick_draws_nothing() -> None:
    clock, untouched = FakeClock(seed=7), FakeClock(seed=7)

    async def act() -> None:
        raise AssertionError("it ticked")

    await _tick_for(clock, 0.8 * INTERVAL, act)
    assert clock.random() == untouched.random()


async def test_a_woken_ticker_ticks_at_once_and_then_after_an_interval() -> None:
    clock = FakeClock()
    moments: list[float] = []

    async def act() -> None:
        moments.append(clock.monotonic())

    ticker = Ticker(act, clock, interval=INTERVAL, what="the work")
    async with anyio.create_task_group() as group:
        group.start_soon(ticker.run)
        await clock.advance(1.0)
        ticker.wake()
        ticker.wake()
        await clock.advance(2 * WAKING)
        assert moments == [1.0 + WAKING]
        await clock.advance((1 + JITTER) * INTERVAL)
        group.cancel_scope.cancel()
    assert len(moments) == 2
    assert moments[1] - moments[0] >= (1 - JITTER) * INTERVAL


async def test_a_wake_during_a_tick_is_followed_by_another_one() -> None:
    clock = FakeClock()
    calls = 0

    async def act() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            await clock.sleep(10.0)

    ticker = Ticker(act, clock, interval=INTERVAL, what="the work")
    async with anyio.create_task_group() as group:
        group.start_soon(ticker.run)
        await clock.advance(1.0)
        ticker.wake()
        await clock.advance(5.0)
        ticker.wake()
        await clock.advance(5.0 + 2 * WAKING)
        group.cancel_scope.cancel()
    assert calls == 2
