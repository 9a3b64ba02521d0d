"""One id a request: the caller's own where it is sane, else a new one. Told in X-Request-ID."""

from __future__ import annotations

import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from conveyor.ports.clock import Clock

HEADER = "X-Request-ID"

_SANE = re.compile(r"[A-Za-z0-9._-]{1,128}")
_KEY = "conveyor.request_id"


def request_id_of(scope: Scope) -> str:
    """The id that the middleware gave a request."""
    request_id: str = scope[_KEY]
    return request_id


class RequestId:
    """Outermost middleware: every answer carries the id."""

    def __init__(self, app: ASGIApp, *, clock: Clock) -> None:
        self._app = app
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        request_id = given if _SANE.fullmatch(given) else self._clock.new_id()
        scope[_KEY] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)
