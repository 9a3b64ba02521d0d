"""Nasty answers: chunks."""

from __future__ import annotations

from conveyor.wire.errors import TransportTrouble
from tests.nasty.answer import (
    BODY,
    TO_CHUNKS,
    End,
    Family,
    Kind,
    chunked,
    closed,
    cut,
    head,
    kept,
    malformed,
)

_KIB = 1_024
_LAST = b"0\r\n\r\n"


def _data(line: bytes, after: bytes = b"\r\n") -> bytes:
    """Return BODY as the data of a chunk that begins with a line."""
    return line + BODY + after


def _sized(line: bytes) -> bytes:
    """Return an answer of one chunk under that line, and the last chunk."""
    return chunked(chunks=_data(line) + _LAST)


def _trailed(*lines: bytes) -> bytes:
    return chunked(chunks=_data(b"11\r\n") + b"0\r\n" + b"".join(lines) + b"\r\n")


def _bytes(prefix: bytes, suffix: bytes, count: int) -> bytes:
    """Return an answer of chunks of one byte each, whose size lines are padded."""
    return chunked(chunks=(prefix + b"1" + suffix + b"\r\nx\r\n") * count + _LAST)


def _split_between_both(size: int) -> bytes:
    """Return an answer with an extension and a trailer of that size each."""
    chunks = _data(b"11;" + b"x" * size + b"\r\n") + b"0\r\nX: " + b"x" * size + b"\r\n\r\n"
    return chunked(chunks=chunks)


_WHOLE = chunked()
_PLACES = {
    "before a chunk": 0,
    "in a size": 1,
    "after a size": 2,
    "in the end of a size line": 3,
    "before the data": 4,
    "in the data": 12,
    "after the data": 21,
    "in the end of the data": 22,
    "before the last chunk": 23,
    "after the last size": 24,
    "in the end of the last size line": 25,
    "before the trailers": 26,
    "in the last line end": 27,
}
_BEGIN = len(head(TO_CHUNKS))

