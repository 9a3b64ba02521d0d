"""The undone part of a batch is requested again, alone, for a bounded number of times."""

from __future__ import annotations

import anyio
import pytest

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.prod.aws.calls import PAUSES, ROUNDS, retry_unprocessed
from conveyor.testing.clock import FakeClock


class Batch:
    """A service that does so many entries of each call, and keeps what it was given."""

    def __init__(self, does: int) -> None:
        self.calls: list[list[int]] = []
        self._does = does

    async def __call__(self, entries: list[int]) -> list[int]:
        self.calls.append(entries)
        return entries[self._does :]


async def done(batch: Batch, entries: list[int]) -> FakeClock:
    """Have it done, with all the time in the world."""
    clock, ended = FakeClock(), anyio.Event()

    async def work() -> None:
        try:
            await retry_unprocessed(batch, entries, clock, complaint="a part is left")
        finally:
            ended.set()

    async with anyio.create_task_group() as group:
        group.start_soon(work)
        await clock.advance_while(lambda: not ended.is_set(), limit=600.0)
    return clock


async def test_only_what_is_left_is_asked_for_again() -> None:
    batch = Batch(does=2)
    await done(batch, [1, 2, 3, 4, 5])
    assert batch.calls == [[1, 2, 3, 4, 5], [3, 4, 5], [5]]


async def test_what_is_done_at_once_is_one_call_and_no_pause() -> None:
    batch = Batch(does=9)
    clock = await done(batch, [1])
    assert (batch.calls, clock.monotonic()) == ([[1]], 0.0)


@pytest.mark.parametrize("entries", [ROUNDS, ROUNDS + 1])
async def test_it_is_done_in_the_last_round_or_given_up_after_it(entries: int) -> None:
    batch = Batch(does=1)
    if entries == ROUNDS:
        clock = await done(batch, [*range(entries)])
        assert clock.monotonic() < ROUNDS * PAUSES.cap
    else:
        with pytest.RaisesGroup(ConveyorError) as caught:
            await done(batch, [*range(entries)])
        [failure] = caught.value.exceptions
        assert isinstance(failure, ConveyorError)
        assert (failure.code, failure.detail) == (ErrorCode.UNAVAILABLE, "a part is left")
    assert len(batch.calls) == ROUNDS
