"""Nasty answers: what announces the end of a body, bodies that there must not be, and bytes after
the end."""

from __future__ import annotations

from msgspec.structs import replace

from conveyor.wire.errors import TransportTrouble
from tests.nasty.answer import (
    BODY,
    CHUNKS,
    LENGTH,
    OK,
    POISON,
    TO_CHUNKS,
    End,
    Family,
    Kind,
    Nasty,
    chunked,
    closed,
    cut,
    ended,
    head,
    kept,
    malformed,
    sized,
)

_OTHER = head(b"Content-Length: 6") + POISON


def _lengths(*values: bytes) -> bytes:
    return head(*[b"Content-Length: " + value for value in values]) + BODY


def _coded(*values: bytes) -> bytes:
    """Return an answer in chunks under other transfer codings."""
    return head(*[b"Transfer-Encoding: " + value for value in values]) + CHUNKS


def _short(name: str, length: bytes, end: End = End.FIN) -> Nasty:
    return cut(name, head(b"Content-Length: " + length) + BODY, TransportTrouble.TRUNCATED, end)


def _surplus(name: str, wire: bytes, surplus: bytes, end: End = End.STAYS) -> Nasty:
    return Nasty(name=name, wire=wire, surplus=surplus, end=end)


def _to_head(name: str, wire: bytes, surplus: bytes = b"", *, kept: bool = False) -> Nasty:
    return Nasty(name=name, wire=wire, surplus=surplus, method="HEAD", body=b"", kept=kept)


def _without_body(name: str, status: int, line: bytes, surplus: bytes) -> Nasty:
    lines = [line] if line else []
    wire = head(*lines, status=b"HTTP/1.1 %d x" % status)
    return Nasty(name=name, wire=wire, surplus=surplus, status=status, body=b"")


LENGTHS = Family(
    "Lengths",
    (
        Kind(
            "one length in several spellings",
            "equal numbers are one length, and nothing is left to guess",
            (
                kept("two equal fields", _lengths(b"17", b"17")),
                kept("a list of equal lengths", _lengths(b"17, 17")),
                kept("a list without spaces", _lengths(b"17,17,17")),
                kept("a field and a list", _lengths(b"17", b"17, 17")),
                kept("a leading zero", _lengths(b"017")),
                kept("a leading zero in one of two", _lengths(b"17", b"017")),
                kept("a thousand zeros", _lengths(b"0" * 1_000 + b"17")),
                kept("five thousand zeros", _lengths(b"0" * 5_000 + b"17")),
                kept("a thousand equal fields", _lengths(*[b"17"] * 1_000)),
                kept("two names in two cases", head(LENGTH, b"content-LENGTH: 17") + BODY),
                kept("two of zero", head(b"Content-Length: 0", b"Content-Length: 00"), b""),
            ),
        ),
        Kind(
            "two different lengths",
            "whichever is taken, the rest could be an answer that somebody smuggled in",
            (
                malformed("two fields", _lengths(b"17", b"3")),
                malformed("two fields, the larger last", _lengths(b"3", b"17")),
                malformed("a list", _lengths(b"17, 3")),
                malformed("a field and a list", _lengths(b"17", b"17, 3")),
                malformed("zero and a length", _lengths(b"0", b"17")),
                malformed("a length and zero", _lengths(b"17", b"0")),
                malformed("a length and no number", _lengths(b"17", b"x")),
                malformed("a length and an empty one", _lengths(b"17", b"")),
                malformed("far apart", head(LENGTH, *[b"X: y"] * 99, b"Content-Length: 3") + BODY),
            ),
        ),
        Kind(
            "a length that is no number",
            "a guess could give one caller the bytes of another",
            tuple(
                malformed(f"length {value.decode('latin-1')!r}", _lengths(value))
                for value in (
                    b"-17",
                    b"+17",
                    b"17.0",
                    b"17e0",
                    b"0x11",
                    b"1_7",
                    b"1 7",
                    b"17;",
                    b"17 bytes",
                    b'"17"',
                    b"(17)",
                    b"seventeen",
                    b"",
                    b",",
                    b"17,",
                    b",17",
                    b"17,,17",
                    b"17\xb2",
                    b"\xef\xbc\x91\xef\xbc\x97",
                    b"\xd9\xa1\xd9\xa7",
                    b"NaN",
                    b"-0",
                    b"*",
                )
            ),
        ),
        Kind(
            "a length beyond any file",
            "it overflows what some readers count with",
            (
                malformed("2^63", _lengths(b"9223372036854775808")),
                malformed("2^64", _lengths(b"18446744073709551616")),
                malformed("2^64 + 17", _lengths(b"18446744073709551633")),
                malformed("10^30", _lengths(b"1" + b"0" * 30)),
                malformed("10^5,000", _lengths(b"1" + b"0" * 5_000)),
                malformed("2^32 + 17 as a wrapped list", _lengths(b"4294967313, 17")),
            ),
        ),
        Kind(
            "a body shorter than its length",
            "a part of a page must not pass for the page",
            (
                _short("one byte short", b"18"),
                _short("far short", b"1000000"),
                replace(
                    _short("short of 2^63 - 1", b"9223372036854775807"),
                    content="result_too_large",
                ),
                _short("one byte short, reset", b"18", End.RESET),
                _short("far short, reset", b"1000000", End.RESET),
                cut("no body at all", head(LENGTH), TransportTrouble.TRUNCATED),
                cut("no body, reset", head(LENGTH), TransportTrouble.TRUNCATED, End.RESET),
                cut(
                    "short, to be closed",
                    head(b"Content-Length: 99", b"Connection: close") + BODY,
                    TransportTrouble.TRUNCATED,
                ),
                cut(
                    "short, HTTP/1.0",
                    head(b"Content-Length: 99", status=b"HTTP/1.0 200 OK") + BODY,
                    TransportTrouble.TRUNCATED,
                ),
            ),
        ),
        Kind(
            "a field that is nearly a length",
            "another name is another field; the connection's end ends the body",
            (
                ended("underscore", head(b"Content_Length: 3") + BODY),
                ended("no hyphen", head(b"ContentLength: 3") + BODY),
                ended("plural", head(b"Content-Lengths: 3") + BODY),
                ended("prefix", head(b"X-Content-Length: 3") + BODY),
                ended(
                    "a long s", "HTTP/1.1 200 OK\r\nContent-Length\u017f: 3\r\n\r\n".encode() + BODY
                ),
            ),
        ),
    ),
)

