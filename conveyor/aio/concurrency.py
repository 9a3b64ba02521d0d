"""Structured concurrency on anyio: run calls concurrently, unwrap exception groups, and wait for an
event or the injected clock, whichever comes first.
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
    """Make one call for each argument, at most `limit` at a time; return when all have ended.

    The first exception cancels the other calls and is raised unwrapped.
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
