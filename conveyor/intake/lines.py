"""Turns the bytes of a file into lines, and lines into tasks.

Unpacks gzip, bounded by the allowed size; decodes UTF-8 in pieces of whole lines; reads a file of
URLs, one a line, or of tasks, one JSON object a line.
"""

from __future__ import annotations

import codecs
import re
import zlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple, NoReturn

from conveyor.domain import strict_json, urls
from conveyor.domain.errors import ConveyorError, ErrorCode, InvalidTask, InvalidTaskReason
from conveyor.domain.listed_urls import (
    AROUND,
    is_alone,
    separated,
    separator_at_all_ends,
    url_of_line,
)
from conveyor.domain.model import TaskSpec
from conveyor.domain.remarks import TASK_FIELDS, UnknownFields
from conveyor.domain.submission import parse_task
from conveyor.domain.text_rules import Refused, shorten
from conveyor.intake.rows import Checked, FileTasks

BLOCK_BYTES = 65_536
"""Maximum bytes to unpack at a time."""

_MAGIC = b"\x1f\x8b"
_GZIP = 16 + zlib.MAX_WBITS


def unpacked(blocks: Iterator[bytes], *, max_bytes: int) -> Iterator[bytes]:
    """Yield the file's content in blocks, unpacked if it is gzip.

    gzip is known by its first two bytes; consecutive members are one file, and zeros may follow the
    last. Raises ConveyorError: payload_too_large beyond `max_bytes` of content, invalid_argument
    for gzip that is cut off or damaged.
    """
    start = b""
    for block in blocks:
        start += block
        if len(start) >= len(_MAGIC):
            break
    packed = start.startswith(_MAGIC)
    whole = _prepend(start, blocks)
    size = 0
    for block in _gunzip(whole) if packed else whole:
        size += len(block)
        if size > max_bytes:
            _refuse_size(max_bytes, packed=packed)
        yield block


