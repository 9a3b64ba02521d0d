"""The HTTP client of the gateways: aiohttp behind a few calls.

This is the only module that knows aiohttp; another client takes its place by offering the same
`HttpClient` and `ClientAnswer`. `HttpCall` makes one scrape a context: it is entered once the
answer is there, and left once the connection is free.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from functools import lru_cache, partial
from types import TracebackType

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.client_reqrep import ClientRequest, ConnectionKey
from aiohttp.tracing import Trace
from yarl import URL

from conveyor import __version__
from conveyor.gateway.headers import Headers, HttpAnswer
from conveyor.gateway.problems import TransportError, TransportTrouble
from conveyor.ports.gateway import ScrapeRequest, Success

Lookup = Callable[[str, int], Awaitable[list[str]]]
"""Return the IP addresses of a host name (and port), as text. Raises OSError if there are no
addresses."""


USER_AGENT = f"conveyor/{__version__}"
DEFAULT_HEADERS = {
    "User-Agent": USER_AGENT,
    "Accept": "*/*",
    "Accept-Encoding": "gzip, deflate, br",
}
MAX_HEADER_LINE = 32_768
MAX_HEADERS = 200
MAX_PIECE = 262_144
_KEEP_ALIVE = 15.0
_NOT_ADDED = ("User-Agent", "Content-Type")

Admits = Callable[[str], bool]


class ClientAnswer:
    """An answer over an aiohttp response."""

    __slots__ = ("_response", "headers", "status")

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.headers: Headers = response.headers

    async def read(self) -> bytes:
        try:
            return await self._response.read()
        except Exception as error:
            raise _trouble(error, TransportTrouble.INTERRUPTED) from None

    def pieces(self) -> AsyncIterator[bytes]:
        return _Pieces(self._response.content.iter_chunked(MAX_PIECE))

    def release(self) -> None:
        self._response.release()


class HttpClient:
    """Send requests over pooled connections, without following redirects or decoding bodies.

    `connections` bounds the open connections. `admits` decides whether an IP address may be
    touched: it is asked of each address that a name resolves to, and of the peer of each connection
    before a request goes over it. `lookup` replaces the system's resolver. Belongs to one event
    loop.
    """

    def __init__(
        self, *, connections: int, admits: Admits | None = None, lookup: Lookup | None = None
    ) -> None:
        self._connections = connections
        self._admits = admits
        self._lookup = lookup if lookup is not None else _system_lookup
        self._session: aiohttp.ClientSession | None = None

    async def send(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str],
        body: bytes | None,
        timeout: float,
    ) -> ClientAnswer:
        """Send a request; return its answer once the head is there.

        `url` is ASCII and is sent as it is. `headers` must include Accept, Accept-Encoding and,
        with a body, Content-Type. `timeout` is in seconds and includes reading the body. Raises
        TransportError, and nothing else, whatever the URL.
        """
        try:
            session = self._session
            if session is None:
                session = self._session = self._open()
            return ClientAnswer(
                await session.request(
                    method,
                    URL(url, encoded=True),
                    headers=headers,
                    data=body,
                    skip_auto_headers=_NOT_ADDED,
                    allow_redirects=False,
                    timeout=_timeout(timeout),
                )
            )
        except TransportError:
            raise
        except Exception as error:
            raise _trouble(error, TransportTrouble.UNSENDABLE) from None

    async def aclose(self) -> None:
        """Close every connection."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _open(self) -> aiohttp.ClientSession:
        resolver = _FilteredResolver(self._lookup, self._admits)
        return aiohttp.ClientSession(
            connector=_Connector(self._connections, resolver, self._admits),
            auto_decompress=False,
            trust_env=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            max_line_size=MAX_HEADER_LINE,
            max_field_size=MAX_HEADER_LINE,
            max_headers=MAX_HEADERS,
        )


