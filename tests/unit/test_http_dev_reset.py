"""/_dev/reset: it empties a running server, and nothing of before is written afterwards."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from conveyor.testing.server import ConveyorServer, conveyor_server
from tests.acceptance.support_wire import eventually
from tests.disk import files_below
from tests.patient import SECONDS

CONFIRMED = {"confirm": "data"}
START = "2027-03-01T00:00:00Z"


@contextmanager
def _dev(server: ConveyorServer) -> Iterator[httpx.Client]:
    origin = server.base_url.removesuffix("/v1")
    headers = {"Authorization": f"Bearer {server.dev_token}"}
    with httpx.Client(base_url=f"{origin}/_dev", headers=headers, timeout=SECONDS) as client:
        yield client


@contextmanager
def _api(server: ConveyorServer) -> Iterator[httpx.Client]:
    headers = {"X-API-Key": server.api_key}
    with httpx.Client(base_url=server.base_url, headers=headers, timeout=SECONDS) as client:
        yield client


def _reset(server: ConveyorServer) -> None:
    with _dev(server) as dev:
        answer = dev.post("/reset", json=CONFIRMED)
    assert answer.status_code == 204, answer.text


def _submit(server: ConveyorServer, *urls: str, **fields: Any) -> str:
    body = {"tasks": [{"url": url} for url in urls], **fields}
    with _api(server) as api:
        answer = api.post("/jobs", json=body)
    assert answer.status_code in (201, 202), answer.text
    job_id: str = answer.json()["job_id"]
    return job_id


def _bodies(server: ConveyorServer) -> list[str]:
    return [path.name for path in files_below(server.data_dir / "blobs")]


@pytest.mark.slow
def test_a_reset_leaves_nothing_of_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with conveyor_server(tmp_path) as server:
        caplog.set_level(logging.WARNING)
        webhook = {"url": f"{server.inbox}/ends"}
        finished = _submit(server, server.url("page"), webhook=webhook)
        server.drain()
        slow = [server.url(f"slow{number}", delay=20) for number in range(30)]
        held = _submit(server, *slow)
        with _dev(server) as dev, _api(server) as api:
            eventually(
                lambda: len(dev.get("/inbox/ends").json()["requests"]) == 1 or None, "an event"
            )
            eventually(lambda: server.hits.in_flight == 30 or None, "30 calls")
            assert _bodies(server)
            _reset(server)
            assert server.hits.in_flight == server.hits.total == 0
            assert _bodies(server) == []
            assert api.get("/jobs").json()["jobs"] == []
            for job_id in (finished, held):
                assert api.get(f"/jobs/{job_id}").status_code == 404
            assert dev.get("/inbox").json()["inboxes"] == []
        again = _submit(server, server.url("page"))
        server.drain()
        with _api(server) as api:
            [job] = api.get("/jobs").json()["jobs"]
            results = api.get(f"/jobs/{again}/results").json()
        assert job["job_id"] == again
        assert job["latest_run"]["stats"]["successful"] == len(results["results"]) == 1
    assert caplog.records == []
    with conveyor_server(tmp_path) as server, _api(server) as api:
        assert [job["job_id"] for job in api.get("/jobs").json()["jobs"]] == [again]


@pytest.mark.parametrize("body", ["", "{}", "[]", '{"confirm": true}', '{"confirm": "yes"}'])
def test_a_reset_that_is_not_confirmed_removes_nothing(filled: ConveyorServer, body: str) -> None:
    with _dev(filled) as dev:
        answer = dev.post("/reset", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400
        assert answer.json()["code"] == "invalid_argument"
        assert dev.get("/reset").status_code == 405
    with _api(filled) as api:
        assert len(api.get("/jobs").json()["jobs"]) == 1


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Host": "conveyor.example"}, 403),
        ({"Origin": "http://page.example"}, 403),
        ({"X-Forwarded-For": "1.2.3.4"}, 403),
    ],
)
def test_a_reset_by_others_removes_nothing(
    filled: ConveyorServer, headers: dict[str, str], status: int
) -> None:
    with _dev(filled) as dev:
        assert dev.post("/reset", json=CONFIRMED, headers=headers).status_code == status
    with _api(filled) as api:
        assert len(api.get("/jobs").json()["jobs"]) == 1


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConveyorServer]:
    """A server with a job."""
    with conveyor_server(tmp_path_factory.mktemp("data")) as booted:
        _submit(booted, booted.url("page"))
        yield booted


@pytest.mark.slow
def test_requests_meanwhile_break_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    answers: set[int] = set()
    with conveyor_server(tmp_path, retry_base=0.001) as server:
        done = threading.Event()

        def use() -> None:
            urls = [server.url(f"page{number}", flaky=1, delay=0.01) for number in range(20)]
            with _api(server) as api:
                while not done.is_set():
                    body = {"tasks": [{"url": url} for url in urls]}
                    made = api.post("/jobs", json=body)
                    answers.add(made.status_code)
                    job_id = made.json().get("job_id", "gone")
                    for path in (f"/jobs/{job_id}", f"/jobs/{job_id}/results", "/jobs"):
                        answers.add(api.get(path).status_code)
                    answers.add(api.delete(f"/jobs/{job_id}").status_code)

        users = [threading.Thread(target=use) for _ in range(3)]
        for user in users:
            user.start()
        try:
            for _ in range(30):
                _reset(server)
        finally:
            done.set()
            for user in users:
                user.join()
        _reset(server)
        assert _bodies(server) == []
        _submit(server, server.url("page"))
        server.drain()
    assert max(answers) < 500, answers
    assert [record.getMessage() for record in caplog.records] == []


@pytest.mark.slow
def test_a_clock_that_is_moved_stays_where_it_is(tmp_path: Path) -> None:
    with conveyor_server(tmp_path, clock="manual", clock_start=START) as server:
        first = _submit(server, *(server.url(f"down{n}", status=503) for n in range(5)))
        server.clock.advance(seconds=1)
        assert server.hits.total >= 5
        before = server.clock.now
        _reset(server)
        assert server.clock.now == before
        server.clock.run_until_idle()
        assert server.hits.total == 0
        assert server.clock.now == before
        second = _submit(server, server.url("late", status=503))
        server.drain()
        assert second > first
        assert server.hits.total == 3


@pytest.mark.slow
def test_who_watches_a_run_learns_that_it_is_gone(tmp_path: Path) -> None:
    with conveyor_server(tmp_path) as server:
        job_id = _submit(server, server.url("slow", delay=20))
        with _api(server) as api:
            run_id = api.get(f"/jobs/{job_id}").json()["latest_run"]["run_id"]
            path = f"/jobs/{job_id}/runs/{run_id}/events"
            with api.stream("GET", path) as stream:
                lines = stream.iter_lines()
                next(lines)
                _reset(server)
                rest = "\n".join(lines)
        assert "deleted" in rest, rest
