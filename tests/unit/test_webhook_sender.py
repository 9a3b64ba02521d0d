"""Posting events: where they may go, what of an answer counts, and what is never connected to."""

from __future__ import annotations

import asyncio
import math
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from ipaddress import ip_network
from itertools import cycle
from typing import Any

import pytest
import uvloop

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.gateway.headers import MAX_CONTENT_TYPE
from conveyor.gateway.webhook import MOST_ANSWER, WebhookRules, WebhookSender
from conveyor.testing.clock import FakeClock
from conveyor.wire.connection import HttpConnection
from conveyor.wire.resolver import Lookup
from tests.nasty.certificate import Certificate
from tests.unit.test_ssrf_matrix import LITERALS, RESOLVED, always
from tests.unit.wire_server import Peer, RawServer, Serve, raw_server
from tests.webhooks import loopback_webhooks

BODY = b'{"event_type":"webhook.test"}'
CODE = ErrorCode


@pytest.fixture(
    params=[
        pytest.param(("asyncio", {}), id="asyncio"),
        pytest.param(("asyncio", {"loop_factory": uvloop.new_event_loop}), id="uvloop"),
    ]
)
def anyio_backend(request: pytest.FixtureRequest) -> object:
    return request.param


def answering(head: str, rest: bytes = b"") -> Serve:
    """Answer each request so, and keep the connection."""

    async def serve(peer: Peer) -> None:
        while await peer.request():
            await peer.send(head.replace("\n", "\r\n").encode() + b"\r\n" + rest)

    return serve


@asynccontextmanager
async def posting(
    serve: Serve, lookup: Lookup | None = None
) -> AsyncIterator[tuple[WebhookSender, RawServer]]:
    clock = FakeClock()
    sender = loopback_webhooks(clock) if lookup is None else loopback_webhooks(clock, lookup)
    async with raw_server(serve) as server, aclosing(sender):
        yield sender, server


async def refusal(sender: WebhookSender, url: str) -> ErrorCode:
    with pytest.raises(ConveyorError) as caught:
        await sender.check_url(url)
    return caught.value.code


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ("HTTP/1.1 200 OK\nContent-Length: 0\n", (200, "")),
        ("HTTP/1.1 204 No Content\n", (204, "")),
        ("HTTP/1.1 404 Not Found\nContent-Length: 0\n", (404, "http_4xx:404")),
        ("HTTP/1.1 503 x\nContent-Length: 0\n", (503, "http_5xx:503")),
        ("HTTP/1.1 999 x\nContent-Length: 0\n", (999, "http_5xx:999")),
        ("HTTP/1.1 101 x\n", (None, "transport_error:malformed")),
        ("NOT HTTP\n", (None, "transport_error:malformed")),
    ],
)
async def test_the_status_of_an_answer_is_its_verdict(
    head: str, expected: tuple[int | None, str]
) -> None:
    async with posting(answering(head)) as (sender, server):
        answer = await sender.post_event(server.url("/hook"), headers={}, body=BODY)

    assert (answer.status, answer.error) == expected


