"""What our OpenAPI document says of exports."""

from __future__ import annotations

from typing import Any

from conveyor.http.openapi_operations import Operation
from conveyor.http.openapi_schemas import ULID_PATTERN, Schema
from conveyor.ports.exports import ExportFormat, ExportStatus
from conveyor.service.export_links import PATH

_EXPORTS = "/v1/jobs/{job_id}/runs/{run_id}/exports"


def _text(description: str, **more: Any) -> Schema:
    return {"type": "string", "description": description, **more}


_FORMATS = [one.value for one in ExportFormat]
_STARTED: Schema = {
    "export_id": _text("What the export is polled by.", pattern=ULID_PATTERN),
    "status": _text("How far it is.", enum=[one.value for one in ExportStatus]),
    "created_at": _text("When it was asked for.", format="date-time"),
    "expires_at": _text("When it is removed; from then on it is not found.", format="date-time"),
}

SCHEMAS: dict[str, Schema] = {
    "ExportStarted": {
        "type": "object",
        "description": "An export that was just asked for.",
        "required": list(_STARTED),
        "properties": _STARTED,
    },
    "Export": {
        "type": "object",
        "description": "An export of a run's results.",
        "required": [*_STARTED, "format"],
        "properties": {
            **_STARTED,
            "format": _text("Its form.", enum=_FORMATS),
            "error": _text("Why it failed; stable."),
            "download_url": _text(
                "Where a completed export is fetched, with no key. Fresh on each poll.",
                format="uri",
            ),
        },
    },
}
"""Schemas beside those of `openapi_schemas`."""

PARAMETERS: dict[str, Schema] = {
    "ExportFormat": {
        "name": "format",
        "in": "query",
        "required": False,
        "description": (
            "zip: a file a body, and `manifest.jsonl` with every row. jsonl, csv: a row a line, "
            "its body inside. parquet: bodies as bytes; needs an extra on the server."
        ),
        "schema": {"type": "string", "enum": _FORMATS, "default": ExportFormat.ZIP.value},
    }
}
"""Parameters beside those of `openapi_parameters`."""

OPERATIONS = (
    Operation(
        method="post",
        path=_EXPORTS,
        id="startExport",
        summary="Ask for an archive of what a run has brought back by the time it is made",
        success=202,
        answer="ExportStarted",
        parameters=("ExportFormat",),
        errors=(400, 404, 413),
    ),
    Operation(
        method="get",
        path=f"{_EXPORTS}/{{export_id}}",
        id="getExport",
        summary="See how far an export is, and where it is fetched",
        answer="Export",
        errors=(404,),
    ),
    Operation(
        method="get",
        path=PATH,
        id="downloadExport",
        summary="Fetch an export by a signed link, as found in download_url",
        media_type="*/*",
        parameters=("Expires", "Signature"),
        errors=(400, 404),
        open=True,
    ),
)
