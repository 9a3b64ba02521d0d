"""The fake gateway and the fake server: their scripts, and their records of calls."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from contextlib import suppress

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conveyor.domain.model import RunFailure, Spend, TaskFailure
from conveyor.gateway import open_gateway
from conveyor.gateway.fake import PLAIN, FakeGateway, Hit, expected_body, key_digest, read_script
from conveyor.ports.gateway import ScrapeFailed, ScrapeRequest, Success
from conveyor.testing.clock import FakeClock
from conveyor.testing.gateway_server import GatewayServer
from tests.patient import SECONDS

PAGE = "http://fake.test/page"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def gateway(clock: FakeClock) -> FakeGateway:
    return FakeGateway(clock)


async def scrape(gateway: FakeGateway, url: str, **fields: object) -> Success:
    async with gateway.scrape(ScrapeRequest(url, "key", **fields)) as success:  # type: ignore[arg-type]
        return success


async def failure(gateway: FakeGateway, url: str, **fields: object) -> ScrapeFailed:
    with pytest.raises(ScrapeFailed) as caught:
        await scrape(gateway, url, **fields)
    return caught.value


async def test_a_plain_url_is_a_page_that_names_it(gateway: FakeGateway) -> None:
    success = await scrape(gateway, PAGE)
    assert success.content == expected_body(PAGE)
    assert PAGE.encode() in expected_body(PAGE)
    assert success.content_type == "text/html; charset=utf-8"
    assert success.spend == Spend()


@pytest.mark.parametrize(
    ("query", "body"),
    [
        ("size=0", b""),
        ("body=", b""),
        ("body=abc", b"abc"),
        ("body=%E6%97%A5&charset=shift_jis", "日".encode("shift_jis")),
        ("body64=AP8", b"\x00\xff"),
    ],
)
async def test_bodies(gateway: FakeGateway, query: str, body: bytes) -> None:
    assert (await scrape(gateway, f"{PAGE}?{query}")).content == body
    assert expected_body(f"{PAGE}?{query}") == body


def test_a_sized_body_depends_on_the_url_alone() -> None:
    one, two = expected_body(f"{PAGE}?size=4096"), expected_body(f"{PAGE}?size=4096&x")
    assert len(one) == len(two) == 4096
    assert one != two
    assert one == expected_body(f"{PAGE}?size=4096")


async def test_the_charset_is_told_and_used(gateway: FakeGateway) -> None:
    success = await scrape(gateway, f"{PAGE}?charset=windows-1251")
    assert success.content_type == "text/html; charset=windows-1251"
    assert isinstance(success.content, bytes)
    assert "Привет" in success.content.decode("windows-1251")


async def test_flaky_fails_so_often_a_url(gateway: FakeGateway) -> None:
    url = f"{PAGE}?flaky=2"
    for _ in range(2):
        failed = await failure(gateway, url)
        assert (failed.problem.status, failed.retryable) == (503, True)
    assert (await scrape(gateway, url)).content == expected_body(url)
    assert (await failure(gateway, f"{url}&other")).retryable
    assert gateway.hits.counts == {url: 3, f"{url}&other": 1}


async def test_verdicts_are_those_of_an_api(gateway: FakeGateway) -> None:
    limited = await failure(gateway, f"{PAGE}?status=429&retry_after=9")
    assert (limited.retryable, limited.burns_attempt, limited.retry_after) == (True, False, 9.0)
    refused = await failure(gateway, f"{PAGE}?account=api_key_cap_reached")
    assert refused.account is RunFailure.API_KEY_CAP_REACHED
    missing = await failure(gateway, f"{PAGE}?status=404&cost=2")
    assert (missing.failure, missing.spend) == (TaskFailure.BAD_TARGET, Spend(2, 2.0))


@pytest.mark.parametrize("script", ["truncate=1&encoding=gzip", "short=1", "reset=1", "reset=body"])
async def test_what_breaks_is_retried(gateway: FakeGateway, script: str) -> None:
    failed = await failure(gateway, f"{PAGE}?{script}")
    assert (failed.failure, failed.retryable) == (TaskFailure.GATEWAY_ERROR, True)


async def test_a_delay_passes_on_the_clock(gateway: FakeGateway, clock: FakeClock) -> None:
    begun = clock.monotonic()
    call = asyncio.create_task(scrape(gateway, f"{PAGE}?delay=3"))
    await clock.advance(2.9)
    assert not call.done()
    assert gateway.hits.in_flight == 1
    await clock.advance(0.2)
    assert (await call).content
    assert clock.monotonic() - begun == pytest.approx(3.1)


@pytest.mark.parametrize("script", ["hang=1", "delay=181"])
async def test_no_answer_is_a_timeout(gateway: FakeGateway, clock: FakeClock, script: str) -> None:
    call = asyncio.create_task(failure(gateway, f"{PAGE}?{script}", timeout=180.0))
    await clock.advance(179.0)
    assert not call.done()
    await clock.advance(2.0)
    assert (await call).failure is TaskFailure.TIMEOUT
    assert gateway.hits.in_flight == 0


async def test_calls_in_flight_are_counted(gateway: FakeGateway, clock: FakeClock) -> None:
    async with gateway.scrape(ScrapeRequest(PAGE, "key")):
        assert gateway.hits.in_flight == 1
        async with gateway.scrape(ScrapeRequest(PAGE, "key")):
            assert gateway.hits.in_flight == 2
    await failure(gateway, f"{PAGE}?status=500")
    call = asyncio.create_task(scrape(gateway, f"{PAGE}?delay=3"))
    await clock.advance(1.0)
    call.cancel()
    with suppress(asyncio.CancelledError):
        await call
    assert (gateway.hits.in_flight, gateway.hits.peak_in_flight) == (0, 2)
    assert gateway.hits.total == 4


async def test_calls_are_remembered_without_keys_and_within_bounds() -> None:
    gateway = FakeGateway(FakeClock(), hit_limit=3)
    params = {"custom_headers": '{"X-A": "secret"}'}
    for index in range(5):
        await scrape(gateway, f"{PAGE}/{index}", method="POST", params=params)
    assert gateway.hits.counts == {f"{PAGE}/{index}": 1 for index in range(3)}
    assert list(gateway.hits.calls) == [
        Hit(f"{PAGE}/{index}", "POST", ("X-A",), key_digest("key")) for index in (2, 3, 4)
    ]
    assert gateway.hits.total == 5
    gateway.hits.clear()
    assert (gateway.hits.counts, gateway.hits.total) == ({}, 0)


async def test_the_fake_gateway_of_a_server_holds_only_what_answers_depend_on() -> None:
    gateway = open_gateway(
        "fake", FakeClock(), allow_private=False, connections=1, retry_after_cap=1.0
    )
    assert isinstance(gateway, FakeGateway)
    flaky = f"{PAGE}?flaky=1"
    for index in range(5):
        await scrape(gateway, f"{PAGE}/{index}")
    await failure(gateway, flaky)
    await scrape(gateway, flaky)
    assert (gateway.hits.total, gateway.hits.peak_in_flight) == (7, 1)
    assert (gateway.hits.counts, list(gateway.hits.calls)) == ({flaky: 2}, [])


async def test_the_bound_holds_for_a_plain_page(gateway: FakeGateway) -> None:
    size = len(expected_body(PAGE))
    assert (await scrape(gateway, PAGE, max_bytes=size)).content
    assert (await failure(gateway, PAGE, max_bytes=size - 1)).problem.code == "result_too_large"


async def test_echo_tells_the_request(gateway: FakeGateway) -> None:
    success = await scrape(gateway, f"{PAGE}?echo=1", params={"wait": "5"})
    assert isinstance(success.content, bytes)
    told = json.loads(success.content)
    assert (told["method"], told["params"]) == ("GET", {"wait": "5"})
    assert "key" not in success.content.decode().replace('"key"', "")


@pytest.mark.parametrize(
    "query", ["", "unknown=1", "status=abc", "status=99", "size=-1", "delay=nan"]
)
def test_words_and_numbers_that_mean_nothing_are_ignored(query: str) -> None:
    assert read_script(f"{PAGE}?{query}") == PLAIN


@pytest.mark.slow
@given(st.text(max_size=100) | st.text(max_size=100).map("http://h/?".__add__))
async def test_no_text_breaks_the_fake(url: str) -> None:
    gateway = FakeGateway(FakeClock())
    with suppress(ScrapeFailed):
        async with gateway.scrape(ScrapeRequest(url, "key", timeout=0.0)) as success:
            assert success.content == expected_body(url)
    assert gateway.hits.total == 1


async def test_the_server_tells_and_forgets_its_hits() -> None:
    async with GatewayServer() as server, httpx.AsyncClient(timeout=SECONDS) as client:
        target = server.target("x?status=404")
        assert (await client.get(target)).status_code == 404
        answer = await client.get(server.url, params={"url": PAGE, "apikey": "key"})
        assert answer.content == expected_body(PAGE)
        assert (await client.get(server.url, params={"url": PAGE})).status_code == 401
        assert (await client.get(server.url, params={"apikey": "key"})).status_code == 400
        told = (await client.delete(f"{server.origin}/hits")).json()
        assert told["counts"] == {target: 1, PAGE: 1}
        assert (await client.get(f"{server.origin}/hits")).json()["total"] == 0


@pytest.mark.slow
@pytest.mark.server
async def test_the_server_is_a_program() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "conveyor.testing.gateway_server",
        "--port",
        "0",
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        line = json.loads(await asyncio.wait_for(process.stdout.readline(), 20))
        async with httpx.AsyncClient(timeout=SECONDS) as client:
            answer = await client.get(line["url"], params={"url": PAGE, "apikey": "key"})
        assert answer.content == expected_body(PAGE)
    finally:
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 20) == 0
