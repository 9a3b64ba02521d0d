"""The HTTP gateway against a ZenRows-compatible endpoint: its requests, and its verdict on every
answer."""

from __future__ import annotations

import json
import logging
from base64 import b64encode, urlsafe_b64encode
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import quote, quote_plus, urlencode

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from conveyor.domain.model import Problem, RunFailure, Spend, TaskBody, TaskFailure
from conveyor.domain.text_rules import MASK
from conveyor.gateway import open_gateway
from conveyor.gateway.direct import DirectGateway
from conveyor.gateway.fake import FakeGateway, expected_body
from conveyor.gateway.http import HttpGateway
from conveyor.gateway.refusals import read_spend, redactor, refusal
from conveyor.ports.gateway import ScrapeFailed, ScrapeRequest, Success
from conveyor.testing.clock import FakeClock
from conveyor.testing.gateway_server import GatewayServer

KEY = "k3y/with+odd chars&ü"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def server(anyio_backend: str) -> AsyncIterator[GatewayServer]:
    async with GatewayServer() as running:
        yield running


@pytest.fixture
async def gateway(server: GatewayServer) -> AsyncIterator[HttpGateway]:
    made = HttpGateway(server.url, FakeClock(), retry_after_cap=100.0)
    yield made
    await made.aclose()


def ask(**fields: object) -> str:
    return "http://any.test/page?" + urlencode(fields)


async def success(gateway: HttpGateway, url: str, **fields: object) -> Success:
    async with gateway.scrape(ScrapeRequest(url, KEY, **fields)) as given_:  # type: ignore[arg-type]
        return given_


async def failure(gateway: HttpGateway, url: str, **fields: object) -> ScrapeFailed:
    with pytest.raises(ScrapeFailed) as caught:
        await success(gateway, url, **fields)
    return caught.value


async def echoed(gateway: HttpGateway, url: str, **fields: object) -> dict[str, Any]:
    content = (await success(gateway, url, **fields)).content
    assert isinstance(content, bytes)
    told = json.loads(content)
    assert isinstance(told, dict)
    return told


# What is sent


@pytest.mark.guarantee("G12")
@pytest.mark.parametrize(
    "url", ["http://any.test/?a=b&c=d#e", "http://ü.test/ä b?%zz=%2F+", "http://u:p@h.test/\\"]
)
async def test_the_url_arrives_exactly_as_given(
    gateway: HttpGateway, server: GatewayServer, url: str
) -> None:
    await success(gateway, url)
    assert server.hits.counts == {url: 1}
    assert (await success(gateway, url)).content == expected_body(url)


async def test_params_go_as_query_and_custom_headers_as_headers(gateway: HttpGateway) -> None:
    params = {
        "js_render": "true",
        "css_extractor": '{"a": "b & c"}',
        "custom_headers": '{"X-One": "1", "Cookie": "c=1", "Host": "evil.test"}',
    }
    told = await echoed(gateway, ask(echo=1), params=params)
    assert told["method"] == "GET"
    assert told["params"] == {
        "js_render": "true",
        "css_extractor": '{"a": "b & c"}',
        "custom_headers": "true",
    }
    headers = told["headers"]
    assert (headers["x-one"], headers["cookie"]) == ("1", "c=1")
    assert headers["host"] != "evil.test"
    assert "user-agent" not in headers, "it would be passed on to the target"


async def test_without_custom_headers_nothing_is_passed_on(gateway: HttpGateway) -> None:
    told = await echoed(gateway, ask(echo=1))
    assert told["params"] == {}
    assert told["headers"]["user-agent"].startswith("conveyor/")


async def test_params_cannot_stand_in_for_url_and_key(gateway: HttpGateway) -> None:
    told = await echoed(gateway, ask(echo=1), params={"url": "http://x.test", "apikey": "other"})
    assert (told["url"], told["params"]) == (ask(echo=1), {})


async def test_a_body_and_its_type_are_forwarded(gateway: HttpGateway) -> None:
    body = TaskBody('{"a": "ü"}', "application/json")
    told = await echoed(gateway, ask(echo=1), method="POST", body=body)
    assert (told["method"], told["body"]) == ("POST", '{"a": "ü"}')
    assert told["headers"]["content-type"] == "application/json"


