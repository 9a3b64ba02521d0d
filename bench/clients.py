"""The HTTP clients of this environment, for `scripts/bench gateway_engine`.

Conveyor's own; the whole direct gateway on top of it; httpx; and pyreqwest, where somebody has
installed it.
"""

from __future__ import annotations

import os
import ssl
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx

from bench.gets import CONCURRENCY, HEADERS, TIMEOUT, Times, main, timed
from conveyor.clock import SystemClock
from conveyor.gateway.direct import DirectGateway
from conveyor.ports.gateway import ScrapeRequest
from conveyor.wire.client import HttpClient


async def through_conveyor(url: str, count: int) -> Times:
    """Time GETs through the client that stands behind the gateways."""
    client = HttpClient(connections=CONCURRENCY)

    async def fetch(address: str) -> int:
        answer = await client.send(
            "GET", address, headers=HEADERS, body=None, timeout=TIMEOUT, repeatable=True
        )
        body = await answer.read()
        answer.release()
        return len(body)

    times = await timed(fetch, url, count)
    await client.aclose()
    return times


async def through_gateway(url: str, count: int) -> Times:
    """Time GETs through the whole direct gateway."""
    gateway = DirectGateway(SystemClock(), allow_private=True, connections=CONCURRENCY)

    async def fetch(address: str) -> int:
        async with gateway.scrape(ScrapeRequest(address, "key", timeout=TIMEOUT)) as success:
            assert isinstance(success.content, bytes)
            return len(success.content)

    times = await timed(fetch, url, count)
    await gateway.aclose()
    return times


async def through_httpx(url: str, count: int) -> Times:
    """Time GETs through httpx with the pool that the gateway would give it."""
    limits = httpx.Limits(max_connections=CONCURRENCY, max_keepalive_connections=CONCURRENCY)
    client = httpx.AsyncClient(
        limits=limits,
        verify=ssl.create_default_context(),
        trust_env=False,
        headers=HEADERS,
        timeout=TIMEOUT,
    )

    async def fetch(address: str) -> int:
        return len((await client.get(address)).content)

    async with client:
        return await timed(fetch, url, count)


async def through_pyreqwest(url: str, count: int) -> Times:
    """Time GETs through pyreqwest, a client outside the interpreter's lock."""
    from pyreqwest.client import ClientBuilder

    builder = ClientBuilder().no_proxy().http1_only().follow_redirects(False)
    builder = builder.add_root_certificate_pem(_authority())
    client: Any = builder.max_connections(CONCURRENCY).build()

    async def fetch(address: str) -> int:
        request = client.get(address).headers(HEADERS).timeout(timedelta(seconds=TIMEOUT))
        response = await request.build().send()
        return len((await response.bytes()).to_bytes())

    times = await timed(fetch, url, count)
    await client.close()
    return times


def _authority() -> bytes:
    return Path(os.environ["SSL_CERT_FILE"]).read_bytes()


CLIENTS = {
    "conveyor": through_conveyor,
    "direct gateway": through_gateway,
    "httpx": through_httpx,
    "pyreqwest": through_pyreqwest,
}

if __name__ == "__main__":
    main(CLIENTS)
