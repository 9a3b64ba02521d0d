"""The error taxonomy: one exception, one enumeration of stable codes.

A code is part of the wire contract and never changes its meaning. Only `conveyor.http.problems`
maps codes to HTTP statuses.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class ErrorCode(StrEnum):
    """Every `code` that one of our problem documents may carry."""

    INVALID_ARGUMENT = "invalid_argument"
    """The request breaks a rule; the detail names the field."""
    NOT_FOUND = "not_found"
    """It does not exist, or belongs to another caller."""
    CONFLICT = "conflict"
    """The present state forbids the operation."""
    UNAUTHENTICATED = "unauthenticated"
    """The key is missing, unknown here, or cannot stand in a header."""
    SUBSCRIPTION_INACTIVE = "subscription_inactive"
    """An account's subscription is not active. Reserved: only problems of tasks carry it."""
    PAYMENT_REQUIRED = "payment_required"
    """An account is out of credits. Reserved: only problems of tasks carry it."""
    API_KEY_CAP_REACHED = "api_key_cap_reached"
    """An API key has used up its cap. Reserved: only problems of tasks carry it."""
    PERMISSION_DENIED = "permission_denied"
    """The Host or Origin is foreign, or a signed link is forged, expired or for another type."""
    QUOTA_EXCEEDED = "quota_exceeded"
    """The request exceeds a limit on tasks or jobs; trying again does not help, but of a limit a
    day, whose end `Retry-After` tells."""
    INTERNAL = "internal"
    """The server has a fault; its text never leaves the server."""
    JOB_NOT_OPEN = "job_not_open"
    """The job is closed and takes no more tasks."""
    RUN_NOT_TERMINAL = "run_not_terminal"
    """A rerun came while the run had not ended, or an add or rerun while its rows were being
    written."""
    RUN_NOT_STOPPABLE = "run_not_stoppable"
    """The run to stop has ended otherwise."""
    NO_PRIOR_RUN = "no_prior_run"
    """Every run of the job was deleted."""
    NO_MATCHING_TASKS = "no_matching_tasks"
    """The filter of a partial rerun matches no task; for a large job this is checked only for
    `pending` and `processing`."""
    RUN_HAS_DESCENDANTS = "run_has_descendants"
    """A newer run still uses this run's results; delete that run first."""
    LAST_BATCH_RECEIVED = "last_batch_received"
    """The last batch was added; the job takes no more tasks."""
    IDEMPOTENCY_KEY_CONFLICT = "idempotency_key_conflict"
    """The key is in use, or was used with another body."""
    TASK_NOT_READY = "task_not_ready"
    """The task has not ended, so it has no content."""
    PARTIAL_RERUN_WINDOW_EXPIRED = "partial_rerun_window_expired"
    """The run to replay is too old."""
    RESULT_EXPIRED = "result_expired"
    """The content is past its retention, or its bytes are lost."""
    FILE_INPUT_NOT_FOUND = "file_input_not_found"
    """The file input does not exist, has expired, or belongs to another caller."""
    FILE_INPUT_NOT_UPLOADED = "file_input_not_uploaded"
    """No file was uploaded to the file input."""
    FILE_INPUT_UNSUPPORTED_FOR_JOB_TYPE = "file_input_unsupported_for_job_type"
    """An open or scheduled job cannot take its tasks from a file input."""
    CALLBACK_URL_MUST_BE_HTTPS = "callback_url_must_be_https"
    """The URL of a webhook is not an https URL."""
    CALLBACK_URL_UNRESOLVABLE = "callback_url_unresolvable"
    """The host of a webhook has no address, or one that events may not be sent to."""
    WEBHOOK_SIGNING_REQUIRES_ACTIVE_KEY = "webhook_signing_requires_active_key"
    """A signature was asked for, and there is no active signing key."""
    CANDIDATE_PENDING = "candidate_pending"
    """Both signing keys exist; finalize or cancel the rotation first."""
    NO_CANDIDATE = "no_candidate"
    """There is no candidate that could become the active signing key."""
    METHOD_NOT_ALLOWED = "method_not_allowed"
    """The path takes other methods; `Allow` names them."""
    REQUEST_TIMEOUT = "request_timeout"
    """The body of the request stopped coming."""
    PAYLOAD_TOO_LARGE = "payload_too_large"
    """A request body or file is too large, unpacks to too much, or would take too long to check."""
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    """The body is not JSON in UTF-8, or has a content encoding."""
    RATE_LIMITED = "rate_limited"
    """There were too many requests; comes with `Retry-After`."""
    UNAVAILABLE = "unavailable"
    """The store did not answer, a check was interrupted, other requests fill the memory for bodies,
    or the server is starting or stopping."""
    GATEWAY_UNREACHABLE = "gateway_unreachable"
    """The gateway could not be reached. Only problems of tasks carry it."""


