"""conveyor-dev: the API and the worker in one process over the development binding."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import anyio
import msgspec

from conveyor.bootstrap import Runtime, open_dev
from conveyor.bootstrap.recording import NO_RECORDING, RecordingChoice
from conveyor.clock import LAST_INSTANT, ManualClock, SystemClock
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.text_rules import parse_rfc3339
from conveyor.gateway.redaction import GrowingNames
from conveyor.gateway.ruled import RuledGateway, RulesFile
from conveyor.http.middleware import is_loopback
from conveyor.http.routes_dev import TOKEN_BYTES
from conveyor.ports.clock import Clock
from conveyor.ports.gateway import Gateway
from conveyor.roles.keys import Keyboard, Keys
from conveyor.roles.logs import show_requests, start_logs
from conveyor.roles.serving import (
    UVICORN_LOG,
    HttpServer,
    bound,
    fit_to_files,
    origin_of,
    own_process,
)
from conveyor.settings import Settings

_log = logging.getLogger("conveyor.roles")


class ServerInfo(msgspec.Struct, frozen=True):
    """Address and process of a server that is ready; `slots` says why it has fewer than were asked
    for, if it has. `inbox` is the URL of its receiver, empty on an address beyond loopback, `pages`
    that of the dashboard, empty without one. `dev_token` opens what moves the server below /_dev,
    such as its clock; empty beyond loopback. `recording` says what is recorded or replayed, and
    `samples` are some URLs that are replayed."""

    api: str
    pid: int
    data_dir: str
    gateway: str
    slots: str = ""
    inbox: str = ""
    pages: str = ""
    clock: str = "system"
    dev_token: str = ""
    recording: str = ""
    samples: tuple[str, ...] = ()


_MODES = ("system", "manual", "auto")


class ClockChoice(msgspec.Struct, frozen=True):
    """The clock of a server: `system`, or one that is moved by hand (`manual`), or that moves by
    itself to what is due while somebody waits for a run (`auto`). `start` is the first instant of
    a new data directory, as RFC 3339 writes it; empty for the machine's present."""

    mode: str = "system"
    start: str = ""

    def make(self) -> Clock:
        """Make the clock. Raises ConveyorError(invalid_argument)."""
        if self.mode not in _MODES:
            text = f"--clock is one of {', '.join(_MODES)}"
            raise ConveyorError(ErrorCode.INVALID_ARGUMENT, text)
        if self.mode == "system":
            if self.start:
                text = "--clock-start needs --clock manual or auto"
                raise ConveyorError(ErrorCode.INVALID_ARGUMENT, text)
            return SystemClock()
        try:
            start = parse_rfc3339(self.start) if self.start else None
        except (ValueError, msgspec.ValidationError):
            text = "--clock-start takes an instant with a zone, such as 2027-03-28T00:59:00Z"
            raise ConveyorError(ErrorCode.INVALID_ARGUMENT, text) from None
        if start is not None and not 0 < start <= LAST_INSTANT:
            text = "--clock-start takes an instant after 1970-01-01 and until 9999-12-01"
            raise ConveyorError(ErrorCode.INVALID_ARGUMENT, text)
        return ManualClock(start=start, mode=self.mode)


SYSTEM = ClockChoice()


class ServerChoices(msgspec.Struct, frozen=True):
    """Choices for a development server beside its settings.

    `rules` is the file of the rules of a fake gateway and of names that are redacted, empty without
    one. With `shows_requests` each request and task is logged, whatever the log level.
    """

    clock: ClockChoice = SYSTEM
    recording: RecordingChoice = NO_RECORDING
    rules: str = ""
    shows_requests: bool = False


USUAL_SERVER = ServerChoices()


def run(
    settings: Settings,
    choices: ServerChoices = USUAL_SERVER,
    *,
    on_ready: Callable[[ServerInfo], None],
    on_stopping: Callable[[], None] = lambda: None,
    on_ended: Callable[[str], None] = lambda line: None,
    keyboard: Keyboard | None = None,
) -> int:
    """Serve until SIGINT or SIGTERM; return the exit code. Owns the process: its loop and its
    umask. `on_ended` is called with each line that there is to say at the end. With a keyboard it
    is driven by keys too.

    Raises ConveyorError if the server cannot start.
    """
    moves = choices.clock.mode != "system"
    if moves and not is_loopback(settings.host):
        text = "--clock manual and auto are for an address of loopback: elsewhere nobody moves it"
        raise ConveyorError(ErrorCode.INVALID_ARGUMENT, text)
    start_logs(settings)
    if choices.shows_requests:
        show_requests()
    fitting, slots = fit_to_files(settings)
    if slots:
        _log.warning("%s", slots)

    def ready(info: ServerInfo) -> None:
        on_ready(msgspec.structs.replace(info, slots=slots))

    def stopping() -> None:
        # A second signal ends the process at once.
        if keyboard is not None:
            keyboard.end()
        on_stopping()

    async def until(stop: anyio.Event) -> None:
        starts = partial(serve, fitting, on_ready=ready, stop=stop, keyboard=keyboard)
        for line in await _serve_by_rules(starts, fitting, choices):
            on_ended(line)

    with nullcontext() if keyboard is None else keyboard.taken():
        own_process(until, on_stopping=stopping, own_loop=moves)
    return 0