class _Connector(aiohttp.TCPConnector):
    """Check each connection before anything is sent over it: its peer, and bytes that arrived on it
    while it was idle."""

    def __init__(self, limit: int, resolver: AbstractResolver, admits: Admits | None) -> None:
        super().__init__(limit=limit, resolver=resolver, keepalive_timeout=_KEEP_ALIVE)
        self._admits = admits

    async def connect(
        self, req: ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> aiohttp.connector.Connection:
        connection = await super().connect(req, traces, timeout)
        if self._admits is not None:
            transport = connection.transport
            peer = transport.get_extra_info("peername") if transport is not None else None
            if not peer or not self._admits(peer[0]):
                connection.close()
                raise TransportError(TransportTrouble.REFUSED)
        return connection

    async def _get(
        self, key: ConnectionKey, traces: list[Trace]
    ) -> aiohttp.connector.Connection | None:
        """Take a connection from the pool. Close one that holds unexpected bytes, because the next
        request would take them for its answer."""
        while (connection := await super()._get(key, traces)) is not None:
            if connection.protocol is not None and not connection.protocol.should_close:
                break
            connection.close()
        return connection


class _FilteredResolver(AbstractResolver):
    """Drop addresses that may not be touched; connections go to the others."""

    def __init__(self, lookup: Lookup, admits: Admits | None) -> None:
        self._lookup = lookup
        self._admits = admits

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        addresses = await self._lookup(host, port)
        admits = self._admits
        if admits is not None:
            admitted = [address for address in addresses if admits(address)]
            if addresses and not admitted:
                raise TransportError(TransportTrouble.REFUSED)
            addresses = admitted
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address in addresses
        ]

    async def close(self) -> None:
        """Nothing is held."""


class _Pieces(AsyncIterator[bytes]):
    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces = pieces

    async def __anext__(self) -> bytes:
        try:
            return await anext(self._pieces)
        except StopAsyncIteration:
            raise
        except Exception as error:
            raise _trouble(error, TransportTrouble.INTERRUPTED) from None


async def _system_lookup(host: str, port: int) -> list[str]:
    """Look a name up in a thread of its own.

    The loop's own lookups share a few threads. A few names whose servers do not answer would block
    every other name, and the end of the process, for as long as the resolver waits.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[list[str]] = loop.create_future()

    def look_up() -> None:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            addresses = list(dict.fromkeys(str(address[4][0]) for address in found))
            settle = partial(_answer, answer, addresses)
        except Exception as error:
            settle = partial(_refuse, answer, error)
        # If the loop has closed meanwhile, nobody waits for the answer.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(settle)

    threading.Thread(target=look_up, name="look-up", daemon=True).start()
    return await answer


def _answer(future: asyncio.Future[list[str]], addresses: list[str]) -> None:
    if not future.done():
        future.set_result(addresses)


def _refuse(future: asyncio.Future[list[str]], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


@lru_cache(maxsize=64)
def _timeout(seconds: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=seconds)


_KINDS: tuple[tuple[type[Exception], TransportTrouble], ...] = (
    (TimeoutError, TransportTrouble.TIMEOUT),
    (aiohttp.ClientConnectorError, TransportTrouble.UNREACHABLE),
    (aiohttp.ClientSSLError, TransportTrouble.UNREACHABLE),
    (aiohttp.ClientPayloadError, TransportTrouble.TRUNCATED),
    (aiohttp.InvalidURL, TransportTrouble.UNSENDABLE),
    (aiohttp.ClientResponseError, TransportTrouble.MALFORMED),
    (aiohttp.ClientError, TransportTrouble.INTERRUPTED),
    (aiohttp.http_exceptions.HttpProcessingError, TransportTrouble.MALFORMED),
    (OSError, TransportTrouble.INTERRUPTED),
)


def _trouble(error: Exception, otherwise: TransportTrouble) -> TransportError:
    """Translate an exception, without its text, which may quote the URL."""
    for kind, trouble in _KINDS:
        if isinstance(error, kind):
            return TransportError(trouble)
    return TransportError(otherwise)


Opened = tuple[HttpAnswer, Success]


class HttpCall(AbstractAsyncContextManager[Success]):
    """The context that `scrape` returns. `start` returns the answer and its content, or raises
    ScrapeFailed with the answer already released."""

    __slots__ = ("_answer", "_request", "_start")

    def __init__(
        self, start: Callable[[ScrapeRequest], Awaitable[Opened]], request: ScrapeRequest
    ) -> None:
        self._start = start
        self._request = request
        self._answer: HttpAnswer | None = None

    async def __aenter__(self) -> Success:
        answer, success = await self._start(self._request)
        # The connection of a body that came whole is back in the pool already.
        if not isinstance(success.content, bytes):
            self._answer = answer
        return success

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._answer is not None:
            self._answer.release()
            self._answer = None
