"""Pages about the API: routes, answers, error codes."""

from __future__ import annotations

import json
from typing import Any

from conveyor.domain.errors import ErrorCode, InvalidTaskReason
from conveyor.http.openapi import ANY_OPERATION, WITH_A_KEY, document, operations
from conveyor.http.openapi_operations import Operation
from conveyor.http.problems import PROBLEMS
from reference.markdown import code, page, table
from reference.source import texts_of


def routes() -> str:
    """Return every route with its answers."""
    parameters = document()["components"]["parameters"]
    return page(
        "Routes",
        f"Any route may answer {code(*ANY_OPERATION)}; one that needs a key {code(*WITH_A_KEY)} "
        "too. The last column lists further codes; [error-codes.md](error-codes.md) "
        "explains them, [answers.md](answers.md) the answers. `HEAD` works "
        "wherever `GET` does.",
        table(
            ["Method", "Path", "Does", "Success", "Parameters", "Key", "Refusals"],
            [
                [
                    operation.method.upper(),
                    code(operation.path),
                    f"{operation.summary}. {operation.note}".strip(),
                    _success(operation),
                    code(*(parameters[name]["name"] for name in operation.parameters)),
                    "no" if operation.open else "yes",
                    code(*operation.refusals),
                ]
                for operation in operations()
            ],
        ),
        "## Parameters",
        "Each is taken at most once; unknown ones are ignored. A parameter may have several forms.",
        table(
            ["Parameter", "In", "Takes", "Meaning"],
            [
                [code(one["name"]), one["in"], _takes(one["schema"]), one["description"]]
                for one in parameters.values()
            ],
        ),
    )


def _success(operation: Operation) -> str:
    statuses = [str(operation.success), *(["202"] if operation.later else [])]
    if operation.answer is not None:
        shown = f"[{operation.answer}](answers.md#{operation.answer.lower()})"
    elif operation.success == 200 and operation.media_type is not None:
        shown = code(operation.media_type)
    else:
        shown = "no body"
    return f"{' or '.join(statuses)}: {shown}"


def answers() -> str:
    """Return every document of requests and answers, field by field."""
    blocks = []
    for name, schema in document()["components"]["schemas"].items():
        fields = schema.get("properties")
        blocks += [f"## {name}", schema.get("description", "")]
        if not fields:
            blocks.append(f"Takes {_takes(schema)}." if _takes(schema) else "")
            continue
        required = schema.get("required", [])
        blocks.append(
            table(
                ["Field", "Takes", "Always there", "Meaning"],
                [
                    [
                        code(field),
                        _takes(found),
                        "yes" if field in required else "no",
                        found.get("description", ""),
                    ]
                    for field, found in fields.items()
                ],
            )
        )
    return page(
        "Documents and answers",
        "Requests and answers have these fields, written in this order. A field without a "
        "value is left out, not null.",
        *blocks,
    )


def _takes(schema: dict[str, Any]) -> str:
    """Describe the values of a schema in words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "enum" in schema:
        values = schema["enum"]
        if values == [True, False, "true", "false"]:
            return f"{_values(True)} or {_values(False)}, as boolean or text"
        return _values(*values)
    for several in ("oneOf", "anyOf"):
        if several in schema and "properties" not in schema:
            return " or ".join(filter(None, map(_takes, schema[several])))
    kind = schema.get("type", "")
    kind = " or ".join(kind) if isinstance(kind, list) else kind
    if kind == "array" and "items" in schema:
        return f"array of {_takes(schema['items'])}"
    return ", ".join(filter(None, [kind, schema.get("format", ""), *_bounds(schema)]))


def _bounds(schema: dict[str, Any]) -> list[str]:
    """Return the limits of a schema."""
    found = []
    for least, most, unit in (
        ("minimum", "maximum", ""),
        ("minLength", "maxLength", " characters"),
        ("minItems", "maxItems", " entries"),
        ("minProperties", "maxProperties", " members"),
    ):
        if least in schema and most in schema:
            found.append(f"{schema[least]:,} to {schema[most]:,}{unit}")
        elif most in schema:
            found.append(f"at most {schema[most]:,}{unit}")
        elif least in schema:
            found.append(f"at least {schema[least]:,}{unit}")
    if "default" in schema:
        found.append(f"default {_values(schema['default'])}")
    return found


def _values(*values: object) -> str:
    """Format values as JSON does, texts without quotes."""
    return code(*(one if isinstance(one, str) else json.dumps(one) for one in values))


def error_codes() -> str:
    """Return every error code, and every reason to refuse a task."""
    meanings, reasons = texts_of(ErrorCode), texts_of(InvalidTaskReason)
    return page(
        "Error codes",
        "An error is a problem document (`application/problem+json`) with `code`, `status`, "
        "`title`, a `detail` for people, and `type`: `urn:conveyor:problem:` and the code.",
        table(
            ["Code", "Status", "Title", "Meaning"],
            [
                [code(one), str(status), title, meanings[one.name]]
                for one, (status, title) in PROBLEMS.items()
            ],
        ),
        "## Reasons to refuse a task",
        "In `invalid_tasks`, beside the `index` of the task and its `value`.",
        table(["Reason", "Meaning"], [[code(one), reasons[one.name]] for one in InvalidTaskReason]),
    )