CODINGS = Family(
    "Transfer codings",
    (
        Kind(
            "chunked in any spelling",
            "case and empty elements mean nothing",
            (
                kept("Chunked", _coded(b"Chunked")),
                kept("CHUNKED", _coded(b"CHUNKED")),
                kept("spaces around it", _coded(b" \tchunked\t ")),
                kept("an empty element after it", _coded(b"chunked,")),
                kept("empty elements around it", _coded(b" , chunked, ,")),
                kept("identity before it", _coded(b"identity, chunked")),
                kept("identity in another field", _coded(b"identity", b"chunked")),
                kept("an empty field before it", _coded(b"", b"chunked")),
                kept("the name in small letters", head(b"transfer-encoding: chunked") + CHUNKS),
            ),
        ),
        Kind(
            "a length beside chunks",
            "chunks win, as the standard says; the length may be an attack, so nothing follows",
            (
                closed("the same length", head(LENGTH, TO_CHUNKS) + CHUNKS),
                closed("another length", head(b"Content-Length: 3", TO_CHUNKS) + CHUNKS),
                closed("the length last", head(TO_CHUNKS, b"Content-Length: 3") + CHUNKS),
                closed("a huge length", head(b"Content-Length: 99999", TO_CHUNKS) + CHUNKS),
                closed("10^15", head(b"Content-Length: 1" + b"0" * 15, TO_CHUNKS) + CHUNKS),
                closed(
                    "5,000 digits", head(b"Content-Length: " + b"9" * 5_000, TO_CHUNKS) + CHUNKS
                ),
                closed("two lengths", head(LENGTH, b"Content-Length: 3", TO_CHUNKS) + CHUNKS),
                closed("a negative length", head(b"Content-Length: -1", TO_CHUNKS) + CHUNKS),
                closed("a length of zero", head(b"Content-Length: 0", TO_CHUNKS) + CHUNKS),
                closed("no number", head(b"Content-Length: x", TO_CHUNKS) + CHUNKS),
            ),
        ),
        Kind(
            "identity alone",
            "it was allowed once and codes nothing; not every reader knows it",
            (
                closed(
                    "identity and a length", head(b"Transfer-Encoding: identity", LENGTH) + BODY
                ),
                closed("nothing and a length", head(b"Transfer-Encoding:", LENGTH) + BODY),
                closed("a comma and a length", head(b"Transfer-Encoding: ,", LENGTH) + BODY),
                ended("identity to the end", head(b"Transfer-Encoding: identity") + BODY),
            ),
        ),
        Kind(
            "another transfer coding",
            "its framing or its bytes would be in the body",
            tuple(
                malformed(f"coding {value.decode('latin-1')!r}", _coded(value))
                for value in (
                    b"xchunked",
                    b"chunkedx",
                    b"x-chunked",
                    b"chunk",
                    b"chunked;q=1",
                    b"chunked; foo=bar",
                    b'"chunked"',
                    b"chun ked",
                    b"chunked chunked",
                    b"chunked\xa0",
                    b"chun\xe2\x84\xaaed",
                    b"\xef\xbd\x83hunked",
                    b"gzip",
                    b"deflate",
                    b"br",
                    b"gzip, chunked",
                    b"chunked, gzip",
                    b"identity, gzip",
                    b"cow",
                )
            ),
        ),
        Kind(
            "chunked twice",
            "there is one framing; a second one would be in the body",
            (
                malformed("in one field", _coded(b"chunked, chunked")),
                malformed("in two fields", _coded(b"chunked", b"chunked")),
                malformed("with identity between", _coded(b"chunked, identity, chunked")),
            ),
        ),
        Kind(
            "another transfer coding beside a length",
            "the length would count the coded bytes, or lie",
            (
                malformed("xchunked", head(b"Transfer-Encoding: xchunked", LENGTH) + BODY),
                malformed("gzip", head(b"Transfer-Encoding: gzip", LENGTH) + BODY),
                malformed("after the length", head(LENGTH, b"Transfer-Encoding: cow") + BODY),
                malformed("two fields", head(TO_CHUNKS, b"Transfer-Encoding: gzip") + CHUNKS),
            ),
        ),
        Kind(
            "a control byte in a line about framing",
            "to pass over this line would be to guess the framing",
            (
                malformed("length before a tabulator", head(b"Content-Length: 17\x0b") + BODY),
                malformed("length after a bell", head(b"Content-Length:\x0717") + BODY),
                malformed("two lengths", head(LENGTH, b"Content-Length: \x0c3") + BODY),
                malformed("coding after a tabulator", _coded(b"\x0bchunked")),
                malformed("coding before a feed", _coded(b"chunked\x0c")),
                malformed("coding and length", head(LENGTH, TO_CHUNKS + b"\x1f") + BODY),
                malformed("name of a length", head(b"Content-Length\x0b: 3", LENGTH) + BODY),
                malformed("name of a coding", head(b"\x0bTransfer-Encoding: chunked") + CHUNKS),
                malformed("fold of a length", head(b"Content-Length: 1", b" \x0b7") + BODY),
            ),
        ),
    ),
)

