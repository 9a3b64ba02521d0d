"""Answers that nobody asked for, pushed over an idle connection of a gateway: over real sockets."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream

from conveyor.gateway.direct import DirectGateway
from conveyor.gateway.http import HttpGateway
from conveyor.ports.gateway import Gateway, ScrapeRequest
from conveyor.testing.clock import FakeClock
from conveyor.wire.connection import HttpConnection
from tests.patient import SECONDS

PUSHED = {
    "a whole answer": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nOTHER",
    "an answer without its end": b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nOTHER",
    "one to be followed": b"HTTP/1.1 100 Continue\r\nX: OTHER\r\n\r\n",
}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Pushing:
    """Answers each request with the number that its URL ends in, and keeps the connection."""

    def __init__(self) -> None:
        self.port = 0
        self.connections: list[SocketStream] = []

    async def serve(self, stream: SocketStream) -> None:
        self.connections.append(stream)
        head = b""
        async with stream:
            while True:
                try:
                    head += await stream.receive()
                except (anyio.EndOfStream, anyio.BrokenResourceError):
                    return
                if head.endswith(b"\r\n\r\n"):
                    [number] = re.findall(rb"page-(\d)", head)
                    await stream.send(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nOWN-" + number)
                    head = b""


@asynccontextmanager
async def pushing() -> AsyncIterator[Pushing]:
    server = Pushing()
    async with (
        await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
        anyio.create_task_group() as group,
    ):
        server.port = listener.extra(SocketAttribute.local_port)
        group.start_soon(listener.serve, server.serve)
        yield server
        group.cancel_scope.cancel()


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> anyio.Event:
    """Set once a gateway's client has taken what was pushed from the socket."""
    event, received = anyio.Event(), HttpConnection.buffer_updated

    def buffer_updated(self: HttpConnection, count: int) -> None:
        data = bytes(self.get_buffer(-1)[:count])
        received(self, count)
        if b"OTHER" in data:
            event.set()

    monkeypatch.setattr(HttpConnection, "buffer_updated", buffer_updated)
    return event


def direct(server: Pushing) -> tuple[Gateway, str]:
    gateway = DirectGateway(FakeClock(), allow_private=True)
    return gateway, f"http://127.0.0.1:{server.port}"


def http(server: Pushing) -> tuple[Gateway, str]:
    gateway = HttpGateway(f"http://127.0.0.1:{server.port}/v1/", FakeClock())
    return gateway, "http://any.test"


async def body(gateway: Gateway, url: str, key: str) -> bytes:
    async with gateway.scrape(ScrapeRequest(url, key, timeout=SECONDS)) as success:
        assert isinstance(success.content, bytes)
        return success.content


@pytest.mark.parametrize("pushed", PUSHED.values(), ids=PUSHED)
@pytest.mark.parametrize("made", [direct, http])
async def test_an_answer_that_nobody_asked_for_reaches_nobody(
    made: Callable[[Pushing], tuple[Gateway, str]], pushed: bytes, read: anyio.Event
) -> None:
    async with pushing() as server:
        gateway, origin = made(server)
        async with aclosing(gateway):
            first = await body(gateway, f"{origin}/page-1", "one caller's key")
            [connection] = server.connections
            with anyio.fail_after(SECONDS):
                await connection.send(pushed)
                await read.wait()
            second = await body(gateway, f"{origin}/page-2", "another's key")
            third = await body(gateway, f"{origin}/page-3", "one caller's key")

    assert [first, second, third] == [b"OWN-1", b"OWN-2", b"OWN-3"]
    assert len(server.connections) == 2, "a second in place of the first, and kept"
