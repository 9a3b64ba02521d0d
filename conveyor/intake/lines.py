"""Text out of the bytes of a file: UTF-8, in pieces of whole lines."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import NamedTuple, NoReturn

from conveyor.domain.errors import ConveyorError, ErrorCode

MAX_LINE_BYTES = 262_144

_LF = b"\n"
_START_BYTES = 4
_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32 (little-endian)"),
    (codecs.BOM_UTF32_BE, "UTF-32 (big-endian)"),
    (codecs.BOM_UTF16_LE, "UTF-16 (little-endian)"),
    (codecs.BOM_UTF16_BE, "UTF-16 (big-endian)"),
)
_NUL_PATTERNS = {
    (False, True, True, True): "UTF-32 (little-endian)",
    (True, True, True, False): "UTF-32 (big-endian)",
    (False, True, False, True): "UTF-16 (little-endian)",
    (True, False, True, False): "UTF-16 (big-endian)",
}
"""Which of the first four bytes are NUL where the text begins with ASCII."""


class Piece(NamedTuple):
    """Some whole lines of a file, and the number of the first, from 1. Lines end with a line feed;
    only the last of the file may lack it."""

    first_line: int
    text: str


def text_pieces(blocks: Iterator[bytes]) -> Iterator[Piece]:
    """The text in pieces of about a block, without its byte order mark.

    Raises ConveyorError(invalid_argument), naming the line: bytes that are not UTF-8, a NUL byte, a
    line of more than 256 KB; or the encoding, where the file begins like UTF-16 or UTF-32.
    """
    line = 1
    rest = b""
    for block in _without_mark(blocks):
        cut = block.rfind(b"\n") + 1
        if not cut:
            rest += block
            if len(rest) > MAX_LINE_BYTES:
                _refuse_long(line)
            continue
        content = rest + block[:cut] if rest else block[:cut]
        rest = block[cut:]
        yield Piece(line, _decode(content, line))
        line += content.count(b"\n")
    if rest:
        yield Piece(line, _decode(rest, line))


def _without_mark(blocks: Iterator[bytes]) -> Iterator[bytes]:
    start = b""
    for block in blocks:
        start += block
        if len(start) >= _START_BYTES:
            break
    for mark, encoding in _MARKS:
        if start.startswith(mark):
            _refuse_encoding(encoding)
    nul = tuple(byte == 0 for byte in start[:_START_BYTES])
    if nul in _NUL_PATTERNS:
        _refuse_encoding(_NUL_PATTERNS[nul])
    yield start.removeprefix(codecs.BOM_UTF8)
    yield from blocks


def _decode(content: bytes, first_line: int) -> str:
    if len(content) > MAX_LINE_BYTES:
        for number, line in enumerate(content.split(b"\n"), start=first_line):
            if len(line) > MAX_LINE_BYTES:
                _refuse_long(number)
    nul = content.find(b"\0")
    if nul >= 0:
        _refuse(f"line {first_line + content.count(_LF, 0, nul)} of the file holds a NUL byte")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line_number = first_line + content.count(_LF, 0, error.start)
    _refuse(f"line {line_number} of the file is not UTF-8")


def _refuse_long(line: int) -> NoReturn:
    _refuse(f"line {line} of the file is longer than {MAX_LINE_BYTES:,} bytes")


def _refuse_encoding(encoding: str) -> NoReturn:
    _refuse(f"the file is {encoding}: save it as UTF-8")


def _refuse(problem: str) -> NoReturn:
    raise ConveyorError(ErrorCode.INVALID_ARGUMENT, problem) from None
