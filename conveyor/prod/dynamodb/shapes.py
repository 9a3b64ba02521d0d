"""Rows that processes of several versions share, and rows that are not what they should be.

**Within one shape** attributes, and fields of JSON texts, are only ever added, with a default: a
row that lacks one is read with the default, and who rewrites a row leaves alone what it does not
know. So rows are changed by updates that name what they set, and JSON texts by `rewritten`.

**A row of a higher shape** means something else. It is neither interpreted nor written here:
`Table` refuses it with `NewerShape` wherever it meets one, and lets no write pass over it. Lists of
many things leave it out, so that all others are still found.

**A damaged row**, of a shape that is known, lacks something or holds something else than it should.
What reads rows is marked `whole`: it raises `Damaged` then, and the log is told which row it is.
Lists leave it out like one of a higher shape, by `readable`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import msgspec

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.prod.dynamodb.table import PARTITION_KEY, ROW_SHAPE, SORT_KEY

SHAPE = "shape"
"""The attribute that holds an item's shape."""
KNOWN = "NOT shape > :known_shape"
"""The condition that an item is absent, or of a shape that this version knows."""
RETRY_AFTER = 5
"""Seconds until a caller may come to a process that knows the row."""

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger("conveyor.records")
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encode = msgspec.json.encode


class Unfit(ConveyorError):
    """A row that this process neither interprets nor writes."""


class Damaged(Unfit):
    """A row is not what this version, or one before it, wrote."""

    def __init__(self) -> None:
        super().__init__(
            ErrorCode.INTERNAL, "a record of the server is damaged; its operator has to look at it"
        )


class NewerShape(Unfit):
    """A row was written by a later version, in a shape that this one does not know."""

    def __init__(self) -> None:
        super().__init__(
            ErrorCode.UNAVAILABLE,
            "a record was written by a later version of the server; ask again",
            retry_after=RETRY_AFTER,
        )


def is_newer(item: Mapping[str, Any]) -> bool:
    """Whether an untagged item is of a shape that this version does not know."""
    shape = item.get(SHAPE, ROW_SHAPE)
    return not isinstance(shape, int) or shape > ROW_SHAPE


def refuse_newer(item: Mapping[str, Any]) -> None:
    """Raise NewerShape where this version does not know an untagged item."""
    if is_newer(item):
        raise NewerShape


def known(items: list[dict[str, Any]], *, known_only: bool) -> list[dict[str, Any]]:
    """Items of shapes that this version knows, with `known_only`; else all, or NewerShape."""
    if not any(map(is_newer, items)):
        return items
    if not known_only:
        raise NewerShape
    return [item for item in items if not is_newer(item)]


def whole(read: Callable[P, T]) -> Callable[P, T]:
    """Marks what makes a record of an untagged item, one of its arguments: it raises Damaged, and
    says so in the log, where that cannot be done."""

    @wraps(read)
    def checked(*args: P.args, **named: P.kwargs) -> T:
        try:
            return read(*args, **named)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            item = next(one for one in args if isinstance(one, dict))
            _tell_damaged(item, error)
            raise Damaged from error

    return checked


def _tell_damaged(item: dict[str, Any], error: Exception) -> None:
    # What the row holds is nobody's business in a log.
    reason = f"no {error.args[0]}" if isinstance(error, KeyError) else type(error).__name__
    where = f"{item.get(PARTITION_KEY)} {item.get(SORT_KEY)}"
    _log.error("a row is damaged: %s: %s", where, reason)


def readable(read: Callable[[dict[str, Any]], T], items: Iterable[dict[str, Any]]) -> list[T]:
    """The records of items, in order, by what is marked `whole`; without the damaged ones."""
    found: list[T] = []
    for item in items:
        try:
            found.append(read(item))
        except Damaged:
            continue
    return found


def rewritten(text: str, record: msgspec.Struct) -> str:
    """The JSON text of a record that was read from `text` and has changed since. Fields of `text`
    that this version does not know stay as they are; "" is the text of a new record."""
    return _encode(_merged(text.encode(), record) if text else record).decode()


def _merged(text: bytes, record: msgspec.Struct) -> dict[str, Any]:
    old, new = _fields.decode(text), _fields.decode(_encode(record))
    merged: dict[str, Any] = {**new}
    for field, name in zip(record.__struct_fields__, record.__struct_encode_fields__, strict=True):
        value, before = getattr(record, field), bytes(old.pop(name, b""))
        if isinstance(value, msgspec.Struct) and before.startswith(b"{"):
            merged[name] = _merged(before, value)
    return {**merged, **old}
