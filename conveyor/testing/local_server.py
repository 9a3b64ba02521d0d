"""Boots a real server inside the process of a test, on a thread of its own."""

from __future__ import annotations

import logging
from base64 import urlsafe_b64encode
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    ExitStack,
    contextmanager,
)
from datetime import UTC, datetime, timedelta
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any
from urllib.parse import urlencode

import anyio
import anyio.to_thread
import msgspec
from anyio.abc import TaskStatus
from anyio.from_thread import BlockingPortal, start_blocking_portal

from conveyor.bootstrap.recording import NO_RECORDING, RecordingChoice
from conveyor.client.wire import RunReply
from conveyor.clock import JournalLine, ManualClock, SystemClock
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.text_rules import parse_rfc3339
from conveyor.gateway.fake import Behaviour, Hits, is_understood
from conveyor.gateway.redaction import GrowingNames
from conveyor.gateway.ruled import RuledGateway
from conveyor.http.middleware import DEV_PATH
from conveyor.ports.clock import Clock
from conveyor.ports.gateway import Gateway, GatewayCall, ScrapeRequest, Success
from conveyor.ports.outbox import SentCallback
from conveyor.roles.dev import ClockChoice, ServerInfo, serve
from conveyor.settings import Settings, load
from conveyor.testing.answers import AnswerRule, ServerGateway
from conveyor.testing.dev_routes import ApiFailures, DevRoutes, ServerInbox, ServerSchedules

API_KEY = "test-key"
FAKE_ORIGIN = "http://fake.test"
WORDS = frozenset(Behaviour.__struct_fields__)
"""The keywords of `ConveyorServer.url`."""
_POLL = 0.01
LOG_LINES = 20
"""Lines of the log in a report."""
_LOG = logging.getLogger("conveyor")


@contextmanager
def serving(
    settings: Settings,
    *,
    gateway: Gateway | None = None,
    clock: Clock | None = None,
    recording: RecordingChoice = NO_RECORDING,
) -> Iterator[tuple[ServerInfo, BlockingPortal]]:
    """Run a server on a thread with an event loop of its own; end it in order at the exit.

    The portal runs functions on that loop. Raises ConveyorError if the server cannot start.
    """
    stop = anyio.Event()

    async def run(*, task_status: TaskStatus[ServerInfo]) -> None:
        await serve(
            settings,
            on_ready=task_status.started,
            stop=stop,
            gateway=gateway,
            clock=clock,
            recording=recording,
        )

    with start_blocking_portal() as portal:
        ended, info = portal.start_task(run)
        try:
            yield info, portal
        finally:
            portal.call(stop.set)
            ended.result()


class ServerClock:
    """The clock of a test's server, which it moves. Each move returns once the server is idle.

    Raises ConveyorError: invalid_argument for a move that the clock cannot make, conflict if it
    does not come to rest.
    """

    def __init__(self, clock: ManualClock, portal: BlockingPortal) -> None:
        self._clock = clock
        self._portal = portal

    @property
    def now(self) -> datetime:
        """Return the present of the server."""
        return datetime.fromtimestamp(self._clock.now() / 1_000, UTC)

    @property
    def wakes(self) -> int:
        """Return how many sleepers the clock has woken: what its moves have cost."""
        return self._clock.wakes

    @property
    def journal(self) -> list[JournalLine]:
        """Return the last moves of the clock, the ids that the server made, and the calls of its
        gateway; lines of one instant sorted."""
        return sorted(self._clock.journal)

    def advance(
        self, *, days: float = 0, hours: float = 0, minutes: float = 0, seconds: float = 0
    ) -> None:
        """Move on, stopping at each instant at which something is due. `advance()` only waits until
        the server is idle."""
        span = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
        self._portal.call(self._clock.advance, span.total_seconds())

    def set(self, instant: datetime | str) -> None:
        """Move on to an instant with a zone, such as 2027-03-28T00:59:00Z."""
        text = instant if isinstance(instant, str) else instant.isoformat()
        try:
            moment = parse_rfc3339(text)
        except (ValueError, msgspec.ValidationError):
            detail = "set takes an instant with a zone, such as 2027-03-28T00:59:00Z"
            raise ConveyorError(ErrorCode.INVALID_ARGUMENT, detail) from None
        self._portal.call(self._clock.advance_to, moment)

    def shift(self, *, hours: float = 0, minutes: float = 0, seconds: float = 0) -> None:
        """Set the wall clock alone forward or back, as an administrator would."""
        span = timedelta(hours=hours, minutes=minutes, seconds=seconds)
        self._portal.call(self._clock.shift_wall, span.total_seconds())

    def run_until_idle(self) -> None:
        """Move from instant to instant until no work is left: no attempt, no event, no delivery."""
        self._portal.call(self._clock.run_until_idle)


