"""Make connections: find the address, check it, connect, pass the proxy, speak TLS."""

from __future__ import annotations

import asyncio
import socket
import ssl
from functools import partial
from ipaddress import ip_address

from aiohappyeyeballs import start_connection

from conveyor.wire.connection import HttpConnection
from conveyor.wire.errors import TransportError, TransportTrouble, unreached
from conveyor.wire.options import ClientOptions, Proxy
from conveyor.wire.origin import Origin, write_request
from conveyor.wire.resolver import Admits, Resolver
from conveyor.wire.tls import client_context

_MOST_OF_A_FAMILY = 4
_NEXT_ADDRESS = 0.25
"""Seconds until the next address of a name is tried beside one that is silent (RFC 8305)."""


class Connector:
    """Make connections. Belongs to one event loop."""

    def __init__(self, resolver: Resolver, admits: Admits | None, options: ClientOptions) -> None:
        self._resolver = resolver
        self._admits = admits
        self._options = options
        self._context: ssl.SSLContext | None = None

    async def resolve(self, origin: Origin, *, afresh: bool = False) -> list[str]:
        """Return the addresses to connect to; `afresh` remembers none. Raises TransportError."""
        proxy = self._options.proxy
        place = origin if proxy is None else proxy.origin
        return await self._resolver.resolve(place.host, place.port, afresh=afresh)

    async def open_socket(self, addresses: list[str], origin: Origin) -> socket.socket:
        """Connect to the first address that answers. Raises TransportError: UNREACHABLE, EXHAUSTED,
        or REFUSED if the peer may not be touched."""
        proxy = self._options.proxy
        port = origin.port if proxy is None else proxy.origin.port
        if port == self._options.own_port and any(map(is_home, addresses)):
            raise TransportError(TransportTrouble.REFUSED)
        infos = [(*_family(address), "", (address, port)) for address in _some(addresses)]
        try:
            async with asyncio.timeout(self._options.connect):
                sock = await start_connection(
                    infos, happy_eyeballs_delay=_NEXT_ADDRESS, interleave=1
                )
        except (OSError, RuntimeError, TimeoutError) as error:
            raise unreached(error) from None
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            is_admitted = self._admits is None or self._admits(sock.getpeername()[0])
        except OSError as error:
            sock.close()
            raise unreached(error) from None
        if not is_admitted:
            sock.close()
            raise TransportError(TransportTrouble.REFUSED)
        return sock

    async def set_up(self, connection: HttpConnection, sock: socket.socket) -> None:
        """Make a connection of a socket, ready for requests. Raises TransportError, and the
        connection is lost then."""
        loop = asyncio.get_running_loop()
        making = loop.create_task(loop.create_connection(lambda: connection, sock=sock))
        making.add_done_callback(partial(_made, connection, sock))
        try:
            # Cancelled on its way, a transport of uvloop would close without a word.
            await asyncio.shield(making)
        except OSError as error:
            raise unreached(error) from None
        except asyncio.CancelledError:
            connection.abort()
            raise
        try:
            async with asyncio.timeout(self._options.connect):
                await self._prepare(connection)
        except TimeoutError as error:
            connection.abort()
            if connection.origin.scheme == "https" and self._options.proxy is None:
                # The connection is there: it is TLS that nobody answers.
                raise TransportError(TransportTrouble.TLS, is_connecting=True) from None
            raise unreached(error) from None
        except BaseException:
            connection.abort()
            raise

    async def aclose(self) -> None:
        """Forget the look-ups under way."""
        await self._resolver.aclose()

    async def _prepare(self, connection: HttpConnection) -> None:
        origin, proxy = connection.origin, self._options.proxy
        if proxy is not None:
            await _pass_through(proxy, connection, self._options.connect)
        if origin.scheme == "https":
            context = self._context
            if context is None:
                context = self._context = self._make_context()
            await connection.start_tls(context, origin.host.rstrip("."))

    def _make_context(self) -> ssl.SSLContext:
        try:
            return client_context(self._options.authority, alone=self._options.alone)
        except OSError as error:
            if (meant := unreached(error)).trouble is TransportTrouble.EXHAUSTED:
                raise meant from None
            raise TransportError(TransportTrouble.TLS) from None


def is_home(address: str) -> bool:
    """Tell whether an address leads to this machine's loopback; the unspecified one does too."""
    found = ip_address(address)
    mapped = found.ipv4_mapped if found.version == 6 else None
    return any(one.is_loopback or one.is_unspecified for one in (found, mapped) if one is not None)


def _made(connection: HttpConnection, sock: socket.socket, making: asyncio.Task[object]) -> None:
    if making.cancelled() or making.exception() is not None:
        sock.close()
        connection.give_up()
    else:
        connection.start()


async def _pass_through(proxy: Proxy, connection: HttpConnection, seconds: float) -> None:
    """Ask a proxy for a way to the origin. Raises TransportError(UNREACHABLE) if it refuses."""
    origin = connection.origin
    host = f"[{origin.host}]" if ":" in origin.host else origin.host
    place = f"{host}:{origin.port}"
    authorization = proxy.authorization
    headers = {} if authorization is None else {"Proxy-Authorization": authorization}
    request = write_request("CONNECT", place, place, headers, None)
    deadline = asyncio.get_running_loop().time() + seconds
    reader = await connection.begin(request, "CONNECT", deadline=deadline)
    if reader.head is None or reader.head.status >= 300 or not reader.may_keep:
        raise TransportError(TransportTrouble.UNREACHABLE)
    connection.idle_since = None


def _some(addresses: list[str]) -> list[str]:
    """Return the first addresses of each family: while nobody answers, one socket more is opened
    for each, all in the slot of one connection."""
    of_6 = [address for address in addresses if ":" in address][:_MOST_OF_A_FAMILY]
    of_4 = [address for address in addresses if ":" not in address][:_MOST_OF_A_FAMILY]
    return [address for address in addresses if address in of_6 or address in of_4]


def _family(address: str) -> tuple[socket.AddressFamily, socket.SocketKind, int]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return family, socket.SOCK_STREAM, socket.IPPROTO_TCP
