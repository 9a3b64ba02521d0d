"""The roles of production: `api` serves and works no task, `worker` works tasks and serves no API.

Each role has a second small server for /readyz and /metrics, which reports not ready before
anything else ends, and ends last. Before a role starts, its settings are checked, because defaults
for one machine do not suit a fleet: a self-made secret, an API that accepts any key, links to a
private address. Each fault is reported in one line.
"""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from typing import Protocol
from urllib.parse import urlsplit

import anyio
import msgspec
from anyio.abc import TaskGroup

from conveyor.aio.concurrency import unwrap
from conveyor.aio.resilience import log_and_continue
from conveyor.bootstrap.production import RoleRuntime, open_role
from conveyor.clock import SystemClock
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.clock import Clock
from conveyor.ports.gateway import Gateway
from conveyor.records.blob_keys import PASSING_DAYS
from conveyor.roles.banner import LOOPBACK
from conveyor.roles.logs import start_logs
from conveyor.roles.serving import (
    HTTP_GRACE,
    UVICORN_LOG,
    HttpServer,
    bound,
    fit_to_files,
    origin_of,
    own_process,
)
from conveyor.settings import ROLES, InvalidSetting, Settings

DAY = 86_400
BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
TABLE = re.compile(r"[A-Za-z0-9_.-]{3,255}")
EVERY_ADDRESS = frozenset({"0.0.0.0", "::", ""})
SHORTEST_SECRET = 32
"""Minimum number of characters of a root secret."""


def check_place(settings: Settings) -> None:
    """Check the settings that name the fleet and its resources. Raises InvalidSetting."""
    if not settings.environment:
        raise InvalidSetting(
            "CONVEYOR_ENVIRONMENT",
            "must name the fleet, such as production: its resources carry the name",
        )
    if not settings.region:
        raise InvalidSetting("CONVEYOR_REGION", "must name a region of AWS, as AWS_REGION may too")
    if not settings.bucket:
        raise InvalidSetting("CONVEYOR_BUCKET", "must name the S3 bucket of the fleet")
    if not BUCKET.fullmatch(settings.bucket):
        raise InvalidSetting(
            "CONVEYOR_BUCKET",
            "must be 3 to 63 lower-case letters, digits, hyphens and dots, as S3 names a bucket",
        )
    if not TABLE.fullmatch(settings.table_name):
        raise InvalidSetting(
            "CONVEYOR_TABLE",
            "must be 3 to 255 letters, digits, underscores, hyphens and dots, as DynamoDB has it",
        )
    if settings.ledger == "redis" and not settings.redis_url:
        raise InvalidSetting(
            "CONVEYOR_REDIS_URL",
            "must be the URL of the fleet's Redis, unless CONVEYOR_LEDGER is dynamodb",
        )
    if settings.rate_limit and not settings.redis_url:
        raise InvalidSetting("CONVEYOR_RATE_LIMIT", "must be 0 unless CONVEYOR_REDIS_URL is set")


def check_role(settings: Settings) -> None:
    """Check all settings of a role. Raises InvalidSetting."""
    if not settings.role:
        raise InvalidSetting("CONVEYOR_ROLE", f"must be one of {', '.join(ROLES)}")
    check_place(settings)
    _check_secret(settings.secret)
    _check_lifetimes(settings)
    if settings.role == "api":
        _check_ports(settings)
        _check_api(settings)


def looseness(settings: Settings) -> list[str]:
    """List the rules that are looser than a fleet needs, one line each."""
    loose = {
        "any API key is accepted": settings.role == "api" and settings.api_keys == "any",
        "the gateway is fake: its answers are made up": settings.gateway == "fake",
        "pages are fetched directly, without rendering: CONVEYOR_GATEWAY names no scraping API": (
            settings.role == "worker" and settings.gateway == "direct"
        ),
        "private addresses are fetched too": settings.allow_private,
    }
    return [line for line, holds in loose.items() if holds]


def _check_lifetimes(settings: Settings) -> None:
    """Check lifetimes against the bucket, which deletes older objects by its own rules."""
    longest = PASSING_DAYS * DAY
    for variable, seconds in (
        ("CONVEYOR_INPUT_TTL", settings.input_ttl),
        ("CONVEYOR_EXPORT_TTL", settings.export_ttl),
    ):
        if seconds > longest:
            raise InvalidSetting(
                variable,
                f"must be at most {longest}: the bucket deletes it after {PASSING_DAYS} days",
            )


def _check_secret(secret: str) -> None:
    if not secret:
        raise InvalidSetting(
            "CONVEYOR_SECRET",
            "must be set, the same for every process of the fleet: openssl rand -hex 32 makes one",
        )
    if any(len(part) < SHORTEST_SECRET for part in secret.split(",")):
        raise InvalidSetting(
            "CONVEYOR_SECRET", f"must have at least {SHORTEST_SECRET} characters in each part"
        )


