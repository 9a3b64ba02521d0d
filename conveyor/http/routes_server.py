"""Routes of the server itself, and the probes beside a production role.

The server's routes need no key and show no job. The probes serve load balancers
and collectors inside a network on a port of their own, so they accept any Host and need no key.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.http.middleware import ProblemResponses, RequestId, routing_problem
from conveyor.http.openapi import document
from conveyor.ports.clock import Clock

DEVELOPMENT = "dev"
"""The role of a server that has its worker in the same process."""

Endpoint = Callable[[Request], Awaitable[Response]]

_OPENAPI = msgspec.json.format(msgspec.json.encode(document()), indent=1)


def server_routes(
    registry: CollectorRegistry | None,
    ready: Callable[[], bool],
    away: Callable[[], Sequence[str]] = tuple,
    *,
    is_development: bool = False,
) -> dict[str, Endpoint]:
    """Map paths to handlers of GET; /metrics exists only with a registry.

    /readyz names the services that are `away` but stays positive: no other process can reach them
    either. It tells of a development server that it is one.
    """
    told = {"status": "ready", **({"role": DEVELOPMENT} if is_development else {})}

    async def healthz(_request: Request) -> Response:
        return _json(b'{"status":"alive"}')

    async def readyz(_request: Request) -> Response:
        if not ready():
            raise ConveyorError(
                ErrorCode.UNAVAILABLE,
                "the server is starting, stopping or without its store",
                retry_after=1,
            )
        silent = {"away": list(away())} if away() else {}
        return _json(msgspec.json.encode({**told, **silent}))

    async def openapi(_request: Request) -> Response:
        return _json(_OPENAPI)

    routes: dict[str, Endpoint] = {"/healthz": healthz, "/readyz": readyz, "/openapi.json": openapi}
    if registry is not None:
        routes["/metrics"] = _metrics(registry)
    return routes


def _metrics(registry: CollectorRegistry) -> Endpoint:
    async def metrics(request: Request) -> Response:
        # Only OpenMetrics has exemplars.
        encode, media_type = choose_encoder(request.headers.get("Accept", ""))
        return Response(encode(registry), headers={"Content-Type": media_type, "Vary": "Accept"})

    return metrics


def _json(body: bytes) -> Response:
    return Response(body + b"\n", media_type="application/json")


PATHS = ("/healthz", "/livez", "/readyz", "/metrics")


def create_probes(
    registry: CollectorRegistry,
    *,
    ready: Callable[[], bool],
    clock: Clock,
    away: Callable[[], Sequence[str]] = tuple,
    trouble: Callable[[], str] = str,
) -> Starlette:
    """Build the application of the probes: /healthz, /readyz and /metrics as a development server
    has them, and /livez.

    /readyz also names the services that are `away`. /livez answers 503 while the process itself has
    a `trouble` that only a new process ends, whatever is away.
    """

    async def livez(_request: Request) -> Response:
        if found := trouble():
            raise ConveyorError(ErrorCode.UNAVAILABLE, found, retry_after=1)
        return _json(b'{"status":"alive"}')

    served = server_routes(registry, ready, away) | {"/livez": livez}
    app = Starlette(
        routes=[Route(path, served[path], methods=["GET"]) for path in PATHS],
        middleware=[
            Middleware(RequestId, clock=clock),
            Middleware(ProblemResponses),
        ],
        exception_handlers={HTTPException: routing_problem},
    )
    app.router.redirect_slashes = False
    return app
