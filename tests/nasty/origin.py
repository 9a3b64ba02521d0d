"""The nasty origin: a server in threads of its own, which answers byte by byte as it is asked.

A request for `nasty-3-17` gets the third answer, `page-17` a page of that number, wherever in the
request line the word stands: the URL may also be a parameter of a scraping API. Numbers tell
requests apart; use each once. `nasty-3-17-40` cuts the answer into two packets after 40 bytes,
`nasty-3-17-0` into packets of a byte.
"""

from __future__ import annotations

import re
import socket
import ssl
import struct
import threading
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Protocol

import msgspec

from tests.nasty.answer import End, Nasty

_ASKED = re.compile(rb"(nasty|page)-(\d+)(?:-(\d+))?(?:-(\d+))?")
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_RECEIVE_BUFFER = 16_384
"""Small, so that a request with a large body is still being sent when its answer comes."""
_PATIENCE = 30.0
_BETWEEN_PACKETS = 0.000_3


class Served(msgspec.Struct, frozen=True):
    """A request that arrived: the word it asked with, and the number of its connection."""

    word: str
    connection: int


class _Gate:
    """A place where an answer waits for its caller, and its caller for the answer."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.is_over = threading.Event()


class NastyOrigin:
    """The server on loopback, over TLS if it gets a context. `served` lists the requests."""

    def __init__(
        self,
        answers: Sequence[Nasty],
        *,
        context: ssl.SSLContext | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self._answers = answers
        self._context = context
        self.served: list[Served] = []
        self.connections = 0
        self._carriers: dict[str, int] = {}
        self._gates: dict[int, _Gate] = defaultdict(_Gate)
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
        self._listener.bind((host, 0))
        self._listener.listen(128)
        scheme = "http" if context is None else "https"
        self.url = f"{scheme}://{host}:{self._listener.getsockname()[1]}"

    def __enter__(self) -> NastyOrigin:
        self._start(self._accept)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for gate in self._gates.values():
                gate.may_go_on.set()
            for connection in self._open:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(_PATIENCE)

    def go_on(self, number: int) -> None:
        """Let an answer go on that waits for its caller; return once all of it is sent."""
        gate = self._gate(number)
        gate.may_go_on.set()
        assert gate.is_over.wait(_PATIENCE), "the origin did not get to the end of its answer"

    def connection_of(self, word: str) -> int:
        """Return the number of the connection over which a request arrived, the last time."""
        with self._lock:
            return self._carriers[word]

    def _gate(self, number: int) -> _Gate:
        with self._lock:
            return self._gates[number]

    def _start(self, target: object, *arguments: object) -> None:
        assert callable(target)
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._lock:
                    self.connections += 1
                    self._open.add(connection)
                self._start(self._serve, connection, self.connections)

    def _serve(self, connection: socket.socket, number: int) -> None:
        with suppress(OSError, EOFError):
            context = self._context
            line: Line = PlainLine(connection) if context is None else TlsLine(connection, context)
            inbox = Inbox(line)
            while self._answer(line, inbox, number):
                pass
        with self._lock:
            self._open.discard(connection)
        connection.close()

    def _answer(self, line: Line, inbox: Inbox, connection: int) -> bool:
        """Answer the next request; return whether the connection is still open."""
        head = inbox.head()
        kind, index, number, cut = self._note(head, connection).groups()
        announced = _LENGTH.search(head)
        length = 0 if announced is None else int(announced[1])
        if kind == b"page":
            inbox.skip(length)
            line.send(page(int(index)))
            return True
        answer = self._answers[int(index)]
        gate = self._gate(int(number))
        try:
            if not answer.is_early:
                inbox.skip(length)
            _play(line, answer, gate.may_go_on, None if cut is None else int(cut))
        finally:
            gate.is_over.set()
        if answer.is_early:
            inbox.skip(length)
        if answer.end is End.STAYS:
            return True
        # A request that crosses the end on its way is never answered, but it was sent.
        while True:
            self._note(inbox.head(), connection)

    def _note(self, head: bytes, connection: int) -> re.Match[bytes]:
        found = _ASKED.search(head)
        assert found is not None, head
        word = found[0].decode()
        with self._lock:
            self.served.append(Served(word, connection))
            self._carriers[word] = connection
        return found


def page(number: int) -> bytes:
    """Return the answer to a request for a page."""
    body = page_body(number)
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def page_body(number: int) -> bytes:
    """Return the body that belongs to the page of that number alone."""
    return b"<page %d>" % number


def _play(line: Line, answer: Nasty, may_go_on: threading.Event, cut: int | None) -> None:
    wire = answer.wire + answer.surplus
    last = answer.pushed or answer.late
    end = End.STAYS if last else answer.end
    if cut is None:
        line.send(wire, end)
    else:
        places = range(1, len(wire)) if cut == 0 else [cut]
        sent = 0
        for place in places:
            line.send(wire[sent:place])
            sent = place
            threading.Event().wait(_BETWEEN_PACKETS)
        line.send(wire[sent:], end)
    if last:
        may_go_on.wait(_PATIENCE)
        line.send(last, answer.end)


class Inbox:
    """The requests that arrive over a connection."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._held = b""

    def head(self) -> bytes:
        """Return the next head. Raises EOFError if there is no other."""
        while b"\r\n\r\n" not in self._held:
            self._held += self._line.receive()
        head, _, self._held = self._held.partition(b"\r\n\r\n")
        return head

    def skip(self, length: int) -> None:
        """Receive so many bytes of a body."""
        while len(self._held) < length:
            length -= len(self._held)
            self._held = self._line.receive()
        self._held = self._held[length:]


class Line(Protocol):
    """One connection of the origin."""

    def receive(self) -> bytes:
        """Return the next bytes. Raises EOFError at the end."""
        ...

    def send(self, data: bytes, end: End = End.STAYS) -> None:
        """Send bytes, and in the same packet the end of the connection."""
        ...


class PlainLine:
    """A connection without TLS."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def receive(self) -> bytes:
        data = self._connection.recv(65_536)
        if not data:
            raise EOFError
        return data

    def send(self, data: bytes, end: End = End.STAYS) -> None:
        # MSG_MORE holds the last bytes back until the end goes with them.
        is_fin = end in (End.FIN, End.BARE_FIN)
        self._connection.sendall(data, socket.MSG_MORE if is_fin else 0)
        if is_fin:
            self._connection.shutdown(socket.SHUT_WR)
        elif end is End.RESET:
            no_linger = struct.pack("ii", 1, 0)
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_linger)
            self._connection.close()


class TlsLine:
    """A connection with TLS whose records pass through memory, so that nothing is sent unasked."""

    def __init__(self, connection: socket.socket, context: ssl.SSLContext) -> None:
        self._line = PlainLine(connection)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._flush()
                self._incoming.write(self._line.receive())
        self._flush()

    def receive(self) -> bytes:
        while True:
            try:
                data = self._tls.read(65_536)
            except ssl.SSLWantReadError:
                self._incoming.write(self._line.receive())
            except ssl.SSLZeroReturnError:
                raise EOFError from None
            else:
                if not data:
                    raise EOFError
                return data

    def send(self, data: bytes, end: End = End.STAYS) -> None:
        if data:
            self._tls.write(data)
        if end is End.FIN:
            with suppress(ssl.SSLWantReadError):
                self._tls.unwrap()
        self._flush(end)

    def _flush(self, end: End = End.STAYS) -> None:
        self._line.send(self._outgoing.read(), end)
