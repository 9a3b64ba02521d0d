"""Nasty answers: how connections end, over TLS too, and answers at the wrong moment."""

from __future__ import annotations

import gzip
import zlib

import brotli
from msgspec.structs import replace

from conveyor.wire.errors import TransportTrouble
from tests.nasty.answer import (
    BODY,
    POISON,
    End,
    Family,
    Kind,
    Nasty,
    chunked,
    cut,
    ended,
    head,
    kept,
    sized,
)

_OTHER = head(b"Content-Length: 6") + POISON
_TO_END = head(b"Connection: close") + BODY
_HALVES = {
    "a byte": 1,
    "half a status line": 9,
    "a status line": 17,
    "half a field": 25,
    "half an empty line": len(head(b"Content-Length: 17")) - 1,
}


def _over_tls(answer: Nasty) -> Nasty:
    return replace(answer, is_tls=True)


def _coded(name: str, coding: bytes, wire: bytes, content: bytes | None = BODY) -> Nasty:
    """Return a coded body that a FIN without close_notify ends."""
    return Nasty(
        name=name,
        wire=head(b"Content-Encoding: " + coding) + wire,
        body=wire,
        content=content,
        trouble=TransportTrouble.RAGGED,
        end=End.BARE_FIN,
        is_tls=True,
        until_end=True,
    )


def _truncated(name: str, wire: bytes, end: End) -> Nasty:
    return cut(name, wire, TransportTrouble.TRUNCATED, end)


def _reset(name: str, wire: bytes) -> Nasty:
    """Return a body without a length that a reset ends."""
    return replace(_truncated(name, wire, End.RESET), until_end=True)


def _and_pushed(name: str, pushed: bytes, end: End = End.STAYS) -> Nasty:
    return Nasty(name=name, wire=sized(), pushed=pushed, end=end, kept=True)


def _late(name: str, late: bytes, wire: bytes = b"", end: End = End.STAYS) -> Nasty:
    return Nasty(name=name, wire=wire, late=late, end=end, trouble=TransportTrouble.TIMEOUT)


def _early(name: str, wire: bytes, status: int = 200, end: End = End.STAYS) -> Nasty:
    return Nasty(
        name=name, wire=wire, status=status, is_early=True, method="POST", end=end, kept=True
    )


ENDS = Family(
    "Ends of the connection",
    (
        Kind(
            "a body that the connection ends",
            "without a length or chunks, its clean end is the end",
            (
                ended("to the end", _TO_END),
                ended("to the end, nothing said", head() + BODY),
                ended("to the end, HTTP/1.0", head(status=b"HTTP/1.0 200 OK") + BODY),
                ended("to the end, empty", head(), b""),
                ended("to the end, like chunks", head() + b"0\r\n\r\n", b"0\r\n\r\n"),
                ended("to the end, like answers", head() + sized(), sized()),
                ended("to the end, 300 KiB", head() + b"x" * 307_200, b"x" * 307_200),
                ended("keep-alive, yet to the end", head(b"Connection: keep-alive") + BODY),
            ),
        ),
        Kind(
            "a body that a reset ends",
            "a reset is no clean end: the rest is missing, and nobody knows how much",
            (
                _reset("to a reset", _TO_END),
                _reset("to a reset, HTTP/1.0", head(status=b"HTTP/1.0 200 OK") + BODY),
                _reset("to a reset, empty", head()),
                _reset("to a reset, 3,000 bytes", head() + b"x" * 3_000),
            ),
        ),
        Kind(
            "no answer, FIN",
            "the origin has hung up; whether it has worked nobody knows",
            (
                cut("nothing", b"", TransportTrouble.INTERRUPTED),
                *(
                    cut(name, sized()[:count], TransportTrouble.INTERRUPTED)
                    for name, count in _HALVES.items()
                ),
            ),
        ),
        Kind(
            "no answer, reset",
            "the origin has hung up; whether it has worked nobody knows",
            (
                cut("nothing", b"", TransportTrouble.INTERRUPTED, End.RESET),
                *(
                    cut(name, sized()[:count], TransportTrouble.INTERRUPTED, End.RESET)
                    for name, count in _HALVES.items()
                ),
            ),
        ),
        Kind(
            "the end after a whole answer",
            "the answer stands; the next request needs another connection",
            (
                replace(kept("length, FIN", sized()), end=End.FIN),
                replace(kept("chunks, FIN", chunked()), end=End.FIN),
                replace(
                    kept("204, FIN", head(status=b"HTTP/1.1 204 x"), b"", status=204), end=End.FIN
                ),
                replace(kept("length 0, FIN", head(b"Content-Length: 0"), b""), end=End.FIN),
            ),
        ),
    ),
)

