"""A server that answers as the path says, well or badly, for tests of the client's pool.

`/late-17` gets the body of request 17 after a while. It counts the connections that its clients
hold open, as the kernel sees them.
"""

from __future__ import annotations

import asyncio
import random
import re
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import cast

HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
_PATH = re.compile(rb"GET /([a-z_]+)-(\d+) ")
_OPEN_STATES = frozenset({1, 4, 5})
"""States of TCP in which the peer has not closed: ESTABLISHED, FIN_WAIT1, FIN_WAIT2."""
LATEST = 0.003
"""Seconds after which at the latest a server does what it does later."""
_TIMES = 1_000
LARGE = 400_000


def body_of(kind: str, number: int) -> bytes:
    """Return the body that belongs to this request alone."""
    own = b"<%d>" % number
    return own * (LARGE // len(own)) if kind == "large" else own


def _sized(body: bytes, *lines: bytes) -> bytes:
    head = [b"HTTP/1.1 200 OK", b"Content-Length: %d" % len(body), *lines, b"", b""]
    return b"\r\n".join(head) + body


def _chunked(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


_OTHER = _sized(b"POISON")


class ChanceServer:
    """The state of all connections. `most_open` is the most that were open at a time, of which
    `limit` are in order; `unanswered` are the requests that got no whole answer yet. Answers of the
    kind `held` wait until `limit` requests for such are here."""

    def __init__(self, seed: int, limit: int) -> None:
        self.port = 0
        self.by_chance = random.Random(seed)
        self._limit = limit
        self.most_open = 0
        self.requests = 0
        self.unanswered: set[int] = set()
        self._held: list[Callable[[], None]] = []
        self._connections: set[_Connection] = set()

    @property
    def open(self) -> int:
        """The connections that clients hold open now."""
        return sum(connection.is_open() for connection in self._connections)

    def settled(self, limit: int) -> int:
        """Return the connections held open, once the kernel has closed what was closed.

        The client runs in this very thread: meanwhile it does nothing."""
        for _ in range(_TIMES):
            if self.open <= limit:
                break
            time.sleep(0.001)
        return self.open

    def enter(self, connection: _Connection) -> None:
        self._connections.add(connection)
        self.most_open = max(self.most_open, self.settled(self._limit))

    def drop(self) -> None:
        """Drop all connections."""
        for connection in self._connections:
            connection.drop()

    def leave(self, connection: _Connection) -> None:
        self._connections.discard(connection)

    def hold(self, answer: Callable[[], None]) -> None:
        """Answer once enough requests are here together."""
        self._held.append(answer)
        if len(self._held) >= self._limit:
            held, self._held = self._held, []
            for each in held:
                each()


class _Connection(asyncio.Protocol):
    def __init__(self, server: ChanceServer) -> None:
        self._server = server
        self._data = b""
        self._requests = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._socket: socket.socket = transport.get_extra_info("socket")
        self._server.enter(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._server.leave(self)

    def drop(self) -> None:
        self._transport.abort()

    def is_open(self) -> bool:
        state = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        return state in _OPEN_STATES

    def data_received(self, data: bytes) -> None:
        self._data += data
        while b"\r\n\r\n" in self._data:
            head, _, self._data = self._data.partition(b"\r\n\r\n")
            found = _PATH.match(head)
            assert found is not None, head
            self._server.requests += 1
            self._requests += 1
            kind, number = found[1].decode(), int(found[2])
            self._server.unanswered.add(number)
            self._answer(kind, number)

    def _answer(self, kind: str, number: int) -> None:
        loop, by_chance = asyncio.get_running_loop(), self._server.by_chance
        body = body_of(kind, number)
        if kind == "late":
            loop.call_later(by_chance.random() * LATEST, self._send, number, _sized(body))
        elif kind == "held":
            self._server.hold(lambda: self._send(number, _sized(body)))
        elif kind == "in_parts":
            wire = _chunked(body)
            place = by_chance.randrange(len(wire))
            self._transport.write(wire[:place])
            loop.call_later(by_chance.random() * LATEST, self._send, number, wire[place:])
        elif kind == "cut":
            self._transport.write(_sized(body)[:-1])
            self._transport.close()
        elif kind == "reset":
            self._transport.write(_chunked(body)[: by_chance.randrange(40)])
            self._transport.abort()
        elif kind == "broken":
            self._transport.write(by_chance.choice((b"POISON", b"HTTP/1.1 200 OK\r\n\0\r\n\r\n")))
        elif kind != "never":
            self._send(number, _chunked(body) if kind == "chunked" else _sized(body))
            self._follow(kind, number)

    def _follow(self, kind: str, number: int) -> None:
        """Do what the kind says beyond the answer."""
        by_chance = self._server.by_chance
        if kind == "surplus":
            self._transport.write(_OTHER)
        elif kind == "ends":
            self._transport.close()
        elif kind == "ends_later":
            loop = asyncio.get_running_loop()
            loop.call_later(by_chance.random() * LATEST, self._end_unless_used, self._requests)

    def _end_unless_used(self, requests: int) -> None:
        if self._requests == requests:
            self._transport.close()

    def _send(self, number: int, wire: bytes) -> None:
        self._server.unanswered.discard(number)
        if not self._transport.is_closing():
            self._transport.write(wire)


@asynccontextmanager
async def chance_server(seed: int, limit: int) -> AsyncIterator[ChanceServer]:
    """Serve on one port of every host."""
    loop = asyncio.get_running_loop()
    shared = ChanceServer(seed, limit)
    async with AsyncExitStack() as stack:
        for host in HOSTS:
            server = await loop.create_server(lambda: _Connection(shared), host, shared.port)
            stack.callback(server.close)
            shared.port = server.sockets[0].getsockname()[1]
        yield shared
        shared.drop()
