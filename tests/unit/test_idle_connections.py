"""The time that connections without a request stay open: the load balancer must close them
first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import anyio
import anyio.lowlevel
import httpx
import pytest

from conveyor.bootstrap.loop import Readiness
from conveyor.bootstrap.production import RoleRuntime
from conveyor.engine.telemetry import LoopLag
from conveyor.http.malformed import protocol
from conveyor.roles.production import KEEP_ALIVE, RoleInfo, serve
from conveyor.settings import load
from conveyor.testing.clock import FakeClock
from tests.patient import SECONDS

GRACE = 60.0
REQUEST = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def answering(_scope: Any, _receive: Any, send: Any) -> None:
    """An application that says yes to everything."""
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]}
    )
    await send({"type": "http.response.body"})


@dataclass
class Served:
    """A serving api. `idle` is the time that its connections may be idle, by port, once they exist;
    `stop` makes it end, and `ended` is set when it has."""

    info: RoleInfo
    clock: FakeClock
    stop: anyio.Event
    ended: anyio.Event
    idle: dict[int, float]


@asynccontextmanager
async def api() -> AsyncIterator[Served]:
    """The api role around an application of nothing, over real sockets."""
    clock, stop, ended, ready = FakeClock(), anyio.Event(), anyio.Event(), anyio.Event()
    idle: dict[int, float] = {}
    infos: list[RoleInfo] = []

    class Protocol(protocol(clock)):  # type: ignore[misc]
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            idle[transport.get_extra_info("sockname")[1]] = self.timeout_keep_alive

    async def opened(*_: object, **__: object) -> RoleRuntime:
        await anyio.lowlevel.checkpoint()
        return RoleRuntime(
            app=answering,
            worker=None,
            probes=answering,
            protocol=Protocol,
            readiness=Readiness(),
            lag=LoopLag(clock),
            agree=anyio.lowlevel.checkpoint,
            agree_every=10.0,
            aclose=anyio.lowlevel.checkpoint,
        )

    def note(info: RoleInfo) -> None:
        infos.append(info)
        ready.set()

    async def run() -> None:
        where = {"CONVEYOR_HOST": "127.0.0.1", "CONVEYOR_METRICS_HOST": "127.0.0.1"}
        settings = load(
            where, production=True, role="api", port=0, metrics_port=0, shutdown_grace=GRACE
        )
        await serve(settings, on_ready=note, stop=stop, clock=clock, opened=opened)
        ended.set()

    async with anyio.create_task_group() as group:
        group.start_soon(run)
        with anyio.fail_after(60):
            await ready.wait()
            yield Served(infos[0], clock, stop, ended, idle)
            stop.set()
            await end(clock, ended)


async def end(clock: FakeClock, ended: anyio.Event) -> None:
    """Let the time pass in which a load balancer notices, until the server has ended."""
    while not ended.is_set():
        await clock.advance(1.0)
        with anyio.move_on_after(0.05):
            await ended.wait()


@pytest.mark.slow
async def test_an_api_keeps_idle_connections_for_its_load_balancer() -> None:
    """If the target closes first, a request on its way meets a closed connection: the balancer
    answers 502 for it."""
    async with api() as served, httpx.AsyncClient(timeout=SECONDS, trust_env=False) as client:
        answer = await client.get(served.info.api)
        assert answer.status_code == 200
        assert answer.headers.get("connection") != "close"

        assert served.idle[urlsplit(served.info.api).port or 0] == KEEP_ALIVE


@pytest.mark.slow
async def test_idle_connections_are_closed_at_once_when_an_api_ends() -> None:
    """They do not wait for their time to be over, nor for the end of the grace."""
    async with api() as served:
        host, port = urlsplit(served.info.api).hostname, urlsplit(served.info.api).port
        used, unused = [await asyncio.open_connection(host, port) for _ in range(2)]
        used[1].write(REQUEST)
        assert (await used[0].readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        served.stop.set()
        await end(served.clock, served.ended)

        assert [await reader.read() for reader, _ in (used, unused)] == [b"", b""]
        for _, writer in (used, unused):
            writer.close()
