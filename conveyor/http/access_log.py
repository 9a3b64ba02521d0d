"""One log line a request: no query (links are signed there), no header, no body."""

from __future__ import annotations

import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from conveyor.http.request_id import request_id_of
from conveyor.ports.clock import Clock

CLIENT_CLOSED = 499
"""The status logged where the client was gone before there was an answer."""

_log = logging.getLogger("conveyor.http")


class AccessLog:
    """Logs method, path, status, milliseconds and request id."""

    def __init__(self, app: ASGIApp, *, clock: Clock) -> None:
        self._app = app
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = self._clock.monotonic()
        status = CLIENT_CLOSED

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            _log.info(
                "request",
                extra={
                    "method": scope["method"],
                    "path": scope["path"],
                    "status": status,
                    "ms": round((self._clock.monotonic() - began) * 1_000, 1),
                    "request_id": request_id_of(scope),
                },
            )