def _check_ports(settings: Settings) -> None:
    """Check that the two ports of an API differ."""
    hosts = {settings.host, settings.metrics_host}
    same = len(hosts) == 1 or not hosts.isdisjoint(EVERY_ADDRESS)
    if same and settings.port == settings.metrics_port != 0:
        raise InvalidSetting(
            "CONVEYOR_METRICS_PORT",
            f"must differ from CONVEYOR_PORT, which is {settings.port} too",
        )


def _check_api(settings: Settings) -> None:
    if not settings.api_keys:
        raise InvalidSetting(
            "CONVEYOR_API_KEYS",
            "must name a file of key hashes, or hold them (conveyor admin key-hash makes one);"
            " `any` accepts every key",
        )
    if not settings.public_url:
        if not LOOPBACK.fullmatch(settings.host):
            raise InvalidSetting(
                "CONVEYOR_PUBLIC_URL", "must be the URL that callers know: signed links carry it"
            )
        return
    parts = urlsplit(settings.public_url)
    if parts.scheme != "https" and not LOOPBACK.fullmatch(parts.hostname or ""):
        raise InvalidSetting(
            "CONVEYOR_PUBLIC_URL",
            "must be https: otherwise keys and signed links can be read on their way",
        )


KEEP_ALIVE = 75
"""Whole seconds for which an API keeps an idle connection: longer than its load balancer does (60 s
in the template). If the API closed first, a request might be on its way, and the balancer would
answer 502."""
LINGER = 0.2
"""Share of the grace during which an API that is no longer ready still takes new requests, until
the load balancer has noticed."""

UNHEARD = "cannot check the settings of the fleet"

_log = logging.getLogger("conveyor.roles")


class RoleInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """Addresses of a role that is ready; only an API has `api`, which ends in /v1."""

    role: str
    pid: int
    metrics: str
    api: str = ""

    def log_fields(self) -> dict[str, str]:
        """Return the fields for the log, which already names the process."""
        fields = {"role": self.role, "api": self.api, "metrics": self.metrics}
        return {name: value for name, value in fields.items() if value}


class Opens(Protocol):
    """Opens a role, as `open_role` does."""

    async def __call__(
        self, settings: Settings, clock: Clock, *, origin: str, gateway: Gateway | None = None
    ) -> RoleRuntime: ...


def run(
    settings: Settings,
    *,
    on_ready: Callable[[RoleInfo], None] = lambda _info: None,
    clock: Clock | None = None,
    opened: Opens = open_role,
) -> int:
    """Run the role of the settings until SIGINT or SIGTERM; return the exit code.

    Owns the process. Tests pass `clock` and `opened` to replace the system clock and parts of the
    role. Raises InvalidSetting, and ConveyorError if the role cannot start.
    """
    start_logs(settings)
    check_role(settings)
    for line in looseness(settings):
        _log.warning(line)
    fitting, slots = fit_to_files(settings)
    if slots and settings.role == "worker":
        _log.warning("%s", slots)

    async def until(stop: anyio.Event) -> None:
        await serve(fitting, on_ready=on_ready, stop=stop, clock=clock, opened=opened)

    own_process(until, on_stopping=lambda: _log.info("stopping"))
    return 0


async def serve(
    settings: Settings,
    *,
    on_ready: Callable[[RoleInfo], None],
    stop: anyio.Event,
    gateway: Gateway | None = None,
    clock: Clock | None = None,
    opened: Opens = open_role,
) -> None:
    """Open the production binding, serve or work until `stop`, then end everything in order.

    A `stop` during the opening cancels it; if that takes longer than the grace, the process exits.
    A given gateway replaces the one of the settings; the caller closes it. Raises ConveyorError for
    an address that cannot be bound, and any error of opening.
    """
    clock = clock or SystemClock()
    serves = settings.role == "api"
    with (
        bound(settings.metrics_host, settings.metrics_port, option="--metrics-port") as beside,
        bound(settings.host, settings.port) if serves else nullcontext() as listener,
    ):
        origin = "" if listener is None else _origin(settings.host, listener)

        async def opening() -> RoleRuntime:
            return await opened(settings, clock, origin=origin, gateway=gateway)

        grace = settings.shutdown_grace
        runtime = await _unless_stopped(opening, stop, clock=clock, grace=grace)
        if runtime is None:
            return
        info = RoleInfo(
            role=settings.role,
            pid=os.getpid(),
            metrics=_origin(settings.metrics_host, beside),
            api=f"{origin}/v1" if origin else "",
        )

        def ready() -> None:
            runtime.readiness.yes = True
            _log.info("ready", extra=info.log_fields())
            on_ready(info)

        async with AsyncExitStack() as stack:
            stack.push_async_callback(_closed, runtime)
            await stack.enter_async_context(_probes(runtime, beside))
            stack.callback(UVICORN_LOG.setLevel, logging.NOTSET)
            if listener is not None:
                await _answer(runtime, listener, stop, ready, clock=clock, grace=grace)
            else:
                await _work(runtime, stop, ready, clock=clock, grace=grace)


