"""Parses the documents that create a job or add tasks to one, and checks them as a whole.

Each task is checked and brought into its stored form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

import msgspec

from conveyor.domain import params, text_rules, urls
from conveyor.domain.errors import ConveyorError, ErrorCode, InvalidTask, InvalidTaskReason
from conveyor.domain.hosts import LEAST_RATE, MOST_LIMIT, MOST_RATE, Politeness, is_rate
from conveyor.domain.model import Callback, Format, TaskBody, TaskSpec
from conveyor.domain.remarks import (
    ADD_FIELDS,
    JOB_FIELDS,
    MAX_LISTED,
    MAX_NAME_SHOWN,
    SCHEDULE_FIELDS,
    WEBHOOK_FIELDS,
    Remarks,
    UnknownFields,
)
from conveyor.domain.schedule import Schedule, parse_schedule
from conveyor.domain.scheduling import Overlap, parse_overlap
from conveyor.domain.text_rules import Refused
from conveyor.domain.webhooks import Webhook, parse_webhook

MAX_BODY_BYTES = 16_384
MAX_ROW_BYTES = 131_072


def parse_task(raw: object, index: int, job_params: Mapping[str, str]) -> TaskSpec | InvalidTask:
    """Parse the task at `index` of a list, or return the first reason to refuse it.

    Unknown fields are ignored and null counts as absent, so that newer clients can send tasks to
    older servers. `job_params` are the job's params, normalized.
    """
    try:
        return _spec(raw, job_params)
    except Refused as refused:
        return InvalidTask(index, refused.reason, refused.value, detail=refused.detail)


def _spec(raw: object, job_params: Mapping[str, str]) -> TaskSpec:
    if not isinstance(raw, dict):
        shown = text_rules.quoted(raw)
        raise Refused(InvalidTaskReason.MALFORMED_URL, shown, "a task must be an object")
    url = _url(raw)
    if len(raw) == 1:
        return TaskSpec(url)
    external_id = raw.get("external_id")
    if external_id is not None and not text_rules.is_external_id(external_id):
        raise Refused(InvalidTaskReason.INVALID_EXTERNAL_ID, text_rules.quoted(external_id))
    own_params = params.normalize(raw.get("zenrows_params")) or None
    if own_params is not None:
        params.check_combination(params.merge(job_params, own_params))
    method = _method(raw.get("method"))
    spec = TaskSpec(
        url,
        external_id,
        text_rules.metadata(raw.get("metadata")),
        method,
        _body(raw.get("body"), method),
        own_params,
    )
    if method == "POST":
        _refuse_post_conflict(params.merge(job_params, own_params))
    _refuse_large(spec)
    return spec


def _url(raw: dict[str, Any]) -> str:
    url = raw.get("url")
    if not isinstance(url, str):
        given = text_rules.quoted(url) if "url" in raw else None
        raise Refused(InvalidTaskReason.MALFORMED_URL, given)
    reason = urls.check(url)
    if reason is not None:
        raise Refused(reason, text_rules.quoted(url))
    return url


def _method(raw: object) -> str:
    if raw is None:
        return "GET"
    method = raw.upper() if isinstance(raw, str) and raw.isascii() else ""
    if method not in ("GET", "POST"):
        raise Refused(InvalidTaskReason.UNSUPPORTED_METHOD, text_rules.quoted(raw))
    return method


def _body(raw: object, method: str) -> TaskBody | None:
    """Return the body to send. A refusal never repeats it."""
    if raw is None:
        return None
    if method != "POST":
        raise Refused(InvalidTaskReason.BODY_NOT_ALLOWED, method)
    try:
        if isinstance(raw, str):
            body = TaskBody(raw, "application/x-www-form-urlencoded")
        else:
            content = json.dumps(raw, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
            body = TaskBody(content, "application/json")
        size = len(body.content.encode())
    except (ValueError, TypeError, RecursionError):
        raise Refused(InvalidTaskReason.BODY_MALFORMED) from None
    if size > MAX_BODY_BYTES:
        raise Refused(InvalidTaskReason.BODY_TOO_LARGE, f"{size} bytes")
    return body


def _refuse_post_conflict(merged: Mapping[str, str]) -> None:
    key = params.conflict_with_post(merged)
    if key is not None:
        raise Refused(InvalidTaskReason.METHOD_PARAM_CONFLICT, key)


def _refuse_large(spec: TaskSpec) -> None:
    if spec.metadata is None and spec.body is None and spec.params is None:
        return
    size = len(msgspec.json.encode(spec))
    if size > MAX_ROW_BYTES:
        raise Refused(
            InvalidTaskReason.METADATA_TOO_LARGE,
            f"a task of {size} bytes",
            f"a task holds at most {MAX_ROW_BYTES} bytes in all",
        )


MAX_NAME = 100
MAX_TASK_TOKEN = 2_048
"""Maximum characters of a task token (Step Functions)."""
_TASK_TOKEN = re.compile(f"[!-~]{{1,{MAX_TASK_TOKEN}}}")


class Limits(msgspec.Struct, frozen=True):
    """Maximum numbers of tasks in one request, and in one open job."""

    max_inline_tasks: int = 100_000
    max_add_tasks: int = 10_000
    max_open_job_tasks: int = 100_000


class JobRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A job to create.

    `schedule` is set on scheduled jobs. `force_async` is the field `async`. `file_input_id` only
    names a file, and whether events may go to the URL of `webhook` is judged elsewhere.
    With `skip_invalid` bad tasks are left out, and the remarks tell of them.
    """

    open: bool
    name: str | None
    external_id: str | None
    metadata: dict[str, str] | None
    params: dict[str, str]
    format: Format
    specs: list[TaskSpec]
    max_inflight: int
    priority: int
    max_attempts: int
    result_ttl_days: int
    force_async: bool
    file_input_id: str | None
    callback: Callback | None
    webhook: Webhook | None
    schedule: Schedule | None = None
    overlap: Overlap = Overlap.SKIP
    politeness: Politeness | None = None
    skip_invalid: bool = False
    remarks: Remarks = Remarks()


