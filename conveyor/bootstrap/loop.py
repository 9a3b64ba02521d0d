"""The loop: dispatcher, handlers, policy and tickers over any binding.

What the bindings' wirings have in common: readiness, a gateway, options of the service.
"""

from __future__ import annotations

import logging

from conveyor.domain.api_keys import KeySealer, secret_bytes
from conveyor.engine.discovery import Discovery
from conveyor.engine.dispatcher import Dispatcher
from conveyor.engine.planner import LeastInFlight, PickingRule, Polling
from conveyor.engine.policy import Policy
from conveyor.engine.receive_first import ReceiveFirstPolicy, exact_local_gate, local_gate, no_gate
from conveyor.engine.reserve import ReservePolicy
from conveyor.engine.telemetry import Backlog, Telemetry
from conveyor.engine.worker import Ticker, Worker
from conveyor.gateway import open_gateway
from conveyor.handlers.control import ControlHandler
from conveyor.handlers.delete import DeleteHandler
from conveyor.handlers.export import ExportHandler
from conveyor.handlers.ingest import IngestHandler
from conveyor.handlers.notify import Notifier
from conveyor.handlers.retry_policy import RetryPolicy
from conveyor.handlers.sweep import Sweeper, SweepOptions
from conveyor.handlers.task import TaskHandler, TaskOptions
from conveyor.ports.binding import Binding
from conveyor.ports.clock import Clock
from conveyor.ports.gateway import Gateway, ScrapeFailed
from conveyor.ports.permits import Permits
from conveyor.ports.queues import DeleteMessage, ExportMessage, IngestMessage
from conveyor.ports.records import JobLookup
from conveyor.records.job_templates import JobTemplates
from conveyor.service.context import ServiceOptions
from conveyor.settings import InvalidSetting, Settings


class Readiness:
    """Whether `/readyz` says yes: from the start of listening to the beginning of the end."""

    def __init__(self) -> None:
        self.yes = False

    def __call__(self) -> bool:
        return self.yes


def gateway_of(settings: Settings, clock: Clock) -> Gateway:
    """The gateway that the settings name. Raises InvalidSetting for a URL that it cannot call."""
    try:
        return open_gateway(
            settings.gateway,
            clock,
            allow_private=settings.allow_private,
            connections=settings.workers,
            retry_after_cap=settings.retry_after_cap,
        )
    except ScrapeFailed:
        raise InvalidSetting("CONVEYOR_GATEWAY", "must be a URL that can be called") from None


def allowed_hosts(settings: Settings) -> list[str]:
    """The names that requests may have in Host, beside loopback and the public origin."""
    return [settings.host, *filter(None, settings.allowed_hosts.split(","))]


def root_secrets(settings: Settings) -> tuple[str, tuple[bytes, ...]]:
    """The root secret as it was given, and the older ones."""
    first, *older = settings.secret.split(",")
    return first, tuple(map(secret_bytes, older))


def service_options(
    settings: Settings, origin: str, older_secrets: tuple[bytes, ...]
) -> ServiceOptions:
    """What the service is told; `origin` is where it is found, where the settings say nothing."""
    return ServiceOptions(
        public_origin=settings.public_url.rstrip("/") or origin,
        max_inline_tasks=settings.max_inline_tasks,
        async_threshold=settings.async_threshold,
        max_add_tasks=settings.max_add_tasks,
        max_open_job_tasks=settings.max_open_job_tasks,
        max_active_jobs=settings.max_active_jobs,
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
        older_secrets=older_secrets,
    )


POLLING = Polling()
_log = logging.getLogger("conveyor.engine")
RENEWALS = 3
"""Heartbeats at least within one visibility timeout and within one permit lease."""
BACKLOG_INTERVAL = 45.0
"""Seconds between two lines of the log that say how much waits. Not a minute, so that with jitter,
and with the time that counting takes, there is a line in each minute."""


