"""Answer bytes that are not HTTP with a problem document, before any application sees them, and
close connections on which no head of a request arrives."""

from __future__ import annotations

import asyncio
import socket
import weakref
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.http.problems import problem_response
from conveyor.ports.clock import Clock

MAX_HEAD = 65_536
"""Longest request line and headers; one read of the socket more may arrive."""
HEAD_SECONDS = 30.0
"""Default number of seconds for the head of a request, and for the first one to begin."""


CONNECTION = "conveyor.connection"
"""The extension of a request's scope that refers to its GuardedProtocol, weakly."""
SEND_BYTES = 16_384
"""Bytes that the system is asked to hold for a reader of a stream; it takes twice as many."""


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol of one connection, with bounds on the size and the time of a head."""

    clock: Clock
    head_seconds: float
    _head: int | None = None
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._head = 0
        super().on_message_begin()
        extensions: dict[str, Any] = {CONNECTION: weakref.ref(self)}
        self.scope["extensions"] = extensions

    def on_headers_complete(self) -> None:
        self._head = None
        self._stop_waiting()
        super().on_headers_complete()

    def keep_little(self) -> None:
        """Hold no more than one message of the answer for a client that does not read."""
        self.transport.set_write_buffer_limits(high=0)
        found = self.transport.get_extra_info("socket")
        if found is not None and not self.transport.is_closing():
            found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)

    def cut(self) -> None:
        """Drop the connection with what is not sent yet."""
        self.transport.abort()

    def _await_head(self) -> None:
        self._timer = self.loop.call_later(self.head_seconds, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def data_received(self, data: bytes) -> None:
        """Read on, but bound the head of a request, which the parser does not."""
        super().data_received(data)
        if self._head is not None:
            if self._timer is None:
                self._await_head()
            self._head += len(data)
            if self._head > MAX_HEAD and not self.transport.is_closing():
                self.send_400_response("the head of the request is too large")

    def send_400_response(self, msg: str) -> None:
        """Refuse an unparsable request and hang up, since anything could follow."""
        request_id = self.clock.new_id()
        error = ConveyorError(ErrorCode.INVALID_ARGUMENT, "this is not a valid HTTP request")
        response = problem_response(error, request_id=request_id)
        headers = [
            *self.server_state.default_headers,
            *response.raw_headers,
            (b"x-request-id", request_id.encode()),
            (b"connection", b"close"),
        ]
        lines = [b"%b: %b\r\n" % header for header in headers]
        self.transport.write(b"".join([STATUS_LINE[400], *lines, b"\r\n", bytes(response.body)]))
        self.transport.close()


def protocol(clock: Clock, *, head_seconds: float = HEAD_SECONDS) -> type[HttpToolsProtocol]:
    """Build the protocol class of the server.

    The clock makes the ids of refused requests. A connection is closed unless the head of its first
    request is there within `head_seconds`; so is one on which a later head takes longer.
    """
    return type("Protocol", (GuardedProtocol,), {"clock": clock, "head_seconds": head_seconds})
