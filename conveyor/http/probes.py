"""A small application beside a role: whether it is ready, and its metrics, on a port of their own.

It is meant for load balancers and collectors inside a network, so any Host is answered and nothing
is asked for; it tells of no job.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route

from conveyor.http.failures import Failures, routing_problem
from conveyor.http.head import HeadOnly
from conveyor.http.request_id import RequestId
from conveyor.http.routes_server import server_routes
from conveyor.ports.clock import Clock

PATHS = ("/healthz", "/readyz", "/metrics")


def create_probes(
    registry: CollectorRegistry,
    *,
    ready: Callable[[], bool],
    clock: Clock,
    away: Callable[[], Sequence[str]] = tuple,
) -> Starlette:
    """The application: /healthz, /readyz and /metrics as the API of a development server has
    them. /readyz also names the services that are `away`."""
    served = server_routes(registry, ready, away)
    app = Starlette(
        routes=[Route(path, served[path], methods=["GET"]) for path in PATHS],
        middleware=[Middleware(RequestId, clock=clock), Middleware(HeadOnly), Middleware(Failures)],
        exception_handlers={HTTPException: routing_problem},
    )
    app.router.redirect_slashes = False
    return app