async def _serve_by_rules(
    starts: Callable[..., Awaitable[Sequence[str]]], settings: Settings, choices: ServerChoices
) -> Sequence[str]:
    """Serve with a gateway that follows rules where it is the fake one; read a file of rules again
    whenever it changes."""
    clock, rules = choices.clock.make(), choices.rules
    ruled = RuledGateway(
        clock,
        retry_after_cap=settings.retry_after_cap,
        keeps_hits=False,
        directory=Path(rules).parent if rules else None,
    )
    file = RulesFile(Path(rules), ruled) if rules else None
    if file is not None:
        file.start()
    names = GrowingNames(ruled.names)
    async with anyio.create_task_group() as group:
        if file is not None:
            group.start_soon(file.watch, SystemClock())
        lines = await starts(
            gateway=ruled if settings.gateway == "fake" else None,
            clock=clock,
            recording=msgspec.structs.replace(choices.recording, names=names),
        )
        group.cancel_scope.cancel()
    return lines


async def serve(
    settings: Settings,
    *,
    on_ready: Callable[[ServerInfo], None],
    stop: anyio.Event | None = None,
    gateway: Gateway | None = None,
    clock: Clock | None = None,
    recording: RecordingChoice = NO_RECORDING,
    keyboard: Keyboard | None = None,
) -> Sequence[str]:
    """Bind, open the data directory, serve and work until `stop`; then end everything in order, and
    return the lines that there are to say.

    A given gateway replaces the one of the settings; the caller closes it. The server runs on the
    system's clock unless it is given a ManualClock, which wants asyncio's own loop. Raises
    ConveyorError for an address that cannot be bound, and any error of opening the binding.
    """
    stop = stop if stop is not None else anyio.Event()
    with bound(settings.host, settings.port) as listener:
        origin = origin_of(settings.host, listener.getsockname()[1])
        clock = clock or SystemClock()
        token = SystemClock().token(TOKEN_BYTES).hex() if is_loopback(settings.host) else ""
        runtime = await open_dev(
            settings, clock, origin=origin, gateway=gateway, dev_token=token, recording=recording
        )
        try:
            named = _gateway_name(settings, gateway, recording)
            info = _info(runtime, settings, origin, named, clock, token, recording)
            keys = None
            if keyboard is not None:
                address = info.pages or f"{origin}/openapi.json"
                keys = Keys(runtime, keyboard, SystemClock(), address=address)
            announce = partial(on_ready, info)
            await _serve(runtime, listener, stop, announce, settings.shutdown_grace, keys=keys)
        finally:
            with anyio.CancelScope(shield=True):
                await runtime.aclose()
            # Requests cut off at the end have been reported by now; another server of this process
            # may still use this logger.
            UVICORN_LOG.setLevel(logging.NOTSET)
        return runtime.recorded.farewell()


def _info(
    runtime: Runtime,
    settings: Settings,
    origin: str,
    gateway: str,
    clock: Clock,
    token: str,
    recording: RecordingChoice,
) -> ServerInfo:
    return ServerInfo(
        f"{origin}/v1",
        os.getpid(),
        str(runtime.data_dir),
        gateway,
        inbox=runtime.inbox,
        pages=f"{origin}/dashboard" if settings.dashboard else "",
        clock=clock.mode if isinstance(clock, ManualClock) else "system",
        dev_token=token,
        recording=_recording_line(recording),
        samples=runtime.recorded.samples,
    )


def _gateway_name(settings: Settings, given: Gateway | None, recording: RecordingChoice) -> str:
    if recording.calls_nobody:
        return "replay"
    return settings.gateway if given is None else "fake"


def _recording_line(recording: RecordingChoice) -> str:
    if recording.record:
        return f"recorded into {recording.record}"
    if not recording.replay:
        return ""
    others = {"fail": "", "pass": ", others called", "record": ", others called and added"}
    return f"answers of {recording.replay}{others[recording.missing]}"


async def _serve(
    runtime: Runtime,
    listener: socket.socket,
    stop: anyio.Event,
    announce: Callable[[], None],
    grace: float,
    *,
    keys: Keys | None,
) -> None:
    def started() -> None:
        runtime.readiness.yes = True
        announce()

    server = HttpServer(runtime.app, protocol=runtime.protocol, on_started=started)

    async def work() -> None:
        await runtime.worker.run(grace=grace)

    async def end() -> None:
        await stop.wait()
        UVICORN_LOG.setLevel(logging.CRITICAL)
        runtime.readiness.yes = False
        if runtime.moved is not None:
            # What sleeps would never end. The clock stands still again once all has ended.
            ending.start_soon(runtime.moved.end)
        runtime.hurry()
        runtime.worker.stop()
        # A stream never ends by itself, and the server waits for its connections.
        await runtime.progress.end()
        server.should_exit = True

    async with anyio.create_task_group() as ending:
        async with anyio.create_task_group() as group:
            group.start_soon(work)
            group.start_soon(runtime.progress.run)
            group.start_soon(end)
            if runtime.moved is not None:
                ending.start_soon(runtime.moved.move_by_itself)
            if keys is not None:
                ending.start_soon(keys.serve)
            await server.serve(sockets=[listener])
            stop.set()
        ending.cancel_scope.cancel()
