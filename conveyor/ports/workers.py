"""The workers port: each worker says, once a heartbeat, who it is and what holds its lanes.

A report is a picture, not a record: it may be a heartbeat old, and it goes by itself once a worker
has been silent. Nothing but pages, `waiting` and metrics depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from conveyor.domain.run_waits import SILENT_AFTER as SILENT_AFTER
from conveyor.domain.run_waits import LaneReport as LaneReport
from conveyor.domain.run_waits import WorkerReport as WorkerReport

MOST_LANES = 500
MOST_BYTES = 32_768
"""Of one report, encoded; the lanes that do not fit are left out, the idle ones first."""


class FleetPause:
    """An operator's order that nothing new starts in the whole fleet, as this process last heard of
    it. `since` is its instant, in milliseconds since the epoch; None while there is no order."""

    def __init__(self) -> None:
        self.since: int | None = None
        self._on_change: list[Callable[[], None]] = []

    def hear(self, since: int | None) -> None:
        """Note what the store says, and tell of a change."""
        if since != self.since:
            self.since = since
            for tell in self._on_change:
                tell()

    def on_change(self, tell: Callable[[], None]) -> None:
        """Call a function after each change."""
        self._on_change.append(tell)

    def forget_listeners(self) -> None:
        """Tell nobody of changes any more: those who listened have ended."""
        self._on_change.clear()


class Workers(Protocol):
    """Reports of workers, kept while they are fresh."""

    async def say(self, report: WorkerReport) -> None:
        """Replace the report of a worker. It is kept for `report.kept_for` seconds."""
        ...

    async def leave(self, worker_id: str) -> None:
        """Remove the report of a worker that ends in good order. Idempotent."""
        ...

    async def all(self) -> Sequence[WorkerReport]:
        """Return the reports that are kept, in order of worker_id."""
        ...