async def test_the_base_url_may_have_a_query_and_credentials(server: GatewayServer) -> None:
    base = server.url.replace("//", "//user:word@", 1) + "?premium_proxy=true"
    gateway = HttpGateway(base, FakeClock())
    params = {"custom_headers": '{"Authorization": "mine"}'}
    told = await echoed(gateway, ask(echo=1), params=params)
    assert told["params"] == {"premium_proxy": "true", "custom_headers": "true"}
    assert told["headers"]["authorization"] == "Basic dXNlcjp3b3Jk"
    await gateway.aclose()


async def test_only_a_digest_of_the_key_is_kept(
    gateway: HttpGateway, server: GatewayServer
) -> None:
    await success(gateway, "http://any.test/")
    assert KEY not in repr(list(server.hits.calls))
    assert len({hit.key_digest for hit in server.hits.calls}) == 1


# Verdicts

ORDINARY = [
    (400, "REQS004", TaskFailure.OTHER, False),
    (401, "AUTH002", TaskFailure.AUTH_FAILED, False),
    (401, "unauthenticated", TaskFailure.AUTH_FAILED, False),
    (402, "AUTH010", TaskFailure.AUTH_FAILED, False),
    (403, "AUTH012", TaskFailure.AUTH_FAILED, False),
    (403, "permission_denied", TaskFailure.AUTH_FAILED, False),
    (403, "BLK0001", TaskFailure.BLOCKED, False),
    (403, "", TaskFailure.BLOCKED, False),
    (403, "REQS007", TaskFailure.OTHER, False),
    (404, "RESP002", TaskFailure.BAD_TARGET, False),
    (405, "", TaskFailure.OTHER, False),
    (408, "", TaskFailure.TIMEOUT, True),
    (410, "", TaskFailure.BAD_TARGET, False),
    (413, "RESP003", TaskFailure.BAD_TARGET, False),
    (422, "RESP001", TaskFailure.BLOCKED, False),
    (422, "RESP007", TaskFailure.BAD_TARGET, False),
    (422, "", TaskFailure.OTHER, False),
    (425, "", TaskFailure.GATEWAY_ERROR, True),
    (429, "AUTH006", TaskFailure.RATE_LIMITED, True),
    (500, "", TaskFailure.GATEWAY_ERROR, True),
    (503, "", TaskFailure.GATEWAY_ERROR, True),
    (504, "CTX0002", TaskFailure.TIMEOUT, True),
    (302, "", TaskFailure.OTHER, False),
]


@pytest.mark.parametrize(("status", "code", "kind", "retryable"), ORDINARY)
async def test_the_verdict_on_each_answer(
    gateway: HttpGateway, status: int, code: str, kind: TaskFailure, retryable: bool
) -> None:
    failed = await failure(gateway, ask(status=status, code=code, retry_after=7, cost="0.5"))
    assert (failed.failure, failed.retryable) == (kind, retryable)
    assert failed.problem.status == status
    assert failed.problem.code == (code or f"fake_{status}")
    assert failed.retry_after == (7.0 if retryable else 0.0)
    assert failed.burns_attempt == (status != 429)
    assert failed.spend == Spend(1, 0.5)
    assert failed.account is None


@pytest.mark.parametrize(
    ("code", "account"),
    [
        ("insufficient_credits", RunFailure.INSUFFICIENT_CREDITS),
        ("payment_required", RunFailure.INSUFFICIENT_CREDITS),
        ("AUTH004", RunFailure.INSUFFICIENT_CREDITS),
        ("api_key_cap_reached", RunFailure.API_KEY_CAP_REACHED),
        ("subscription_inactive", RunFailure.SUBSCRIPTION_INACTIVE),
    ],
)
async def test_a_402_is_an_account_refusal(
    gateway: HttpGateway, code: str, account: RunFailure
) -> None:
    failed = await failure(gateway, ask(account=code))
    assert (failed.account, failed.retryable) == (account, False)
    assert (failed.problem.code, failed.problem.status) == (code, 402)


def verdict(status: int, document: bytes = b"") -> ScrapeFailed:
    return refusal(status, document, redact=redactor(KEY))


def test_a_401_is_an_account_refusal_only_for_the_subscription() -> None:
    inactive = verdict(401, b'{"code": "subscription_inactive"}')
    assert inactive.account is RunFailure.SUBSCRIPTION_INACTIVE
    assert verdict(401, b'{"code": "insufficient_credits"}').account is None
    assert verdict(401).account is None
    assert verdict(403, b'{"code": "subscription_inactive"}').account is None


@pytest.mark.parametrize(
    "document",
    [b"", b"<html>", b"[]", b'"text"', b"null", b"{", b'{"title": {}}', b"\xff", b"[" * 50_000],
)
def test_an_answer_that_is_no_problem_document_gets_one(document: bytes) -> None:
    failed = verdict(503, document)
    assert failed.problem == Problem("gateway_error", "Service Unavailable", 503)


