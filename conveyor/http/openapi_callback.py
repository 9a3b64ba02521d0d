"""What our OpenAPI document says of callbacks."""

from __future__ import annotations

from conveyor.domain.submission import MAX_TASK_TOKEN
from conveyor.http.openapi_schemas import Schema

SCHEMAS: dict[str, Schema] = {
    "Callback": {
        "type": "object",
        "description": "A state machine of Step Functions that waits for the end of the first run.",
        "required": ["task_token"],
        "properties": {
            "task_token": {
                "type": "string",
                "minLength": 1,
                "maxLength": MAX_TASK_TOKEN,
                "pattern": "^[!-~]+$",
                "description": "What it waits with. Whoever holds it can end that step.",
            },
        },
    },
}