@pytest.mark.parametrize(
    ("field", "kept"),
    [
        (b"", ""),
        (b"  text/plain; charset=utf-8 ", "text/plain; charset=utf-8"),
        (b"text/\xff\xfe", "text/??"),
        ("text/\u00e9".encode(), "text/?"),
        (b"a/" + b"b" * 60_000, "a/" + "b" * (MAX_CONTENT_TYPE - 2)),
    ],
)
async def test_the_content_type_of_an_answer_can_be_kept(field: bytes, kept: str) -> None:
    async def serve(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 x\r\nContent-Length: 0\r\nContent-Type: " + field)
        await peer.send(b"\r\n\r\n")

    async with posting(serve) as (sender, server):
        answer = await sender.post_event(server.url(), headers={}, body=BODY)

    assert (answer.status, answer.error, answer.content_type) == (200, "", kept)


async def test_an_at_sign_behind_the_host_names_no_user() -> None:
    sender = WebhookSender(FakeClock(), WebhookRules(), lookup=always("93.184.216.34"))

    for url in ("https://hooks.test/@team", "https://hooks.test?to=a@b", "https://hooks.test\\@x"):
        await sender.check_url(url)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_no_redirect_is_followed(status: int) -> None:
    head = f"HTTP/1.1 {status} x\nLocation: /elsewhere\nContent-Length: 0\n"
    async with posting(answering(head)) as (sender, server):
        answer = await sender.post_event(server.url("/hook"), headers={}, body=BODY)

    assert (answer.status, answer.error) == (status, f"http_3xx:{status}")
    assert len(server.all_requests) == 1


async def test_each_event_has_a_connection_of_its_own() -> None:
    head = "HTTP/1.1 200 OK\nContent-Type: text/plain\nContent-Length: 2\n"
    async with posting(answering(head, b"OK")) as (sender, server):
        for number in range(3):
            headers = {"X-Conveyor-Attempt": str(number)}
            answer = await sender.post_event(server.url("/hook?a=b"), headers=headers, body=BODY)

    assert (answer.content_type, answer.length) == ("text/plain", 2)
    assert [len(heads) for heads in server.requests] == [1, 1, 1]
    first = server.all_requests[0]
    assert first.startswith("POST /hook?a=b HTTP/1.1\r\n")
    assert "\r\nContent-Type: application/json\r\n" in first
    assert "\r\nUser-Agent: conveyor/" in first
    assert "\r\nX-Conveyor-Attempt: 0\r\n" in first


async def test_an_answer_that_never_ends_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    read = 0
    updated = HttpConnection.buffer_updated

    def counted(connection: HttpConnection, nbytes: int) -> None:
        nonlocal read
        read += nbytes
        updated(connection, nbytes)

    monkeypatch.setattr(HttpConnection, "buffer_updated", counted)

    async def serve(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            await peer.send(bytes(10_000))

    async with posting(serve) as (sender, server):
        answer = await sender.post_event(server.url(), headers={}, body=BODY)

    assert (answer.status, answer.error) == (200, "")
    assert 0 < read <= MOST_ANSWER


NOW = "Thu, 01 Jan 2026 00:0"


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ([], None),
        (["120"], 120),
        ([" 7 "], 7),
        (["1000000000"], 1_000_000_000),
        ([f"{NOW}2:00 GMT"], 120),
        (["Thursday, 01-Jan-26 00:02:00 GMT"], 120),
        (["Thu Jan  1 00:02:00 2026"], 120),
        # In the past: no sooner than without one.
        (["Wed, 31 Dec 2025 23:59:59 GMT"], None),
        (["0"], None),
        (["-5"], None),
        (["+5"], None),
        (["1.5"], None),
        (["1e3"], None),
        (["0x10"], None),
        (["٣"], None),
        (["soon"], None),
        ([""], None),
        (["120, 120"], None),
        (["120;"], None),
        (["inf"], None),
        (["nan"], None),
        (["Thu, 99 Foo 2026 00:00:00 GMT"], None),
        (["9" * 65], math.inf),
        (["9" * 100_000], math.inf),
        (["0" * 100_000 + "7"], 7),
        (["0" * 65], None),
        (["9" * 65 + "x"], None),
        (["120", "120"], None),
        (["120", "240"], None),
        ([f"{NOW}2:00 GMT", "120"], None),
    ],
)
async def test_a_retry_after_counts_if_it_is_the_only_one_and_can_be_read(
    fields: list[str], seconds: float | None
) -> None:
    told = "".join(f"\nRetry-After: {field}" for field in fields)
    head = f"HTTP/1.1 503 x\nContent-Length: 0{told}\n"
    async with posting(answering(head)) as (sender, server):
        answer = await sender.post_event(server.url("/hook"), headers={}, body=BODY)

    assert (answer.status, answer.retry_after) == (503, seconds)


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("https://HOOKS.test:8443/hook", "hooks.test"),
        ("https://[::1]/", "::1"),
        ("https://0x7f.1/", "127.0.0.1"),
        ("hooks.test", ""),
    ],
)
async def test_the_host_that_was_to_be_reached_is_told(url: str, host: str) -> None:
    sender = WebhookSender(FakeClock(), WebhookRules(), lookup=always())
    answer = await sender.post_event(url, headers={}, body=BODY)

    assert answer.error
    assert answer.host == host


