"""A test's server on request: failures of the API, answers of the inbox, fires; and its report on a
test that failed."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

import conveyor.testing
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.testing.local_server import ConveyorServer
from tests.patient import SECONDS

pytestmark = [pytest.mark.slow]
START = "2027-03-01T00:00:00Z"


@pytest.fixture
def server(emptied_server: ConveyorServer) -> ConveyorServer:
    return emptied_server


def submit(server: ConveyorServer, *urls: str, key: str = "", **fields: Any) -> httpx.Response:
    return httpx.post(
        f"{server.base_url}/jobs",
        json={"tasks": [{"url": url} for url in urls], **fields},
        headers={"X-API-Key": key or server.api_key},
        timeout=SECONDS,
    )


def listed(server: ConveyorServer) -> int:
    headers = {"X-API-Key": server.api_key}
    answer = httpx.get(f"{server.base_url}/jobs", headers=headers, timeout=SECONDS)
    assert answer.status_code == 200
    return len(answer.json()["jobs"])


def test_the_next_requests_that_fit_fail_without_effect(server: ConveyorServer) -> None:
    server.api.fail(503, times=2, path="/v1/jobs*", method="POST")
    server.api.fail(429, retry_after=7)
    answers = [submit(server, server.url("a")) for _ in range(4)]
    assert [one.status_code for one in answers] == [503, 503, 429, 201]
    assert [one.json().get("code") for one in answers[:3]] == ["unavailable"] * 2 + ["rate_limited"]
    assert answers[2].headers["Retry-After"] == "7"
    assert listed(server) == 1
    assert server.api.waiting == []


def test_an_answer_is_cut_after_its_request_was_served(server: ConveyorServer) -> None:
    server.api.cut(path="/v1/jobs")
    with pytest.raises(httpx.RemoteProtocolError, match="incomplete|without sending"):
        submit(server, server.url("a"))
    assert listed(server) == 1


def test_a_request_hangs_until_its_client_leaves(server: ConveyorServer) -> None:
    server.api.hang(method="GET")
    patience = httpx.Timeout(SECONDS, read=0.2)
    with pytest.raises(httpx.ReadTimeout):
        httpx.get(f"{server.base_url}/jobs", headers={"X-API-Key": "k"}, timeout=patience)
    assert listed(server) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"status": 200},
        {"status": 600},
        {"times": 0},
        {"path": "/_dev/*"},
        {"path": ""},
        {"retry_after": "a\nb"},
        {"retry_after": -1},
        {"retry_after": "soon"},
        {"method": "FOO"},
    ],
)
def test_a_failure_that_cannot_be_is_an_error_at_the_call(
    server: ConveyorServer, wrong: dict[str, Any]
) -> None:
    with pytest.raises(ConveyorError) as caught:
        server.api.fail(**wrong)
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    assert server.api.waiting == []


def test_a_method_is_read_in_either_case(server: ConveyorServer) -> None:
    server.api.fail(503, method="post")
    assert submit(server, server.url("a")).status_code == 503


def test_a_name_of_the_inbox_has_no_slash(server: ConveyorServer) -> None:
    with pytest.raises(ValueError, match="has no /"):
        server.inbox.next("a/b")
    for call in (server.inbox.url, server.inbox.requests, server.inbox.clear):
        with pytest.raises(ValueError, match="has no /"):
            call("a/b")


def test_failures_are_dropped_and_never_touch_other_paths(server: ConveyorServer) -> None:
    server.api.fail(500, times=5)
    assert httpx.get(f"{server.origin}/healthz", timeout=SECONDS).status_code == 200
    server.api.recover()
    assert listed(server) == 0


@pytest.mark.parametrize("path", ["faults", "runs"])
def test_the_routes_want_the_token(server: ConveyorServer, path: str) -> None:
    url = f"{server.origin}/_dev/{path}"
    for headers, status in (({}, 401), ({"Authorization": "Bearer x"}, 401)):
        assert httpx.get(url, headers=headers, timeout=SECONDS).status_code == status
    headers = {"Authorization": f"Bearer {server.dev_token}", "Host": "conveyor.example"}
    assert httpx.get(url, headers=headers, timeout=SECONDS).status_code == 403


def test_drain_waits_for_the_runs_of_every_caller(server: ConveyorServer) -> None:
    for key in ("one", "two"):
        assert submit(server, server.url(key, delay=0.1), key=key).status_code == 201
    server.drain(timeout=60)
    assert server.hits.total == 2
    submit(server, server.url("slow", hang=True), key="three")
    with pytest.raises(TimeoutError, match="running with 0 of 1 done"):
        server.drain(timeout=0.05)


async def test_a_drain_lets_the_loop_of_the_test_go_on() -> None:
    async with conveyor.testing.server(clock="manual", clock_start=START) as server:
        submit(server, server.url("closed", status=503, retry_after="3000"), max_attempts=2)
        await server.adrain()
        assert server.hits.total == 2
        assert (server.clock.now.hour, server.clock.now.minute) >= (0, 50)


def test_the_inbox_answers_as_it_is_told_on_the_moved_clock() -> None:
    with conveyor.testing.server(clock="manual", clock_start=START) as server:
        server.inbox.next("hook", status=503, times=2)
        server.inbox.next("hook", delay="20s")
        webhook = {"url": server.inbox.url("hook"), "signature": False}
        submit(server, server.url("a"), webhook=webhook)
        server.clock.advance(seconds=5)
        assert [one["answered"] for one in server.inbox.requests("hook")] == [503]
        server.clock.run_until_idle()
        kept = server.inbox.requests("hook")
        assert [one["answered"] for one in kept] == [503, 503, 204]
        event = server.inbox.events("hook")[0]
        assert event["event_type"] == "run.completed"
        shown = httpx.get(
            f"{server.base_url}/jobs/{event['job_id']}/webhook/deliveries",
            headers={"X-API-Key": server.api_key},
            timeout=SECONDS,
        ).json()["deliveries"]
        assert [one["status"] for one in shown] == ["delivered"]
        assert shown[0]["updated_at"] > kept[2]["received_at"][:19] + ".999Z"


def test_a_path_next_without_the_token_is_an_event(server: ConveyorServer) -> None:
    url = f"{server.inbox.url('hook')}/next"
    assert httpx.post(url, json={"status": 503}, timeout=SECONDS).status_code == 204
    assert [one["path"] for one in server.inbox.requests("hook")] == ["/next"]
    wrong = {"Authorization": "Bearer wrong"}
    assert httpx.post(url, json={"status": 503}, headers=wrong, timeout=SECONDS).status_code == 401
    for answer in ({"status": 99}, {"times": 0}, {"delay": "soon"}, {"delay": -1.0}):
        with pytest.raises(ConveyorError) as caught:
            server.inbox.next("hook", **answer)
        assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    server.inbox.clear("hook")
    assert server.inbox.requests("hook") == []


def test_a_schedule_fires_on_request() -> None:
    with conveyor.testing.server(clock="manual", clock_start=START) as server:
        schedule = {"timezone": "Europe/Berlin", "rate": {"every": 12, "unit": "hour"}}
        made = submit(server, server.url("a"), type="scheduled", schedule=schedule)
        assert made.status_code == 201, made.text
        fired = server.schedules.fire(made.json()["job_id"])
        assert server.clock.now.hour == 12
        assert fired["status"] == "started"
        server.drain(timeout=60)
        assert server.hits.total == 1
        with pytest.raises(ConveyorError, match="no schedule"):
            server.schedules.fire(submit(server, server.url("b")).json()["job_id"])


def test_an_error_that_leaves_the_context_tells_what_the_server_knows() -> None:
    def fail() -> None:
        with conveyor.testing.server() as server:
            submit(server, server.url("gone", status=404))
            server.drain(timeout=60)
            raise AssertionError

    with pytest.raises(AssertionError) as caught:
        fail()
    [note] = caught.value.__notes__
    assert "is completed with 1 of 1 done, 1 failed (1 bad_target)" in note


def test_a_server_leaves_nothing_behind() -> None:
    with conveyor.testing.server() as server:
        submit(server, server.url("a"))
        directory, variables = server.data_dir, server.environment
        assert directory.exists()
    assert not directory.exists()
    assert variables["ZENROWS_BATCH_BASE_URL"] == variables["CONVEYOR_URL"] == server.base_url
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.origin}/healthz", timeout=SECONDS)