def test_a_bare_402_names_its_account_failure() -> None:
    assert verdict(402).problem.code == "insufficient_credits"


def test_a_problem_is_stored_as_given_within_bounds() -> None:
    given_ = {
        "type": "https://docs.test/x",
        "code": "RESP001",
        "title": "t" * 300,
        "status": 418,
        "detail": "d" * 900,
        "instance": "/i" * 900,
        "extra": [1],
    }
    problem = verdict(422, json.dumps(given_).encode()).problem
    assert (problem.type, problem.code, problem.status) == ("https://docs.test/x", "RESP001", 418)
    assert problem.title == "t" * 200
    assert problem.detail is not None
    assert (len(problem.detail), problem.instance) == (500, "/i" * 250)
    assert verdict(422, b'{"status": 99999, "code": 7}').problem.status == 422
    assert verdict(422, b'{"status": 99999, "code": 7}').problem.code == "7"


@pytest.mark.parametrize(
    ("text", "spend"),
    [
        ("", Spend()),
        ("0", Spend()),
        ("-1", Spend()),
        ("nan", Spend()),
        ("inf", Spend()),
        ("free", Spend()),
        ("0.001", Spend(1, 0.001)),
        ("1", Spend(1, 1.0)),
        ("2.5", Spend(3, 2.5)),
        ("25", Spend(25, 25.0)),
        ("1e99", Spend()),
        ("1_0", Spend()),
        ("1e3", Spend()),
        (" 1", Spend()),
    ],
)
def test_reading_the_cost(text: str, spend: Spend) -> None:
    assert read_spend(text) == spend


@pytest.mark.parametrize(
    ("cost", "credits", "spend"),
    [
        ("0.0028", "25", Spend(25, 0.0028)),
        ("", "25", Spend(25, 0.0)),
        ("0.5", "0", Spend(0, 0.5)),
        ("2.5", "1.2", Spend(2, 2.5)),
        ("2.5", "many", Spend(3, 2.5)),
        ("2.5", "-1", Spend(3, 2.5)),
        ("nan", "1e99", Spend()),
    ],
)
def test_reading_the_credits(cost: str, credits: str, spend: Spend) -> None:
    assert read_spend(cost, credits) == spend


async def test_credits_are_counted_as_given_with_a_page_and_an_error(gateway: HttpGateway) -> None:
    page = await success(gateway, ask(cost="0.0028", credits=25))
    failed = await failure(gateway, ask(status=422, cost="0.0028", credits=5))
    allowed = {"allowed_status_codes": "404"}
    listed = await success(gateway, ask(status=404, credits=1), params=allowed)

    assert (page.spend, failed.spend) == (Spend(25, 0.0028), Spend(5, 0.0028))
    assert listed.spend == Spend(1, 0.0)


async def test_the_response_type_html_is_not_passed_on(gateway: HttpGateway) -> None:
    asked = {"response_type": "HTML", "wait": "5"}
    plain = await echoed(gateway, ask(echo=1), params=asked)
    other = await echoed(gateway, ask(echo=1), params={"response_type": "pdf"})

    assert plain["params"] == {"wait": "5"}
    assert other["params"] == {"response_type": "pdf"}


async def test_a_success_has_its_spend_and_type(gateway: HttpGateway) -> None:
    given_ = await success(gateway, ask(cost="0.25", type="application/json"))
    assert (given_.spend, given_.content_type) == (Spend(1, 0.25), "application/json")


async def test_a_charged_body_over_the_bound_keeps_its_spend(gateway: HttpGateway) -> None:
    failed = await failure(gateway, ask(cost=5, size=1_000), max_bytes=999)
    assert (failed.problem.code, failed.spend) == ("result_too_large", Spend(5, 5.0))


async def test_an_allowed_status_counts_only_as_charged_content(gateway: HttpGateway) -> None:
    params = {"allowed_status_codes": "500,404"}
    url = ask(status=404, cost=1)
    allowed = await success(gateway, url, params=params)
    assert (allowed.content, allowed.spend) == (expected_body(url), Spend(1, 1.0))
    assert (await failure(gateway, ask(status=404), params=params)).problem.status == 404
    assert (await failure(gateway, ask(status=410, cost=1), params=params)).problem.status == 410


