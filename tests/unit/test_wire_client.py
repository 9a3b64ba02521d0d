"""The HTTP client over real sockets: what is sent, how often, over which connection."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
import uvloop

from conveyor.wire.client import FRESH_SECONDS, Answer, HttpClient
from conveyor.wire.connection import ReadBuffer
from conveyor.wire.errors import TransportError, TransportTrouble
from conveyor.wire.options import MOST_HELD, ClientOptions
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
    made = HttpClient(connections=4)
    yield made
    await made.aclose()


async def get(client: HttpClient, url: str, *, repeatable: bool = True) -> Answer:
    return await client.send(
        "GET", url, headers={}, body=None, timeout=SECONDS, repeatable=repeatable
    )


async def body(client: HttpClient, url: str, *, repeatable: bool = True) -> bytes:
    return await (await get(client, url, repeatable=repeatable)).read()


async def trouble(client: HttpClient, url: str, *, repeatable: bool = True) -> TransportError:
    with pytest.raises(TransportError) as caught:
        await body(client, url, repeatable=repeatable)
    return caught.value


# How often a request is sent


async def once_a_connection(peer: Peer) -> None:
    """Answer the first request, keep the connection, and close it when the second one is there."""
    await peer.request()
    await peer.send(answer())
    await peer.request()


@pytest.mark.guarantee("G11")
async def test_a_kept_connection_that_closes_unheard_costs_one_repetition(
    client: HttpClient,
) -> None:
    async with raw_server(once_a_connection) as server:
        assert (await get(client, server.url("/1"))).sent == 1
        second = await get(client, server.url("/2"))

        assert (second.sent, await second.read()) == (2, b"OK")
        assert [len(heads) for heads in server.requests] == [2, 1]


async def test_what_may_not_be_repeated_is_sent_once(client: HttpClient) -> None:
    async with raw_server(once_a_connection) as server:
        await body(client, server.url("/1"), repeatable=False)
        failed = await trouble(client, server.url("/2"), repeatable=False)

        assert (failed.trouble, failed.sent) == (TransportTrouble.INTERRUPTED, 1)
        assert len(server.all_requests) == 2


async def test_what_may_not_be_repeated_goes_over_no_connection_that_was_long_idle(
    client: HttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with raw_server(once_a_connection) as server:
        await body(client, server.url("/1"), repeatable=False)
        monkeypatch.setattr("conveyor.wire.client.FRESH_SECONDS", 0.0)
        await body(client, server.url("/2"), repeatable=False)

        assert [len(heads) for heads in server.requests] == [1, 1]
    assert FRESH_SECONDS == 1.0


async def test_a_server_that_closes_on_every_request_sees_each_once(client: HttpClient) -> None:
    async def close(peer: Peer) -> None:
        await peer.request()

    async with raw_server(close) as server:
        failed = await trouble(client, server.url())
        assert (failed.trouble, failed.sent) == (TransportTrouble.INTERRUPTED, 1)
        assert len(server.all_requests) == 1


async def test_a_byte_of_an_answer_forbids_the_repetition(client: HttpClient) -> None:
    async def break_off(peer: Peer) -> None:
        await peer.request()
        await peer.send(answer())
        await peer.request()
        await peer.send(b"H")

    async with raw_server(break_off) as server:
        await body(client, server.url())
        failed = await trouble(client, server.url())
        assert (failed.trouble, failed.sent) == (TransportTrouble.INTERRUPTED, 1)
        assert len(server.all_requests) == 2


async def test_a_connection_that_could_not_be_made_sent_nothing(client: HttpClient) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        failed = await trouble(client, f"http://127.0.0.1:{unused.getsockname()[1]}/")
    assert (failed.trouble, failed.sent) == (TransportTrouble.UNREACHABLE, 0)


async def test_bytes_before_the_request_are_no_answer(client: HttpClient) -> None:
    async def speak_first(peer: Peer) -> None:
        await peer.send(b"SSH-2.0-OpenSSH_9.6\r\n")
        await peer.request()

    async with raw_server(speak_first) as server:
        for _ in range(5):
            assert (await trouble(client, server.url())).trouble is TransportTrouble.MALFORMED


async def test_a_connection_that_closes_before_the_request_is_no_answer(client: HttpClient) -> None:
    async def close(peer: Peer) -> None:
        return

    async with raw_server(close) as server:
        for _ in range(5):
            assert (await trouble(client, server.url())).trouble is TransportTrouble.INTERRUPTED
    assert client.open_connections == 0


# Which connection


@pytest.mark.guarantee("G15")
async def test_bytes_that_lie_in_the_socket_while_the_loop_is_busy_are_seen(
    client: HttpClient,
) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    go, pushed = threading.Event(), threading.Event()

    def serve() -> None:
        first, _ = listener.accept()
        with first:
            first.recv(65_536)
            first.sendall(answer(b"FIRST"))
            go.wait(SECONDS)
            first.sendall(answer(b"OTHER"))
            pushed.set()
            second, _ = listener.accept()
            with second:
                second.recv(65_536)
                second.sendall(answer(b"SECOND"))

    thread = threading.Thread(target=serve)
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
    try:
        assert await body(client, url) == b"FIRST"
        go.set()
        assert pushed.wait(SECONDS), "the loop stands still meanwhile"
        assert await body(client, url) == b"SECOND"
    finally:
        thread.join()
        listener.close()


async def test_an_idle_connection_gives_way_to_another_host() -> None:
    async with raw_server(answer_all) as one, raw_server(answer_all) as other:
        async with aclosing(HttpClient(connections=1)) as client:
            for server in (one, other, one):
                assert await body(client, server.url("/x")) == b"/x"
                assert client.open_connections == 1
        assert (len(one.requests), len(other.requests)) == (2, 1)


async def test_hosts_take_turns_when_slots_are_few() -> None:
    order: list[str] = []

    async def note(peer: Peer) -> None:
        while head := await peer.request():
            order.append(head.split(" ")[1])
            await peer.send(answer())

    async with (
        raw_server(note) as giant,
        raw_server(note) as small,
        aclosing(HttpClient(connections=1)) as client,
        asyncio.TaskGroup() as group,
    ):
        for number in range(6):
            group.create_task(body(client, giant.url(f"/giant/{number}")))
        await asyncio.sleep(0)
        group.create_task(body(client, small.url("/small")))
    assert order.index("/small") <= 2, order


async def test_a_cancelled_call_aborts_its_connection_at_once_and_frees_the_slot() -> None:
    closed = asyncio.Event()
    arrived = asyncio.Event()

    async def hang(peer: Peer) -> None:
        head = await peer.request()
        if "/hang" in head:
            arrived.set()
            assert await peer.request() == ""
            closed.set()
            return
        await peer.send(answer())

    async with raw_server(hang) as server, aclosing(HttpClient(connections=1)) as client:
        call = asyncio.create_task(get(client, server.url("/hang")))
        await arrived.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        async with asyncio.timeout(SECONDS):
            assert await body(client, server.url("/next")) == b"OK"
            await closed.wait()


# Names


async def test_names_that_nobody_resolves_hold_no_slot() -> None:
    async def lookup(host: str, port: int) -> list[str]:
        if host.startswith("dead"):
            await asyncio.Event().wait()
        return ["127.0.0.1"]

    async with (
        raw_server(answer_all) as server,
        aclosing(HttpClient(connections=1, lookup=lookup)) as client,
    ):
        calls = [
            asyncio.create_task(get(client, server.url(host=f"dead{number}.test")))
            for number in range(60)
        ]
        await asyncio.sleep(0)
        async with asyncio.timeout(SECONDS):
            assert await body(client, server.url("/x", host="alive.test")) == b"/x"
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


async def test_callers_share_the_look_up_of_a_name() -> None:
    asked: list[str] = []
    at_once = most = 0

    async def lookup(host: str, port: int) -> list[str]:
        nonlocal at_once, most
        asked.append(host)
        at_once += 1
        most = max(most, at_once)
        for _ in range(3):
            await asyncio.sleep(0)
        at_once -= 1
        return ["127.0.0.1"]

    async with (
        raw_server(answer_all) as server,
        aclosing(HttpClient(connections=4, lookup=lookup)) as client,
        asyncio.TaskGroup() as group,
    ):
        for number in range(200):
            url = server.url("/x", host=f"host{number % 100}.test")
            group.create_task(body(client, url))
    assert sorted(asked) == sorted({f"host{number}.test" for number in range(100)})
    assert most <= 64


async def test_a_name_without_an_address_is_told_apart() -> None:
    async def lookup(host: str, port: int) -> list[str]:
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    async with aclosing(HttpClient(connections=1, lookup=lookup)) as client:
        failed = await trouble(client, "http://nowhere.test/")
    assert (failed.trouble, failed.sent) == (TransportTrouble.UNRESOLVED, 0)


# Times and bounds


async def test_the_first_byte_has_a_time_of_its_own() -> None:
    async def hang(peer: Peer) -> None:
        await peer.request()
        await peer.request()

    options = ClientOptions(first_byte=0.05)
    async with (
        raw_server(hang) as server,
        aclosing(HttpClient(connections=1, options=options)) as c,
    ):
        failed = await trouble(c, server.url())
    assert (failed.trouble, failed.sent) == (TransportTrouble.TIMEOUT, 1)


@pytest.mark.slow
async def test_the_whole_answer_has_a_time_although_its_head_came() -> None:
    async def trickle(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf")
        await peer.request()

    options = ClientOptions(first_byte=SECONDS)
    async with (
        raw_server(trickle) as server,
        aclosing(HttpClient(connections=1, options=options)) as client,
    ):
        answer = await client.send(
            "GET", server.url(), headers={}, body=None, timeout=1.0, repeatable=True
        )
        with pytest.raises(TransportError) as caught:
            await answer.read()
    assert caught.value.trouble is TransportTrouble.TIMEOUT


async def test_a_body_that_nobody_takes_is_received_up_to_a_bound(client: HttpClient) -> None:
    size = 20_000_000

    async def serve(peer: Peer) -> None:
        await peer.request()
        await peer.send(answer(bytes(size)))

    async with raw_server(serve) as server:
        large = await get(client, server.url())
        for _ in range(100_000):
            if large._connection._is_paused:
                break
            await asyncio.sleep(0)
        assert large._connection._is_paused
        assert 0 < large._reader.buffered <= MOST_HELD
        pieces = [len(piece) async for piece in large.pieces()]
    assert (sum(pieces), max(pieces) <= MOST_HELD) == (size, True)


@pytest.mark.parametrize("connections", [1, 50, 256, 1_000, 10_000])
def test_all_connections_together_hold_at_most_64_mib(connections: int) -> None:
    buffer = ReadBuffer(connections, MOST_HELD)
    # TLS may keep an unfinished record back, and let it out with the next piece.
    assert connections * (buffer.full_at + 2 * len(buffer.view)) <= 64 * 2**20
    assert len(buffer.view) > 0


# Requests


@pytest.mark.parametrize(
    ("method", "url", "headers"),
    [
        ("GET", "http://h.test/a b", {}),
        ("GET", "http://h.test/ü", {}),
        ("GET", "http://h.test/\r\nX: y", {}),
        ("GET", "http://user@h.test/", {}),
        ("GET", "http://h.test:0/", {}),
        ("GET", "http://h.test:99999/", {}),
        ("GET", "http:///", {}),
        ("GET", "ftp://h.test/", {}),
        ("GET", "http://h.test/", {"X": "a\r\nY: b"}),
        ("GET", "http://h.test/", {"X": "a\nb"}),
        ("GET", "http://h.test/", {"X": "a\rb"}),
        ("GET", "http://h.test/", {"X": "a\0b"}),
        ("GET", "http://h.test/", {"X": "\ud800"}),
        ("GET", "http://h.test/", {"X Y": "a"}),
        ("GET", "http://h.test/", {"": "a"}),
        ("GET", "http://h.test/", {"X:": "a"}),
        ("GET / HTTP/1.1\r\nX:", "http://h.test/", {}),
        ("", "http://h.test/", {}),
    ],
)
async def test_what_http_cannot_carry_is_not_sent(
    client: HttpClient, method: str, url: str, headers: dict[str, str]
) -> None:
    with pytest.raises(TransportError) as caught:
        await client.send(method, url, headers=headers, body=None, timeout=SECONDS)
    assert (caught.value.trouble, caught.value.sent) == (TransportTrouble.UNSENDABLE, 0)
    assert client.open_connections == 0


async def test_a_request_on_the_wire(client: HttpClient) -> None:
    async with raw_server(answer_all) as server:
        await client.send(
            "POST",
            server.url("/p?q=1#fragment"),
            headers={"X-Name": "välue"},
            body=b"abc",
            timeout=SECONDS,
        )
        [head] = server.all_requests
    assert head == (
        f"POST /p?q=1 HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
        "X-Name: välue\r\nContent-Length: 3\r\n\r\n"
    )


async def test_a_place_whose_process_dies_is_not_reached() -> None:
    """Its listener takes the connection, and the end of the process resets it."""
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
    async with aclosing(HttpClient(connections=1)) as client:
        await client.reach(url)
        asyncio.get_running_loop().call_later(0.02, listener.close)
        with pytest.raises(TransportError) as caught:
            await client.reach(url)
    assert caught.value.trouble is TransportTrouble.UNREACHABLE
