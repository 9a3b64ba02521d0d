"""The shapes of answers about exports. A field left at None is left out of the JSON."""

from __future__ import annotations

import msgspec

from conveyor.domain.timestamps import rfc3339
from conveyor.ports.exports import Export


class StartExportBody(msgspec.Struct, frozen=True, kw_only=True):
    """An export that was just asked for."""

    export_id: str
    status: str
    created_at: str
    expires_at: str


class ExportBody(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """An export as a poll sees it. `format` is told beyond what the contract asks for."""

    export_id: str
    status: str
    format: str
    error: str | None = None
    download_url: str | None = None
    created_at: str
    expires_at: str


def start_export_body(export: Export) -> StartExportBody:
    """What a caller learns of a new export."""
    return StartExportBody(
        export_id=export.export_id,
        status=export.status.value,
        created_at=rfc3339(export.created_at),
        expires_at=rfc3339(export.expires_at),
    )


def export_body(export: Export, *, download_url: str | None) -> ExportBody:
    """What a poll shows."""
    return ExportBody(
        export_id=export.export_id,
        status=export.status.value,
        format=export.format.value,
        error=export.error,
        download_url=download_url,
        created_at=rfc3339(export.created_at),
        expires_at=rfc3339(export.expires_at),
    )
