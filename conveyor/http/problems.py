"""Problem documents (RFC 9457): the table from error codes to statuses, and their JSON."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from conveyor.domain.errors import ConveyorError, ErrorCode, InvalidTask
from conveyor.service.responses import PROBLEM_TYPE, encode

MEDIA_TYPE = "application/problem+json"
INSTANCE_PREFIX = "urn:conveyor:request:"

PROBLEMS: dict[ErrorCode, tuple[int, str]] = {
    ErrorCode.INVALID_ARGUMENT: (400, "The request is not valid"),
    ErrorCode.UNAUTHENTICATED: (401, "No valid API key"),
    ErrorCode.SUBSCRIPTION_INACTIVE: (401, "The subscription is not active"),
    ErrorCode.PAYMENT_REQUIRED: (402, "The account is out of credits"),
    ErrorCode.API_KEY_CAP_REACHED: (402, "The API key has reached its cap"),
    ErrorCode.PERMISSION_DENIED: (403, "Not allowed"),
    ErrorCode.NOT_FOUND: (404, "Not found"),
    ErrorCode.FILE_INPUT_NOT_FOUND: (404, "No such file input"),
    ErrorCode.METHOD_NOT_ALLOWED: (405, "The method is not allowed here"),
    ErrorCode.REQUEST_TIMEOUT: (408, "The body of the request stopped coming"),
    ErrorCode.CONFLICT: (409, "Conflict with the present state"),
    ErrorCode.CALLBACK_URL_MUST_BE_HTTPS: (400, "A webhook needs an https URL"),
    ErrorCode.CALLBACK_URL_UNRESOLVABLE: (400, "The host of the webhook cannot be used"),
    ErrorCode.WEBHOOK_SIGNING_REQUIRES_ACTIVE_KEY: (400, "There is no active signing key"),
    ErrorCode.JOB_NOT_OPEN: (409, "The job is not open"),
    ErrorCode.LAST_BATCH_RECEIVED: (409, "The last batch has been received"),
    ErrorCode.RUN_NOT_TERMINAL: (409, "The run has not ended"),
    ErrorCode.RUN_NOT_STOPPABLE: (409, "The run cannot be stopped"),
    ErrorCode.NO_PRIOR_RUN: (409, "There is no run to act on"),
    ErrorCode.NO_MATCHING_TASKS: (409, "No task matches"),
    ErrorCode.RUN_HAS_DESCENDANTS: (409, "A newer run draws on this one"),
    ErrorCode.FILE_INPUT_NOT_UPLOADED: (409, "Nothing has been uploaded"),
    ErrorCode.FILE_INPUT_UNSUPPORTED_FOR_JOB_TYPE: (409, "Such a job takes no file"),
    ErrorCode.IDEMPOTENCY_KEY_CONFLICT: (409, "The idempotency key is taken"),
    ErrorCode.TASK_NOT_READY: (409, "The task has not ended"),
    ErrorCode.PARTIAL_RERUN_WINDOW_EXPIRED: (409, "Too late for a partial rerun"),
    ErrorCode.CANDIDATE_PENDING: (409, "A rotation is under way"),
    ErrorCode.NO_CANDIDATE: (409, "No rotation is under way"),
    ErrorCode.RESULT_EXPIRED: (410, "The result has expired"),
    ErrorCode.PAYLOAD_TOO_LARGE: (413, "The request body is too large"),
    ErrorCode.UNSUPPORTED_MEDIA_TYPE: (415, "Unsupported media type"),
    ErrorCode.QUOTA_EXCEEDED: (429, "A quota is used up"),
    ErrorCode.RATE_LIMITED: (429, "Too many requests"),
    ErrorCode.INTERNAL: (500, "Internal error"),
    ErrorCode.GATEWAY_UNREACHABLE: (502, "The scraping engine could not be reached"),
    ErrorCode.UNAVAILABLE: (503, "Temporarily unavailable"),
}


class ProblemDocument(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error as JSON; `instance` names the failed request."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    instance: str
    invalid_tasks: tuple[InvalidTask, ...] = ()


def problem_response(error: ConveyorError, *, request_id: str) -> Response:
    """Turn an error into its answer."""
    status, title = PROBLEMS[error.code]
    document = ProblemDocument(
        type=PROBLEM_TYPE + error.code.value,
        title=title,
        status=status,
        detail=error.detail,
        code=error.code.value,
        instance=INSTANCE_PREFIX + request_id,
        invalid_tasks=error.invalid_tasks,
    )
    headers = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    if error.code in (ErrorCode.PAYLOAD_TOO_LARGE, ErrorCode.REQUEST_TIMEOUT):
        # The rest of the body will not be read, so the connection cannot be reused.
        headers["Connection"] = "close"
    return Response(encode(document), status_code=status, headers=headers, media_type=MEDIA_TYPE)