class AddRequest(msgspec.Struct, frozen=True):
    """Tasks to add to an open job; `last_batch` closes it."""

    specs: list[TaskSpec]
    last_batch: bool
    remarks: Remarks = Remarks()


def parse_job(document: object, limits: Limits) -> JobRequest:
    """Parse a submit. Unknown fields are remarked on, null counts as absent.

    Raises ConveyorError: invalid_argument, naming the field, or with every bad task listed;
    quota_exceeded for more tasks than an open job may hold; file_input_unsupported_for_job_type.
    """
    fields = _fields(document)
    unknown = UnknownFields()
    unknown.note(fields, JOB_FIELDS, of="a job", where="")
    job_type = _choice(fields, "type", ("regular", "scheduled"))
    is_open = _choice(fields, "status", ("closed", "open")) == "open"
    if is_open and job_type == "scheduled":
        _refuse("status", "a scheduled job cannot be open")
    if is_open and fields.get("file_input_id") is not None:
        raise ConveyorError(
            ErrorCode.FILE_INPUT_UNSUPPORTED_FOR_JOB_TYPE,
            "file_input_id: an open job does not take its tasks from a file",
        )
    schedule, overlap = _scheduling(fields, job_type, unknown)
    job_params = _params(fields)
    skips = _flag(fields, "skip_invalid")
    tasks = _Tasks(_submitted(fields, limits, is_open=is_open), job_params, skips, unknown)
    return JobRequest(
        open=is_open,
        name=_text(fields, "name", MAX_NAME),
        external_id=_external_id(fields),
        metadata=_metadata(fields),
        params=job_params,
        format=params.implied_format(job_params),
        max_inflight=_integer(fields, "max_inflight", (1, 10_000), default=100),
        priority=_integer(fields, "priority", (0, 9), default=5),
        max_attempts=_integer(fields, "max_attempts", (1, 10), default=3),
        result_ttl_days=_integer(fields, "result_ttl_days", (1, 365), default=14),
        force_async=_flag(fields, "async"),
        file_input_id=_text(fields, "file_input_id", 128),
        callback=_callback(fields),
        webhook=_webhook(fields, unknown),
        schedule=schedule,
        overlap=overlap,
        politeness=_politeness(fields),
        skip_invalid=skips,
        specs=tasks.specs(),
        remarks=tasks.remarks(),
    )


