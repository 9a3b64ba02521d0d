"""Reading request bodies: never more than the limit, JSON only, whole or not at all."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from conveyor.domain.errors import ConveyorError, ErrorCode


class ClientGone(Exception):
    """The client has hung up: there is nobody to answer."""


@dataclass(frozen=True, slots=True)
class Body:
    """The raw bytes of a body as they came, in pieces, and their sha256."""

    pieces: list[bytes]
    digest: bytes

    def joined(self) -> bytes:
        """All of it in one piece."""
        return b"".join(self.pieces)


class BodyLimit:
    """Middleware that refuses bodies over `limit` bytes, announced or not."""

    def __init__(self, app: ASGIApp, *, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Raises ConveyorError(payload_too_large)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("Content-Length", "")
        if announced.isdecimal() and int(announced[:20]) > self._limit:
            raise self._too_large()
        received = 0

        async def receive_some() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limit:
                raise self._too_large()
            return message

        await self._app(scope, receive_some, send)

    def _too_large(self) -> ConveyorError:
        return ConveyorError(
            ErrorCode.PAYLOAD_TOO_LARGE,
            f"a request body holds at most {self._limit} bytes (CONVEYOR_MAX_REQUEST_BYTES)",
        )


async def read_json_body(request: Request) -> Body:
    """A body that says it is JSON.

    Raises ConveyorError(unsupported_media_type); ClientGone.
    """
    headers = request.headers
    media_type, _, parameters = headers.get("Content-Type", "").partition(";")
    if media_type.strip().lower() != "application/json" or not _is_utf8(parameters):
        raise _unsupported("send the body as application/json")
    if headers.get("Content-Encoding", "identity").strip().lower() != "identity":
        raise _unsupported("send the body without a Content-Encoding")
    return await read_body(request)


async def read_body(request: Request) -> Body:
    """A body, whatever it is. Raises ClientGone."""
    pieces: list[bytes] = []
    digest = hashlib.sha256()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece = message.get("body", b"")
        pieces.append(piece)
        digest.update(piece)
        if not message.get("more_body", False):
            return Body(pieces, digest.digest())


def _is_utf8(parameters: str) -> bool:
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "charset":
            return value.strip().strip('"').lower() in ("utf-8", "utf8", "us-ascii")
    return True


def _unsupported(detail: str) -> ConveyorError:
    return ConveyorError(ErrorCode.UNSUPPORTED_MEDIA_TYPE, detail)
