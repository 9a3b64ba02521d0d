"""Nasty answers: status lines, the lines of a head, and heads before the head."""

from __future__ import annotations

from conveyor.wire.errors import TransportTrouble
from tests.nasty.answer import (
    BODY,
    CHUNKS,
    LENGTH,
    OK,
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
    sized,
)

_KIB = 1_024


def _hints(count: int) -> bytes:
    return head(b"Link: </style.css>", status=b"HTTP/1.1 103 Early Hints") * count


_CONTINUE = head(status=b"HTTP/1.1 100 Continue")
_103 = b"HTTP/1.1 103 Early Hints"

STATUS_LINES = Family(
    "Status lines",
    (
        Kind(
            "a plain answer",
            "this is what all others are compared with",
            (
                kept("plain", sized()),
                kept("plain, in chunks", chunked()),
                kept("plain, empty", head(b"Content-Length: 0"), b""),
            ),
        ),
        Kind(
            "a reason that is missing or odd",
            "nobody reads the reason",
            (
                kept("no reason", sized(status=b"HTTP/1.1 200")),
                kept("no reason after a space", sized(status=b"HTTP/1.1 200 ")),
                kept("two spaces before the status", sized(status=b"HTTP/1.1  200 OK")),
                kept("reason in UTF-8", sized(status=b"HTTP/1.1 200 \xe2\x9c\x93 gut")),
                kept("reason in Latin-1", sized(status=b"HTTP/1.1 200 tr\xe8s bien")),
                kept("reason with a tab", sized(status=b"HTTP/1.1 200 O\tK")),
                kept("reason of 8 KiB", sized(status=OK + b"!" * 8 * _KIB)),
                kept("reason like a field", sized(status=b"HTTP/1.1 200 Content-Length: 3")),
            ),
        ),
        Kind(
            "HTTP/1.0",
            "its rules on keeping a connection are not reliable",
            (
                closed("HTTP/1.0", sized(status=b"HTTP/1.0 200 OK")),
                closed(
                    "HTTP/1.0, keep-alive",
                    sized(b"Connection: keep-alive", status=b"HTTP/1.0 200 OK"),
                ),
                closed("HTTP/1.0 in chunks", chunked(status=b"HTTP/1.0 200 OK")),
            ),
        ),
        Kind(
            "a later minor version",
            "a minor version changes no framing",
            (
                kept("HTTP/1.2", sized(status=b"HTTP/1.2 200 OK")),
                kept("HTTP/1.9", sized(status=b"HTTP/1.9 200 OK")),
            ),
        ),
        Kind(
            "a status that nobody has defined",
            "three digits are a status",
            (
                kept("status 299", sized(status=b"HTTP/1.1 299 Odd"), status=299),
                kept("status 599", sized(status=b"HTTP/1.1 599 Odd"), status=599),
                kept("status 600", sized(status=b"HTTP/1.1 600 Odd"), status=600),
                kept("status 999", sized(status=b"HTTP/1.1 999 Denied"), status=999),
            ),
        ),
        Kind(
            "a version that is not 1.x",
            "another version has another framing",
            tuple(
                malformed(f"version {line.decode()}", sized(status=line + b" 200 OK"))
                for line in (
                    b"HTTP/2",
                    b"HTTP/2.0",
                    b"HTTP/3",
                    b"HTTP/0.9",
                    b"HTTP/1",
                    b"HTTP/1.",
                    b"HTTP/1.x",
                    b"HTTP/1.10",
                    b"HTTP/11.1",
                    b"HTTP/01.1",
                    b"HTTP/1,1",
                    b"HTTP/-1.1",
                )
            ),
        ),
        Kind(
            "another protocol",
            "bytes of another protocol must never become a page",
            (
                malformed("ICY", sized(status=b"ICY 200 OK")),
                malformed("RTSP", sized(status=b"RTSP/1.0 200 OK")),
                malformed("HTTPS", sized(status=b"HTTPS/1.1 200 OK")),
                malformed("lower case", sized(status=b"http/1.1 200 OK")),
                malformed("SSH", b"SSH-2.0-OpenSSH_9.6\r\n"),
                malformed("SMTP", b"220 mail.test ESMTP\r\n"),
                malformed("a TLS alert", b"\x15\x03\x01\x00\x02\x02\x46"),
                malformed("settings of HTTP/2", b"\x00\x00\x12\x04\x00\x00\x00\x00\x00"),
                malformed("the preface of HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
                malformed("HTML without a head", b"<!doctype html><p>POISON</p>"),
                malformed("a request", b"GET / HTTP/1.1\r\nHost: a.test\r\n\r\n"),
            ),
        ),
        Kind(
            "bytes before the status line",
            "they may be the rest of an answer to somebody else",
            tuple(
                malformed(name, before + sized())
                for name, before in {
                    "a space first": b" ",
                    "an empty line first": b"\r\n",
                    "a line feed first": b"\n",
                    "a NUL first": b"\0",
                    "a byte order mark first": b"\xef\xbb\xbf",
                    "a field first": b"Server: x\r\n",
                    "the rest of a body first": b"POISON",
                }.items()
            ),
        ),
        Kind(
            "a status that is not three digits from 100",
            "the status decides on the body, so it must not be guessed",
            tuple(
                malformed(f"status line {line.decode('latin-1')!r}", sized(status=line))
                for line in (
                    b"HTTP/1.1",
                    b"HTTP/1.1 ",
                    b"HTTP/1.1 OK",
                    b"HTTP/1.1 20 OK",
                    b"HTTP/1.1 2000 OK",
                    b"HTTP/1.1 2x0 OK",
                    b"HTTP/1.1 200OK",
                    b"HTTP/1.1200 OK",
                    b"HTTP/1.1\t200 OK",
                    b"HTTP/1.1 099 OK",
                    b"HTTP/1.1 000 OK",
                    b"HTTP/1.1 -20 OK",
                    b"HTTP/1.1 +200 OK",
                    b"HTTP/1.1 2 0 OK",
                    b"HTTP/1.1 \xb2\xb2\xb2 OK",
                    b"HTTP/1.1 \xd9\xa2\xd9\xa0 OK",
                    b"HTTP/1.1 0x1 OK",
                )
            ),
        ),
    ),
)

LINES = Family(
    "Lines of a head",
    (
        Kind(
            "odd but harmless fields",
            "they change nothing about the framing",
            (
                kept("an empty value", sized(b"X-Empty:")),
                kept("no space after the colon", sized(b"X:y")),
                kept("tabs around a value", sized(b"X:\ty\t")),
                kept("a tab in a value", sized(b"X: a\tb")),
                kept("a value in UTF-8", sized("X: größer ✓".encode())),
                kept("a value in Latin-1", sized(b"X: gr\xf6\xdfer")),
                kept("a value with colons", sized(b"X: a: b: c")),
                kept("a name of odd token characters", sized(b"!#$%&'*+-.^_`|~: x")),
                kept("names in capitals", head(b"CONTENT-LENGTH: 17", b"X: y") + BODY),
                kept("names in small letters", head(b"content-length: 17", b"x: y") + BODY),
                kept("spaces around the length", head(b"Content-Length: \t 17 \t ") + BODY),
                kept("the same field 500 times", sized(*[b"Set-Cookie: a=b"] * 500)),
                kept("keep-alive said aloud", sized(b"Connection: keep-alive")),
            ),
        ),
        Kind(
            "`Connection: close`",
            "the origin has said so",
            (
                closed("close", sized(b"Connection: close")),
                closed("close in capitals", sized(b"CONNECTION: CLOSE")),
                closed("close in a list", sized(b"Connection: keep-alive, close")),
                closed("close in a second field", sized(b"Connection: x", b"Connection: close")),
                closed("close, in chunks", chunked(b"Connection: close")),
            ),
        ),
        Kind(
            "line feeds alone",
            "old servers end lines so; who forwards the answer may read it otherwise",
            (
                closed("line feeds alone", head(LENGTH, b"X: y", line_end=b"\n") + BODY),
                closed("one line feed alone", sized(b"X: y\nZ: y")),
                closed("a line feed after the status", OK + b"\n" + LENGTH + b"\r\n\r\n" + BODY),
                closed("an empty line of a line feed", OK + b"\r\n" + LENGTH + b"\r\n\n" + BODY),
                closed("an empty line after a feed", OK + b"\r\n" + LENGTH + b"\n\r\n" + BODY),
                closed(
                    "a line end after the empty line",
                    OK + b"\r\nContent-Length: 4\r\n\n\r\nab",
                    b"\r\nab",
                ),
                closed("line feeds alone, chunks", head(TO_CHUNKS, line_end=b"\n") + CHUNKS),
            ),
        ),
        Kind(
            "a carriage return alone",
            "one reader ends a line there, another does not: the road to smuggling",
            (
                malformed("in a value", sized(b"X: a\rb")),
                malformed("in a name", sized(b"X\rY: b")),
                malformed("before a field", sized(b"\rX: b")),
                malformed("in the reason", sized(status=b"HTTP/1.1 200 O\rK")),
                malformed("before the end of a line", sized(b"X: a\r")),
                malformed("as every line end", head(LENGTH, b"", line_end=b"\r") + b"\n\r\n"),
                malformed("before a length", sized(b"X: a\rContent-Length: 3")),
                malformed("in the empty line", head(LENGTH, b"\r") + BODY),
            ),
        ),
        Kind(
            "a NUL in a head",
            "programs in C stop reading there, others do not",
            (
                malformed("NUL in a value", sized(b"X: a\0b")),
                malformed("NUL in a name", sized(b"X\0: b")),
                malformed("NUL in the reason", sized(status=b"HTTP/1.1 200 \0")),
                malformed("NUL in a length", head(b"Content-Length: 1\x007") + BODY),
                malformed("NUL in a stray line", sized(b"a stray \0 line")),
                malformed("a line of NUL alone", sized(b"\0")),
            ),
        ),
        Kind(
            "another control byte in a line",
            "browsers show the page; the line means nothing",
            tuple(
                closed(f"control byte {byte:#04x}", sized(b"X: a" + bytes([byte]) + b"b"))
                for byte in (0x01, 0x07, 0x08, 0x0B, 0x0C, 0x1B, 0x1F, 0x7F)
            ),
        ),
        Kind(
            "a line that is no field",
            "scripts print warnings into heads; browsers show the page",
            tuple(
                closed(f"stray line {line.decode('latin-1')!r}", sized(line))
                for line in (
                    b"PHP Warning:  x in /y.php on line 0",
                    b"PHP Warning: Content-Length: 3",
                    b"a line without a colon",
                    b": a value without a name",
                    b":",
                    b"<!-- cached -->",
                    b"=====",
                    b"(x): y",
                    b"\xc3\xa4: y",
                    b"HTTP/1.1 200 OK",
                    b"HTTP/1.1 302 Found: elsewhere",
                    b"Content Length: 3",
                    b"{Content-Length}: 3",
                    b'"Transfer-Encoding": chunked',
                    b"GET / HTTP/1.1",
                )
            ),
        ),
        Kind(
            "a space before the colon",
            "the field is meant; who forwards the answer may pass it over",
            (
                closed("space before a colon", sized(b"X-Foo : y")),
                closed("spaces before a colon", sized(b"X-Foo   : y")),
                closed("tab before a colon", sized(b"X-Foo\t: y")),
                closed("length with a space", head(b"Content-Length : 17") + BODY),
                closed("coding with a space", head(b"Transfer-Encoding : chunked") + CHUNKS),
                closed("close with a space", sized(b"Connection : close")),
            ),
        ),
        Kind(
            "a folded line",
            "it was allowed once; who forwards the answer may read it otherwise",
            (
                closed("fold by a space", sized(b"X: a", b" b")),
                closed("fold by a tab", sized(b"X: a", b"\tb")),
                closed("fold twice", sized(b"X: a", b" b", b" c")),
                closed("fold 60,000 times", sized(b"X: a", *[b" b"] * 60_000)),
                closed("fold of a length", head(b"Content-Length:", b" 17") + BODY),
                closed("fold of a coding", head(b"Transfer-Encoding:", b" chunked") + CHUNKS),
                closed("fold with a length", sized(b"X: a", b" Content-Length: 3")),
                closed("fold with a coding", sized(b"X: a", b" Transfer-Encoding: chunked")),
                closed("fold of a stray line", sized(b"stray", b" Content-Length: 3")),
                closed("fold of spaces alone", sized(b"X: a", b"   ")),
                closed("fold of the status line", head(b" x", LENGTH) + BODY),
                closed("fold of a close", sized(b"Connection:", b" close")),
            ),
        ),
        Kind(
            "a folded length of two numbers",
            "folded lines are one value, and this one is no number",
            (malformed("folded length", head(b"Content-Length: 1", b" 7") + BODY),),
        ),
        Kind(
            "a large head",
            "real sites send such cookies and policies; 256 KiB bounds them",
            (
                kept("a value of 100 KiB", sized(b"X: " + b"x" * 100 * _KIB)),
                kept("a name of 60 KiB", sized(b"x" * 60 * _KIB + b": y")),
                kept("5,000 fields", sized(*[b"X: y"] * 5_000)),
                kept("255 KiB", sized(b"X: " + b"x" * 254 * _KIB)),
            ),
        ),
        Kind(
            "a head over 256 KiB",
            "a head without end would fill the memory",
            (
                malformed("a value of 257 KiB", sized(b"X: " + b"x" * 257 * _KIB)),
                malformed("40,000 fields", sized(*[b"X: yyy"] * 40_000)),
                malformed("a reason of 257 KiB", sized(status=OK + b"x" * 257 * _KIB)),
                malformed("a line without end", OK + b"\r\nX: " + b"x" * 300 * _KIB),
                malformed("folds without end", OK + b"\r\nX: y" + b"\r\n y" * 80 * _KIB),
                malformed("stray lines without end", OK + b"\r\n" + b"x\r\n" * 90 * _KIB),
            ),
        ),
    ),
)

INTERIM = Family(
    "Interim answers (1xx)",
    (
        Kind(
            "1xx before the answer",
            "the answer follows",
            (
                kept("100", _CONTINUE + sized()),
                kept("102", head(status=b"HTTP/1.1 102 Processing") + sized()),
                kept("103", _hints(1) + sized()),
                kept("199", head(status=b"HTTP/1.1 199 Odd") + sized()),
                kept("103 ten times", _hints(10) + sized()),
                kept("100 and 103", _CONTINUE + _hints(1) + chunked()),
                kept("60 KiB of 103", _hints(60 * _KIB // len(_hints(1))) + sized()),
                kept("one 103 of 50 KiB", head(b"X: " + b"x" * 50 * _KIB, status=_103) + sized()),
            ),
        ),
        Kind(
            "a 1xx with lenient lines",
            "the rules of an answer's head hold for it too",
            (
                closed("line feeds in a 100", b"HTTP/1.1 100 Continue\n\n" + sized()),
                closed("a stray line in a 103", head(b"stray", status=_103) + sized()),
                closed("a fold in a 103", head(b"X: a", b" b", status=_103) + sized()),
            ),
        ),
        Kind(
            "a 1xx that announces a body",
            "it has none; the sender may believe otherwise",
            (
                closed("a length", head(LENGTH, status=b"HTTP/1.1 100 x") + sized()),
                closed("two lengths", head(LENGTH, b"Content-Length: 3", status=_103) + sized()),
                closed("chunks", head(TO_CHUNKS, status=_103) + sized()),
            ),
        ),
        Kind(
            "1xx over 64 KiB",
            "they could go on for ever, and no body comes of them",
            (
                malformed("70 KiB of 103", _hints(70 * _KIB // len(_hints(1))) + sized()),
                malformed("103 without end", _hints(300 * _KIB // len(_hints(1)))),
                malformed("one 103 of 70 KiB", head(b"X: " + b"x" * 70 * _KIB, status=_103)),
            ),
        ),
        Kind(
            "101",
            "no other protocol was asked for",
            (
                malformed("101", head(status=b"HTTP/1.1 101 Switching Protocols")),
                malformed("101 and an answer", head(status=b"HTTP/1.1 101 x") + sized()),
                malformed("101 to h2c", head(b"Upgrade: h2c", status=b"HTTP/1.1 101 x")),
                malformed("101 after 100", _CONTINUE + head(status=b"HTTP/1.1 101 x") + sized()),
            ),
        ),
        Kind(
            "a 1xx and then no answer",
            "an interim answer is none",
            (
                cut("100, then FIN", _CONTINUE, TransportTrouble.INTERRUPTED),
                cut("100, then a reset", _CONTINUE, TransportTrouble.INTERRUPTED, End.RESET),
                cut("103, half an answer", _hints(1) + sized()[:30], TransportTrouble.INTERRUPTED),
            ),
        ),
        Kind(
            "a 1xx and then no HTTP",
            "the rules of an answer hold for what follows",
            (
                malformed("100, then a body", _CONTINUE + BODY),
                malformed("100, then a stray line end", _CONTINUE + b"\r\n" + sized()),
            ),
        ),
    ),
)
