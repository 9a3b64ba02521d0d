"""Nasty answers: content codings. Their framing is by the book."""

from __future__ import annotations

import gzip
import zlib

import brotli

from tests.nasty.answer import BODY, POISON, End, Family, Kind, Nasty, chunked, head

LIMIT = 1_048_576
"""The most bytes of a decoded body that callers of the nasty origin take."""
CORRUPT, TOO_LARGE, TOO_MANY = "corrupt_body", "result_too_large", "too_many_codings"

_GZIP = gzip.compress(BODY, mtime=0)
_ZLIB = zlib.compress(BODY)
_BROTLI = brotli.compress(BODY)
_BOMB = bytes(2 * LIMIT)
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_CHECKSUM = b"e\xfc\x9b\xe4"
_RAW, _RLE, _RESERVED = 0, 1, 3


def _raw_deflate(body: bytes) -> bytes:
    deflater = zlib.compressobj(wbits=-15)
    return deflater.compress(body) + deflater.flush()


def _block(kind: int, size: int, data: bytes, *, is_last: bool = True) -> bytes:
    """Return a block of zstd."""
    return (size << 3 | kind << 1 | is_last).to_bytes(3, "little") + data


def _zstd(*blocks: bytes, window: int = 0x48, flags: int = 0) -> bytes:
    """Return a frame of zstd; a window of 0x68 is 8 MiB, and 8 more double it."""
    return _ZSTD_MAGIC + bytes((flags, window)) + b"".join(blocks)


_PLAIN_BLOCK = _block(_RAW, len(BODY), BODY)
_FRAME = _zstd(_PLAIN_BLOCK)
_SEGMENT = _ZSTD_MAGIC + b"\x20" + bytes([len(BODY)]) + _PLAIN_BLOCK
_SUMMED = _zstd(_PLAIN_BLOCK, flags=4)
_SKIPPED = b"\x50\x2a\x4d\x18\x06\0\0\0" + POISON


def _coded(name: str, coding: bytes, wire: bytes, content: bytes | str = BODY) -> Nasty:
    """Return an answer with a length and a content coding."""
    lines = (b"Content-Encoding: " + coding, b"Content-Length: %d" % len(wire))
    return Nasty(name=name, wire=head(*lines) + wire, body=wire, content=content, kept=True)


def _in_chunks(name: str, coding: bytes, wire: bytes, content: bytes | str = BODY) -> Nasty:
    """Return the same in chunks of one byte."""
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in wire) + b"0\r\n\r\n"
    answer = chunked(b"Content-Encoding: " + coding, chunks=chunks)
    return Nasty(name=name, wire=answer, body=wire, content=content, kept=True)


def _to_the_end(name: str, coding: bytes, wire: bytes, content: bytes | str = BODY) -> Nasty:
    """Return the same, ended by the connection."""
    answer = head(b"Content-Encoding: " + coding) + wire
    return Nasty(name=name, wire=answer, body=wire, content=content, end=End.FIN, until_end=True)


def _damaged(wire: bytes, index: int) -> bytes:
    changed = bytearray(wire)
    changed[index] ^= 0x55
    return bytes(changed)