async def test_a_receiver_that_hangs_up_is_no_delivery() -> None:
    async def serve(peer: Peer) -> None:
        await peer.request()

    async with posting(serve) as (sender, server):
        answer = await sender.post_event(server.url(), headers={}, body=BODY)

    assert (answer.status, answer.error) == (None, "transport_error:interrupted")


async def test_a_certificate_is_judged_by_the_name(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    certificate = Certificate(tmp_path_factory.mktemp("certificate"))
    context = certificate.server_context(("http/1.1",))
    rules = WebhookRules(loopback=True)
    trusting = WebhookSender(
        FakeClock(), rules, authority=certificate.authority, lookup=always("127.0.0.1")
    )
    strict = WebhookSender(FakeClock(), rules, lookup=always("127.0.0.1"))
    async with tls_server(context) as port, aclosing(trusting), aclosing(strict):
        good = f"https://localhost:{port}/"
        answers = [
            await trusting.post_event(good, headers={}, body=BODY),
            await trusting.post_event(f"https://other.test:{port}/", headers={}, body=BODY),
            await strict.post_event(good, headers={}, body=BODY),
        ]

    assert [answer.error for answer in answers] == ["", *["transport_error:tls"] * 2]


@asynccontextmanager
async def tls_server(context: ssl.SSLContext) -> AsyncIterator[int]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        await reader.read()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context) as server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("http://hooks.test/", CODE.CALLBACK_URL_MUST_BE_HTTPS),
        ("ftp://hooks.test/", CODE.CALLBACK_URL_MUST_BE_HTTPS),
        ("hooks.test", CODE.CALLBACK_URL_MUST_BE_HTTPS),
        ("https://", CODE.CALLBACK_URL_MUST_BE_HTTPS),
        ("https://user@hooks.test/", CODE.INVALID_ARGUMENT),
        ("https://:word@hooks.test/", CODE.INVALID_ARGUMENT),
        ("https://@hooks.test/", CODE.INVALID_ARGUMENT),
        ("https://:@hooks.test/", CODE.INVALID_ARGUMENT),
        ("https:\\\\@hooks.test/", CODE.INVALID_ARGUMENT),
        ("https://@hooks.test?a=b", CODE.INVALID_ARGUMENT),
        ("https://@@hooks.test/", CODE.INVALID_ARGUMENT),
        ("https://hooks.test/#part", CODE.INVALID_ARGUMENT),
        ("https://hooks.test/#", CODE.INVALID_ARGUMENT),
    ],
)
async def test_a_url_that_events_may_not_go_to(url: str, code: ErrorCode) -> None:
    sender = WebhookSender(FakeClock(), WebhookRules(), lookup=always("93.184.216.34"))

    assert await refusal(sender, url) is code
    answer = await sender.post_event(url, headers={}, body=BODY)
    assert answer.error == f"transport_error:{code.value}"
    await sender.check_url("https://hooks.test/?a=%23")


async def test_a_look_up_that_takes_longer_than_a_second_finds_nothing() -> None:
    """It is given up, and not left behind."""
    clock, asked, given_up = FakeClock(), asyncio.Event(), asyncio.Event()
    never = asyncio.Event()  # kept here, so that no collection of garbage ends the wait

    async def silent(host: str, port: int) -> list[str]:
        asked.set()
        try:
            await never.wait()
        except asyncio.CancelledError:
            given_up.set()
            raise
        return ["93.184.216.34"]

    sender = WebhookSender(clock, WebhookRules(), lookup=silent)
    checking = asyncio.ensure_future(refusal(sender, "https://hooks.test/"))
    await asked.wait()
    await clock.advance(0.9)
    assert not checking.done()
    await clock.advance(0.2)

    assert await checking is CODE.CALLBACK_URL_UNRESOLVABLE
    await asyncio.wait_for(given_up.wait(), 10)


async def test_a_host_without_addresses_is_unresolvable() -> None:
    async def unknown(host: str, port: int) -> list[str]:
        raise OSError("no such name")

    for lookup in (always(), unknown):
        sender = WebhookSender(FakeClock(), WebhookRules(), lookup=lookup)
        assert await refusal(sender, "https://hooks.test/") is CODE.CALLBACK_URL_UNRESOLVABLE


REFUSED = {CODE.CALLBACK_URL_UNRESOLVABLE, CODE.CALLBACK_URL_MUST_BE_HTTPS, CODE.INVALID_ARGUMENT}


