"""Boots a real server inside the process of a test, on a thread of its own."""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import anyio
import msgspec
from anyio.abc import TaskStatus
from anyio.from_thread import BlockingPortal, start_blocking_portal

from conveyor.client.api import Api, connect
from conveyor.client.wire import RunReply
from conveyor.clock import JournalLine, ManualClock, SystemClock
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.text_rules import parse_rfc3339
from conveyor.gateway.fake import Behaviour, Hits, is_understood
from conveyor.gateway.ruled import RuledGateway
from conveyor.ports.clock import Clock
from conveyor.ports.gateway import Gateway, ScrapeRequest, Success
from conveyor.roles.dev import ClockChoice, ServerInfo, serve
from conveyor.settings import Settings, load

API_KEY = "test-key"
FAKE_ORIGIN = "http://fake.test"
WORDS = frozenset(Behaviour.__struct_fields__)
"""The keywords of `ConveyorServer.url`."""
_POLL = 0.01


@contextmanager
def serving(
    settings: Settings, *, gateway: Gateway | None = None, clock: Clock | None = None
) -> Iterator[tuple[ServerInfo, BlockingPortal]]:
    """Run a server on a thread with an event loop of its own; end it in order at the exit.

    The portal runs functions on that loop. Raises ConveyorError if the server cannot start.
    """
    stop = anyio.Event()

    async def run(*, task_status: TaskStatus[ServerInfo]) -> None:
        await serve(settings, on_ready=task_status.started, stop=stop, gateway=gateway, clock=clock)

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
    """The value of the fixture `conveyor_server`: a server over the fake gateway.

    `base_url` ends in `/v1`; `api_key` is any key that the test chooses; `hits` lists the calls
    that reached the gateway. Events that a test sends to `inbox` and a name of its own are kept and
    can be read there. `dev_token` opens /_dev/clock.
    """

    def __init__(
        self,
        info: ServerInfo,
        portal: BlockingPortal,
        hits: Hits,
        clock: ManualClock | None = None,
    ) -> None:
        self._clock = None if clock is None else ServerClock(clock, portal)
        self.data_dir = Path(info.data_dir)
        self.inbox = info.inbox
        self.dev_token = info.dev_token
        self.base_url = info.api
        self.api_key = API_KEY
        self.hits = hits
        self._portal = portal

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

    def drain(self, timeout: float = 10.0) -> None:
        """Wait until the work for `api_key` is done: each run has ended, or belongs to an open job
        whose tasks have all ended. A manual clock is moved over backoffs.

        Raises TimeoutError after `timeout` seconds.
        """
        if self._clock is not None:
            self._clock.run_until_idle()
        self._portal.call(self._drained, timeout)

    async def _drained(self, timeout: float) -> None:
        clock = SystemClock()
        deadline = clock.monotonic() + timeout
        async with connect(self.base_url, self.api_key, clock) as api:
            while busy := [run async for run in _busy_runs(api)]:
                if clock.monotonic() > deadline:
                    listed = ", ".join(_describe(run) for run in busy)
                    raise TimeoutError(f"not drained after {timeout:g} s: {listed}")
                await clock.sleep(_POLL)


async def _busy_runs(api: Api) -> AsyncIterator[RunReply]:
    cursor = None
    while True:
        page = await api.jobs(limit=100, status=None, cursor=cursor)
        for job in page.jobs:
            run = job.latest_run
            if run is not None and run.live and not run.idle:
                yield run
        cursor = page.next_cursor
        if not cursor:
            return


def _describe(run: RunReply) -> str:
    state = "paused" if run.paused else run.status
    return f"job {run.job_id} is {state} with {run.stats.completed} of {run.stats.total} done"


@contextmanager
def conveyor_server(
    data_dir: Path, *, clock: str = "system", clock_start: str = "", **settings: Any
) -> Iterator[ConveyorServer]:
    """Run a server for one test on a free port, silent, over the fake gateway, without the
    environment's settings; `settings` are fields of `Settings`.

    With `clock="manual"` the test moves its clock, which starts at `clock_start`, by default the
    present; attempts then wait as long as in production.
    """
    made = ClockChoice(clock, clock_start).make()
    manual = made if isinstance(made, ManualClock) else None
    defaults: dict[str, Any] = {"port": 0, "shutdown_grace": 0.0}
    if manual is None:
        defaults["retry_base"] = 0.01
    chosen = load({}, data_dir=str(data_dir), **{**defaults, **settings})
    gateway = RuledGateway(made) if manual is None else _NotedGateway(manual)
    with serving(chosen, gateway=gateway, clock=made) as (info, portal):
        server = ConveyorServer(info, portal, gateway.hits, manual)
        if manual is not None:
            server.clock.advance()
        yield server


class _NotedGateway(RuledGateway):
    """The fake gateway, with each call in the journal of the clock."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self._noted = clock

    def scrape(self, request: ScrapeRequest) -> AbstractAsyncContextManager[Success]:
        self._noted.note("call", f"{request.method} {request.url}")
        return super().scrape(request)