CHUNKED = Family(
    "Chunks",
    (
        Kind(
            "chunks by the book",
            "sizes come in many spellings, all clear",
            (
                kept("many chunks", chunked(chunks=b"1\r\nx\r\n" * 50 + _LAST), b"x" * 50),
                kept("an empty body", chunked(chunks=_LAST), b""),
                kept(
                    "hex in small letters",
                    chunked(chunks=b"a\r\n0123456789\r\n" + _LAST),
                    b"0123456789",
                ),
                kept(
                    "hex in capitals", chunked(chunks=b"A\r\n0123456789\r\n" + _LAST), b"0123456789"
                ),
                kept(
                    "line ends in the data",
                    chunked(chunks=b"4\r\n\r\n\r\n\r\n" + _LAST),
                    b"\r\n\r\n",
                ),
                kept(
                    "an end in the data",
                    chunked(chunks=b"5\r\n0\r\n\r\n\r\n" + _LAST),
                    b"0\r\n\r\n",
                ),
                kept("an answer in the data", chunked(chunks=b"5\r\nHTTP/\r\n" + _LAST), b"HTTP/"),
                kept(
                    "a chunk of 100 KiB",
                    chunked(chunks=b"19000\r\n" + b"x" * 102_400 + b"\r\n" + _LAST),
                    b"x" * 102_400,
                ),
            ),
        ),
        Kind(
            "zeros and spaces around a size",
            "they change no number; their sum is bounded",
            (
                kept("a leading zero", _sized(b"011\r\n")),
                kept("sixteen digits", _sized(b"0000000000000011\r\n")),
                kept("a hundred zeros", _sized(b"0" * 100 + b"11\r\n")),
                kept("a space after", _sized(b"11 \r\n")),
                kept("a tab after", _sized(b"11\t\r\n")),
                kept("many spaces after", _sized(b"11" + b" " * 200 + b"\r\n")),
                kept(
                    "a last size of many zeros", chunked(chunks=_data(b"11\r\n") + b"0000\r\n\r\n")
                ),
                kept(
                    "a space after the last size", chunked(chunks=_data(b"11\r\n") + b"0 \r\n\r\n")
                ),
            ),
        ),
        Kind(
            "chunk extensions",
            "nobody knows any; their sum is bounded",
            (
                kept("a name", _sized(b"11;a\r\n")),
                kept("a value", _sized(b"11;a=b\r\n")),
                kept("a quoted value", _sized(b'11;a="b\\"c;d"\r\n')),
                kept("spaces around it", _sized(b"11 ; a = b\r\n")),
                kept("an empty one", _sized(b"11;\r\n")),
                kept("several", _sized(b"11;a;b=c;;d\r\n")),
                kept("bytes that are no text", _sized(b"11;\xff\x80\x01\r\n")),
                kept("on the last chunk", chunked(chunks=_data(b"11\r\n") + b"0;a=b\r\n\r\n")),
                kept("60 KiB", _sized(b"11;" + b"x" * 60 * _KIB + b"\r\n")),
                kept("60 times 1 KiB", _bytes(b"", b";" + b"x" * _KIB, 60), b"x" * 60),
            ),
        ),
        Kind(
            "extensions and padding over 64 KiB",
            "they could go on for ever, and no body comes of them",
            (
                malformed("70 KiB in one", _sized(b"11;" + b"x" * 70 * _KIB + b"\r\n")),
                malformed("70 times 1 KiB", _bytes(b"", b";" + b"x" * _KIB, 70)),
                malformed("without end", chunked(chunks=b"11;" + b"x" * 70 * _KIB)),
                malformed(
                    "on the last chunk", chunked(chunks=b"0;" + b"x" * 70 * _KIB + b"\r\n\r\n")
                ),
                malformed("zeros", _sized(b"0" * 70 * _KIB + b"11\r\n")),
                malformed("zeros of many chunks", _bytes(b"0" * 15, b"", 6_000)),
                malformed("spaces", _sized(b"11" + b" " * 70 * _KIB + b"\r\n")),
                malformed("spaces of many chunks", _bytes(b"", b" " * 15, 6_000)),
                malformed("zeros without end", chunked(chunks=b"0" * 70 * _KIB)),
                malformed("a size without end", chunked(chunks=b"1" * 70 * _KIB)),
            ),
        ),
        Kind(
            "line feeds alone in chunks",
            "old servers end lines so; who forwards the answer may read it otherwise",
            (
                closed("after a size", _sized(b"11\n")),
                closed("after the data", chunked(chunks=_data(b"11\r\n", b"\n") + _LAST)),
                closed("after the last size", chunked(chunks=_data(b"11\r\n") + b"0\n\r\n")),
                closed("as the last line", chunked(chunks=_data(b"11\r\n") + b"0\r\n\n")),
                closed("everywhere", chunked(chunks=_data(b"11\n", b"\n") + b"0\n\n")),
                closed("after an extension", _sized(b"11;a=b\n")),
                closed("after a trailer", _trailed(b"X: y\n")),
            ),
        ),
        Kind(
            "a size that is no number",
            "a guess would put framing into the body",
            tuple(
                malformed(f"size {line.decode('latin-1')!r}", _sized(line + b"\r\n"))
                for line in (
                    b"",
                    b" ",
                    b" 11",
                    b"\t11",
                    b"-11",
                    b"+11",
                    b"0x11",
                    b"1_1",
                    b"1 1",
                    b"11,",
                    b"11=a",
                    b"g",
                    b"11g",
                    b"zz",
                    b";a",
                    b'"11"',
                    b"1.1",
                    b"\xb9\xb9",
                    b"11\0",
                    b"11\x0b",
                    b"-0",
                )
            ),
        ),
        Kind(
            "a carriage return alone in a size line",
            "one reader ends the line there, another does not",
            (
                malformed("after a size", _sized(b"11\r\r\n")),
                malformed(
                    "instead of the line end", chunked(chunks=b"11\r" + BODY + b"\r\n" + _LAST)
                ),
                malformed("in an extension", _sized(b"11;a\rb\r\n")),
                malformed("before a size", _sized(b"\r11\r\n")),
                malformed("after the last size", chunked(chunks=_data(b"11\r\n") + b"0\r\r\n\r\n")),
                malformed("after spaces", _sized(b"11 \r \r\n")),
            ),
        ),
        Kind(
            "a size beyond any file",
            "it overflows what some readers count with",
            (
                malformed("2^63", _sized(b"8000000000000000\r\n")),
                malformed("2^64 - 1", _sized(b"ffffffffffffffff\r\n")),
                malformed("2^64", _sized(b"10000000000000000\r\n")),
                malformed("2^64 + 17", _sized(b"10000000000000011\r\n")),
                malformed("100 digits", _sized(b"f" * 100 + b"\r\n")),
                malformed("17 digits that end in 11", _sized(b"11111111111111111\r\n")),
            ),
        ),
        Kind(
            "data that does not end where its size says",
            "sender and reader disagree on the framing",
            (
                malformed("more data", chunked(chunks=b"3\r\n" + BODY + b"\r\n" + _LAST)),
                malformed("one byte more", chunked(chunks=_data(b"10\r\n") + _LAST)),
                malformed("less data", chunked(chunks=b"5\r\nabc\r\n" + _LAST)),
                malformed("no line end", chunked(chunks=b"11\r\n" + BODY + _LAST)),
                malformed(
                    "a carriage return alone", chunked(chunks=_data(b"11\r\n", b"\r") + _LAST)
                ),
                malformed(
                    "two carriage returns", chunked(chunks=_data(b"11\r\n", b"\r\r\n") + _LAST)
                ),
                malformed("an empty line", chunked(chunks=_data(b"11\r\n", b"\r\n\r\n") + _LAST)),
                malformed("a space", chunked(chunks=_data(b"11\r\n", b" \r\n") + _LAST)),
                malformed("a NUL", chunked(chunks=_data(b"11\r\n", b"\0\r\n") + _LAST)),
                malformed("no chunks at all", chunked(chunks=BODY + b"\r\n")),
                malformed("HTML", chunked(chunks=b"<p>POISON</p>\r\n" + _LAST)),
            ),
        ),
        Kind(
            "trailers",
            "they are passed over; their sum is bounded",
            (
                kept("one", _trailed(b"X-Checksum: abc\r\n")),
                kept("many", _trailed(*[b"X: y\r\n"] * 50)),
                kept("a length", _trailed(b"Content-Length: 3\r\n")),
                kept("a coding", _trailed(b"Transfer-Encoding: gzip\r\n")),
                kept("a content coding", _trailed(b"Content-Encoding: gzip\r\n")),
                kept("a close", _trailed(b"Connection: close\r\n")),
                kept("a stray line", _trailed(b"PHP Warning:  x\r\n")),
                kept("a fold", _trailed(b"X: y\r\n", b" z\r\n")),
                kept("60 KiB", _trailed(b"X: " + b"x" * 60 * _KIB + b"\r\n")),
                kept("like an answer", _trailed(b"HTTP/1.1 200 OK\r\n")),
            ),
        ),
        Kind(
            "a carriage return alone in a trailer",
            "one reader sees the end of the answer there, another does not",
            (
                closed("as a line", _trailed(b"\r\r\n")),
                closed("in a value", _trailed(b"X: a\rb\r\n")),
                closed("before a line", _trailed(b"\rX: y\r\n")),
            ),
        ),
        Kind(
            "trailers over 64 KiB",
            "they could go on for ever, and no body comes of them",
            (
                malformed("one of 70 KiB", _trailed(b"X: " + b"x" * 70 * _KIB + b"\r\n")),
                malformed("20,000", _trailed(*[b"X: y\r\n"] * 20_000)),
                malformed("one without end", chunked(chunks=b"0\r\nX: " + b"x" * 70 * _KIB)),
                malformed("extensions and trailers", _split_between_both(40 * _KIB)),
            ),
        ),
        Kind(
            "chunks cut by FIN",
            "a part of a page must not pass for the page, be it all but the last line",
            tuple(
                cut(place, _WHOLE[: _BEGIN + index], TransportTrouble.TRUNCATED)
                for place, index in _PLACES.items()
            ),
        ),
        Kind(
            "chunks cut by a reset",
            "a part of a page must not pass for the page",
            tuple(
                cut(place, _WHOLE[: _BEGIN + index], TransportTrouble.TRUNCATED, End.RESET)
                for place, index in _PLACES.items()
            ),
        ),
        Kind(
            "chunks cut elsewhere",
            "what is there is no whole answer",
            (
                cut("in a trailer", _trailed(b"X: y\r\n")[:-5], TransportTrouble.TRUNCATED),
                cut("after a trailer", _trailed(b"X: y\r\n")[:-2], TransportTrouble.TRUNCATED),
                cut("in an extension", chunked(chunks=b"11;a"), TransportTrouble.TRUNCATED),
                cut(
                    "after one of two", chunked(chunks=_data(b"11\r\n")), TransportTrouble.TRUNCATED
                ),
                cut(
                    "in a chunk of 2^63 - 1",
                    chunked(chunks=b"7fffffffffffffff\r\n" + BODY),
                    TransportTrouble.TRUNCATED,
                ),
                cut(
                    "to be closed",
                    chunked(b"Connection: close", chunks=_data(b"11\r\n")),
                    TransportTrouble.TRUNCATED,
                ),
            ),
        ),
    ),
)
