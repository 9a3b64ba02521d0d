"""Which HTTP client behind the gateways? The same GETs through each.

A client gives an answer for a method, a URL, headers and a timeout, and the answer's body on
demand. Conveyor's own is aiohttp; httpx stands behind the same two calls here. The last row is the
whole direct gateway on top of the client: what addresses, redirects, decoding and verdicts add.
"""

from __future__ import annotations

import asyncio
import itertools
import resource
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from typing import Any, Protocol

import httpx
import uvloop

from bench.harness import Figure, Options, Row, Scenario, judged_row, median
from bench.rounds import take_rounds
from bench.servers import PAGE_BYTES, nginx
from conveyor.clock import SystemClock
from conveyor.gateway.direct import DirectGateway
from conveyor.ports.gateway import ScrapeRequest
from conveyor.wire.client import HttpClient

CONCURRENCY = 50
TIMEOUT = 30.0
HEADERS = {"User-Agent": "conveyor-bench", "Accept": "*/*"}


class Answer(Protocol):
    """An answer whose body is read on demand."""

    async def read(self) -> bytes:
        """Read the whole body."""
        ...

    def release(self) -> None:
        """Give the connection back."""
        ...


class HttpxAnswer:
    """An httpx response as a client's answer."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response

    async def read(self) -> bytes:
        """Read the whole body; reading it to the end gives the connection back."""
        return await self._response.aread()

    def release(self) -> None:
        """Do nothing: the connection is back already."""


class HttpxClient:
    """httpx with the pool that the gateway would give it."""

    def __init__(self, *, connections: int) -> None:
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        self._client = httpx.AsyncClient(limits=limits, trust_env=False)

    async def send(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str],
        body: bytes | None,
        timeout: float,
    ) -> HttpxAnswer:
        """Return the answer, once its head is there."""
        request = self._client.build_request(
            method, url, headers=headers, content=body, timeout=timeout
        )
        return HttpxAnswer(await self._client.send(request, stream=True))

    async def aclose(self) -> None:
        """Close every connection."""
        await self._client.aclose()


class Client(Protocol):
    """What all clients have in common."""

    def send(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str],
        body: bytes | None,
        timeout: float,
    ) -> Awaitable[Answer]:
        """Return the answer, once its head is there."""
        ...

    async def aclose(self) -> None:
        """Close every connection."""
        ...


Fetch = Callable[[str], Awaitable[int]]


async def through_client(client: Client, url: str, tasks: int) -> float:
    """Seconds for all GETs through a client."""

    async def fetch(address: str) -> int:
        answer = await client.send("GET", address, headers=HEADERS, body=None, timeout=TIMEOUT)
        body = await answer.read()
        answer.release()
        return len(body)

    seconds = await timed(fetch, url, tasks)
    await client.aclose()
    return seconds


class PyreqwestAnswer:
    """A pyreqwest response as a client's answer."""

    def __init__(self, response: Any) -> None:
        self._response = response

    async def read(self) -> bytes:
        """Read the whole body."""
        return (await self._response.bytes()).to_bytes()  # type: ignore[no-any-return]

    def release(self) -> None:
        """Do nothing: the connection is back already."""


class PyreqwestClient:
    """pyreqwest, where somebody has installed it: a client outside the interpreter's lock."""

    def __init__(self, *, connections: int) -> None:
        from pyreqwest.client import ClientBuilder

        builder = ClientBuilder().no_proxy().http1_only().follow_redirects(False)
        self._client = builder.max_connections(connections).build()

    async def send(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str],
        body: bytes | None,
        timeout: float,
    ) -> PyreqwestAnswer:
        """Return the answer, once it is there."""
        request = self._client.request(method, url).headers(dict(headers))
        return PyreqwestAnswer(await request.timeout(timedelta(seconds=timeout)).build().send())

    async def aclose(self) -> None:
        """Close every connection."""
        await self._client.close()


async def through_gateway(url: str, tasks: int) -> float:
    """Return the seconds for all GETs through the whole direct gateway."""
    gateway = DirectGateway(SystemClock(), allow_private=True, connections=CONCURRENCY)

    async def fetch(address: str) -> int:
        async with gateway.scrape(ScrapeRequest(address, "key", timeout=TIMEOUT)) as success:
            assert isinstance(success.content, bytes)
            return len(success.content)

    seconds = await timed(fetch, url, tasks)
    await gateway.aclose()
    return seconds


async def timed(fetch: Fetch, url: str, tasks: int) -> float:
    """Return the seconds for `tasks` GETs, CONCURRENCY at a time, after a round that opens
    connections."""
    await asyncio.gather(*(fetch(f"{url}/warm") for _ in range(CONCURRENCY)))
    numbers = itertools.count()

    async def worker() -> None:
        while (number := next(numbers)) < tasks:
            assert await fetch(f"{url}/{number}") == PAGE_BYTES

    started = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(CONCURRENCY)))
    return time.perf_counter() - started


def measure(name: str, url: str, tasks: int) -> tuple[float, float]:
    """Return seconds of wall and of CPU for one row."""

    async def go() -> float:
        if name == "direct gateway":
            return await through_gateway(url, tasks)
        if name == "pyreqwest":
            return await through_client(PyreqwestClient(connections=CONCURRENCY), url, tasks)
        if name == "httpx":
            return await through_client(HttpxClient(connections=CONCURRENCY), url, tasks)
        return await through_client(HttpClient(connections=CONCURRENCY), url, tasks)

    before = resource.getrusage(resource.RUSAGE_SELF)
    seconds = uvloop.run(go())
    after = resource.getrusage(resource.RUSAGE_SELF)
    used = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return seconds, used


SHARES = {"pyreqwest": 1.0, "aiohttp": 1.0, "httpx": 0.2, "direct gateway": 1.0}
"""Rows, and the share of the tasks for each: httpx would take long for all."""


def is_there(name: str) -> bool:
    """Return whether a row can be measured: pyreqwest is not a dependency; `pip install` it to
    measure it."""
    return name != "pyreqwest" or find_spec(name) is not None


def run(options: Options) -> list[Row]:
    """Every client in turn, several times over."""
    names = [name for name in SHARES if options.wants(name) and is_there(name)]
    with nginx(options.directory("engine") / "nginx") as site:

        def turn() -> dict[str, tuple[float, float]]:
            measured = {}
            for name in names:
                tasks = int(options.tasks * SHARES[name])
                seconds, used = measure(name, site.url, tasks)
                measured[name] = tasks / seconds, used / tasks * 1e6
            return measured

        rounds = take_rounds(
            turn,
            wanted=options.repeats,
            label="clients",
            describe=lambda measured: ", ".join(
                f"{name} {rate:,.0f} requests/s" for name, (rate, _) in measured.items()
            ),
        )

    def figures(name: str, quiet: Sequence[dict[str, tuple[float, float]]]) -> dict[str, Figure]:
        rates = {name: median([one[name][0] for one in quiet]) for name in names}
        return {
            "requests/s": round(rates[name]),
            "µs CPU/request": round(median([one[name][1] for one in quiet])),
            "× slowest": round(rates[name] / min(rates.values()), 2),
        }

    return [judged_row(name, rounds, partial(figures, name)) for name in names]


SCENARIO = Scenario(name="gateway_engine", run=run)
