"""A ticker: calls something now and then, for as long as the worker runs."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from conveyor.domain.errors import ConveyorError
from conveyor.ports.clock import Clock

JITTER = 0.1
"""Share of the interval by which a tick comes earlier or later, so that a fleet does not march in
step."""

_log = logging.getLogger("conveyor.engine")


class Ticker:
    """Calls `act` every `interval` seconds or so. A call that fails costs that call alone.

    `what` names the work in the log. The next interval begins when a call has ended.
    """

    def __init__(
        self, act: Callable[[], Awaitable[None]], clock: Clock, *, interval: float, what: str
    ) -> None:
        self._act = act
        self._clock = clock
        self._interval = interval
        self._what = what

    async def run(self) -> None:
        """Tick until cancelled, the first time after one interval."""
        shortest = self._interval * (1.0 - JITTER)
        while True:
            # The draw comes after the longer sleep: a ticker that never comes to tick draws none.
            await self._clock.sleep(shortest)
            await self._clock.sleep(2.0 * JITTER * self._interval * self._clock.random())
            try:
                await self._act()
            except ConveyorError as error:
                _log.warning("%s failed: %s", self._what, error)
            except Exception as error:
                _log.error("%s failed: %s: %s", self._what, type(error).__name__, error)
