"""The verdicts on a scrape: which answer or failure becomes which ScrapeFailed.

Every sentence here is a constant: no URL, header or key can reach a problem through this module.
"""

from __future__ import annotations

from http import HTTPStatus

from conveyor.domain.errors import ErrorCode, InvalidTaskReason
from conveyor.domain.model import Problem, TaskFailure
from conveyor.gateway.http_client import TransportTrouble
from conveyor.ports.gateway import ScrapeFailed

MAX_REDIRECTS = 10
MAX_CODINGS = 3


def transport_failure(trouble: TransportTrouble) -> ScrapeFailed:
    """The verdict where no whole answer came."""
    code, title, status, failure, retryable = _TRANSPORT[trouble]
    return ScrapeFailed(Problem(code, title, status), failure, retryable=retryable)


_GATEWAY_ERROR = TaskFailure.GATEWAY_ERROR
_TRANSPORT: dict[TransportTrouble, tuple[str, str, int, TaskFailure, bool]] = {
    TransportTrouble.UNSENDABLE: (
        InvalidTaskReason.MALFORMED_URL.value,
        "the URL cannot be sent over HTTP",
        422,
        TaskFailure.BAD_TARGET,
        False,
    ),
    TransportTrouble.REFUSED: (
        "address_refused",
        "the address is not one of the public internet",
        422,
        TaskFailure.BAD_TARGET,
        False,
    ),
    TransportTrouble.UNREACHABLE: (
        ErrorCode.GATEWAY_UNREACHABLE.value,
        "no connection could be made",
        502,
        _GATEWAY_ERROR,
        True,
    ),
    TransportTrouble.INTERRUPTED: (
        "connection_lost",
        "the connection broke before the answer was whole",
        502,
        _GATEWAY_ERROR,
        True,
    ),
    TransportTrouble.TRUNCATED: (
        "truncated_body",
        "the body is shorter than was announced",
        502,
        _GATEWAY_ERROR,
        True,
    ),
    TransportTrouble.MALFORMED: (
        "malformed_answer",
        "the answer is not HTTP",
        502,
        _GATEWAY_ERROR,
        True,
    ),
    TransportTrouble.TIMEOUT: (
        "timeout",
        "no whole answer within the time",
        504,
        TaskFailure.TIMEOUT,
        True,
    ),
}


def target_verdict(status: int, *, retry_after: float) -> ScrapeFailed:
    """The verdict on a status that a target gave to a direct fetch, not being a success."""
    failure, retryable = _target_failure(status)
    problem = Problem(failure.value, status_title(status), status)
    after = retry_after if retryable else 0.0
    return ScrapeFailed(problem, failure, retryable=retryable, retry_after=after)


def _target_failure(status: int) -> tuple[TaskFailure, bool]:
    if status in (401, 403, 451):
        return TaskFailure.BLOCKED, False
    if status == 429:
        return TaskFailure.RATE_LIMITED, True
    if is_transient(status):
        return transient_failure(status), True
    return TaskFailure.BAD_TARGET, False


def is_transient(status: int) -> bool:
    """Whether another attempt may do better (429 apart)."""
    return status in (408, 425) or status >= 500


def transient_failure(status: int) -> TaskFailure:
    """The reason in the roll-up of a transient status."""
    return TaskFailure.TIMEOUT if status in (408, 504) else TaskFailure.GATEWAY_ERROR


def status_title(status: int) -> str:
    """A short name of a status."""
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return f"HTTP status {status}"


def bad_target(code: str, title: str) -> ScrapeFailed:
    """The target cannot be scraped, and trying again is of no use."""
    return ScrapeFailed(Problem(code, title, 422), TaskFailure.BAD_TARGET)


def malformed_url() -> ScrapeFailed:
    """A URL that no request can be made of."""
    return transport_failure(TransportTrouble.UNSENDABLE)


def unsupported_scheme() -> ScrapeFailed:
    """A URL, given or redirected to, that is not http or https."""
    return bad_target(InvalidTaskReason.UNSUPPORTED_SCHEME.value, "only http and https are fetched")


def impossible_name() -> ScrapeFailed:
    """A host name that DNS cannot hold."""
    return bad_target("impossible_host", "no host can have this name")


def too_many_redirects() -> ScrapeFailed:
    """The redirects did not end."""
    return bad_target("too_many_redirects", f"more than {MAX_REDIRECTS} redirects")


def too_large(max_bytes: int) -> ScrapeFailed:
    """The decoded body is over the bound."""
    return bad_target("result_too_large", f"the body is larger than {max_bytes} bytes")


def too_many_codings() -> ScrapeFailed:
    """The answer stacks more content codings than anyone needs."""
    return bad_target("too_many_codings", f"more than {MAX_CODINGS} content codings")


def corrupt_body() -> ScrapeFailed:
    """The compressed body is cut off or damaged."""
    problem = Problem("corrupt_body", "the compressed body is cut off or damaged", 502)
    return ScrapeFailed(problem, TaskFailure.GATEWAY_ERROR, retryable=True)


def invalid_headers() -> ScrapeFailed:
    """`custom_headers` that cannot be sent."""
    code = InvalidTaskReason.INVALID_PARAM_VALUE.value
    problem = Problem(code, "custom_headers cannot be sent", 422)
    return ScrapeFailed(problem, TaskFailure.OTHER)