NO_BODY = Family(
    "Answers without a body",
    (
        Kind(
            "204, 304 and answers to HEAD",
            "the standard says that they have none, whatever their fields announce",
            (
                kept("204", head(status=b"HTTP/1.1 204 No Content"), b"", status=204),
                kept("304", head(status=b"HTTP/1.1 304 Not Modified"), b"", status=304),
                kept(
                    "304 with a length",
                    head(b"Content-Length: 99", status=b"HTTP/1.1 304 x"),
                    b"",
                    status=304,
                ),
                kept(
                    "204 with a length of zero",
                    head(b"Content-Length: 0", status=b"HTTP/1.1 204 x"),
                    b"",
                    status=204,
                ),
                _to_head("HEAD with a length", head(b"Content-Length: 99"), kept=True),
                _to_head("HEAD without one", head(b"X: y"), kept=True),
                _to_head("HEAD in chunks", head(TO_CHUNKS), kept=True),
                _to_head(
                    "HEAD after 103", head(status=b"HTTP/1.1 103 x") + head(LENGTH), kept=True
                ),
            ),
        ),
        Kind(
            "204 or 304 that announces a body",
            "the page is empty; the sender may believe otherwise",
            (
                closed(
                    "204 with a length",
                    head(b"Content-Length: 6", status=b"HTTP/1.1 204 x"),
                    b"",
                    status=204,
                ),
                closed(
                    "204 with a length of 10^15",
                    head(b"Content-Length: 1" + b"0" * 15, status=b"HTTP/1.1 204 x"),
                    b"",
                    status=204,
                ),
                closed("204 in chunks", head(TO_CHUNKS, status=b"HTTP/1.1 204 x"), b"", status=204),
                closed("304 in chunks", head(TO_CHUNKS, status=b"HTTP/1.1 304 x"), b"", status=304),
            ),
        ),
        Kind(
            "a body where there must not be one",
            "its bytes would be read as the next answer",
            (
                _without_body("204 with a body", 204, b"", POISON),
                _without_body("204 with a length and a body", 204, b"Content-Length: 6", POISON),
                _without_body("204 with chunks", 204, TO_CHUNKS, b"6\r\nPOISON\r\n0\r\n\r\n"),
                _without_body("204 with a second answer", 204, b"", _OTHER),
                _without_body("304 with a body", 304, b"Content-Length: 6", POISON),
                _without_body("304 with a second answer", 304, b"", _OTHER),
                _to_head("HEAD with a body", head(b"Content-Length: 6"), POISON),
                _to_head("HEAD with chunks", head(TO_CHUNKS), b"6\r\nPOISON\r\n0\r\n\r\n"),
                _to_head("HEAD with a second answer", head(LENGTH), _OTHER),
            ),
        ),
        Kind(
            "other statuses with an empty or a full body",
            "only 1xx, 204 and 304 are special",
            (
                kept(
                    "205, empty",
                    head(b"Content-Length: 0", status=b"HTTP/1.1 205 x"),
                    b"",
                    status=205,
                ),
                kept("205 with a body", sized(status=b"HTTP/1.1 205 x"), status=205),
                kept("203 in chunks", chunked(status=b"HTTP/1.1 203 x"), status=203),
                kept("404 with a body", sized(status=b"HTTP/1.1 404 x"), status=404),
                kept("500 in chunks", chunked(status=b"HTTP/1.1 500 x"), status=500),
            ),
        ),
    ),
)

