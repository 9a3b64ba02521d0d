"""One connection, which carries one exchange at a time.

A connection is trusted only while it is silent when it should be: a byte that no request waits for
closes it.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import cast

from conveyor.wire.errors import TransportError, TransportTrouble
from conveyor.wire.head import malformed
from conveyor.wire.origin import Origin
from conveyor.wire.response import Ending, ResponseReader
from conveyor.wire.socket_input import SocketInput
from conveyor.wire.tls import TlsSession

MOST_READ = 65_536
MOST_HELD_IN_ALL = 67_108_864


class ReadBuffer:
    """The memory into which the connections of a client receive, and the bound on what each holds
    until its reader takes it: together they hold at most MOST_HELD_IN_ALL bytes."""

    __slots__ = ("full_at", "view")

    def __init__(self, connections: int, most: int) -> None:
        held = min(most, max(4, MOST_HELD_IN_ALL // connections))
        size = min(MOST_READ, held // 4)
        self.view = memoryview(bytearray(size))
        self.full_at = held - 2 * size


MOST_TOGETHER = 64
"""Requests that wait for the end of a turn of the loop at most."""


class SendQueue:
    """The requests of a client that begin in one turn of the loop, which are sent together at its
    end. A server on this machine is woken once for them; one by one, each would find it asleep
    again, and to wake it takes longer than to send."""

    __slots__ = ("_loop", "_waiting")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: list[HttpConnection] = []

    def add(self, connection: HttpConnection) -> None:
        """Send the request of a connection soon, and all if they are many."""
        self._waiting.append(connection)
        if len(self._waiting) == 1:
            self._loop.call_soon(self._send)
        elif len(self._waiting) == MOST_TOGETHER:
            self._send()

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        for connection in waiting:
            connection.send()


def _stay(_connection: HttpConnection) -> None:
    """Leave an idle connection with whoever has it."""


class HttpConnection(asyncio.BufferedProtocol):
    """A connection to an origin.

    `on_idle` is called when an answer has ended and the connection may carry another request,
    `on_lost` once when it is gone. `idle_since` is the loop's time at the end of the last answer;
    None before the first, unless it rested. `has_sent` tells whether the current request has gone
    out, `has_answered` whether a byte of an answer to it has come, `error` why the connection was
    dropped.
    """

    __slots__ = (
        "_buffer",
        "_due",
        "_handshake",
        "_is_made",
        "_is_paused",
        "_loop",
        "_on_lost",
        "_input",
        "_sends",
        "_reader",
        "_timer",
        "_timer_at",
        "_tls",
        "_transport",
        "_unsent",
        "_waiter",
        "_whole_by",
        "error",
        "has_answered",
        "has_sent",
        "idle_since",
        "on_idle",
        "origin",
    )

    def __init__(
        self,
        origin: Origin,
        sock: socket.socket,
        buffer: ReadBuffer,
        *,
        on_lost: Callable[[HttpConnection], None],
        sends: SendQueue | None = None,
    ) -> None:
        self.origin = origin
        self.idle_since: float | None = None
        self.has_answered = self.has_sent = False
        self.on_idle: Callable[[HttpConnection], None] = _stay
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._buffer = buffer
        self._sends = sends or SendQueue()
        self._unsent: tuple[bytes, bytes] | None = None
        self._input = SocketInput(sock.fileno())
        self._transport: asyncio.Transport
        self._tls: TlsSession | None = None
        self._reader: ResponseReader | None = None
        self._waiter: asyncio.Future[ResponseReader] | None = None
        self._handshake: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._due = 0.0
        self._whole_by = 0.0
        self._is_made = False
        self._is_paused = False
        self.error: TransportError | None = None

    def begin(
        self,
        request: bytes,
        method: str,
        *,
        deadline: float,
        answer_by: float | None = None,
        body: bytes = b"",
    ) -> asyncio.Future[ResponseReader]:
        """Send a request with the others of this turn, and the body after it; return a future of
        its answer, which is done once the head is there.

        Both times are the loop's: the answer is to be whole at `deadline`, its head at `answer_by`.
        The future raises TransportError.
        """
        loop = self._loop
        self.has_answered = self.has_sent = False
        if self.error is not None:
            # uvloop lets nobody write to a transport that is closed.
            return self.more()
        self._reader = ResponseReader(method)
        self._whole_by = deadline
        self._due = due = deadline if answer_by is None else min(deadline, answer_by)
        # A timer that was set for an earlier request is left to ring: most requests have an answer
        # by then, and setting a timer costs more than reading the clock when it rings.
        if self._timer is None or self._timer_at > due:
            self._set_timer(due)
        self._unsent = request, body
        self._sends.add(self)
        self._waiter = waiter = loop.create_future()
        return waiter

    def send(self) -> None:
        """Send the request that has begun, unless the connection is gone. A kept one must have been
        silent up to this moment: what came before would pass for the answer."""
        if self._unsent is None:
            return
        if self.idle_since is not None and not self._input.is_silent():
            self._fail(TransportError(TransportTrouble.INTERRUPTED))
            return
        request, body = self._unsent
        self._unsent = None
        self.has_sent = True
        self._write(request)
        if body:
            self._write(body)

    def more(self) -> asyncio.Future[ResponseReader]:
        """Return a future that is done once more of the answer's body is there, or its end. The
        future raises TransportError. One at a time."""
        self._waiter = waiter = self._loop.create_future()
        if self.error is not None:
            waiter.set_exception(self.error)
        elif self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()
        return waiter

    def now(self) -> float:
        """Return the loop's time."""
        return self._loop.time()

    def allow(self, deadline: float) -> None:
        """Let the rest of the answer under way be there at another time of the loop, which may be
        never."""
        if self._reader is None:
            return
        self._whole_by = self._due = deadline
        if self._timer is None or self._timer_at > deadline:
            self._set_timer(deadline)

    async def start_tls(self, context: ssl.SSLContext, host: str) -> None:
        """Speak TLS from here on. Raises TransportError."""
        if self.error is not None:
            raise TransportError(TransportTrouble.TLS)
        try:
            self._tls = tls = TlsSession(context, host)
            tls.shake_hands(b"")
        except ValueError:  # no certificate can be for such a host; ssl.SSLError is one
            raise TransportError(TransportTrouble.TLS) from None
        self._transport.write(tls.outgoing())
        self._handshake = self._loop.create_future()
        await self._handshake

    def is_open(self) -> bool:
        """Return whether the connection is open and idle. Bytes that nobody waits for may lie on
        it: `send` looks for them."""
        return self._reader is None and self.error is None and not self._transport.is_closing()

    def is_usable(self) -> bool:
        """Return whether the connection is open and idle, and no byte has arrived on it."""
        return self.is_open() and self._input.is_silent()

    def rest(self) -> None:
        """Be idle without having carried a request; drop a connection that broke meanwhile."""
        if self.is_usable():
            self.idle_since = self._loop.time()
            self.on_idle(self)
        else:
            self.abort()

    def abort(self) -> None:
        """Drop the connection at once, or once its transport is made."""
        self._fail(TransportError(TransportTrouble.INTERRUPTED))

    def start(self) -> None:
        """Take note that the loop has made the transport, which `abort` may have come before.

        uvloop takes the socket over at the very end. A transport that is aborted before that leaves
        a socket object, which later closes whatever has its number then.
        """
        self._is_made = True
        if self.error is not None:
            self._transport.abort()

    def give_up(self) -> None:
        """Take note that no transport will be made."""
        self._fail(TransportError(TransportTrouble.INTERRUPTED))
        self._on_lost(self)

    # -- the protocol --

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer.view

    def buffer_updated(self, count: int) -> None:
        data = bytes(self._buffer.view[:count])
        tls = self._tls
        if tls is not None:
            try:
                data = self._decrypt(tls, data)
            except TransportError as error:
                self._fail(error)
                return
        if data:
            self._receive(data)
        if tls is not None and tls.is_damaged:
            self._end(Ending.RESET)
        elif tls is not None and tls.is_closed:
            self._end(Ending.CLEAN)

    def eof_received(self) -> None:
        is_clean = self._tls is None or self._tls.is_closed
        self._end(Ending.CLEAN if is_clean else Ending.RAGGED)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(Ending.RESET)
        self._on_lost(self)

    # -- exchanges --

    def _write(self, data: bytes) -> None:
        tls = self._tls
        self._transport.write(data if tls is None else tls.encrypt(data))

    def _decrypt(self, tls: TlsSession, data: bytes) -> bytes:
        handshake = self._handshake
        if handshake is not None:
            is_done = tls.shake_hands(data)
            self._transport.write(tls.outgoing())
            if not is_done:
                return b""
            self._handshake = None
            if not handshake.done():
                handshake.set_result(None)
            data = b""
        plain = tls.decrypt(data)
        if outgoing := tls.outgoing():
            self._transport.write(outgoing)
        return plain

    def _receive(self, data: bytes) -> None:
        reader = self._reader
        if reader is None:
            self._fail(malformed())
            return
        if self._unsent is not None:
            self._fail(TransportError(TransportTrouble.INTERRUPTED))
            return
        self.has_answered = True
        has_head = reader.head is not None
        try:
            reader.feed(data)
        except TransportError as error:
            self._fail(error)
            return
        if reader.is_complete:
            self._complete(reader)
        elif reader.head is not None:
            if not has_head:
                self._due = self._whole_by
            if reader.buffered > self._buffer.full_at and not self._is_paused:
                self._is_paused = True
                self._transport.pause_reading()
            self._wake(reader)

    def _complete(self, reader: ResponseReader) -> None:
        """End an exchange whose answer is whole."""
        self._reader = None
        self._wake(reader)
        transport = self._transport
        if reader.may_keep and not transport.is_closing() and not transport.get_write_buffer_size():
            self.idle_since = self._loop.time()
            self.on_idle(self)
        else:
            self._fail(TransportError(TransportTrouble.INTERRUPTED))

    def _end(self, ending: Ending) -> None:
        """Note that the server has ended the connection."""
        reader = self._reader
        if reader is None:
            trouble = (
                TransportTrouble.INTERRUPTED if self._handshake is None else TransportTrouble.TLS
            )
            self._fail(TransportError(trouble))
            return
        try:
            reader.finish(ending)
        except TransportError as error:
            self._fail(error)
        else:
            self._complete(reader)

    def _ring(self) -> None:
        self._timer = None
        if self._reader is None:
            return
        if self._loop.time() >= self._due:
            self._fail(TransportError(TransportTrouble.TIMEOUT))
        else:
            self._set_timer(self._due)

    def _fail(self, error: TransportError) -> None:
        """Drop the connection, and let whoever waits for the answer know why."""
        self._reader = self._unsent = None
        if self.error is None:
            self.error = error
        self._cancel_timer()
        if self._is_made:
            self._transport.abort()
        waiters = self._waiter, self._handshake
        self._waiter = self._handshake = None
        for waiter in waiters:
            if waiter is not None and not waiter.done():
                waiter.set_exception(error)

    def _wake(self, reader: ResponseReader) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(reader)

    def _set_timer(self, moment: float) -> None:
        self._cancel_timer()
        self._timer = self._loop.call_at(moment, self._ring)
        self._timer_at = moment

    def _cancel_timer(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
