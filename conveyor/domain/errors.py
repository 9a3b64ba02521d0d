"""The error taxonomy: one exception, one enumeration of stable codes.

A code is part of the wire contract and never changes its meaning. How a code maps to an HTTP status
is the business of `conveyor.http.problems` alone.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class ErrorCode(StrEnum):
    """Every `code` that a problem document of ours may carry."""

    INVALID_ARGUMENT = "invalid_argument"
    """The request breaks a rule; the detail names the field."""
    NOT_FOUND = "not_found"
    """Does not exist, or belongs to somebody else."""
    CONFLICT = "conflict"
    """The present state forbids it."""
    UNAUTHENTICATED = "unauthenticated"
    """The key is missing, unknown here, or one that no header can hold."""
    SUBSCRIPTION_INACTIVE = "subscription_inactive"
    """An account's subscription is not active. Reserved: only problems of tasks carry it."""
    PAYMENT_REQUIRED = "payment_required"
    """An account is out of credits. Reserved: only problems of tasks carry it."""
    API_KEY_CAP_REACHED = "api_key_cap_reached"
    """An API key has used up its cap. Reserved: only problems of tasks carry it."""
    PERMISSION_DENIED = "permission_denied"
    """A foreign Host or Origin; a signed link that is forged, expired or for another type."""
    QUOTA_EXCEEDED = "quota_exceeded"
    """A limit on tasks or jobs; trying again does not help."""
    INTERNAL = "internal"
    """A fault of ours; its text never leaves the server."""
    NOT_IMPLEMENTED = "not_implemented"
    """A route that is reserved, or a field of a submit that is."""
    JOB_NOT_OPEN = "job_not_open"
    """Tasks for a job that is closed."""
    RUN_NOT_TERMINAL = "run_not_terminal"
    """A rerun while the run has not ended; an add or rerun while its rows are being written."""
    RUN_NOT_STOPPABLE = "run_not_stoppable"
    """Stop on a run that ended otherwise."""
    NO_PRIOR_RUN = "no_prior_run"
    """Every run of the job was deleted."""
    NO_MATCHING_TASKS = "no_matching_tasks"
    """A partial rerun whose filter matches nothing; of a large job, for `pending` or `processing`
    alone, where no task is either."""
    RUN_HAS_DESCENDANTS = "run_has_descendants"
    """Another run draws bodies from this one."""
    LAST_BATCH_RECEIVED = "last_batch_received"
    """Tasks after the last batch."""
    IDEMPOTENCY_KEY_CONFLICT = "idempotency_key_conflict"
    """The key is in use, or was used with another body."""
    TASK_NOT_READY = "task_not_ready"
    """Content of a task that has not ended."""
    PARTIAL_RERUN_WINDOW_EXPIRED = "partial_rerun_window_expired"
    """The source run is too old."""
    RESULT_EXPIRED = "result_expired"
    """Content past its retention."""
    FILE_INPUT_NOT_FOUND = "file_input_not_found"
    """A file input that does not exist, has expired, or belongs to somebody else."""
    FILE_INPUT_NOT_UPLOADED = "file_input_not_uploaded"
    """A file input without a file."""
    FILE_INPUT_UNSUPPORTED_FOR_JOB_TYPE = "file_input_unsupported_for_job_type"
    """A file input for a job that is open or scheduled."""
    METHOD_NOT_ALLOWED = "method_not_allowed"
    """The path takes other methods; `Allow` names them."""
    PAYLOAD_TOO_LARGE = "payload_too_large"
    """A request body or file is too large, unpacks to too much, or would take too long to check."""
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    """Not JSON in UTF-8, or encoded."""
    RATE_LIMITED = "rate_limited"
    """Too many requests; comes with `Retry-After`."""
    UNAVAILABLE = "unavailable"
    """The store did not answer, a check broke off, or the server is starting or stopping."""
    GATEWAY_UNREACHABLE = "gateway_unreachable"
    """No connection could be made. Only problems of tasks carry it."""


class InvalidTaskReason(StrEnum):
    """Why one task of a submit was refused."""

    UNSUPPORTED_SCHEME = "unsupported_scheme"
    """Neither http nor https."""
    MALFORMED_URL = "malformed_url"
    """Not a URL, not text, a control character, a blank at an end; an empty cell of a CSV file."""
    MISSING_HOST = "missing_host"
    """No host, as in `http:///x`."""
    URL_TOO_LONG = "url_too_long"
    """More than 2,048 characters."""
    METADATA_TOO_LARGE = "metadata_too_large"
    """Too many keys, or a value too long."""
    METADATA_KEY_INVALID = "metadata_key_invalid"
    """A key that is empty, too long or has a control character."""
    INVALID_EXTERNAL_ID = "invalid_external_id"
    """Not 1 to 128 of the characters allowed."""
    UNSUPPORTED_METHOD = "unsupported_method"
    """Neither GET nor POST."""
    BODY_NOT_ALLOWED = "body_not_allowed"
    """A body without POST."""
    BODY_TOO_LARGE = "body_too_large"
    """More than 16,384 bytes."""
    BODY_MALFORMED = "body_malformed"
    """A body that cannot be written as JSON or UTF-8."""
    METHOD_PARAM_CONFLICT = "method_param_conflict"
    """POST with `js_render`, `json_response` or `js_instructions`."""
    UNKNOWN_PARAM = "unknown_param"
    """A scraper param that does not exist."""
    INVALID_PARAM_VALUE = "invalid_param_value"
    """A value that its param does not take, or `mode` beside a switch it decides itself."""
    INVALID_ARGUMENT = "invalid_argument"
    """Anything else of the wrong type, or a task too large; a line that is no JSON, a record with
    too few columns."""


class InvalidTask(msgspec.Struct, frozen=True, omit_defaults=True):
    """One refused task: its index in the list sent, why, and the offending value, shortened.

    `line` is the line of a file, from 1, on which its record begins.
    """

    index: int
    reason: InvalidTaskReason
    value: str | None = None
    line: int | None = None


class ConveyorError(Exception):
    """The one exception that crosses rooms: a stable code and a sentence for people.

    `detail` is shown to the caller: it never holds a key, a body or a path of the server.
    `retry_after` is in whole seconds, where trying again later can help.
    """

    def __init__(
        self,
        code: ErrorCode,
        detail: str,
        *,
        invalid_tasks: tuple[InvalidTask, ...] = (),
        retry_after: int | None = None,
    ) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail
        self.invalid_tasks = invalid_tasks
        self.retry_after = retry_after


class CallInFlight(ConveyorError):
    """A task of a run that has ended is still under a claim, so that it cannot be replayed yet."""

    def __init__(self, run_id: str, task_id: str) -> None:
        super().__init__(ErrorCode.RUN_NOT_TERMINAL, "the latest run still has calls under way")
        self.run_id = run_id
        self.task_id = task_id


def not_found(what: str) -> ConveyorError:
    """The answer for what does not exist or belongs to another caller: the two look the same."""
    return ConveyorError(ErrorCode.NOT_FOUND, f"no such {what}")
