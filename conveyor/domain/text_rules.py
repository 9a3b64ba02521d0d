"""Rules and forms of text: texts that callers send, texts that are shown to them, and times as RFC
3339 writes them.
"""

from __future__ import annotations

import math
import re
import shlex
import sys
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import Annotated

import msgspec

from conveyor.domain.errors import InvalidTaskReason

MASK = "***"
"""Stands where a secret was taken out."""


def pip_install(package: str) -> str:
    """Return the command that installs a package where this program runs: a `pip` that a shell
    finds may be another environment's."""
    python = sys.executable or ""
    pip = f"{shlex.quote(python)} -m pip" if python and python.isprintable() else "pip"
    return f"{pip} install {shlex.quote(package)}"


def rfc3339(milliseconds: int) -> str:
    """Format milliseconds since the epoch, as 2026-01-31T12:00:00.000Z."""
    seconds, rest = divmod(milliseconds, 1_000)
    return f"{_to_the_second(seconds)}.{rest:03d}Z"


@lru_cache(maxsize=4_096)
def _to_the_second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_Instant = Annotated[datetime, msgspec.Meta(tz=True)]


def parse_rfc3339(text: str) -> int:
    """Return the milliseconds since the epoch of a time with a zone, 0 for one before it. Raises
    ValueError for any other text."""
    moment = msgspec.convert(text, _Instant)
    return max(0, (moment - _EPOCH) // timedelta(milliseconds=1))


_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0, "w": 604_800.0}
_DURATION = re.compile(r"(-?)((?:\d{1,9}(?:\.\d{1,9})?(?:ms|[smhdw]))+)", re.ASCII)
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|[smhdw])", re.ASCII)


def parse_duration(value: object) -> float:
    """Return the seconds of a duration: a number of them, or a text such as 2h or 1d12h. Raises
    ValueError for anything else."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    found = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise ValueError("takes seconds, or a duration such as 90s, 2h or 1d12h")
    seconds = sum(float(count) * _UNITS[unit] for count, unit in _PART.findall(found[2]))
    return -seconds if found[1] else seconds


MAX_SHOWN = 120
MAX_METADATA_KEYS = 20
MAX_METADATA_KEY = 128
MAX_METADATA_VALUE = 1_024

_KEY_INVALID = InvalidTaskReason.METADATA_KEY_INVALID
_EXTERNAL_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_AUTHORITY = re.compile(
    r"([A-Za-z][A-Za-z0-9+.-]*://)"
    r"([^/\\?#\x00-\x20]*@)?"
    r"(?:\[[^\]/\\?#@]*\]|[^/\\?#@:\[\]]*)(?::[0-9]*)?(?=[/\\?#]|\Z)"
)


class Refused(Exception):
    """A value breaks a rule: the stable reason, the part of the value that errors may show, and a
    detail where the reason does not tell what is wrong."""

    def __init__(
        self, reason: InvalidTaskReason, value: str | None = None, detail: str | None = None
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.value = value
        self.detail = detail


def shorten(text: str, *, limit: int = MAX_SHOWN) -> str:
    """Return at most `limit` characters of the text, with unprintable ones escaped."""
    shown = "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text[: limit + 1]
    )
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def quoted(value: object) -> str:
    """Return the form in which an error may repeat a refused JSON value.

    A scalar is shortened, and loses the credentials of a URL; an object or array gives only its
    kind.
    """
    match value:
        case str():
            return shorten(mask_credentials(value))
        case bool():
            return "true" if value else "false"
        case int() | float():
            return shorten(repr(value))
        case None:
            return "null"
        case dict():
            return "object"
        case _:
            return "array"


def mask_credentials(url: str) -> str:
    """Replace the user and password of a URL by `***`.

    Where the text is not a URL of the usual form, everything up to the last `@` goes: a mistyped
    URL may hold a password anywhere.
    """
    if "@" not in url:
        return url
    match = _AUTHORITY.match(url)
    if match is None:
        return "***@" + url.rpartition("@")[2]
    if match[2] is None:
        return url
    return match[1] + "***@" + url[match.end(2) :]


_SECRET_PARAMETERS = re.compile(
    r"""(?P<name>[?&;\#]
        (?: [^=&;\#\s"]*(?:api[_-]?key|token|passw(?:or)?d|secret|signature)
          | (?:[^=&;\#\s"]*[._-])?(?:key|pwd|sig|auth)
        )=)[^&\#\s"]+""",
    re.IGNORECASE | re.VERBOSE,
)


def mask_parameters(text: str) -> str:
    """Replace the values of URL parameters that are named like credentials by `***`."""
    return _SECRET_PARAMETERS.sub(r"\g<name>***", text)


_WITHIN = re.compile(r"((?:/|%2f){2})[^/@\s?#&]*(?:@|%40)", re.IGNORECASE)
"""Credentials of a URL that stands in the path or query of another."""


def logged_url(url: str) -> str:
    """Return the form in which a log may show a URL: short, without credentials."""
    return shorten(mask_parameters(_WITHIN.sub(r"\1***@", mask_credentials(url))))


def has_control(text: str) -> bool:
    """Return whether the text holds a control character, tab and line feed included."""
    return not text.isprintable() and _CONTROL.search(text) is not None


def is_external_id(value: object) -> bool:
    """Return whether the value is 1 to 128 of the characters A-Z a-z 0-9 . _ -"""
    return isinstance(value, str) and _EXTERNAL_ID.fullmatch(value) is not None


def metadata(raw: object) -> dict[str, str] | None:
    """Check a caller's metadata and return it; None if empty or absent.

    Allows at most 20 keys of 1 to 128 characters without control characters; values are text of at
    most 1,024. Raises Refused.
    """
    if raw is None:
        return None
    if not isinstance(raw, dict):
        raise Refused(_KEY_INVALID, "metadata", "metadata must be an object")
    if len(raw) > MAX_METADATA_KEYS:
        raise Refused(InvalidTaskReason.METADATA_TOO_LARGE, f"{len(raw)} keys")
    for key, value in raw.items():
        if not 0 < len(key) <= MAX_METADATA_KEY or has_control(key):
            raise Refused(_KEY_INVALID, shorten(key))
        if not isinstance(value, str):
            shown = shorten(f"metadata.{key}")
            raise Refused(_KEY_INVALID, shown, "a value of metadata must be text")
        if len(value) > MAX_METADATA_VALUE:
            raise Refused(InvalidTaskReason.METADATA_TOO_LARGE, shorten(key))
    return raw or None


def is_retry_after(text: str) -> bool:
    """Return whether a Retry-After field holds whole seconds or an HTTP date."""
    if text.isascii() and text.isdecimal():
        return True
    try:
        parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return False
    return True