class ConveyorServer:
    """A server over the fake gateway, as the fixtures and `conveyor.testing.server` give it.

    `base_url` ends in `/v1`; `api_key` is any key that the test chooses; `hits` lists the calls
    that reached the gateway. `api` makes requests to the API fail, `inbox` keeps events that are
    sent to it, `schedules` fires them, `gateway` and `when` answer the scrapes of the test's own
    URLs. `dev_token` opens the routes below /_dev.
    """

    def __init__(
        self,
        info: ServerInfo,
        portal: BlockingPortal,
        hits: Hits,
        clock: ManualClock | None = None,
        *,
        log: deque[str] | None = None,
    ) -> None:
        self._clock = None if clock is None else ServerClock(clock, portal)
        self.data_dir = Path(info.data_dir)
        self.dev_token = info.dev_token
        self.base_url = info.api
        self.origin = info.api.removesuffix("/v1")
        self.api_key = API_KEY
        self.hits = hits
        self._dev = DevRoutes(self.origin, info.dev_token)
        self.api = ApiFailures(self._dev)
        self.gateway = ServerGateway(self._dev)
        self.inbox = ServerInbox(self._dev)
        self.schedules = ServerSchedules(self._dev, self.api_key, lambda: self.clock)
        self._portal = portal
        self._log = deque[str]() if log is None else log

    @property
    def clock(self) -> ServerClock:
        """Return the clock of a server that was started with `clock="manual"`. Raises TypeError for
        another."""
        if self._clock is None:
            raise TypeError("this server runs on the system's clock: start it with clock='manual'")
        return self._clock

    def url(self, path: str = "", **behaviour: str | bytes | float | bool) -> str:
        """Return a URL whose scrape the fake gateway answers as the keywords say.

        Such as `url("page", status=404)`, `url("slow", delay=0.5)`, `url("flaky", flaky=2)`,
        `url("exact", body=b"bytes")`; `conveyor.gateway.fake.Behaviour` lists all keywords. Raises
        TypeError for an unknown keyword, or for bytes in any but `body`, and ValueError for a value
        that the gateway would pass over.
        """
        query: dict[str, str] = {}
        for word, value in behaviour.items():
            if word not in WORDS or (isinstance(value, bytes) and word != "body"):
                raise TypeError(
                    f"url() takes no {word!r} of type {type(value).__name__}; its keywords are"
                    f" {', '.join(sorted(WORDS))}"
                )
            if isinstance(value, bytes):
                query[f"{word}64"] = urlsafe_b64encode(value).decode()
                continue
            query[word] = str(int(value)) if isinstance(value, bool) else str(value)
            if not is_understood(word, query[word]):
                raise ValueError(f"url() takes no {word}={value!r}")
        address = f"{FAKE_ORIGIN}/{path.lstrip('/')}"
        return f"{address}?{urlencode(query)}" if query else address

    def when(self, url: str, *, method: str = "") -> AnswerRule:
        """Return a rule for the scrapes of URLs like this one; see `ServerGateway.when`."""
        return self.gateway.when(url, method=method)

    @property
    def calls(self) -> list[GatewayCall]:
        """Return the last 1,000 scrapes, oldest first: method, URL, params, headers and body, with
        the values of secrets as digests."""
        return self.gateway.calls

    @property
    def callbacks(self) -> list[SentCallback]:
        """Return the last 1,000 callbacks to state machines, oldest first; a token is a digest, as
        `gateway.digest` gives it."""
        return self._dev.callbacks()

    def assert_all_called(self) -> None:
        """Raise AssertionError unless each rule of `when` has answered a call."""
        self.gateway.assert_all_called()

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables that lead a program, or the published client, to this server."""
        return {
            "CONVEYOR_URL": self.base_url,
            "CONVEYOR_DEV_URL": f"{self.origin}{DEV_PATH}",
            "ZENROWS_BATCH_BASE_URL": self.base_url,
            "ZENROWS_API_KEY": self.api_key,
        }

    def drain(self, timeout: float = 10.0) -> None:
        """Wait until the work of all callers is done: each run has ended, or belongs to an open job
        whose tasks have all ended. A manual clock is moved over backoffs.

        Raises TimeoutError after `timeout` seconds.
        """
        clock = SystemClock()
        deadline = clock.monotonic() + timeout
        while True:
            if self._clock is not None:
                self._clock.run_until_idle()
            busy = self._dev.runs()["busy"]
            if not busy:
                return
            if clock.monotonic() > deadline:
                listed = ", ".join(_describe(job) for job in busy)
                raise TimeoutError(f"not drained after {timeout:g} s: {listed}")
            self._portal.call(clock.sleep, _POLL)

    async def adrain(self, timeout: float = 10.0) -> None:
        """Wait as `drain` does, and let the loop of the test go on meanwhile."""
        await anyio.to_thread.run_sync(self.drain, timeout)

    def reset(self) -> None:
        """Remove all data, what came to the inbox, the counts of the gateway, and all that this
        test asked for. Secrets, keys and the clock stay."""
        self._dev.reset()
        self.gateway.forget()
        self._log.clear()

    def report(self) -> str:
        """Return what is known of a test that failed: the latest runs, their counters and reasons
        of failure, and the last lines of the log."""
        try:
            latest = self._dev.runs()["latest"]
        except (OSError, HTTPException, ConveyorError) as error:
            lines = [f"the server does not tell its runs: {type(error).__name__}"]
        else:
            lines = [_describe(job) for job in latest] or ["no runs"]
        lines += ["last lines of the log:", *self._log] if self._log else []
        text = "\n".join(lines)
        for secret in (self.api_key, self.dev_token):
            text = text.replace(secret, "…") if secret else text
        return text


def _describe(job: Mapping[str, Any]) -> str:
    run = msgspec.convert(job["run"], RunReply)
    state = "paused" if run.paused else run.status
    stats = run.stats
    text = f"job {run.job_id} is {state} with {stats.completed} of {stats.total} done"
    if stats.failed:
        reasons = (f"{count} {reason}" for reason, count in (stats.failure_reasons or {}).items())
        text += f", {stats.failed} failed ({', '.join(reasons)})"
    return text if run.waiting is None else f"{text}, waits: {run.waiting.reason}"


class _LastLines(logging.Handler):
    """Keeps the last lines of the log."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: deque[str] = deque(maxlen=LOG_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self.lines.append(f"{record.levelname} {record.name}: {record.getMessage()}")


