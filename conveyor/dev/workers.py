"""The reports of the workers of this process, in memory."""

from __future__ import annotations

from collections.abc import Sequence

from conveyor.ports.clock import Clock
from conveyor.ports.workers import SILENT_AFTER, WorkerReport


class MemoryWorkers:
    """The workers port in memory."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._reports: dict[str, WorkerReport] = {}

    async def say(self, report: WorkerReport) -> None:
        self._reports[report.worker_id] = report

    async def leave(self, worker_id: str) -> None:
        self._reports.pop(worker_id, None)

    async def all(self) -> Sequence[WorkerReport]:
        now = self._clock.now()
        for report in list(self._reports.values()):
            if now - report.said_at > 2 * SILENT_AFTER * report.heartbeat * 1_000:
                del self._reports[report.worker_id]
        return [self._reports[worker_id] for worker_id in sorted(self._reports)]
