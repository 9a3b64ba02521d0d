"""Addresses that are not public, at the socket: in every spelling, as a literal, by name and by
redirect. Nothing connects to one, and a listener on all addresses of this machine hears nothing."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from itertools import cycle, product

import pytest
import uvloop

from conveyor.gateway.direct import DirectGateway
from conveyor.gateway.targets import is_public
from conveyor.ports.gateway import ScrapeFailed, ScrapeRequest
from conveyor.testing.clock import FakeClock
from conveyor.wire.resolver import Lookup
from tests.patient import SECONDS

STANDS_FOR_PUBLIC = "127.0.0.2"
REFUSALS = {"address_refused", "malformed_url", "impossible_host", "host_not_found"}
"""The last one is for spellings of localhost that the system's resolver does not know."""

LOOPBACK = [
    "127.0.0.1",
    "127.0.0.1.",
    "127.1",
    "127.0.1",
    "127.000.000.001",
    "0177.0.0.1",
    "0177.1",
    "00000000177.1",
    "0x7f.1",
    "0x7f.0x0.0x0.0x1",
    "0X7F000001",
    "0x7F000001.",
    "2130706433",
    "017700000001",
    "127.0x1",
    "127.0.0.1%20",
    "%31%32%37.0.0.1",
    "127%2e0%2e0%2e1",
    "127。0。0。1",
    "127．0．0．1",
    "127｡0｡0｡1",
    "１２７.0.0.1",
    "①②⑦.0.0.1",
    "0x７f.1",
    "127.255.255.254",
    "0",
    "0.0.0.0",
    "0x0",
    "00",
    "0.1.2.3",
    "public.test@127.0.0.1",
    "public.test:80@127.0.0.1",
    "localhost",
    "LOCALHOST",
    "localhost.",
    "lOcAlHoSt.",
    "ⓛocalhost",
]
OTHERS = [
    "10.0.0.1",
    "10.255.255.255",
    "0xa000001",
    "012.1",
    "172.16.0.1",
    "172.31.255.255",
    "192.168.0.1",
    "192.168.1",
    "3232235521",
    "100.64.0.1",
    "100.127.255.255",
    "169.254.0.1",
    "169.254.169.254",
    "0xA9FEA9FE",
    "2852039166",
    "0251.0376.0251.0376",
    "192.0.0.1",
    "192.0.2.1",
    "192.88.99.1",
    "198.18.0.1",
    "198.19.255.255",
    "198.51.100.1",
    "203.0.113.1",
    "224.0.0.1",
    "239.255.255.255",
    "240.0.0.1",
    "255.255.255.255",
    "4294967295",
]
IPV6 = [
    "::1",
    "0:0:0:0:0:0:0:1",
    "0000:0000:0000:0000:0000:0000:0000:0001",
    "::0001",
    "::",
    "::ffff:127.0.0.1",
    "::ffff:7f00:1",
    "::FFFF:7F00:1",
    "0:0:0:0:0:ffff:7f00:1",
    "::ffff:a9fe:a9fe",
    "::ffff:10.0.0.1",
    "::ffff:0:7f00:1",
    "::127.0.0.1",
    "::7f00:1",
    "64:ff9b::7f00:1",
    "64:ff9b::10.0.0.1",
    "64:ff9b:1::7f00:1",
    "2002:7f00:1::",
    "2002:a9fe:a9fe::1",
    "2002:c0a8:1::1",
    "2001:0:4136:e378:8000:63bf:80ff:fffe",
    "2001::1",
    "2001:10::1",
    "2001:db8::1",
    "2a00::5efe:7f00:1",
    "2a00::200:5efe:7f00:1",
    "3fff::1",
    "100::1",
    "fe80::1",
    "febf::1",
    "fec0::1",
    "fc00::1",
    "fd00::1",
    "fd00:ec2::254",
    "ff02::1",
    "ff0e::1",
]
LITERALS = [
    *LOOPBACK,
    *OTHERS,
    *(f"[{address}]" for address in IPV6),
    "[fe80::1%25lo]",
    "[::1%251]",
]
RESOLVED = ["127.0.0.1", "0.0.0.0", *OTHERS[:1], "169.254.169.254", *IPV6, "fe80::1%lo", "::1%1"]


@pytest.fixture(
    params=[
        pytest.param(("asyncio", {}), id="asyncio"),
        pytest.param(("asyncio", {"loop_factory": uvloop.new_event_loop}), id="uvloop"),
    ]
)
def anyio_backend(request: pytest.FixtureRequest) -> object:
    return request.param


class Listener:
    """A listener that counts what it hears, and answers if it has an answer."""

    def __init__(self, answer: str = "") -> None:
        self.answer = answer
        self.port = 0
        self.connections = 0
        self.heard = 0

    async def hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while data := await reader.read(65_536):
            self.heard += len(data)
            writer.write(self.answer.encode())
        writer.close()

    def redirect(self, place: str, status: int) -> None:
        self.answer = f"HTTP/1.1 {status} x\r\nLocation: {place}\r\nContent-Length: 0\r\n\r\n"


@pytest.fixture
async def canary(anyio_backend: object) -> AsyncIterator[Listener]:
    """A listener on every address of this machine. It must hear nothing."""
    listener = Listener("HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nPOISON")
    if socket.has_dualstack_ipv6():
        sock = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    else:
        sock = socket.create_server(("0.0.0.0", 0))
    async with await asyncio.start_server(listener.hear, sock=sock) as server:
        listener.port = sock.getsockname()[1]
        yield listener
        server.close()
    assert (listener.connections, listener.heard) == (0, 0)


