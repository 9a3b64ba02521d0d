"""A load balancer for tests: passes connections to one address on to several servers in turn, or
cuts them off."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import urlsplit

import anyio
from anyio.abc import TaskStatus
from anyio.from_thread import BlockingPortal, start_blocking_portal

Address = tuple[str, int]
_PIECE = 65_536


class LoadBalancer:
    """Passes connections on to `servers`, which may be changed at any time; with no servers, closes
    them at once."""

    def __init__(self, servers: Sequence[Address]) -> None:
        self.servers = list(servers)
        self._turns = itertools.count()
        self._open: set[asyncio.StreamWriter] = set()

    def cut(self) -> None:
        """End every connection. Belongs to the event loop that serves."""
        for writer in self._open:
            writer.transport.abort()

    async def serve(self, *, task_status: TaskStatus[int]) -> None:
        """Listen on a free port of loopback until cancelled; reports the port when ready."""
        server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        async with server:
            task_status.started(server.sockets[0].getsockname()[1])
            try:
                await server.serve_forever()
            finally:
                self.cut()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await self._connect()
        except OSError:
            writer.close()
            return
        self._open |= {writer, back}
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(_pump, reader, back)
                await _pump(there, writer)
                group.cancel_scope.cancel()
        finally:
            self._open -= {writer, back}
            back.close()
            writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the next server that takes connections. Raises OSError if none does."""
        servers = list(self.servers)
        if not servers:
            raise ConnectionRefusedError
        for _ in servers[1:]:
            try:
                return await asyncio.open_connection(*servers[next(self._turns) % len(servers)])
            except OSError:
                continue
        return await asyncio.open_connection(*servers[next(self._turns) % len(servers)])


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass on all data until either side has ended."""
    try:
        while piece := await reader.read(_PIECE):
            writer.write(piece)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    except (ConnectionError, OSError):
        return


@contextmanager
def load_balancer(servers: Sequence[Address]) -> Iterator[tuple[int, LoadBalancer]]:
    """Run a load balancer on a thread of its own; yields its port, and itself."""
    balancer = LoadBalancer(servers)
    with start_blocking_portal() as portal, _serving(balancer, portal) as port:
        yield port, balancer


class Switch:
    """A service that can be switched off: it takes no connections then, and open ones are ended."""

    def __init__(self, url: str, port: int, balancer: LoadBalancer, portal: BlockingPortal) -> None:
        parts = urlsplit(url)
        self.url = f"http://127.0.0.1:{port}"
        self._address = (parts.hostname or "", parts.port or 80)
        self._front = balancer
        self._portal = portal

    def off(self) -> None:
        """Switch the service off."""
        self._front.servers = []
        self._portal.call(self._front.cut)

    def on(self) -> None:
        """Switch the service on."""
        self._front.servers = [self._address]


@contextmanager
def switch(url: str) -> Iterator[Switch]:
    """Put a switch in front of the service at this URL; it is on at first."""
    balancer = LoadBalancer([])
    with start_blocking_portal() as portal, _serving(balancer, portal) as port:
        switched = Switch(url, port, balancer, portal)
        switched.on()
        yield switched


@contextmanager
def _serving(balancer: LoadBalancer, portal: BlockingPortal) -> Iterator[int]:
    serving, port = portal.start_task(balancer.serve)
    try:
        yield port
    finally:
        serving.cancel()
