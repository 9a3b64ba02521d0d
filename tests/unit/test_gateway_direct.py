"""The direct gateway over real sockets: verdicts, redirects, headers, and what it refuses."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conveyor.domain.model import TaskBody, TaskFailure
from conveyor.gateway.decode import SMALL
from conveyor.gateway.direct import DirectGateway
from conveyor.gateway.fake import expected_body
from conveyor.ports.gateway import ScrapeFailed, ScrapeRequest
from conveyor.testing.clock import FakeClock
from conveyor.testing.gateway_server import GatewayServer
from tests.patient import SECONDS
from tests.unit.wire_server import Peer, answer, raw_server


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def server(anyio_backend: str) -> AsyncIterator[GatewayServer]:
    async with GatewayServer() as running:
        yield running


@pytest.fixture
async def gateway(anyio_backend: str) -> AsyncIterator[DirectGateway]:
    made = DirectGateway(FakeClock(), allow_private=True, retry_after_cap=100.0)
    yield made
    await made.aclose()


async def body_of(gateway: DirectGateway, request: ScrapeRequest) -> bytes:
    async with gateway.scrape(request) as success:
        assert isinstance(success.content, bytes)
        return success.content


async def failure(gateway: DirectGateway, url: str, **fields: object) -> ScrapeFailed:
    request = ScrapeRequest(url, "key", **fields)  # type: ignore[arg-type]
    with pytest.raises(ScrapeFailed) as caught:
        await body_of(gateway, request)
    return caught.value


async def echoed(gateway: DirectGateway, url: str, **fields: object) -> dict[str, Any]:
    told = json.loads(await body_of(gateway, ScrapeRequest(url, "key", **fields)))  # type: ignore[arg-type]
    assert isinstance(told, dict)
    return told


@pytest.mark.parametrize(
    ("status", "kind", "retryable"),
    [
        (400, TaskFailure.BAD_TARGET, False),
        (401, TaskFailure.BLOCKED, False),
        (402, TaskFailure.BAD_TARGET, False),
        (403, TaskFailure.BLOCKED, False),
        (404, TaskFailure.BAD_TARGET, False),
        (408, TaskFailure.TIMEOUT, True),
        (410, TaskFailure.BAD_TARGET, False),
        (418, TaskFailure.BAD_TARGET, False),
        (425, TaskFailure.GATEWAY_ERROR, True),
        (429, TaskFailure.RATE_LIMITED, True),
        (451, TaskFailure.BLOCKED, False),
        (500, TaskFailure.GATEWAY_ERROR, True),
        (503, TaskFailure.GATEWAY_ERROR, True),
        (504, TaskFailure.TIMEOUT, True),
        (599, TaskFailure.GATEWAY_ERROR, True),
        (304, TaskFailure.BAD_TARGET, False),
        (302, TaskFailure.BAD_TARGET, False),
    ],
)
async def test_the_verdict_on_each_status(
    gateway: DirectGateway,
    server: GatewayServer,
    status: int,
    kind: TaskFailure,
    retryable: bool,
) -> None:
    failed = await failure(gateway, server.target(f"x?status={status}&retry_after=7"))
    assert (failed.failure, failed.retryable, failed.problem.status) == (kind, retryable, status)
    if status in (429, 503):  # the host is left alone by others too, and taken up little by little
        assert 7.0 <= failed.retry_after < 8.0
    else:
        assert failed.retry_after == (7.0 if retryable else 0.0)
    assert failed.burns_attempt
    assert failed.account is None


async def test_retry_after_is_bounded(gateway: DirectGateway, server: GatewayServer) -> None:
    failed = await failure(gateway, server.target("x?status=504&retry_after=86400"))
    assert failed.retry_after == 100.0


@pytest.mark.parametrize("status", [200, 201, 203, 206, 299])
async def test_every_2xx_is_a_success(
    gateway: DirectGateway, server: GatewayServer, status: int
) -> None:
    url = server.target(f"x?status={status}")
    assert await body_of(gateway, ScrapeRequest(url, "key")) == expected_body(url)


async def test_no_content_is_an_empty_success(
    gateway: DirectGateway, server: GatewayServer
) -> None:
    request = ScrapeRequest(server.target("x?status=204"), "key")
    assert await body_of(gateway, request) == b""


async def test_allowed_status_codes_make_a_success(
    gateway: DirectGateway, server: GatewayServer
) -> None:
    params = {"allowed_status_codes": "500, 404"}
    request = ScrapeRequest(server.target("x?status=404&code=gone-for-good"), "key", params=params)
    assert b"gone-for-good" in await body_of(gateway, request)
    assert (await failure(gateway, server.target("x?status=410"), params=params)).problem.status


async def test_a_missing_content_type_is_octets(gateway: DirectGateway) -> None:
    async def answer(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.receive()
            await stream.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    async with anyio.create_task_group() as group:
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
        group.start_soon(listener.serve, answer)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        request = ScrapeRequest(f"http://127.0.0.1:{port}/", "key")
        async with gateway.scrape(request) as success:
            assert (success.content, success.content_type) == (b"ok", "application/octet-stream")
        group.cancel_scope.cancel()
    await listener.aclose()


@pytest.mark.parametrize(
    ("wire", "code"),
    [
        (b"", "connection_lost"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "malformed_answer"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 270_000 + b"\r\n\r\n", "malformed_answer"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 50_000 + b"\r\n", "malformed_answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", "connection_lost"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "malformed_answer"),
    ],
    ids=["nothing", "not HTTP", "long header", "many headers", "half a head", "bad chunk"],
)
async def test_an_answer_that_is_none_is_retried(
    gateway: DirectGateway, wire: bytes, code: str
) -> None:
    async def answer(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.receive()
            await stream.send(wire)

    async with anyio.create_task_group() as group:
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
        group.start_soon(listener.serve, answer)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        failed = await failure(gateway, f"http://127.0.0.1:{port}/", timeout=SECONDS)
        group.cancel_scope.cancel()
    await listener.aclose()
    assert (failed.problem.code, failed.retryable) == (code, True)
    assert failed.failure is TaskFailure.GATEWAY_ERROR


async def test_nobody_listening_is_retried(gateway: DirectGateway) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        failed = await failure(gateway, f"http://127.0.0.1:{unused.getsockname()[1]}/")
    assert (failed.problem.code, failed.retryable) == ("connection_failed", True)
    assert failed.failure is TaskFailure.GATEWAY_ERROR


async def test_a_name_that_does_not_exist_is_retried() -> None:
    async def lookup(host: str, port: int) -> list[str]:
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    gateway = DirectGateway(FakeClock(), lookup=lookup)
    failed = await failure(gateway, "http://nowhere.test/")
    assert (failed.problem.code, failed.retryable) == ("host_not_found", True)
    await gateway.aclose()


async def test_silence_is_a_timeout(gateway: DirectGateway, server: GatewayServer) -> None:
    failed = await failure(gateway, server.target("x?hang=1"), timeout=0.05)
    assert (failed.problem.code, failed.failure) == ("timeout", TaskFailure.TIMEOUT)
    assert failed.retryable


# Redirects


@pytest.mark.parametrize(
    ("status", "method", "body"),
    [
        (301, "GET", ""),
        (302, "GET", ""),
        (303, "GET", ""),
        (307, "POST", "a=1"),
        (308, "POST", "a=1"),
    ],
)
async def test_the_method_after_a_redirect(
    gateway: DirectGateway, server: GatewayServer, status: int, method: str, body: str
) -> None:
    there = quote(server.target("there?echo=1"), safe="")
    told = await echoed(
        gateway,
        server.target(f"here?status={status}&location={there}"),
        method="POST",
        body=TaskBody("a=1", "application/x-www-form-urlencoded"),
    )
    assert (told["method"], told["body"]) == (method, body)
    headers = told["headers"]
    assert ("content-type" in headers) == (method == "POST")


def chain(server: GatewayServer, length: int) -> str:
    url = server.target("end")
    for _ in range(length):
        url = server.target(f"hop?status=302&location={quote(url, safe='')}")
    return url


async def test_redirects_end_after_ten(gateway: DirectGateway, server: GatewayServer) -> None:
    # A chain in one URL grows with each hop's quoting: a loop shows the bound as well.
    end = expected_body(server.target("end"))
    assert await body_of(gateway, ScrapeRequest(chain(server, 4), "key")) == end
    before = server.hits.total
    failed = await failure(gateway, server.target("loop?status=302&location=%23"))
    assert (failed.problem.code, failed.failure) == (
        "too_many_redirects",
        TaskFailure.BAD_TARGET,
    )
    assert server.hits.total - before == 11


async def test_time_is_shared_by_all_hops(server: GatewayServer) -> None:
    clock = FakeClock()
    gateway = DirectGateway(clock, allow_private=True)
    there = quote(server.target("there"), safe="")
    request = ScrapeRequest(server.target(f"x?status=302&location={there}"), "key", timeout=5.0)
    calls = iter([0.0, 6.0])
    clock.monotonic = lambda: next(calls)  # type: ignore[method-assign]
    with pytest.raises(ScrapeFailed, match="timeout"):
        await body_of(gateway, request)
    await gateway.aclose()


@pytest.mark.parametrize("location", ["ftp://h.test/", "file:///etc/passwd", "javascript:1"])
async def test_a_redirect_to_another_scheme_is_refused(
    gateway: DirectGateway, server: GatewayServer, location: str
) -> None:
    url = server.target(f"x?status=302&location={quote(location, safe='')}")
    assert (await failure(gateway, url)).problem.code == "unsupported_scheme"


async def test_credentials_stay_with_their_origin(
    gateway: DirectGateway, server: GatewayServer
) -> None:
    params = {"custom_headers": '{"Cookie": "c=1", "X-Other": "o"}'}
    own = server.target("there?echo=1")
    start = server.target(f"x?status=307&location={quote(own, safe='')}")
    told = await echoed(gateway, start.replace("//", "//user:word@", 1), params=params)
    headers = told["headers"]
    assert headers["authorization"] == "Basic dXNlcjp3b3Jk"
    assert (headers["cookie"], headers["x-other"]) == ("c=1", "o")

    foreign = own.replace("127.0.0.1", "localhost")
    start = server.target(f"x?status=307&location={quote(foreign, safe='')}")
    told = await echoed(gateway, start.replace("//", "//user:word@", 1), params=params)
    headers = told["headers"]
    assert "authorization" not in headers
    assert "cookie" not in headers
    assert headers["x-other"] == "o"


# Headers


async def test_what_is_sent(gateway: DirectGateway, server: GatewayServer) -> None:
    told = await echoed(gateway, server.target("a/../b%2f?echo=1&q=ü |"))
    assert told["url"] == server.target("a/../b%2f?echo=1&q=%C3%BC%20|")
    headers = told["headers"]
    assert headers["accept-encoding"] == "gzip, deflate, br"
    assert headers["user-agent"].startswith("conveyor/")
    assert "cookie" not in headers


async def test_custom_headers_are_sent_but_for_those_of_the_connection(
    gateway: DirectGateway, server: GatewayServer
) -> None:
    given_ = {
        "user-agent": "mine",
        "X-Number": 5,
        "Host": "evil.test",
        "Content-Length": "999",
        "Transfer-Encoding": "chunked",
        "Connection": "close",
        "Accept-Encoding": "zstd",
    }
    told = await echoed(
        gateway, server.target("x?echo=1"), params={"custom_headers": json.dumps(given_)}
    )
    headers = told["headers"]
    assert (headers["user-agent"], headers["x-number"]) == ("mine", "5")
    assert headers["host"] == server.origin.removeprefix("http://")
    assert headers["accept-encoding"] == "gzip, deflate, br"
    assert not {"content-length", "transfer-encoding", "connection"} & set(headers)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"a": {}}', '{"a b": "c"}', '{"a": "b\\r\\nc: d"}', '{"a": "\\u0000"}']
)
async def test_headers_that_cannot_be_sent_fail_the_task(
    gateway: DirectGateway, server: GatewayServer, text: str
) -> None:
    failed = await failure(gateway, server.target("x"), params={"custom_headers": text})
    assert (failed.problem.code, failed.retryable) == ("invalid_param_value", False)
    assert server.hits.total == 0


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize(("size", "is_whole"), [(SMALL, True), (SMALL + 1, False)])
async def test_a_small_body_is_returned_whole_and_a_larger_one_in_pieces(
    gateway: DirectGateway, size: int, is_whole: bool, is_chunked: bool
) -> None:
    body = b"x" * size
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n"

    async def serve(peer: Peer) -> None:
        while await peer.request():
            await peer.send(chunked % (size, body) if is_chunked else answer(body))

    async with raw_server(serve) as server:
        request = ScrapeRequest(server.url(), "key", timeout=SECONDS)
        async with gateway.scrape(request) as success:
            content = success.content
            assert isinstance(content, bytes) is is_whole
            if not isinstance(content, bytes):
                content = b"".join([piece async for piece in content])
    assert content == body


async def test_a_redirect_whose_body_does_not_end_holds_no_place() -> None:
    async def serve(peer: Peer) -> None:
        """Promise more than comes, and lead on; answer the way there."""
        head = await peer.request()
        if " /from " in head:
            await peer.send(b"HTTP/1.1 302 Found\r\nLocation: /to\r\nContent-Length: 9\r\n\r\nx")
            assert not await peer.request()
        else:
            await peer.send(answer(b"arrived"))

    async with raw_server(serve) as server:
        gateway = DirectGateway(FakeClock(), allow_private=True, connections=1)
        request = ScrapeRequest(server.url("/from"), "key", timeout=SECONDS)
        assert await body_of(gateway, request) == b"arrived"
        await gateway.aclose()


async def test_a_cookie_that_was_set_is_not_sent_again(
    gateway: DirectGateway, server: GatewayServer
) -> None:
    there = quote(server.target("y?echo=1"), safe="")
    told = await echoed(gateway, server.target(f"x?status=302&location={there}"))
    assert "cookie" not in told["headers"]


async def test_no_secret_is_told(
    gateway: DirectGateway, server: GatewayServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    params = {"custom_headers": '{"Authorization": "Bearer s3cr3t-header"}'}
    for script in ("status=503", "reset=1", "short=1", "hang=1", "status=302&location=ftp:x"):
        url = server.target(f"x?{script}").replace("//", "//user:s3cr3t-word@", 1)
        failed = await failure(gateway, url, params=params, timeout=0.2)
        assert "s3cr3t" not in repr(failed.problem) + repr(failed) + repr(failed.__cause__)
        assert failed.__suppress_context__ or failed.__context__ is None
    assert "s3cr3t" not in caplog.text


async def test_no_proxy_is_taken_from_the_environment(
    gateway: DirectGateway, server: GatewayServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    url = server.target("x")
    assert await body_of(gateway, ScrapeRequest(url, "key")) == expected_body(url)


HOSTS = st.text(max_size=30) | st.sampled_from(["127.0.0.1:9", "a..b", "[::1]:9", "a" * 70])


@pytest.mark.slow
@given(
    url=st.text(max_size=60)
    | st.builds("http://{}/{}".format, HOSTS, st.text(max_size=30))
    | st.builds("http://127.0.0.1:9/{}".format, st.text(max_size=60))
)
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_no_url_raises_anything_but_a_verdict(url: str, anyio_backend: str) -> None:
    async def lookup(host: str, port: int) -> list[str]:
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    gateway = DirectGateway(FakeClock(), allow_private=True, lookup=lookup)
    with pytest.raises(ScrapeFailed):
        await body_of(gateway, ScrapeRequest(url, "key", timeout=2.0))
    await gateway.aclose()