@pytest.fixture
async def public(anyio_backend: object, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Listener]:
    """A listener on an address that counts as public beside those that are."""

    def admits(address: str) -> bool:
        return address == STANDS_FOR_PUBLIC or is_public(address)

    monkeypatch.setattr("conveyor.gateway.direct.is_public", admits)
    listener = Listener("HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\npublic")
    server = await asyncio.start_server(listener.hear, STANDS_FOR_PUBLIC, 0)
    async with server:
        listener.port = server.sockets[0].getsockname()[1]
        yield listener


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The addresses that sockets of this process were told to connect to."""
    addresses: list[str] = []
    connect = socket.socket.connect

    def recorded(sock: socket.socket, address: tuple[str, int]) -> None:
        addresses.append(address[0])
        connect(sock, address)

    monkeypatch.setattr(socket.socket, "connect", recorded)
    yield addresses
    assert set(addresses) <= {STANDS_FOR_PUBLIC}


def always(*addresses: str) -> Lookup:
    async def lookup(host: str, port: int) -> list[str]:
        return list(addresses)

    return lookup


async def outcome(gateway: DirectGateway, url: str) -> str:
    """Return the body at a URL, or the code of the problem."""
    try:
        async with gateway.scrape(ScrapeRequest(url, "key", timeout=SECONDS)) as success:
            assert isinstance(success.content, bytes)
            return success.content.decode()
    except ScrapeFailed as failed:
        return failed.problem.code


@pytest.mark.guarantee("G17")
async def test_no_literal_is_connected_to(canary: Listener, connected: list[str]) -> None:
    async with aclosing(DirectGateway(FakeClock())) as gateway:
        for host, form in product(LITERALS, ("http://{}:{}/x", "HTTP:\\\\{}:{}", "https://{}:{}/")):
            url = form.format(host, canary.port)
            assert await outcome(gateway, url) in REFUSALS, url
    assert connected == []


@pytest.mark.guarantee("G17")
async def test_no_name_leads_to_one(canary: Listener, connected: list[str]) -> None:
    for address in RESOLVED:
        async with aclosing(DirectGateway(FakeClock(), lookup=always(address))) as gateway:
            for scheme in ("http", "https"):
                url = f"{scheme}://public.test:{canary.port}/"
                assert await outcome(gateway, url) == "address_refused", address
    assert connected == []


@pytest.mark.guarantee("G17")
async def test_a_name_of_both_kinds_leads_to_the_public_address_alone(
    canary: Listener, public: Listener, connected: list[str]
) -> None:
    for address in RESOLVED:
        for addresses in ([address, STANDS_FOR_PUBLIC], [STANDS_FOR_PUBLIC, address]):
            async with aclosing(DirectGateway(FakeClock(), lookup=always(*addresses))) as gateway:
                assert await outcome(gateway, f"http://both.test:{public.port}/") == "public"
    assert len(connected) == 2 * len(RESOLVED)


@pytest.mark.guarantee("G17")
async def test_no_redirect_leads_to_one(
    canary: Listener, public: Listener, connected: list[str]
) -> None:
    statuses = cycle((301, 302, 303, 307, 308))
    forms = ("http://{}:{}/x", "//{}:{}/x", "https://{}:{}/")
    async with aclosing(DirectGateway(FakeClock())) as gateway:
        for host, form in product(LITERALS, forms):
            place = form.format(host, canary.port)
            public.redirect(place, next(statuses))
            url = f"http://{STANDS_FOR_PUBLIC}:{public.port}/"
            assert await outcome(gateway, url) in REFUSALS, place
    assert public.heard > 0


@pytest.mark.guarantee("G17")
async def test_no_redirect_to_a_name_leads_to_one(
    canary: Listener, public: Listener, connected: list[str]
) -> None:
    public.redirect(f"http://inner.test:{canary.port}/", 302)
    for address in RESOLVED:
        async with aclosing(DirectGateway(FakeClock(), lookup=always(address))) as gateway:
            url = f"http://{STANDS_FOR_PUBLIC}:{public.port}/"
            assert await outcome(gateway, url) == "address_refused", address


@pytest.mark.guarantee("G17")
async def test_a_resolver_that_alternates_leads_to_the_public_address_alone(
    canary: Listener, public: Listener, connected: list[str]
) -> None:
    """One time public, one time not: for many names, and for one name in many clients."""
    answers = cycle(([STANDS_FOR_PUBLIC], ["127.0.0.1"], ["::1"], ["127.0.0.1", "10.0.0.1"]))

    async def lookup(host: str, port: int) -> list[str]:
        return next(answers)

    async with aclosing(DirectGateway(FakeClock(), lookup=lookup)) as gateway:
        many = [
            await outcome(gateway, f"http://name-{number}.test:{public.port}/")
            for number in range(100)
        ]
    assert many == ["public", *["address_refused"] * 3] * 25
    one = []
    for _ in range(100):
        async with aclosing(DirectGateway(FakeClock(), lookup=lookup)) as gateway:
            one += [await outcome(gateway, f"http://one.test:{public.port}/") for _ in range(2)]
    # What a client remembers of a name is judged each time; a name that was refused is, again.
    assert one == (["public"] * 2 + ["address_refused"] * 6) * 25
    assert len(connected) == 50
