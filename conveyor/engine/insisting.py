"""Work that is kept at hand while a service is away: to hide its message would be to receive it
once more."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Awaitable, Callable

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.clock import Clock
from conveyor.ports.work import CalledInVain, Outcome

PAUSE = 1.0
LONGEST_PAUSE = 8.0
TRIES = 5
"""Tries of one piece of work, with pauses of 2, 4, 8 and 8 s between them."""

_log = logging.getLogger("conveyor.engine")


async def insist(
    work: Callable[[], Awaitable[Outcome]],
    clock: Clock,
    *,
    receives: int,
    keeps: Callable[[], bool],
    away: Callable[[], None],
) -> Outcome:
    """What comes of a handler's work, which is tried again as long as something is away and
    `keeps` says yes. Where it broke, or each try costs a call of the gateway, its message is
    hidden, the longer the more `receives` it has. `away` is told each time that something is."""
    for tries in itertools.count(1):
        try:
            return await work()
        except Exception as error:
            is_away = isinstance(error, ConveyorError) and error.code is ErrorCode.UNAVAILABLE
            _log.error("handler failed: %r", error, exc_info=not isinstance(error, ConveyorError))
            if is_away:
                away()
            costs = isinstance(error, CalledInVain)
            if not is_away or costs or tries >= TRIES or not keeps():
                return Outcome(hide_for=PAUSE * 2.0 ** min(receives, 8))
        await clock.sleep(min(PAUSE * 2.0**tries, LONGEST_PAUSE))
    raise AssertionError("unreachable")
