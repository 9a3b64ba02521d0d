"""A load balancer for tests: connections to one address go to several servers in turn."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import anyio
from anyio.abc import TaskStatus
from anyio.from_thread import start_blocking_portal

Address = tuple[str, int]
_PIECE = 65_536


class Front:
    """Where the connections go; `servers` may be changed at any time."""

    def __init__(self, servers: Sequence[Address]) -> None:
        self.servers = list(servers)
        self._turns = itertools.count()

    async def serve(self, *, task_status: TaskStatus[int]) -> None:
        """Listen on a free port of loopback, which is told, until cancelled."""
        server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        async with server:
            task_status.started(server.sockets[0].getsockname()[1])
            await server.serve_forever()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await self._connect()
        except OSError:
            writer.close()
            return
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(_pump, reader, back)
                await _pump(there, writer)
                group.cancel_scope.cancel()
        finally:
            back.close()
            writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The next server that takes connections. Raises OSError where none does."""
        servers = list(self.servers)
        for _ in servers[1:]:
            try:
                return await asyncio.open_connection(*servers[next(self._turns) % len(servers)])
            except OSError:
                continue
        return await asyncio.open_connection(*servers[next(self._turns) % len(servers)])


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Everything that comes, until either side has ended."""
    try:
        while piece := await reader.read(_PIECE):
            writer.write(piece)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
    except (ConnectionError, OSError):
        return


@contextmanager
def front(servers: Sequence[Address]) -> Iterator[tuple[int, Front]]:
    """A front on a thread of its own: its port, and itself."""
    balancer = Front(servers)
    with start_blocking_portal() as portal:
        serving, port = portal.start_task(balancer.serve)
        try:
            yield port, balancer
        finally:
            serving.cancel()
