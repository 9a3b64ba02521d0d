"""Reads one JSON document from a caller, strictly.

Refuses a document that JSON readers understand differently: duplicate keys, lone surrogates, NaN,
numbers too large for a double, a byte order mark.
"""

from __future__ import annotations

import json
import re
from itertools import accumulate
from typing import NoReturn

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.text_rules import shorten

MAX_DEPTH = 32
MAX_CONTAINERS = 2_000_000
"""Maximum objects and lists in one document, counting brackets within strings: a legal document of
the largest size can hold ten times as many, and reading it would hold up everybody."""
MAX_DIGITS = 308
"""Longer whole numbers may not fit a double."""

_SEARCHED_FOR_POSITION = 65_536
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_NOT_STRUCTURE = bytes(byte for byte in range(256) if byte not in b'[]{}"')
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_STRING_OR_BRACKET = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[{]|[\]}]', re.DOTALL)
_LONE_SURROGATE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)


def decode(body: bytes, *, max_depth: int = MAX_DEPTH) -> object:
    """Decode a UTF-8 JSON document: dict, list, str, int, float, bool or None.

    Raises ConveyorError(invalid_argument) for anything else; the detail names the place, or the
    offending key or number, and never repeats the document at length.
    """
    if body.startswith(_BYTE_ORDER_MARK):
        _refuse("starts with a byte order mark; send plain UTF-8 without one")
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        _refuse(f"is not UTF-8 at byte {error.start + 1}")
    if not text.strip(" \t\r\n"):
        _refuse("is empty")
    if _depth(body) > max_depth:
        _refuse(f"is nested more than {max_depth} levels deep{_where_too_deep(text, max_depth)}")
    if body.count(b"[") + body.count(b"{") > MAX_CONTAINERS:
        _refuse(f"holds more than {MAX_CONTAINERS:,} objects and lists")
    if b"\\u" in body:
        _refuse_lone_surrogates(body)
    try:
        value: object = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        problem = error.msg.removesuffix(" at")
        _refuse(f"is not JSON: {problem} at line {error.lineno} column {error.colno}")
    return value


def _depth(body: bytes) -> int:
    """Return how deep brackets nest outside strings.

    Exact up to the first syntax error. The decoder reads no further than that, so it never nests
    deeper than the result and needs no guard of its own against deep recursion.
    """
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    structure = body.translate(None, _NOT_STRUCTURE).replace(b'""', b"")
    outside_strings = b"".join(structure.split(b'"')[::2])
    return max(accumulate(memoryview(outside_strings.translate(_STEPS)).cast("b")), default=0)


def _where_too_deep(text: str, max_depth: int) -> str:
    """Describe the place where the nesting goes too deep, if it lies near the start: a caller must
    not be able to make the search long."""
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(text, 0, _SEARCHED_FOR_POSITION):
        token = match[0]
        if token in "[{":
            depth += 1
            if depth > max_depth:
                return f" at line {text.count(chr(10), 0, match.start()) + 1} column " + str(
                    match.start() - text.rfind("\n", 0, match.start())
                )
        elif token in "]}":
            depth -= 1
    return ""


def _refuse_lone_surrogates(body: bytes) -> None:
    without_escaped_backslashes = body.replace(b"\\\\", b"__")
    match = _LONE_SURROGATE.search(without_escaped_backslashes)
    if match is not None:
        _refuse(f"holds half of a surrogate pair at byte {match.start() + 1}")


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                _refuse(f'names the key "{shorten(key)}" twice in one object')
            seen.add(key)
    return fields


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        _refuse(f"holds a number that is too large: {shorten(digits, limit=20)}")
    return int(digits)


def _float(digits: str) -> float:
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        _refuse(f"holds a number that is too large: {shorten(digits, limit=20)}")
    return number


def _constant(name: str) -> NoReturn:
    _refuse(f"holds {name}, which is not a JSON number")


def _refuse(problem: str) -> NoReturn:
    raise ConveyorError(ErrorCode.INVALID_ARGUMENT, f"the request body {problem}") from None


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_int=_integer, parse_float=_float, parse_constant=_constant
)
