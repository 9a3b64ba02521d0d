"""The HTTP client when it is closed, cancelled or left by the server at an awkward moment."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import uvloop

from conveyor.wire.client import Answer, HttpClient
from conveyor.wire.connection import HttpConnection, ReadBuffer
from conveyor.wire.connector import Connector
from conveyor.wire.errors import TransportError, TransportTrouble
from conveyor.wire.options import MOST_HELD, ClientOptions, read_proxy
from conveyor.wire.origin import read_origin
from conveyor.wire.resolver import Resolver
from tests.patient import SECONDS
from tests.unit.wire_server import Peer, answer, answer_all, raw_server


@pytest.fixture(
    params=[
        pytest.param(("asyncio", {}), id="asyncio"),
        pytest.param(("asyncio", {"loop_factory": uvloop.new_event_loop}), id="uvloop"),
    ]
)
def anyio_backend(request: pytest.FixtureRequest) -> object:
    return request.param


@pytest.fixture
async def client(anyio_backend: object) -> AsyncIterator[HttpClient]:
    made = HttpClient(connections=1)
    yield made
    await made.aclose()


async def get(client: HttpClient, url: str) -> Answer:
    return await client.send("GET", url, headers={}, body=None, timeout=SECONDS)


def left_socket() -> socket.socket:
    """Return a connected socket whose peer has closed."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
        theirs.close()
    ours.setblocking(False)
    return ours


@pytest.mark.parametrize(
    ("scheme", "options", "trouble"),
    [
        ("https", ClientOptions(connect=SECONDS), TransportTrouble.TLS),
        (
            "http",
            ClientOptions(connect=SECONDS, proxy=read_proxy("http://127.0.0.1:1")),
            TransportTrouble.INTERRUPTED,
        ),
    ],
    ids=["before TLS", "before CONNECT"],
)
async def test_a_server_that_has_left_already_is_noticed_at_once(
    scheme: str, options: ClientOptions, trouble: TransportTrouble
) -> None:
    lost: list[HttpConnection] = []
    gone = asyncio.Event()

    def lose(connection: HttpConnection) -> None:
        lost.append(connection)
        gone.set()

    ours = left_socket()
    connection = HttpConnection(
        read_origin(scheme, "localhost"), ours, ReadBuffer(1, MOST_HELD), on_lost=lose
    )
    connector = Connector(Resolver(None, None), None, options)
    began = asyncio.get_running_loop().time()

    with pytest.raises(TransportError) as caught:
        await connector.set_up(connection, ours)

    assert caught.value.trouble is trouble
    assert asyncio.get_running_loop().time() - began < SECONDS / 2
    async with asyncio.timeout(SECONDS / 2):
        await gone.wait()
    assert lost == [connection]


async def never_answer(peer: Peer) -> None:
    while await peer.request():
        pass


@pytest.mark.parametrize("turns", range(1, 12))
async def test_closing_ends_every_call_wherever_it_is(turns: int) -> None:
    async with raw_server(never_answer) as server:
        client = HttpClient(connections=2)
        calls = [asyncio.create_task(get(client, server.url())) for _ in range(4)]
        for _ in range(turns):
            await asyncio.sleep(0)

        async with asyncio.timeout(SECONDS / 2):
            opened = client._opened
            await client.aclose()
            ends = await asyncio.gather(*calls, return_exceptions=True)

        assert [type(end) for end in ends] == [TransportError] * 4
        assert opened is not None
        assert opened.pool.taken == 0


async def test_a_closed_client_does_not_open_again() -> None:
    async with raw_server(answer_all) as server:
        client = HttpClient(connections=1)
        await (await get(client, server.url())).read()
        await client.aclose()
        for call in (get(client, server.url()), client.reach(server.url())):
            with pytest.raises(TransportError):
                await call
        assert client.open_connections == 0
        assert len(server.requests) == 1


async def test_closing_gives_up_look_ups_and_their_callers_alone_are_told() -> None:
    asked = asyncio.Event()

    async def lookup(_host: str, _port: int) -> list[str]:
        asked.set()
        await asyncio.Event().wait()
        return []

    client = HttpClient(connections=1, lookup=lookup)
    call = asyncio.create_task(get(client, "http://slow.test/"))
    await asked.wait()
    await client.aclose()

    with pytest.raises(TransportError):
        await call


async def test_closing_waits_for_the_sockets_also_after_others_were_lost(
    client: HttpClient,
) -> None:
    async def serve(peer: Peer) -> None:
        await peer.request()
        await peer.send(answer(fields="Connection: close\r\n"))

    async with raw_server(serve) as closing, raw_server(answer_all) as keeping:
        await (await get(client, closing.url())).read()
        await (await get(client, keeping.url())).read()
        opened = client._opened
        assert opened is not None
        assert opened.pool.taken == 1

        await client.aclose()

        assert opened.pool.taken == 0


async def test_a_call_cancelled_when_its_answer_is_whole_disturbs_no_other(
    client: HttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[asyncio.Task[Answer]] = []
    is_armed = False
    receive = HttpConnection.buffer_updated

    def buffer_updated(connection: HttpConnection, count: int) -> None:
        nonlocal is_armed
        if is_armed:
            is_armed = False
            # It is to run before the first call hears of its answer.
            calls.append(asyncio.create_task(get(client, server.url("/second"))))
            receive(connection, count)
            calls[0].cancel()
        else:
            receive(connection, count)

    monkeypatch.setattr(HttpConnection, "buffer_updated", buffer_updated)
    async with raw_server(answer_all) as server:
        await (await get(client, server.url("/"))).read()
        is_armed = True
        calls.append(asyncio.create_task(get(client, server.url("/first"))))
        with pytest.raises(asyncio.CancelledError):
            await calls[0]

        assert await (await calls[1]).read() == b"/second"
        assert [len(heads) for heads in server.requests] == [3]


async def test_a_body_that_breaks_tells_that_its_request_was_sent(client: HttpClient) -> None:
    async def serve(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort")

    async with raw_server(serve) as server:
        answered = await get(client, server.url())
        with pytest.raises(TransportError) as caught:
            await answered.read()

    assert (caught.value.trouble, caught.value.sent) == (TransportTrouble.TRUNCATED, 1)


async def test_authorities_that_vanish_are_a_failure_of_tls(tmp_path: Path) -> None:
    client = HttpClient(connections=1, options=ClientOptions(authority=tmp_path / "gone.pem"))
    async with raw_server(answer_all) as server:
        with pytest.raises(TransportError) as caught:
            await get(client, f"https://127.0.0.1:{server.port}/")
        await client.aclose()

    assert caught.value.trouble is TransportTrouble.TLS