@pytest.mark.guarantee("G17")
async def test_no_address_that_is_not_public_is_checked_or_posted_to() -> None:
    assert len(LITERALS) + len(RESOLVED) >= 60
    async with canary() as (port, connections):
        for host in LITERALS:
            sender = WebhookSender(FakeClock(), WebhookRules(), lookup=always("127.0.0.1"))
            url = f"https://{host}:{port}/"
            assert await refusal(sender, url) in REFUSED, url
            assert (await sender.post_event(url, headers={}, body=BODY)).error, url
        for address in RESOLVED:
            sender = WebhookSender(FakeClock(), WebhookRules(), lookup=always(address))
            url = f"https://hooks.test:{port}/"
            assert await refusal(sender, url) is CODE.CALLBACK_URL_UNRESOLVABLE, address
            answer = await sender.post_event(url, headers={}, body=BODY)
            assert answer.error == "transport_error:refused"
    assert connections == []


@pytest.mark.guarantee("G17")
@pytest.mark.parametrize(
    "answers",
    [
        [["127.0.0.1"]],
        [["2001:4860:4860::8888", "127.0.0.1"]],
        [["127.0.0.1", "2001:4860:4860::8888"]],
        [["::ffff:127.0.0.1"]],
        [["10.0.0.1"], ["127.0.0.1"], ["169.254.169.254"]],
    ],
)
async def test_a_resolver_that_changes_its_mind_reaches_nobody(answers: list[list[str]]) -> None:
    """Public when the URL is checked, and something else, or both, whenever an event is posted."""
    later = cycle(answers)
    now = ["93.184.216.34"]

    async def alternating(host: str, port: int) -> list[str]:
        return now

    sender = WebhookSender(FakeClock(), WebhookRules(), lookup=alternating)
    async with canary() as (port, connections):
        url = f"https://hooks.test:{port}/"
        await sender.check_url(url)
        for _ in range(200):
            now = next(later)
            answer = await sender.post_event(url, headers={}, body=BODY)
            assert answer.error == "transport_error:refused"
    assert connections == []


@asynccontextmanager
async def canary() -> AsyncIterator[tuple[int, list[object]]]:
    connections: list[object] = []

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer.get_extra_info("peername"))
        writer.close()

    async with await asyncio.start_server(hear, "0.0.0.0", 0) as server:
        yield server.sockets[0].getsockname()[1], connections


@pytest.mark.parametrize(
    ("rules", "host", "address", "admitted"),
    [
        (WebhookRules(), "hooks.test", "93.184.216.34", True),
        (WebhookRules(), "hooks.test", "10.1.2.3", False),
        (WebhookRules(names=frozenset({"hooks.test"})), "hooks.test", "10.1.2.3", True),
        (WebhookRules(names=frozenset({"hooks.test"})), "other.test", "10.1.2.3", False),
        (WebhookRules(names=frozenset({"hooks.test"})), "hooks.test", "127.0.0.1", False),
        (WebhookRules(names=frozenset({"hooks.test"})), "hooks.test", "169.254.169.254", False),
        (WebhookRules(networks=(ip_network("10.0.0.0/8"),)), "a.test", "10.1.2.3", True),
        (WebhookRules(networks=(ip_network("10.0.0.0/8"),)), "a.test", "::ffff:10.1.2.3", True),
        (WebhookRules(networks=(ip_network("10.0.0.0/8"),)), "a.test", "192.168.0.1", False),
        (WebhookRules(networks=(ip_network("0.0.0.0/0"),)), "a.test", "127.0.0.1", False),
        (WebhookRules(networks=(ip_network("0.0.0.0/0"),)), "a.test", "169.254.170.2", False),
        (WebhookRules(networks=(ip_network("0.0.0.0/0"),)), "a.test", "0.0.0.0", False),
        (WebhookRules(networks=(ip_network("::/0"),)), "a.test", "fd00:ec2::254", False),
        (WebhookRules(networks=(ip_network("::/0"),)), "a.test", "::1", False),
        (WebhookRules(networks=(ip_network("::/0"),)), "a.test", "fe80::1%lo", False),
        (WebhookRules(networks=(ip_network("::/0"),)), "a.test", "fd12::1", True),
        *(
            (WebhookRules(names=frozenset({"in.corp"})), "in.corp", address, False)
            for address in (
                *("64:ff9b::a9fe:a9fe", "64:ff9b::7f00:1", "::7f00:1", "2001:0:a9fe:a9fe::"),
                *("fd00:ec2::23", "fd20:ce::254", "100.100.100.200", "192.0.0.192"),
                *("255.255.255.255", "240.0.0.1", "2002:7f00:1::", "fd12::5efe:a9fe:a9fe"),
            )
        ),
        (WebhookRules(networks=(ip_network("fd00::/8"),)), "a.test", "fd00:ec2::23", False),
        (WebhookRules(networks=(ip_network("10.0.0.0/8"),)), "a.test", "64:ff9b::a00:1", True),
        (WebhookRules(loopback=True), "localhost", "127.0.0.1", True),
        (WebhookRules(loopback=True), "localhost", "::1", True),
        (WebhookRules(loopback=True), "a.test", "10.1.2.3", False),
        (WebhookRules(loopback=True), "a.test", "no address", False),
    ],
)
def test_the_rules(rules: WebhookRules, host: str, address: str, admitted: bool) -> None:
    assert rules.admits(host, address) is admitted