SURPLUS = Family(
    "Bytes after the end",
    (
        Kind(
            "bytes after the announced end",
            "the answer stands; what follows must never be anybody's answer",
            (
                _surplus("a second answer", sized(), _OTHER),
                _surplus(
                    "a second answer in chunks",
                    sized(),
                    chunked(chunks=b"6\r\nPOISON\r\n0\r\n\r\n"),
                ),
                _surplus("half a second answer", sized(), _OTHER[:20]),
                _surplus("a 100", sized(), head(status=b"HTTP/1.1 100 Continue")),
                _surplus("a byte", sized(), b"P"),
                _surplus("a NUL", sized(), b"\0"),
                _surplus("a line end", sized(), b"\r\n"),
                _surplus("a line feed", sized(), b"\n"),
                _surplus("more of the body", sized(), POISON),
                _surplus("264 bytes more", sized(), (POISON * 44)),
                _surplus("1 MiB more", sized(), POISON * 174_763),
                _without_body("after length 0", 200, b"Content-Length: 0", POISON),
                _surplus("after chunks", chunked(), POISON),
                _surplus("a second answer after chunks", chunked(), _OTHER),
                _surplus("a line end after chunks", chunked(), b"\r\n"),
                _surplus("a second end of chunks", chunked(), b"0\r\n\r\n"),
                _surplus("after a body to be closed", sized(b"Connection: close"), _OTHER),
                _surplus("a second answer, then FIN", sized(), _OTHER, End.FIN),
                _surplus("half a second answer, then FIN", sized(), _OTHER[:9], End.FIN),
                _surplus("after a status of its own", sized(status=b"HTTP/1.1 200"), OK),
            ),
        ),
    ),
)
