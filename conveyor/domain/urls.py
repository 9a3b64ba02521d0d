"""The rules for target URLs. They never change the text: a URL goes back exactly as it came.

Clients read it back as pydantic's AnyUrl, so pydantic-core's own parser decides; a few rules are
stricter than it, none is laxer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from conveyor.domain.errors import InvalidTaskReason
from conveyor.domain.text_rules import has_control

MAX_LENGTH = 2_048

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_NO_AUTHORITY = ("/", "\\", "?", "#")
# Names of lower-case ASCII labels, the last of letters only (no number, no punycode, no user),
# which need no parser; then printable ASCII that JSON need not escape.
_PLAIN_URL = (
    # The group is not possessive: early patches of Python 3.11 match such a group wrongly.
    r"https?://(?:(?!xn--)[a-z0-9][a-z0-9-]*+\.)+(?!xn--)[a-z]{2,}+"
    r"(?::(?:[1-5][0-9]{4}|[0-9]{1,4})(?![0-9]))?(?:[/?#][!#-\[\]-~]*+)?"
)
_PLAIN = re.compile(_PLAIN_URL)


_CREDENTIALS = re.compile(r"//[^/?#]*@")
_QUERY = re.compile(r"[?#].*", re.DOTALL)


def without_secrets(url: str) -> str:
    """Return a URL without user, password and query, which may hold keys."""
    return _QUERY.sub("?***", _CREDENTIALS.sub("//***@", url))


def host_of(url: str) -> str:
    """Return the host of a URL in one spelling, as it is looked up; empty if it cannot be read."""
    from pydantic_core import Url

    try:
        return (Url(url).host or "").rstrip(".")
    except ValueError:
        return ""


def check(url: str) -> InvalidTaskReason | None:
    """Return the reason to refuse a URL, or None to accept it.

    Does not check that the host can exist: an impossible one fails when it is fetched.
    """
    if len(url) > MAX_LENGTH:
        return InvalidTaskReason.URL_TOO_LONG
    if _PLAIN.fullmatch(url) is not None:
        return None
    if has_control(url):
        return InvalidTaskReason.MALFORMED_URL
    if not url or url[0].isspace() or url[-1].isspace():
        return InvalidTaskReason.MALFORMED_URL
    scheme = _SCHEME.match(url)
    if scheme is None:
        return InvalidTaskReason.MALFORMED_URL
    if scheme[0].lower() not in ("https:", "http:"):
        return InvalidTaskReason.UNSUPPORTED_SCHEME
    # The parser takes the first word of http:/x, http:x and http:///x for the host.
    start = scheme.end() + 2
    if url[scheme.end() : start] != "//" or url[start : start + 1] in ("", *_NO_AUTHORITY):
        return InvalidTaskReason.MISSING_HOST
    return _parse(url)


def are_plain(urls: Sequence[str]) -> bool:
    """Return whether all URLs have the usual simple form, which `check` accepts.

    A quick check of many at once; False says nothing about any one of them.
    """
    return all(map(_PLAIN.fullmatch, urls)) and max(map(len, urls), default=0) <= MAX_LENGTH


def _parse(url: str) -> InvalidTaskReason | None:
    # Imported only for URLs that need it: the parser takes longer to load than all else here.
    from pydantic_core import Url, ValidationError

    try:
        Url(url)
    except ValidationError as error:
        context = error.errors(include_url=False)[0].get("ctx", {})
        if context.get("error") == "empty host":
            return InvalidTaskReason.MISSING_HOST
        return InvalidTaskReason.MALFORMED_URL
    return None
