"""Open the production binding: one region of AWS, and a ledger of permits."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.binding import Binding
from conveyor.ports.clock import Clock
from conveyor.ports.permits import LedgerReads
from conveyor.ports.queues import Signals
from conveyor.ports.rate_limit import RateLimit
from conveyor.ports.records import JobLookup
from conveyor.ports.robots import RobotsFiles
from conveyor.ports.workers import FleetPause, Workers
from conveyor.prod.admin.dead_letters import MOST_SOUGHT, DeadLetters
from conveyor.prod.aws.calls import Aws, CallStats
from conveyor.prod.aws.opening import open_clients
from conveyor.prod.aws.refusals import DeployedAws, NotDeployed
from conveyor.prod.dynamodb.client import Table
from conveyor.prod.dynamodb.pacing import DynamoPacing, DynamoRobots
from conveyor.prod.dynamodb.permits import DynamoPermits, DynamoWorkers
from conveyor.prod.dynamodb.run_rows import DynamoRunRows, RunPlaces
from conveyor.prod.dynamodb.runs import DynamoGenerations
from conveyor.prod.dynamodb.store import DynamoStore, StoreTerms, open_store
from conveyor.prod.options import ProdOptions
from conveyor.prod.redis.job_cache import CachedJobs
from conveyor.prod.redis.pacing import RedisPacing, RedisRobots
from conveyor.prod.redis.permits import RedisPermits, RedisWorkers
from conveyor.prod.redis.rate_limit import RedisRateLimit
from conveyor.prod.redis.server import RedisServer
from conveyor.prod.s3.blobs import S3Blobs
from conveyor.prod.sealing import open_data_key
from conveyor.prod.signals import EndSignals, RedisSignals
from conveyor.prod.sqs.queues import SqsQueues
from conveyor.prod.startup_checks import (
    BEAT,
    check_redis,
    difference,
    fleet_item,
    production_resources,
    start,
    terms,
)
from conveyor.prod.stepfunctions import StepFunctionsCallbacks
from conveyor.records.task_sending import may_have_policy

PATIENCE = 60.0
"""Seconds for which a worker keeps the outcome of a task and retries while DynamoDB is away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProdBinding:
    """The ports, and the parts that only this binding has.

    `away` names the services that do not answer at present. `jobs` finds templates, through Redis
    if there is one. `store` counts the rows that it reads, `stats` the calls to AWS. Call `agree`
    every `agree_every` seconds: it confirms that this process works by the fleet's terms, tells
    `pause` whether an operator has paused the fleet, and raises ConveyorError(conflict) if the
    terms have changed.
    """

    ports: Binding
    store: DynamoStore
    stats: CallStats
    away: Callable[[], list[str]]
    jobs: JobLookup
    rate_limit: RateLimit | None
    pause: FleetPause
    agree: Callable[[], Awaitable[None]]
    agree_every: float = BEAT


async def open_binding(
    options: ProdOptions, clock: Clock, *, works: bool, seam: Callable[[Aws], Aws] | None = None
) -> ProdBinding:
    """Open everything; the caller closes it with `ports.aclose`. `works`: this process is a worker.
    `seam` wraps calls to AWS, for tests. Raises as `start` does."""
    async with AsyncExitStack() as stack:
        stats, aws = await _open_aws(options, clock, stack, seam)
        table = Table(aws, options.table, clock)
        pause = FleetPause()
        agree = await start(aws, table, options, works=works, pause=pause)
        store = await _open_store(aws, options, clock, stack, patience=PATIENCE)
        server = await _open_redis(options, clock, stack, works=works)
        queues = _queues(aws, table, store, options, clock)
        ports = Binding(
            jobs=store.jobs,
            runs=store.runs,
            idempotency=store.idempotency,
            tasks=store.tasks,
            ingestion=store.ingestion,
            inputs=store.inputs,
            exports=store.exports,
            sweeping=store.sweeping,
            outbox=store.outbox,
            signing_keys=store.signing_keys,
            deliveries=store.deliveries,
            schedules=store.schedules,
            callbacks=StepFunctionsCallbacks(aws),
            queues=queues,
            dead_letters=_dead_letters(aws, queues, options, clock, works=works),
            blobs=S3Blobs(aws, bucket=options.bucket, clock=clock),
            permits=_permits(options, table, server, clock),
            pacing=_pacing(options, table, server, clock),
            robots=_robots(options, table, server, clock),
            signals=_signals(options, server, clock, stack),
            workers=_workers(options, table, server, clock),
            root_secret=options.root_secret,
            sealing_secrets=await _sealing_secrets(aws, table, options),
            aclose=stack.pop_all().aclose,
        )
    return ProdBinding(
        ports=ports,
        store=store,
        stats=stats,
        away=partial(_away, stats, server, clock),
        jobs=_jobs(options, store, server),
        rate_limit=_rate_limit(options, server),
        pause=pause,
        agree=agree,
    )