def parse_add(document: object, limits: Limits, job_params: Mapping[str, str]) -> AddRequest:
    """Parse tasks to add to a job whose params are `job_params`. Raises as parse_job does."""
    fields = _fields(document)
    tasks = _list(fields, "tasks")
    if not tasks:
        _refuse("tasks", "must hold at least one task")
    if len(tasks) > limits.max_add_tasks:
        _refuse("tasks", f"at most {limits.max_add_tasks} tasks in one add, not {len(tasks)}")
    last_batch = _flag(fields, "last_batch")
    unknown = UnknownFields()
    unknown.note(fields, ADD_FIELDS, of="an addition of tasks", where="")
    checked = _Tasks(tasks, job_params, _flag(fields, "skip_invalid"), unknown)
    return AddRequest(checked.specs(), last_batch, checked.remarks())


def _submitted(fields: dict[str, Any], limits: Limits, *, is_open: bool) -> list[Any]:
    """Return the task list of a submit, after checking every rule on its length and source."""
    tasks = _list(fields, "tasks")
    has_file = fields.get("file_input_id") is not None
    if has_file and tasks:
        _refuse("file_input_id", "send either tasks or file_input_id, not both")
    if not (tasks or is_open or has_file):
        _refuse("tasks", "a closed job needs at least one task")
    if len(tasks) > limits.max_inline_tasks:
        limit = f"at most {limits.max_inline_tasks} tasks in one submit"
        _refuse("tasks", f"{limit}, not {len(tasks)} (CONVEYOR_MAX_INLINE_TASKS)")
    if is_open and len(tasks) > limits.max_open_job_tasks:
        raise ConveyorError(
            ErrorCode.QUOTA_EXCEEDED, f"an open job holds at most {limits.max_open_job_tasks} tasks"
        )
    return tasks


class _Tasks:
    """The tasks of a document: parsed, and remarked on. Bad ones are left out if `skips` is set."""

    def __init__(
        self, raw: list[Any], job_params: Mapping[str, str], skips: bool, unknown: UnknownFields
    ) -> None:
        self._raw = raw
        self._job_params = job_params
        self._skips = skips
        self._unknown = unknown
        self._invalid: list[InvalidTask] = []

    def specs(self) -> list[TaskSpec]:
        """Parse all. Raises ConveyorError(invalid_argument) with the bad ones, if any is bad and
        not to be left out, or none is good."""
        specs: list[TaskSpec] = []
        parse, job_params = parse_task, self._job_params
        for index, raw in enumerate(self._raw):
            spec = parse(raw, index, job_params)
            if isinstance(spec, InvalidTask):
                self._invalid.append(spec)
            else:
                specs.append(spec)
        if self._invalid and not (self._skips and specs):
            raise ConveyorError(
                ErrorCode.INVALID_ARGUMENT,
                f"{len(self._invalid)} of {len(self._raw)} tasks are invalid; nothing was created",
                invalid_tasks=tuple(self._invalid),
            )
        self._unknown.note_tasks(self._raw)
        return specs

    def remarks(self) -> Remarks:
        """Return what is to be said of the tasks, once they were parsed."""
        skipped = tuple(self._invalid[:MAX_LISTED])
        return Remarks(len(self._invalid), skipped, self._unknown.warnings())


def _fields(document: object) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise ConveyorError(ErrorCode.INVALID_ARGUMENT, "the request body must be a JSON object")
    return document


def _choice(fields: dict[str, Any], name: str, words: tuple[str, ...]) -> str:
    """Return the value of a field, one of `words`; the first where the field is absent."""
    value = fields.get(name)
    if value is None:
        return words[0]
    for word in words:
        if value == word:
            return word
    _refuse(name, f"must be {' or '.join(words)}")


def _text(fields: dict[str, Any], name: str, limit: int) -> str | None:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, str):
        _refuse(name, "must be text")
    if len(value) > limit:
        _refuse(name, f"at most {limit} characters")
    return value


def _integer(fields: dict[str, Any], name: str, bounds: tuple[int, int], *, default: int) -> int:
    value = fields.get(name)
    if value is None:
        return default
    low, high = bounds
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        _refuse(name, f"must be a whole number from {low} to {high}")
    return value


