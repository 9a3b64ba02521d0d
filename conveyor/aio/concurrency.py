"""Structured concurrency on anyio: run calls concurrently, unwrap exception groups, wait for an
event or the injected clock, whichever comes first, and bound and pace work that must not hold up
other work.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import anyio

from conveyor.ports.clock import Clock

Argument = TypeVar("Argument")
Result = TypeVar("Result")


async def for_each(
    call: Callable[[Argument], Coroutine[Any, Any, None]],
    arguments: Iterable[Argument],
    *,
    limit: int | None = None,
) -> None:
    """Make one call for each argument, at most `limit` at a time; return when all have ended.

    The first exception cancels the other calls and is raised unwrapped.
    """
    waiting = list(arguments)
    if len(waiting) <= 1:
        # A task group costs more than many a call.
        for argument in waiting:
            await call(argument)
        return
    left = iter(waiting)

    async def work() -> None:
        for argument in left:
            await call(argument)

    with unwrap():
        async with anyio.create_task_group() as group:
            for _ in range(min(len(waiting), limit or len(waiting))):
                group.start_soon(work)


async def for_each_collect(
    call: Callable[[Argument], Coroutine[Any, Any, None]],
    arguments: Iterable[Argument],
    *,
    limit: int | None = None,
) -> None:
    """Make one call for each argument, at most `limit` at a time; return when all have ended.

    An exception leaves the other calls running. Once all have ended, the exception of the first
    argument that failed is raised.
    """
    failures: dict[int, Exception] = {}

    async def make(numbered: tuple[int, Argument]) -> None:
        number, argument = numbered
        try:
            await call(argument)
        except Exception as failure:
            failures[number] = failure

    await for_each(make, enumerate(arguments), limit=limit)
    if failures:
        raise failures[min(failures)]


@contextmanager
def unwrap() -> Iterator[None]:
    """Wrap a task group: raise its first exception instead of the group."""
    try:
        yield
    except ExceptionGroup as group:
        error = first_error(group)
        context = error.__context__
        try:
            raise error
        finally:
            # Raising it here made the group its context: keep the error's own.
            error.__context__ = context
            del error, context


def first_error(error: Exception, *, prefer: type[Exception] = Exception) -> Exception:
    """Return the first error inside a group, of the kind `prefer` if it has one; others as is."""
    if isinstance(error, ExceptionGroup):
        error = error.subgroup(prefer) or error
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


async def wait_or_timeout(event: anyio.Event, clock: Clock, seconds: float) -> None:
    """Return once the event is set or `seconds` of the clock have passed."""
    async with anyio.create_task_group() as group:

        async def expire() -> None:
            await clock.sleep(seconds)
            group.cancel_scope.cancel()

        group.start_soon(expire)
        await event.wait()
        group.cancel_scope.cancel()


SLOW = 0.05
SLOW_REST = 1.0
"""Seconds: after a piece of short work that took longer than the one, there is none for the
other."""


class ShortWork:
    """Work that takes about a millisecond, done on the event loop's own thread: to hand it to
    another thread and back would take longer, because both want the interpreter's lock.

    Where a piece took long, because a disk is slow, the next ones are better done elsewhere.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._from = 0.0

    @property
    def is_welcome(self) -> bool:
        """True if the last pieces were short."""
        return self._clock.monotonic() >= self._from

    def run(self, work: Callable[[], Result]) -> Result:
        """Do a piece of work; return its result."""
        began = self._clock.monotonic()
        try:
            return work()
        finally:
            ended = self._clock.monotonic()
            if ended - began > SLOW:
                self._from = ended + SLOW_REST


REST = 9.0
"""Rest after a step, in times of its length: a remover works a tenth of the time, and less while
other work slows its steps."""

Remove = Callable[[int], Awaitable[int]]
"""Remove up to so many things; return how many."""


class Throttle:
    """Run steps of removal with rests in between, by an injected clock.

    Short steps, and a rest after each full one, keep removal out of the way of other work.
    """

    def __init__(self, clock: Clock, *, rest: float = REST) -> None:
        self._clock = clock
        self._rest = rest

    async def step(self, remove: Remove, size: int) -> bool:
        """Remove up to `size` things and rest; return whether there may be more."""
        rest = await self.step_without_rest(remove, size)
        if rest is None:
            return False
        await self._clock.sleep(rest)
        return True

    async def step_without_rest(self, remove: Remove, size: int) -> float | None:
        """Remove up to `size` things; return the seconds to rest before the next step, or None if
        nothing is left."""
        began = self._clock.monotonic()
        if await remove(size) < size:
            return None
        return self._rest * (self._clock.monotonic() - began)
