"""The circuit breaker of the blob store: the tasks that may call the gateway while bodies cannot be
stored."""

from __future__ import annotations

from contextlib import suppress

import pytest

from conveyor.aio.outages import Outage
from conveyor.aio.resilience import FIRST_PAUSE, LONGEST_PAUSE, CircuitBreaker
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.gateway import Shared
from conveyor.testing.clock import FakeClock

HOUR = 3_600.0


def may(breaker: CircuitBreaker) -> bool:
    """Return whether a task may go now; a turn that is taken ends at once, without a result."""
    with suppress(ConveyorError), breaker.guard():
        return True
    return False


async def test_after_a_failure_trials_come_at_longer_and_longer_pauses() -> None:
    clock, trials = FakeClock(), list[float]()
    breaker = CircuitBreaker(clock, dependency="the shop")
    while clock.monotonic() < HOUR:
        if may(breaker):
            trials.append(clock.monotonic())
            breaker.failed()
        await clock.advance(0.5)
    pauses = [later - one for one, later in zip(trials, trials[1:], strict=False)]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (FIRST_PAUSE, LONGEST_PAUSE)
    assert len(trials) <= HOUR / LONGEST_PAUSE + 6


async def test_one_trial_is_under_way_at_a_time() -> None:
    clock = FakeClock()
    breaker = CircuitBreaker(clock, dependency="the shop")
    with breaker.guard():
        assert may(breaker)
    breaker.failed()
    assert not may(breaker)
    await clock.advance(FIRST_PAUSE)
    with suppress(RuntimeError), breaker.guard():
        with pytest.raises(ConveyorError) as caught, breaker.guard():
            pass
        raise RuntimeError("a trial that broke")
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert caught.value.detail == "the shop is unavailable"
    assert may(breaker)


async def test_calls_that_were_under_way_say_nothing_new() -> None:
    clock = FakeClock()
    breaker = CircuitBreaker(clock, dependency="the shop")
    for _ in range(100):
        breaker.failed()
    await clock.advance(FIRST_PAUSE)
    assert may(breaker)


async def test_a_success_makes_it_as_if_nothing_had_been() -> None:
    clock = FakeClock()
    breaker = CircuitBreaker(clock, dependency="the shop")
    for _ in range(9):
        breaker.failed()
        await clock.advance(LONGEST_PAUSE)
    breaker.succeeded()
    with breaker.guard():
        assert may(breaker)
    breaker.failed()
    await clock.advance(FIRST_PAUSE)
    assert may(breaker)


def test_what_is_away_is_told_with_its_reason_until_it_is_back() -> None:
    clock = FakeClock()
    breaker = CircuitBreaker(clock, dependency="the shop")
    assert breaker.outage() is None
    breaker.failed("the shop: no space left")
    breaker.failed("the shop: something else")
    assert breaker.outage() == Outage(Shared.STORE, "the shop: no space left", clock.now())
    breaker.succeeded()
    assert breaker.outage() is None


async def test_an_outage_is_told_once_at_its_begin_and_once_at_its_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = FakeClock()
    breaker = CircuitBreaker(clock, dependency="the shop")
    with caplog.at_level("INFO"):
        for _ in range(5):
            breaker.failed()
            await clock.advance(LONGEST_PAUSE)
        for _ in range(3):
            breaker.succeeded()

    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO"]
    assert caplog.messages[0].startswith("the shop is unavailable")
    assert caplog.messages[1] == "the shop is available again"
