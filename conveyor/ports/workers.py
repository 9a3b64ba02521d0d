"""The workers port: each worker says, once a heartbeat, who it is and what holds its lanes.

A report is a picture, not a record: it may be a heartbeat old, and it goes by itself once a worker
has been silent. Nothing but pages, `waiting` and metrics depends on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from conveyor.domain.run_waits import RunWaitReason

MOST_LANES = 500
MOST_BYTES = 32_768
"""Of one report, encoded; the lanes that do not fit are left out, the idle ones first."""
SILENT_AFTER = 3
"""Heartbeats without a word after which a worker counts as gone."""


class LaneReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One run as one worker sees it. `reason` is what keeps the worker from calling more for it,
    since `since` and, where it is known, until `until`, in milliseconds since the epoch."""

    run_id: str
    in_flight: int = 0
    buffered: int = 0
    permits: int = 0
    ceiling: int = 0
    reason: RunWaitReason | None = None
    since: int = 0
    until: int | None = None


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's word about itself at `said_at`, in milliseconds since the epoch.

    `heartbeat` is in seconds; `lanes_left_out` counts the lanes that had no room.
    """

    worker_id: str
    version: str
    started_at: int
    said_at: int
    heartbeat: float
    slots: int
    in_use: int
    away: tuple[str, ...] = ()
    lanes: tuple[LaneReport, ...] = ()
    lanes_left_out: int = 0

    def is_silent(self, now: int) -> bool:
        """Tell whether the worker has said nothing for SILENT_AFTER heartbeats."""
        return now - self.said_at > SILENT_AFTER * self.heartbeat * 1_000


class Workers(Protocol):
    """Reports of workers, kept while they are fresh."""

    async def say(self, report: WorkerReport) -> None:
        """Replace the report of a worker. It is kept for some heartbeats more than SILENT_AFTER."""
        ...

    async def leave(self, worker_id: str) -> None:
        """Remove the report of a worker that ends in good order. Idempotent."""
        ...

    async def all(self) -> Sequence[WorkerReport]:
        """Return the reports that are kept, in order of worker_id."""
        ...