def _flag(fields: dict[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        _refuse(name, "must be true or false")
    return value


def _list(fields: dict[str, Any], name: str) -> list[Any]:
    value = fields.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        _refuse(name, "must be an array")
    return value


def _is_present(fields: dict[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, dict):
        _refuse(name, "must be an object")
    return value is not None


def _scheduling(
    fields: dict[str, Any], job_type: str, unknown: UnknownFields
) -> tuple[Schedule | None, Overlap]:
    """Parse the schedule of a scheduled job; a regular one has none."""
    document = fields.get("schedule")
    if job_type == "regular":
        if document is not None:
            unknown.note_ignored("schedule", "the job is regular")
        return None, Overlap.SKIP
    if document is None:
        _refuse("schedule", "a scheduled job needs one")
    if fields.get("callback") is not None:
        _refuse("callback", "a scheduled job has none: a task token is used up by one run")
    schedule = parse_schedule(document)
    unknown.note(document, SCHEDULE_FIELDS, of="a schedule", where="")
    return schedule, parse_overlap(document, usual=Overlap.SKIP)


def _callback(fields: dict[str, Any]) -> Callback | None:
    """Parse the callback. The error never quotes the token."""
    if not _is_present(fields, "callback"):
        return None
    token = fields["callback"].get("task_token")
    if not isinstance(token, str) or not _TASK_TOKEN.fullmatch(token):
        _refuse("callback.task_token", f"must be 1 to {MAX_TASK_TOKEN} visible ASCII characters")
    return Callback(token)


def _webhook(fields: dict[str, Any], unknown: UnknownFields) -> Webhook | None:
    if not _is_present(fields, "webhook"):
        return None
    try:
        webhook = parse_webhook(fields["webhook"])
    except ConveyorError as error:
        raise ConveyorError(error.code, f"webhook.{error.detail}") from None
    unknown.note(fields["webhook"], WEBHOOK_FIELDS, of="a webhook", where="")
    return webhook


def _politeness(fields: dict[str, Any]) -> Politeness | None:
    """Parse the politeness; None if it asks for nothing. A word that nobody knows is refused: who
    misspells a limit would have none."""
    if not _is_present(fields, "politeness"):
        return None
    given = fields["politeness"]
    words = Politeness.__struct_fields__
    for name in given:
        if name not in words:
            shown = text_rules.shorten(name, limit=MAX_NAME_SHOWN)
            _refuse(f"politeness.{shown}", f"no word of it: it has {', '.join(words)}")
    rate = given.get("per_host_rate")
    if rate is not None and (type(rate) not in (int, float) or not rate or not is_rate(rate)):
        _refuse(
            "politeness.per_host_rate", f"must be a number from {LEAST_RATE} to {MOST_RATE:,.0f}"
        )
    try:
        politeness = Politeness(
            per_host=_integer(given, "per_host", (1, MOST_LIMIT), default=0),
            per_host_rate=float(rate or 0),
            robots=_flag(given, "robots"),
        )
    except ConveyorError as error:
        raise ConveyorError(error.code, f"politeness.{error.detail}") from None
    return politeness or None


def _external_id(fields: dict[str, Any]) -> str | None:
    value = fields.get("external_id")
    if value is None:
        return None
    if not isinstance(value, str) or not text_rules.is_external_id(value):
        _refuse("external_id", "must be 1 to 128 of the characters A-Z a-z 0-9 . _ -")
    return value


def _metadata(fields: dict[str, Any]) -> dict[str, str] | None:
    try:
        return text_rules.metadata(fields.get("metadata"))
    except Refused as refused:
        limits = (
            f"at most {text_rules.MAX_METADATA_KEYS} keys of 1 to {text_rules.MAX_METADATA_KEY} "
            f"characters, each with text of at most {text_rules.MAX_METADATA_VALUE}"
        )
        _refuse("metadata", f"{refused.detail or refused.reason} ({refused.value}): {limits}")


def _params(fields: dict[str, Any]) -> dict[str, str]:
    try:
        normalized = params.normalize(fields.get("zenrows_params"))
        params.check_combination(normalized)
    except Refused as refused:
        if refused.value == "zenrows_params":
            _refuse("zenrows_params", f"must be an object of at most {params.MAX_BYTES} bytes")
        known = refused.reason is not InvalidTaskReason.UNKNOWN_PARAM
        problem = "this value is not allowed" if known else "not a known param"
        _refuse(f"zenrows_params.{refused.value}", f"{problem} ({refused.reason})")
    return normalized


def _refuse(field: str, problem: str) -> NoReturn:
    raise ConveyorError(ErrorCode.INVALID_ARGUMENT, f"{field}: {problem}") from None
