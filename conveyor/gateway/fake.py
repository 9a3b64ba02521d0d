"""The fake gateway: in process, deterministic, driven by the target URL. It answers as a
ZenRows-compatible API would; `script` tells what can be asked of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType

import msgspec

from conveyor.gateway.content import read_content
from conveyor.gateway.headers import custom_headers, is_allowed
from conveyor.gateway.hits import Hits
from conveyor.gateway.problems import transport_failure
from conveyor.gateway.redaction import redactor
from conveyor.gateway.refusals import read_spend, refusal
from conveyor.gateway.retry_after import retry_after
from conveyor.gateway.script import (
    PLAIN,
    Behaviour,
    expected_body,
    page,
    problem_document,
    read_script,
    wire_body,
)
from conveyor.gateway.transport import TransportError, Trouble
from conveyor.ports.clock import Clock
from conveyor.ports.gateway import ScrapeFailed, ScrapeRequest, Success

_PIECE = 65_536
_PLAIN_TYPE = PLAIN.content_type


class FakeGateway:
    """The gateway port without a network.

    `hits` tells the calls made, at most `hit_limit` of them; delays pass on the clock.
    """

    def __init__(
        self, clock: Clock, *, retry_after_cap: float = 3_600.0, hit_limit: int = 100_000
    ) -> None:
        self.hits = Hits(hit_limit)
        self._clock = clock
        self._retry_after_cap = retry_after_cap

    def scrape(self, request: ScrapeRequest) -> _FakeCall:
        """Answer as the URL asks. Raises ScrapeFailed on entry, or while the content is read."""
        return _FakeCall(self, request)

    async def aclose(self) -> None:
        """Nothing is held."""

    async def _answer(self, request: ScrapeRequest, before: int) -> Success:
        script = read_script(request.url)
        wait = request.timeout if script.hang else min(script.delay, request.timeout)
        if wait > 0:
            await self._clock.sleep(wait)
        if script.hang or script.delay > request.timeout:
            raise transport_failure(Trouble.TIMEOUT)
        if script.reset and script.reset != "body":
            raise transport_failure(Trouble.INTERRUPTED)
        status = 503 if before < script.flaky else 402 if script.account else script.status
        spend = read_spend(script.cost)
        if not 200 <= status < 300 and not is_allowed(status, request.params):
            raise self._refuse(request, script, status)
        body = echo(request) if script.echo else expected_body(request.url)
        try:
            content = await read_content(_FakeAnswer(script, body), request.max_bytes)
        except ScrapeFailed as failed:
            failed.spend = spend
            raise
        return Success(content, script.content_type, spend)

    def _refuse(self, request: ScrapeRequest, script: Behaviour, status: int) -> ScrapeFailed:
        after, now, cap = script.retry_after, self._clock.now(), self._retry_after_cap
        return refusal(
            status,
            problem_document(script, status),
            redact=redactor(request.api_key),
            retry_after=retry_after(after, now=now, cap=cap) if after else 0.0,
            spend=read_spend(script.cost),
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
                return await self._gateway._answer(request, before)
            body = page(request.url)
            if len(body) > request.max_bytes:
                return await self._gateway._answer(request, before)
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


class _FakeAnswer:
    """The answer port over bytes at hand, broken off where the script says."""

    def __init__(self, script: Behaviour, body: bytes) -> None:
        wire = wire_body(script, body)
        fields = {"Content-Type": script.content_type}
        if script.content_encoding:
            fields["Content-Encoding"] = script.content_encoding
        if not script.chunked:
            fields["Content-Length"] = str(len(wire))
        self.status = script.status
        self.headers = _FakeHeaders(fields)
        self._trouble: Trouble | None = None
        if script.short or script.reset == "body":
            wire = wire[: len(wire) // 2]
            self._trouble = Trouble.TRUNCATED if script.short else Trouble.INTERRUPTED
        self._wire = wire

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
    """What `echo=1` answers: the request as JSON, its key left out."""
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
