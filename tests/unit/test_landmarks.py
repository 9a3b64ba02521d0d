"""Whose trouble it is that hosts cannot be reached: their own, the resolver's or the network's."""

from __future__ import annotations

import errno
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import pytest

from conveyor.gateway.direct import DirectGateway
from conveyor.gateway.http import HttpGateway
from conveyor.gateway.http_client import client_opener
from conveyor.gateway.landmarks import HOSTS
from conveyor.ports.gateway import ScrapeFailed, ScrapeRequest, Shared
from conveyor.testing.clock import FakeClock
from conveyor.wire import errors
from conveyor.wire.errors import TransportTrouble
from conveyor.wire.options import USUAL
from tests.unit.wire_server import Peer, RawServer, raw_server

pytestmark = pytest.mark.anyio

SOCKETS = 0.01
"""Real seconds that sockets get before virtual time moves on."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Names:
    """A resolver: names beginning with `good` have an address, look-ups of others fail."""

    error: Callable[[], OSError] = lambda: socket.gaierror(socket.EAI_AGAIN, "try again")
    asked: list[str] = field(default_factory=list)
    is_away: bool = False

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        if host.startswith("good") and not self.is_away:
            return ["127.0.0.1"]
        raise self.error()


async def page(peer: Peer) -> None:
    while await peer.request():
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nOK")


@dataclass
class Direct:
    """A direct gateway in virtual time, over a resolver of the test."""

    names: Names
    clock: FakeClock
    gateway: DirectGateway
    server: RawServer

    async def good(self, host: str = "good.test") -> None:
        """Fetch a page of a host that answers."""
        async with self.gateway.scrape(ScrapeRequest(self.server.url(host=host), "key")):
            return

    async def failures(self, *hosts: str) -> list[ScrapeFailed]:
        """Fetch pages of hosts at the same time; how each failed."""
        failed: list[ScrapeFailed] = []

        async def fetch(host: str) -> None:
            with pytest.raises(ScrapeFailed) as caught:
                async with self.gateway.scrape(ScrapeRequest(self.server.url(host=host), "key")):
                    raise AssertionError("it answered")
            failed.append(caught.value)

        async with anyio.create_task_group() as group:
            for host in hosts:
                group.start_soon(fetch, host)
            await self.clock.advance_while(lambda: len(failed) < len(hosts), limit=60.0)
        return failed

    async def shared(self, *hosts: str) -> set[Shared | None]:
        """Return the sign that those failures give; None for the hosts' own troubles."""
        found = await self.failures(*hosts)
        return {one.absence.shared if one.absence is not None else None for one in found}


@asynccontextmanager
async def direct(**names: object) -> AsyncIterator[Direct]:
    """Open it."""
    resolver, clock = Names(**names), FakeClock(grace=SOCKETS)  # type: ignore[arg-type]
    gateway = DirectGateway(clock, allow_private=True, connections=50, lookup=resolver)
    async with raw_server(page) as server:
        yield Direct(resolver, clock, gateway, server)
        await gateway.aclose()


MANY = [f"bad{number}.test" for number in range(HOSTS)]


async def test_look_ups_of_five_hosts_in_a_row_that_fail_are_the_resolvers_trouble() -> None:
    async with direct() as it:
        assert await it.shared(*MANY) == {Shared.RESOLVER}
        assert await it.shared("bad6.test") == {Shared.RESOLVER}


async def test_fewer_hosts_have_troubles_of_their_own_however_often_they_fail() -> None:
    async with direct() as it:
        assert await it.shared(*MANY[:-1], *MANY[:-1]) == {None}


async def test_an_answer_between_them_begins_a_new_row() -> None:
    async with direct() as it:
        assert await it.shared(*MANY[:-1]) == {None}
        await it.good()
        assert await it.shared(MANY[-1]) == {None}


