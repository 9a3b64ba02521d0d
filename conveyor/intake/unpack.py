"""The bytes of an uploaded file, unpacked where it is gzip, and never more than allowed."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import NoReturn

from conveyor.domain.errors import ConveyorError, ErrorCode

BLOCK_BYTES = 65_536
"""Most bytes of what is unpacked at a time."""

_MAGIC = b"\x1f\x8b"
_GZIP = 16 + zlib.MAX_WBITS


def unpacked(blocks: Iterator[bytes], *, max_bytes: int) -> Iterator[bytes]:
    """The file's content in blocks. gzip is known by its first two bytes; several members in a row
    are one file, and zeros may follow the last.

    Raises ConveyorError: payload_too_large beyond `max_bytes` of content, invalid_argument for
    gzip that is cut off or damaged.
    """
    start = b""
    for block in blocks:
        start += block
        if len(start) >= len(_MAGIC):
            break
    packed = start.startswith(_MAGIC)
    whole = _rejoined(start, blocks)
    size = 0
    for block in _gunzip(whole) if packed else whole:
        size += len(block)
        if size > max_bytes:
            _refuse_size(max_bytes, packed=packed)
        yield block


def _rejoined(start: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
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


def _refuse(problem: str) -> NoReturn:
    raise ConveyorError(ErrorCode.INVALID_ARGUMENT, problem) from None
