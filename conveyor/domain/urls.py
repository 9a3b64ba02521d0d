"""Which target URLs are accepted. The text is never changed: a URL goes back exactly as it came.

Clients read it back as pydantic's AnyUrl, so pydantic-core's own parser is the judge; a few rules
are stricter than it, none is laxer.
"""

from __future__ import annotations

import re

from pydantic_core import Url, ValidationError

from conveyor.domain.errors import InvalidTaskReason
from conveyor.domain.text_rules import has_control

MAX_LENGTH = 2_048

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_NO_AUTHORITY = ("/", "\\", "?", "#")


def check(url: str) -> InvalidTaskReason | None:
    """Why a URL is refused, or None where it is accepted.

    Whether a host can exist is not asked: what no resolver can hold fails when it is fetched.
    """
    if len(url) > MAX_LENGTH:
        return InvalidTaskReason.URL_TOO_LONG
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
    return _judge(url)


def _judge(url: str) -> InvalidTaskReason | None:
    try:
        Url(url)
    except ValidationError as error:
        context = error.errors(include_url=False)[0].get("ctx", {})
        if context.get("error") == "empty host":
            return InvalidTaskReason.MISSING_HOST
        return InvalidTaskReason.MALFORMED_URL
    return None
