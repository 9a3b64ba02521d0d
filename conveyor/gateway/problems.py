"""The verdicts on a scrape: turn answers and failures into ScrapeFailed.

Every sentence here is a constant, so no URL, header or key can reach a problem through this module.
"""

from __future__ import annotations

from http import HTTPStatus

import msgspec

from conveyor.domain.errors import ErrorCode, InvalidTaskReason
from conveyor.domain.model import Problem, TaskFailure, WaitReason
from conveyor.ports.gateway import Absence, Postponed, ScrapeFailed, Shared
from conveyor.wire.errors import TransportError, TransportTrouble

MAX_REDIRECTS = 10
MAX_CODINGS = 3


def transport_failure(trouble: TransportTrouble) -> ScrapeFailed:
    """Return the verdict on an exchange that brought no whole answer."""
    code, title, status, failure, retryable = _TRANSPORT[trouble]
    failed = ScrapeFailed(Problem(code, title, status), failure, retryable=retryable)
    if retryable:
        failed.absence = _BROKEN
    return failed


_BROKEN = Absence()


def unconnected(error: TransportError, absence: Absence | None) -> ScrapeFailed:
    """Return the verdict on an exchange that did not come about: a sign of `absence`, unless this
    process itself could not begin it."""
    failed = transport_failure(error.trouble)
    failed.sent = error.sent
    if error.trouble is TransportTrouble.EXHAUSTED:
        absence = Absence(Shared.PROCESS)
    if failed.retryable:
        failed.absence = absence
    return failed


def target_failure(trouble: TransportTrouble) -> ScrapeFailed:
    """Return the verdict on a direct fetch that brought no whole answer."""
    return of_target(transport_failure(trouble), trouble)


def of_target(failed: ScrapeFailed, trouble: TransportTrouble) -> ScrapeFailed:
    """Give a verdict the code of a direct fetch: there is no gateway that could be unreachable."""
    if trouble in _TARGET_CODES:
        failed.problem = msgspec.structs.replace(failed.problem, code=_TARGET_CODES[trouble])
    return failed


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
    TransportTrouble.UNRESOLVED: (
        ErrorCode.GATEWAY_UNREACHABLE.value,
        "the host name has no address",
        502,
        _GATEWAY_ERROR,
        True,
    ),
    TransportTrouble.UNREACHABLE: (
        ErrorCode.GATEWAY_UNREACHABLE.value,
        "no connection could be made",
        502,
        _GATEWAY_ERROR,
        True,
    ),
    TransportTrouble.EXHAUSTED: (
        ErrorCode.GATEWAY_UNREACHABLE.value,
        "this server has no file descriptor or memory left for a connection",
        503,
        _GATEWAY_ERROR,
        True,
    ),
    TransportTrouble.TLS: (
        ErrorCode.GATEWAY_UNREACHABLE.value,
        "TLS could not be set up, or the certificate is not valid",
        502,
        _GATEWAY_ERROR,
        True,
    ),
    TransportTrouble.NO_COMMON_PROTOCOL: (
        ErrorCode.GATEWAY_UNREACHABLE.value,
        "the server does not speak HTTP/1.1",
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
    TransportTrouble.RAGGED: (
        "ragged_end",
        "closed without close_notify, so the body may be cut off",
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


_TARGET_CODES = {
    TransportTrouble.UNRESOLVED: "host_not_found",
    TransportTrouble.UNREACHABLE: "connection_failed",
    TransportTrouble.TLS: "tls_failed",
    TransportTrouble.NO_COMMON_PROTOCOL: "tls_failed",
}


def target_verdict(status: int, *, retry_after: float) -> ScrapeFailed:
    """Return the verdict on a status, not a success, that a target gave to a direct fetch."""
    failure, retryable = _target_failure(status)
    problem = Problem(failure.value, status_title(status), status)
    after = retry_after if retryable else 0.0
    return ScrapeFailed(problem, failure, retryable=retryable, retry_after=after)


def host_pause(seconds: float) -> Postponed:
    """Return the verdict on a fetch from a host that asked, in another answer, to be left alone."""
    failure = TaskFailure.RATE_LIMITED
    problem = Problem(failure.value, "the host asked for a pause", 429)
    reason = WaitReason.HOST_RETRY_AFTER
    return Postponed(problem, failure, retry_after=seconds, waiting=reason)


def host_delay(seconds: float) -> Postponed:
    """Return the verdict on a call to a host that wants time between calls."""
    failure = TaskFailure.RATE_LIMITED
    problem = Problem(failure.value, "the host asked for a delay between calls", 429)
    return Postponed(problem, failure, retry_after=seconds, waiting=WaitReason.HOST_LIMIT)


def _target_failure(status: int) -> tuple[TaskFailure, bool]:
    if status in (401, 403, 451):
        return TaskFailure.BLOCKED, False
    if status == 429:
        return TaskFailure.RATE_LIMITED, True
    if is_transient(status):
        return transient_failure(status), True
    return TaskFailure.BAD_TARGET, False


def is_transient(status: int) -> bool:
    """Return whether another attempt may do better (429 apart)."""
    return status in (408, 425) or 500 <= status <= 599


def transient_failure(status: int) -> TaskFailure:
    """Return the reason that a transient status has in the roll-up."""
    return TaskFailure.TIMEOUT if status in (408, 504) else TaskFailure.GATEWAY_ERROR


def status_title(status: int) -> str:
    """Return a short name of a status."""
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return f"HTTP status {status}"


def bad_target(code: str, title: str) -> ScrapeFailed:
    """Return a failure of a target that cannot be scraped, and is not worth another try."""
    return ScrapeFailed(Problem(code, title, 422), TaskFailure.BAD_TARGET)


def malformed_url() -> ScrapeFailed:
    """Return the failure of a URL that cannot be requested."""
    failed = transport_failure(TransportTrouble.UNSENDABLE)
    failed.sent = 0
    return failed


def unsupported_scheme() -> ScrapeFailed:
    """Return the failure of a URL, or a redirect, that is not http or https."""
    return bad_target(InvalidTaskReason.UNSUPPORTED_SCHEME.value, "only http and https are fetched")


def impossible_name() -> ScrapeFailed:
    """Return the failure of a host name that DNS cannot hold."""
    return bad_target("impossible_host", "no host can have this name")


def too_many_redirects() -> ScrapeFailed:
    """Return the failure of redirects that do not end."""
    return bad_target("too_many_redirects", f"more than {MAX_REDIRECTS} redirects")


def too_large(max_bytes: int) -> ScrapeFailed:
    """Return the failure of a decoded body over the bound."""
    return bad_target("result_too_large", f"the body is larger than {max_bytes} bytes")


def too_many_codings() -> ScrapeFailed:
    """Return the failure of an answer with too many content codings."""
    return bad_target("too_many_codings", f"more than {MAX_CODINGS} content codings")


def corrupt_body() -> ScrapeFailed:
    """Return the failure of a compressed body that is cut off or damaged."""
    problem = Problem("corrupt_body", "the compressed body is cut off or damaged", 502)
    return ScrapeFailed(problem, TaskFailure.GATEWAY_ERROR, retryable=True)


def invalid_headers() -> ScrapeFailed:
    """Return the failure of `custom_headers` that cannot be sent."""
    code = InvalidTaskReason.INVALID_PARAM_VALUE.value
    problem = Problem(code, "custom_headers cannot be sent", 422)
    failed = ScrapeFailed(problem, TaskFailure.OTHER)
    failed.sent = 0
    return failed
