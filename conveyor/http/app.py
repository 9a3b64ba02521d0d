"""The ASGI application: its routes and its middleware."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from conveyor.domain.histogram import ANSWER, Histogram
from conveyor.http.auth import AnyKey, ApiKeys, authenticate, check_rate_limit
from conveyor.http.event_streams import STREAM_ROUTES
from conveyor.http.faults import ApiFaults, FaultyAnswers
from conveyor.http.inbox import Inbox
from conveyor.http.middleware import (
    AccessLog,
    LingeringClose,
    Origins,
    ProblemResponses,
    RequestId,
    RequestTraces,
    routing_problem,
)
from conveyor.http.pages.actions import Actions
from conveyor.http.pages.documents import foreign_host_page, page_routes
from conveyor.http.pages.routes import Dashboard
from conveyor.http.pages.session import SessionOptions, Sessions
from conveyor.http.request import (
    BODY_SECONDS,
    BodyLimits,
    BodyMemory,
    Handler,
    RequestContext,
    receive_upload,
)
from conveyor.http.routes_dev import Bench
from conveyor.http.routes_files import EXPORT_ROUTES, INPUT_ROUTES, read_download, read_link
from conveyor.http.routes_jobs import JOB_ROUTES, RUN_ROUTES
from conveyor.http.routes_schedules import SCHEDULE_ROUTES
from conveyor.http.routes_server import server_routes
from conveyor.http.routes_signing import SIGNING_ROUTES
from conveyor.http.routes_webhooks import WEBHOOK_ROUTES
from conveyor.ports.clock import Clock
from conveyor.ports.rate_limit import RateLimit
from conveyor.ports.tracing import NO_TRACER, Tracer
from conveyor.service import links
from conveyor.service.links import EXPORT_PATH, UPLOAD_PATH
from conveyor.service.service import Service

V1_ROUTES: dict[str, dict[str, Handler]] = {
    **JOB_ROUTES,
    **RUN_ROUTES,
    **STREAM_ROUTES,
    **INPUT_ROUTES,
    **EXPORT_ROUTES,
    **SIGNING_ROUTES,
    **WEBHOOK_ROUTES,
    **SCHEDULE_ROUTES,
}
"""Handlers of each method, for every path that needs a key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppOptions:
    """The limits on callers: the accepted hosts, the rate of requests, their size, memory and
    silence.

    Requests may name loopback, the host of the service's public origin, and `allowed_hosts`: names
    without a port. Signed links know no caller and are not limited; without a `rate_limit` nobody
    is. /readyz names what is `away`. A development server says there that it is one, and has an
    `inbox`, a `bench` that moves its clock, and `faults` for the clients of tests. Without
    `sessions` there is no dashboard. `took` counts how long answers take.
    """

    allowed_hosts: Collection[str]
    max_request_bytes: int = 50_331_648
    body_seconds: float = BODY_SECONDS
    body_memory: BodyMemory = field(default_factory=BodyMemory)
    api_keys: ApiKeys = field(default_factory=AnyKey)
    rate_limit: RateLimit | None = None
    away: Callable[[], Sequence[str]] = tuple
    inbox: Inbox | None = None
    is_development: bool = False
    bench: Bench | None = None
    faults: ApiFaults | None = None
    sessions: SessionOptions | None = None
    tracer: Tracer = NO_TRACER
    took: Histogram = field(default_factory=partial(Histogram, ANSWER))


def create_app(
    service: Service,
    *,
    registry: CollectorRegistry | None,
    ready: Callable[[], bool],
    clock: Clock,
    options: AppOptions,
) -> Starlette:
    """Build the application over one service.

    `ready` decides the answer of /readyz. /metrics shows `registry`; without one there is no such
    path.
    """
    app = Starlette(
        routes=_routes(service, registry, ready, options) + _pages(service, clock, options),
        middleware=[
            Middleware(RequestId, clock=clock),
            Middleware(AccessLog, clock=clock, took=options.took),
            *_traced(options, clock),
            Middleware(LingeringClose),
            Middleware(ProblemResponses),
            Middleware(
                Origins,
                allowed_hosts=options.allowed_hosts,
                public_origin=service.options.public_origin,
                explain=foreign_host_page,
            ),
            *_faulty(options),
            Middleware(BodyLimits, limit=options.max_request_bytes, seconds=options.body_seconds),
        ],
        exception_handlers={HTTPException: routing_problem},
    )
    app.router.redirect_slashes = False
    return app


def _routes(
    service: Service,
    registry: CollectorRegistry | None,
    ready: Callable[[], bool],
    options: AppOptions,
) -> list[Route]:
    async def signed(request: Request) -> Response:
        return await read_link(request, service)

    async def exported(request: Request) -> Response:
        return await read_download(request, service)

    async def uploaded(request: Request) -> Response:
        return await receive_upload(request, service)

    # First the path of bodies, which is asked for most: paths are compared one after the other.
    routes = [Route(links.CONTENT_PATH, signed, methods=["GET"])]
    routes += [
        Route(path, _endpoint(service, handlers, options), methods=list(handlers))
        for path, handlers in V1_ROUTES.items()
    ]
    routes.append(Route(EXPORT_PATH, exported, methods=["GET"]))
    routes.append(Route(UPLOAD_PATH, uploaded, methods=["PUT"]))
    pages = page_routes(
        service.options.public_origin,
        has_metrics=registry is not None,
        has_dashboard=options.sessions is not None,
    )
    served = server_routes(registry, ready, options.away, is_development=options.is_development)
    for path, answer in {**served, **pages}.items():
        routes.append(Route(path, answer, methods=["GET"]))
    if options.inbox is not None:
        routes += options.inbox.routes()
    if options.bench is not None:
        routes += options.bench.routes(service.overviews)
    if options.faults is not None:
        routes += options.faults.routes()
    return routes


def _traced(options: AppOptions, clock: Clock) -> list[Middleware]:
    if options.tracer is NO_TRACER:
        return []
    return [Middleware(RequestTraces, clock=clock, tracer=options.tracer)]


def _faulty(options: AppOptions) -> list[Middleware]:
    return [] if options.faults is None else [Middleware(FaultyAnswers, faults=options.faults)]


def _pages(service: Service, clock: Clock, options: AppOptions) -> list[Route]:
    if options.sessions is None:
        return []
    sessions = Sessions(
        service,
        clock,
        options.sessions,
        api_keys=options.api_keys,
        rate_limit=options.rate_limit,
    )
    dashboard = Dashboard(service, sessions)
    actions = Actions(service, dashboard, sessions)
    return actions.routes() + dashboard.routes()


def _endpoint(
    service: Service,
    handlers: dict[str, Handler],
    options: AppOptions,
) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        caller = authenticate(request, service, options.api_keys)
        await check_rate_limit(options.rate_limit, caller.caller_id)
        handler = handlers["GET" if request.method == "HEAD" else request.method]
        with options.body_memory.admitted(request, caller.caller_id) as admitted:
            accepted = partial(options.api_keys.knows, caller.api_key)
            return await handler(RequestContext(admitted, service, caller, accepted))

    return answer
