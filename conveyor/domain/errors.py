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
    NOT_FOUND = "not_found"
    CONFLICT = "conflict"
    UNAUTHENTICATED = "unauthenticated"
    SUBSCRIPTION_INACTIVE = "subscription_inactive"
    PAYMENT_REQUIRED = "payment_required"
    API_KEY_CAP_REACHED = "api_key_cap_reached"
    PERMISSION_DENIED = "permission_denied"
    QUOTA_EXCEEDED = "quota_exceeded"
    INTERNAL = "internal"
    NOT_IMPLEMENTED = "not_implemented"
    JOB_NOT_OPEN = "job_not_open"
    RUN_NOT_TERMINAL = "run_not_terminal"
    RUN_NOT_STOPPABLE = "run_not_stoppable"
    NO_PRIOR_RUN = "no_prior_run"
    NO_MATCHING_TASKS = "no_matching_tasks"
    RUN_HAS_DESCENDANTS = "run_has_descendants"
    LAST_BATCH_RECEIVED = "last_batch_received"
    IDEMPOTENCY_KEY_CONFLICT = "idempotency_key_conflict"
    TASK_NOT_READY = "task_not_ready"
    PARTIAL_RERUN_WINDOW_EXPIRED = "partial_rerun_window_expired"
    RESULT_EXPIRED = "result_expired"
    FILE_INPUT_NOT_FOUND = "file_input_not_found"
    FILE_INPUT_NOT_UPLOADED = "file_input_not_uploaded"
    FILE_INPUT_UNSUPPORTED_FOR_JOB_TYPE = "file_input_unsupported_for_job_type"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    PAYLOAD_TOO_LARGE = "payload_too_large"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    RATE_LIMITED = "rate_limited"
    UNAVAILABLE = "unavailable"
    GATEWAY_UNREACHABLE = "gateway_unreachable"


class InvalidTaskReason(StrEnum):
    """Why one task of a submit was refused."""

    UNSUPPORTED_SCHEME = "unsupported_scheme"
    MALFORMED_URL = "malformed_url"
    MISSING_HOST = "missing_host"
    URL_TOO_LONG = "url_too_long"
    METADATA_TOO_LARGE = "metadata_too_large"
    METADATA_KEY_INVALID = "metadata_key_invalid"
    INVALID_EXTERNAL_ID = "invalid_external_id"
    UNSUPPORTED_METHOD = "unsupported_method"
    BODY_NOT_ALLOWED = "body_not_allowed"
    BODY_TOO_LARGE = "body_too_large"
    BODY_MALFORMED = "body_malformed"
    METHOD_PARAM_CONFLICT = "method_param_conflict"
    UNKNOWN_PARAM = "unknown_param"
    INVALID_PARAM_VALUE = "invalid_param_value"
    INVALID_ARGUMENT = "invalid_argument"


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
