"""A server that answers as the path says, well or badly, for tests of the client's pool.

`/late-17` gets the body of request 17 after a while. It counts the connections that its clients
hold open, as the kernel sees them.
"""

from __future__ import annotations

import asyncio
import random
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import cast

HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
_PATH = re.compile(rb"GET /([a-z_]+)-(\d+) ")
_OPEN_STATES = frozenset({1, 4, 5})
"""States of TCP in which the peer has not closed: ESTABLISHED, FIN_WAIT1, FIN_WAIT2."""
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
    """What all connections share. `most_open` is the most that were open at a time, `unanswered`
    the requests that got no whole answer yet. While `together` is set, answers of the kind `held`
    wait until that many requests are here."""

    def __init__(self, seed: int) -> None:
        self.port = 0
        self.by_chance = random.Random(seed)
        self.most_open = 0
        self.requests = 0
        self.unanswered: set[int] = set()
        self.together = 0
        self._held: list[Callable[[], None]] = []
        self._connections: set[_Connection] = set()

    @property
    def open(self) -> int:
        """The connections that clients hold open now."""
        return sum(connection.is_open() for connection in self._connections)

    def enter(self, connection: _Connection) -> None:
        self._connections.add(connection)
        self.most_open = max(self.most_open, self.open)

    def leave(self, connection: _Connection) -> None:
        self._connections.discard(connection)

    def hold(self, answer: Callable[[], None]) -> None:
        """Answer once enough requests are here together."""
        self._held.append(answer)
        if len(self._held) >= self.together:
            held, self._held = self._held, []
            for each in held:
                each()


class _Connection(asyncio.Protocol):
    def __init__(self, server: ChanceServer) -> None:
        self._server = server
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._socket: socket.socket = transport.get_extra_info("socket")
        self._server.enter(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._server.leave(self)

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
            kind, number = found[1].decode(), int(found[2])
            self._server.unanswered.add(number)
            self._answer(kind, number)

    def _answer(self, kind: str, number: int) -> None:
        loop, by_chance = asyncio.get_running_loop(), self._server.by_chance
        body = body_of(kind, number)
        if kind == "late":
            loop.call_later(by_chance.random() * 0.003, self._send, number, _sized(body))
        elif kind == "held":
            self._server.hold(lambda: self._send(number, _sized(body)))
        elif kind == "in_parts":
            wire = _chunked(body)
            place = by_chance.randrange(len(wire))
            self._transport.write(wire[:place])
            loop.call_later(by_chance.random() * 0.002, self._send, number, wire[place:])
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
            loop.call_later(by_chance.random() * 0.003, self._transport.close)

    def _send(self, number: int, wire: bytes) -> None:
        self._server.unanswered.discard(number)
        if not self._transport.is_closing():
            self._transport.write(wire)


@asynccontextmanager
async def chance_server(seed: int) -> AsyncIterator[ChanceServer]:
    """Serve on one port of every host."""
    loop = asyncio.get_running_loop()
    shared = ChanceServer(seed)
    listeners = []
    for host in HOSTS:
        server = await loop.create_server(lambda: _Connection(shared), host, shared.port)
        shared.port = server.sockets[0].getsockname()[1]
        listeners.append(server)
    yield shared
    for server in listeners:
        server.close()
