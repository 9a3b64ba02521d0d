"""Strong reads of run rows by which a worker makes sure that a run is live.

Callers share reads, and reads of a run are kept apart in time, because the row of a run lies in one
partition whoever reads it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cachetools import LRUCache

from conveyor.prod.dynamodb.run_rows import DynamoRunRows, RunPlace, RunRow

LEAST_APART = 0.1
"""Seconds between the beginnings of two reads of a run, at least."""
APART_BY_PROCESS = 0.001
"""Seconds between the beginnings of two reads, at least, by process that counts in the run."""
MOST_REMEMBERED = 10_000

Reading = asyncio.Task[RunRow | None]


class RunReads:
    """Strong reads of run rows, each shared by the callers who asked before it began. Belongs to
    one event loop.

    A worker that has just claimed a task must know that its run is still live. A read already under
    way may have been answered before the claim, so the worker joins the next one. `apart` returns
    the seconds between the beginnings of two reads of a run, at least.
    """

    def __init__(self, records: DynamoRunRows, apart: Callable[[RunPlace], float]) -> None:
        self._records = records
        self._clock = records.table.clock
        self._apart = apart
        self._waiting: dict[str, Reading] = {}
        self._under_way: dict[str, Reading] = {}
        self._began: LRUCache[str, float] = LRUCache(MOST_REMEMBERED)

    async def read_fresh(self, place: RunPlace) -> RunRow | None:
        """Read the row of the run, without its sum, as it was at some moment after this call; None
        if it is gone."""
        reading = self._waiting.get(place.run_id)
        if reading is None:
            reading = asyncio.create_task(self._read(place))
            reading.add_done_callback(_retrieve_exception)
            self._waiting[place.run_id] = reading
        # Shielded: a cancelled caller must not cancel the read that others share.
        return await asyncio.shield(reading)

    async def _read(self, place: RunPlace) -> RunRow | None:
        before = self._under_way.get(place.run_id)
        if before is not None:
            await asyncio.wait([before])
        due = self._began.get(place.run_id, float("-inf")) + self._apart(place)
        if due > self._clock.monotonic():
            await self._clock.sleep(due - self._clock.monotonic())
        reading = self._waiting.pop(place.run_id)
        self._under_way[place.run_id] = reading
        self._began[place.run_id] = self._clock.monotonic()
        try:
            return await self._records.read_bare(place)
        finally:
            if self._under_way[place.run_id] is reading:
                del self._under_way[place.run_id]


def _retrieve_exception(reading: Reading) -> None:
    """Retrieve a failure that no caller may be left to see: asyncio would log it."""
    if not reading.cancelled():
        reading.exception()
