"""Times GETs of one page through one HTTP client, in a process of its own.

`python -m MODULE CLIENT BASE_URL COUNT` prints the seconds of wall and of CPU that COUNT GETs took.
The modules are bench.clients and, in the environment of the peers, bench.peers.aiohttp_client. This
one imports nothing that either lacks. The authority of an HTTPS server is in SSL_CERT_FILE.
"""

from __future__ import annotations

import asyncio
import itertools
import resource
import sys
import time
from collections.abc import Awaitable, Callable, Mapping

import uvloop

CONCURRENCY = 50
TIMEOUT = 30.0
HEADERS = {"User-Agent": "conveyor-bench", "Accept": "*/*"}

Fetch = Callable[[str], Awaitable[int]]
"""Make one GET; return the bytes of the body."""
Times = tuple[float, float]
"""Seconds of wall and of CPU."""
Measure = Callable[[str, int], Awaitable[Times]]
"""Make so many GETs below a base URL."""


async def timed(fetch: Fetch, url: str, count: int) -> Times:
    """Time `count` GETs, CONCURRENCY at a time, after a round that opens connections."""
    size = max(await asyncio.gather(*(fetch(f"{url}/warm") for _ in range(CONCURRENCY))))
    numbers = itertools.count()

    async def worker() -> None:
        while (number := next(numbers)) < count:
            assert await fetch(f"{url}/{number}") == size

    before, started = _cpu(), time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(CONCURRENCY)))
    return time.perf_counter() - started, _cpu() - before


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main(clients: Mapping[str, Measure]) -> None:
    """Measure the client that the command line names."""
    name, url, count = sys.argv[1:]

    async def measure() -> Times:
        return await clients[name](url, int(count))

    print(*uvloop.run(measure()))
