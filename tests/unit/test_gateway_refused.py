"""Addresses that the direct gateway refuses: as literals of any spelling, by name, by redirect, and
when a name changes its mind."""

from __future__ import annotations

from collections.abc import AsyncIterator
from urllib.parse import quote

import pytest

from conveyor.domain.model import TaskFailure
from conveyor.gateway.direct import DirectGateway
from conveyor.gateway.targets import is_public
from conveyor.ports.gateway import ScrapeFailed, ScrapeRequest
from conveyor.testing.clock import FakeClock
from conveyor.testing.gateway_server import GatewayServer
from conveyor.wire.client import HttpClient
from conveyor.wire.errors import TransportError, TransportTrouble
from conveyor.wire.resolver import Lookup
from tests.patient import SECONDS

STANDS_FOR_PUBLIC = "127.0.0.2"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def server(anyio_backend: str) -> AsyncIterator[GatewayServer]:
    async with GatewayServer() as running:
        yield running


def port_of(server: GatewayServer) -> str:
    return server.origin.rpartition(":")[2]


async def body_of(gateway: DirectGateway, url: str) -> bytes:
    async with gateway.scrape(ScrapeRequest(url, "key", timeout=SECONDS)) as success:
        assert isinstance(success.content, bytes)
        return success.content


async def refused(gateway: DirectGateway, url: str) -> None:
    with pytest.raises(ScrapeFailed) as caught:
        await body_of(gateway, url)
    failed = caught.value
    assert (failed.problem.code, failed.problem.status) == ("address_refused", 422)
    assert (failed.failure, failed.retryable) == (TaskFailure.BAD_TARGET, False)


@pytest.mark.guarantee("G17")
@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.0.0.1.",
        "127.1",
        "0",
        "0x7f.1",
        "0x7F000001",
        "2130706433",
        "0177.1",
        "127。0。0。1",
        "①②⑦.0.0.1",
        "localhost",
        "100.64.0.1",
        "169.254.169.254",
        "10.0.0.1",
        "192.168.0.1",
        "224.0.0.1",
        "255.255.255.255",
        "[::1]",
        "[::]",
        "[::ffff:a9fe:a9fe]",
        "[::ffff:127.0.0.1]",
        "[::127.0.0.1]",
        "[64:ff9b::7f00:1]",
        "[2002:7f00:1::]",
        "[2001:0:4136:e378:8000:63bf:80ff:fffe]",
        "[fe80::1]",
        "[fd00::1]",
    ],
)
async def test_an_address_that_is_not_public_is_refused(server: GatewayServer, host: str) -> None:
    gateway = DirectGateway(FakeClock(), allow_private=False)
    await refused(gateway, f"http://{host}:{port_of(server)}/t/x")
    await gateway.aclose()
    assert server.connections == 0


def always(*addresses: str) -> Lookup:
    async def lookup(host: str, port: int) -> list[str]:
        return list(addresses)

    return lookup


@pytest.mark.guarantee("G17")
@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["::1", "10.0.0.1"], ["::ffff:7f00:1"]])
async def test_a_name_of_a_private_address_is_refused(
    server: GatewayServer, addresses: list[str]
) -> None:
    gateway = DirectGateway(FakeClock(), lookup=always(*addresses))
    await refused(gateway, f"http://public.test:{port_of(server)}/t/x")
    await gateway.aclose()
    assert server.connections == 0