def test_a_machine_of_a_fleet_posts_nothing_to_itself() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no address but those of loopback")
        own = probe.getsockname()[0]
    listed = WebhookRules(networks=(ip_network(f"{own}/32"),))

    assert not listed.admits("a.test", own)


def never(_host: str, _port: int) -> Any:
    """A look-up that no test of reserved names may make."""
    raise AssertionError("looked up")


async def test_events_for_reserved_names_go_to_the_inbox_without_a_look_up() -> None:
    head = "HTTP/1.1 204 No Content\n"
    async with raw_server(answering(head)) as server:
        rules = WebhookRules(loopback=True, inbox=server.url("/_dev/inbox"))
        async with aclosing(WebhookSender(FakeClock(), rules, lookup=never)) as sender:
            for url in ("https://Hooks.Example.com/a?b=c", "http://x.test:81", "https://invalid."):
                await sender.check_url(url)
                answer = await sender.post_event(url, headers={}, body=BODY)
                assert (answer.status, answer.error) == (204, "")

    assert [line.split(" ")[1] for line in server.all_requests] == [
        "/_dev/inbox/hooks.example.com/a?b=c",
        "/_dev/inbox/x.test/",
        "/_dev/inbox/invalid/",
    ]


@pytest.mark.parametrize(
    ("host", "inbox", "names"),
    [
        ("notexample.com", "http://127.0.0.1/i", ()),
        ("example.com.evil.dev", "http://127.0.0.1/i", ()),
        ("mytest", "http://127.0.0.1/i", ()),
        ("hooks.example.com", "", ()),
        ("hooks.test", "http://127.0.0.1/i", ("hooks.test",)),
    ],
)
async def test_other_names_are_looked_up(host: str, inbox: str, names: tuple[str, ...]) -> None:
    asked = []

    async def none(name: str, _port: int) -> list[str]:
        asked.append(name)
        return []

    rules = WebhookRules(loopback=True, inbox=inbox, names=frozenset(names))
    sender = WebhookSender(FakeClock(), rules, lookup=none)

    assert await refusal(sender, f"https://{host}/") is CODE.CALLBACK_URL_UNRESOLVABLE
    assert asked == [host]


async def test_the_rules_on_urls_count_for_reserved_names_too() -> None:
    rules = WebhookRules(loopback=True, inbox="http://127.0.0.1/i")
    sender = WebhookSender(FakeClock(), rules, lookup=never)

    for url in ("ftp://example.com/", "https://u:p@example.com/", "https://example.com/#f"):
        with pytest.raises(ConveyorError):
            await sender.check_url(url)


async def test_the_time_of_an_attempt_counts_its_look_up() -> None:
    clock = FakeClock()

    async def slow(_host: str, _port: int) -> list[str]:
        await clock.advance(0.25)
        return []

    sender = WebhookSender(clock, WebhookRules(), lookup=slow)
    answer = await sender.post_event("https://hooks.example/x", headers={}, body=BODY)

    assert (answer.error, answer.milliseconds) == ("transport_error:unresolved", 250)
    await sender.aclose()
