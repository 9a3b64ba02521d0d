"""Wire what all bindings share: the dispatch loop with its handlers and tickers, readiness, and the
service's options."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from ipaddress import ip_network
from pathlib import Path
from typing import TYPE_CHECKING

from conveyor import __version__
from conveyor.aio.outages import Outages
from conveyor.bootstrap.host_rules import host_policies, host_turns
from conveyor.domain.api_keys import KeySealer, secret_bytes
from conveyor.domain.backoff import Backoff
from conveyor.domain.hosts import HostPolicies
from conveyor.domain.signatures import SigningKeySealer
from conveyor.domain.text_rules import pip_install
from conveyor.domain.urls import without_secrets
from conveyor.engine.discovery import Discovery, DiscoveryOptions, Sharing
from conveyor.engine.dispatcher import Dispatcher, DispatchOptions
from conveyor.engine.hosts import MessageTurns
from conveyor.engine.planner import LeastInFlight, PickingRule, Polling
from conveyor.engine.policy import LeaseOptions, PolicyFactory
from conveyor.engine.reporter import Reported, ReporterOptions, WorkerReporter
from conveyor.engine.reserve import ReservePolicy
from conveyor.engine.subset import REPORT_EVERY, RunSubset, SubsetOptions
from conveyor.engine.telemetry import Backlog, Reports, TaskFigures, Telemetry
from conveyor.engine.worker import Beside, OverlappingTicker, Ticker, Worker
from conveyor.gateway import open_gateway
from conveyor.gateway.webhook import WebhookRules, WebhookSender
from conveyor.handlers.callbacks import StateMachines
from conveyor.handlers.control import ControlHandler
from conveyor.handlers.delete import DeleteHandler
from conveyor.handlers.deliver import Deliverer, DeliveryPorts
from conveyor.handlers.export import ExportHandler
from conveyor.handlers.fire import Scheduler, SchedulerOptions, SchedulerPorts
from conveyor.handlers.ingest import IngestHandler
from conveyor.handlers.notify import Notifier
from conveyor.handlers.refusals import HostAnswers
from conveyor.handlers.retry_policy import RetryPolicy
from conveyor.handlers.settle import EventSettler
from conveyor.handlers.sweep import Sweeper, SweepOptions, SweepPorts
from conveyor.handlers.task import TaskHandler, TaskOptions, TaskPorts
from conveyor.http.auth import open_operator_keys
from conveyor.http.middleware import is_loopback
from conveyor.http.pages.session import SessionOptions
from conveyor.http.request import BodyMemory
from conveyor.ports.binding import Binding
from conveyor.ports.blobs import BlobWriter
from conveyor.ports.clock import Clock
from conveyor.ports.gateway import Gateway, ScrapeFailed
from conveyor.ports.handler import NO_HOST_TURNS, Handler, Outcome, Throttled
from conveyor.ports.idle import OpenWork, counted
from conveyor.ports.outbox import Subscriber
from conveyor.ports.pacing import Pacing
from conveyor.ports.permits import Permits
from conveyor.ports.pipeline import Pipeline
from conveyor.ports.queues import (
    DeleteMessage,
    Delivery,
    ExportMessage,
    IngestMessage,
    Message,
    Queues,
    Signals,
    TemplateMessage,
)
from conveyor.ports.records import JobLookup, WorkerRuns
from conveyor.ports.robots import RobotsFiles
from conveyor.ports.tasks import TaskClaims
from conveyor.ports.tracing import NO_TRACER, Tracer
from conveyor.ports.webhooks import Webhooks
from conveyor.ports.workers import FleetPause, Workers
from conveyor.records.job_templates import JobTemplates
from conveyor.records.signed_events import EventSigner
from conveyor.records.task_sending import TaskSender
from conveyor.service.context import ServiceOptions
from conveyor.settings import InvalidSetting, Settings
from conveyor.wire.errors import TransportError
from conveyor.wire.options import USUAL as USUAL_CLIENT
from conveyor.wire.options import ClientOptions, Proxy, read_proxy

if TYPE_CHECKING:
    from conveyor.engine.tracing import OpenTelemetryTracer
    from conveyor.gateway.robots import RobotsGateway


class Readiness:
    """The answer of `/readyz`: yes from the moment the process listens until it begins to stop."""

    def __init__(self) -> None:
        self.yes = False

    def __call__(self) -> bool:
        return self.yes


def gateway_of(settings: Settings, clock: Clock, *, own_port: int = 0) -> Gateway:
    """Open the gateway that the settings name; it never connects to an `own_port` of loopback, 0
    for none. Raises InvalidSetting for a URL that it cannot call,
    an engine that is not installed, and a file of authorities that cannot be used."""
    options = replace(_client_options(settings), own_port=own_port)
    try:
        return open_gateway(
            settings.gateway,
            clock,
            allow_private=settings.allow_private,
            connections=settings.workers,
            retry_after_cap=settings.retry_after_cap,
            engine=settings.http_engine,
            options=options,
        )
    except ImportError:
        missing = f"needs the package aiohttp: {pip_install('conveyor-batch[aiohttp]')}"
        raise InvalidSetting("CONVEYOR_HTTP_ENGINE", missing) from None
    except ScrapeFailed:
        raise InvalidSetting("CONVEYOR_GATEWAY", "must be a URL that can be called") from None


def tracer_of(settings: Settings, clock: Clock, telemetry: Telemetry) -> OpenTelemetryTracer | None:
    """Open the sender of traces that the settings name, whose traces metrics refer to; None without
    an endpoint, and then nothing of OpenTelemetry is loaded. Raises InvalidSetting if it is not
    installed."""
    if not settings.otlp_endpoint:
        return None
    try:
        from conveyor.engine.tracing import OpenTelemetryTracer
    except ImportError:
        missing = f"needs OpenTelemetry: {pip_install('conveyor-batch[otel]')}"
        raise InvalidSetting("CONVEYOR_OTLP_ENDPOINT", missing) from None
    tracer = OpenTelemetryTracer(
        clock,
        endpoint=settings.otlp_endpoint,
        ratio=settings.trace_ratio,
        service=f"conveyor-{settings.role or 'dev'}",
    )
    telemetry.exemplars(lambda: tracer.latest)
    return tracer


def _client_options(settings: Settings) -> ClientOptions:
    options = ClientOptions(
        authority=_authority(settings.ca_file, "CONVEYOR_CA_FILE"),
        ragged_end=settings.ragged_end == "accept",
        proxy=_proxy(settings.gateway_proxy),
    )
    if settings.http_engine == "aiohttp" and options != USUAL_CLIENT:
        others = "CONVEYOR_GATEWAY_PROXY, CONVEYOR_CA_FILE or CONVEYOR_RAGGED_END"
        raise InvalidSetting("CONVEYOR_HTTP_ENGINE", f"aiohttp takes no {others}")
    return options


def _proxy(url: str) -> Proxy | None:
    try:
        return read_proxy(url) if url else None
    except TransportError:
        problem = "must be the URL of a proxy, its user and password in UTF-8"
        raise InvalidSetting("CONVEYOR_GATEWAY_PROXY", problem) from None


def webhooks_of(
    settings: Settings, clock: Clock, *, loopback: bool = False, inbox: str = ""
) -> Webhooks:
    """Make what posts events; with `loopback`, to this machine and over plain http too. `inbox` is
    the URL that gets those for reserved names, empty in production.

    Raises InvalidSetting for a file of authorities that cannot be used."""
    names, networks = set(), []
    for entry in filter(None, map(str.strip, settings.webhook_private.split(","))):
        try:
            networks.append(ip_network(entry))
        except ValueError:
            names.add(entry.lower())
    rules = WebhookRules(
        names=frozenset(names), networks=tuple(networks), loopback=loopback, inbox=inbox
    )
    authority = _authority(settings.webhook_ca_file, "CONVEYOR_WEBHOOK_CA_FILE")
    return WebhookSender(clock, rules, authority=authority)


def _authority(ca_file: str, variable: str) -> Path | None:
    if not ca_file:
        return None
    from conveyor.wire.tls import client_context

    try:
        client_context(Path(ca_file))
    except OSError:  # ssl.SSLError is one
        problem = "must name a PEM file of certificates that can be read"
        raise InvalidSetting(variable, problem) from None
    return Path(ca_file)


def allowed_hosts(settings: Settings) -> list[str]:
    """Return the names allowed in Host, beside loopback and the public origin."""
    return [settings.host, *filter(None, settings.allowed_hosts.split(","))]


def session_options(settings: Settings) -> SessionOptions | None:
    """Return who may look at pages; None without a dashboard.

    Raises ConveyorError(invalid_argument) for unusable keys of operators.
    """
    if not settings.dashboard:
        return None
    return SessionOptions(
        on_loopback=is_loopback(settings.host),
        operators=open_operator_keys(settings.operator_keys),
    )


def body_memory(settings: Settings) -> BodyMemory:
    """Return the bounds on the memory for request bodies."""
    return BodyMemory(limit=settings.max_body_memory, caller_limit=settings.max_caller_body_memory)


def root_secrets(settings: Settings) -> tuple[str, tuple[bytes, ...]]:
    """Return the root secret as given, and the older ones."""
    first, *older = settings.secret.split(",")
    return first, tuple(map(secret_bytes, older))


def service_options(
    settings: Settings, origin: str, older_secrets: tuple[bytes, ...]
) -> ServiceOptions:
    """Return the service's options. `origin` is the public origin unless the settings name one."""
    return ServiceOptions(
        public_origin=settings.public_url.rstrip("/") or origin,
        max_inline_tasks=settings.max_inline_tasks,
        async_threshold=settings.async_threshold,
        max_add_tasks=settings.max_add_tasks,
        max_open_job_tasks=settings.max_open_job_tasks,
        max_active_jobs=settings.max_active_jobs,
        max_scheduled_jobs=settings.max_scheduled_jobs,
        schedule_catch_up=settings.schedule_catch_up,
        idempotency_claim=settings.idempotency_claim,
        idempotency_ttl=settings.idempotency_ttl,
        result_url_ttl=settings.result_url_ttl,
        partial_rerun_window_days=settings.partial_rerun_window_days,
        task_shard_count=settings.task_shard_count,
        shard_scheme=settings.shard_scheme,
        max_input_rows=settings.max_input_rows,
        max_input_bytes=settings.max_input_bytes,
        max_validation_seconds=settings.max_validation_seconds,
        input_upload_ttl=settings.input_upload_ttl,
        input_ttl=settings.input_ttl,
        export_ttl=settings.export_ttl,
        max_export_bytes=settings.max_export_bytes,
        heartbeat=_heartbeat(settings),
        max_streams=settings.max_streams,
        max_caller_streams=settings.max_caller_streams,
        # The gateway of a fleet is known to its workers alone: they refuse each task.
        heeds_robots=bool(settings.role) or can_heed_robots(settings),
        older_secrets=older_secrets,
    )


