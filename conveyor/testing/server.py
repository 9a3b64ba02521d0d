"""Boots a real server inside the process of a test, on a thread of its own."""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import anyio
from anyio.abc import TaskStatus
from anyio.from_thread import BlockingPortal, start_blocking_portal

from conveyor.client.api import Api, connect
from conveyor.client.wire import RunReply
from conveyor.clock import SystemClock
from conveyor.gateway.fake import Behaviour, FakeGateway, Hits, is_understood
from conveyor.ports.gateway import Gateway
from conveyor.roles.dev import ServerInfo, serve
from conveyor.settings import Settings, load

API_KEY = "test-key"
FAKE_ORIGIN = "http://fake.test"
WORDS = frozenset(Behaviour.__struct_fields__)
"""The keywords of `ConveyorServer.url`."""
_POLL = 0.01


@contextmanager
def serving(
    settings: Settings, *, gateway: Gateway | None = None
) -> Iterator[tuple[ServerInfo, BlockingPortal]]:
    """Run a server on a thread with an event loop of its own; end it in order at the exit.

    The portal runs functions on that loop. Raises ConveyorError if the server cannot start.
    """
    stop = anyio.Event()

    async def run(*, task_status: TaskStatus[ServerInfo]) -> None:
        await serve(settings, on_ready=task_status.started, stop=stop, gateway=gateway)

    with start_blocking_portal() as portal:
        ended, info = portal.start_task(run)
        try:
            yield info, portal
        finally:
            portal.call(stop.set)
            ended.result()


class ConveyorServer:
    """The value of the fixture `conveyor_server`: a server over the fake gateway.

    `base_url` ends in `/v1`; `api_key` is any key that the test chooses; `hits` lists the calls
    that reached the gateway.
    """

    def __init__(self, info: ServerInfo, portal: BlockingPortal, hits: Hits) -> None:
        self.base_url = info.api
        self.api_key = API_KEY
        self.hits = hits
        self._portal = portal

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
        whose tasks have all ended.

        Raises TimeoutError after `timeout` seconds.
        """
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
def conveyor_server(data_dir: Path, **settings: Any) -> Iterator[ConveyorServer]:
    """Run a server for one test on a free port, silent, over the fake gateway, without the
    environment's settings; `settings` are fields of `Settings`."""
    defaults: dict[str, Any] = {"port": 0, "shutdown_grace": 0.0, "retry_base": 0.01}
    chosen = load({}, data_dir=str(data_dir), **{**defaults, **settings})
    gateway = FakeGateway(SystemClock())
    with serving(chosen, gateway=gateway) as (info, portal):
        yield ConveyorServer(info, portal, gateway.hits)
