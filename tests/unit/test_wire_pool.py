"""The client's pool under chance: cancels, dead names, answers broken and late, connections that
end. No slot is lost, sockets stay within the limit, and each body is its request's own."""

from __future__ import annotations

import asyncio
import random
import re
import socket
from collections import Counter
from collections.abc import Awaitable, Iterator
from typing import Any

import msgspec
import pytest
import uvloop

from conveyor.wire.client import HttpClient
from conveyor.wire.connection import HttpConnection
from conveyor.wire.errors import TransportError, TransportTrouble
from tests.patient import SECONDS
from tests.unit.chance_server import HOSTS, LATEST, ChanceServer, body_of, chance_server

CONNECTIONS = 5
CALLERS = 30
SOON = 0.02
"""The patience of a caller whom nobody will answer."""

_WELL = ("plain", "chunked", "late", "in_parts", "large", "surplus", "ends", "ends_later")
_BADLY = {
    "cut": {TransportTrouble.TRUNCATED},
    "reset": {TransportTrouble.INTERRUPTED, TransportTrouble.TRUNCATED},
    "broken": {TransportTrouble.MALFORMED},
    "never": {TransportTrouble.TIMEOUT},
    "dead_name": {TransportTrouble.UNRESOLVED},
    "stuck_name": {TransportTrouble.TIMEOUT},
    "nobody": {TransportTrouble.UNREACHABLE},
}
_KINDS = [*_WELL, *_WELL, *_WELL, *_WELL, *_BADLY]


@pytest.fixture(
    params=[
        pytest.param(("asyncio", {}), id="asyncio"),
        pytest.param(("asyncio", {"loop_factory": uvloop.new_event_loop}), id="uvloop"),
    ]
)
def anyio_backend(request: pytest.FixtureRequest) -> object:
    return request.param


class Call(msgspec.Struct, frozen=True):
    """One call. It is cancelled after some seconds, unless they are None; `is_partial` callers let
    the body go unread."""

    number: int
    kind: str
    host: str
    cancel_after: float | None
    is_partial: bool
    repeatable: bool

    @property
    def timeout(self) -> float:
        return SOON if self.kind in ("never", "stuck_name") else SECONDS

    def url(self, port: int) -> str:
        return f"http://{self.host}:{port}/{self.kind}-{self.number}"


def call_by_chance(number: int, by_chance: random.Random) -> Call:
    kind = by_chance.choice(_KINDS)
    host = by_chance.choice((*HOSTS, "one.test", "two.test"))
    if kind in ("dead_name", "stuck_name"):
        host = f"{kind.replace('_', '-')}-{number}.test"
    elif kind == "nobody":
        host = "127.0.0.9"
    cancel_after = by_chance.choice((0.0, 0.001, 0.002, 0.005))
    return Call(
        number=number,
        kind=kind,
        host=host,
        cancel_after=cancel_after if by_chance.random() < 0.25 else None,
        is_partial=by_chance.random() < 0.1,
        repeatable=by_chance.random() < 0.5,
    )


async def lookup(host: str, port: int) -> list[str]:
    if host.startswith("stuck"):
        await asyncio.sleep(5 * SOON)
    await asyncio.sleep(0)
    if host.startswith("dead"):
        raise OSError("no such name")
    return [HOSTS[0] if host == "one.test" else HOSTS[1]]


