"""Wiring: from settings to a running API and worker. The only module that knows every room.

Bindings are imported lazily, so that a process loads no more than the one it uses.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conveyor.domain.sealing import KeySealer, secret_bytes
from conveyor.engine.discovery import Discovery
from conveyor.engine.dispatcher import Dispatcher
from conveyor.engine.picking import LeastInFlight, Picking
from conveyor.engine.policy import Policy
from conveyor.engine.polling import Polling
from conveyor.engine.receive_first import (
    ReceiveFirstPolicy,
    exact_local_gate,
    local_gate,
    no_gate,
)
from conveyor.engine.reserve import ReservePolicy
from conveyor.engine.telemetry import Telemetry
from conveyor.engine.ticker import Ticker
from conveyor.engine.worker import Worker
from conveyor.gateway import open_gateway
from conveyor.handlers.control import ControlHandler
from conveyor.handlers.delete import DeleteHandler
from conveyor.handlers.export import ExportHandler
from conveyor.handlers.ingest import IngestHandler
from conveyor.handlers.sweep import Sweeper, SweepOptions
from conveyor.handlers.task import TaskHandler, TaskOptions
from conveyor.handlers.templates import Templates
from conveyor.handlers.verdict import Backoff
from conveyor.http.app import create_app
from conveyor.http.malformed import protocol
from conveyor.ports.binding import Binding
from conveyor.ports.clock import Clock
from conveyor.ports.gateway import Gateway
from conveyor.ports.permits import Permits
from conveyor.ports.queues import DeleteMessage, ExportMessage, IngestMessage
from conveyor.service.options import ServiceOptions
from conveyor.service.service import Service
from conveyor.settings import Settings

if TYPE_CHECKING:
    from conveyor.dev.binding import DevBinding


POLLING = Polling()
_log = logging.getLogger("conveyor.engine")
RENEWALS = 3
"""Heartbeats at least within one visibility timeout and within one permit lease."""


class Readiness:
    """Whether `/readyz` says yes: from the start of listening to the beginning of the end."""

    def __init__(self) -> None:
        self.yes = False

    def __call__(self) -> bool:
        return self.yes


@dataclass(frozen=True, slots=True)
class Runtime:
    """An assembled process: what to serve, in which protocol, what to run, what to close at the
    end."""

    app: Any
    protocol: type[asyncio.Protocol]
    worker: Worker
    data_dir: Path
    readiness: Readiness
    aclose: Callable[[], Awaitable[None]]


async def open_dev(
    settings: Settings, clock: Clock, *, origin: str, gateway: Gateway | None = None
) -> Runtime:
    """Everything of conveyor-dev, opened and not yet running. `origin` is the address it serves on.

    A gateway that is handed in stays the caller's to close.
    Raises ConveyorError where the data directory cannot be opened.
    """
    from conveyor.dev.binding import open_binding

    secrets = settings.secret.split(",")
    binding = await open_binding(
        Path(settings.data_dir),
        clock,
        secret=secrets[0],
        queue_window=settings.queue_window,
        max_receives=settings.max_receives,
    )
    engine = gateway or open_gateway(
        settings.gateway,
        clock,
        allow_private=settings.allow_private,
        connections=settings.workers,
        retry_after_cap=settings.retry_after_cap,
    )
    telemetry = Telemetry()
    older = tuple(map(secret_bytes, secrets[1:]))
    worker = build_worker(
        binding.ports, engine, settings, clock, telemetry=telemetry, older_secrets=older
    )
    service = Service(binding.ports, _service_options(settings, origin, older), clock)
    _measure(telemetry, binding, worker, service)
    readiness = Readiness()
    app = create_app(
        service,
        registry=telemetry.registry(),
        ready=readiness,
        allowed_hosts=[settings.host, *filter(None, settings.allowed_hosts.split(","))],
        clock=clock,
        max_request_bytes=settings.max_request_bytes,
    )

    async def close() -> None:
        if gateway is None:
            await engine.aclose()
        await binding.ports.aclose()

    return Runtime(app, protocol(clock), worker, binding.directory.path, readiness, close)


def build_worker(
    binding: Binding,
    gateway: Gateway,
    settings: Settings,
    clock: Clock,
    *,
    telemetry: Telemetry,
    older_secrets: tuple[bytes, ...] = (),
    polling: Polling = POLLING,
    picking: Picking | None = None,
) -> Worker:
    """The loop over a binding: the same for every one of them. `picking` None: fewest in flight."""
    name = clock.new_id()
    tasks = TaskHandler(
        binding,
        gateway,
        Templates(binding.jobs, KeySealer([binding.root_secret, *older_secrets])),
        clock,
        backoff=Backoff(
            clock,
            base=settings.retry_base,
            cap=settings.retry_cap,
            rate_limit_deadline=settings.rate_limit_deadline,
        ),
        observer=telemetry,
        options=TaskOptions(
            worker=name,
            visibility=settings.visibility_timeout,
            gateway_timeout=settings.gateway_timeout,
            max_result_bytes=settings.max_result_bytes,
            max_interruptions=settings.max_interruptions,
        ),
    )
    heartbeat = min(
        settings.heartbeat,
        settings.visibility_timeout / RENEWALS,
        settings.permit_lease / RENEWALS,
    )
    control = ControlHandler(
        {
            DeleteMessage: DeleteHandler(binding, clock, visibility=settings.visibility_timeout),
            IngestMessage: IngestHandler(binding, clock),
            ExportMessage: ExportHandler(binding, clock, max_bytes=settings.max_export_bytes),
        }
    )
    policy = build_policy(
        settings, binding.permits, clock, holder=name, heartbeat=heartbeat, batch=polling.batch
    )
    telemetry.gauge("permits", "Permits in this worker's hand", lambda: policy.held)
    dispatcher = Dispatcher(
        binding.queues,
        policy,
        clock,
        task_handler=tasks,
        control_handler=control,
        telemetry=telemetry,
        slots=settings.workers,
        visibility=settings.visibility_timeout,
        polling=polling,
        picking=picking or LeastInFlight(),
        max_receives=settings.max_receives,
    )
    telemetry.gauge("queue_depth", "Messages waiting in this worker's queues", dispatcher.depth)
    discovery = Discovery(
        dispatcher,
        binding.runs,
        binding.queues,
        binding.signals,
        clock,
        interval=settings.discovery_interval,
        resync=settings.resync_interval,
        evict_after=settings.evict_after,
    )
    sweeper = Sweeper(
        binding,
        clock,
        options=SweepOptions(
            interval=settings.sweep_interval,
            quiet_after=settings.quiet_after,
            row_retention_days=settings.row_retention_days,
        ),
    )
    sweeping = Ticker(sweeper.sweep, clock, interval=settings.sweep_interval, what="the sweep")
    return Worker(dispatcher, discovery, clock, heartbeat=heartbeat, tickers=(sweeping,))


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


def _measure(telemetry: Telemetry, binding: DevBinding, worker: Worker, service: Service) -> None:
    store, results = binding.store, service.results
    telemetry.total("store_rows_read", "Task rows read for pages", lambda: store.rows_read)
    telemetry.total(
        "store_rows_returned",
        "Task rows returned",
        lambda: store.rows_returned - results.rows_discarded,
    )
    telemetry.gauge("wal_bytes", "Size of the database's write-ahead log", store.wal_size)
    telemetry.gauge("loop_lag_seconds", "Latest lag of the event loop", lambda: worker.loop_lag)


def _service_options(
    settings: Settings, origin: str, older_secrets: tuple[bytes, ...]
) -> ServiceOptions:
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
