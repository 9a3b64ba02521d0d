"""Whether bodies can be kept: who may call the gateway while they cannot."""

from __future__ import annotations

from contextlib import suppress

import pytest

from conveyor.aio.circuit_breaker import FIRST_PAUSE, LONGEST_PAUSE, Keeping
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.testing.clock import FakeClock

HOUR = 3_600.0


def may(keeping: Keeping) -> bool:
    """Whether it is anybody's turn; one that is taken ends at once, with nothing learnt."""
    with suppress(ConveyorError), keeping.turn():
        return True
    return False


async def test_after_a_lost_body_trials_come_at_longer_and_longer_pauses() -> None:
    clock, trials = FakeClock(), list[float]()
    keeping = Keeping(clock)
    while clock.monotonic() < HOUR:
        if may(keeping):
            trials.append(clock.monotonic())
            keeping.lost()
        await clock.advance(0.5)
    pauses = [later - one for one, later in zip(trials, trials[1:], strict=False)]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (FIRST_PAUSE, LONGEST_PAUSE)
    assert len(trials) <= HOUR / LONGEST_PAUSE + 6


async def test_one_trial_is_under_way_at_a_time() -> None:
    clock = FakeClock()
    keeping = Keeping(clock)
    with keeping.turn():
        assert may(keeping)
    keeping.lost()
    assert not may(keeping)
    await clock.advance(FIRST_PAUSE)
    with suppress(RuntimeError), keeping.turn():
        with pytest.raises(ConveyorError) as caught, keeping.turn():
            pass
        raise RuntimeError("a trial that broke")
    assert caught.value.code is ErrorCode.UNAVAILABLE
    assert may(keeping)


async def test_calls_that_were_under_way_say_nothing_new() -> None:
    clock = FakeClock()
    keeping = Keeping(clock)
    for _ in range(100):
        keeping.lost()
    await clock.advance(FIRST_PAUSE)
    assert may(keeping)


async def test_a_body_that_was_kept_makes_it_as_if_nothing_had_been() -> None:
    clock = FakeClock()
    keeping = Keeping(clock)
    for _ in range(9):
        keeping.lost()
        await clock.advance(LONGEST_PAUSE)
    keeping.kept()
    with keeping.turn():
        assert may(keeping)
    keeping.lost()
    await clock.advance(FIRST_PAUSE)
    assert may(keeping)
