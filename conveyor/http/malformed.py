"""Answer bytes that are not HTTP with a problem document, before any application sees them."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.http.problems import problem_response
from conveyor.ports.clock import Clock

MAX_HEAD = 65_536
"""Longest request line and headers; one read of the socket more may arrive."""


def protocol(clock: Clock) -> type[HttpToolsProtocol]:
    """Build the protocol class of the server; the clock makes the ids of refused requests."""

    class Protocol(HttpToolsProtocol):
        _head: int | None = None

        def on_message_begin(self) -> None:
            self._head = 0
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._head = None
            super().on_headers_complete()

        def data_received(self, data: bytes) -> None:
            """Read on, but bound the head of a request, which the parser does not."""
            super().data_received(data)
            if self._head is not None:
                self._head += len(data)
                if self._head > MAX_HEAD and not self.transport.is_closing():
                    self.send_400_response("the head of the request is too large")

        def send_400_response(self, msg: str) -> None:
            """Refuse an unparsable request and hang up, since anything could follow."""
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
