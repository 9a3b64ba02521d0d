"""What a target URL asks of the fake gateway and of the fake server: its query is the script.

    http://fake.test/page?status=503&flaky=2&delay=0.1&encoding=gzip&charset=shift_jis

A URL without a query is a small page, answered at once. Words that are not known, and numbers that
are none, are ignored.
"""

from __future__ import annotations

import gzip
import zlib
from base64 import urlsafe_b64decode
from collections.abc import Callable
from functools import lru_cache
from hashlib import sha256
from urllib.parse import parse_qsl, urlsplit

import brotli
import msgspec

MAX_SIZE = 1 << 28
_SAMPLE = "Grüße, Привет, 日本語"


class Behaviour(msgspec.Struct, frozen=True, kw_only=True):
    """How a URL is answered.

    status: the HTTP status. flaky: so many first calls get 503 instead. delay: seconds before the
    answer. size: bytes of body. body, body64: the body itself, as text or as URL-safe base 64.
    type, charset: the Content-Type. encoding: content codings applied, in order, of gzip, deflate,
    raw-deflate and br, listed in Content-Encoding; another word is listed and changes nothing.
    chunked: no Content-Length. truncate: the encoded body is cut in half, its length told truly.
    short: fewer bytes than the length tells. hang: no answer. reset: the connection breaks, before
    the answer ("1") or in its body ("body"). retry_after, cost, location: those headers.
    account: a 402 with this code. code, detail: the problem document of an error status. echo: the
    body is the request, as JSON.
    """

    status: int = 200
    flaky: int = 0
    delay: float = 0.0
    size: int | None = None
    body: str | None = None
    body64: str | None = None
    type: str = "text/html"
    charset: str = ""
    encoding: str = ""
    chunked: bool = False
    truncate: bool = False
    short: bool = False
    hang: bool = False
    reset: str = ""
    retry_after: str = ""
    cost: str = ""
    location: str = ""
    account: str = ""
    code: str = ""
    detail: str = ""
    echo: bool = False

    @property
    def content_type(self) -> str:
        """The Content-Type header; text has a charset, utf-8 where the script names none."""
        charset = self.charset or ("utf-8" if self.type.startswith("text/") else "")
        return f"{self.type}; charset={charset}" if charset else self.type

    @property
    def codings(self) -> list[str]:
        """The codings to apply, in order."""
        return [word for word in self.encoding.split(",") if word]

    @property
    def content_encoding(self) -> str:
        """The Content-Encoding header; empty where there is none."""
        return ", ".join(coding.removeprefix("raw-") for coding in self.codings)


PLAIN = Behaviour()


@lru_cache(maxsize=1024)
def read_script(url: str) -> Behaviour:
    """The behaviour that a URL asks for."""
    try:
        query = urlsplit(url).query
    except ValueError:
        return PLAIN
    fields: dict[str, object] = {}
    for name, text in parse_qsl(query, keep_blank_values=True):
        value = _READERS[name](text) if name in _READERS else None
        if value is not None:
            fields[name] = value
    return msgspec.convert(fields, Behaviour)


def expected_body(url: str) -> bytes:
    """The body that a URL yields, before any coding: a function of the URL alone."""
    script = read_script(url) if "?" in url else PLAIN
    if script.body64 is not None:
        return urlsafe_b64decode(script.body64 + "=" * (-len(script.body64) % 4))
    if script.body is not None:
        return _encode(script.body, script.charset)
    if script.size is not None:
        seed = sha256(url.encode("utf-8", "replace")).digest()
        return (seed * (script.size // len(seed) + 1))[: script.size]
    if script is PLAIN:
        return page(url)
    return _encode(f"<title>{url}</title><p>{_SAMPLE}</p>", script.charset)


def page(url: str) -> bytes:
    """The body of a URL without a script."""
    return b"<!doctype html><title>%b</title>" % url.encode("utf-8", "replace")


def wire_body(script: Behaviour, body: bytes) -> bytes:
    """A body as it goes over the wire: every coding applied, then cut where the script says."""
    for coding in script.codings:
        if coding in _CODERS:
            body = _CODERS[coding](body)
    return body[: len(body) // 2] if script.truncate else body


def problem_document(script: Behaviour, status: int) -> bytes:
    """The problem document that goes with an error status."""
    code = script.account or script.code or f"fake_{status}"
    document = {"code": code, "title": f"Scripted {status}", "status": status}
    if script.detail:
        document["detail"] = script.detail
    return msgspec.json.encode(document)


def _encode(text: str, charset: str) -> bytes:
    try:
        return text.encode(charset or "utf-8", "xmlcharrefreplace")
    except (LookupError, UnicodeError):
        return text.encode("utf-8", "replace")


def _raw_deflate(body: bytes) -> bytes:
    compressor = zlib.compressobj(6, zlib.DEFLATED, -15)
    return compressor.compress(body) + compressor.flush()


_CODERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": lambda body: gzip.compress(body, 1, mtime=0),
    "deflate": zlib.compress,
    "raw-deflate": _raw_deflate,
    "br": lambda body: brotli.compress(body, quality=1),
}


def _whole(low: int, high: int) -> Callable[[str], object]:
    def read(text: str) -> object:
        number = int(text) if text.isascii() and text.isdecimal() and len(text) < 12 else None
        return number if number is not None and low <= number <= high else None

    return read


def _seconds(text: str) -> object:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 <= number < 1e6 else None


def _flag(text: str) -> object:
    return text not in ("", "0", "false")


def _word(text: str) -> object:
    return text if text.isascii() and text.isprintable() else None


def _codings(text: str) -> object:
    words = [word.strip().lower() for word in text.split(",")]
    return _word(",".join(words))


def _base64(text: str) -> object:
    try:
        urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except ValueError:
        return None
    return text


_READERS: dict[str, Callable[[str], object]] = {
    "status": _whole(200, 599),
    "flaky": _whole(0, 1_000_000),
    "delay": _seconds,
    "size": _whole(0, MAX_SIZE),
    "body": lambda text: text,
    "body64": _base64,
    "type": _word,
    "charset": _word,
    "encoding": _codings,
    "chunked": _flag,
    "truncate": _flag,
    "short": _flag,
    "hang": _flag,
    "reset": _word,
    "retry_after": _word,
    "cost": _word,
    "location": _word,
    "account": _word,
    "code": lambda text: text,
    "detail": lambda text: text,
    "echo": _flag,
}