CONTENT_CODINGS = Family(
    "Content codings",
    (
        Kind(
            "a coding by the book",
            "the page is what was coded",
            (
                _coded("gzip", b"gzip", _GZIP),
                _coded("x-gzip", b"x-gzip", _GZIP),
                _coded("GZIP", b"GZIP", _GZIP),
                _coded("identity", b"identity", BODY),
                _coded("an empty field", b"", BODY),
                _coded("gzip and identity", b"gzip, identity", _GZIP),
                _coded("deflate", b"deflate", _ZLIB),
                _coded("br", b"br", _BROTLI),
                _coded("gzip twice", b"gzip, gzip", gzip.compress(_GZIP, mtime=0)),
                _coded("br in gzip", b"br, gzip", gzip.compress(_BROTLI, mtime=0)),
                _in_chunks("gzip in chunks of a byte", b"gzip", _GZIP),
                _in_chunks("deflate in chunks of a byte", b"deflate", _ZLIB),
                _in_chunks("br in chunks of a byte", b"br", _BROTLI),
                _coded(
                    "gzip with a name",
                    b"gzip",
                    b"\x1f\x8b\x08\x08" + _GZIP[4:10] + b"x.html\0" + _GZIP[10:],
                ),
            ),
        ),
        Kind(
            "zstd",
            "some sites send it unasked",
            (
                _coded("a frame", b"zstd", _FRAME),
                _coded("a frame with its size", b"zstd", _SEGMENT),
                _coded("a frame with its checksum", b"zstd", _SUMMED + _ZSTD_CHECKSUM),
                _coded(
                    "two frames",
                    b"zstd",
                    _zstd(_block(_RAW, 5, BODY[:5])) + _zstd(_block(_RAW, 12, BODY[5:])),
                ),
                _coded("a frame to skip first", b"zstd", _SKIPPED + _FRAME),
                _coded(
                    "blocks",
                    b"zstd",
                    _zstd(_block(_RAW, 5, BODY[:5], is_last=False), _block(_RAW, 12, BODY[5:])),
                ),
                _coded("a repeated byte", b"zstd", _zstd(_block(_RLE, 99, b"x")), b"x" * 99),
                _coded("a window of 8 MiB", b"zstd", _zstd(_PLAIN_BLOCK, window=0x68)),
                _in_chunks("in chunks of a byte", b"zstd", _FRAME),
            ),
        ),
        Kind(
            "zstd with a window over 8 MiB",
            "the sender would decide how much memory is used",
            (
                _coded("16 MiB", b"zstd", _zstd(_PLAIN_BLOCK, window=0x70), CORRUPT),
                _coded("1 GiB", b"zstd", _zstd(_PLAIN_BLOCK, window=0xA0), CORRUPT),
                _coded("the largest", b"zstd", _zstd(_PLAIN_BLOCK, window=0xFF), CORRUPT),
            ),
        ),
        Kind(
            "deflate without its wrapper",
            "some servers have always sent it so, and browsers read it",
            (
                _coded("raw", b"deflate", _raw_deflate(BODY)),
                _in_chunks("raw in chunks of a byte", b"deflate", _raw_deflate(BODY)),
                _to_the_end("raw to the end", b"deflate", _raw_deflate(BODY)),
            ),
        ),
        Kind(
            "an empty body under a coding",
            "an empty page needs no coding",
            (
                _coded("gzip", b"gzip", b"", b""),
                _coded("deflate", b"deflate", b"", b""),
                _coded("br", b"br", b"", b""),
                _coded("zstd", b"zstd", b"", b""),
                _coded("gzip of nothing", b"gzip", gzip.compress(b"", mtime=0), b""),
                _coded("br of nothing", b"br", brotli.compress(b""), b""),
            ),
        ),
        Kind(
            "a coding that nobody knows",
            "the bytes are stored as they came",
            (
                _coded("a made-up one", b"cow", BODY),
                _coded("compress", b"compress", BODY),
                _coded("under gzip", b"cow, gzip", _GZIP),
                _coded("over gzip", b"gzip, cow", _GZIP, _GZIP),
            ),
        ),
        Kind(
            "a coded body cut off",
            "a part of a page must not pass for the page, though its length is right",
            (
                _coded("gzip", b"gzip", _GZIP[:-9], CORRUPT),
                _coded("gzip without its last byte", b"gzip", _GZIP[:-1], CORRUPT),
                _coded("gzip, the header alone", b"gzip", _GZIP[:10], CORRUPT),
                _coded("gzip, one byte", b"gzip", _GZIP[:1], CORRUPT),
                _coded("deflate", b"deflate", _ZLIB[:-1], CORRUPT),
                _coded("raw deflate", b"deflate", _raw_deflate(BODY)[:-2], CORRUPT),
                _coded("br", b"br", _BROTLI[:-1], CORRUPT),
                _coded("zstd", b"zstd", _FRAME[:-1], CORRUPT),
                _coded("zstd before its checksum", b"zstd", _SUMMED, CORRUPT),
                _coded("zstd, the magic alone", b"zstd", _ZSTD_MAGIC, CORRUPT),
                _coded("in gzip", b"gzip, gzip", gzip.compress(_GZIP[:-1], mtime=0), CORRUPT),
                _coded("a second member", b"gzip", _GZIP + _GZIP[:-1], CORRUPT),
                _in_chunks("gzip in chunks", b"gzip", _GZIP[:-1], CORRUPT),
                _to_the_end("gzip to the end", b"gzip", _GZIP[:-1], CORRUPT),
                _to_the_end("br to the end", b"br", _BROTLI[:-1], CORRUPT),
                _to_the_end("zstd to the end", b"zstd", _FRAME[:-1], CORRUPT),
            ),
        ),
        Kind(
            "a damaged coded body",
            "a damaged page must not pass for the page",
            (
                _coded("plain text as gzip", b"gzip", BODY, CORRUPT),
                _coded("plain text as br", b"br", BODY, CORRUPT),
                _coded("plain text as zstd", b"zstd", BODY, CORRUPT),
                _coded("HTML as deflate", b"deflate", b"<html>" + BODY, CORRUPT),
                _coded("the data of gzip", b"gzip", _damaged(_GZIP, 14), CORRUPT),
                _coded("the checksum of gzip", b"gzip", _damaged(_GZIP, -8), CORRUPT),
                _coded("the size of gzip", b"gzip", _damaged(_GZIP, -1), CORRUPT),
                _coded("the method of gzip", b"gzip", _damaged(_GZIP, 2), CORRUPT),
                _coded("the checksum of deflate", b"deflate", _damaged(_ZLIB, -1), CORRUPT),
                _coded("the checksum of zstd", b"zstd", _SUMMED + b"\0\0\0\0", CORRUPT),
                _coded(
                    "a reserved block of zstd", b"zstd", _zstd(_block(_RESERVED, 1, b"x")), CORRUPT
                ),
                _coded("gzip said twice", b"gzip, gzip", _GZIP, CORRUPT),
                _coded(
                    "a dictionary for zstd",
                    b"zstd",
                    _ZSTD_MAGIC + b"\x21\x11\x07" + _PLAIN_BLOCK,
                    CORRUPT,
                ),
            ),
        ),
        Kind(
            "bytes after the end of gzip, deflate or zstd",
            "servers pad, browsers pass over it; they are in no page",
            (
                _coded("zeros after gzip", b"gzip", _GZIP + bytes(9)),
                _coded("text after gzip", b"gzip", _GZIP + POISON),
                _coded("a byte after gzip", b"gzip", _GZIP + b"\x1f"),
                _coded("text after deflate", b"deflate", _ZLIB + POISON),
                _coded("text after raw deflate", b"deflate", _raw_deflate(BODY) + POISON),
                _to_the_end("text after gzip, to the end", b"gzip", _GZIP + POISON),
            ),
        ),
        Kind(
            "bytes after the end of br or zstd",
            "no server pads these; it is damage",
            (
                _coded("text after br", b"br", _BROTLI + POISON, CORRUPT),
                _coded("text after zstd", b"zstd", _FRAME + POISON, CORRUPT),
            ),
        ),
        Kind(
            "members of gzip",
            "they are one page; too many cost far more time than their size suggests",
            (
                _coded(
                    "two",
                    b"gzip",
                    gzip.compress(BODY[:5], mtime=0) + gzip.compress(BODY[5:], mtime=0),
                ),
                _coded(
                    "an empty one between",
                    b"gzip",
                    gzip.compress(BODY[:5], mtime=0)
                    + gzip.compress(b"", mtime=0)
                    + gzip.compress(BODY[5:], mtime=0),
                ),
                _coded("a hundred", b"gzip", gzip.compress(b"x", mtime=0) * 100, b"x" * 100),
            ),
        ),
        Kind(
            "members of gzip without end",
            "too many cost far more time than their size suggests",
            (_coded("5,000", b"gzip", gzip.compress(b"", mtime=0) * 5_000, CORRUPT),),
        ),
        Kind(
            "a bomb",
            "the bound is on what a page becomes, at every step",
            (
                _coded("gzip", b"gzip", gzip.compress(_BOMB, mtime=0), TOO_LARGE),
                _coded("deflate", b"deflate", zlib.compress(_BOMB), TOO_LARGE),
                _coded("br", b"br", brotli.compress(_BOMB, quality=1), TOO_LARGE),
                _coded(
                    "zstd",
                    b"zstd",
                    _zstd(*[_block(_RLE, 131_072, b"x", is_last=False)] * 16),
                    TOO_LARGE,
                ),
                _coded(
                    "gzip in gzip",
                    b"gzip, gzip",
                    gzip.compress(gzip.compress(_BOMB, mtime=0), mtime=0),
                    TOO_LARGE,
                ),
                _coded(
                    "a bomb that is a page in the end",
                    b"gzip, gzip",
                    gzip.compress(_GZIP + _BOMB, mtime=0),
                    TOO_LARGE,
                ),
                _to_the_end("gzip to the end", b"gzip", gzip.compress(_BOMB, mtime=0), TOO_LARGE),
            ),
        ),
        Kind(
            "a body over the limit without a coding",
            "the bound is on every page",
            (
                Nasty(
                    name="by its length",
                    wire=head(b"Content-Length: %d" % len(_BOMB)) + _BOMB,
                    body=_BOMB,
                    content=TOO_LARGE,
                    kept=True,
                ),
                Nasty(
                    name="to the end",
                    wire=head() + _BOMB,
                    body=_BOMB,
                    content=TOO_LARGE,
                    end=End.FIN,
                    until_end=True,
                ),
            ),
        ),
        Kind(
            "more than three codings",
            "nobody needs them, and each costs",
            (
                _coded("four", b"gzip, gzip, gzip, gzip", BODY, TOO_MANY),
                _coded("a thousand", b",".join([b"gzip"] * 1_000), BODY, TOO_MANY),
            ),
        ),
    ),
)
