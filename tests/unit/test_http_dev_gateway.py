"""/_dev/gateway: rules over HTTP, the calls that they answered, and who is refused."""

from __future__ import annotations

from collections.abc import Iterator

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
