"""Taking uploads by signed links: piece by piece, under a limit of their own."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from conveyor.http import query
from conveyor.http.body import BodyLimit, ClientGone
from conveyor.service.service import Service
from conveyor.service.upload_links import PATH

_UPLOAD = re.compile(PATH.replace("{input_id}", "[^/]+"))


class BodyLimits:
    """Middleware that bounds every body but those of uploads, which the service bounds."""

    def __init__(self, app: ASGIApp, *, limit: int) -> None:
        self._app = app
        self._limited = BodyLimit(app, limit=limit)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Raises ConveyorError(payload_too_large)."""
        app = self._app if _is_upload(scope) else self._limited
        await app(scope, receive, send)


async def receive_upload(request: Request, service: Service) -> Response:
    """Put the body into the slot that a signed link names. Needs no key."""
    types = request.headers.getlist("Content-Type")
    params = request.query_params
    slot = await service.inputs.open_upload(
        request.path_params["input_id"],
        expires=query.text(params, "expires") or "",
        signature=query.text(params, "signature") or "",
        content_type=types[0] if len(types) == 1 else "",
    )
    announced = request.headers.get("Content-Length", "")
    await service.inputs.store(
        slot,
        _pieces(request),
        announced=int(announced[:20]) if announced.isdecimal() else None,
    )
    return Response()


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    """The body as it arrives. Raises ClientGone."""
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


def _is_upload(scope: Scope) -> bool:
    return (
        scope["type"] == "http"
        and scope["method"] == "PUT"
        and _UPLOAD.fullmatch(scope["path"]) is not None
    )
