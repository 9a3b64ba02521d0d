"""Answers to the scrapes of a test's own URLs, and what a test sees of the calls."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.testing.local_server import ConveyorServer
from tests.patient import SECONDS

pytestmark = [pytest.mark.slow]
SECRET = "Bearer one-two-three-four"
KEY = "key-of-this-test-5678"


@pytest.fixture
def server(emptied_server: ConveyorServer) -> ConveyorServer:
    return emptied_server


def work(server: ConveyorServer, *urls: str, **fields: Any) -> list[Any]:
    """Work a job; return its results."""
    headers = {"X-API-Key": KEY}
    body = {"tasks": [{"url": url} for url in urls], **fields}
    with httpx.Client(base_url=server.base_url, headers=headers, timeout=SECONDS) as client:
        made = client.post("/jobs", json=body)
        assert made.status_code == 201, made.text
        server.drain(timeout=60)
        rows: list[Any] = client.get(f"/jobs/{made.json()['job_id']}/results").json()["results"]
    return rows


def body_of(row: Any) -> bytes:
    return httpx.get(row["result_url"], timeout=SECONDS).content


def test_answers_come_in_their_order_and_the_last_stays(server: ConveyorServer) -> None:
    pages = server.when("https://shop.example/p/*", method="GET")
    pages.respond(status=503, times=2).then(body="<p>€ 9</p>")
    first, second = (work(server, "https://shop.example/p/1")[0] for _ in range(2))
    assert body_of(first) == body_of(second) == "<p>€ 9</p>".encode()
    assert pages.call_count == server.hits.total == 4
    server.assert_all_called()


def test_the_first_rule_that_fits_answers_and_the_default_the_rest(server: ConveyorServer) -> None:
    server.when("https://shop.example/p/1").respond(body=b"\x00one")
    server.gateway.otherwise(status=404)
    server.when("https://shop.example/*").respond(json={"page": 2})
    one, two, other = work(
        server, "https://shop.example/p/1", "https://shop.example/p/2", "https://other.example/"
    )
    assert (body_of(one), body_of(two)) == (b"\x00one", b'{"page": 2}')
    assert other["error"]["status"] == 404


def test_a_rule_made_later_leaves_the_others_where_they_are(server: ConveyorServer) -> None:
    server.when("https://a.example/*").respond(body="first").then(body="second")
    [row] = work(server, "https://a.example/1")
    assert body_of(row) == b"first"
    server.when("https://b.example/*").respond(body="other")
    [row] = work(server, "https://a.example/1")
    assert body_of(row) == b"second"
    with pytest.raises(AssertionError, match=r"no call came for https://b.example/\*"):
        server.assert_all_called()


def test_calls_show_what_the_application_asked_for(server: ConveyorServer) -> None:
    server.when("https://shop.example/*").respond(body="ok")
    params = {
        "js_render": True,
        "custom_headers": {"Accept-Language": "de", "Authorization": SECRET},
    }
    url = "https://shop.example/p?page=2"
    [row] = work(server, url, zenrows_params=params)
    assert row["status"] == "successful", row
    [call] = server.calls
    assert (call.method, call.url) == ("GET", "https://shop.example/p?page=2")
    assert call.params["js_render"].lower() == "true"
    assert call.headers["Accept-Language"] == "de"
    assert call.headers["Authorization"] == server.gateway.digest(SECRET)
    assert call.api_key == server.gateway.digest(KEY)
    assert SECRET not in repr(server.calls)
    assert KEY not in repr(server.calls)


@pytest.mark.parametrize(
    "wrong",
    [
        {"status": 99},
        {"stat": 1},
        {"delay": "soon"},
        {"times": 0},
        {"body": b"", "size": 1},
        {"body": "", "json": {}},
        {"body": 5},
        {"type": 3},
        {"retry_after": -1},
        {"retry_after": "soon"},
        {"cost": "x"},
        {"cost": -5},
    ],
)
def test_an_answer_that_cannot_be_is_an_error_at_the_call(
    server: ConveyorServer, wrong: dict[str, Any]
) -> None:
    rule = server.when("https://shop.example/*")
    with pytest.raises(ConveyorError) as caught:
        rule.respond(**wrong)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    server.when("https://shop.example/*").respond(body="right")
    [row] = work(server, "https://shop.example/")
    assert body_of(row) == b"right"


@pytest.mark.parametrize(
    "wrong",
    ["shop.example/p", "ftp://shop.example/", "https://a.example/?q=1", "", "https://a.example/\n"],
)
def test_a_pattern_that_is_none_is_an_error_at_the_call(server: ConveyorServer, wrong: str) -> None:
    with pytest.raises(ValueError, match="such as https://shop.example/p/"):
        server.when(wrong)


def test_a_value_that_cannot_be_sent_leaves_the_rules_as_they_were(server: ConveyorServer) -> None:
    with pytest.raises(TypeError):
        server.when("https://shop.example/*").respond(body=object())
    with pytest.raises(TypeError):
        server.gateway.otherwise(body=object())
    server.when("https://shop.example/*").respond(body="right")
    [row] = work(server, "https://shop.example/")
    assert body_of(row) == b"right"


def test_a_reset_forgets_rules_and_calls(server: ConveyorServer) -> None:
    server.when("https://shop.example/*").respond(status=404)
    work(server, "https://shop.example/")
    server.reset()
    assert (server.calls, server.gateway.rules, server.hits.total) == ([], [], 0)
    [row] = work(server, "https://shop.example/")
    assert row["status"] == "successful"


def test_rules_answer_in_the_order_of_when(server: ConveyorServer) -> None:
    narrow = server.when("https://shop.example/p/1")
    server.when("https://shop.example/*").respond(body="wide")
    narrow.respond(body="narrow")
    one, two = work(server, "https://shop.example/p/1", "https://shop.example/p/2")
    assert (body_of(one), body_of(two)) == (b"narrow", b"wide")


def test_a_rule_without_answers_is_told_as_not_called(server: ConveyorServer) -> None:
    server.when("https://shop.example/forgotten")
    with pytest.raises(AssertionError, match="no call came for https://shop.example/forgotten"):
        server.assert_all_called()


def test_a_rule_for_all_urls_is_a_rule_beside_the_default(server: ConveyorServer) -> None:
    server.when("*", method="POST").respond(body="posted")
    everything = server.when("*")
    everything.respond(body="mine")
    server.gateway.otherwise(status=404)
    server.when("https://shop.example/*").respond(body="never")
    [row] = work(server, "https://shop.example/")
    assert (body_of(row), everything.call_count) == (b"mine", 1)
    with pytest.raises(AssertionError, match=r"POST \*, https://shop.example/\*$"):
        server.assert_all_called()
    with pytest.raises(ConveyorError):
        server.gateway.otherwise(status=99)
    assert [rule["host"] for rule in server.gateway.rules] == ["*", "*", "shop.example", "*"]


def test_a_rule_is_of_no_use_after_a_reset(server: ConveyorServer) -> None:
    used = server.when("https://shop.example/*").respond(status=503)
    unused = server.when("https://shop.example/p")
    server.reset()
    for call in (used.then, unused.respond, lambda: used.call_count):
        with pytest.raises(ValueError, match=r"the server was reset, or .*: call when\(\)"):
            call()
    assert server.gateway.rules == []


def test_no_count_is_lost_while_scrapes_run(server: ConveyorServer) -> None:
    pages = server.when("https://shop.example/*").respond(status=503, times=3).then(body="ok")
    body = {"tasks": [{"url": f"https://shop.example/{number}"} for number in range(60)]}
    made = httpx.post(
        f"{server.base_url}/jobs", json=body, headers={"X-API-Key": KEY}, timeout=SECONDS
    )
    assert made.status_code == 201, made.text
    for number in range(40):
        server.when(f"https://other.example/{number}").respond(status=404)
    server.drain(timeout=60)
    assert pages.call_count == server.hits.total == 63


def test_a_retry_after_takes_seconds_or_a_date(server: ConveyorServer) -> None:
    rule = server.when("https://shop.example/*").respond(status=503, retry_after=0, cost=0.5)
    rule.then(status=503, retry_after="Mon, 01 Mar 2027 00:00:00 GMT", times=2).then(cost="0.01")
    assert len(server.gateway.rules[0]["answers"]) == 3
