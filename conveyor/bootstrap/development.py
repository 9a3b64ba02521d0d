"""Wire conveyor-dev: the API and the worker over a data directory, in one process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from anyio import CancelScope

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
from conveyor.bootstrap.moving import ManualControl, MovedServer, SystemControl
from conveyor.bootstrap.recording import (
    NO_RECORDING,
    RecordedGateway,
    RecordingChoice,
    SharedGateway,
    open_recorded,
)
from conveyor.bootstrap.relief import RelievedWorker
from conveyor.clock import ManualClock
from conveyor.domain.hosts import HostPolicies
from conveyor.domain.signatures import SigningKeySealer, SigningSecret
from conveyor.engine.telemetry import Telemetry
from conveyor.engine.worker import Worker
from conveyor.gateway.counted import CountedGateway, CountedWebhooks, FailingGateway
from conveyor.gateway.fake import FakeGateway
from conveyor.gateway.ruled import RuledGateway
from conveyor.http.app import AppOptions, create_app
from conveyor.http.faults import ApiFaults
from conveyor.http.inbox import Inbox
from conveyor.http.malformed import protocol
from conveyor.http.middleware import INBOX_PATH, is_loopback
from conveyor.http.routes_dev import Bench
from conveyor.ports.clock import Clock
from conveyor.ports.gateway import Gateway
from conveyor.ports.rate_limit import RateLimit
from conveyor.ports.tracing import NO_TRACER, Tracer
from conveyor.ports.webhooks import Webhooks
from conveyor.ports.workers import FleetPause
from conveyor.service.context import ServiceOptions
from conveyor.service.progress import Progress
from conveyor.service.service import Service
from conveyor.settings import Settings

LOOP = LoopOptions(report_every=1.0)
"""Reports of the worker are kept in memory and cost nothing: they need not wait for a heartbeat."""

if TYPE_CHECKING:
    from conveyor.dev.binding import DevBinding

Planter = Callable[[Settings], Awaitable[None]]
"""Fills the data directory of settings, which is empty."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """An assembled process: the application to serve, its protocol, the worker and the progress to
    run, the URL of the inbox (empty without one), the clock where it is moved by hand, `hurry` to
    call once it is to stop, `aclose` to call at the end, and the gateway as it is `recorded`, which
    has something to say then. `pause` holds its worker back, `fail_next` lets calls of its gateway
    fail, `empty` removes its data, and `fill` takes over what a function puts into a directory of
    its own, where there are no data yet."""

    app: Any
    protocol: type[asyncio.Protocol]
    worker: RelievedWorker
    progress: Progress
    data_dir: Path
    readiness: Readiness
    inbox: str
    moved: MovedServer | None
    pause: FleetPause
    fail_next: Callable[[int], int]
    empty: Callable[[], Awaitable[None]]
    fill: Callable[[Planter], Awaitable[None]]
    hurry: Callable[[], None]
    recorded: RecordedGateway
    aclose: Callable[[], Awaitable[None]]


class _Closable(Protocol):
    async def aclose(self) -> None: ...


async def open_dev(
    settings: Settings,
    clock: Clock,
    *,
    origin: str,
    gateway: Gateway | None = None,
    dev_token: str = "",
    recording: RecordingChoice = NO_RECORDING,
) -> Runtime:
    """Open everything of conveyor-dev without running it, on the address `origin`; a `dev_token`
    opens what tests move. The caller closes a gateway that it passes in. Raises ConveyorError if
    the data directory or the recording cannot be opened."""
    session_options(settings)  # unusable ones are told before anything is opened
    policies, moved = host_policies(settings, clock), _moved(clock)
    binding = await _open_binding(settings, clock, moved)
    recorded = await _recorded(settings, clock, moved, recording, gateway, binding, origin)
    telemetry, (_, older), inbox = Telemetry(), root_secrets(settings), _inbox_url(origin)
    webhooks = _webhooks(settings, clock, moved, inbox=inbox)
    options = service_options(settings, origin, older)
    failing, pause = FailingGateway(recorded), FleetPause()
    outside = Outside(failing, webhooks, options.public_origin)
    tracer = tracer_of(settings, clock, telemetry)
    loop = replace(LOOP, tracer=tracer or NO_TRACER, pause=pause, policies=policies)
    worker = _worker(binding, outside, settings, clock, moved, telemetry=telemetry, options=loop)
    service = _service(binding, options, clock, moved, policies, webhooks=webhooks, worker=worker)
    _measure(telemetry, binding, worker, service)
    readiness, machine = Readiness(), clock if moved is None else moved.machine
    receiver = _inbox(binding, clock, moved, older, token=dev_token) if inbox else None
    faults = ApiFaults(dev_token) if dev_token else None
    empty = _emptying(binding, worker, recorded, gateway, receiver, faults)
    bench = _bench(clock, dev_token, empty, gateway, recorded, binding) if dev_token else None
    app_options = _app_options(settings, clock, worker, tracer=tracer or NO_TRACER)
    app_options = replace(app_options, inbox=receiver, bench=bench, faults=faults)
    return Runtime(
        _app(binding, service, telemetry, readiness, machine, app_options),
        protocol(machine, head_seconds=settings.head_timeout),
        worker,
        service.progress,
        binding.directory.path,
        readiness,
        inbox,
        moved,
        pause,
        failing.fail_next,
        empty,
        _filling(binding, worker, replace(settings, public_url=options.public_origin)),
        hurry=binding.store.database.hurry,
        recorded=recorded,
        aclose=_closing(binding, recorded, webhooks, tracer),
    )


def _app(
    binding: DevBinding,
    service: Service,
    telemetry: Telemetry,
    readiness: Readiness,
    machine: Clock,
    options: AppOptions,
) -> Any:
    telemetry.histogram("http_seconds", options.took)
    return create_app(
        service,
        registry=telemetry.registry(),
        ready=lambda: readiness() and binding.store.database.file.is_there(),
        clock=machine,
        options=options,
    )


def _moved(clock: Clock) -> MovedServer | None:
    return MovedServer(clock) if isinstance(clock, ManualClock) else None


def _closing(binding: DevBinding, *clients: _Closable | None) -> Callable[[], Awaitable[None]]:
    async def close() -> None:
        for client in clients:
            if client is not None:
                await client.aclose()
        await binding.ports.aclose()

    return close


def _service(
    binding: DevBinding,
    options: ServiceOptions,
    clock: Clock,
    moved: MovedServer | None,
    policies: HostPolicies,
    *,
    webhooks: Webhooks,
    worker: RelievedWorker,
) -> Service:
    return Service(
        binding.ports,
        options,
        clock if moved is None else moved.clock.requests,
        webhooks=webhooks,
        outages=lambda: worker.present.outages.now(),
        moved=None if moved is None else moved.requests(),
        policies=policies,
    )


def _inbox_url(origin: str) -> str:
    """Return the URL of the receiver of a server on loopback; empty for another."""
    return f"{origin}{INBOX_PATH}" if is_loopback(urlsplit(origin).hostname or "") else ""


def _gateway(
    settings: Settings, clock: Clock, moved: MovedServer | None, *, own_port: int
) -> Gateway:
    """Open the gateway of the settings. One with a network goes by the machine's clock, and is
    waited for."""
    if moved is None or settings.gateway == "fake":
        return gateway_of(settings, clock, own_port=own_port)
    return CountedGateway(gateway_of(settings, moved.machine, own_port=own_port), moved.work)


async def _recorded(
    settings: Settings,
    clock: Clock,
    moved: MovedServer | None,
    choice: RecordingChoice,
    given: Gateway | None,
    binding: DevBinding,
    origin: str,
) -> RecordedGateway:
    """Open the gateway, behind a recording if one is chosen; close the binding if that fails."""
    own_port = urlsplit(origin).port or 0
    try:
        return await open_recorded(
            choice,
            lambda: (
                _gateway(settings, clock, moved, own_port=own_port)
                if given is None
                else SharedGateway(given)
            ),
            clock if moved is None else moved.machine,
            None if moved is None else moved.work,
        )
    except BaseException:
        with CancelScope(shield=True):
            await binding.ports.aclose()
        raise


def _webhooks(
    settings: Settings, clock: Clock, moved: MovedServer | None, *, inbox: str
) -> Webhooks:
    if moved is None:
        return webhooks_of(settings, clock, loopback=True, inbox=inbox)
    posting = webhooks_of(settings, moved.machine, loopback=True, inbox=inbox)
    return CountedWebhooks(posting, moved.work)


def _worker(
    binding: DevBinding,
    outside: Outside,
    settings: Settings,
    clock: Clock,
    moved: MovedServer | None,
    *,
    telemetry: Telemetry,
    options: LoopOptions,
) -> RelievedWorker:
    """Make the worker, and each that relieves it. A pause stays over a relief."""
    if moved is not None:
        looks, work = moved.clock.looks, moved.clock.work
        options = replace(options, looks=looks, machine=moved.machine, work=work)

    def make() -> Worker:
        # Nobody is left of the worker before this one.
        options.pause.forget_listeners()
        return build_worker(
            binding.ports, outside, settings, clock, telemetry=telemetry, options=options
        )

    relieved = RelievedWorker(make)
    if moved is not None:
        moved.watch(binding, lambda: relieved.present, settings)
    return relieved


def _emptying(
    binding: DevBinding,
    worker: RelievedWorker,
    recorded: RecordedGateway,
    gateway: Gateway | None,
    inbox: Inbox | None,
    faults: ApiFaults | None,
) -> Callable[[], Awaitable[None]]:
    """Return what removes all data of a server, and lets a new worker begin."""

    async def clear() -> None:
        if faults is not None:
            faults.clear()
        await binding.clear()
        if inbox is not None:
            inbox.clear()
        if isinstance(gateway, FakeGateway):
            gateway.clear()
        await recorded.rewind()

    return lambda: worker.relieve(clear)


def _filling(
    binding: DevBinding, worker: RelievedWorker, settings: Settings
) -> Callable[[Planter], Awaitable[None]]:
    """Return what fills an empty server; raises ConveyorError(conflict) for one with data."""
    secret = settings.secret or binding.directory.secret.hex()

    async def fill(plant: Planter) -> None:
        await binding.store.check_empty()
        with TemporaryDirectory(prefix="conveyor-seed-", ignore_cleanup_errors=True) as folder:
            directory = Path(folder) / "data"
            await plant(replace(settings, data_dir=str(directory), secret=secret))
            await worker.relieve(partial(binding.fill, directory))

    return fill


def _bench(
    clock: Clock,
    token: str,
    empty: Callable[[], Awaitable[None]],
    gateway: Gateway | None,
    recorded: RecordedGateway,
    binding: DevBinding,
) -> Bench:
    control = ManualControl(clock) if isinstance(clock, ManualClock) else SystemControl(clock)
    rules = gateway if isinstance(gateway, RuledGateway) else None
    return Bench(control, token, empty, rules, recorded, binding.callbacks.sent)


async def _open_binding(settings: Settings, clock: Clock, moved: MovedServer | None) -> DevBinding:
    from conveyor.dev.binding import DevOptions, open_binding

    secret, older = root_secrets(settings)
    return await open_binding(
        Path(settings.data_dir),
        clock,
        secret=secret,
        older_secrets=older,
        options=DevOptions(
            queue_window=settings.queue_window,
            max_receives=settings.max_receives,
            daily_tasks=settings.caller_daily_tasks,
            host_limits=bool(settings.host_limit or settings.host_rate or settings.hosts),
        ),
        moved=None if moved is None else moved.clock,
    )


def _inbox(
    binding: DevBinding,
    clock: Clock,
    moved: MovedServer | None,
    older_secrets: Sequence[bytes],
    *,
    token: str,
) -> Inbox:
    """Build the receiver of this server, which knows the signing keys of all callers."""
    ports = binding.ports
    sealer = SigningKeySealer([*ports.sealing_secrets, ports.root_secret, *older_secrets])

    async def secrets() -> list[SigningSecret]:
        sealed = await binding.store.signing_keys.every_signing_key()
        opened = (sealer.open(key.kid, key.sealed, caller=caller) for caller, key in sealed)
        return [key for key in opened if key is not None]

    if moved is None:
        return Inbox(clock, secrets, token=token)
    return Inbox(clock, secrets, machine=moved.machine, token=token, work=moved.work)


def _app_options(
    settings: Settings,
    clock: Clock,
    worker: RelievedWorker,
    *,
    tracer: Tracer,
) -> AppOptions:
    return AppOptions(
        allowed_hosts=allowed_hosts(settings),
        max_request_bytes=settings.max_request_bytes,
        body_seconds=settings.body_timeout,
        body_memory=body_memory(settings),
        away=lambda: worker.present.away(),
        rate_limit=_rate_limit(settings, clock),
        is_development=True,
        sessions=session_options(settings),
        tracer=tracer,
    )


def _rate_limit(settings: Settings, clock: Clock) -> RateLimit | None:
    from conveyor.dev.rate_limit import MemoryRateLimit

    if not settings.rate_limit:
        return None
    return MemoryRateLimit(clock, rate=settings.rate_limit, burst=settings.rate_limit_burst)


def _measure(
    telemetry: Telemetry, binding: DevBinding, worker: RelievedWorker, service: Service
) -> None:
    store, results = binding.store, service.results
    telemetry.total("store_rows_read", lambda: store.rows_read)
    telemetry.total(
        "store_rows_returned",
        lambda: store.rows_returned - results.rows_discarded,
    )
    telemetry.gauge("streams", lambda: service.progress.streams)
    telemetry.total("stream_reads", lambda: service.progress.reads)
    telemetry.gauge("wal_bytes", store.wal_size)
    telemetry.gauge("loop_lag_seconds", lambda: worker.present.lag.seconds)