def build_worker(
    binding: Binding,
    gateway: Gateway,
    settings: Settings,
    clock: Clock,
    *,
    telemetry: Telemetry,
    older_secrets: tuple[bytes, ...] = (),
    polling: Polling = POLLING,
    picking: PickingRule | None = None,
    jobs: JobLookup | None = None,
    says_backlog: bool = False,
) -> Worker:
    """The loop over a binding: the same for every one of them. `picking` None: fewest in flight;
    `jobs` None: templates come from the binding's own. `says_backlog`: the log is told in each
    minute how many messages wait, for whoever adds workers by it."""
    name = clock.new_id()
    lasting = min(settings.visibility_timeout, settings.permit_lease)
    heartbeat = min(settings.heartbeat, lasting / RENEWALS)
    templates = JobTemplates(
        jobs or binding.jobs,
        KeySealer([*binding.sealing_secrets, binding.root_secret, *older_secrets]),
    )
    policy = build_policy(
        settings, binding.permits, clock, holder=name, heartbeat=heartbeat, batch=polling.batch
    )
    dispatcher = Dispatcher(
        binding.queues,
        policy,
        clock,
        task_handler=_task_handler(
            binding, gateway, templates, settings, clock, worker=name, telemetry=telemetry
        ),
        control_handler=_control_handler(binding, settings, clock),
        telemetry=telemetry,
        slots=settings.workers,
        visibility=settings.visibility_timeout,
        polling=polling,
        picking=picking or LeastInFlight(),
        max_receives=settings.max_receives,
    )
    discovery = _discovery(dispatcher, binding, settings, clock)
    telemetry.gauge("permits", lambda: policy.held)
    telemetry.gauge("queue_depth", dispatcher.depth)
    tickers = _tickers(binding, settings, clock, telemetry)
    if says_backlog:
        tickers.append(_backlog_teller(dispatcher, binding, clock))
    return Worker(dispatcher, discovery, clock, heartbeat=heartbeat, tickers=tickers)


def _discovery(
    dispatcher: Dispatcher, binding: Binding, settings: Settings, clock: Clock
) -> Discovery:
    return Discovery(
        dispatcher,
        binding.runs,
        binding.queues,
        binding.signals,
        clock,
        interval=settings.discovery_interval,
        resync=settings.resync_interval,
        evict_after=settings.evict_after,
    )


def _task_handler(
    binding: Binding,
    gateway: Gateway,
    templates: JobTemplates,
    settings: Settings,
    clock: Clock,
    *,
    worker: str,
    telemetry: Telemetry,
) -> TaskHandler:
    return TaskHandler(
        binding,
        gateway,
        templates,
        clock,
        backoff=RetryPolicy(
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
        ),
    )


def _control_handler(binding: Binding, settings: Settings, clock: Clock) -> ControlHandler:
    return ControlHandler(
        {
            DeleteMessage: DeleteHandler(binding, clock, visibility=settings.visibility_timeout),
            IngestMessage: IngestHandler(binding, clock),
            ExportMessage: ExportHandler(binding, clock, max_bytes=settings.max_export_bytes),
        }
    )


def _tickers(
    binding: Binding, settings: Settings, clock: Clock, telemetry: Telemetry
) -> list[Ticker]:
    """What a worker does now and then."""
    options = SweepOptions(
        interval=settings.sweep_interval,
        quiet_after=settings.quiet_after,
        row_retention_days=settings.row_retention_days,
    )
    sweep = Sweeper(binding, clock, options=options).sweep
    deliver = Notifier(
        binding, clock, observer=telemetry, heartbeat=settings.callback_heartbeat
    ).deliver
    return [
        Ticker(sweep, clock, interval=settings.sweep_interval, what="the sweep"),
        Ticker(deliver, clock, interval=settings.outbox_interval, what="the look for callbacks"),
    ]


def _backlog_teller(dispatcher: Dispatcher, binding: Binding, clock: Clock) -> Ticker:
    tell = Backlog(dispatcher.lanes, binding.queues).tell
    return Ticker(tell, clock, interval=BACKLOG_INTERVAL, what="counting the backlog")


def build_policy(
    settings: Settings,
    permits: Permits,
    clock: Clock,
    *,
    holder: str,
    heartbeat: float,
    batch: int,
) -> Policy:
    """The permit policy that the settings name."""
    gates = {"off": no_gate, "local": local_gate, "local-exact": exact_local_gate}
    if settings.permit_policy in gates:
        _log.warning(
            "permit policy %s receives messages that it cannot work: use reserve",
            settings.permit_policy,
        )
        return ReceiveFirstPolicy(
            permits,
            clock,
            gate=gates[settings.permit_policy],
            holder=holder,
            lease=settings.permit_lease,
            heartbeat=heartbeat,
            cooldown=settings.throttle_cooldown,
            bounce=settings.bounce_visibility,
            bounce_cap=settings.bounce_visibility_cap,
        )
    return ReservePolicy(
        permits,
        clock,
        holder=holder,
        lease=settings.permit_lease,
        heartbeat=heartbeat,
        slots=settings.workers,
        batch=batch,
        strict=settings.permit_policy == "reserve-strict",
    )
