"""Removing much without getting in the way: short steps, and a rest after each full one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from conveyor.ports.blobs import Blobs
from conveyor.ports.clock import Clock

ROWS_A_STEP = 500
BODIES_A_STEP = 256
REST = 9.0
"""How many times as long as a step took is rested after it: a remover is at work a tenth of the
time, and less where the work of others makes its steps take longer."""

Remove = Callable[[int], Awaitable[int]]
"""Removes at most so many things; how many went."""


class Pace:
    """Steps of removal with rests in between, measured and slept by an injected clock."""

    def __init__(self, clock: Clock, *, rest: float = REST) -> None:
        self._clock = clock
        self._rest = rest

    async def step(self, remove: Remove, size: int) -> bool:
        """Remove up to `size` things; whether there may be more, told after the rest."""
        rest = await self.step_without_rest(remove, size)
        if rest is None:
            return False
        await self._clock.sleep(rest)
        return True

    async def step_without_rest(self, remove: Remove, size: int) -> float | None:
        """Remove up to `size` things; how many seconds are to be rested before the next step, None
        where nothing is left."""
        began = self._clock.monotonic()
        if await remove(size) < size:
            return None
        return self._rest * (self._clock.monotonic() - began)


def bodies_below(blobs: Blobs, prefix: str) -> Remove:
    """What removes bodies below a prefix."""
    return lambda size: blobs.delete_prefix(prefix, limit=size)
