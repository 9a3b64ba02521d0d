"""Query parameters: each at most once, each checked. Unknown ones are ignored."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NoReturn

from starlette.datastructures import QueryParams

from conveyor.domain.errors import ConveyorError, ErrorCode

_WHOLE_NUMBER = re.compile(r"[0-9]{1,6}")


def text(query: QueryParams, name: str) -> str | None:
    """A parameter as it stands, None where it is absent."""
    values = query.getlist(name)
    if len(values) > 1:
        _refuse(name, "may be given once")
    return values[0] if values else None


def word(query: QueryParams, name: str, words: Collection[str]) -> str | None:
    """One of the words, None where the parameter is absent."""
    value = text(query, name)
    if value is not None and value not in words:
        _refuse(name, f"must be one of {', '.join(words)}")
    return value


def page_size(query: QueryParams, *, default: int, most: int) -> int:
    """The `limit` of a page, from 1 to `most`."""
    value = text(query, "limit")
    if value is None:
        return default
    if not _WHOLE_NUMBER.fullmatch(value) or not 1 <= int(value) <= most:
        _refuse("limit", f"must be a whole number from 1 to {most}")
    return int(value)


def _refuse(name: str, problem: str) -> NoReturn:
    raise ConveyorError(ErrorCode.INVALID_ARGUMENT, f"{name}: {problem}")
