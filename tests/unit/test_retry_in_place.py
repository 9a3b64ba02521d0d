"""Work that is kept at hand while something is away."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.engine.delivery import TRIES, retry_in_place
from conveyor.ports.handler import ACKNOWLEDGE, Outcome, ResultLost
from conveyor.testing.clock import FakeClock

AWAY = ConveyorError(ErrorCode.UNAVAILABLE, "the store is away")


class Work:
    """Work that fails a number of times, and then succeeds."""

    def __init__(self, *failures: Exception) -> None:
        self.left = list(failures)
        self.tries = 0
        self.told = 0

    async def __call__(self) -> Outcome:
        """One try."""
        self.tries += 1
        if self.left:
            raise self.left.pop(0)
        return ACKNOWLEDGE

    def away(self) -> None:
        """Count it."""
        self.told += 1


async def outcome(work: Work, *, keeps: Callable[[], bool] = lambda: True) -> Outcome:
    """Return the outcome, with unlimited time."""
    clock = FakeClock()
    found: list[Outcome] = []

    async def act() -> None:
        found.append(await retry_in_place(work, clock, receives=1, keeps=keeps, away=work.away))

    async with anyio.create_task_group() as group:
        group.start_soon(act)
        await clock.advance_while(lambda: not found, limit=600.0)
    return found[0]


async def test_what_is_away_for_a_while_is_waited_for() -> None:
    work = Work(*[AWAY] * (TRIES - 1))
    assert await outcome(work) == ACKNOWLEDGE
    assert (work.tries, work.told) == (TRIES, TRIES - 1)


async def test_what_stays_away_is_given_up() -> None:
    work = Work(*[AWAY] * TRIES)
    assert await outcome(work) == Outcome(hide_for=2.0)
    assert work.tries == TRIES


@pytest.mark.parametrize(
    "error",
    [
        ResultLost(ErrorCode.UNAVAILABLE, "the store of bodies is away"),
        ConveyorError(ErrorCode.INTERNAL, "a record is damaged"),
    ],
    ids=["costs a call", "does not pass"],
)
async def test_what_costs_a_call_or_does_not_pass_is_tried_once(error: ConveyorError) -> None:
    work = Work(error)
    assert await outcome(work) == Outcome(hide_for=2.0)
    assert work.tries == 1


@pytest.mark.parametrize("keeps", [True, False])
async def test_what_breaks_or_may_not_be_kept_is_tried_once(keeps: bool) -> None:
    work = Work(RuntimeError("broken") if keeps else AWAY)
    assert await outcome(work, keeps=lambda: keeps) == Outcome(hide_for=2.0)
    assert (work.tries, work.told) == (1, 0 if keeps else 1)
