"""Parts of every role that serves HTTP: a socket, a server, signals, an event loop."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import resource
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import anyio
import uvicorn
from anyio.abc import TaskStatus

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.settings import Settings

HTTP_GRACE = 1
"""Default number of whole seconds that requests in flight get at shutdown."""
HTTP_KEEP_ALIVE = 5
"""Default number of whole seconds that an idle connection stays open."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
BACKLOG = 2_048
COLLECT_AFTER = 50_000
"""Allocations between two garbage collections. With the default of 700, collections took a tenth of
the loop's time, nearly all for objects that live for one task and are freed without them."""

MOST_FILES = (65_536, 10_240)
"""Limits of open files to ask the system for, the first that it grants. The second is the most that
macOS grants."""
KEPT_FILES = 64
"""Files for all that is no task: the API's connections, the database, look-ups, sockets that are
raced."""
FILES_A_SLOT = 2
"""Files of a task in work: its connection, and the file that its body goes into."""

UVICORN_LOG = logging.getLogger("uvicorn.error")
"""Logger that reports each request cut off at the end as an error with a traceback; disabled by
then."""


class HttpServer(uvicorn.Server):
    """A uvicorn server that leaves signals to its role, and reports when it listens."""

    def __init__(
        self,
        app: Any,
        *,
        protocol: type[asyncio.Protocol],
        on_started: Callable[[], None],
        grace: int = HTTP_GRACE,
        keep_alive: int = HTTP_KEEP_ALIVE,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=grace,
            timeout_keep_alive=keep_alive,
        )
        super().__init__(config)
        self._on_started = on_started

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()


def fit_to_files(settings: Settings) -> tuple[Settings, str]:
    """Raise this process's limit of open files, and lower the number of slots to what it allows.

    Return the settings, and a sentence if there are fewer slots than were asked for.
    """
    most = _raise_limit()
    kept = min(KEPT_FILES, most // 4)
    fitting = max(1, (most - _open_files() - kept) // FILES_A_SLOT)
    if fitting >= settings.workers:
        return settings, ""
    note = (
        f"{fitting:,} of {settings.workers:,} slots: this process may open {most:,} files; "
        "raise its limit (ulimit -n)"
    )
    return replace(settings, workers=fitting), note


def _raise_limit() -> int:
    """Raise the soft limit of open files towards the hard one; return what it is then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in MOST_FILES:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft == resource.RLIM_INFINITY or soft >= most:
            break
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            return most
    return MOST_FILES[0] if soft == resource.RLIM_INFINITY else soft


def _open_files() -> int:
    return len(os.listdir("/dev/fd"))


def own_process(
    serve: Callable[[anyio.Event], Awaitable[None]],
    *,
    on_stopping: Callable[[], None],
    own_loop: bool = False,
) -> None:
    """Run a server as the whole process, until it ends after a first SIGINT, SIGTERM or SIGHUP.

    `serve` must end in order once its event is set; a second signal exits at once. With `own_loop`
    the event loop is asyncio's own, also where a faster one is installed.
    """
    # Keep every stored file private, even if others may enter the data directory.
    os.umask(0o077)
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, 20, 50)
    make = asyncio.new_event_loop if own_loop else _new_loop
    # By anyio, which then need not find out for each event and checkpoint which library runs it.
    anyio.run(_until_signalled, serve, on_stopping, backend_options={"loop_factory": make})


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def _until_signalled(
    serve: Callable[[anyio.Event], Awaitable[None]], on_stopping: Callable[[], None]
) -> None:
    stop = anyio.Event()

    async def listen(*, task_status: TaskStatus[None]) -> None:
        # SIGHUP: the terminal is gone, which is no reason to lose what is in flight.
        with anyio.open_signal_receiver(*STOP_SIGNALS) as signals:
            task_status.started()
            async for _ in signals:
                if stop.is_set():
                    os._exit(130)
                on_stopping()
                stop.set()

    async with anyio.create_task_group() as group:
        await group.start(listen)
        await serve(stop)
        group.cancel_scope.cancel()


@contextmanager
def bound(host: str, port: int, *, option: str = "--port") -> Iterator[socket.socket]:
    """Open a listening socket and close it at the exit.

    Raises ConveyorError(conflict) with the option that chooses the port.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Every accepted socket has it from here: a client that vanished is noticed in the end.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        try:
            listener.bind((host, port))
            listener.listen(BACKLOG)
        except (OSError, UnicodeError) as error:
            raise _unbindable(host, port, error, option=option) from None
        yield listener


def _unbindable(
    host: str, port: int, error: OSError | UnicodeError, *, option: str
) -> ConveyorError:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        text = f"port {port} of {host} is taken ({option} 0 picks a free one)"
    else:
        reason = error.strerror if isinstance(error, OSError) else "not a host name"
        text = f"cannot listen on port {port} of {host}: {reason}"
    return ConveyorError(ErrorCode.CONFLICT, text)


def origin_of(host: str, port: int) -> str:
    """Return the origin by which this machine reaches a socket bound to this address."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
