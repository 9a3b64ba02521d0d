"""Strongly consistent reads of run rows, each shared by all who asked before it began.

Whoever has just claimed a task must know that its run is live: a read that was under way already
may have been answered before the claim, so it waits for the next one, with all others that do.
"""

from __future__ import annotations

import asyncio

from conveyor.prod.dynamodb.places import Place
from conveyor.prod.dynamodb.run_items import RunRow
from conveyor.prod.dynamodb.run_records import RunRecords

Reading = asyncio.Task[RunRow | None]


class RunReads:
    """Fresh reads of runs. Belongs to one event loop."""

    def __init__(self, records: RunRecords) -> None:
        self._records = records
        self._waiting: dict[str, Reading] = {}
        self._under_way: dict[str, Reading] = {}

    async def fresh(self, place: Place) -> RunRow | None:
        """The run as it was at some moment after this call; None where it is gone."""
        reading = self._waiting.get(place.run_id)
        if reading is None:
            reading = asyncio.create_task(self._read(place))
            reading.add_done_callback(_look_at_failure)
            self._waiting[place.run_id] = reading
        # One waiter that is cancelled must not take the read away from the others.
        return await asyncio.shield(reading)

    async def _read(self, place: Place) -> RunRow | None:
        before = self._under_way.get(place.run_id)
        if before is not None:
            await asyncio.wait([before])
        reading = self._waiting.pop(place.run_id)
        self._under_way[place.run_id] = reading
        try:
            return await self._records.read_at(place)
        finally:
            if self._under_way[place.run_id] is reading:
                del self._under_way[place.run_id]


def _look_at_failure(reading: Reading) -> None:
    """Nobody may be left to wait for it; a failure that nobody looked at would be logged."""
    if not reading.cancelled():
        reading.exception()