async def _open_aws(
    options: ProdOptions, clock: Clock, stack: AsyncExitStack, seam: Callable[[Aws], Aws] | None
) -> tuple[CallStats, Aws]:
    """Open the clients of AWS; return their statistics, and the calls that adapters make."""
    clients = await open_clients(options.aws, clock, *options.services)
    stack.push_async_callback(clients.aclose)
    behind: Aws = clients if seam is None else seam(clients)
    resources = production_resources(options)
    return clients.stats, DeployedAws(behind, clients.stats, clock, resources=resources)


@asynccontextmanager
async def open_records(options: ProdOptions, clock: Clock) -> AsyncIterator[DynamoStore]:
    """Open the store alone, for an administrator. Raises ConveyorError(unavailable) if AWS does not
    answer, or lacks the table."""
    async with AsyncExitStack() as stack:
        boto = await open_clients(options.aws, clock, "dynamodb")
        stack.push_async_callback(boto.aclose)
        resources = production_resources(options)
        aws = DeployedAws(boto, boto.stats, clock, resources=resources)
        store = await _open_store(aws, options, clock, stack)
        try:
            yield store
        except NotDeployed as error:
            # Its words for callers do not help an administrator.
            raise ConveyorError(ErrorCode.UNAVAILABLE, error.problem) from None


@dataclass(frozen=True, slots=True)
class Fleet:
    """The parts of a fleet that an administrator reads."""

    store: DynamoStore
    queues: SqsQueues
    permits: LedgerReads
    workers: Workers


@asynccontextmanager
async def open_fleet(options: ProdOptions, clock: Clock) -> AsyncIterator[Fleet]:
    """Open the parts that an administrator reads. Raises ConveyorError: (unavailable) as
    `open_records` does; (conflict) if the fleet has other terms than the options."""
    async with AsyncExitStack() as stack:
        boto = await open_clients(options.aws, clock, "dynamodb", "sqs")
        stack.push_async_callback(boto.aclose)
        aws = DeployedAws(boto, boto.stats, clock, resources=production_resources(options))
        table = Table(aws, options.table, clock)
        store = await _open_store(aws, options, clock, stack)
        server = RedisServer(options.redis_url, clock) if options.redis_url else None
        if server is not None:
            stack.push_async_callback(server.aclose)
        try:
            item = await fleet_item(table)
            problem = None if item is None else difference(item, terms(options), works=True)
            if problem is not None:
                raise ConveyorError(ErrorCode.CONFLICT, problem)
            yield Fleet(
                store=store,
                queues=_queues(aws, table, store, options, clock),
                permits=_permits(options, table, server, clock),
                workers=_workers(options, table, server, clock),
            )
        except NotDeployed as error:
            raise ConveyorError(ErrorCode.UNAVAILABLE, error.problem) from None


async def _open_store(
    aws: Aws, options: ProdOptions, clock: Clock, stack: AsyncExitStack, *, patience: float = 0.0
) -> DynamoStore:
    store = await open_store(
        aws,
        table=options.table,
        clock=clock,
        worker=clock.new_id(),
        patience=patience,
        terms=StoreTerms(
            options.fire_retention_days, options.row_retention_days, options.caller_daily_tasks
        ),
    )
    stack.push_async_callback(store.aclose)
    return store


