"""Recordings in tests: what a test's server has recorded, and answers from; and the callbacks."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

import conveyor.testing
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.testing.local_server import ConveyorServer
from tests.acceptance.support_cli import QUIET_PYTEST
from tests.acceptance.support_wire import eventually
from tests.acceptance.test_recording import echo_site
from tests.patient import SECONDS

pytestmark = [pytest.mark.slow]
PAGE = "https://shop.example/p/1"


@pytest.fixture
def server(emptied_server: ConveyorServer) -> ConveyorServer:
    return emptied_server


def worked(server: ConveyorServer, *urls: str, **fields: Any) -> list[Any]:
    """Work a job; the status, the code and the body of each of its tasks."""
    headers = {"X-API-Key": server.api_key}
    body = {"tasks": [{"url": url} for url in urls], **fields}
    with httpx.Client(base_url=server.base_url, headers=headers, timeout=SECONDS) as client:
        made = client.post("/jobs", json=body)
        assert made.status_code == 201, made.text
        server.drain(timeout=60)
        rows = client.get(f"/jobs/{made.json()['job_id']}/results").json()["results"]
    return [(row["status"], (row.get("error") or {}).get("code"), _body_of(row)) for row in rows]


def _body_of(row: Any) -> bytes:
    if row["status"] != "successful":
        return b""
    return httpx.get(row["result_url"], timeout=SECONDS).content


def test_what_was_recorded_is_answered_again(server: ConveyorServer, tmp_path: Path) -> None:
    kept = tmp_path / "recording"
    server.when(PAGE).respond(status=503).then(body="first").then(body="second")
    server.gateway.record(kept)
    seen = [worked(server, PAGE) for _ in range(2)]
    assert [one[0][2] for one in seen] == [b"first", b"second"]
    called = len(server.calls)
    server.gateway.replay(kept)
    assert [worked(server, PAGE) for _ in range(2)] == seen
    assert worked(server, f"{PAGE}2") == [("failed", "not_recorded", b"")]
    assert len(server.calls) == called
    state = server.gateway.end_recording()
    assert (state.replay, state.withheld) == (str(kept), 0)
    assert worked(server, PAGE)[0][2] == b"second"


def test_a_call_that_is_missing_is_added_on_request(server: ConveyorServer, tmp_path: Path) -> None:
    kept = tmp_path / "recording"
    server.when("*").respond(body="page")
    server.gateway.record(kept)
    worked(server, PAGE)
    server.gateway.replay(kept, missing="record")
    assert worked(server, PAGE, f"{PAGE}2") == [("successful", None, b"page")] * 2
    server.gateway.end_recording()
    assert len((kept / "exchanges.jsonl").read_text().splitlines()) == 2 + 2


def test_what_was_withheld_is_told(server: ConveyorServer, tmp_path: Path) -> None:
    server.when("*").respond(body="you are planted-one")
    server.gateway.record(tmp_path / "recording")
    worked(server, f"{PAGE}?token=planted-one", PAGE)
    state = server.gateway.end_recording()
    assert (state.withheld, state.hosts, state.is_whole) == (1, ("shop.example",), True)


def test_a_directory_that_does_not_fit_is_an_error_at_the_call(
    server: ConveyorServer, tmp_path: Path
) -> None:
    (tmp_path / "bodies").touch()
    with pytest.raises(ConveyorError, match="holds no recording"):
        server.gateway.replay(tmp_path / "none")
    with pytest.raises(ConveyorError, match="missing is one of fail"):
        server.gateway.replay(tmp_path, missing="ask")
    with pytest.raises(ConveyorError, match="holds another file"):
        server.gateway.record(tmp_path)
    assert worked(server, server.url("page"))[0][0] == "successful"


def test_a_recording_does_not_end_under_a_call(server: ConveyorServer, tmp_path: Path) -> None:
    server.gateway.record(tmp_path / "recording")
    job = {"tasks": [{"url": server.url("slow", hang=True)}]}
    headers = {"X-API-Key": server.api_key}
    httpx.post(f"{server.base_url}/jobs", json=job, headers=headers, timeout=SECONDS)
    eventually(lambda: server.hits.in_flight or None, "the call is under way")
    with pytest.raises(ConveyorError, match="1 calls are under way") as caught:
        server.gateway.end_recording()
    assert caught.value.code is ErrorCode.CONFLICT
    server.reset()
    assert server.gateway.end_recording().record == ""


def test_a_reset_rewinds_the_recording_of_the_start_and_ends_others(tmp_path: Path) -> None:
    kept, other = tmp_path / "recording", tmp_path / "other"
    with conveyor.testing.server() as server:
        server.when(PAGE).respond(body="first").then(body="second")
        server.gateway.record(kept)
        seen = [worked(server, PAGE) for _ in range(2)]
        server.reset()
        server.when("*").respond(body="other")
        server.gateway.record(other)
        worked(server, PAGE)
    with conveyor.testing.server(recording=kept) as server:
        for _ in range(2):
            assert [worked(server, PAGE) for _ in range(2)] == seen
            server.gateway.replay(other)
            assert worked(server, PAGE)[0][2] == b"other"
            server.reset()


@pytest.mark.extended
def test_a_real_site_is_recorded_and_replayed_when_it_is_gone(tmp_path: Path) -> None:
    kept = tmp_path / "recording"
    with (
        echo_site() as site,
        conveyor.testing.server(gateway="direct", allow_private=True) as server,
    ):
        urls = [f"http://{site.authority}/{path}" for path in ("page/1", "gone/2", "flaky/3")]
        server.gateway.record(kept)
        seen = worked(server, *urls)
        assert server.hits.total == 0
        with pytest.raises(ConveyorError, match="no fake gateway"):
            server.when("*").respond(status=404)
    assert [one[0] for one in seen] == ["successful", "failed", "successful"]
    with conveyor.testing.server(recording=str(kept), clock="manual") as server:
        assert worked(server, *urls) == seen


MARKED = """
import httpx
import pytest

@pytest.mark.conveyor(recording="recording")
def test_it(conveyor_server):
    job = {"tasks": [{"url": "https://shop.example/p/1"}]}
    headers = {"X-API-Key": "another-key"}
    made = httpx.post(f"{conveyor_server.base_url}/jobs", json=job, headers=headers, timeout=60)
    conveyor_server.drain(timeout=60)
    url = f"{conveyor_server.base_url}/jobs/{made.json()['job_id']}"
    stats = httpx.get(url, headers=headers, timeout=60).json()["latest_run"]["stats"]
    assert stats["successful"] == 1
    assert conveyor_server.calls == []
"""


@pytest.mark.extended
def test_a_marker_names_the_recording(server: ConveyorServer, tmp_path: Path) -> None:
    server.gateway.record(tmp_path / "recording")
    worked(server, PAGE)
    server.gateway.end_recording()
    (tmp_path / "test_marked.py").write_text(MARKED)
    done = subprocess.run(
        [*QUIET_PYTEST, "-p", "no:asyncio", "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_callbacks_are_listed_without_their_tokens(server: ConveyorServer) -> None:
    token = "a-token-of-a-state-machine"
    worked(server, server.url("a"), server.url("b"), callback={"task_token": token})
    [told] = eventually(lambda: server.callbacks or None, "a callback")
    assert (told.succeeded, told.error) == (True, None)
    assert told.task_token == server.gateway.digest(token)
    assert told.output["stats"]["successful"] == 2
    assert token not in json.dumps(told.output)
    server.reset()
    assert server.callbacks == []
