"""Routes about the server itself. None needs a key, none tells of jobs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.http.openapi import document

Endpoint = Callable[[Request], Awaitable[Response]]

_OPENAPI = msgspec.json.format(msgspec.json.encode(document()), indent=1)


def server_routes(
    registry: CollectorRegistry | None,
    ready: Callable[[], bool],
    away: Callable[[], Sequence[str]] = tuple,
) -> dict[str, Endpoint]:
    """Paths that are read with GET, and what answers them; /metrics only of a registry. /readyz
    names the services that are `away`, and says yes all the same: no other process has them."""

    async def healthz(_request: Request) -> Response:
        return _json(b'{"status":"alive"}')

    async def readyz(_request: Request) -> Response:
        if not ready():
            raise ConveyorError(
                ErrorCode.UNAVAILABLE, "the server is starting or stopping", retry_after=1
            )
        silent = {"away": list(away())} if away() else {}
        return _json(msgspec.json.encode({"status": "ready", **silent}))

    async def openapi(_request: Request) -> Response:
        return _json(_OPENAPI)

    routes: dict[str, Endpoint] = {"/healthz": healthz, "/readyz": readyz, "/openapi.json": openapi}
    if registry is not None:
        routes["/metrics"] = _metrics(registry)
    return routes


def _metrics(registry: CollectorRegistry) -> Endpoint:
    async def metrics(_request: Request) -> Response:
        return Response(generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    return metrics


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