class Carriers:
    """Notes the connection of each request that goes out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of: dict[int, HttpConnection] = {}
        begin = HttpConnection.begin

        def recorded(
            connection: HttpConnection, request: bytes, *arguments: object, **named: object
        ) -> Awaitable[object]:
            found = re.match(rb"GET /[a-z_]+-(\d+) ", request)
            assert found is not None
            self.of[int(found[1])] = connection
            return begin(connection, request, *arguments, **named)  # type: ignore[arg-type]

        monkeypatch.setattr(HttpConnection, "begin", recorded)


class World:
    """A client and its servers, and what became of the calls."""

    def __init__(self, server: ChanceServer, carriers: Carriers) -> None:
        self.client = HttpClient(connections=CONNECTIONS, lookup=lookup)
        self.server = server
        self.outcomes: Counter[str] = Counter()
        self._carriers = carriers.of

    async def run(self, calls: list[Call]) -> None:
        """Make calls, a number of them side by side."""
        waiting = iter(calls)
        async with asyncio.TaskGroup() as group:
            for _ in range(CALLERS):
                group.create_task(self._caller(waiting))

    async def _caller(self, waiting: Iterator[Call]) -> None:
        for call in waiting:
            task = asyncio.create_task(self._make(call))
            if call.cancel_after is not None:
                asyncio.get_running_loop().call_later(call.cancel_after, task.cancel)
            await asyncio.wait([task])
            if task.cancelled():
                self.outcomes["cancelled"] += 1
            else:
                task.result()
            self._carriers.pop(call.number, None)
            assert self.client.open_connections <= CONNECTIONS

    async def _make(self, call: Call) -> None:
        try:
            answer = await self.client.send(
                "GET",
                call.url(self.server.port),
                headers={},
                body=None,
                timeout=call.timeout,
                repeatable=call.repeatable,
            )
            if call.is_partial:
                answer.release()
                self.outcomes["partial"] += 1
                return
            body = await answer.read()
        except TransportError as error:
            self._check_trouble(call, error)
        except asyncio.CancelledError:
            self._check_cancelled(call)
            raise
        else:
            assert call.kind in _WELL, call
            assert body == body_of(call.kind, call.number), (call, body[:100])
            self.outcomes["whole"] += 1

    def _check_trouble(self, call: Call, error: TransportError) -> None:
        self.outcomes[error.trouble.value] += 1
        if error.trouble is TransportTrouble.INTERRUPTED and call.kind != "reset":
            # The connection was kept, and ended before the request arrived.
            assert error.sent == (2 if call.repeatable else 1), call
        else:
            assert error.trouble in _BADLY.get(call.kind, set()), (call, error.trouble)

    def _check_cancelled(self, call: Call) -> None:
        """The connection is gone at once, unless its answer has been sent whole."""
        carrier = self._carriers.get(call.number)
        if carrier is not None and call.number in self.server.unanswered:
            assert not carrier.is_usable(), call
            assert carrier._transport.is_closing(), call

    async def all_slots_serve(self) -> None:
        """Make as many calls at a time as there are slots; each gets its answer with the last."""
        await asyncio.sleep(2 * LATEST)  # no kept connection is to end under these
        numbers = range(-CONNECTIONS, 0)
        calls = [Call(10**9 - n, "held", HOSTS[n % 3], None, False, False) for n in numbers]
        bodies = await asyncio.gather(*(self._body(call) for call in calls))
        assert bodies == [body_of("held", call.number) for call in calls]

    async def _body(self, call: Call) -> bytes:
        url = call.url(self.server.port)
        answer = await self.client.send("GET", url, headers={}, body=None, timeout=SECONDS)
        return await answer.read()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "count"),
    [
        (1, 2_400),
        (2, 2_400),
        pytest.param(3, 500_000, marks=[pytest.mark.full, pytest.mark.timeout(3_600)]),
    ],
)
async def test_no_slot_is_lost_and_no_body_mistaken(
    seed: int, count: int, anyio_backend: tuple[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four times 2,400 calls: two seeds on either loop, each its own."""
    by_chance = random.Random(f"{seed} {anyio_backend}")
    async with chance_server(seed, CONNECTIONS) as server:
        world = World(server, Carriers(monkeypatch))
        await world.run([call_by_chance(number, by_chance) for number in range(count)])
        await world.all_slots_serve()
        assert server.most_open <= CONNECTIONS
        await world.client.aclose()
        assert (world.client.open_connections, server.settled(0)) == (0, 0)
    outcomes = world.outcomes
    assert outcomes.total() == count
    # Chance has met everything, and most calls of the well-behaved kinds have come through.
    assert {trouble for troubles in _BADLY.values() for trouble in troubles} <= outcomes.keys()
    assert outcomes["cancelled"] > count / 20
    assert outcomes["whole"] > count / 3


async def test_a_name_of_many_addresses_opens_few_sockets(
    anyio_backend: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each address that does not answer costs one socket more, and none of them counts as a
    connection."""
    tried: list[str] = []

    async def start_connection(infos: list[Any], **options: object) -> socket.socket:
        tried.extend(info[4][0] for info in infos)
        raise OSError("nobody answers")

    monkeypatch.setattr("conveyor.wire.connector.start_connection", start_connection)
    addresses = [f"192.0.2.{last}" for last in range(200)]
    addresses += [f"2001:db8::{last}" for last in range(200)]

    async def looked_up(host: str, port: int) -> list[str]:
        return addresses

    client = HttpClient(connections=1, lookup=looked_up)
    with pytest.raises(TransportError) as caught:
        await client.send("GET", "http://many.test/", headers={}, body=None, timeout=SECONDS)
    assert (caught.value.trouble, caught.value.sent) == (TransportTrouble.UNREACHABLE, 0)
    assert tried == [*addresses[:4], *addresses[200:204]]
    await client.aclose()
