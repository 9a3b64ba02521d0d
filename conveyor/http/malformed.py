"""Bytes that are no HTTP request are answered with a problem document too; no application ever
sees them."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.http.problems import problem_response
from conveyor.ports.clock import Clock

MAX_HEAD = 65_536
"""Bytes of a request line and its headers, and at most one read of the socket more."""


def protocol(clock: Clock) -> type[HttpToolsProtocol]:
    """The protocol that the server is to speak; the clock makes the ids of refused requests."""

    class Protocol(HttpToolsProtocol):
        _head: int | None = None

        def on_message_begin(self) -> None:
            self._head = 0
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._head = None
            super().on_headers_complete()

        def data_received(self, data: bytes) -> None:
            """Read on, but no head without end: the parser itself knows no bound."""
            super().data_received(data)
            if self._head is not None:
                self._head += len(data)
                if self._head > MAX_HEAD and not self.transport.is_closing():
                    self.send_400_response("the head of the request is too large")

        def send_400_response(self, msg: str) -> None:
            """Refuse what could not be parsed, and hang up: what follows could be anything."""
            request_id = clock.new_id()
            error = ConveyorError(ErrorCode.INVALID_ARGUMENT, "this is not a valid HTTP request")
            response = problem_response(error, request_id=request_id)
            headers = [
                *self.server_state.default_headers,
                *response.raw_headers,
                (b"x-request-id", request_id.encode()),
                (b"connection", b"close"),
            ]
            lines = [b"%b: %b\r\n" % header for header in headers]
            self.transport.write(
                b"".join([STATUS_LINE[400], *lines, b"\r\n", bytes(response.body)])
            )
            self.transport.close()

    return Protocol
