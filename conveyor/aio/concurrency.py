"""Calls side by side, of which the first failure is the failure of all, at once or in the end.

Waiting for an event or for the injected clock, whichever comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import anyio

from conveyor.ports.clock import Clock

Argument = TypeVar("Argument")


async def for_each(
    call: Callable[[Argument], Coroutine[Any, Any, None]],
    arguments: Iterable[Argument],
    *,
    limit: int | None = None,
) -> None:
    """Make one call for each argument, all at once or so many at a time; return when all have.

    The first that raises ends the others, and what it raised is raised as it was.
    """
    waiting = list(arguments)
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
    """Make one call for each argument, all at once or so many at a time; return when all have.

    What one raises is no matter of the others; once all have ended, that of the first argument
    that failed is raised.
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
    """Around a task group: what was raised first in it is raised as it was."""
    try:
        yield
    except ExceptionGroup as failures:
        raise _first(failures) from None


def _first(failures: ExceptionGroup[Exception]) -> Exception:
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, ExceptionGroup) else first


async def wait_or_timeout(event: anyio.Event, clock: Clock, seconds: float) -> None:
    """Return once the event is set or `seconds` of the clock have passed."""
    async with anyio.create_task_group() as group:

        async def ring() -> None:
            await clock.sleep(seconds)
            group.cancel_scope.cancel()

        group.start_soon(ring)
        await event.wait()
        group.cancel_scope.cancel()
