"""The fake gateway: in process and deterministic, it answers as the query of the target URL asks.

    http://fake.test/page?status=503&flaky=2&delay=0.1&encoding=gzip&charset=shift_jis

It answers as an API compatible with ZenRows would. A URL without a query is a small page, answered
at once. Unknown words and invalid numbers are ignored. The gateway remembers its calls, for tests
to assert on.
"""

from __future__ import annotations

import gzip
import zlib
from base64 import b64decode, urlsafe_b64decode
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import lru_cache
from hashlib import sha256
from types import TracebackType
from typing import cast
from urllib.parse import parse_qsl, urlsplit

import brotli
import msgspec

from conveyor.gateway.decode import read_content, zstd_library
from conveyor.gateway.headers import custom_headers, is_allowed, retry_after
from conveyor.gateway.problems import transport_failure
from conveyor.gateway.refusals import read_spend, redactor, refusal
from conveyor.ports.clock import Clock
from conveyor.ports.gateway import ScrapeFailed, ScrapeRequest, Success
from conveyor.wire.errors import TransportError, TransportTrouble


class Hit(msgspec.Struct, frozen=True):
    """One call. `key_digest` tells API keys apart without keeping one."""

    url: str
    method: str
    header_names: tuple[str, ...]
    key_digest: str


class Hits:
    """The number of calls, and the last ones, both bounded.

    `counts` holds the calls of each URL, for the first `limit` different URLs; `calls` the last
    `limit` calls; `total` counts all. Where nobody reads them, `keeps_all` is false: then there are
    no `calls`, and `counts` has flaky URLs alone, whose answers depend on it.
    """

    def __init__(self, limit: int, *, keeps_all: bool = True) -> None:
        self.limit = limit
        self._keeps_all = keeps_all
        self.counts: dict[str, int] = {}
        self.calls: deque[Hit] = deque(maxlen=limit)
        self.total = 0
        self.in_flight = 0
        self.peak_in_flight = 0

    def enter(self, url: str, method: str, header_names: tuple[str, ...], api_key: str) -> int:
        """Note that a call begins; return how many calls of its URL came before."""
        self.total += 1
        self.in_flight += 1
        if self.in_flight > self.peak_in_flight:
            self.peak_in_flight = self.in_flight
        before = self.counts.get(url, 0)
        is_counted = self._keeps_all or ("?" in url and read_script(url).flaky > 0)
        if is_counted and (before or len(self.counts) < self.limit):
            self.counts[url] = before + 1
        if self._keeps_all:
            self.calls.append(Hit(url, method, header_names, key_digest(api_key)))
        return before

    def leave(self) -> None:
        """Note that a call ended."""
        self.in_flight -= 1

    def clear(self) -> None:
        """Forget everything but the calls in flight."""
        self.counts.clear()
        self.calls.clear()
        self.total = 0
        self.peak_in_flight = self.in_flight


@lru_cache(maxsize=256)
def key_digest(api_key: str) -> str:
    """Return what a Hit keeps of an API key."""
    return sha256(api_key.encode("utf-8", "replace")).hexdigest()[:16]


MAX_SIZE = 1 << 28
_SAMPLE = "Grüße, Привет, 日本語"