async def test_hosts_have_troubles_of_their_own_while_one_that_answered_can_be_reached() -> None:
    async with direct() as it:
        await it.good()
        requests = len(it.server.all_requests)
        assert await it.shared(*MANY, *(f"more{number}.test" for number in range(5))) == {None}
        assert len(it.server.all_requests) == requests


async def test_the_network_is_back_once_a_known_host_can_be_reached() -> None:
    async with direct() as it:
        await it.good()
        it.names.is_away = True
        assert await it.shared(*MANY) == {Shared.RESOLVER}
        it.names.is_away = False
        assert await it.shared(MANY[0]) == {None}


async def test_names_that_do_not_exist_are_answers() -> None:
    async with direct(error=lambda: socket.gaierror(socket.EAI_NONAME, "no such name")) as it:
        found = await it.failures(*MANY, "bad6.test")
        assert {one.absence for one in found} == {None}
        assert {one.problem.title for one in found} == {"the host name has no address"}


async def test_a_name_that_does_not_exist_between_them_begins_a_new_row() -> None:
    async with direct() as it:
        assert await it.shared(*MANY[:-1]) == {None}
        failing, it.names.error = it.names.error, lambda: socket.gaierror(socket.EAI_NONAME, "no")
        assert await it.shared("none.test") == {None}
        it.names.error = failing
        assert await it.shared(MANY[-1]) == {None}


async def test_hosts_that_refuse_are_answers() -> None:
    async with direct() as it:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            it.server.port = taken.getsockname()[1]
            found = await it.failures(*(f"good{number}.test" for number in range(2 * HOSTS)))
        assert {one.absence for one in found} == {None}


async def test_a_look_up_without_a_descriptor_is_this_process_own_trouble(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The system's resolver says no more than that it could not ask.
    monkeypatch.setattr(errors, "can_open", lambda: False)
    async with direct() as it:
        assert await it.shared("bad0.test") == {Shared.PROCESS}


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS])
def test_a_socket_that_cannot_be_made_is_this_process_own_trouble(number: int) -> None:
    mixed = OSError(f"Multiple exceptions: [Errno {number}] no, [Errno 101] unreachable")
    for error in (OSError(number, "no"), mixed):
        assert errors.unreached(error).trouble is TransportTrouble.EXHAUSTED
    assert errors.unresolved(OSError(number, "no")).trouble is TransportTrouble.EXHAUSTED


async def broken(gateway: HttpGateway) -> Shared | None:
    """Return the sign that a call gives which breaks."""
    with pytest.raises(ScrapeFailed) as caught:
        async with gateway.scrape(ScrapeRequest("http://any.test/", "key")):
            raise AssertionError("it answered")
    assert caught.value.problem.code in ("connection_lost", "gateway_unreachable")
    assert caught.value.absence is not None
    return caught.value.absence.shared


@pytest.mark.parametrize("engine", ["wire", "aiohttp"])
async def test_a_call_that_breaks_is_the_gateways_trouble_if_it_is_gone(engine: str) -> None:
    async def hang_up(peer: Peer) -> None:
        await peer.request()

    async with raw_server(hang_up) as server:
        opener = client_opener(engine, USUAL)
        gateway = HttpGateway(server.url("/v1/"), FakeClock(), open_client=opener)
        assert await broken(gateway) is None
    assert await broken(gateway) is Shared.GATEWAY
    await gateway.aclose()


async def test_calls_that_break_as_the_gateway_ends_were_not_theirs() -> None:
    both = anyio.Event()

    async def hang(peer: Peer) -> None:
        await peer.request()
        if len(server.all_requests) == 2:
            both.set()
        await anyio.sleep_forever()

    found: list[Shared | None] = []

    async def call() -> None:
        found.append(await broken(gateway))

    async with anyio.create_task_group() as group, raw_server(hang) as server:
        gateway = HttpGateway(server.url("/v1/"), FakeClock())
        group.start_soon(call)
        group.start_soon(call)
        await both.wait()
    assert found == [Shared.GATEWAY, Shared.GATEWAY]
    await gateway.aclose()
