"""Concurrent calls: the number at a time, and the failure that is raised."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from conveyor.aio.concurrency import (
    SLOW_REST,
    ShortWork,
    first_error,
    for_each,
    for_each_collect,
    unwrap,
)
from conveyor.testing.clock import FakeClock


class Calls:
    """Counts calls under way; those in `fail` raise once all that may be under way are."""

    def __init__(self, *, together: int, fail: tuple[int, ...] = ()) -> None:
        self.begun: list[int] = []
        self.ended: list[int] = []
        self.most = 0
        self._together = together
        self._fail = fail
        self._full = anyio.Event()

    async def __call__(self, number: int) -> None:
        self.begun.append(number)
        self.most = max(self.most, len(self.begun) - len(self.ended))
        if len(self.begun) == self._together:
            self._full.set()
        await self._full.wait()
        if number in self._fail:
            raise LookupError(number)
        await anyio.lowlevel.checkpoint()
        self.ended.append(number)


@pytest.mark.parametrize(("limit", "most"), [(None, 9), (1, 1), (4, 4), (20, 9)])
@pytest.mark.parametrize("alone", [False, True])
async def test_so_many_are_made_at_a_time(alone: bool, limit: int | None, most: int) -> None:
    calls = Calls(together=most)
    await (for_each_collect if alone else for_each)(calls, range(9), limit=limit)

    assert sorted(calls.ended) == list(range(9))
    assert calls.most == most


async def test_no_arguments_are_no_call() -> None:
    calls = Calls(together=1)
    await for_each(calls, [])
    await for_each_collect(calls, [], limit=3)

    assert calls.begun == []


async def test_the_first_that_raises_ends_the_others_and_is_raised_as_it_was() -> None:
    calls = Calls(together=3, fail=(2,))
    with pytest.raises(LookupError, match="2"):
        await for_each(calls, range(9), limit=3)

    assert 2 not in calls.ended
    assert len(calls.begun) < 9


async def test_of_those_that_are_alone_all_are_made_and_the_first_in_order_is_raised() -> None:
    ended: list[int] = []
    later_failed = anyio.Event()

    async def call(number: int) -> None:
        if number == 1:
            await later_failed.wait()
            raise LookupError(number)
        if number == 4:
            later_failed.set()
            raise LookupError(number)
        ended.append(number)

    with pytest.raises(LookupError, match="1"):
        await for_each_collect(call, range(6))
    assert sorted(ended) == [0, 2, 3, 5]


async def test_of_nested_groups_the_innermost_failure_is_raised() -> None:
    async def fail() -> None:
        raise LookupError("inner")

    async def nested() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(fail)

    with pytest.raises(LookupError, match="inner"), unwrap():
        async with anyio.create_task_group() as group:
            group.start_soon(nested)


def test_an_unwrapped_error_keeps_its_cause_and_its_context() -> None:
    error, cause, context = LookupError("inner"), OSError("cause"), OSError("context")
    error.__cause__, error.__context__ = cause, context
    with pytest.raises(LookupError) as caught, unwrap():
        raise ExceptionGroup("outer", [error])
    assert (caught.value.__cause__, caught.value.__context__) == (cause, context)


def test_the_first_error_of_a_group_is_of_the_preferred_kind_if_it_has_one() -> None:
    group = ExceptionGroup("", [ValueError(), ExceptionGroup("", [KeyError(), IndexError()])])
    assert isinstance(first_error(group), ValueError)
    assert isinstance(first_error(group, prefer=LookupError), KeyError)
    assert isinstance(first_error(group, prefer=OSError), ValueError)
    assert isinstance(first_error(TypeError(), prefer=OSError), TypeError)


async def test_after_a_long_piece_of_short_work_there_is_none_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = FakeClock()
    work = ShortWork(clock)
    assert work.run(lambda: work.is_welcome)

    def fail() -> None:
        raise LookupError

    monkeypatch.setattr("conveyor.aio.concurrency.SLOW", -1.0)
    with pytest.raises(LookupError):
        work.run(fail)
    rests = not work.is_welcome
    await clock.advance(SLOW_REST)
    assert rests
    assert work.is_welcome
