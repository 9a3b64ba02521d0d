"""conveyor-dev: the API and the worker in one process over the development binding."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio
import msgspec
import uvicorn
from anyio.abc import TaskStatus

from conveyor.bootstrap import Runtime, open_dev
from conveyor.clock import SystemClock
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.gateway import Gateway
from conveyor.roles.logs import configure_logs
from conveyor.settings import Settings

HTTP_GRACE = 1
"""Whole seconds that requests under way get at shutdown."""
BACKLOG = 2_048
COLLECT_AFTER = 50_000
"""Allocations between two garbage collections: at the default of 700 they took a tenth of the
loop's time, nearly all of it on objects that live for one task and are freed without them."""


_UVICORN_LOG = logging.getLogger("uvicorn.error")
"""Tells each request that is cut off at the end as an error, with a traceback: silent by then."""


class ServerInfo(msgspec.Struct, frozen=True):
    """Where a server that is ready can be found."""

    api: str
    pid: int
    data_dir: str
    gateway: str


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to the role that runs it, and says when it listens."""

    def __init__(self, config: uvicorn.Config, *, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()


def run(
    settings: Settings,
    *,
    on_ready: Callable[[ServerInfo], None],
    on_stopping: Callable[[], None] = lambda: None,
) -> int:
    """Serve until SIGINT or SIGTERM; the exit code. Owns the process: its loop and its umask.

    Raises ConveyorError where the server cannot start.
    """
    configure_logs(level=settings.log_level, form=settings.log_format)
    # Whatever is stored is its owner's alone, also where others may enter the data directory.
    os.umask(0o077)
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, 20, 50)
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        runner.run(_until_signalled(settings, on_ready, on_stopping))
    return 0


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def _until_signalled(
    settings: Settings, on_ready: Callable[[ServerInfo], None], on_stopping: Callable[[], None]
) -> None:
    stop = anyio.Event()

    async def listen(*, task_status: TaskStatus[None]) -> None:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for _ in signals:
                if stop.is_set():
                    os._exit(130)
                on_stopping()
                stop.set()

    async with anyio.create_task_group() as group:
        await group.start(listen)
        await serve(settings, on_ready=on_ready, stop=stop)
        group.cancel_scope.cancel()


async def serve(
    settings: Settings,
    *,
    on_ready: Callable[[ServerInfo], None],
    stop: anyio.Event | None = None,
    gateway: Gateway | None = None,
) -> None:
    """Bind, open the data directory, serve and work until `stop`; then end everything in order.

    A gateway that is handed in replaces the one that the settings name, and stays the caller's.
    Raises ConveyorError for an address that cannot be bound, and whatever opening the binding
    raises.
    """
    stop = stop if stop is not None else anyio.Event()
    with _bind(settings.host, settings.port) as listener:
        origin = _origin(settings.host, listener.getsockname()[1])
        runtime = await open_dev(settings, SystemClock(), origin=origin, gateway=gateway)
        try:
            info = ServerInfo(
                api=f"{origin}/v1",
                pid=os.getpid(),
                data_dir=str(runtime.data_dir),
                gateway=settings.gateway if gateway is None else "fake",
            )
            await _serve(runtime, listener, stop, lambda: on_ready(info), settings.shutdown_grace)
        finally:
            with anyio.CancelScope(shield=True):
                await runtime.aclose()
            # Requests that were cut off have been told by now; another server of this process may
            # have something to say.
            _UVICORN_LOG.setLevel(logging.NOTSET)


async def _serve(
    runtime: Runtime,
    listener: socket.socket,
    stop: anyio.Event,
    announce: Callable[[], None],
    grace: float,
) -> None:
    def started() -> None:
        runtime.readiness.yes = True
        announce()

    config = uvicorn.Config(
        runtime.app,
        http=runtime.protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=HTTP_GRACE,
    )
    server = _Server(config, on_started=started)

    async def work() -> None:
        await runtime.worker.run(grace=grace)

    async def end() -> None:
        await stop.wait()
        _UVICORN_LOG.setLevel(logging.CRITICAL)
        runtime.readiness.yes = False
        runtime.worker.stop()
        server.should_exit = True

    async with anyio.create_task_group() as group:
        group.start_soon(work)
        group.start_soon(end)
        await server.serve(sockets=[listener])
        stop.set()


@contextmanager
def _bind(host: str, port: int) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(BACKLOG)
        except (OSError, UnicodeError) as error:
            raise _unbindable(host, port, error) from None
        yield listener


def _unbindable(host: str, port: int, error: OSError | UnicodeError) -> ConveyorError:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        text = f"port {port} of {host} is taken (--port 0 picks a free one)"
    else:
        reason = error.strerror if isinstance(error, OSError) else "not a host name"
        text = f"cannot listen on port {port} of {host}: {reason}"
    return ConveyorError(ErrorCode.CONFLICT, text)


def _origin(host: str, port: int) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
