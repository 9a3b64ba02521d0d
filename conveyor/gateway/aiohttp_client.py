"""aiohttp as the client of the gateways, until the next release: it was the client before
`conveyor.wire`.

Bytes that lie unread in the socket, a reset at the end of a body without length, and a request that
aiohttp sends twice pass unseen here.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import lru_cache

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.client_reqrep import ClientRequest, ConnectionKey
from aiohttp.tracing import Trace
from yarl import URL

from conveyor.gateway.headers import Headers
from conveyor.wire.connector import is_home
from conveyor.wire.errors import TransportError, TransportTrouble, unreached, unresolved
from conveyor.wire.resolver import Admits, Lookup, system_lookup

MAX_HEADER_LINE = 32_768
MAX_HEADERS = 200
MAX_PIECE = 262_144
_KEEP_ALIVE = 15.0
_REACHED_WITHIN = 30.0
_NOT_ADDED = ("User-Agent", "Content-Type")


class AiohttpAnswer:
    """An answer over an aiohttp response."""

    __slots__ = ("_response", "headers", "length", "sent", "status")

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.headers: Headers = response.headers
        self.length = None  # aiohttp tells a length that counts from one that does not by itself
        self.sent = 1

    def whole(self) -> bytes | None:
        return None

    async def read(self) -> bytes:
        try:
            return await self._response.read()
        except Exception as error:
            raise _trouble(error, TransportTrouble.INTERRUPTED) from None

    def pieces(self) -> AsyncIterator[bytes]:
        return _Pieces(self._response.content.iter_chunked(MAX_PIECE))

    def release(self) -> None:
        self._response.release()


class AiohttpClient:
    """Send requests over pooled connections, without following redirects or decoding bodies.

    `admits` is asked of each address that a name resolves to, and of the peer of each connection
    before a request goes over it. `own_port` of this machine is never connected to, 0 for none.
    Belongs to one event loop.
    """

    def __init__(
        self,
        *,
        connections: int,
        admits: Admits | None = None,
        lookup: Lookup | None = None,
        own_port: int = 0,
    ) -> None:
        self._own_port = own_port
        self._connections = connections
        self._admits = admits
        self._lookup = lookup if lookup is not None else system_lookup
        self._session: aiohttp.ClientSession | None = None

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
    ) -> AiohttpAnswer:
        try:
            session = self._session
            if session is None:
                session = self._session = self._open()
            return AiohttpAnswer(
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

    async def reach(self, url: str) -> None:
        parts = URL(url, encoded=True)
        try:
            async with asyncio.timeout(_REACHED_WITHIN):
                _, writer = await asyncio.open_connection(parts.host, parts.port)
        except Exception as error:
            raise unreached(error) from None
        writer.close()

    async def aclose(self) -> None:
        """Close every connection."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _open(self) -> aiohttp.ClientSession:
        resolver = _FilteredResolver(self._lookup, self._admits)
        return aiohttp.ClientSession(
            connector=_Connector(self._connections, resolver, self._admits, self._own_port),
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

    def __init__(
        self, limit: int, resolver: AbstractResolver, admits: Admits | None, own_port: int
    ) -> None:
        super().__init__(limit=limit, resolver=resolver, keepalive_timeout=_KEEP_ALIVE)
        self._admits = admits
        self._own_port = own_port

    async def _resolve_host(
        self, host: str, port: int, traces: Sequence[Trace] | None = None
    ) -> list[ResolveResult]:
        """Return the addresses of a host, also of one that is an address itself."""
        found = await super()._resolve_host(host, port, traces)
        if port == self._own_port and any(is_home(one["host"]) for one in found):
            raise TransportError(TransportTrouble.REFUSED)
        return found

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


@lru_cache(maxsize=64)
def _timeout(seconds: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=seconds)


_KINDS: tuple[tuple[type[Exception], TransportTrouble], ...] = (
    (TimeoutError, TransportTrouble.TIMEOUT),
    (aiohttp.ClientPayloadError, TransportTrouble.TRUNCATED),
    (aiohttp.InvalidURL, TransportTrouble.UNSENDABLE),
    (aiohttp.ClientResponseError, TransportTrouble.MALFORMED),
    (aiohttp.ClientError, TransportTrouble.INTERRUPTED),
    (aiohttp.http_exceptions.HttpProcessingError, TransportTrouble.MALFORMED),
    (OSError, TransportTrouble.INTERRUPTED),
)


def _trouble(error: Exception, otherwise: TransportTrouble) -> TransportError:
    """Translate an exception, without its text, which may quote the URL."""
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return unresolved(error.os_error)
    if isinstance(error, aiohttp.ClientConnectorError):
        return unreached(getattr(error, "os_error", error))
    trouble = next((meant for kind, meant in _KINDS if isinstance(error, kind)), otherwise)
    return TransportError(trouble, sent=0 if trouble is TransportTrouble.UNSENDABLE else 1)
