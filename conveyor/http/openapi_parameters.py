"""The parameters of our OpenAPI document: ids, filters, cursors, the idempotency key."""

from __future__ import annotations

from conveyor.domain.model import JobStatus
from conveyor.http.openapi_schemas import TASK_ID_PATTERN, ULID_PATTERN, Schema
from conveyor.service import listing, results


def _query(name: str, description: str, schema: Schema, *, required: bool = False) -> Schema:
    return {
        "name": name,
        "in": "query",
        "required": required,
        "description": description,
        "schema": schema,
    }


def _in_path(name: str, description: str, pattern: str) -> Schema:
    return {
        "name": name,
        "in": "path",
        "required": True,
        "description": description,
        "schema": {"type": "string", "pattern": pattern},
    }


def _page_size(default: int, most: int) -> Schema:
    schema = {"type": "integer", "minimum": 1, "maximum": most, "default": default}
    return _query("limit", "Most entries on a page.", schema)


_STATES = "(pending|processing|failed|successful)"

PARAMETERS: dict[str, Schema] = {
    "job_id": _in_path("job_id", "A job.", ULID_PATTERN),
    "run_id": _in_path("run_id", "A run.", ULID_PATTERN),
    "export_id": _in_path("export_id", "An export.", ULID_PATTERN),
    "task_id": _in_path("task_id", "A task.", TASK_ID_PATTERN),
    "Cursor": _query(
        "cursor", "Where to go on: the `next_cursor` of the page before.", {"type": "string"}
    ),
    "Limit": _page_size(listing.DEFAULT_PAGE, listing.MAX_PAGE),
    "ResultLimit": _page_size(results.DEFAULT_PAGE, results.MAX_PAGE),
    "JobStatus": _query(
        "status",
        "Only jobs in this state. Without it, all that are not deleted.",
        {"type": "string", "enum": [status.value for status in JobStatus]},
    ),
    "JobType": _query(
        "type", "Only jobs of this type.", {"type": "string", "enum": list(listing.JOB_TYPES)}
    ),
    "ResultStatus": _query(
        "status",
        "Only these tasks. `processing` means all that have not ended.",
        {"type": "string", "enum": list(results.FILTERS), "default": "all"},
    ),
    "RerunStatus": _query(
        "status",
        "The states of the tasks to redo, as a comma list; the others are inherited. "
        "Without it everything is redone.",
        {"type": "string", "pattern": f"^{_STATES}(,{_STATES})*$"},
    ),
    "Expires": _query(
        "expires",
        "The end of the link, in seconds since the epoch.",
        {"type": "string"},
        required=True,
    ),
    "Signature": _query("signature", "What makes it valid.", {"type": "string"}, required=True),
    "IdempotencyKey": {
        "name": "Idempotency-Key",
        "in": "header",
        "required": False,
        "description": (
            "Makes the request safe to repeat for a day: the same key with the same body gets "
            "the same answer, byte for byte, with `Idempotency-Replayed: true`. While the first "
            "request runs, or with another body, the answer is 409."
        ),
        "schema": {"type": "string", "pattern": "^[\\x21-\\x7e]{1,128}$"},
    },
}