async def test_nobody_answers(server: GatewayServer) -> None:
    gateway = HttpGateway("http://127.0.0.1:1/", FakeClock())
    failed = await failure(gateway, "http://any.test/")
    assert (failed.problem.code, failed.retryable) == ("gateway_unreachable", True)
    await gateway.aclose()


async def test_silence_is_a_timeout(gateway: HttpGateway) -> None:
    failed = await failure(gateway, ask(hang=1), timeout=0.05)
    assert (failed.failure, failed.retryable) == (TaskFailure.TIMEOUT, True)


async def test_flaky_recovers(gateway: HttpGateway) -> None:
    url = ask(flaky=2)
    assert [(await failure(gateway, url)).problem.status for _ in range(2)] == [503, 503]
    assert (await success(gateway, url)).content == expected_body(url)


# Secrets


@pytest.mark.parametrize(
    "spelling",
    [
        KEY,
        quote(KEY),
        quote(KEY, safe=""),
        quote_plus(KEY),
        quote(KEY, safe="").lower(),
        "".join(f"%{byte:02X}" for byte in KEY.encode()),
        "word",
        "Bearer tok",
    ],
)
async def test_secrets_are_struck_from_a_problem(
    gateway: HttpGateway, caplog: pytest.LogCaptureFixture, spelling: str
) -> None:
    caplog.set_level(logging.DEBUG)
    url = ask(status=400, detail=f"<{spelling}>", code=f"c-{spelling}")
    url = url.replace("//", "//user:word@", 1)
    params = {"custom_headers": '{"Authorization": "Bearer tok"}'}
    failed = await failure(gateway, url, params=params)
    assert failed.problem.detail == f"<{MASK}>"
    assert failed.problem.code == f"c-{MASK}"
    assert failed.__suppress_context__ or failed.__context__ is None
    assert KEY not in caplog.text
    assert quote(KEY, safe="") not in caplog.text


async def test_credentials_in_any_url_are_struck() -> None:
    assert redactor("")("see http://me:secret@h.test/x") == f"see http://{MASK}@h.test/x"
    assert redactor("")("see http://me:se@cret@h.test/x") == f"see http://{MASK}@h.test/x"
    assert redactor("")("a@b.test //x/y@z") == "a@b.test //x/y@z"


@pytest.mark.guarantee("G16")
@given(key=st.text(min_size=1, max_size=20), around=st.text(max_size=20))
@example(key="\\", around="")
def test_no_key_survives(key: str, around: str) -> None:
    for spelling in (key, quote(key.encode("utf-8", "replace"), safe="")):
        struck = redactor(key)(f"{around}{spelling}{around}")
        assert spelling not in struck.replace(MASK, "\n") or spelling in "\n" + around


@pytest.mark.slow
@given(
    url=st.text(max_size=80),
    key=st.text(max_size=20),
    params=st.dictionaries(st.text(max_size=10), st.text(max_size=20), max_size=3),
)
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_no_text_raises_anything_but_a_verdict(
    anyio_backend: str, url: str, key: str, params: dict[str, str]
) -> None:
    gateway = HttpGateway("http://127.0.0.1:1/", FakeClock())
    with pytest.raises(ScrapeFailed):
        async with gateway.scrape(ScrapeRequest(url, key, params=params, timeout=2.0)):
            pass
    await gateway.aclose()


@pytest.mark.parametrize(
    ("kind", "made"),
    [("fake", FakeGateway), ("direct", DirectGateway), ("https://api.test/v1", HttpGateway)],
)
async def test_a_gateway_is_opened_by_its_setting(kind: str, made: type[object]) -> None:
    gateway = open_gateway(
        kind, FakeClock(), allow_private=False, connections=5, retry_after_cap=10.0
    )
    assert isinstance(gateway, made)
    await gateway.aclose()


@pytest.mark.parametrize("before", [b"", b"a", b"ab", b"abc"])
@pytest.mark.parametrize("pack", [b64encode, urlsafe_b64encode, bytes.hex])
def test_a_packed_key_is_masked_before_the_detail_is_cut(
    before: bytes, pack: Callable[[bytes], str | bytes]
) -> None:
    key = "k\u00ff\u00fe?>~-5f0c9a77e1d24b"
    spelt = pack(before + key.encode())
    packed = spelt if isinstance(spelt, str) else spelt.decode()
    document = json.dumps({"detail": "x" * 480 + " " + packed}).encode()
    detail = refusal(422, document, redact=redactor(key)).problem.detail
    assert detail is not None
    assert detail.startswith("x" * 480)
    assert MASK in detail
    assert packed[8:14] not in detail