async def _unless_stopped(
    opening: Callable[[], Awaitable[RoleRuntime]],
    stop: anyio.Event,
    *,
    clock: Clock,
    grace: float,
) -> RoleRuntime | None:
    """Open the role; return None if `stop` comes first.

    Nothing is open then, and a failure to open no longer matters.
    """
    found: list[RoleRuntime] = []
    scope = anyio.CancelScope()

    async def give_up() -> None:
        await stop.wait()
        scope.cancel()
        await clock.sleep(grace)
        # A call of AWS runs in a thread that cannot be ended, and may wait longer than the grace.
        # Nothing has been taken on yet that would have to be given back.
        os._exit(0)

    with unwrap():
        async with anyio.create_task_group() as group:
            group.start_soon(give_up)
            try:
                with scope:
                    found.append(await opening())
            except Exception:
                if not stop.is_set():
                    raise
            if found and stop.is_set():
                await _closed(found.pop())
            group.cancel_scope.cancel()
    return found[0] if found else None


def _origin(host: str, listener: socket.socket) -> str:
    return origin_of(host, listener.getsockname()[1])


async def _closed(runtime: RoleRuntime) -> None:
    with anyio.CancelScope(shield=True):
        await runtime.aclose()


@asynccontextmanager
async def _probes(runtime: RoleRuntime, listener: socket.socket) -> AsyncIterator[None]:
    """Run the server for /readyz and /metrics while the body runs."""
    listening = anyio.Event()
    server = HttpServer(runtime.probes, protocol=runtime.protocol, on_started=listening.set)
    async with anyio.create_task_group() as group:

        async def probe() -> None:
            await server.serve(sockets=[listener])

        group.start_soon(probe)
        await listening.wait()
        try:
            yield
        finally:
            server.should_exit = True


@asynccontextmanager
async def _agreeing(
    runtime: RoleRuntime, stop: anyio.Event, clock: Clock
) -> AsyncIterator[TaskGroup]:
    """Check the fleet's settings regularly while the body runs; cancel the tasks of the group with
    it.

    If the settings of the fleet no longer agree with this process, sets `stop` and raises
    ConveyorError(conflict) after the body. Any other error of the check is logged, and the check is
    repeated.
    """
    refusals: list[ConveyorError] = []

    async def agree() -> None:
        try:
            await runtime.agree()
        except ConveyorError as error:
            if error.code is not ErrorCode.CONFLICT:
                raise
            refusals.append(error)
            stop.set()

    async def keep_agreeing() -> None:
        while not refusals:
            await clock.sleep(runtime.agree_every)
            await log_and_continue(_log, UNHEARD, agree)

    async with anyio.create_task_group() as group:
        group.start_soon(keep_agreeing)
        yield group
        group.cancel_scope.cancel()
    if refusals:
        raise refusals[0]


async def _work(
    runtime: RoleRuntime,
    stop: anyio.Event,
    ready: Callable[[], None],
    *,
    clock: Clock,
    grace: float,
) -> None:
    worker = runtime.worker
    assert worker is not None

    async def end() -> None:
        await stop.wait()
        runtime.readiness.yes = False
        worker.stop()

    async with _agreeing(runtime, stop, clock) as group:
        group.start_soon(end)
        if runtime.protection is not None:
            group.start_soon(runtime.protection.run)
        ready()
        await worker.run(grace=grace)


async def _answer(
    runtime: RoleRuntime,
    listener: socket.socket,
    stop: anyio.Event,
    ready: Callable[[], None],
    *,
    clock: Clock,
    grace: float,
) -> None:
    progress = runtime.progress
    linger = grace * LINGER
    left = max(HTTP_GRACE, int(grace - linger))
    server = HttpServer(
        runtime.app,
        protocol=runtime.protocol,
        on_started=ready,
        grace=left,
        keep_alive=KEEP_ALIVE,
    )

    async def end() -> None:
        await stop.wait()
        runtime.readiness.yes = False
        await clock.sleep(linger)
        UVICORN_LOG.setLevel(logging.CRITICAL)
        if progress is not None:
            # A stream never ends by itself, and the server waits for its connections.
            await progress.end()
        server.should_exit = True

    async with _agreeing(runtime, stop, clock) as group:
        if progress is not None:
            group.start_soon(progress.run)
        group.start_soon(end)
        group.start_soon(runtime.lag.run)
        await server.serve(sockets=[listener])
