"""The schemas of our OpenAPI document: what requests hold and what answers look like.

What our OpenAPI document says of callbacks.
"""

from __future__ import annotations

from typing import Any

from conveyor.domain import params, submission, text_rules
from conveyor.domain.errors import ErrorCode, InvalidTaskReason
from conveyor.domain.model import (
    EventKind,
    Format,
    IngestStatus,
    JobStatus,
    RunFailure,
    RunStatus,
    TaskFailure,
    TaskStatus,
)
from conveyor.domain.submission import MAX_BODY_BYTES, MAX_TASK_TOKEN

Schema = dict[str, Any]

ULID_PATTERN = "^[0-7][0-9A-HJKMNP-TV-Z]{25}$"
TASK_ID_PATTERN = "^[0-9A-HJKMNP-TV-Z]{26}$"
EXTERNAL_ID_PATTERN = "^[A-Za-z0-9._-]{1,128}$"


def ref(name: str) -> Schema:
    """A reference to one of SCHEMAS."""
    return {"$ref": f"#/components/schemas/{name}"}


def _text(description: str, **more: Any) -> Schema:
    return {"type": "string", "description": description, **more}


def _count(description: str, **more: Any) -> Schema:
    return {"type": "integer", "minimum": 0, "description": description, **more}


def _between(low: int, high: int, default: int, description: str) -> Schema:
    return {
        "type": "integer",
        "minimum": low,
        "maximum": high,
        "default": default,
        "description": description,
    }


def _words(enumeration: Any, description: str) -> Schema:
    return _text(description, enum=[member.value for member in enumeration])


def _instant(description: str) -> Schema:
    return _text(description, format="date-time")


def _object(required: str, properties: Schema, description: str) -> Schema:
    return {
        "type": "object",
        "description": description,
        "required": required.split(),
        "properties": properties,
    }


def _ulid(description: str) -> Schema:
    return _text(description, pattern=ULID_PATTERN)


