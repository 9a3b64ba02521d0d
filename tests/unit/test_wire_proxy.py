"""A way through a proxy, which is asked by CONNECT."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing

import pytest

from conveyor.gateway import open_gateway
from conveyor.ports.gateway import ScrapeFailed, ScrapeRequest
from conveyor.testing.clock import FakeClock
from conveyor.wire.client import HttpClient
from conveyor.wire.errors import TransportError, TransportTrouble
from conveyor.wire.options import ClientOptions, read_proxy
from tests.patient import SECONDS
from tests.unit.wire_server import Peer, RawServer, Serve, answer_all, raw_server

ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def tunnel(origin: Callable[[], RawServer], established: bytes = ESTABLISHED) -> Serve:
    """Serve as a proxy: whatever name is asked for, the way leads to one origin."""

    async def serve(peer: Peer) -> None:
        assert (await peer.request()).startswith("CONNECT ")
        reader, writer = await asyncio.open_connection("127.0.0.1", origin().port)
        try:
            await peer.send(established)
            async with asyncio.TaskGroup() as group:
                group.create_task(peer.pump(Peer(reader, writer)))
                group.create_task(Peer(reader, writer).pump(peer))
        finally:
            writer.close()

    return serve


async def through(proxy: RawServer, url: str, *, user: str = "") -> bytes:
    options = ClientOptions(proxy=read_proxy(f"http://{user}127.0.0.1:{proxy.port}"))
    async with aclosing(HttpClient(connections=1, options=options)) as client:
        answer = await client.send("GET", url, headers={}, body=None, timeout=SECONDS)
        return await answer.read()


@pytest.mark.parametrize(
    "established",
    [ESTABLISHED, b"HTTP/1.0 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"],
    ids=["usual", "of HTTP/1.0", "closing"],
)
async def test_a_request_goes_through_the_proxy_which_resolves_the_name(
    established: bytes,
) -> None:
    async with (
        raw_server(answer_all) as origin,
        raw_server(tunnel(lambda: origin, established)) as proxy,
    ):
        body = await through(proxy, "http://only-there.test/page", user="me:p%40ss@")

        assert body == b"/page"
        assert proxy.all_requests == [
            "CONNECT only-there.test:80 HTTP/1.1\r\nHost: only-there.test:80\r\n"
            "Proxy-Authorization: Basic bWU6cEBzcw==\r\n\r\n"
        ]
        [seen] = origin.all_requests
        assert seen.startswith("GET /page HTTP/1.1\r\nHost: only-there.test\r\n")
        assert "Proxy" not in seen


@pytest.mark.parametrize(
    "refusal",
    [
        b"HTTP/1.1 407 Who are you\r\nContent-Length: 2\r\n\r\nno",
        b"HTTP/1.1 502 Bad\r\n\r\n",
        ESTABLISHED + b"and more",
    ],
    ids=["407", "502", "bytes behind"],
)
async def test_a_proxy_that_refuses_is_an_origin_that_cannot_be_reached(refusal: bytes) -> None:
    async def refuse(peer: Peer) -> None:
        await peer.request()
        await peer.send(refusal)
        await peer.request()

    async with raw_server(refuse) as proxy:
        with pytest.raises(TransportError) as caught:
            await through(proxy, "http://a.test/")
    assert (caught.value.trouble, caught.value.sent) == (TransportTrouble.UNREACHABLE, 0)


async def test_an_http_gateway_is_called_through_the_proxy_and_the_direct_one_is_not() -> None:
    async with (
        raw_server(answer_all) as origin,
        raw_server(tunnel(lambda: origin)) as proxy,
    ):
        options = ClientOptions(proxy=read_proxy(f"http://127.0.0.1:{proxy.port}"))

        async def scrape(kind: str, url: str) -> None:
            gateway = open_gateway(
                kind,
                FakeClock(),
                allow_private=True,
                connections=1,
                retry_after_cap=1.0,
                options=options,
            )
            async with aclosing(gateway), gateway.scrape(ScrapeRequest(url, "key")):
                pass

        await scrape("http://api.test/v1/", "http://a.test/")
        assert len(proxy.requests) == 1
        await scrape("direct", origin.url())
        with pytest.raises(ScrapeFailed):
            await scrape("direct", "http://unknown.invalid/")
        assert len(proxy.requests) == 1


@pytest.mark.parametrize("url", ["https://p.test:1", "http://p.test/path", "socks5://p.test", "x"])
def test_what_is_no_proxy_is_refused(url: str) -> None:
    with pytest.raises(TransportError):
        read_proxy(url)