@pytest.mark.guarantee("G17")
@pytest.mark.parametrize(
    "addresses", [("127.0.0.1", STANDS_FOR_PUBLIC), (STANDS_FOR_PUBLIC, "127.0.0.1")]
)
async def test_the_private_one_of_the_addresses_of_a_name_is_never_tried(
    server: GatewayServer, addresses: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody listens at the public one: the next address is not asked instead."""
    monkeypatch.setattr("conveyor.gateway.direct.is_public", STANDS_FOR_PUBLIC.__eq__)
    gateway = DirectGateway(FakeClock(), lookup=always(*addresses))
    with pytest.raises(ScrapeFailed) as caught:
        await body_of(gateway, f"http://public.test:{port_of(server)}/t/x")
    await gateway.aclose()
    assert caught.value.retryable
    assert server.connections == 0


@pytest.mark.guarantee("G17")
async def test_a_redirect_to_a_private_address_is_refused(
    server: GatewayServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conveyor.gateway.direct.is_public", STANDS_FOR_PUBLIC.__eq__)
    async with GatewayServer(host=STANDS_FOR_PUBLIC) as public:
        gateway = DirectGateway(FakeClock(), lookup=always("127.0.0.1"))
        assert await body_of(gateway, public.target("x"))
        for place in (server.target("x"), server.target("x").replace("127.0.0.1", "name.test")):
            await refused(gateway, public.target(f"x?status=302&location={quote(place, safe='')}"))
        await gateway.aclose()
    assert server.connections == 0


async def test_a_name_is_resolved_once_and_connected_to_as_it_was_checked(
    server: GatewayServer,
) -> None:
    """Rebinding: the second answer of the resolver, a private one, is never used unchecked."""
    asked: list[str] = []

    async def lookup(host: str, port: int) -> list[str]:
        asked.append(host)
        return [STANDS_FOR_PUBLIC if len(asked) == 1 else "127.0.0.1"]

    client = HttpClient(connections=1, admits=STANDS_FOR_PUBLIC.__eq__, lookup=lookup)
    url = f"http://rebind.test:{port_of(server)}/t/x"
    with pytest.raises(TransportError) as caught:
        await client.send("GET", url, headers={}, body=None, timeout=SECONDS)
    assert (asked, caught.value.trouble) == (["rebind.test"], TransportTrouble.UNREACHABLE)
    await client.aclose()
    assert server.connections == 0


async def test_a_name_that_turns_private_is_refused_when_it_is_resolved_again(
    server: GatewayServer,
) -> None:
    answers = iter([[STANDS_FOR_PUBLIC], ["127.0.0.1"]])

    async def lookup(host: str, port: int) -> list[str]:
        return next(answers)

    def fresh() -> HttpClient:
        return HttpClient(connections=1, admits=STANDS_FOR_PUBLIC.__eq__, lookup=lookup)

    url = f"http://rebind.test:{port_of(server)}/t/x"
    troubles = []
    for client in (fresh(), fresh()):
        with pytest.raises(TransportError) as caught:
            await client.send("GET", url, headers={}, body=None, timeout=SECONDS)
        troubles.append(caught.value.trouble)
        await client.aclose()
    assert troubles == [TransportTrouble.UNREACHABLE, TransportTrouble.REFUSED]
    assert server.connections == 0


@pytest.mark.guarantee("G17")
async def test_the_peer_is_checked_before_a_byte_is_sent(server: GatewayServer) -> None:
    """A resolver that lies to the check and not to the socket: the peer itself gives it away."""
    answers = iter([True, False])
    peers: list[str] = []

    def admits(address: str) -> bool:
        peers.append(address)
        return next(answers)

    client = HttpClient(connections=1, admits=admits, lookup=always("127.0.0.1"))
    with pytest.raises(TransportError) as caught:
        await client.send(
            "GET", f"http://a.test:{port_of(server)}/t/x", headers={}, body=None, timeout=SECONDS
        )
    assert caught.value.trouble is TransportTrouble.REFUSED
    assert peers == ["127.0.0.1", "127.0.0.1"]
    await client.aclose()
    assert server.hits.total == 0


async def test_the_public_check_is_the_one_in_use() -> None:
    gateway = DirectGateway(FakeClock(), lookup=always("192.0.2.1"))
    assert not is_public("192.0.2.1")
    await refused(gateway, "http://documentation.test/")
    await gateway.aclose()
