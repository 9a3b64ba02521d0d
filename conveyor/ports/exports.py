"""The exports port: archives of a run's results, made on request and kept for hours."""

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


class Exports(Protocol):
    """Exports. They go with their run: `purge_run` removes them."""

    async def create_export(self, export: Export) -> None:
        """Write a new export. Raises ConveyorError(not_found) where its run is deleted or gone."""
        ...

    async def get_export(self, export_id: str) -> Export | None:
        """An export by its id, expired ones included."""
        ...

    async def begin_export(self, export_id: str, *, now: int) -> Export | None:
        """Mark it running, also where it runs already (its worker may be lost); None where it has
        ended, expired, or its run is deleted or gone."""
        ...

    async def touch_export(self, export_id: str, *, now: int) -> None:
        """Note that it waits for its turn: no message of it is lost. Without effect where it has
        ended, expired, or its run is deleted or gone."""
        ...

    async def end_export(
        self, export_id: str, *, size: int | None, error: str | None, now: int
    ) -> bool:
        """Complete it with a size, or fail it with an error; False where it has ended, expired, or
        its run is deleted or gone: then its bytes are to be removed."""
        ...

    async def unfinished_exports(self, *, before: int) -> list[Export]:
        """Exports that have not ended and were last touched before `before`."""
        ...

    async def expired_exports(self, *, now: int, limit: int) -> list[Export]:
        """Exports past their time."""
        ...

    async def drop_export(self, export_id: str) -> None:
        """Remove an export. Without effect where it is gone."""
        ...
