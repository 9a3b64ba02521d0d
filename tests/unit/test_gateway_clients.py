"""The clients behind the gateways: how often they send, what the settings make of them."""

from __future__ import annotations

from contextlib import aclosing
from pathlib import Path

import pytest

from conveyor.bootstrap.loop import gateway_of
from conveyor.domain.model import TaskBody
from conveyor.gateway.aiohttp_client import AiohttpClient
from conveyor.gateway.direct import DirectGateway
from conveyor.gateway.fake import expected_body
from conveyor.gateway.http import HttpGateway
from conveyor.gateway.http_client import OpenClient
from conveyor.ports.gateway import Gateway, ScrapeFailed, ScrapeRequest, Success
from conveyor.settings import InvalidSetting, load
from conveyor.testing.clock import FakeClock
from conveyor.testing.gateway_server import GatewayServer
from conveyor.wire.client import HttpClient
from tests.patient import SECONDS
from tests.unit.wire_server import Peer, answer, raw_server


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def scraped(gateway: Gateway, url: str, *, method: str = "GET") -> Success:
    body = TaskBody("a=1", "text/plain") if method == "POST" else None
    request = ScrapeRequest(url, "key", method=method, body=body, timeout=SECONDS)
    async with gateway.scrape(request) as success:
        return success


async def once_a_connection(peer: Peer) -> None:
    await peer.request()
    await peer.send(answer())
    await peer.request()


async def test_the_direct_gateway_repeats_a_get_and_counts_it() -> None:
    gateway = DirectGateway(FakeClock(), allow_private=True)
    async with raw_server(once_a_connection) as server, aclosing(gateway):
        sent = [(await scraped(gateway, server.url(f"/{number}"))).sent for number in range(3)]
        assert sent == [1, 2, 2]
        assert len(server.all_requests) == sum(sent)


async def test_the_direct_gateway_repeats_no_post() -> None:
    gateway = DirectGateway(FakeClock(), allow_private=True)
    async with raw_server(once_a_connection) as server, aclosing(gateway):
        assert (await scraped(gateway, server.url(), method="POST")).sent == 1
        with pytest.raises(ScrapeFailed) as caught:
            await scraped(gateway, server.url(), method="POST")
        assert (caught.value.sent, caught.value.problem.code) == (1, "connection_lost")
        assert len(server.all_requests) == 2


async def test_a_paid_gateway_is_never_called_twice() -> None:
    async with raw_server(once_a_connection) as server:
        gateway = HttpGateway(server.url("/v1/"), FakeClock())
        async with aclosing(gateway):
            assert (await scraped(gateway, "http://a.test/")).sent == 1
            with pytest.raises(ScrapeFailed) as caught:
                await scraped(gateway, "http://a.test/")
        assert (caught.value.sent, len(server.all_requests)) == (1, 2)


async def test_redirects_count_as_requests() -> None:
    async def serve(peer: Peer) -> None:
        while head := await peer.request():
            step = int(head.split(" ")[1].strip("/"))
            if step:
                location = f"Location: /{step - 1}\r\n"
                moved = b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\n%b\r\n" % location.encode()
                await peer.send(moved)
            else:
                await peer.send(answer())

    gateway = DirectGateway(FakeClock(), allow_private=True)
    async with raw_server(serve) as server, aclosing(gateway):
        assert (await scraped(gateway, server.url("/2"))).sent == 3
        with pytest.raises(ScrapeFailed) as caught:
            await scraped(gateway, server.url("/99"))
        assert (caught.value.sent, caught.value.problem.code) == (11, "too_many_redirects")
        assert len(server.all_requests) == 14


async def test_a_url_that_cannot_be_fetched_sends_nothing() -> None:
    async with aclosing(DirectGateway(FakeClock())) as gateway:
        for url in ("http://127.0.0.1/", "ftp://a.test/", "http://"):
            with pytest.raises(ScrapeFailed) as caught:
                await scraped(gateway, url)
            assert caught.value.sent == 0


@pytest.mark.parametrize("engine", ["wire", "aiohttp"])
@pytest.mark.parametrize("kind", ["direct", "http"])
async def test_either_client_scrapes(engine: str, kind: str) -> None:
    async with GatewayServer() as server:
        settings = load(
            {"CONVEYOR_HTTP_ENGINE": engine, "CONVEYOR_ALLOW_PRIVATE": "true"},
            gateway=server.url if kind == "http" else kind,
        )
        async with aclosing(gateway_of(settings, FakeClock())) as gateway:
            url = server.target("page")
            success = await scraped(gateway, url)
            assert (success.content, success.sent) == (expected_body(url), 1)
            with pytest.raises(ScrapeFailed, match="truncated_body"):
                await scraped(gateway, server.target("page?short=1"))


def test_a_file_of_authorities_must_be_one(tmp_path: Path) -> None:
    for content in (None, "no certificate"):
        file = tmp_path / "authorities.pem"
        if content is not None:
            file.write_text(content)
        with pytest.raises(InvalidSetting) as caught:
            gateway_of(load({"CONVEYOR_CA_FILE": str(file)}), FakeClock())
        assert "CONVEYOR_CA_FILE must name a PEM file" in caught.value.detail


@pytest.mark.parametrize(
    "url", ["p.test:3128", "https://p.test", "http://", "http://p.test/x", "http://p.test?x"]
)
def test_a_proxy_must_be_one(url: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        load({"CONVEYOR_GATEWAY_PROXY": url})
    assert "CONVEYOR_GATEWAY_PROXY must be http://" in caught.value.detail


def test_a_proxys_user_must_be_text() -> None:
    with pytest.raises(InvalidSetting) as caught:
        gateway_of(load({"CONVEYOR_GATEWAY_PROXY": "http://\udcff:x@p.test:1"}), FakeClock())
    assert "in UTF-8" in caught.value.detail


@pytest.mark.parametrize(
    "other",
    [{"CONVEYOR_GATEWAY_PROXY": "http://p.test:3128"}, {"CONVEYOR_RAGGED_END": "accept"}],
)
def test_aiohttp_passes_over_no_setting_in_silence(other: dict[str, str]) -> None:
    with pytest.raises(InvalidSetting) as caught:
        gateway_of(load({"CONVEYOR_HTTP_ENGINE": "aiohttp", **other}), FakeClock())
    assert "CONVEYOR_HTTP_ENGINE aiohttp takes no" in caught.value.detail


@pytest.mark.parametrize("open_client", [HttpClient, AiohttpClient])
async def test_no_cookie_of_a_named_host_is_sent_by_the_next_task(open_client: OpenClient) -> None:
    """A name, because some jars keep nothing of an address."""

    async def lookup(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]

    async def serve(peer: Peer) -> None:
        while await peer.request():
            await peer.send(answer(fields="Set-Cookie: visit=1; Path=/\r\n"))

    gateway = DirectGateway(FakeClock(), allow_private=True, lookup=lookup, open_client=open_client)
    async with raw_server(serve) as server, aclosing(gateway):
        for path in ("/1", "/1", "/2"):
            await scraped(gateway, server.url(path, host="shop.test"))
        assert len(server.all_requests) == 3
        assert not [head for head in server.all_requests if "cookie" in head.lower()]
