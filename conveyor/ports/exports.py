"""The exports ports: archives of a run's results, made on request and kept for hours."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

import msgspec


class ExportFormat(StrEnum):
    """The file format of an export."""

    ZIP = "zip"
    JSONL = "jsonl"
    CSV = "csv"
    PARQUET = "parquet"


class ExportStatus(StrEnum):
    """The state of an export: pending → running → completed | failed."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"


class Export(msgspec.Struct, frozen=True, kw_only=True):
    """One export of one run.

    Its `size` bytes lie in the blob store under `export_key`. Instants are in milliseconds since
    the epoch.
    """

    export_id: str
    job_id: str
    run_id: str
    format: ExportFormat
    status: ExportStatus
    created_at: int
    updated_at: int
    expires_at: int
    error: str | None = None
    size: int | None = None


class ExportLookup(Protocol):
    """Lookup of one export. `purge_run` removes exports together with their run."""

    async def get_export(self, export_id: str) -> Export | None:
        """Return an export by its id, expired ones included; None if it is gone."""
        ...


class ExportRequests(ExportLookup, Protocol):
    """Requests for exports, for the API."""

    async def create_export(self, export: Export) -> None:
        """Write a new export. Raises ConveyorError(not_found) if its run is deleted or gone."""
        ...

    async def latest_exports(self, job_id: str, run_id: str, *, limit: int) -> list[Export]:
        """Return the newest exports of a run, the newest first, expired ones included."""
        ...


class ExportTouches(Protocol):
    """Notes that an export still waits or is worked on, for workers and the sweeper."""

    async def touch_export(self, export_id: str, *, now: int) -> None:
        """Note that the export waits for its turn, so that its message is not sent again.

        Do nothing if it has ended or expired, or its run is deleted or gone.
        """
        ...


class ExportWork(ExportLookup, ExportTouches, Protocol):
    """Production of exports, for workers."""

    async def begin_export(self, export_id: str, *, now: int) -> Export | None:
        """Mark an export as running and return it, even if it runs already: its worker may be lost.

        Return None if it has ended or expired, or its run is deleted or gone.
        """
        ...

    async def end_export(
        self, export_id: str, *, size: int | None, error: str | None, now: int
    ) -> bool:
        """Complete an export with its size in bytes, or fail it with an error; return True.

        Return False if it has ended or expired, or its run is deleted or gone: the caller removes
        its bytes then.
        """
        ...
