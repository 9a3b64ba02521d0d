"""The files of tasks and the archives of results in the OpenAPI document."""

from __future__ import annotations

from typing import Any

from conveyor.domain import input_spec
from conveyor.domain.errors import ErrorCode
from conveyor.domain.input_spec import InputType
from conveyor.http.openapi_operations import Operation
from conveyor.http.openapi_schemas import Schema, nullable, ref
from conveyor.ports.exports import ExportFormat
from conveyor.service.file_inputs import CONTENT_TYPES
from conveyor.service.links import ANY_BYTES, EXPORT_PATH, UPLOAD_PATH
from conveyor.service.schemas import ULID_PATTERN


def _text(description: str, **more: Any) -> Schema:
    return {"type": "string", "description": description, **more}


def _character(refused: str, default: str, description: str) -> Schema:
    return _text(description, pattern=f"^[^{refused}]$", default=default)


_COLUMN: Schema = {
    "description": "A column: its index from 0, or its name, where the file has a header.",
    "oneOf": [
        {"type": "integer", "minimum": 0, "maximum": input_spec.MAX_COLUMN},
        {"type": "string", "minLength": 1, "maxLength": input_spec.MAX_COLUMN_NAME},
    ],
}
_DELIMITER = nullable(_character(r"\r\n\x00", ",", "What stands between the fields of a line."))
_QUOTE = nullable(
    _character(r"\r\n\x00 ", '"', "What stands around a field. Must differ from the delimiter.")
)
_NUMBERED: Schema = {"type": ["integer", "null"]}
_CSV: Schema = {
    "type": "object",
    "description": "How a CSV file is read.",
    "required": ["fields"],
    "properties": {
        "delimiter": _DELIMITER,
        "quote": _QUOTE,
        "header": nullable(
            {
                "type": "boolean",
                "default": False,
                "description": "Whether the first record names the columns, and is no task.",
            }
        ),
        "fields": {
            "type": "object",
            "description": "Which columns are read; all others are passed over.",
            "required": ["url"],
            "properties": {"url": ref("Column"), "external_id": nullable(ref("Column"))},
            "additionalProperties": False,
        },
    },
    "if": {"properties": {"header": {"const": True}}, "required": ["header"]},
    "else": {
        "properties": {"fields": {"properties": {"url": _NUMBERED, "external_id": _NUMBERED}}}
    },
}

INPUT_SCHEMAS: dict[str, Schema] = {
    "Column": _COLUMN,
    "CsvSpec": _CSV,
    "CreateJobInput": {
        "type": "object",
        "description": "A slot to make, for one file of tasks. The file may be compressed (gzip).",
        "required": ["type"],
        "properties": {
            "type": _text(
                "csv: one task a record, read as `csv` says. jsonl: one task a line, as JSON. "
                "urls: one URL a line.",
                enum=[kind.value for kind in InputType],
            ),
            "csv": nullable(ref("CsvSpec")),
        },
        "if": {"properties": {"type": {"const": InputType.CSV.value}}},
        "then": {"properties": {"csv": {"type": "object"}}, "required": ["csv"]},
        "else": {"properties": {"csv": {"type": "null"}}},
    },
}

INPUT_PARAMETERS: dict[str, Schema] = {
    "input_id": {
        "name": "input_id",
        "in": "path",
        "required": True,
        "description": "A slot for a file.",
        "schema": {"type": "string", "pattern": ULID_PATTERN},
    }
}

INPUT_OPERATIONS = (
    Operation(
        method="post",
        path="/v1/job_inputs",
        id="createJobInput",
        summary="Make a slot for a file of tasks, and a link that takes the file",
        success=201,
        answer="JobInput",
        body="CreateJobInput",
        refusals=(
            ErrorCode.INVALID_ARGUMENT,
            ErrorCode.PAYLOAD_TOO_LARGE,
            ErrorCode.UNSUPPORTED_MEDIA_TYPE,
        ),
    ),
    Operation(
        method="put",
        path=UPLOAD_PATH,
        id="uploadJobInput",
        summary="Put a file into a slot by its signed link, in place of an earlier file",
        media_type=None,
        uploads=(ANY_BYTES, *CONTENT_TYPES.values()),
        parameters=("Expires", "Signature"),
        note=(
            "`permission_denied` for a link that is forged, has expired or wants "
            "another Content-Type."
        ),
        refusals=(
            ErrorCode.INVALID_ARGUMENT,
            ErrorCode.FILE_INPUT_NOT_FOUND,
            ErrorCode.PAYLOAD_TOO_LARGE,
        ),
        open=True,
    ),
)


_EXPORTS = "/v1/jobs/{job_id}/runs/{run_id}/exports"


_FORMATS = [one.value for one in ExportFormat]
EXPORT_PARAMETERS: dict[str, Schema] = {
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

EXPORT_OPERATIONS = (
    Operation(
        method="post",
        path=_EXPORTS,
        id="startResultsExport",
        summary="Ask for an archive of what a run has brought back by the time it is made",
        success=202,
        answer="ExportStarted",
        parameters=("ExportFormat",),
        refusals=(ErrorCode.INVALID_ARGUMENT, ErrorCode.NOT_FOUND, ErrorCode.PAYLOAD_TOO_LARGE),
    ),
    Operation(
        method="get",
        path=f"{_EXPORTS}/{{export_id}}",
        id="getResultsExport",
        summary="See how far an export is, and where it is fetched",
        answer="Export",
        refusals=(ErrorCode.NOT_FOUND,),
    ),
    Operation(
        method="get",
        path=EXPORT_PATH,
        id="downloadExport",
        summary="Fetch an export by a signed link, as found in download_url",
        media_type="*/*",
        parameters=("Expires", "Signature"),
        note="`permission_denied` for a link that is forged or has expired.",
        refusals=(ErrorCode.INVALID_ARGUMENT, ErrorCode.NOT_FOUND, ErrorCode.RESULT_EXPIRED),
        open=True,
    ),
)
