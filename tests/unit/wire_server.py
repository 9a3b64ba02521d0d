"""A server of raw answers, for tests of the wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

Serve = Callable[["Peer"], Awaitable[None]]


class Peer:
    """One connection, as its server sees it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def request(self) -> str:
        """Read the head of a request; return nothing once the client has closed."""
        try:
            return (await self._reader.readuntil(b"\r\n\r\n")).decode()
        except (asyncio.IncompleteReadError, ConnectionError):
            return ""

    async def body(self, size: int) -> bytes:
        """Read so many bytes behind a head."""
        return await self._reader.readexactly(size)

    async def send(self, data: bytes) -> None:
        """Send bytes."""
        self._writer.write(data)
        await self._writer.drain()

    async def pump(self, other: Peer) -> None:
        """Pass on what the client sends until it closes."""
        while data := await self._reader.read(65_536):
            await other.send(data)


class RawServer:
    """A listener on loopback. `requests` are the heads of all requests, by connection."""

    def __init__(self) -> None:
        self.port = 0
        self.requests: list[list[str]] = []

    @property
    def all_requests(self) -> list[str]:
        """The heads of all requests."""
        return [head for heads in self.requests for head in heads]

    def url(self, path: str = "/", *, host: str = "127.0.0.1") -> str:
        """The URL of a path."""
        return f"http://{host}:{self.port}{path}"


class _Recorded(Peer):
    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, heads: list[str]
    ) -> None:
        super().__init__(reader, writer)
        self._heads = heads

    async def request(self) -> str:
        head = await super().request()
        if head:
            self._heads.append(head)
        return head


@asynccontextmanager
async def raw_server(serve: Serve) -> AsyncIterator[RawServer]:
    """Run a server that hands each connection to `serve`, and closes it afterwards."""
    server = RawServer()
    tasks: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        heads: list[str] = []
        server.requests.append(heads)
        try:
            await serve(_Recorded(reader, writer, heads))
        except (ConnectionError, asyncio.CancelledError):
            writer.transport.abort()
        finally:
            writer.close()

    listener = await asyncio.start_server(accept, "127.0.0.1", 0)
    server.port = listener.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listener.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def answer(body: bytes = b"OK", *, fields: str = "") -> bytes:
    """A whole answer, after which the connection is kept."""
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n%b\r\n%b" % (len(body), fields.encode(), body)


async def answer_all(peer: Peer) -> None:
    """Answer every request with its path."""
    while head := await peer.request():
        await peer.send(answer(head.split(" ")[1].encode()))
