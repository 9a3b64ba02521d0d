"""Bodies that take their time, in either direction, and authorities that stand alone."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from math import inf
from pathlib import Path

import pytest
import uvloop

from conveyor.wire.client import APART, HttpClient
from conveyor.wire.errors import TransportError, TransportTrouble
from conveyor.wire.tls import client_context
from tests.nasty.certificate import Certificate
from tests.patient import SECONDS
from tests.unit.wire_server import Peer, Serve, answer, raw_server

SOON = 0.05


@pytest.fixture(
    params=[
        pytest.param(("asyncio", {}), id="asyncio"),
        pytest.param(("asyncio", {"loop_factory": uvloop.new_event_loop}), id="uvloop"),
    ]
)
def anyio_backend(request: pytest.FixtureRequest) -> object:
    return request.param


def halves(release: asyncio.Event) -> Serve:
    """Send half of a body, and the other once a test lets it."""

    async def serve(peer: Peer) -> None:
        while await peer.request():
            whole = answer(b"half" * 2)
            await peer.send(whole[:-4])
            await release.wait()
            await peer.send(whole[-4:])

    return serve


async def test_a_body_may_take_longer_than_its_request_was_given() -> None:
    release = asyncio.Event()
    async with raw_server(halves(release)) as server, aclosing(HttpClient(connections=1)) as client:
        for _ in range(2):
            release.clear()
            got = await client.send("GET", server.url(), headers={}, body=None, timeout=SOON)
            got.allow(inf)
            assert await anext(got) == b"half"
            rest = asyncio.ensure_future(anext(got))
            await asyncio.sleep(2 * SOON)  # the time of the request is over
            got.allow(inf)
            release.set()
            assert await rest == b"half"
            with pytest.raises(StopAsyncIteration):
                await anext(got)
        assert len(server.requests) == 1


async def test_the_rest_of_a_body_may_be_given_less_time() -> None:
    async with (
        raw_server(halves(asyncio.Event())) as server,
        aclosing(HttpClient(connections=1)) as client,
    ):
        got = await client.send("GET", server.url(), headers={}, body=None, timeout=SECONDS)
        assert await anext(got) == b"half"
        got.allow(SOON)
        with pytest.raises(TransportError) as caught:
            await anext(got)
        assert caught.value.trouble is TransportTrouble.TIMEOUT


@pytest.mark.parametrize("size", [APART, APART + 1, 8 * APART])
async def test_a_body_arrives_behind_its_head_whatever_its_size(size: int) -> None:
    body = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    got = []

    async def serve(peer: Peer) -> None:
        while head := await peer.request():
            assert f"\r\nContent-Length: {size}\r\n" in head
            got.append(await peer.body(size))
            await peer.send(answer())

    async with raw_server(serve) as server, aclosing(HttpClient(connections=1)) as client:
        for _ in range(2):
            sent = await client.send("PUT", server.url(), headers={}, body=body, timeout=SECONDS)
            assert await sent.read() == b"OK"
        assert len(server.requests) == 1
    assert got == [body, body]


def test_an_authority_that_stands_alone_is_the_only_one(tmp_path: Path) -> None:
    authority = Certificate(tmp_path).authority
    assert len(client_context(authority, alone=True).get_ca_certs()) == 1
    beside = client_context(authority).cert_store_stats()["x509_ca"]
    assert beside == client_context(None).cert_store_stats()["x509_ca"] + 1


async def test_who_has_a_whole_body_sets_no_time_for_the_next_exchange() -> None:
    asked = asyncio.Event()

    async def serve(peer: Peer) -> None:
        await peer.request()
        await peer.send(answer(b"whole"))
        await peer.request()
        asked.set()
        await asyncio.Event().wait()

    async with raw_server(serve) as server, aclosing(HttpClient(connections=1)) as client:
        first = await client.send("GET", server.url(), headers={}, body=None, timeout=SECONDS)
        assert await anext(first) == b"whole"
        next_one = asyncio.create_task(
            client.send("GET", server.url(), headers={}, body=None, timeout=SOON)
        )
        await asked.wait()
        first.allow(inf)
        with pytest.raises(TransportError) as caught:
            await asyncio.wait_for(next_one, 20 * SOON)
        assert caught.value.trouble is TransportTrouble.TIMEOUT