async def _open_redis(
    options: ProdOptions, clock: Clock, stack: AsyncExitStack, *, works: bool
) -> RedisServer | None:
    if not options.redis_url:
        return None
    server = RedisServer(options.redis_url, clock)
    stack.push_async_callback(server.aclose)
    await check_redis(server, options, works=works)
    return server


def _away(stats: CallStats, server: RedisServer | None, clock: Clock) -> list[str]:
    """Name the services that do not answer at present."""
    ours = ["redis"] if server is not None and server.away else []
    return [*stats.away(clock.monotonic()), *ours]


def _queues(
    aws: Aws, table: Table, store: DynamoStore, options: ProdOptions, clock: Clock
) -> SqsQueues:
    queues = SqsQueues(
        aws,
        clock,
        DynamoGenerations(DynamoRunRows(table, RunPlaces(table))),
        store.tasks,
        environment=options.environment,
        max_receives=options.max_receives,
        long_polls=options.aws.receive_threads // 2,
    )
    queues.has_policy = partial(may_have_policy, store.runs, options.host_limits)
    return queues


def _dead_letters(
    aws: Aws, queues: SqsQueues, options: ProdOptions, clock: Clock, *, works: bool
) -> DeadLetters | None:
    if works or not options.has_operators:
        return None
    return DeadLetters(aws, queues, clock, environment=options.environment, most=MOST_SOUGHT)


def _jobs(options: ProdOptions, store: DynamoStore, server: RedisServer | None) -> JobLookup:
    if server is None:
        return store.jobs
    return CachedJobs(store.jobs, server, environment=options.environment)


def _permits(
    options: ProdOptions, table: Table, server: RedisServer | None, clock: Clock
) -> RedisPermits | DynamoPermits:
    if options.ledger == "dynamodb":
        return DynamoPermits(table, clock)
    if server is None:
        raise ConveyorError(
            ErrorCode.INVALID_ARGUMENT, "a ledger in Redis needs CONVEYOR_REDIS_URL"
        )
    return RedisPermits(server, environment=options.environment)


def _pacing(
    options: ProdOptions, table: Table, server: RedisServer | None, clock: Clock
) -> RedisPacing | DynamoPacing:
    if options.ledger == "dynamodb" or server is None:
        return DynamoPacing(DynamoPermits(table, clock), table, clock)
    return RedisPacing(server, clock, environment=options.environment)


def _robots(
    options: ProdOptions, table: Table, server: RedisServer | None, clock: Clock
) -> RobotsFiles:
    if server is None:
        return DynamoRobots(table, clock)
    return RedisRobots(server, environment=options.environment)


def _signals(
    options: ProdOptions, server: RedisServer | None, clock: Clock, stack: AsyncExitStack
) -> Signals:
    if server is None:
        return EndSignals()
    signals = RedisSignals(server, clock, environment=options.environment)
    stack.push_async_callback(signals.aclose)
    return signals


def _workers(
    options: ProdOptions, table: Table, server: RedisServer | None, clock: Clock
) -> Workers:
    if server is None:
        return DynamoWorkers(table, clock)
    return RedisWorkers(server, environment=options.environment)


def _rate_limit(options: ProdOptions, server: RedisServer | None) -> RateLimit | None:
    if not options.rate_limit:
        return None
    if server is None:
        raise ConveyorError(ErrorCode.INVALID_ARGUMENT, "a rate limit needs CONVEYOR_REDIS_URL")
    return RedisRateLimit(
        server,
        environment=options.environment,
        rate=options.rate_limit,
        burst=options.rate_limit_burst,
    )


async def _sealing_secrets(aws: Aws, table: Table, options: ProdOptions) -> tuple[bytes, ...]:
    if not options.kms_key:
        return ()
    return (
        await open_data_key(aws, table, kms_key=options.kms_key, environment=options.environment),
    )