def _prepend(start: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    if start:
        yield start
    yield from rest


def _gunzip(blocks: Iterator[bytes]) -> Iterator[bytes]:
    member = zlib.decompressobj(_GZIP)
    begun = False
    try:
        for block in blocks:
            while block:
                if not begun:
                    block = block.lstrip(b"\x00")
                    begun = bool(block)
                content = member.decompress(block, BLOCK_BYTES)
                if content:
                    yield content
                block = member.unconsumed_tail
                if member.eof:
                    block = member.unused_data
                    member = zlib.decompressobj(_GZIP)
                    begun = False
    except zlib.error:
        _refuse("the gzip file is damaged")
    if begun:
        _refuse("the gzip file is cut off: its end is missing")


def _refuse_size(max_bytes: int, *, packed: bool) -> NoReturn:
    verb = "unpacks to" if packed else "holds"
    raise ConveyorError(
        ErrorCode.PAYLOAD_TOO_LARGE,
        f"the file {verb} more than {max_bytes:,} bytes (CONVEYOR_MAX_INPUT_BYTES)",
    )


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
"""The NUL bytes among the first four, for text that begins with ASCII."""


class Piece(NamedTuple):
    """Whole lines of a file, and the number of the first, from 1.

    Lines end with a line feed; only the last of the file may lack it.
    """

    first_line: int
    text: str


def text_pieces(blocks: Iterator[bytes]) -> Iterator[Piece]:
    """Yield the text in pieces of about a block, without its byte order mark.

    Raises ConveyorError(invalid_argument), naming the line, for bytes that are not UTF-8, a NUL
    byte or a line of more than 256 KB; naming the encoding, for a file that begins like UTF-16 or
    UTF-32.
    """
    line = 1
    rest = b""
    for block in _strip_byte_order_mark(blocks):
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


def _strip_byte_order_mark(blocks: Iterator[bytes]) -> Iterator[bytes]:
    start = b""
    for block in blocks:
        start += block
        if len(start) >= _START_BYTES:
            break
    for mark, encoding in _MARKS:
        if start.startswith(mark):
            _refuse_encoding(encoding, has_mark=True)
    nul = tuple(byte == 0 for byte in start[:_START_BYTES])
    if nul in _NUL_PATTERNS:
        _refuse_encoding(_NUL_PATTERNS[nul], has_mark=False)
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
    _refuse(
        f"line {line_number} of the file is not UTF-8: save it as UTF-8, or name its encoding "
        "(--encoding, cp1252 on Windows)"
    )


def _refuse_long(line: int) -> NoReturn:
    _refuse(f"line {line} of the file is longer than {MAX_LINE_BYTES:,} bytes")


def _refuse_encoding(encoding: str, *, has_mark: bool) -> NoReturn:
    name, _, order = encoding.partition(" ")
    end = "" if has_mark else "-le" if "little" in order else "-be"
    option = f"--encoding {name.lower()}{end}"
    _refuse(f"the file is {encoding}: save it as UTF-8, or name its encoding ({option})")


def _refuse(problem: str) -> NoReturn:
    raise ConveyorError(ErrorCode.INVALID_ARGUMENT, problem) from None


def read_urls(pieces: Iterator[Piece], tasks: FileTasks) -> None:
    """Read one URL a line, skipping blank lines and lines that start with #; a blank and # begin a
    note behind a URL.

    Raises ConveyorError as FileTasks does, and where all lines end in the same separator.
    """
    for piece in pieces:
        lines = [line.strip(AROUND) for line in piece.text.split("\n")]
        found = [line for line in lines if line and line[0] != "#"]
        if piece.first_line == 1 and (separator := separator_at_all_ends(found)) is not None:
            _refuse(separated(separator))
        if urls.are_plain(found) and is_alone(found):
            tasks.add(list(map(TaskSpec, found)))
        else:
            _add_one_by_one(lines, piece.first_line, tasks)


def _add_one_by_one(lines: list[str], first_line: int, tasks: FileTasks) -> None:
    checked: list[Checked] = []
    numbers: list[int] = []
    for number, line in enumerate(lines, start=first_line):
        if line and line[0] != "#":
            checked.append(_listed(line, tasks.count + len(checked)))
            numbers.append(number)
    tasks.add_checked(checked, numbers)


def _listed(line: str, index: int) -> Checked:
    try:
        return parse_task({"url": url_of_line(line)}, index, {})
    except Refused as refused:
        return InvalidTask(index, refused.reason, refused.value, detail=refused.detail)


# Nothing here is escaped or named twice, so it is read as the strict reader would.
_SIMPLE_TASK = re.compile(
    r'\{ ?"url" ?: ?"([!#-\[\]-~]+)" ?(?:, ?"external_id" ?: ?"([A-Za-z0-9._-]{1,128})" ?)?\}'
)


def read_jsonl(pieces: Iterator[Piece], job_params: Mapping[str, str], tasks: FileTasks) -> None:
    """Read tasks as a submit takes them, under the job's params; skip blank lines.

    A line that is not JSON is a bad task. Raises ConveyorError as FileTasks does.
    """
    for piece in pieces:
        checked: list[Checked] = []
        numbers: list[int] = []
        for number, raw in enumerate(piece.text.split("\n"), start=piece.first_line):
            line = raw.strip(AROUND)
            if line:
                index = tasks.count + len(checked)
                checked.append(read_task(line, index, job_params, tasks.unknown, number))
                numbers.append(number)
        tasks.add_checked(checked, numbers)


def read_task(
    line: str, index: int, job_params: Mapping[str, str], unknown: UnknownFields, number: int
) -> Checked:
    """Parse the line `number`, of the task at `index` of a file; note the fields unknown to a
    task."""
    simple = _SIMPLE_TASK.fullmatch(line)
    if simple is not None and urls.check(simple[1]) is None:
        return TaskSpec(simple[1], simple[2])
    try:
        document = strict_json.decode(line.encode())
    except ConveyorError as error:
        problem = error.detail.removeprefix("the request body ").replace(
            " line 1 column", " column"
        )
        shown = shorten(problem)
        return InvalidTask(index, InvalidTaskReason.MALFORMED_URL, shown, detail=shown)
    if isinstance(document, dict) and not document.keys() <= TASK_FIELDS:
        unknown.note(document, TASK_FIELDS, of="a task", where=f"on line {number}")
    return parse_task(document, index, job_params)
