"""Bytes are sacred: over every gateway, in every coding and framing, what was served is what comes
out, or nothing does."""

from __future__ import annotations

import gzip
from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator
from urllib.parse import quote

import pytest
import uvloop

from conveyor.clock import SystemClock
from conveyor.domain.model import TaskFailure
from conveyor.gateway.decode import SMALL
from conveyor.gateway.direct import DirectGateway
from conveyor.gateway.fake import FakeGateway, expected_body
from conveyor.gateway.http import HttpGateway
from conveyor.ports.gateway import Gateway, ScrapeFailed, ScrapeRequest
from conveyor.testing.gateway_server import GatewayServer

LIMIT = 52_428_800

BODIES = {
    "empty": ("text/html", b""),
    "NUL": ("text/html", b"a\0b\0\0"),
    "invalid UTF-8": ("text/html; charset=utf-8", b"\xff\xfe\x80abc\xc3"),
    "Shift_JIS": ("text/html; charset=Shift_JIS", "日本語のページ".encode("shift_jis")),
    "windows-1251": ("text/html;charset=windows-1251", "Привет".encode("windows-1251")),
    "PDF": ("application/pdf", b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj\n\x00\xff\r\nendobj"),
    "a gzip file": ("application/gzip", gzip.compress(b"inside" * 100, mtime=0)),
    "line ends": ("text/plain", b"\r\n\r\n\n\r0\r\n\r\n"),
}
CODINGS = ["", "gzip", "deflate", "raw-deflate", "br", "zstd", "gzip,gzip", "br,deflate,gzip"]


@pytest.fixture(
    params=[
        pytest.param(("asyncio", {}), id="asyncio"),
        pytest.param(("asyncio", {"loop_factory": uvloop.new_event_loop}), id="uvloop"),
    ]
)
def anyio_backend(request: pytest.FixtureRequest) -> object:
    return request.param


@pytest.fixture
async def server(anyio_backend: object) -> AsyncIterator[GatewayServer]:
    async with GatewayServer() as running:
        yield running


@pytest.fixture(params=["direct", "http", "fake"])
async def gateway(request: pytest.FixtureRequest, server: GatewayServer) -> AsyncIterator[Gateway]:
    clock = SystemClock()
    made: dict[str, Gateway] = {
        "direct": DirectGateway(clock, allow_private=True),
        "http": HttpGateway(server.url, clock),
        "fake": FakeGateway(clock),
    }
    yield made[request.param]
    for each in made.values():
        await each.aclose()


async def scrape(gateway: Gateway, url: str, *, max_bytes: int = LIMIT) -> tuple[bytes, str]:
    request = ScrapeRequest(url, "key", timeout=20.0, max_bytes=max_bytes)
    async with gateway.scrape(request) as success:
        content = success.content
        if not isinstance(content, bytes):
            content = b"".join([piece async for piece in content])
        return content, success.content_type


async def failure(gateway: Gateway, url: str, *, max_bytes: int = LIMIT) -> ScrapeFailed:
    with pytest.raises(ScrapeFailed) as caught:
        await scrape(gateway, url, max_bytes=max_bytes)
    return caught.value


@pytest.mark.slow
@pytest.mark.guarantee("G11")
@pytest.mark.parametrize("framing", ["", "&chunked=1"], ids=["length", "chunked"])
@pytest.mark.parametrize("coding", CODINGS)
async def test_every_body_in_every_coding(
    gateway: Gateway, server: GatewayServer, coding: str, framing: str
) -> None:
    for content_type, body in BODIES.values():
        encoded = urlsafe_b64encode(body).decode()
        url = server.target(
            f"x?body64={encoded}&type={quote(content_type)}&encoding={coding}{framing}"
        )
        got, type_ = await scrape(gateway, url)
        assert got == body
        # The script adds a charset to text that names none of its own.
        assert type_.startswith(content_type)


@pytest.mark.parametrize("coding", ["", "gzip", "br"])
@pytest.mark.parametrize("framing", ["", "&chunked=1"], ids=["length", "chunked"])
async def test_sizes_around_what_comes_in_one_piece(
    gateway: Gateway, server: GatewayServer, coding: str, framing: str
) -> None:
    for size in (SMALL - 1, SMALL, SMALL + 1, 3 * SMALL):
        url = server.target(f"x?size={size}&encoding={coding}{framing}")
        assert (await scrape(gateway, url))[0] == expected_body(url)


@pytest.mark.slow
@pytest.mark.parametrize("coding", ["", "gzip"])
async def test_twenty_megabytes(gateway: Gateway, server: GatewayServer, coding: str) -> None:
    url = server.target(f"x?size=20000000&encoding={coding}")
    request = ScrapeRequest(url, "key", timeout=60.0)
    async with gateway.scrape(request) as success:
        assert not isinstance(success.content, bytes)
        pieces = [piece async for piece in success.content]
    assert max(map(len, pieces)) <= SMALL
    assert b"".join(pieces) == expected_body(url)


@pytest.mark.guarantee("G11")
@pytest.mark.parametrize("coding", ["", "gzip", "br", "gzip,br"])
@pytest.mark.parametrize("framing", ["", "&chunked=1"], ids=["length", "chunked"])
@pytest.mark.parametrize("size", [1_000, SMALL * 2])
async def test_one_byte_over_the_bound(
    gateway: Gateway, server: GatewayServer, coding: str, framing: str, size: int
) -> None:
    url = server.target(f"x?size={size}&encoding={coding}{framing}")
    assert (await scrape(gateway, url, max_bytes=size))[0] == expected_body(url)
    failed = await failure(gateway, url, max_bytes=size - 1)
    assert (failed.problem.code, failed.problem.status) == ("result_too_large", 422)
    assert (failed.failure, failed.retryable) == (TaskFailure.BAD_TARGET, False)


@pytest.mark.guarantee("G11")
@pytest.mark.parametrize("coding", ["gzip", "deflate", "raw-deflate", "br", "gzip,gzip"])
@pytest.mark.parametrize("size", [1_000, SMALL * 2])
async def test_a_truncated_stream_is_retried(
    gateway: Gateway, server: GatewayServer, coding: str, size: int
) -> None:
    url = server.target(f"x?size={size}&encoding={coding}&truncate=1")
    failed = await failure(gateway, url)
    assert (failed.problem.code, failed.problem.status) == ("corrupt_body", 502)
    assert (failed.failure, failed.retryable) == (TaskFailure.GATEWAY_ERROR, True)


@pytest.mark.parametrize("script", ["short=1", "short=1&chunked=1", "reset=body", "reset=1"])
@pytest.mark.parametrize("coding", ["", "gzip"])
@pytest.mark.parametrize("size", [1_000, SMALL * 4])
async def test_a_body_that_breaks_off_is_retried(
    gateway: Gateway, server: GatewayServer, script: str, coding: str, size: int
) -> None:
    url = server.target(f"x?size={size}&encoding={coding}&{script}")
    failed = await failure(gateway, url)
    assert failed.problem.code in ("truncated_body", "connection_lost", "corrupt_body")
    assert (failed.failure, failed.retryable) == (TaskFailure.GATEWAY_ERROR, True)
    assert failed.burns_attempt


@pytest.mark.parametrize(
    ("encoding", "left"), [("exi", b"abc"), ("exi,gzip", b"abc"), ("gzip,exi", None)]
)
async def test_an_unknown_coding_and_what_lies_beneath_it_are_passed_through(
    gateway: Gateway, server: GatewayServer, encoding: str, left: bytes | None
) -> None:
    body, _ = await scrape(gateway, server.target(f"x?body=abc&encoding={encoding}"))
    assert body == (left if left is not None else gzip.compress(b"abc", 1, mtime=0))


async def test_a_fourth_coding_fails_for_good(gateway: Gateway, server: GatewayServer) -> None:
    failed = await failure(gateway, server.target("x?encoding=gzip,gzip,gzip,gzip"))
    assert (failed.problem.code, failed.retryable) == ("too_many_codings", False)


@pytest.mark.slow
async def test_a_body_left_unread_frees_its_connection(server: GatewayServer) -> None:
    gateway = DirectGateway(SystemClock(), allow_private=True, connections=1)
    url = server.target("x?size=20000000")
    for _ in range(3):
        async with gateway.scrape(ScrapeRequest(url, "key")) as success:
            assert not isinstance(success.content, bytes)
            assert await anext(success.content)
    assert await scrape(gateway, server.target("y")) == (
        expected_body(server.target("y")),
        "text/html; charset=utf-8",
    )
    await gateway.aclose()
