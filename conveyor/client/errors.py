"""Errors of the client, and sentences for the tasks that a server refuses."""

from __future__ import annotations

from conveyor.client.output import printable
from conveyor.client.wire import InvalidTaskReply
from conveyor.domain.errors import InvalidTaskReason

_NO_WEB_URL = "URL must start with http:// or https://"

SENTENCES = {
    InvalidTaskReason.UNSUPPORTED_SCHEME: _NO_WEB_URL,
    InvalidTaskReason.MALFORMED_URL: "malformed URL",
    InvalidTaskReason.MISSING_HOST: "URL has no host",
    InvalidTaskReason.URL_TOO_LONG: "URL is too long",
    InvalidTaskReason.METADATA_TOO_LARGE: "too much metadata",
    InvalidTaskReason.METADATA_KEY_INVALID: "invalid metadata key",
    InvalidTaskReason.INVALID_EXTERNAL_ID: (
        "external id must be 1 to 128 letters, digits, dots, hyphens and underscores"
    ),
    InvalidTaskReason.UNSUPPORTED_METHOD: "method must be GET or POST",
    InvalidTaskReason.BODY_NOT_ALLOWED: "only POST may have a body",
    InvalidTaskReason.BODY_TOO_LARGE: "body is too large",
    InvalidTaskReason.BODY_MALFORMED: "body cannot be written as JSON or UTF-8",
    InvalidTaskReason.METHOD_PARAM_CONFLICT: "scraper parameter cannot be used with POST",
    InvalidTaskReason.UNKNOWN_PARAM: "unknown scraper parameter",
    InvalidTaskReason.INVALID_PARAM_VALUE: "invalid value of a scraper parameter",
}


def sentence(bad: InvalidTaskReply) -> str:
    """Say what is wrong with a refused task; an unknown reason is shown as its code."""
    if bad.detail:
        return printable(bad.detail)
    if bad.reason == InvalidTaskReason.MALFORMED_URL and not _is_web_url(bad.value or ""):
        return f"{_NO_WEB_URL} (for bare hosts add --scheme https)"
    known = bad.reason in frozenset(InvalidTaskReason)
    return SENTENCES[InvalidTaskReason(bad.reason)] if known else printable(bad.reason)


def _is_web_url(text: str) -> bool:
    return text.lower().startswith(("http://", "https://"))


class ClientError(Exception):
    """A sentence for the user; it never holds a key."""


class ServerUnreachable(ClientError):
    """There is no connection, or it broke before the answer."""


class NoStream(ClientError):
    """The server has no stream for this client: it is older, or too many are open."""


class ServerRefused(ClientError):
    """A problem document: its stable `code`, the HTTP status, and the refused tasks, if any."""

    def __init__(
        self,
        message: str,
        *,
        code: str,
        status: int,
        invalid_tasks: tuple[InvalidTaskReply, ...] = (),
    ) -> None:
        super().__init__(message)
        self.code = code
        self.status = status
        self.invalid_tasks = invalid_tasks


class InvalidTasks(ClientError):
    """Tasks that the server refused: one line each, with the place that the task was read from."""

    def __init__(self, message: str, lines: list[str]) -> None:
        super().__init__(message)
        self.lines = lines
