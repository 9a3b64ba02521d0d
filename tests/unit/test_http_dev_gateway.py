"""/_dev/gateway: rules over HTTP, the calls that they answered, and who is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from conveyor.testing.local_server import ConveyorServer

URL = "https://shop.example/p/1"


@pytest.fixture
def client(conveyor_server: ConveyorServer) -> Iterator[httpx.Client]:
    """A client that has the token."""
    origin = conveyor_server.base_url.removesuffix("/v1")
    headers = {"Authorization": f"Bearer {conveyor_server.dev_token}"}
    with httpx.Client(base_url=f"{origin}/_dev/gateway", headers=headers, timeout=30) as opened:
        yield opened


def _scrape(server: ConveyorServer, *urls: str) -> dict[str, int]:
    """Scrape URLs; return the counters of the run."""
    headers = {"X-API-Key": server.api_key}
    job = {"auto_close": True, "tasks": [{"url": url} for url in urls]}
    with httpx.Client(base_url=server.base_url, headers=headers, timeout=30) as api:
        made = api.post("/jobs", json=job)
        assert made.status_code == 201, made.text
        server.drain()
        stats = api.get(f"/jobs/{made.json()['job_id']}").json()["latest_run"]["stats"]
    return {name: stats[name] for name in ("successful", "failed")}


@pytest.mark.slow
def test_rules_answer_the_tasks_of_a_server(
    conveyor_server: ConveyorServer, client: httpx.Client
) -> None:
    rules = {"rules": [{"host": "shop.example", "answers": [{"status": 503}, {"body": "yes"}]}]}
    assert client.put("/rules", json=rules).status_code == 204
    assert _scrape(conveyor_server, URL) == {"successful": 1, "failed": 0}
    seen = client.get("/requests").json()
    assert seen["total"] == 2
    assert [rule["calls"] for rule in seen["rules"]] == [2]
    assert [call["url"] for call in seen["requests"]] == [URL, URL]
    assert conveyor_server.api_key not in str(seen)
    toml = b'[[rules]]\nhost = "shop.*"\nstatus = 404\n'
    sent = client.put("/rules", content=toml, headers={"Content-Type": "application/toml"})
    assert sent.status_code == 204
    assert _scrape(conveyor_server, URL) == {"successful": 0, "failed": 1}
    assert client.delete("/requests").status_code == 204
    assert client.get("/requests").json()["total"] == 0
    assert _scrape(conveyor_server, URL) == {"successful": 1, "failed": 0}


@pytest.mark.slow
def test_wrong_rules_are_refused_and_change_nothing(
    conveyor_server: ConveyorServer, client: httpx.Client
) -> None:
    assert client.put("/rules", json={"rules": [{"status": 404}]}).status_code == 204
    toml = {"Content-Type": "application/toml"}
    wrong: list[tuple[int, httpx.Response]] = [
        (400, client.put("/rules", json={"rules": [{"hots": "a"}]})),
        (400, client.put("/rules", json={"rules": [{"body_file": "a.html"}]})),
        (400, client.put("/rules", content=b"[[rules]]\nhots = 1", headers=toml)),
        (400, client.put("/rules", content=b"\xff", headers=toml)),
        (413, client.put("/rules", content=b"#" * (1 << 21), headers=toml)),
        (415, client.put("/rules", content=b"", headers={"Content-Type": "text/plain"})),
        (401, client.put("/rules", json={}, headers={"Authorization": "Bearer no"})),
        (401, client.get("/requests", headers={"Authorization": ""})),
        (403, client.get("/requests", headers={"Forwarded": "for=192.0.2.1"})),
    ]
    for status, answer in wrong:
        assert answer.status_code == status, answer.text
        assert answer.headers["Content-Type"] == "application/problem+json"
    assert "line 2: rules[0].hots" in wrong[2][1].json()["detail"]
    assert _scrape(conveyor_server, URL) == {"successful": 0, "failed": 1}


def test_a_recording_is_begun_shown_and_ended(
    conveyor_server: ConveyorServer, client: httpx.Client, tmp_path: Path
) -> None:
    kept = str(tmp_path / "kept")
    none = {"record": "", "replay": "", "withheld": 0, "hosts": [], "is_whole": True}
    assert client.get("/recording").json() == none
    begun = client.put("/recording", json={"record": kept})
    assert (begun.status_code, begun.json()) == (200, {**none, "record": kept})
    _scrape(conveyor_server, URL)
    replayed = client.put("/recording", json={"replay": kept, "missing": "fail"})
    assert replayed.json() == {**none, "replay": kept}
    assert _scrape(conveyor_server, URL, f"{URL}2") == {"successful": 1, "failed": 1}
    assert client.get("/requests").json()["total"] == 1
    assert client.delete("/recording").json() == {**none, "replay": kept}
    assert client.get("/recording").json() == none


def test_what_is_no_recording_is_refused(client: httpx.Client, tmp_path: Path) -> None:
    for body, told in (
        ({}, "send a directory as record or as replay"),
        ({"record": "a", "replay": "b"}, "send a directory as record or as replay"),
        ({"record": 5}, "record"),
        ({"recrod": "a"}, "recrod"),
        ([], "object"),
        ({"replay": str(tmp_path), "missing": "ask"}, "missing is one of fail, pass, record"),
        ({"replay": str(tmp_path)}, "holds no recording"),
        ({"replay": "\0"}, "send a directory as record or as replay"),
    ):
        answer = client.put("/recording", json=body)
        assert (answer.status_code, answer.json()["code"]) == (400, "invalid_argument"), body
        assert told in answer.json()["detail"]
    assert client.get("/recording").json()["replay"] == ""
