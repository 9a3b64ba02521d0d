"""Read the body of an answer: undo its content codings as it streams, within a bound on its size.

A small body comes in one piece, a larger one in pieces.
"""

from __future__ import annotations

import sys
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol

import brotli

from conveyor.gateway.headers import HttpAnswer
from conveyor.gateway.problems import (
    MAX_CODINGS,
    corrupt_body,
    too_large,
    too_many_codings,
    transport_failure,
)
from conveyor.ports.blobs import Content
from conveyor.ports.gateway import ScrapeFailed
from conveyor.wire.errors import TransportError, TransportTrouble

PIECE = 65_536
MAX_MEMBERS = 4_096
_GZIP, _ZLIB, _RAW = 31, 15, -15
_GZIP_MAGIC = b"\x1f\x8b"
_WINDOW_LOG = 23


class Stage(Protocol):
    """One coding being undone. An empty body is valid in every coding."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield what the bytes decode to, in pieces of about PIECE bytes, made one at a time."""
        ...

    def is_complete(self) -> bool:
        """Return whether the stream has reached its own end."""
        ...


class Decoder:
    """Undo a list of codings, last applied first, and bound each step at `max_bytes`.

    It never holds more than a piece for each step. Raises ScrapeFailed for a damaged body
    (retryable), one over the bound, and one with too many codings (neither is).
    """

    def __init__(self, codings: Sequence[str], max_bytes: int) -> None:
        self._stages = [_STAGES[coding]() for coding in reversed(codings)]
        self._max_bytes = max_bytes
        # A coding can encode nothing at any length, so bound the bytes that arrive, too.
        self._budget = 2 * max_bytes + PIECE if codings else max_bytes
        self._sizes = [0] * len(self._stages)
        self._began = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Decode more bytes, lazily; consume the result before the next call."""
        self._budget -= len(data)
        self._began = bool(self._stages)
        if self._budget < 0:
            raise too_large(self._max_bytes)
        pieces: Iterator[bytes] = iter((data,))
        for index, stage in enumerate(self._stages):
            pieces = self._step(index, stage, pieces)
        return pieces

    def finish(self) -> None:
        """End the stream. Raises ScrapeFailed if bytes are missing."""
        if not all(stage.is_complete() for stage in self._stages):
            raise corrupt_body()

    def is_at_end(self) -> bool:
        """Return whether some bytes came, and every coding has reached its own end."""
        return self._began and all(stage.is_complete() for stage in self._stages)

    def _step(self, index: int, stage: Stage, pieces: Iterator[bytes]) -> Iterator[bytes]:
        try:
            for piece in pieces:
                for decoded in stage.feed(piece):
                    self._sizes[index] += len(decoded)
                    if self._sizes[index] > self._max_bytes:
                        raise too_large(self._max_bytes)
                    yield decoded
        except (zlib.error, brotli.error, _Damaged):
            raise corrupt_body() from None


def known_codings(values: Sequence[str]) -> list[str]:
    """Return the codings to undo, from Content-Encoding fields, in the order they were applied.

    An unknown coding, and all beneath it, is left as it is. Raises ScrapeFailed for more than
    MAX_CODINGS.
    """
    listed = [word.strip().lower() for value in values for word in value.split(",")]
    codings = [word for word in listed if word not in ("", "identity")]
    if len(codings) > MAX_CODINGS:
        raise too_many_codings()
    known: list[str] = []
    for coding in reversed(codings):
        if coding not in _STAGES:
            break
        known.insert(0, coding)
    return known


def _inflate(inflater: zlib._Decompress, data: bytes) -> Iterator[bytes]:
    while True:
        piece = inflater.decompress(data, PIECE)
        if piece:
            yield piece
        data = inflater.unconsumed_tail
        # After a full piece, output may be left even without input.
        if inflater.eof or (not data and len(piece) < PIECE):
            return


class _Gzip:
    """One member after another. Bytes after the last member that begin no other are ignored."""

    def __init__(self) -> None:
        self._inflater: zlib._Decompress | None = None
        self._members = 0
        self._held = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        data = self._held + data
        self._held = b""
        while data:
            if self._inflater is None:
                if self._members and not data.startswith(_GZIP_MAGIC):
                    self._held = data if data == _GZIP_MAGIC[:1] else b"\0"
                    return
                self._inflater = zlib.decompressobj(_GZIP)
                self._members += 1
                # A stream of tiny members costs far more time than its size suggests.
                if self._members > MAX_MEMBERS:
                    raise corrupt_body()
            yield from _inflate(self._inflater, data)
            if not self._inflater.eof:
                return
            data = self._inflater.unused_data
            self._inflater = None

    def is_complete(self) -> bool:
        return self._inflater is None


class _Deflate:
    """The zlib format of the standard, or the raw one that some servers send."""

    def __init__(self) -> None:
        self._inflater: zlib._Decompress | None = None
        self._held = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        if self._inflater is None:
            data = self._held + data
            if len(data) < 2:
                self._held = data
                return
            is_zlib = data[0] & 0x0F == 8 and int.from_bytes(data[:2], "big") % 31 == 0
            self._inflater = zlib.decompressobj(_ZLIB if is_zlib else _RAW)
            self._held = b""
        if not self._inflater.eof:
            yield from _inflate(self._inflater, data)

    def is_complete(self) -> bool:
        return not self._held and (self._inflater is None or self._inflater.eof)


class _Brotli:
    """Brotli. Bytes after its end are damage."""

    def __init__(self) -> None:
        self._decompressor = brotli.Decompressor()
        self._started = False

    def feed(self, data: bytes) -> Iterator[bytes]:
        if not data:
            return
        self._started = True
        piece = self._decompressor.process(data, output_buffer_limit=PIECE)
        while piece:
            yield piece
            # Output may be left even after every byte of input was taken.
            piece = self._decompressor.process(b"", output_buffer_limit=PIECE)

    def is_complete(self) -> bool:
        return not self._started or bool(self._decompressor.is_finished())


class _Zstd:
    """One frame after another, each with a window of at most 8 MiB (RFC 9659)."""

    def __init__(self) -> None:
        self._library = zstd_library()
        self._decompressor: Any = None
        self._frames = 0

    def feed(self, data: bytes) -> Iterator[bytes]:
        library = self._library
        try:
            while data or (self._decompressor is not None and not self._decompressor.needs_input):
                if self._decompressor is None:
                    limit = {library.DecompressionParameter.window_log_max: _WINDOW_LOG}
                    self._decompressor = library.ZstdDecompressor(options=limit)
                    self._frames += 1
                    if self._frames > MAX_MEMBERS:
                        raise _Damaged
                piece = self._decompressor.decompress(data, PIECE)
                data = b""
                if piece:
                    yield piece
                if self._decompressor.eof:
                    data = self._decompressor.unused_data
                    self._decompressor = None
        except library.ZstdError:
            raise _Damaged from None

    def is_complete(self) -> bool:
        return self._decompressor is None


def zstd_library() -> ModuleType:
    """Return the module of Zstandard, which takes a while to load."""
    return import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")


class _Damaged(Exception):
    """The compressed bytes are damaged."""


_STAGES: dict[str, Callable[[], Stage]] = {
    "gzip": _Gzip,
    "x-gzip": _Gzip,
    "deflate": _Deflate,
    "br": _Brotli,
    "zstd": _Zstd,
}


SMALL = 262_144


async def read_content(answer: HttpAnswer, max_bytes: int) -> Content:
    """Read the decoded body, of at most `max_bytes`.

    A body of at most SMALL bytes is returned whole and has been checked; a larger one is returned
    as an iterator. Raises ScrapeFailed, as does the iterator.
    """
    listed = answer.headers.getall("Content-Encoding", [])
    codings = known_codings(listed) if listed else []
    length = answer.length
    if not codings and length is not None:
        if length > max_bytes:
            raise too_large(max_bytes)
        if length <= SMALL:
            if (whole := answer.whole()) is not None:
                return whole
            try:
                return await answer.read()
            except TransportError as error:
                raise transport_failure(error.trouble) from None
    body = DecodedBody(answer.pieces(), codings, max_bytes)
    head: list[bytes] = []
    size = 0
    async for piece in body:
        head.append(piece)
        size += len(piece)
        if size > SMALL:
            body.unread(head)
            return body
    return b"".join(head)


async def read_document(answer: HttpAnswer, limit: int) -> bytes:
    """Read the body of an error answer; return nothing if it cannot be read whole."""
    try:
        codings = known_codings(answer.headers.getall("Content-Encoding", []))
        return b"".join([piece async for piece in DecodedBody(answer.pieces(), codings, limit)])
    except ScrapeFailed:
        return b""


class DecodedBody(AsyncIterator[bytes]):
    """A body being received, decoded and bounded. Raises ScrapeFailed."""

    def __init__(
        self, source: AsyncIterator[bytes], codings: Sequence[str], max_bytes: int
    ) -> None:
        self._source = source
        self._decoder = Decoder(codings, max_bytes)
        self._unread: deque[bytes] = deque()
        self._decoded: Iterator[bytes] = iter(())

    def unread(self, pieces: Sequence[bytes]) -> None:
        """Put pieces back to the front."""
        self._unread.extend(pieces)

    async def __anext__(self) -> bytes:
        if self._unread:
            return self._unread.popleft()
        while True:
            for piece in self._decoded:
                if piece:
                    return piece
            try:
                data = await anext(self._source, None)
            except TransportError as error:
                # Without close_notify nobody vouches for the end, unless the coding itself does.
                if error.trouble is not TransportTrouble.RAGGED or not self._decoder.is_at_end():
                    raise transport_failure(error.trouble) from None
                data = None
            if data is None:
                self._decoder.finish()
                raise StopAsyncIteration
            self._decoded = self._decoder.feed(data)