@dataclass(frozen=True, slots=True)
class Outside:
    """The world outside of a worker: the gateway, and the receivers of events. `origin` is the
    public origin of the API, for links in events; empty where it is not known."""

    gateway: Gateway
    webhooks: Webhooks
    origin: str


RENEWALS = 3
"""Least number of heartbeats within a visibility timeout, and within a permit lease."""
BACKLOG_INTERVAL = 45.0
"""Seconds between two lines of figures in the log: less than a minute, so that in spite of jitter
and of the time to count there is a line in each minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPorts:
    """The roles that discovering and working tasks uses; `sealer` opens callers' keys. Without
    `workers` the worker says nothing of itself, without `robots` it reads no robots.txt."""

    jobs: JobLookup
    runs: WorkerRuns
    tasks: TaskClaims
    blobs: BlobWriter
    queues: Queues
    permits: Permits
    pacing: Pacing
    signals: Signals
    gateway: Gateway
    sealer: KeySealer
    pipeline: Pipeline | None = None
    workers: Workers | None = None
    robots: RobotsFiles | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chores:
    """The work of a worker beside tasks: control messages by kind, and tickers."""

    control: Mapping[type[Message], Handler] = field(default_factory=dict)
    tickers: Sequence[Ticker] = ()
    overlapping: Sequence[OverlappingTicker] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """The differences of a loop from that of `conveyor-dev`.

    `policy` makes its permit policy, `polling` says how it polls queues, `picking` makes its rule
    to choose a lane. `logs_backlog`: log in each minute how many messages wait, for a rule that
    adds workers by it; how many tasks ended, and how events are delivered, for alarms. The worker
    reports what it does once a heartbeat, and each `report_every` seconds if that is less. `tracer`
    records what is sampled. With `run_workers` a run is served by at least so many workers of the
    fleet, else by every worker. Nothing new starts while there is a `pause`. Where the clock is
    moved by hand, loops that only look sleep on `looks`, events are signed by the clock of the
    `machine`, and `work` counts what is open. `policies` are the limits of hosts, by default those
    of the settings.
    """

    policy: PolicyFactory = ReservePolicy
    polling: Polling = Polling()
    picking: Callable[[], PickingRule] = LeastInFlight
    logs_backlog: bool = False
    report_every: float = math.inf
    tracer: Tracer = NO_TRACER
    pause: FleetPause = field(default_factory=FleetPause)
    run_workers: int = 0
    looks: Clock | None = None
    machine: Clock | None = None
    work: OpenWork | None = None
    policies: HostPolicies | None = None


USUAL = LoopOptions()


def _worker_ports(
    binding: Binding, gateway: Gateway, settings: Settings, jobs: JobLookup
) -> WorkerPorts:
    return WorkerPorts(
        jobs=jobs,
        runs=binding.runs,
        tasks=binding.tasks,
        blobs=binding.blobs,
        queues=binding.queues,
        permits=binding.permits,
        pacing=binding.pacing,
        signals=binding.signals,
        gateway=gateway,
        sealer=KeySealer(_sealing_secrets(binding, settings)),
        pipeline=binding.pipeline,
        workers=binding.workers,
        robots=binding.robots,
    )


def build_worker(
    binding: Binding,
    outside: Outside,
    settings: Settings,
    clock: Clock,
    *,
    telemetry: Telemetry,
    jobs: JobLookup | None = None,
    options: LoopOptions = USUAL,
) -> Worker:
    """Build the loop over a binding; `jobs` looks up the jobs of tasks, by default those of it."""
    ports = _worker_ports(binding, outside.gateway, settings, jobs or binding.jobs)
    policies = options.policies or host_policies(settings, clock)
    options = replace(options, policies=policies)
    sender = TaskSender(binding.queues, binding.runs, binding.tasks, policies, clock)
    looks = options.looks or clock
    deliverer = _deliverer(
        binding, outside.webhooks, settings, clock, telemetry=telemetry, options=options
    )
    sending = _delivery_ticker(deliverer, settings, looks)
    notifier = _notifier(
        binding, settings, clock, telemetry, origin=outside.origin, made=sending.wake
    )
    telling = _outbox_ticker(notifier, settings, looks)
    binding.signals.on_end(telling.wake)
    reports = Reports(telemetry, notices=lambda: notifier.oldest, events=lambda: deliverer.oldest)
    tickers = [
        _sweep_ticker(binding, settings, looks, sender),
        telling,
        _schedule_ticker(
            binding,
            settings,
            looks,
            telemetry=telemetry,
            sealer=ports.sealer,
            tracer=options.tracer,
        ),
    ]
    if options.logs_backlog:
        tickers.append(_minutely(reports.tell, clock, what="telling of webhooks"))
        telling_ends = TaskFigures(telemetry).tell
        tickers.append(_minutely(telling_ends, clock, what="telling of ended tasks"))
    chores = Chores(
        control=_control_handlers(binding, settings, clock, sender, work=options.work),
        tickers=tickers,
        overlapping=[sending],
    )
    return assemble_worker(
        ports, settings, clock, telemetry=telemetry, chores=chores, options=options
    )


def _dispatch_options(
    settings: Settings, options: LoopOptions, outages: Outages
) -> DispatchOptions:
    return DispatchOptions(
        slots=settings.workers,
        visibility=settings.visibility_timeout,
        max_receives=settings.max_receives,
        polling=options.polling,
        picking=options.picking(),
        outages=outages,
        pause=options.pause,
        looks=options.looks,
    )


def assemble_worker(
    ports: WorkerPorts,
    settings: Settings,
    clock: Clock,
    *,
    telemetry: Telemetry,
    chores: Chores,
    options: LoopOptions = USUAL,
) -> Worker:
    """Make a worker of tasks with its chores."""
    name = clock.new_id()
    leases = _leases(name, settings, options)
    policy = options.policy(ports.permits, clock, leases)
    policies = options.policies or host_policies(settings, clock)
    turns = host_turns(policy, ports.pacing, policies, clock)
    outages = Outages(clock, gateway=without_secrets(settings.gateway))
    dispatcher = Dispatcher(
        ports.queues,
        policy,
        clock,
        task_handler=_task_handler(
            _task_ports(ports, settings, clock, outages=outages, options=options, turns=turns),
            ports,
            settings,
            clock,
            worker=name,
            telemetry=telemetry,
        ),
        control_handler=ControlHandler(chores.control, clock, tracer=options.tracer),
        telemetry=telemetry,
        options=replace(_dispatch_options(settings, options, outages), turns=turns),
    )
    ports.signals.on_halt(dispatcher.halt)
    looks = options.looks or clock
    sharing = _sharing(ports, settings, worker=name, options=options)
    discovery = _discovery(dispatcher, ports, settings, looks, sharing)
    telemetry.gauge("permits", lambda: policy.held)
    _measure_dispatch(telemetry, dispatcher, options.pause)
    _measure_outages(telemetry, outages)
    counting = _counting(dispatcher, ports.queues, clock, options)
    about = Reported(dispatcher, policy, outages)
    reporter = _reporter(about, ports, settings, looks, worker=name, options=options)
    return Worker(
        dispatcher,
        discovery,
        looks,
        heartbeat=_heartbeat(settings),
        beside=Beside([*chores.tickers, *counting], chores.overlapping, reporter),
        outages=outages,
    )


def _reporter(
    about: Reported,
    ports: WorkerPorts,
    settings: Settings,
    clock: Clock,
    *,
    worker: str,
    options: LoopOptions,
) -> WorkerReporter | None:
    if ports.workers is None:
        return None
    heartbeat = _heartbeat(settings)
    names = ReporterOptions(
        worker_id=worker,
        version=__version__,
        heartbeat=heartbeat,
        every=_report_every(settings, options),
        slots=settings.workers,
        claim_seconds=settings.visibility_timeout,
    )
    return WorkerReporter(about, ports.workers, clock, names)


def _sealing_secrets(binding: Binding, settings: Settings) -> list[bytes]:
    """Return the secrets that open what was sealed, the one that seals first."""
    _, older_secrets = root_secrets(settings)
    return [*binding.sealing_secrets, binding.root_secret, *older_secrets]


def _leases(holder: str, settings: Settings, options: LoopOptions) -> LeaseOptions:
    return LeaseOptions(
        holder=holder,
        lease=settings.permit_lease,
        heartbeat=_heartbeat(settings),
        slots=settings.workers,
        batch=options.polling.batch,
        caller_limit=settings.caller_max_inflight,
    )


def _heartbeat(settings: Settings) -> float:
    # Claims and messages are renewed in the second half of their time.
    lasting = min(settings.visibility_timeout / 2, settings.permit_lease)
    return min(settings.heartbeat, lasting / RENEWALS)


def _measure_dispatch(telemetry: Telemetry, dispatcher: Dispatcher, pause: FleetPause) -> None:
    """Show the lanes of a worker, what waits in them, and a pause of the fleet."""
    telemetry.gauge("lanes", lambda: len(dispatcher.lanes.serving()))
    telemetry.gauge("queue_depth", dispatcher.depth)
    telemetry.gauge("fleet_paused", lambda: pause.since is not None)


def _measure_outages(telemetry: Telemetry, outages: Outages) -> None:
    telemetry.gauge("away", lambda: len(outages.now()))
    telemetry.family("outages", outages.counts)


def _report_every(settings: Settings, options: LoopOptions) -> float:
    shared = REPORT_EVERY if options.run_workers else math.inf
    return min(_heartbeat(settings), options.report_every, shared)


def _sharing(
    ports: WorkerPorts, settings: Settings, *, worker: str, options: LoopOptions
) -> Sharing | None:
    """Return what shares runs out among workers; None where every worker serves every run."""
    if ports.workers is None or not options.run_workers:
        return None
    subset = RunSubset(
        SubsetOptions(
            worker_id=worker,
            slots=settings.workers,
            least=options.run_workers,
            grace=2 * settings.discovery_interval + _report_every(settings, options),
        )
    )
    return Sharing(ports.workers, subset)


def _discovery(
    dispatcher: Dispatcher,
    ports: WorkerPorts,
    settings: Settings,
    clock: Clock,
    sharing: Sharing | None,
) -> Discovery:
    return Discovery(
        dispatcher,
        ports.runs,
        ports.queues,
        ports.signals,
        clock,
        DiscoveryOptions(
            interval=settings.discovery_interval,
            resync=settings.resync_interval,
            evict_after=settings.evict_after,
        ),
        sharing,
    )


def _task_ports(
    ports: WorkerPorts,
    settings: Settings,
    clock: Clock,
    *,
    outages: Outages,
    options: LoopOptions,
    turns: MessageTurns | None,
) -> TaskPorts:
    heeding = _heeding_robots(ports, settings, clock)
    backoff = Backoff(settings.retry_base, settings.retry_cap)
    policies = host_policies(settings, clock) if turns is None else turns.policies
    answers = HostAnswers(policies, ports.pacing, clock, backoff=backoff, robots=heeding)
    return TaskPorts(
        tasks=ports.tasks,
        runs=ports.runs,
        blobs=ports.blobs,
        queues=ports.queues,
        signals=ports.signals,
        gateway=heeding or ports.gateway,
        pipeline=ports.pipeline,
        outages=outages,
        tracer=options.tracer,
        pause=options.pause,
        hosts=answers,
        turns=turns or NO_HOST_TURNS,
    )


def _task_handler(
    task_ports: TaskPorts,
    ports: WorkerPorts,
    settings: Settings,
    clock: Clock,
    *,
    worker: str,
    telemetry: Telemetry,
) -> TaskHandler:
    return TaskHandler(
        task_ports,
        JobTemplates(ports.jobs, ports.sealer),
        clock,
        retry_policy=RetryPolicy(
            clock,
            base=settings.retry_base,
            cap=settings.retry_cap,
            rate_limit_deadline=settings.rate_limit_deadline,
        ),
        observer=telemetry,
        options=TaskOptions(
            worker=worker,
            visibility=settings.visibility_timeout,
            gateway_timeout=settings.gateway_timeout,
            max_result_bytes=settings.max_result_bytes,
            max_interruptions=settings.max_interruptions,
            pack_bodies=settings.pack_bodies,
            log_ratio=settings.task_log_ratio,
            # The logs of a fleet are read by more people than its results.
            logs_urls=not settings.role,
        ),
    )


def can_heed_robots(settings: Settings) -> bool:
    """Tell whether the gateway that the settings name can heed robots.txt: the direct one, if the
    package for it is installed."""
    return settings.gateway == "direct" and find_spec("protego") is not None


def _heeding_robots(ports: WorkerPorts, settings: Settings, clock: Clock) -> RobotsGateway | None:
    """Put what reads robots.txt in front of the gateway; None where it cannot be heeded."""
    if ports.robots is None or not can_heed_robots(settings):
        return None
    from conveyor.gateway.robots import RobotsGateway

    lease = settings.permit_lease
    return RobotsGateway(ports.gateway, ports.robots, ports.permits, clock, lease=lease)


def _control_handlers(
    binding: Binding,
    settings: Settings,
    clock: Clock,
    sender: TaskSender,
    *,
    work: OpenWork | None,
) -> Mapping[type[Message], Handler]:
    ingest = IngestHandler(
        clock,
        ingestion=binding.ingestion,
        blobs=binding.blobs,
        queues=binding.queues,
        signals=binding.signals,
        sender=sender,
    )
    handlers: dict[type[Message], Handler] = {
        DeleteMessage: DeleteHandler(
            clock,
            jobs=binding.jobs,
            runs=binding.runs,
            tasks=binding.tasks,
            blobs=binding.blobs,
            queues=binding.queues,
            visibility=settings.visibility_timeout,
        ),
        IngestMessage: ingest,
        TemplateMessage: ingest,
        ExportMessage: ExportHandler(
            clock,
            exports=binding.exports,
            jobs=binding.jobs,
            tasks=binding.tasks,
            blobs=binding.blobs,
            queues=binding.queues,
            max_bytes=settings.max_export_bytes,
        ),
    }
    if work is not None:
        handlers[ExportMessage] = CountedHandler(handlers[ExportMessage], work)
    return handlers


class CountedHandler(Handler):
    """A handler whose work in threads is counted as open while it lasts."""

    def __init__(self, handler: Handler, work: OpenWork) -> None:
        self._handler = handler
        self._work = work

    async def handle(self, delivery: Delivery, throttled: Throttled) -> Outcome:
        with counted(self._work, "exports"):
            return await self._handler.handle(delivery, throttled)

    async def renew(self) -> None:
        await self._handler.renew()


def _sweep_ticker(binding: Binding, settings: Settings, clock: Clock, sender: TaskSender) -> Ticker:
    ports = SweepPorts(
        sweeping=binding.sweeping,
        ingestion=binding.ingestion,
        exports=binding.exports,
        inputs=binding.inputs,
        deliveries=binding.deliveries,
        schedules=binding.schedules,
        jobs=binding.jobs,
        runs=binding.runs,
        blobs=binding.blobs,
        queues=binding.queues,
        signals=binding.signals,
        sender=sender,
    )
    options = SweepOptions(
        interval=settings.sweep_interval,
        quiet_after=settings.quiet_after,
        row_retention_days=settings.row_retention_days,
        delivery_retention_days=settings.delivery_retention_days,
        fire_retention_days=settings.fire_retention_days,
    )
    sweep = Sweeper(ports, clock, options=options).sweep
    return Ticker(sweep, clock, interval=settings.sweep_interval, what="the sweep")


def _notifier(
    binding: Binding,
    settings: Settings,
    clock: Clock,
    telemetry: Telemetry,
    *,
    origin: str,
    made: Callable[[], None],
) -> Notifier:
    machines = StateMachines(
        clock,
        outbox=binding.outbox,
        callbacks=binding.callbacks,
        jobs=binding.jobs,
        observer=telemetry,
        heartbeat=settings.callback_heartbeat,
    )
    events = EventSettler(
        clock,
        outbox=binding.outbox,
        deliveries=binding.deliveries,
        jobs=binding.jobs,
        interval=settings.sweep_interval,
        origin=origin,
        made=made,
    )
    tellers = {Subscriber.CALLBACK: machines.tell, Subscriber.WEBHOOK: events.tell}
    return Notifier(clock, outbox=binding.outbox, tellers=tellers)


def _outbox_ticker(notifier: Notifier, settings: Settings, clock: Clock) -> Ticker:
    interval = settings.outbox_interval
    return Ticker(notifier.deliver, clock, interval=interval, what="the look for callbacks")


def _delivery_ticker(deliverer: Deliverer, settings: Settings, clock: Clock) -> OverlappingTicker:
    return OverlappingTicker(
        deliverer.look,
        clock,
        interval=settings.outbox_interval,
        what="the look for deliveries",
        stop=deliverer.stop,
    )


def _deliverer(
    binding: Binding,
    webhooks: Webhooks,
    settings: Settings,
    clock: Clock,
    *,
    telemetry: Telemetry,
    options: LoopOptions,
) -> Deliverer:
    sealer = SigningKeySealer(_sealing_secrets(binding, settings))
    ports = DeliveryPorts(
        deliveries=binding.deliveries,
        jobs=binding.jobs,
        runs=binding.runs,
        webhooks=webhooks,
        # A receiver judges a signature by the clock of its own machine.
        signer=EventSigner(binding.signing_keys, sealer, options.machine or clock),
        tracer=options.tracer,
    )
    return Deliverer(ports, clock, observer=telemetry)


def _schedule_ticker(
    binding: Binding,
    settings: Settings,
    clock: Clock,
    *,
    telemetry: Telemetry,
    sealer: KeySealer,
    tracer: Tracer,
) -> Ticker:
    ports = SchedulerPorts(
        schedules=binding.schedules,
        jobs=binding.jobs,
        runs=binding.runs,
        queues=binding.queues,
        signals=binding.signals,
        sealer=sealer,
        tracer=tracer,
    )
    options = SchedulerOptions(
        interval=settings.schedule_interval,
        catch_up=settings.schedule_catch_up,
        max_active_jobs=settings.max_active_jobs,
    )
    scheduler = Scheduler(ports, clock, options=options)
    fires = scheduler.outcomes
    telemetry.family("fires", lambda: [((outcome,), fires[outcome]) for outcome in fires])
    telemetry.gauge("fire_late_seconds", lambda: scheduler.late)
    what = "the look for due schedules"
    return Ticker(scheduler.fire, clock, interval=settings.schedule_interval, what=what)


def _counting(
    dispatcher: Dispatcher, queues: Queues, clock: Clock, options: LoopOptions
) -> list[Ticker]:
    if not options.logs_backlog:
        return []
    tell = Backlog(dispatcher.lanes, queues, options.pause).tell
    return [_minutely(tell, clock, what="counting the backlog")]


def _minutely(tell: Callable[[], Awaitable[None]], clock: Clock, *, what: str) -> Ticker:
    return Ticker(tell, clock, interval=BACKLOG_INTERVAL, what=what)
