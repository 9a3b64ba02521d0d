"""Deliveries never go to addresses that are not public, whatever the resolver says, nor to the
targets of redirects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import cycle
from pathlib import Path

import pytest

from conveyor.domain.deliveries import LADDER, DeliveryStatus
from conveyor.gateway.webhook import MOST_ANSWER, WebhookRules, WebhookSender
from conveyor.wire.connection import HttpConnection
from conveyor.wire.resolver import Lookup
from tests.unit.delivery_world import DeliveryWorld, delivery_world, receiving
from tests.unit.test_ssrf_matrix import LITERALS, RESOLVED
from tests.unit.wire_server import Peer, raw_server
from tests.unit.wired_handlers import deliverer

PUBLIC, OWN = "2001:4860:4860::8888", "127.0.0.1"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def world(tmp_path: Path, anyio_backend: str) -> AsyncIterator[DeliveryWorld]:
    async with delivery_world(tmp_path) as world:
        yield world


def strictly(world: DeliveryWorld, lookup: Lookup) -> None:
    """Let the deliverer of a world send as in production, by a resolver of ours."""
    clock = world.api.clock
    sender = WebhookSender(clock, WebhookRules(), lookup=lookup)
    world.deliverer = deliverer(world.api.binding, clock, sender, observer=world.telemetry)


@asynccontextmanager
async def canary() -> AsyncIterator[tuple[int, list[object]]]:
    """A listener that nobody may connect to, and those who did."""
    connections: list[object] = []

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer.get_extra_info("peername"))
        writer.close()

    async with await asyncio.start_server(hear, "0.0.0.0", 0) as server:
        yield server.sockets[0].getsockname()[1], connections


async def outcomes(world: DeliveryWorld) -> list[str]:
    """The outcomes of every attempt of every delivery."""
    return [tried.outcome for one in await world.deliveries() for tried in one.attempts]


@pytest.mark.guarantee("G17")
@pytest.mark.slow
async def test_no_spelling_of_an_address_that_is_not_public_is_delivered_to(
    world: DeliveryWorld,
) -> None:
    answers = iter(RESOLVED)

    async def resolve(host: str, port: int) -> list[str]:
        return [next(answers)] if host == "hooks.test" else [OWN]

    strictly(world, resolve)
    async with canary() as (port, connections):
        for host in [*LITERALS, *["hooks.test"] * len(RESOLVED)]:
            await world.owe(f"https://{host}:{port}/")
            await world.look()
    tried = await outcomes(world)

    assert len(tried) == len(LITERALS) + len(RESOLVED) >= 60
    assert all(outcome.startswith("transport_error:") for outcome in tried)
    assert connections == []


@pytest.mark.slow
@pytest.mark.guarantee("G17")
@pytest.mark.parametrize(
    "answers",
    [
        pytest.param([[OWN]], id="private once it is sent"),
        pytest.param([[PUBLIC, OWN], [OWN, PUBLIC]], id="both at once"),
        pytest.param([["10.0.0.1"], [OWN], ["169.254.169.254"]], id="one after the other"),
        pytest.param([["::ffff:127.0.0.1"]], id="hidden in another"),
    ],
)
async def test_a_resolver_that_changes_its_mind_reaches_nobody(
    world: DeliveryWorld, answers: list[list[str]]
) -> None:
    """A thousand attempts in all, up the whole ladder of each delivery."""
    later = cycle(answers)

    async def resolve(host: str, port: int) -> list[str]:
        return next(later)

    strictly(world, resolve)
    async with canary() as (port, connections):
        for number in range(25):
            await world.owe(f"https://hooks-{number}.test:{port}/")
        for wait in (0, *LADDER):
            await world.look(after=wait)
    tried = await outcomes(world)

    assert tried == ["transport_error:refused"] * 250
    assert {one.status for one in await world.deliveries()} == {DeliveryStatus.FAILED}
    assert connections == []


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_no_redirect_is_followed(world: DeliveryWorld, status: int) -> None:
    async with canary() as (port, connections):
        where = f"http://127.0.0.1:{port}/"
        async with receiving(f"{status} x\r\nLocation: {where}") as receiver:
            await world.owe(receiver.url)
            await world.look()

    assert await outcomes(world) == [f"http_3xx:{status}"]
    assert len(receiver.requests) == 1
    assert connections == []


async def test_an_answer_that_never_ends_is_cut(
    world: DeliveryWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = 0
    updated = HttpConnection.buffer_updated

    def counted(connection: HttpConnection, nbytes: int) -> None:
        nonlocal read
        read += nbytes
        updated(connection, nbytes)

    monkeypatch.setattr(HttpConnection, "buffer_updated", counted)

    async def endless(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\n")
        while True:
            await peer.send(bytes(10_000))

    async with raw_server(endless) as server:
        await world.owe(server.url())
        await world.look()

    [attempt] = (await world.delivery()).attempts
    assert (attempt.outcome, attempt.content_type, attempt.length) == (
        "delivered",
        "text/plain",
        None,
    )
    assert 0 < read <= MOST_ANSWER