class InvalidTaskReason(StrEnum):
    """Reasons for refusing one task of a submit; each is one that the published client names."""

    UNSUPPORTED_SCHEME = "unsupported_scheme"
    """The scheme is neither http nor https."""
    MALFORMED_URL = "malformed_url"
    """It is missing, not text or not a URL, holds a control character, or begins or ends with a
    blank; or the task is not an object, its line not JSON, its record too short."""
    MISSING_HOST = "missing_host"
    """The URL has no host, as `http:///x`."""
    URL_TOO_LONG = "url_too_long"
    """The URL is longer than 2,048 characters."""
    METADATA_TOO_LARGE = "metadata_too_large"
    """The metadata has too many keys, or a value is too long; or the task is too large as a
    whole."""
    METADATA_KEY_INVALID = "metadata_key_invalid"
    """A key is empty, too long, holds a control character or has a value that is not text; or the
    metadata is not an object."""
    INVALID_EXTERNAL_ID = "invalid_external_id"
    """The id is not 1 to 128 of the allowed characters."""
    UNSUPPORTED_METHOD = "unsupported_method"
    """The method is neither GET nor POST."""
    BODY_NOT_ALLOWED = "body_not_allowed"
    """The task has a body, but its method is not POST."""
    BODY_TOO_LARGE = "body_too_large"
    """The body is larger than 16,384 bytes."""
    BODY_MALFORMED = "body_malformed"
    """The body cannot be written as JSON or UTF-8."""
    METHOD_PARAM_CONFLICT = "method_param_conflict"
    """POST is combined with `js_render`, `json_response` or `js_instructions`."""
    UNKNOWN_PARAM = "unknown_param"
    """The scraper param does not exist."""
    INVALID_PARAM_VALUE = "invalid_param_value"
    """The param does not take this value, or `mode` stands beside a switch that it decides; or the
    params are not an object."""


class InvalidTask(msgspec.Struct, frozen=True, omit_defaults=True):
    """One refused task: its index in the list, the reason, and the offending value, shortened.

    `line` is the line of a file, from 1, on which the task's record begins. `detail` says what is
    wrong where the reason does not tell it.
    """

    index: int
    reason: InvalidTaskReason
    value: str | None = None
    line: int | None = None
    detail: str | None = None


class ConveyorError(Exception):
    """The only exception that crosses rooms: a stable code and a sentence for people.

    The caller sees `detail`: it never holds a key, a body or a path of the server. `retry_after` is
    in whole seconds, set where trying again later can help.
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
    """A task of an ended run is still claimed, so the run cannot be replayed yet."""

    def __init__(self, run_id: str, task_id: str) -> None:
        super().__init__(ErrorCode.RUN_NOT_TERMINAL, "the latest run still has calls under way")
        self.run_id = run_id
        self.task_id = task_id


def not_found(what: str) -> ConveyorError:
    """Build the answer for a thing that does not exist or is another caller's: both look the
    same."""
    return ConveyorError(ErrorCode.NOT_FOUND, f"no such {what}")


def candidate_pending() -> ConveyorError:
    """Make the error for a third signing key."""
    return ConveyorError(
        ErrorCode.CANDIDATE_PENDING, "a rotation is under way: finalize it or cancel it first"
    )


def no_candidate() -> ConveyorError:
    """Make the error for a rotation that cannot be finalized."""
    return ConveyorError(
        ErrorCode.NO_CANDIDATE, "no rotation is under way: there is no candidate to promote"
    )
