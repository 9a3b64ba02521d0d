"""What a caller asked for in params, and the few header fields of an answer that are kept.

The Retry-After header, in both of its forms.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime

import msgspec

from conveyor.gateway.http_client import Headers
from conveyor.gateway.problems import invalid_headers


def retry_after(text: str, *, now: int, cap: float) -> float:
    """Seconds to wait, from 0 to `cap`; 0 where the text is missing or means nothing.

    `now` is in milliseconds; an HTTP date is read against it.
    """
    text = text.strip()
    if not text.isascii() or len(text) > 64:
        return 0.0
    if text.isdecimal():
        return min(float(text), cap)
    try:
        moment = parsedate_to_datetime(text)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        seconds = moment.timestamp() - now / 1_000
    except (ValueError, OverflowError):
        return 0.0
    return min(max(seconds, 0.0), cap)


DEFAULT_CONTENT_TYPE = "application/octet-stream"
MAX_CONTENT_TYPE = 512

# They belong to one connection and are the engine's own. Accept-Encoding is among them because a
# coding that is accepted here must be one that can be decoded here.
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
    """The fields of the param `custom_headers` (JSON text of one object), those of the connection
    left out.

    Raises ScrapeFailed where they cannot be sent.
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
    """Both sets of fields; `over` wins, however a name is written."""
    taken = {name.lower() for name in over}
    return {**without(base, *taken), **over}


def without(headers: Mapping[str, str], *names: str) -> dict[str, str]:
    """The fields, those of the lower-case names left out."""
    return {name: value for name, value in headers.items() if name.lower() not in names}


def is_allowed(status: int, params: Mapping[str, str]) -> bool:
    """Whether the param `allowed_status_codes` (a comma list) makes a result of this status."""
    listed = params.get("allowed_status_codes")
    return listed is not None and str(status) in {word.strip() for word in listed.split(",")}


def content_type(headers: Headers) -> str:
    """The Content-Type of an answer, charset and all; bytes that no header may hold become `?`."""
    text = headers.get("Content-Type", "").strip()
    if not text:
        return DEFAULT_CONTENT_TYPE
    if not (text.isascii() and text.isprintable()):
        text = "".join(c if c.isascii() and c.isprintable() else "?" for c in text)
    return text[:MAX_CONTENT_TYPE]
