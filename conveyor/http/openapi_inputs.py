"""What our OpenAPI document says of files of tasks: their slots, and how they are uploaded."""

from __future__ import annotations

from typing import Any

from conveyor.domain import input_spec
from conveyor.domain.input_spec import InputType
from conveyor.http.openapi_operations import Operation
from conveyor.http.openapi_schemas import ULID_PATTERN, Schema, ref
from conveyor.service.inputs import CONTENT_TYPES
from conveyor.service.upload_links import PATH


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
_CSV: Schema = {
    "type": "object",
    "description": "How a CSV file is read.",
    "required": ["fields"],
    "properties": {
        "delimiter": _character(r"\r\n\x00", ",", "What stands between the fields of a line."),
        "quote": _character(
            r"\r\n\x00 ", '"', "What stands around a field. Must differ from the delimiter."
        ),
        "header": {
            "type": "boolean",
            "default": False,
            "description": "Whether the first record names the columns rather than being a task.",
        },
        "fields": {
            "type": "object",
            "description": "Which columns are read; all others are passed over.",
            "required": ["url"],
            "properties": {"url": ref("Column"), "external_id": ref("Column")},
            "additionalProperties": False,
        },
    },
}

SCHEMAS: dict[str, Schema] = {
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
            "csv": ref("CsvSpec"),
        },
        "oneOf": [
            {"properties": {"type": {"const": InputType.CSV.value}}, "required": ["csv"]},
            {
                "properties": {"type": {"enum": [InputType.JSONL.value, InputType.URLS.value]}},
                "not": {"required": ["csv"]},
            },
        ],
    },
    "Upload": {
        "type": "object",
        "description": "How the file is sent. Until the link ends it may be sent again.",
        "required": ["method", "url", "headers", "expires_at"],
        "properties": {
            "method": _text("How the file is sent.", enum=["PUT"]),
            "url": _text("A signed link: no key is needed.", format="uri"),
            "headers": {
                "type": "object",
                "description": "Headers to send with these very values: the link is bound to them.",
                "additionalProperties": {"type": "string"},
            },
            "expires_at": _text("When the link ends.", format="date-time"),
        },
    },
    "JobInput": {
        "type": "object",
        "description": "A slot for one file.",
        "required": ["file_input_id", "upload", "expires_at"],
        "properties": {
            "file_input_id": _text("What a submit names the file by.", pattern=ULID_PATTERN),
            "upload": ref("Upload"),
            "expires_at": _text("When the slot and its file are removed.", format="date-time"),
        },
    },
}
"""Schemas beside those of `openapi_schemas`."""

PARAMETERS: dict[str, Schema] = {
    "input_id": {
        "name": "input_id",
        "in": "path",
        "required": True,
        "description": "A slot for a file.",
        "schema": {"type": "string", "pattern": ULID_PATTERN},
    }
}
"""Parameters beside those of `openapi_parameters`."""

OPERATIONS = (
    Operation(
        method="post",
        path="/v1/job_inputs",
        id="createJobInput",
        summary="Make a slot for a file of tasks, and a link that takes the file",
        success=201,
        answer="JobInput",
        body="CreateJobInput",
        errors=(400, 413, 415),
    ),
    Operation(
        method="put",
        path=PATH,
        id="uploadJobInput",
        summary="Put a file into a slot by its signed link, in place of an earlier file",
        media_type=None,
        uploads=tuple(CONTENT_TYPES.values()),
        parameters=("Expires", "Signature"),
        errors=(400, 404, 413),
        open=True,
    ),
)
"""Operations beside those of `openapi_operations`."""
