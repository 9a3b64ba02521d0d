"""The schemas of the OpenAPI document, for requests and answers.

The schemas of answers are made from the structs in `conveyor.service.schemas`.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from conveyor.domain import hosts, params, schedule, submission, urls
from conveyor.domain.errors import InvalidTaskReason
from conveyor.domain.scheduling import Overlap
from conveyor.domain.submission import MAX_BODY_BYTES
from conveyor.service import schemas
from conveyor.service.responses import STATES
from conveyor.service.schemas import ULID_PATTERN, ExternalId, Metadata

Schema = dict[str, Any]

ANSWERS: dict[str, type[msgspec.Struct]] = {
    "Job": schemas.JobBody,
    "JobsPage": schemas.JobsPage,
    "Submitted": schemas.SubmitBody,
    "TasksAdded": schemas.AddTasksBody,
    "Rerun": schemas.RerunBody,
    "Spend": schemas.SpendBody,
    "RunStats": schemas.StatsBody,
    "ResultShape": schemas.ShapeBody,
    "SizeClass": schemas.SizeClassBody,
    "Outage": schemas.OutageBody,
    "RunWait": schemas.RunWaitBody,
    "Run": schemas.RunBody,
    "RunsPage": schemas.RunsPage,
    "Wait": schemas.WaitBody,
    "Result": schemas.ResultBody,
    "ResultsPage": schemas.ResultsPage,
    "FailureGroup": schemas.FailureGroupBody,
    "Failures": schemas.FailuresBody,
    "RunHost": schemas.HostBody,
    "RunHosts": schemas.HostsBody,
    "Event": schemas.EventBody,
    "History": schemas.HistoryBody,
    "Problem": schemas.ProblemBody,
    "Callback": schemas.CallbackBody,
    "Upload": schemas.UploadBody,
    "JobInput": schemas.JobInputBody,
    "ExportStarted": schemas.StartExportBody,
    "Export": schemas.ExportBody,
    "HMACKeyMeta": schemas.SigningKeyBody,
    "HMACKeyList": schemas.SigningKeysBody,
    "HMACKeyCreated": schemas.NewSigningKeyBody,
    "HMACKeyFinalized": schemas.FinalizedKeyBody,
    "TestWebhookResponse": schemas.WebhookTestBody,
    "WebhookConfig": schemas.WebhookBody,
    "WebhookStatus": schemas.WebhookStatusBody,
    "JobPoliteness": schemas.PolitenessBody,
    "Delivery": schemas.DeliveryBody,
    "DeliveryAttempt": schemas.DeliveryAttemptBody,
    "LoggedDelivery": schemas.LoggedDeliveryBody,
    "DeliveriesPage": schemas.DeliveriesPage,
    "Replayed": schemas.ReplayedBody,
    "DeliveryHeaders": schemas.DeliveryHeadersBody,
    "Fire": schemas.FireBody,
    "SchedulePreview": schemas.SchedulePreviewBody,
    "JobRate": schemas.RateBody,
    "JobCalendar": schemas.CalendarBody,
    "JobCadence": schemas.CadenceBody,
    "WeekDays": schemas.WeekDaysBody,
    "MonthDays": schemas.MonthDaysBody,
    "StoredSchedule": schemas.ScheduleBody,
    "JobSchedule": schemas.JobScheduleBody,
    "FireRecord": schemas.FireRecordBody,
    "FiresPage": schemas.FiresPage,
}
"""Struct of each answer, by the name of its schema in the document."""

_REF = "#/components/schemas/"


def ref(name: str) -> Schema:
    """Build a reference to one of SCHEMAS."""
    return {"$ref": _REF + name}


def nullable(schema: Schema) -> Schema:
    """Build a schema that takes null too, which means that the field is absent."""
    if "$ref" in schema:
        return {"anyOf": [schema, {"type": "null"}]}
    if "enum" in schema:
        return {
            **{name: value for name, value in schema.items() if name != "type"},
            "enum": [*schema["enum"], None],
        }
    return {**schema, "type": [schema["type"], "null"]}


def _any_case(*words: str) -> str:
    """Build a pattern of words in any case; no flag of a pattern can say it."""
    spelled = (
        "".join(f"[{c.upper()}{c}]" if c.isalpha() else re.escape(c) for c in word)
        for word in words
    )
    return f"^({'|'.join(spelled)})$"


def _text(description: str, **more: Any) -> Schema:
    return {"type": "string", "description": description, **more}


def _between(low: int, high: int, default: int, description: str) -> Schema:
    whole = {"minimum": low, "maximum": high, "default": default, "description": description}
    return {"type": ["integer", "null"], **whole}


def _object(required: str, properties: Schema, description: str) -> Schema:
    return {
        "type": "object",
        "description": description,
        "required": required.split(),
        "properties": properties,
    }


def _ulid(description: str) -> Schema:
    return _text(description, pattern=ULID_PATTERN)


_SCALAR: Schema = {"type": ["string", "number", "boolean"]}
_SWITCH: Schema = {
    "anyOf": [
        {"type": "boolean"},
        {"type": "integer", "minimum": 0, "maximum": 1},
        {"type": "string", "pattern": _any_case("true", "false", "1", "0")},
    ]
}
_IS_ON: Schema = {
    "anyOf": [
        {"const": True},
        {"const": 1},
        {"type": "string", "pattern": _any_case("true", "1")},
    ]
}
_PARAM_SCHEMAS: dict[str, Schema] = {
    **dict.fromkeys(sorted(params.KNOWN), _SCALAR),
    **dict.fromkeys(sorted(params.SWITCHES), _SWITCH),
    "mode": {"enum": ["auto"], "description": "Chooses rendering and proxy by itself."},
    "response_type": {"type": "string", "pattern": _any_case(*params.RESPONSE_TYPES)},
    "wait": {
        "anyOf": [
            {"type": "integer", "minimum": 0, "maximum": params.MAX_WAIT},
            {"type": "string", "pattern": r"^([0-2]?[0-9]{1,4}|30000)(\.0)?$"},
        ],
        "description": "Milliseconds.",
    },
    "custom_headers": {
        "anyOf": [
            {
                "type": "object",
                "maxProperties": params.MAX_HEADERS,
                "propertyNames": {"pattern": f"^{params.HEADER_NAME}$"},
                "additionalProperties": {
                    "anyOf": [
                        {"type": "string", "pattern": f"^[^{params.NOT_IN_HEADER}]*$"},
                        {"type": ["number", "boolean"]},
                    ]
                },
            },
            {"type": "string", "minLength": 2, "contentMediaType": "application/json"},
        ],
        "description": f"Header names and values, at most {params.MAX_HEADERS}, or that as JSON.",
    },
}
_PARAMS: Schema = {
    "type": "object",
    "description": (
        "Parameters for the scraping engine, kept as text. Those of a task take the place of "
        "those of its job, key by key."
    ),
    "properties": _PARAM_SCHEMAS,
    "additionalProperties": False,
    "if": {"required": ["mode"]},
    "then": {
        "properties": {"js_render": {"not": _IS_ON}, "premium_proxy": {"not": _IS_ON}},
    },
}
_TASK: Schema = _object(
    "url",
    {
        "url": _text(
            "Where to go: http or https. Comes back exactly as sent.",
            maxLength=urls.MAX_LENGTH,
            pattern=r"^[Hh][Tt][Tt][Pp][Ss]?://[^/?#\\]",
        ),
        "external_id": nullable(msgspec.json.schema(ExternalId)),
        "metadata": nullable(ref("Metadata")),
        "method": nullable(
            _text("GET or POST, in any case.", pattern=_any_case("get", "post"), default="GET")
        ),
        "body": {
            "description": (
                "What a POST sends, up to "
                f"{MAX_BODY_BYTES} bytes: text goes out verbatim as a form, any other "
                "value as JSON. Never listed again."
            )
        },
        "zenrows_params": nullable(ref("Params")),
    },
    "One URL to scrape.",
) | {
    "if": {
        "required": ["method"],
        "properties": {"method": {"type": "string", "pattern": _any_case("post")}},
    },
    "then": {
        "properties": {
            "zenrows_params": {
                "properties": {"js_render": {"not": _IS_ON}, "json_response": {"not": _IS_ON}}
            }
        }
    },
    "else": {"properties": {"body": {"type": "null"}}},
}
# Conditions stand in if, then and else: generators of clients make a class of the rest.
_SOME_TASKS: Schema = {
    "required": ["tasks"],
    "properties": {"tasks": {"type": "array", "minItems": 1}},
}
_FILE_OR_TASKS: Schema = {
    "if": {"required": ["file_input_id"], "properties": {"file_input_id": {"type": "string"}}},
    "then": {"properties": {"tasks": {"maxItems": 0}}},
    "else": _SOME_TASKS,
}
_BY_TYPE: Schema = {
    "if": {"required": ["type"], "properties": {"type": {"const": "scheduled"}}},
    "then": {
        "required": ["schedule"],
        "properties": {
            "schedule": ref("Schedule"),
            "status": {"enum": ["closed", None]},
            "callback": {"type": "null"},
        },
        **_FILE_OR_TASKS,
    },
    "else": {
        "if": {"required": ["status"], "properties": {"status": {"const": "open"}}},
        "then": {"properties": {"file_input_id": {"type": "null"}}},
        "else": _FILE_OR_TASKS,
    },
}
_LISTED_TASKS: Schema = {"type": "array", "items": ref("Task")}

_SKIP_INVALID = nullable(
    {
        "type": "boolean",
        "default": False,
        "description": "Leaves bad tasks out and names them, as long as one is good.",
    }
)

_REQUESTS: dict[str, Schema] = {
    "Metadata": msgspec.json.schema(Metadata),
    "Params": _PARAMS,
    "Task": _TASK,
    "SubmitJob": _object(
        "",
        {
            "type": nullable(
                _text(
                    "A scheduled job makes a run at each fire of its schedule, of the same tasks.",
                    enum=["regular", "scheduled"],
                    default="regular",
                )
            ),
            "schedule": {
                "description": "When a scheduled job fires: see Schedule. Ignored on a regular job."
            },
            "status": nullable(
                _text(
                    "An open job takes further tasks until it is closed.",
                    enum=["closed", "open"],
                    default="closed",
                )
            ),
            "tasks": nullable(
                {
                    **_LISTED_TASKS,
                    "description": "At least one, unless the job is open or a file has them.",
                }
            ),
            "zenrows_params": nullable(ref("Params")),
            "external_id": nullable(msgspec.json.schema(ExternalId)),
            "name": nullable(_text("A label for people.", maxLength=submission.MAX_NAME)),
            "metadata": nullable(ref("Metadata")),
            "max_inflight": _between(1, 10_000, 100, "Most calls in flight at a time."),
            "priority": _between(0, 9, 5, "Two steps up double the job's share of the workers."),
            "max_attempts": _between(1, 10, 3, "Attempts at a task before it fails."),
            "result_ttl_days": _between(1, 365, 14, "Days that result bodies are kept."),
            "callback": nullable(ref("Callback")),
            "webhook": nullable(ref("Webhook")),
            "politeness": nullable(ref("Politeness")),
            "file_input_id": nullable(
                _ulid("An uploaded file with the tasks, unless the job is open.")
            ),
            "async": nullable(
                {
                    "type": "boolean",
                    "default": False,
                    "description": "Whether the tasks may be written after the answer, then 202.",
                }
            ),
            "skip_invalid": _SKIP_INVALID,
        },
        "A job to create.",
    )
    | _BY_TYPE,
    "Politeness": {
        "type": "object",
        "description": "How the calls of the job's caller treat each host, over all its jobs. The "
        "limits of the server hold beside these.",
        "properties": {
            "per_host": nullable(
                {
                    "type": "integer",
                    "minimum": 1,
                    "maximum": hosts.MOST_LIMIT,
                    "description": "Most calls in flight at a host.",
                }
            ),
            "per_host_rate": nullable(
                {
                    "type": "number",
                    "minimum": hosts.LEAST_RATE,
                    "maximum": hosts.MOST_RATE,
                    "description": "Most calls that start at a host in a second.",
                }
            ),
            "robots": nullable(
                {
                    "type": "boolean",
                    "default": False,
                    "description": "Whether robots.txt is heeded; the gateway `direct` alone can.",
                }
            ),
        },
        "additionalProperties": False,
    },
    "Schedule": {
        "type": "object",
        "description": "Exactly one of `at`, `rate` and `calendar`; the first and the last need "
        "`timezone`.",
        "properties": {
            "at": nullable(
                _text(
                    "One fire, at this time of the zone's clock.",
                    pattern=r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}(:\d{2})?$",
                )
            ),
            "rate": nullable(ref("ScheduleRate")),
            "calendar": nullable(ref("ScheduleCalendar")),
            "timezone": nullable(
                _text("A zone of IANA, such as Europe/Berlin.", maxLength=schedule.MOST_ZONE_NAME)
            ),
            "overlap": nullable(
                _text(
                    "What becomes of a fire while a run of the job is live: `skip` it, or let one "
                    "`wait` for the end of that run. A change that does not name it keeps it.",
                    enum=[word.value for word in Overlap],
                )
            ),
        },
    },
    "ScheduleState": _object(
        "schedule_state",
        {
            "schedule_state": _text("Fires of a paused schedule are skipped.", enum=list(STATES)),
        },
        "The state of a schedule.",
    ),
    "ScheduleRate": _object(
        "every unit",
        {
            "every": {"type": "integer", "minimum": 1, "description": "At most 366 days in all."},
            "unit": {"type": "string", "enum": list(schedule.UNITS)},
        },
        "Every so many units, counted in instants from now.",
    ),
    "ScheduleCalendar": _object(
        "times_of_day cadence",
        {
            "times_of_day": {
                "type": "array",
                "minItems": 1,
                "items": {"type": "string", "pattern": "^([01][0-9]|2[0-3]):00$"},
                "description": "Full hours of the zone's clock.",
            },
            "cadence": ref("ScheduleCadence"),
        },
        "Some hours, on some days.",
    ),
    "ScheduleCadence": {
        "type": "object",
        "description": "Exactly one of `daily`, `weekly` and `monthly`.",
        "properties": {
            "daily": {"type": ["object", "null"], "description": "Every day."},
            "weekly": nullable(
                _object(
                    "days",
                    {
                        "days": {
                            "type": "array",
                            "minItems": 1,
                            "items": {"type": "string", "enum": list(schedule.WEEKDAYS)},
                        }
                    },
                    "Days of the week.",
                )
            ),
            "monthly": nullable(
                _object(
                    "days",
                    {
                        "days": {
                            "type": "array",
                            "minItems": 1,
                            "items": {"type": "integer", "minimum": 1, "maximum": 31},
                        }
                    },
                    "Days of the month; a month that lacks one passes it over.",
                )
            ),
        },
    },
    "AddTasks": _object(
        "tasks",
        {
            "tasks": {**_LISTED_TASKS, "minItems": 1},
            "last_batch": nullable(
                {
                    "type": "boolean",
                    "default": False,
                    "description": "Closes the job in the same step.",
                }
            ),
            "skip_invalid": _SKIP_INVALID,
        },
        "Tasks to add to an open job.",
    ),
}


def _answers() -> dict[str, Schema]:
    _, components = msgspec.json.schema_components(ANSWERS.values(), ref_template=_REF + "{name}")
    names = {struct.__name__: name for name, struct in ANSWERS.items()}
    names["InvalidTask"] = "InvalidTask"
    found = {name: _renamed(components[struct.__name__], names) for name, struct in ANSWERS.items()}
    # Only the problem of a whole request names tasks, the problem of a single task does not.
    found["Problem"]["properties"]["invalid_tasks"] = {
        "type": "array",
        "items": ref("InvalidTask"),
        "description": "Every task at fault. Nothing was created.",
    }
    return found


def _renamed(node: Any, names: dict[str, str]) -> Any:
    """Rename structs in references, and drop their names as titles."""
    if isinstance(node, list):
        return [_renamed(item, names) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return ref(names[node["$ref"].removeprefix(_REF)])
    titled = isinstance(node.get("title"), str)
    return {
        key: _renamed(value, names)
        for key, value in node.items()
        if not (titled and key == "title")
    }


_BY_HAND: dict[str, Schema] = {
    "InvalidTask": _object(
        "index reason",
        {
            "index": {
                "type": "integer",
                "minimum": 0,
                "description": "The place in the list that was sent, from 0.",
            },
            "reason": _text(
                "Why it was refused.", enum=[reason.value for reason in InvalidTaskReason]
            ),
            "value": _text("What was at fault, shortened and without credentials."),
            "line": {
                "type": "integer",
                "minimum": 0,
                "description": "The line of an uploaded file on which it begins, from 1.",
            },
            "detail": _text("What is wrong, where the reason does not tell it."),
        },
        "A task that was refused.",
    ),
    "ServerStatus": _object(
        "status",
        {
            "status": _text("One word."),
            "role": _text("`dev` for a development server, whose worker is in the same process."),
            "away": {
                "type": "array",
                "description": "The services that do not answer.",
                "items": {"type": "string"},
            },
        },
        "How the server is.",
    ),
}
"""Answers without a struct in the service."""

SCHEMAS: dict[str, Schema] = {**_REQUESTS, **_answers(), **_BY_HAND}
"""Every schema but those of file inputs, by the name that references use."""
