"""The HTTP client of the gateways, and a scrape as a context.

`conveyor.wire` is the client. aiohttp, which was the client before, can take its place until the
next release (`CONVEYOR_HTTP_ENGINE`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import TracebackType
from typing import Protocol

from conveyor import __version__
from conveyor.gateway.headers import HttpAnswer
from conveyor.ports.gateway import ScrapeFailed, ScrapeRequest, Success
from conveyor.wire.client import HttpClient
from conveyor.wire.options import ClientOptions
from conveyor.wire.resolver import Admits, Lookup

USER_AGENT = f"conveyor/{__version__}"
DEFAULT_HEADERS = {
    "User-Agent": USER_AGENT,
    "Accept": "*/*",
    "Accept-Encoding": "gzip, deflate, br",
}


class HttpEngine(Protocol):
    """A client that sends requests over pooled connections, without following redirects or decoding
    bodies."""

    async def send(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str],
        body: bytes | None,
        timeout: float,
        repeatable: bool = False,
        before: Callable[[], None] | None = None,
    ) -> HttpAnswer:
        """Send a request; return its answer once the head is there.

        `url` is ASCII and is sent as it is. `headers` must include Accept, Accept-Encoding and,
        with a body, Content-Type. `timeout` is in seconds and includes reading the body. Only a
        `repeatable` request may be sent again. `before` is called with a connection in hand: an
        error of it ends the call with none sent. Raises TransportError, and nothing else, whatever
        the URL.
        """
        ...

    async def reach(self, url: str) -> None:
        """Make a connection to the origin of a URL and close it, without a request. Raises
        TransportError, with `is_connecting` if nobody is there."""
        ...

    async def aclose(self) -> None:
        """Close every connection."""
        ...


class OpenClient(Protocol):
    """A function that opens a client of at most `connections` connections.

    `admits` decides whether an IP address may be touched; `lookup` replaces the system's resolver.
    """

    def __call__(
        self, *, connections: int, admits: Admits | None = None, lookup: Lookup | None = None
    ) -> HttpEngine:
        """Open it."""
        ...


def client_opener(engine: str, options: ClientOptions) -> OpenClient:
    """Return what opens clients of an engine, "wire" or "aiohttp"; of the options the second heeds
    `own_port` alone.

    Raises ImportError if aiohttp is asked for and not installed.
    """
    if engine == "aiohttp":
        from conveyor.gateway.aiohttp_client import AiohttpClient

        return partial(AiohttpClient, own_port=options.own_port)
    return partial(HttpClient, options=options)


Opened = tuple[HttpAnswer, Success]


class HttpCall(AbstractAsyncContextManager[Success]):
    """The context that `scrape` returns. `start` returns the answer and its content, or raises
    ScrapeFailed with the answer already released. `explain` completes each failure."""

    __slots__ = ("_explain", "_opened", "_request", "_start")

    def __init__(
        self,
        start: Callable[[ScrapeRequest], Awaitable[Opened]],
        request: ScrapeRequest,
        explain: Callable[[ScrapeFailed], Awaitable[None]] | None = None,
    ) -> None:
        self._start = start
        self._request = request
        self._explain = explain
        self._opened: Opened | None = None

    async def __aenter__(self) -> Success:
        try:
            opened = await self._start(self._request)
        except ScrapeFailed as failed:
            if self._explain is not None:
                await self._explain(failed)
            raise
        success = opened[1]
        # The connection of a body that came whole is back in the pool already.
        if not isinstance(success.content, bytes):
            self._opened = opened
        return success

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._opened is not None:
            answer, success = self._opened
            self._opened = None
            answer.release()
            if isinstance(error, ScrapeFailed):
                error.sent, error.spend = success.sent, success.spend
                if self._explain is not None:
                    await self._explain(error)
