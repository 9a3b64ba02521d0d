"""The reports of the workers of this process, in memory."""

from __future__ import annotations

from collections.abc import Sequence

from conveyor.ports.clock import Clock
from conveyor.ports.workers import WorkerReport


class MemoryWorkers:
    """The workers port in memory."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._reports: dict[str, tuple[WorkerReport, float]] = {}

    async def say(self, report: WorkerReport) -> None:
        self._reports[report.worker_id] = report, self._clock.monotonic() + report.kept_for

    async def leave(self, worker_id: str) -> None:
        self._reports.pop(worker_id, None)

    async def all(self) -> Sequence[WorkerReport]:
        now = self._clock.monotonic()
        self._reports = {name: kept for name, kept in self._reports.items() if kept[1] > now}
        return [self._reports[worker_id][0] for worker_id in sorted(self._reports)]
