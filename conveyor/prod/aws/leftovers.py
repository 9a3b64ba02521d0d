"""Batches of which a service does a part and leaves the rest: that is asked for again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.clock import Clock

ROUNDS = 12
"""Calls at most for one batch."""
FIRST_PAUSE = 0.1
LONGEST_PAUSE = 5.0
"""Seconds between two calls at most: any time up to the doubled one."""

Entry = TypeVar("Entry")


async def to_the_last(
    call: Callable[[list[Entry]], Awaitable[list[Entry]]],
    entries: list[Entry],
    clock: Clock,
    *,
    complaint: str,
) -> None:
    """Call with some entries, then with those that `call` returns as left undone, until none is.

    Raises ConveyorError(unavailable), in the words of the complaint, where some still are after the
    last round.
    """
    left = await call(entries)
    for number in range(1, ROUNDS):
        if not left:
            return
        await clock.sleep(min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (number - 1)) * clock.random())
        left = await call(left)
    if left:
        raise ConveyorError(ErrorCode.UNAVAILABLE, complaint, retry_after=5)
