"""What can go wrong between the command line and a server.

Why the server refuses a task, in words for people.
"""

from __future__ import annotations

from conveyor.client.output import printable
from conveyor.client.wire import InvalidTaskReply
from conveyor.domain.errors import InvalidTaskReason

_NO_WEB_URL = "not a URL that starts with http:// or https://"

SENTENCES = {
    InvalidTaskReason.UNSUPPORTED_SCHEME: _NO_WEB_URL,
    InvalidTaskReason.MALFORMED_URL: "not a well-formed URL",
    InvalidTaskReason.MISSING_HOST: "a URL without a host",
    InvalidTaskReason.URL_TOO_LONG: "a URL that is too long",
    InvalidTaskReason.METADATA_TOO_LARGE: "too much metadata",
    InvalidTaskReason.METADATA_KEY_INVALID: "not a key that metadata may have",
    InvalidTaskReason.INVALID_EXTERNAL_ID: (
        "not an external id, which is 1 to 128 letters, digits, dots, hyphens and underscores"
    ),
    InvalidTaskReason.UNSUPPORTED_METHOD: "not a method that is offered, which are GET and POST",
    InvalidTaskReason.BODY_NOT_ALLOWED: "a body goes with the method POST only",
    InvalidTaskReason.BODY_TOO_LARGE: "a body that is too large",
    InvalidTaskReason.BODY_MALFORMED: "a body that cannot be written as JSON or UTF-8",
    InvalidTaskReason.METHOD_PARAM_CONFLICT: "not a scraper parameter that goes with POST",
    InvalidTaskReason.UNKNOWN_PARAM: "not a scraper parameter that is known",
    InvalidTaskReason.INVALID_PARAM_VALUE: "a scraper parameter with a value it does not take",
    InvalidTaskReason.INVALID_ARGUMENT: "not as a task may be: a wrong type, or too large",
}


def sentence(bad: InvalidTaskReply) -> str:
    """What is wrong with the value of a refused task; a reason not known here stays a code."""
    if bad.reason == InvalidTaskReason.MALFORMED_URL and not _is_web_url(bad.value or ""):
        return _NO_WEB_URL
    known = bad.reason in frozenset(InvalidTaskReason)
    return SENTENCES[InvalidTaskReason(bad.reason)] if known else printable(bad.reason)


def _is_web_url(text: str) -> bool:
    return text.lower().startswith(("http://", "https://"))


class ClientError(Exception):
    """A sentence for the person at the terminal; never holds a key."""


class ServerUnreachable(ClientError):
    """No connection, or one that broke before the answer."""


class ServerRefused(ClientError):
    """A problem document: the stable `code`, the HTTP status, and the tasks refused, if any."""

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
    """Tasks that the server refused: one line each, naming where the task came from."""

    def __init__(self, message: str, lines: list[str]) -> None:
        super().__init__(message)
        self.lines = lines