class Behaviour(msgspec.Struct, frozen=True, kw_only=True):
    """The answer that the query of a URL asks for.

    status: the HTTP status. flaky: how many first calls get 503 instead. delay: seconds before the
    answer. size: bytes of body. body, body64: the body itself, as text or as URL-safe base 64.
    type, charset: the Content-Type. encoding: content codings to apply, in order, of gzip, deflate,
    raw-deflate and br, listed in Content-Encoding; any other word is listed and changes nothing.
    chunked: no Content-Length. truncate: cut the encoded body in half, with its true length. short:
    send fewer bytes than the length says. hang: no answer. reset: break the connection, before the
    answer ("1") or in its body ("body"). retry_after, cost, credits, location: those headers.
    account: a 402 with this code. code, detail: the problem document of an error status. echo:
    answer with the request, as JSON.
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
    credits: str = ""
    location: str = ""
    account: str = ""
    code: str = ""
    detail: str = ""
    echo: bool = False

    @property
    def content_type(self) -> str:
        """The Content-Type header; text has a charset, utf-8 by default."""
        charset = self.charset or ("utf-8" if self.type.startswith("text/") else "")
        return f"{self.type}; charset={charset}" if charset else self.type

    @property
    def codings(self) -> list[str]:
        """The codings to apply, in order."""
        return [word for word in self.encoding.split(",") if word]

    @property
    def content_encoding(self) -> str:
        """The Content-Encoding header; empty without a coding."""
        return ", ".join(coding.removeprefix("raw-") for coding in self.codings)


PLAIN = Behaviour()


@lru_cache(maxsize=1024)
def read_script(url: str) -> Behaviour:
    """Return the behaviour that a URL asks for."""
    try:
        query = urlsplit(url).query
    except ValueError:
        return PLAIN
    return behaviour_of(parse_qsl(query, keep_blank_values=True))


def behaviour_of(words: Iterable[tuple[str, str]]) -> Behaviour:
    """Return the behaviour that words and their texts ask for; pass over those not understood."""
    fields: dict[str, object] = {}
    for name, text in words:
        value = _READERS[name](text) if name in _READERS else None
        if value is not None:
            fields[name] = value
    return msgspec.convert(fields, Behaviour)


def is_understood(word: str, text: str) -> bool:
    """Return whether a word of a query changes the answer as its text says; a URL's own words that
    do not are passed over."""
    read = _READERS.get(word)
    return read is not None and read(text) is not None and (read is not _flag or text in ("0", "1"))


def expected_body(url: str) -> bytes:
    """Return the body of a URL, before any coding: a function of the URL alone."""
    return scripted_body(read_script(url) if "?" in url else PLAIN, url)


def scripted_body(script: Behaviour, url: str) -> bytes:
    """Return the body that a behaviour gives to a URL, before any coding."""
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
    """Return the body of a URL without a script."""
    return b"<!doctype html><title>%b</title>" % url.encode("utf-8", "replace")


def wire_body(script: Behaviour, body: bytes) -> bytes:
    """Return a body as it is sent: with every coding applied, then cut as the script says."""
    for coding in script.codings:
        if coding in _CODERS:
            body = _CODERS[coding](body)
    return body[: len(body) // 2] if script.truncate else body


def problem_document(script: Behaviour, status: int) -> bytes:
    """Return the problem document of an error status."""
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
    "zstd": lambda body: cast("bytes", zstd_library().compress(body)),
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
        b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except ValueError:
        return None
    return text


def _reset(text: str) -> object:
    return text if text in ("", "1", "body") else None


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
    "reset": _reset,
    "retry_after": _word,
    "cost": _word,
    "credits": _word,
    "location": _word,
    "account": _word,
    "code": lambda text: text,
    "detail": lambda text: text,
    "echo": _flag,
}


_PIECE = 65_536
_PLAIN_TYPE = PLAIN.content_type


class FakeGateway:
    """The gateway port without a network.

    `hits` holds the calls made, at most `hit_limit` of them; without `keeps_hits` it only counts.
    Delays pass on the clock.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        retry_after_cap: float = 3_600.0,
        hit_limit: int = 100_000,
        keeps_hits: bool = True,
    ) -> None:
        self.hits = Hits(hit_limit, keeps_all=keeps_hits)
        self._clock = clock
        self._retry_after_cap = retry_after_cap

    def scrape(self, request: ScrapeRequest) -> AbstractAsyncContextManager[Success]:
        """Answer as the URL asks. Raises ScrapeFailed on entry, or while the content is read."""
        return _FakeCall(self, request)

    async def aclose(self) -> None:
        """Nothing is held."""

    def clear(self) -> None:
        """Forget all calls."""
        self.hits.clear()

    async def _answer(
        self,
        request: ScrapeRequest,
        script: Behaviour,
        before: int,
        stored: bytes | None = None,
    ) -> Success:
        wait = request.timeout if script.hang else min(script.delay, request.timeout)
        if wait > 0:
            await self._clock.sleep(wait)
        if script.hang or script.delay > request.timeout:
            raise transport_failure(TransportTrouble.TIMEOUT)
        if script.reset and script.reset != "body":
            raise transport_failure(TransportTrouble.INTERRUPTED)
        status = 503 if before < script.flaky else 402 if script.account else script.status
        spend = read_spend(script.cost, script.credits)
        if not 200 <= status < 300 and not is_allowed(status, request.params):
            raise self._refuse(request, script, status)
        body = scripted_body(script, request.url) if stored is None else stored
        if script.echo:
            body = echo(request)
        try:
            content = await read_content(_FakeAnswer(script, body), request.max_bytes)
        except ScrapeFailed as failed:
            failed.spend = spend
            raise
        return Success(content, script.content_type, spend, status=status)

    def _refuse(self, request: ScrapeRequest, script: Behaviour, status: int) -> ScrapeFailed:
        after, now, cap = script.retry_after, self._clock.now(), self._retry_after_cap
        return refusal(
            status,
            problem_document(script, status),
            redact=redactor(request.api_key),
            retry_after=retry_after(after, now=now, cap=cap) if after else 0.0,
            spend=read_spend(script.cost, script.credits),
        )