TLS_ENDS = Family(
    "Ends of the connection over TLS",
    (
        Kind(
            "close_notify",
            "the origin itself says that no byte is missing",
            (
                _over_tls(ended("to the end", _TO_END)),
                _over_tls(ended("to the end, empty", head(), b"")),
                _over_tls(ended("to the end, HTTP/1.0", head(status=b"HTTP/1.0 200 OK") + BODY)),
            ),
        ),
        Kind(
            "a whole answer over TLS",
            "its length or its last chunk shows the end, so close_notify is not asked for",
            (
                _over_tls(kept("length", sized())),
                _over_tls(kept("chunks", chunked())),
                _over_tls(replace(kept("length, close_notify", sized()), end=End.FIN)),
                _over_tls(replace(kept("length, bare FIN", sized()), end=End.BARE_FIN)),
                _over_tls(replace(kept("chunks, bare FIN", chunked()), end=End.BARE_FIN)),
            ),
        ),
        Kind(
            "FIN without close_notify",
            "anybody on the way can send a FIN; the rest of the page may be missing",
            (
                _over_tls(
                    replace(
                        ended("plain", _TO_END), end=End.BARE_FIN, trouble=TransportTrouble.RAGGED
                    )
                ),
                _over_tls(
                    replace(
                        ended("empty", head(), b""),
                        end=End.BARE_FIN,
                        trouble=TransportTrouble.RAGGED,
                    )
                ),
                _over_tls(
                    replace(
                        ended("HTTP/1.0", head(status=b"HTTP/1.0 200 OK") + BODY),
                        end=End.BARE_FIN,
                        trouble=TransportTrouble.RAGGED,
                    )
                ),
                _coded("gzip cut off", b"gzip", gzip.compress(BODY, mtime=0)[:-1], None),
                _coded("an unknown coding", b"cow", BODY, None),
                _coded("an unknown coding over gzip", b"gzip, cow", gzip.compress(BODY), None),
                _coded("gzip before its first byte", b"gzip", b"", None),
                _coded("deflate before its first byte", b"deflate", b"", None),
                _coded("br before its first byte", b"br", b"", None),
                _coded("zstd before its first byte", b"zstd", b"", None),
                _coded("br cut off", b"br", brotli.compress(BODY)[:-1], None),
                _coded("deflate cut off", b"deflate", zlib.compress(BODY)[:-1], None),
            ),
        ),
        Kind(
            "FIN without close_notify after the end of a coding",
            "the coding itself says that no byte is missing",
            (
                _coded("gzip", b"gzip", gzip.compress(BODY, mtime=0)),
                _coded("deflate", b"deflate", zlib.compress(BODY)),
                _coded("br", b"br", brotli.compress(BODY)),
                _coded("zstd", b"zstd", b"\x28\xb5\x2f\xfd\x20\x11\x89\0\0" + BODY),
            ),
        ),
        Kind(
            "a reset over TLS",
            "a reset is no clean end",
            (
                _over_tls(_reset("to a reset", _TO_END)),
                _over_tls(_truncated("length, reset", sized()[:-1], End.RESET)),
                _over_tls(_truncated("chunks, reset", chunked()[:-1], End.RESET)),
                _over_tls(
                    cut("in the head", sized()[:30], TransportTrouble.INTERRUPTED, End.RESET)
                ),
            ),
        ),
        Kind(
            "a body cut off over TLS",
            "a part of a page must not pass for the page, however politely it ends",
            (
                _over_tls(_truncated("length, close_notify", sized()[:-1], End.FIN)),
                _over_tls(_truncated("length, bare FIN", sized()[:-1], End.BARE_FIN)),
                _over_tls(_truncated("chunks, close_notify", chunked()[:-2], End.FIN)),
                _over_tls(_truncated("chunks, bare FIN", chunked()[:-2], End.BARE_FIN)),
            ),
        ),
        Kind(
            "no answer over TLS",
            "the origin has hung up",
            (
                _over_tls(cut("nothing, close_notify", b"", TransportTrouble.INTERRUPTED)),
                _over_tls(
                    cut("nothing, bare FIN", b"", TransportTrouble.INTERRUPTED, End.BARE_FIN)
                ),
                _over_tls(cut("half a head", sized()[:30], TransportTrouble.INTERRUPTED)),
            ),
        ),
    ),
)

MOMENTS = Family(
    "The wrong moment",
    (
        Kind(
            "bytes on an idle connection",
            "nobody asked for them, so they are nobody's answer",
            (
                _and_pushed("an answer", _OTHER),
                _and_pushed("an answer in chunks", chunked(chunks=b"6\r\nPOISON\r\n0\r\n\r\n")),
                _and_pushed("half an answer", _OTHER[:-1]),
                _and_pushed("a head", head(b"Content-Length: 6")),
                _and_pushed("a 100", head(status=b"HTTP/1.1 100 Continue")),
                _and_pushed("a byte", b"H"),
                _and_pushed("a line end", b"\r\n"),
                _and_pushed("rubbish", bytes(range(256))),
                _and_pushed("1 MiB of answers", _OTHER * 24_000),
                _and_pushed(
                    "408, FIN", head(b"Content-Length: 0", status=b"HTTP/1.1 408 x"), End.FIN
                ),
                _and_pushed("an answer, reset", _OTHER, End.RESET),
            ),
        ),
        Kind(
            "an answer before the request was read",
            "it is the answer; the rest of the request may still be on its way",
            (
                _early("413", sized(status=b"HTTP/1.1 413 x"), 413),
                _early("200", sized()),
                _early("200 in chunks", chunked()),
                _early("200 after 100", head(status=b"HTTP/1.1 100 Continue") + sized()),
                _early(
                    "413, half closed",
                    sized(status=b"HTTP/1.1 413 x"),
                    413,
                    End.FIN,
                ),
            ),
        ),
        Kind(
            "an answer after the caller gave up",
            "whoever comes next must not get it",
            (
                _late("all of it", _OTHER),
                _late("the body", POISON, head(b"Content-Length: 6")),
                _late("the last byte", b"N", _OTHER[:-1]),
                _late("the last chunk", b"0\r\n\r\n", chunked(chunks=b"6\r\nPOISON\r\n")),
                _late("half a head", _OTHER[20:], _OTHER[:20]),
                _late("after a 100", _OTHER, head(status=b"HTTP/1.1 100 Continue")),
                _late("a second one, too", _OTHER + _OTHER),
            ),
        ),
    ),
)
