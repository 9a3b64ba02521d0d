"""The OpenAPI 3.1 document, served at /openapi.json: every route, every answer, every error."""

from __future__ import annotations

import re
from typing import Any

from conveyor import __version__
from conveyor.domain.errors import ErrorCode
from conveyor.http import problems
from conveyor.http.openapi_files import (
    EXPORT_OPERATIONS,
    EXPORT_PARAMETERS,
    INPUT_OPERATIONS,
    INPUT_PARAMETERS,
    INPUT_SCHEMAS,
)
from conveyor.http.openapi_operations import (
    OPERATIONS,
    PARAMETERS,
    Operation,
)
from conveyor.http.openapi_schemas import SCHEMAS, ref
from conveyor.http.openapi_webhooks import (
    WEBHOOK_OPERATIONS,
    WEBHOOK_PARAMETERS,
    WEBHOOK_SCHEMAS,
)
from conveyor.service.links import ANY_BYTES

ANY_OPERATION = (
    ErrorCode.PERMISSION_DENIED,
    ErrorCode.REQUEST_TIMEOUT,
    ErrorCode.INTERNAL,
    ErrorCode.UNAVAILABLE,
)
"""Errors of any operation."""
WITH_A_KEY = (ErrorCode.UNAUTHENTICATED, ErrorCode.RATE_LIMITED)
"""Further errors of any operation that needs a key."""


def operations() -> tuple[Operation, ...]:
    """Return every operation, in the order of the document."""
    return OPERATIONS + WEBHOOK_OPERATIONS + INPUT_OPERATIONS + EXPORT_OPERATIONS


def document() -> dict[str, Any]:
    """Build the whole document."""
    paths: dict[str, Any] = {}
    for operation in operations():
        paths.setdefault(operation.path, {})[operation.method] = _described(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Conveyor",
            "version": __version__,
            "summary": "Batch scraping: submit URLs, follow the run, read the results.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{"apiKey": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {
                "apiKey": {
                    "type": "apiKey",
                    "in": "header",
                    "name": "X-API-Key",
                    "description": "The only place a key is taken from.",
                }
            },
            "schemas": SCHEMAS | INPUT_SCHEMAS | WEBHOOK_SCHEMAS,
            "parameters": PARAMETERS | INPUT_PARAMETERS | EXPORT_PARAMETERS | WEBHOOK_PARAMETERS,
            "responses": {f"Problem{status}": _problem(status) for status in _statuses()},
        },
    }


def _described(operation: Operation) -> dict[str, Any]:
    """Describe one operation."""
    in_path = re.findall(r"{(\w+)}", operation.path)
    described: dict[str, Any] = {
        "operationId": operation.id,
        "summary": operation.summary,
        "parameters": [
            {"$ref": f"#/components/parameters/{name}"}
            for name in (*in_path, *operation.parameters)
        ],
        "responses": _responses(operation),
    }
    if operation.body is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": ref(operation.body)}},
        }
    if operation.uploads:
        described["requestBody"] = {
            "required": True,
            "content": {
                media_type: {"schema": {"type": "string", "format": "binary"}}
                for media_type in operation.uploads
            },
        }
    if operation.open:
        described["security"] = []
    return described


def _responses(operation: Operation) -> dict[str, Any]:
    statuses = {problems.PROBLEMS[code][0] for code in (*operation.refusals, *ANY_OPERATION)}
    if operation.fails_as_task:
        statuses.add(422)
    if not operation.open:
        statuses |= {problems.PROBLEMS[code][0] for code in WITH_A_KEY}
    responses: dict[str, Any] = {str(operation.success): _success(operation)}
    if operation.later:
        responses["202"] = _success(operation)
    if operation.redirects:
        responses["307"] = _redirect()
    for status in sorted(statuses):
        responses[str(status)] = {"$ref": f"#/components/responses/Problem{status}"}
    return responses


def _redirect() -> dict[str, Any]:
    location = {
        "description": "Where the store serves the body.",
        "schema": {"type": "string", "format": "uri"},
    }
    return {"description": "The body is elsewhere", "headers": {"Location": location}}


def _success(operation: Operation) -> dict[str, Any]:
    response: dict[str, Any] = {
        "description": operation.summary,
        "headers": {
            "X-Request-ID": {
                "description": "The id of this request, in logs too.",
                "schema": {"type": "string"},
            }
        },
    }
    if operation.answer is not None:
        response["content"] = {operation.media_type: {"schema": ref(operation.answer)}}
    elif operation.success == 200 and operation.media_type is not None:
        response["content"] = _bytes(operation.media_type)
    return response


def _bytes(media_type: str) -> dict[str, Any]:
    """Describe a body that is not one of ours; generators of clients read the first type alone."""
    if media_type != "*/*":
        return {media_type: {}}
    return {ANY_BYTES: {"schema": {"type": "string", "format": "binary"}}, media_type: {}}


def _statuses() -> list[int]:
    return sorted({status for status, _ in problems.PROBLEMS.values()} | {422})


def _problem(status: int) -> dict[str, Any]:
    codes = [code.value for code, (known, _) in problems.PROBLEMS.items() if known == status]
    description = (
        f"A problem with the code {' or '.join(codes)}."
        if codes
        else "The task failed: its own problem."
    )
    return {
        "description": description,
        "content": {problems.MEDIA_TYPE: {"schema": ref("Problem")}},
    }
