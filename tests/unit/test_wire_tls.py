"""TLS of the client: whom it trusts, what it says, and servers that cannot do it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
import uvloop

from conveyor.wire.client import HttpClient
from conveyor.wire.errors import TransportError, TransportTrouble
from conveyor.wire.options import ClientOptions
from tests.nasty.answer import BODY, TO_CHUNKS, head, sized
from tests.nasty.certificate import Certificate
from tests.nasty.origin import NastyOrigin, page_body
from tests.patient import SECONDS

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
SOON = 0.3
DAMAGED = b"\x17\x03\x03\x00\x20" + bytes(32)
"""A record that was never encrypted."""
_TROUBLE = TransportTrouble


@pytest.fixture(
    params=[
        pytest.param(("asyncio", {}), id="asyncio"),
        pytest.param(("asyncio", {"loop_factory": uvloop.new_event_loop}), id="uvloop"),
    ]
)
def anyio_backend(request: pytest.FixtureRequest) -> object:
    return request.param


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return Certificate(tmp_path_factory.mktemp("certificate"))


@pytest.fixture(scope="module")
def origin(certificate: Certificate) -> Iterator[NastyOrigin]:
    context = certificate.server_context(("h2", "http/1.1"))
    with NastyOrigin([], context=context) as running:
        yield running


async def loopback(host: str, port: int) -> list[str]:
    return ["127.0.0.1"]


@pytest.fixture
async def client(anyio_backend: object, certificate: Certificate) -> AsyncIterator[HttpClient]:
    options = ClientOptions(authority=certificate.authority, connect=SECONDS)
    made = HttpClient(connections=1, lookup=loopback, options=options)
    yield made
    await made.aclose()


async def body(client: HttpClient, url: str) -> bytes:
    answer = await client.send("GET", url, headers={}, body=None, timeout=SECONDS)
    return await answer.read()


async def trouble(client: HttpClient, url: str) -> tuple[TransportTrouble, int]:
    with pytest.raises(TransportError) as caught:
        await body(client, url)
    return caught.value.trouble, caught.value.sent


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "LOCALHOST", "origin.test", "origin.test."]
)
async def test_a_certificate_of_the_given_authority_is_trusted(
    client: HttpClient, origin: NastyOrigin, host: str
) -> None:
    port = origin.url.rpartition(":")[2]
    assert await body(client, f"https://{host}:{port}/page-1") == page_body(1)
    assert await body(client, f"https://{host}:{port}/page-2") == page_body(2)
    assert origin.served[-1].connection == origin.served[-2].connection


@pytest.mark.parametrize("host", ["other.test", "127.0.0.9.test", "x" * 63 + ".test", "_x_.test"])
async def test_a_certificate_for_another_name_is_not(
    client: HttpClient, origin: NastyOrigin, host: str
) -> None:
    port, before = origin.url.rpartition(":")[2], len(origin.served)
    assert await trouble(client, f"https://{host}:{port}/page-1") == (_TROUBLE.TLS, 0)
    assert len(origin.served) == before


async def test_an_authority_that_nobody_gave_is_not(
    anyio_backend: object, origin: NastyOrigin
) -> None:
    client = HttpClient(connections=1)
    before = len(origin.served)
    assert await trouble(client, f"{origin.url}/page-1") == (_TROUBLE.TLS, 0)
    assert len(origin.served) == before
    await client.aclose()


@asynccontextmanager
async def raw(serve: Serve, context: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            writer.transport.abort()
        finally:
            writer.close()

    server = await asyncio.start_server(served, "127.0.0.1", 0, ssl=context)
    async with server:
        yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/"


def saying(data: bytes) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(data)
        await writer.drain()

    return serve


@pytest.mark.parametrize(
    ("said", "right"),
    [
        (sized(), _TROUBLE.TLS),
        (b"", _TROUBLE.TLS),
        (b"\x15\x03\x03\x00\x02\x02\x28", _TROUBLE.TLS),
        (b"\x15\x03\x03\x00\x02\x02\x78", _TROUBLE.NO_COMMON_PROTOCOL),
        (bytes(1_000), _TROUBLE.TLS),
    ],
    ids=["plain HTTP", "nothing", "alert", "alert of no common protocol", "zeros"],
)
async def test_a_server_without_our_tls_is_told_apart(
    client: HttpClient, said: bytes, right: TransportTrouble
) -> None:
    async with raw(saying(said)) as url:
        assert await trouble(client, url) == (right, 0)


async def test_a_server_that_says_nothing_is_given_up(certificate: Certificate) -> None:
    options = ClientOptions(authority=certificate.authority, connect=SOON)
    client = HttpClient(connections=1, lookup=loopback, options=options)
    may_end = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await may_end.wait()

    async with raw(serve) as url:
        # It took the connection: "nothing took it" would send people to look at host and port.
        assert await trouble(client, url) == (_TROUBLE.TLS, 0)
        may_end.set()
    await client.aclose()


async def test_name_and_protocol_are_offered(client: HttpClient, certificate: Certificate) -> None:
    named: list[str | None] = []
    spoken: list[str | None] = []
    context = certificate.server_context(("h2", "http/1.1"))
    context.sni_callback = lambda connection, name, given: named.append(name)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        spoken.append(writer.get_extra_info("ssl_object").selected_alpn_protocol())
        await reader.readuntil(b"\r\n\r\n")
        writer.write(sized(b"Connection: close"))

    async with raw(serve, context) as url:
        for host in ("127.0.0.1", "origin.test"):
            assert await body(client, url.replace("127.0.0.1", host)) == BODY
    assert (named, spoken) == ([None, "origin.test"], ["http/1.1"] * 2)


async def test_a_peer_that_is_not_admitted_hears_no_byte(
    anyio_backend: object, certificate: Certificate
) -> None:
    heard: asyncio.Queue[bytes] = asyncio.Queue()
    answers = iter([True, False])

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.put_nowait(await reader.read())

    options = ClientOptions(authority=certificate.authority)
    client = HttpClient(connections=1, admits=lambda address: next(answers), options=options)
    async with raw(serve) as url:
        assert await trouble(client, url) == (_TROUBLE.REFUSED, 0)
        assert await asyncio.wait_for(heard.get(), SECONDS) == b""
    await client.aclose()


@pytest.mark.parametrize(
    ("wire", "right"),
    [
        (sized()[:20], _TROUBLE.INTERRUPTED),
        (sized()[:-1], _TROUBLE.TRUNCATED),
        (head(TO_CHUNKS) + b"11\r\n", _TROUBLE.TRUNCATED),
        (head() + BODY, _TROUBLE.TRUNCATED),
    ],
    ids=["in the head", "in a length", "in chunks", "to the end"],
)
@pytest.mark.parametrize("is_apart", [False, True])
async def test_a_damaged_record_is_an_end_without_the_rest(
    client: HttpClient,
    certificate: Certificate,
    wire: bytes,
    right: TransportTrouble,
    is_apart: bool,
) -> None:
    """In one packet with what came before, or in one of its own."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(wire)
        await writer.drain()
        if is_apart:
            await asyncio.sleep(SOON / 30)
        connection = writer.get_extra_info("socket").dup()
        connection.send(DAMAGED)
        connection.close()
        await reader.read()

    async with raw(serve, certificate.server_context()) as url:
        assert await trouble(client, url) == (right, 1)


async def test_a_whole_answer_stands_before_a_damaged_record(
    client: HttpClient, certificate: Certificate
) -> None:
    connections = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        await reader.readuntil(b"\r\n\r\n")
        connection = writer.get_extra_info("socket").dup()
        writer.write(sized())
        connection.send(DAMAGED)
        connection.close()
        await reader.read()

    async with raw(serve, certificate.server_context()) as url:
        assert [await body(client, url), await body(client, url)] == [BODY, BODY]
    assert len(connections) == 2
