"""Answers and their header fields: an HTTP client's answer, the fields that a caller asks for in
params, and the few of an answer that are kept."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable, Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Protocol

import msgspec

from conveyor.gateway.problems import invalid_headers


class Headers(Protocol):
    """Header fields, looked up without regard to case."""

    def get(self, name: str, /, default: str) -> str:
        """Return the first field of that name."""
        ...

    def getall(self, name: str, /, default: list[str]) -> list[str]:
        """Return every field of that name, in order."""
        ...

    def values(self) -> Iterable[str]:
        """Return the value of every field."""
        ...


class HttpAnswer(Protocol):
    """An answer whose head has arrived. Its body can be read once, and is not decoded."""

    @property
    def sent(self) -> int:
        """The number of requests that went out for it."""
        ...

    @property
    def status(self) -> int:
        """The HTTP status."""
        ...

    @property
    def headers(self) -> Headers:
        """The header fields."""
        ...

    @property
    def length(self) -> int | None:
        """The length of the body as it arrives, where the head announces it."""
        ...

    def whole(self) -> bytes | None:
        """Return the whole body if it has arrived; else None, and it is to be read."""
        ...

    async def read(self) -> bytes:
        """Return the whole body. Raises TransportError."""
        ...

    def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives, in pieces of at most 256 KiB. Raises TransportError."""
        ...

    def release(self) -> None:
        """Give the connection back, or drop it if the body was not read to its end."""
        ...


MOST_READ = 64
"""Digits of a number of seconds that are read, and characters of a date."""


def retry_after(text: str, *, now: int, cap: float) -> float:
    """Return the seconds to wait by a Retry-After field, from 0 to `cap`; 0 if it is missing or
    invalid. `now` is in milliseconds."""
    return asked_pause(text, now=now, cap=cap) or 0.0


def asked_pause(text: str, *, now: int, cap: float) -> float | None:
    """Return the seconds to wait by a Retry-After field, from 0 to `cap`; None if it is missing or
    invalid.

    The field may hold seconds, with any number of digits, or an HTTP date. `now` is in
    milliseconds.
    """
    text = text.strip()
    if not text.isascii():
        return None
    if text.isdecimal():
        digits = text.lstrip("0")
        return min(float(digits or "0"), cap) if len(digits) <= MOST_READ else cap
    if len(text) > MOST_READ:
        return None
    try:
        moment = parsedate_to_datetime(text)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        seconds = moment.timestamp() - now / 1_000
    except (ValueError, OverflowError):
        return None
    return min(max(seconds, 0.0), cap)


DEFAULT_CONTENT_TYPE = "application/octet-stream"
MAX_CONTENT_TYPE = 512

# These belong to one connection; the HTTP client sets them itself. Accept-Encoding is among them
# because only codings that this process can decode may be accepted.
_OWNED = frozenset(
    {
        "accept-encoding",
        "connection",
        "content-length",
        "expect",
        "host",
        "http2-settings",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[^\x00-\x08\x0a-\x1f\x7f\ud800-\udfff]*")


def custom_headers(params: Mapping[str, str]) -> dict[str, str]:
    """Return the fields of the param `custom_headers` (JSON text of one object), without those of
    the connection.

    Raises ScrapeFailed if they cannot be sent.
    """
    text = params.get("custom_headers")
    if text is None:
        return {}
    try:
        given = msgspec.json.decode(text, type=dict[str, str | int | float | bool])
    except (msgspec.DecodeError, UnicodeError):
        raise invalid_headers() from None
    headers: dict[str, str] = {}
    for name, value in given.items():
        shown = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        if not _NAME.fullmatch(name) or not _VALUE.fullmatch(shown):
            raise invalid_headers()
        if name.lower() not in _OWNED:
            headers[name] = shown
    return headers


def merged(base: Mapping[str, str], over: Mapping[str, str]) -> dict[str, str]:
    """Merge both sets of fields; `over` wins, whatever the case of a name."""
    taken = {name.lower() for name in over}
    return {**without(base, *taken), **over}


def without(headers: Mapping[str, str], *names: str) -> dict[str, str]:
    """Return the fields without those of the given lower-case names."""
    return {name: value for name, value in headers.items() if name.lower() not in names}


def is_allowed(status: int, params: Mapping[str, str]) -> bool:
    """Return whether the param `allowed_status_codes` (a comma list) makes this status a result."""
    listed = params.get("allowed_status_codes")
    return listed is not None and str(status) in {word.strip() for word in listed.split(",")}


def content_type(headers: Headers, *, default: str = DEFAULT_CONTENT_TYPE) -> str:
    """Return the Content-Type of an answer, charset included, cut to MAX_CONTENT_TYPE characters;
    replace bytes that no header may hold by `?`."""
    text = headers.get("Content-Type", "").strip()
    if not text:
        return default
    if not (text.isascii() and text.isprintable()):
        text = "".join(c if c.isascii() and c.isprintable() else "?" for c in text)
    return text[:MAX_CONTENT_TYPE]
