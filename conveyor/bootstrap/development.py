"""Wire conveyor-dev: the API and the worker over a data directory, in one process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

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
from conveyor.domain.signatures import SigningKeySealer, SigningSecret
from conveyor.engine.telemetry import Telemetry
from conveyor.engine.worker import Worker
from conveyor.http.app import AppOptions, create_app
from conveyor.http.inbox import Inbox
from conveyor.http.malformed import protocol
from conveyor.http.middleware import INBOX_PATH, is_loopback
from conveyor.ports.clock import Clock
from conveyor.ports.gateway import Gateway
from conveyor.ports.rate_limit import RateLimit
from conveyor.ports.tracing import NO_TRACER, Tracer
from conveyor.service.progress import Progress
from conveyor.service.service import Service
from conveyor.settings import Settings

LOOP = LoopOptions(report_every=1.0)
"""Reports of the worker are kept in memory and cost nothing: they need not wait for a heartbeat."""

if TYPE_CHECKING:
    from conveyor.dev.binding import DevBinding


@dataclass(frozen=True, slots=True)
class Runtime:
    """An assembled process: the application to serve, its protocol, the worker and the progress to
    run, the URL of the inbox (empty without one), `hurry` to call once it is to stop, and `aclose`
    to call at the end."""

    app: Any
    protocol: type[asyncio.Protocol]
    worker: Worker
    progress: Progress
    data_dir: Path
    readiness: Readiness
    inbox: str
    hurry: Callable[[], None]
    aclose: Callable[[], Awaitable[None]]


class _Closable(Protocol):
    async def aclose(self) -> None: ...


async def open_dev(
    settings: Settings, clock: Clock, *, origin: str, gateway: Gateway | None = None
) -> Runtime:
    """Open everything of conveyor-dev without running it. `origin` is the address it serves on.

    The caller closes a gateway that it passes in. Raises ConveyorError if the data directory cannot
    be opened.
    """
    session_options(settings)  # unusable ones are told before anything is opened
    binding = await _open_binding(settings, clock)
    scraper = gateway or gateway_of(settings, clock)
    telemetry = Telemetry()
    _, older = root_secrets(settings)
    inbox = f"{origin}{INBOX_PATH}" if is_loopback(urlsplit(origin).hostname or "") else ""
    webhooks = webhooks_of(settings, clock, loopback=True, inbox=inbox)
    options = service_options(settings, origin, older)
    outside = Outside(scraper, webhooks, options.public_origin)
    tracer = tracer_of(settings, clock, telemetry)
    loop = replace(LOOP, tracer=tracer or NO_TRACER)
    worker = build_worker(
        binding.ports, outside, settings, clock, telemetry=telemetry, options=loop
    )
    service = Service(binding.ports, options, clock, webhooks=webhooks, outages=worker.outages.now)
    _measure(telemetry, binding, worker, service)
    readiness = Readiness()
    limits = _app_options(
        settings,
        clock,
        worker,
        inbox=_inbox(binding, clock, older) if inbox else None,
        tracer=tracer or NO_TRACER,
    )
    telemetry.histogram("http_seconds", limits.took)
    app = create_app(
        service,
        registry=telemetry.registry(),
        ready=lambda: readiness() and binding.store.database.file.is_there(),
        clock=clock,
        options=limits,
    )

    return Runtime(
        app,
        protocol(clock, head_seconds=settings.head_timeout),
        worker,
        service.progress,
        binding.directory.path,
        readiness,
        inbox,
        hurry=binding.store.database.hurry,
        aclose=_closing(binding, scraper if gateway is None else None, webhooks, tracer),
    )


def _closing(binding: DevBinding, *clients: _Closable | None) -> Callable[[], Awaitable[None]]:
    async def close() -> None:
        for client in clients:
            if client is not None:
                await client.aclose()
        await binding.ports.aclose()

    return close


async def _open_binding(settings: Settings, clock: Clock) -> DevBinding:
    from conveyor.dev.binding import open_binding

    secret, older = root_secrets(settings)
    return await open_binding(
        Path(settings.data_dir),
        clock,
        secret=secret,
        older_secrets=older,
        queue_window=settings.queue_window,
        max_receives=settings.max_receives,
    )


def _inbox(binding: DevBinding, clock: Clock, older_secrets: Sequence[bytes]) -> Inbox:
    """Build the receiver of this server, which knows the signing keys of all callers."""
    ports = binding.ports
    sealer = SigningKeySealer([*ports.sealing_secrets, ports.root_secret, *older_secrets])

    async def secrets() -> list[SigningSecret]:
        sealed = await binding.store.signing_keys.every_signing_key()
        opened = (sealer.open(key.kid, key.sealed, caller=caller) for caller, key in sealed)
        return [key for key in opened if key is not None]

    return Inbox(clock, secrets)


def _app_options(
    settings: Settings,
    clock: Clock,
    worker: Worker,
    *,
    inbox: Inbox | None,
    tracer: Tracer,
) -> AppOptions:
    return AppOptions(
        allowed_hosts=allowed_hosts(settings),
        max_request_bytes=settings.max_request_bytes,
        body_seconds=settings.body_timeout,
        body_memory=body_memory(settings),
        away=worker.away,
        rate_limit=_rate_limit(settings, clock),
        inbox=inbox,
        sessions=session_options(settings),
        tracer=tracer,
    )


def _rate_limit(settings: Settings, clock: Clock) -> RateLimit | None:
    from conveyor.dev.rate_limit import MemoryRateLimit

    if not settings.rate_limit:
        return None
    return MemoryRateLimit(clock, rate=settings.rate_limit, burst=settings.rate_limit_burst)


def _measure(telemetry: Telemetry, binding: DevBinding, worker: Worker, service: Service) -> None:
    store, results = binding.store, service.results
    telemetry.total("store_rows_read", lambda: store.rows_read)
    telemetry.total(
        "store_rows_returned",
        lambda: store.rows_returned - results.rows_discarded,
    )
    telemetry.gauge("streams", lambda: service.progress.streams)
    telemetry.total("stream_reads", lambda: service.progress.reads)
    telemetry.gauge("wal_bytes", store.wal_size)
    telemetry.gauge("loop_lag_seconds", lambda: worker.lag.seconds)