_METADATA: Schema = {
    "type": "object",
    "description": "Pairs of the caller's own. They are stored and shown, and sent nowhere.",
    "maxProperties": text_rules.MAX_METADATA_KEYS,
    "propertyNames": {
        "pattern": rf"^[^\x00-\x1f\x7f-\x9f]{{1,{text_rules.MAX_METADATA_KEY}}}$",
    },
    "additionalProperties": {"type": "string", "maxLength": text_rules.MAX_METADATA_VALUE},
}
_EXTERNAL_ID = _text(
    "An id of the caller's own, shown wherever this is shown. Need not be unique.",
    pattern=EXTERNAL_ID_PATTERN,
)
_SCALAR: Schema = {"type": ["string", "number", "boolean"]}
_SWITCH: Schema = {"enum": [True, False, "true", "false"]}
_PARAM_SCHEMAS: dict[str, Schema] = {
    **dict.fromkeys(sorted(params.KNOWN), _SCALAR),
    **dict.fromkeys(sorted(params.SWITCHES), _SWITCH),
    "mode": {"enum": ["auto"], "description": "Chooses rendering and proxy by itself."},
    "response_type": {"enum": ["markdown", "plaintext", "pdf"]},
    "wait": {"type": "integer", "minimum": 0, "maximum": params.MAX_WAIT},
    "custom_headers": {
        "type": ["object", "string"],
        "description": f"Header names and values, at most {params.MAX_HEADERS}, or that as JSON.",
        "maxProperties": params.MAX_HEADERS,
        "additionalProperties": {"type": "string"},
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
}
_TASK: Schema = _object(
    "url",
    {
        "url": _text("Where to go: http or https. Comes back exactly as sent.", maxLength=2_048),
        "external_id": _EXTERNAL_ID,
        "metadata": ref("Metadata"),
        "method": _text(
            "GET or POST, in any case.",
            pattern="^([Gg][Ee][Tt]|[Pp][Oo][Ss][Tt])$",
            default="GET",
        ),
        "body": {
            "description": (
                "What a POST sends, up to "
                f"{MAX_BODY_BYTES} bytes: text goes out verbatim as a form, any other "
                "value as JSON. Never listed again."
            )
        },
        "zenrows_params": ref("Params"),
    },
    "One URL to scrape.",
)
_WHERE_TASKS_COME_FROM: list[Schema] = [
    {"required": ["tasks"], "properties": {"tasks": {"minItems": 1}}},
    {"required": ["status"], "properties": {"status": {"const": "open"}}},
    {"required": ["file_input_id"]},
]
_LISTED_TASKS: Schema = {"type": "array", "items": ref("Task")}

_REQUESTS: dict[str, Schema] = {
    "Metadata": _METADATA,
    "Params": _PARAMS,
    "Task": _TASK,
    "SubmitJob": _object(
        "",
        {
            "type": _text("`scheduled` is reserved.", enum=["regular", "scheduled"]),
            "status": _text(
                "An open job takes further tasks until it is closed.",
                enum=["closed", "open"],
                default="closed",
            ),
            "tasks": {
                **_LISTED_TASKS,
                "description": "At least one, unless the job is open or a file has them.",
            },
            "zenrows_params": ref("Params"),
            "external_id": _EXTERNAL_ID,
            "name": _text("A label for people.", maxLength=submission.MAX_NAME),
            "metadata": ref("Metadata"),
            "max_inflight": _between(1, 10_000, 100, "Most calls in flight at a time."),
            "priority": _between(0, 9, 5, "Two steps up double the job's share of the workers."),
            "max_attempts": _between(1, 10, 3, "Attempts at a task before it fails."),
            "result_ttl_days": _between(1, 365, 14, "Days that result bodies are kept."),
            "callback": ref("Callback"),
            "file_input_id": _ulid("An uploaded file with the tasks of a closed job."),
            "async": {
                "type": "boolean",
                "default": False,
                "description": "Whether the tasks may be written after the answer, which is 202.",
            },
        },
        "A job to create.",
    )
    | {"anyOf": _WHERE_TASKS_COME_FROM},
    "AddTasks": _object(
        "tasks",
        {
            "tasks": {**_LISTED_TASKS, "minItems": 1},
            "last_batch": {
                "type": "boolean",
                "default": False,
                "description": "Closes the job in the same step.",
            },
        },
        "Tasks to add to an open job.",
    ),
}

_RUNS: dict[str, Schema] = {
    "Spend": _object(
        "credits cost",
        {"credits": _count("Whole credits."), "cost": {"type": "number", "minimum": 0}},
        "What was spent, as an indication: no bill is made of it.",
    ),
    "RunStats": _object(
        "total completed successful failed spend",
        {
            "total": _count("Tasks of the run."),
            "completed": _count("Tasks that have ended: `successful` + `failed`."),
            "successful": _count("Tasks that brought back a body."),
            "failed": _count("Tasks that ended without one."),
            "failure_reasons": {
                "type": "object",
                "description": "Failed tasks by reason. Left out while there are none.",
                "propertyNames": {"enum": [reason.value for reason in TaskFailure]},
                "additionalProperties": {"type": "integer", "minimum": 1},
            },
            "spend": ref("Spend"),
        },
        "Counters of a run.",
    ),
    "Run": _object(
        "run_id job_id run_sequence status trigger stats created_at updated_at",
        {
            "run_id": _ulid("The run."),
            "job_id": _ulid("Its job."),
            "run_sequence": {"type": "integer", "minimum": 1, "description": "Counts from 1."},
            "status": _words(
                RunStatus,
                "`pending` is an open job's run with nothing to do; it and `running` may still "
                "change, the others never do (but for deletion).",
            ),
            "trigger": _text("What set the run going.", enum=["manual", "scheduled"]),
            "stats": ref("RunStats"),
            "last_batch_received": {
                "type": "boolean",
                "description": "Told of first runs: whether no further task can come.",
            },
            "pause_state": _text("There while the run is paused.", enum=["paused"]),
            "ingest_status": _words(
                IngestStatus,
                "There where the tasks are written after the answer: `pending` until all are.",
            ),
            "created_at": _instant("When the run was made."),
            "updated_at": _instant("When it last changed."),
            "failure_reason": _words(RunFailure, "Why the whole run failed."),
            "failure_detail": _text("The same in a sentence.", maxLength=500),
        },
        "One execution of a job.",
    ),
    "RunsPage": _object(
        "runs",
        {"runs": {"type": "array", "items": ref("Run")}, "next_cursor": ref("NextCursor")},
        "Runs, newest first.",
    ),
}

_JOBS: dict[str, Schema] = {
    "NextCursor": _text("Send it as `cursor` to go on. Left out on the last page."),
    "Job": _object(
        "job_id type status format zenrows_params max_inflight priority max_attempts "
        "result_ttl_days created_at updated_at",
        {
            "job_id": _ulid("The job."),
            "type": _text("Always `regular`.", enum=["regular"]),
            "status": _words(JobStatus, "`deleted` while the job is being scrubbed."),
            "format": _words(Format, "The form of result bodies, told by the parameters."),
            "zenrows_params": {
                "type": "object",
                "description": "The job's parameters, as text.",
                "additionalProperties": {"type": "string"},
            },
            "external_id": _EXTERNAL_ID,
            "name": _text("The label given at submit."),
            "metadata": ref("Metadata"),
            "max_inflight": _count("As submitted."),
            "priority": _count("As submitted."),
            "max_attempts": _count("As submitted."),
            "result_ttl_days": _count("As submitted."),
            "callback": ref("Callback"),
            "latest_run": ref("Run"),
            "created_at": _instant("When the job was submitted."),
            "updated_at": _instant("When it last changed."),
        },
        "A job with its latest run.",
    ),
    "JobsPage": _object(
        "jobs",
        {"jobs": {"type": "array", "items": ref("Job")}, "next_cursor": ref("NextCursor")},
        "Jobs, newest first.",
    ),
    "Submitted": _object(
        "job_id status accepted_tasks",
        {
            "job_id": _ulid("The new job."),
            "status": _words(JobStatus, "Open or closed, as asked."),
            "latest_run": ref("Run"),
            "accepted_tasks": _count("How many tasks were written."),
        },
        "What a submit made.",
    ),
    "TasksAdded": _object(
        "accepted_tasks job_status latest_run",
        {
            "accepted_tasks": _count("How many tasks were written."),
            "job_status": _words(JobStatus, "Closed after a last batch."),
            "latest_run": ref("Run"),
        },
        "What adding tasks did.",
    ),
    "Rerun": _object(
        "job_id status latest_run rerun_of retried_tasks inherited_tasks",
        {
            "job_id": _ulid("The job."),
            "status": _words(JobStatus, "Closed: a rerun closes an open job."),
            "latest_run": ref("Run"),
            "rerun_of": _ulid("The run that was replayed."),
            "retried_tasks": _count("Tasks that start afresh."),
            "inherited_tasks": _count("Tasks taken over with their outcome."),
        },
        "What a rerun made.",
    ),
}

_RESULTS: dict[str, Schema] = {
    "Result": _object(
        "task_id run_id url status created_at updated_at",
        {
            "task_id": _text("The task.", pattern=TASK_ID_PATTERN),
            "external_id": _EXTERNAL_ID,
            "run_id": _ulid("The run that this row stands in."),
            "url": _text("As submitted."),
            "metadata": ref("Metadata"),
            "method": _text("Left out for GET.", enum=["POST"]),
            "status": _text(
                "`expired` is a successful task whose body is past its retention.",
                enum=[*(status.value for status in TaskStatus), "expired"],
            ),
            "type": _words(Format, "The form of the body."),
            "result_url": _text(
                "A signed link to the body, good for a while and without a key.", format="uri"
            ),
            "error": ref("Problem"),
            "source_run_id": _ulid("The run that owns the body of an inherited row."),
            "created_at": _instant("When the row was made."),
            "updated_at": _instant("When it last changed: for an ended task, when it ended."),
        },
        "One task of a run, and what became of it.",
    ),
    "ResultsPage": _object(
        "results",
        {"results": {"type": "array", "items": ref("Result")}, "next_cursor": ref("NextCursor")},
        "Results in submission order. A filtered page may be short, or empty, and still go on.",
    ),
    "Event": _object(
        "started_at ended_at attempt kind spend",
        {
            "started_at": _instant("When it began."),
            "ended_at": _instant("When it ended."),
            "attempt": {"type": "integer", "minimum": 1, "description": "Counts from 1."},
            "kind": _words(
                EventKind,
                "An interruption is a worker that went away; it uses up no attempt.",
            ),
            "error": ref("Problem"),
            "spend": ref("Spend"),
        },
        "One line of a task's history.",
    ),
    "History": _object(
        "events",
        {"events": {"type": "array", "items": ref("Event")}},
        "What happened to a task, oldest line first.",
    ),
    "InvalidTask": _object(
        "index reason",
        {
            "index": _count("The place in the list that was sent, from 0."),
            "reason": _words(InvalidTaskReason, "Why it was refused."),
            "value": _text("What was at fault, shortened and without credentials."),
            "line": _count("The line of an uploaded file on which it begins, from 1."),
        },
        "A task that was refused.",
    ),
    "Problem": _object(
        "type title status code",
        {
            "type": _text("Names the kind of problem.", format="uri"),
            "title": _text("The kind of problem in words."),
            "status": {"type": "integer", "description": "The status of the answer."},
            "detail": _text("What went wrong this time."),
            "code": _text(
                "Stable; decide by it. Problems of tasks may carry codes of the scraping engine. "
                f"Ours: {', '.join(code.value for code in ErrorCode)}."
            ),
            "instance": _text("The request that met the problem."),
            "invalid_tasks": {
                "type": "array",
                "items": ref("InvalidTask"),
                "description": "Every task at fault. Nothing was created.",
            },
        },
        "A problem document (RFC 9457).",
    ),
    "ServerStatus": _object("status", {"status": _text("One word.")}, "How the server is."),
}

SCHEMAS: dict[str, Schema] = {**_REQUESTS, **_JOBS, **_RUNS, **_RESULTS}
"""Every schema, by the name that references use."""


CALLBACK_SCHEMAS: dict[str, Schema] = {
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
