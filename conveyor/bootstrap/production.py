"""Wire the production roles: an API without a worker, or a worker without an API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from conveyor.bootstrap.host_rules import host_policies
from conveyor.bootstrap.loop import (
    LoopOptions,
    Outside,
    Readiness,
    allowed_hosts,
    body_memory,
    build_worker,
    gateway_of,
    root_secrets,
    service_options,
    session_options,
    tracer_of,
    webhooks_of,
)
from conveyor.domain.api_keys import secret_bytes
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.histogram import Histogram
from conveyor.domain.hosts import HostPolicies
from conveyor.engine.policy import PolicyFactory
from conveyor.engine.reserve import ReservePolicy
from conveyor.engine.telemetry import LoopLag, Telemetry
from conveyor.engine.worker import Worker
from conveyor.gateway.watch import WatchedGateway
from conveyor.http.app import AppOptions, create_app
from conveyor.http.auth import ApiKeys, open_api_keys
from conveyor.http.malformed import protocol
from conveyor.http.routes_server import create_probes
from conveyor.ports.clock import Clock
from conveyor.ports.gateway import Gateway
from conveyor.ports.tracing import NO_TRACER, Tracer
from conveyor.ports.webhooks import Webhooks
from conveyor.service.context import ServiceOptions
from conveyor.service.progress import Progress
from conveyor.service.service import Service
from conveyor.settings import Settings

EXTRA = frozenset({"boto3", "botocore", "redis"})
"""Packages that only the extra `aws` installs."""

if TYPE_CHECKING:
    from conveyor.engine.tracing import OpenTelemetryTracer
    from conveyor.prod.admin.administration import Administration
    from conveyor.prod.admin.dead_letters import DeadLetters
    from conveyor.prod.admin.run_look import RunLook
    from conveyor.prod.aws.calls import Aws
    from conveyor.prod.binding import ProdBinding
    from conveyor.prod.dynamodb.store import DynamoStore
    from conveyor.prod.ecs import TaskProtection
    from conveyor.prod.options import ProdOptions


@contextmanager
def _extra() -> Iterator[None]:
    """Say plainly that the extra is missing, if an import of the production binding fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRA:
            raise
        raise ConveyorError(
            ErrorCode.UNAVAILABLE,
            "production needs boto3 and redis: install Conveyor with its extra, as [aws]",
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleRuntime:
    """An assembled role: an `app` to serve and `progress` to run, or a `worker` to run, and what
    goes beside it.

    `probes` is the application of /readyz and /metrics. A process without a worker runs `lag`
    itself. `agree` checks that this process still shares the fleet's permit ledger, bucket and
    secret, and is called every `agree_every` seconds; it raises ConveyorError(conflict) once it
    does not. `protection` keeps a worker's task on ECS, if it runs there.
    """

    app: Any
    worker: Worker | None
    probes: Any
    protocol: type[asyncio.Protocol]
    readiness: Readiness
    lag: LoopLag
    agree: Callable[[], Awaitable[None]]
    agree_every: float
    aclose: Callable[[], Awaitable[None]]
    progress: Progress | None = None
    protection: TaskProtection | None = None


async def open_role(
    settings: Settings,
    clock: Clock,
    *,
    origin: str,
    gateway: Gateway | None = None,
    seam: Callable[[Aws], Aws] | None = None,
    policy: PolicyFactory = ReservePolicy,
    webhooks: Webhooks | None = None,
) -> RoleRuntime:
    """Open the role that the settings name, without running it.

    The caller closes a gateway that it passes in. For tests, `seam` wraps the calls to AWS,
    `policy` makes another permit policy, and `webhooks` sends events by other rules. Raises
    ConveyorError if AWS or Redis cannot be used, for other settings of the fleet, and bad keys.
    """
    api_keys = _api_keys(settings) if settings.role == "api" else None
    policies = host_policies(settings, clock)
    with _extra():
        from conveyor.prod.binding import open_binding
    binding = await open_binding(_options(settings), clock, works=api_keys is None, seam=seam)
    telemetry, readiness, lag = Telemetry(), Readiness(), LoopLag(clock)
    worker, app, progress, watched = None, None, None, None
    tracer = tracer_of(settings, clock, telemetry)
    webhooks = webhooks or webhooks_of(settings, clock)
    if api_keys is None:
        watched = WatchedGateway(gateway or gateway_of(settings, clock), clock)
        outside = Outside(watched, webhooks, settings.public_url.rstrip("/"))
        options = _loop_options(binding, settings, policy, tracer or NO_TRACER, policies)
        worker = _worker(binding, outside, settings, clock, telemetry=telemetry, options=options)
    else:
        bounds = _limits(settings, origin)
        service = Service(binding.ports, bounds, clock, webhooks=webhooks, policies=policies)
        progress = service.progress
        limits = _app_options(binding, settings, api_keys=api_keys, tracer=tracer or NO_TRACER)
        _measure_api(telemetry, binding, service, lag, took=limits.took)
        app = create_app(service, registry=None, ready=readiness, clock=clock, options=limits)
    return RoleRuntime(
        app=app,
        worker=worker,
        progress=progress,
        protection=_protection(watched, worker, settings, clock),
        probes=_probes(binding, readiness, telemetry, clock, worker, _stuck(lag, worker, watched)),
        protocol=protocol(clock, head_seconds=settings.head_timeout),
        readiness=readiness,
        lag=lag,
        agree=binding.agree,
        agree_every=binding.agree_every,
        aclose=_closing(binding, None if gateway else watched, webhooks, tracer),
    )


def _loop_options(
    binding: ProdBinding,
    settings: Settings,
    policy: PolicyFactory,
    tracer: Tracer,
    policies: HostPolicies,
) -> LoopOptions:
    return LoopOptions(
        policy=policy,
        logs_backlog=True,
        tracer=tracer,
        pause=binding.pause,
        run_workers=settings.run_workers,
        policies=policies,
    )


def _api_keys(settings: Settings) -> ApiKeys:
    """Open the keys of an API's callers. Raises ConveyorError for what is unusable,
    before anything else is opened."""
    keys = open_api_keys(settings.api_keys)
    session_options(settings)
    return keys


def _closing(
    binding: ProdBinding, *clients: Gateway | Webhooks | OpenTelemetryTracer | None
) -> Callable[[], Awaitable[None]]:
    async def close() -> None:
        for client in clients:
            if client is not None:
                await client.aclose()
        await binding.ports.aclose()

    return close


async def open_administration(settings: Settings, clock: Clock) -> Administration:
    """Open what makes, checks and removes the resources of an environment; the caller closes it."""
    with _extra():
        from conveyor.prod.admin.administration import open_administration

    return await open_administration(_options(settings), clock)


@asynccontextmanager
async def open_dead_letters(settings: Settings, clock: Clock) -> AsyncIterator[DeadLetters]:
    """Open the dead letters of an environment for an administrator."""
    with _extra():
        from conveyor.prod.admin.dead_letters import open_dead_letters

    async with open_dead_letters(_options(settings), clock) as letters:
        yield letters


@asynccontextmanager
async def open_records(settings: Settings, clock: Clock) -> AsyncIterator[DynamoStore]:
    """Open the records of an environment for an administrator."""
    with _extra():
        from conveyor.prod.binding import open_records

    async with open_records(_options(settings), clock) as store:
        yield store


async def look_at_run(settings: Settings, run_id: str, clock: Clock) -> RunLook:
    """Look at a run for an administrator. Raises ConveyorError(not_found)."""
    with _extra():
        from conveyor.prod.admin.run_look import look_at_run
        from conveyor.prod.binding import open_fleet

    async with open_fleet(_options(settings), clock) as fleet:
        return await look_at_run(fleet, run_id, clock, heartbeat=settings.heartbeat)


def _worker(
    binding: ProdBinding,
    outside: Outside,
    settings: Settings,
    clock: Clock,
    *,
    telemetry: Telemetry,
    options: LoopOptions,
) -> Worker:
    worker = build_worker(
        binding.ports,
        outside,
        settings,
        clock,
        telemetry=telemetry,
        jobs=binding.jobs,
        options=options,
    )
    _measure(telemetry, binding, lag=worker.lag, discarded=lambda: 0)
    return worker


def _limits(settings: Settings, origin: str) -> ServiceOptions:
    _, older = root_secrets(settings)
    return service_options(settings, origin, older)


def _app_options(
    binding: ProdBinding,
    settings: Settings,
    *,
    api_keys: ApiKeys,
    tracer: Tracer,
) -> AppOptions:
    return AppOptions(
        allowed_hosts=allowed_hosts(settings),
        max_request_bytes=settings.max_request_bytes,
        body_seconds=settings.body_timeout,
        body_memory=body_memory(settings),
        api_keys=api_keys,
        rate_limit=binding.rate_limit,
        sessions=session_options(settings),
        tracer=tracer,
    )


def _probes(
    binding: ProdBinding,
    ready: Readiness,
    telemetry: Telemetry,
    clock: Clock,
    worker: Worker | None,
    stuck: Callable[[], str],
) -> Any:
    stats = binding.stats

    def away() -> list[str]:
        return binding.away() + ([] if worker is None else worker.away())

    return create_probes(
        telemetry.registry(),
        ready=lambda: ready() and stats.usable(clock.monotonic()),
        clock=clock,
        away=away,
        trouble=stuck,
    )


def _protection(
    gateway: WatchedGateway | None, worker: Worker | None, settings: Settings, clock: Clock
) -> TaskProtection | None:
    """Return what protects a worker's task; None away from ECS, and where each call ends within the
    grace of a stop anyway."""
    is_needed = settings.ecs_agent and settings.gateway_timeout > settings.shutdown_grace
    if gateway is None or worker is None or not is_needed:
        return None
    from conveyor.prod.ecs import TaskProtection

    def busy() -> bool:
        return gateway.in_flight > 0 or worker.unsettled > 0

    return TaskProtection(settings.ecs_agent, clock, busy=busy)


def _stuck(
    lag: LoopLag, worker: Worker | None, gateway: WatchedGateway | None
) -> Callable[[], str]:
    """Build the check that names the reason to replace the process; it returns "" while there is
    none."""
    if worker is None or gateway is None:
        return lag.trouble
    turning, calls = worker.lag, gateway
    return lambda: turning.trouble() or calls.trouble()


def _options(settings: Settings) -> ProdOptions:
    from conveyor.prod.aws.calls import AwsOptions
    from conveyor.prod.options import ProdOptions

    secret, older = root_secrets(settings)
    return ProdOptions(
        aws=AwsOptions(
            region=settings.region,
            dynamodb_endpoint=settings.dynamodb_endpoint,
            sqs_endpoint=settings.sqs_endpoint,
            s3_endpoint=settings.s3_endpoint,
            stepfunctions_endpoint=settings.stepfunctions_endpoint,
            kms_endpoint=settings.kms_endpoint,
            carrier=settings.aws_carrier,
            attempts=settings.aws_attempts,
            threads=settings.aws_threads,
            receive_threads=settings.aws_receive_threads,
        ),
        environment=settings.environment,
        table=settings.table_name,
        bucket=settings.bucket,
        ledger=settings.ledger,
        redis_url=settings.redis_url,
        root_secret=secret_bytes(secret),
        older_secrets=older,
        kms_key=settings.kms_key,
        max_receives=settings.max_receives,
        permit_lease=settings.permit_lease,
        rate_limit=settings.rate_limit,
        rate_limit_burst=settings.rate_limit_burst,
        fire_retention_days=settings.fire_retention_days,
        row_retention_days=settings.row_retention_days,
        caller_daily_tasks=settings.caller_daily_tasks,
        has_operators=bool(settings.operator_keys),
        host_limits=bool(settings.host_limit or settings.host_rate or settings.hosts),
    )


def _measure(
    telemetry: Telemetry,
    binding: ProdBinding,
    *,
    lag: LoopLag,
    discarded: Callable[[], int],
) -> None:
    store, stats = binding.store, binding.stats
    telemetry.total("store_rows_read", lambda: store.rows_read)
    telemetry.total("store_rows_returned", lambda: store.rows_returned - discarded())
    telemetry.family("aws_calls", lambda: stats.calls.items())
    telemetry.histogram("aws_seconds", stats.took)
    telemetry.family("aws_retries", lambda: stats.retries.items())
    telemetry.family("aws_throttles", lambda: stats.throttles.items())
    telemetry.family("aws_undone", lambda: stats.undone.items())
    telemetry.family(
        "aws_consumed_capacity",
        lambda: (((operation,), units) for operation, units in stats.capacity.items()),
    )
    telemetry.gauge("loop_lag_seconds", lambda: lag.seconds)


def _measure_api(
    telemetry: Telemetry, binding: ProdBinding, service: Service, lag: LoopLag, *, took: Histogram
) -> None:
    telemetry.histogram("http_seconds", took)
    results, progress = service.results, service.progress
    _measure(telemetry, binding, lag=lag, discarded=lambda: results.rows_discarded)
    telemetry.gauge("streams", lambda: progress.streams)
    telemetry.total("stream_reads", lambda: progress.reads)
