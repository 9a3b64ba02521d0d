"""The backlog: what waits in all queues that a worker may receive from, by the queues' own word.

Every worker of a fleet has a lane for each run with work, so each counts the whole. What it knows
from receiving is a part of that: a worker whose slots are taken receives from no queue at all.
"""

from __future__ import annotations

import logging
from typing import Protocol

from conveyor.domain.together import side_by_side
from conveyor.engine.lanes import Lanes

MOST = 1_000
"""Queues asked for one figure. Where there are more, those that were asked longest ago."""
SIDE_BY_SIDE = 4
"""Queues asked at a time: a quarter of the calls that a process makes at once."""

_log = logging.getLogger("conveyor.engine")


class CountsMessages(Protocol):
    """The part of `Queues` that is asked."""

    async def count(self, queue: str) -> int:
        """How many messages wait, as `Queues.count`."""
        ...


class Backlog:
    """Counts what waits in the queues of open lanes."""

    def __init__(self, lanes: Lanes, queues: CountsMessages) -> None:
        self._lanes = lanes
        self._queues = queues
        self._counts: dict[str, int] = {}

    async def tell(self) -> None:
        """Say in the log how much waits. Says nothing, and raises, where `count` raises: no figure
        is better than one that takes workers away."""
        _log.info("backlog", extra={"tasks": await self.count()})

    async def count(self) -> int:
        """Ask at most MOST queues; the sum of what all said last.

        Raises what the first of them raised that could not be asked; no other is asked then.
        """
        polled = [lane.queue for lane in self._lanes if not lane.closed]
        fresh = dict.fromkeys([self._lanes.control.queue, *polled])
        known = {queue: count for queue, count in self._counts.items() if queue in fresh}
        self._counts = known
        # Counts lie in the order in which they came in.
        turn = [*(queue for queue in fresh if queue not in known), *known]
        await side_by_side(self._ask, turn[:MOST], at_a_time=SIDE_BY_SIDE)
        return sum(self._counts.values())

    async def _ask(self, queue: str) -> None:
        count = await self._queues.count(queue)
        self._counts.pop(queue, None)
        self._counts[queue] = count
