"""The exports ports: archives of a run's results, made on request and kept for hours."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

import msgspec


class ExportFormat(StrEnum):
    """The form of an export."""

    ZIP = "zip"
    JSONL = "jsonl"
    CSV = "csv"
    PARQUET = "parquet"


class ExportStatus(StrEnum):
    """pending → running → completed | failed."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"


class Export(msgspec.Struct, frozen=True, kw_only=True):
    """One export of one run. The bytes lie in the blob store under `export_key`, `size` of them."""

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
    """One export. Exports go with their run: `purge_run` removes them."""

    async def get_export(self, export_id: str) -> Export | None:
        """Return an export by its id, expired ones included."""
        ...


class ExportRequests(ExportLookup, Protocol):
    """Exports as the API asks for them."""

    async def create_export(self, export: Export) -> None:
        """Write a new export. Raises ConveyorError(not_found) if its run is deleted or gone."""
        ...


class ExportTouches(Protocol):
    """The time at which an export was last waited for or worked on."""

    async def touch_export(self, export_id: str, *, now: int) -> None:
        """Note that the export waits for its turn, so that its message is not sent again. Without
        effect if it has ended or expired, or its run is deleted or gone."""
        ...


class ExportWork(ExportLookup, ExportTouches, Protocol):
    """Exports as a worker makes them."""

    async def begin_export(self, export_id: str, *, now: int) -> Export | None:
        """Mark it running, also if it runs already (its worker may be lost); None if it has ended
        or expired, or its run is deleted or gone."""
        ...

    async def end_export(
        self, export_id: str, *, size: int | None, error: str | None, now: int
    ) -> bool:
        """Complete it with a size, or fail it with an error; False if it has ended or expired, or
        its run is deleted or gone: then the caller removes its bytes."""
        ...