class ServerRun(
    AbstractContextManager[ConveyorServer], AbstractAsyncContextManager[ConveyorServer]
):
    """A server that runs while its context is open; see `conveyor.testing.server`.

    An error that leaves the context gets the server's report as a note.
    """

    def __init__(
        self,
        data_dir: Path | None,
        *,
        clock: str = "system",
        clock_start: str = "",
        recording: Path | str = "",
        settings: Mapping[str, Any],
    ) -> None:
        self._data_dir = data_dir
        self._recording = RecordingChoice(replay=str(recording))
        self._choice = ClockChoice(clock, clock_start)
        self._settings = settings
        self._stack = ExitStack()
        self._server: ConveyorServer | None = None

    def __enter__(self) -> ConveyorServer:
        """Start the server. Raises ConveyorError if it cannot start, TypeError for an unknown
        setting."""
        with ExitStack() as stack:
            directory = self._data_dir
            if directory is None:
                directory = Path(stack.enter_context(TemporaryDirectory(prefix="conveyor-")))
            self._server = stack.enter_context(
                _boot(directory, self._choice.make(), self._recording, self._settings)
            )
            self._stack = stack.pop_all()
        return self._server

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and self._server is not None:
            error.add_note(f"conveyor: {self._server.report()}")
        self._server = None
        self._stack.close()

    async def __aenter__(self) -> ConveyorServer:
        """Start the server, and let the loop of the test go on meanwhile."""
        return await anyio.to_thread.run_sync(self.__enter__)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self.__exit__, kind, error, traceback)


def conveyor_server(
    data_dir: Path,
    *,
    clock: str = "system",
    clock_start: str = "",
    recording: Path | str = "",
    **settings: Any,
) -> ServerRun:
    """Run a server in a directory that stays; see `conveyor.testing.server`."""
    return ServerRun(
        data_dir, clock=clock, clock_start=clock_start, recording=recording, settings=settings
    )


@contextmanager
def _boot(
    data_dir: Path, made: Clock, recording: RecordingChoice, settings: Mapping[str, Any]
) -> Iterator[ConveyorServer]:
    manual = made if isinstance(made, ManualClock) else None
    defaults: dict[str, Any] = {"port": 0, "shutdown_grace": 0.0}
    if manual is None:
        defaults["retry_base"] = 0.01
    chosen = load({}, data_dir=str(data_dir), **{**defaults, **settings})
    gateway: RuledGateway | None = None
    if settings.get("gateway", "fake") == "fake":
        gateway = RuledGateway(made) if manual is None else _NotedGateway(manual)
    hits = Hits(0) if gateway is None else gateway.hits
    choice = recording
    if gateway is not None:
        choice = msgspec.structs.replace(recording, names=GrowingNames(gateway.names))
    log = _LastLines()
    _LOG.addHandler(log)
    try:
        with serving(chosen, gateway=gateway, clock=made, recording=choice) as (info, portal):
            server = ConveyorServer(info, portal, hits, manual, log=log.lines)
            if manual is not None:
                server.clock.advance()
            yield server
    finally:
        _LOG.removeHandler(log)
        log.close()


class _NotedGateway(RuledGateway):
    """The fake gateway, with each call in the journal of the clock."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self._noted = clock

    def scrape(self, request: ScrapeRequest) -> AbstractAsyncContextManager[Success]:
        self._noted.note("call", f"{request.method} {request.url}")
        return super().scrape(request)