class _FakeCall(AbstractAsyncContextManager[Success]):
    __slots__ = ("_gateway", "_request")

    def __init__(self, gateway: FakeGateway, request: ScrapeRequest) -> None:
        self._gateway = gateway
        self._request = request

    async def __aenter__(self) -> Success:
        request, hits = self._request, self._gateway.hits
        names: tuple[str, ...] = ()
        if "custom_headers" in request.params:
            names = tuple(custom_headers(request.params))
        before = hits.enter(request.url, request.method, names, request.api_key)
        try:
            if "?" in request.url:
                script = read_script(request.url)
                return await self._gateway._answer(request, script, before)
            body = page(request.url)
            if len(body) > request.max_bytes:
                return await self._gateway._answer(request, PLAIN, before)
            return Success(body, _PLAIN_TYPE)
        except BaseException:
            hits.leave()
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._gateway.hits.leave()


class _FakeHeaders:
    def __init__(self, fields: Mapping[str, str]) -> None:
        self._fields = fields

    def get(self, name: str, /, default: str) -> str:
        return self._fields.get(name, default)

    def getall(self, name: str, /, default: list[str]) -> list[str]:
        return [self._fields[name]] if name in self._fields else default

    def values(self) -> list[str]:
        return list(self._fields.values())


class _FakeAnswer:
    """An answer over bytes at hand, broken off where the script says."""

    def __init__(self, script: Behaviour, body: bytes) -> None:
        wire = wire_body(script, body)
        fields = {"Content-Type": script.content_type}
        if script.content_encoding:
            fields["Content-Encoding"] = script.content_encoding
        self.length = None if script.chunked else len(wire)
        self.status = script.status
        self.headers = _FakeHeaders(fields)
        self.sent = 1
        self._trouble: TransportTrouble | None = None
        if script.short or script.reset == "body":
            wire = wire[: len(wire) // 2]
            self._trouble = (
                TransportTrouble.TRUNCATED if script.short else TransportTrouble.INTERRUPTED
            )
        self._wire = wire

    def whole(self) -> bytes | None:
        return None

    async def read(self) -> bytes:
        if self._trouble is not None:
            raise TransportError(self._trouble)
        return self._wire

    async def pieces(self) -> AsyncIterator[bytes]:
        for start in range(0, len(self._wire), _PIECE):
            yield self._wire[start : start + _PIECE]
        if self._trouble is not None:
            raise TransportError(self._trouble)

    def release(self) -> None:
        self._wire = b""


def echo(request: ScrapeRequest) -> bytes:
    """Return the answer of `echo=1`: the request as JSON, without its key."""
    body = request.body
    return msgspec.json.encode(
        {
            "method": request.method,
            "url": request.url,
            "headers": custom_headers(request.params),
            "params": {k: v for k, v in request.params.items() if k != "custom_headers"},
            "content_type": body.content_type if body is not None else None,
            "body": body.content if body is not None else None,
        }
    )
