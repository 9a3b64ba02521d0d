"""Failure groups over the wire of a real server: a rerun of two groups out of five, small and
large, and what is left of the groups once the gateway is well."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from zenrows.batch.models import RerunJobResponse

from conveyor.testing.local_server import ConveyorServer, conveyor_server
from tests.patient import SECONDS

pytestmark = [pytest.mark.server, pytest.mark.slow]

KINDS: list[dict[str, Any]] = [
    {"status": 404},
    {"status": 410},
    {"status": 403},
    {"flaky": 1, "code": "first"},
    {"flaky": 1, "code": "second"},
]
"""Kinds of failure. The last two do not come a second time: the gateway is well by then."""


@pytest.fixture(params=[(30, 201), (60, 202), pytest.param((20_000, 202), marks=pytest.mark.full)])
def sizes(request: pytest.FixtureRequest) -> tuple[int, int]:
    """The number of tasks, and the status of a rerun of so many."""
    found: tuple[int, int] = request.param
    return found


@pytest.fixture
def server(tmp_path: Path, sizes: tuple[int, int]) -> Iterator[ConveyorServer]:
    threshold = 10_000 if sizes[0] > 10_000 else 50
    with conveyor_server(tmp_path / "data", async_threshold=threshold) as booted:
        yield booted


@pytest.fixture
def http(server: ConveyorServer) -> Iterator[httpx.Client]:
    headers = {"X-API-Key": server.api_key}
    with httpx.Client(base_url=server.base_url, headers=headers, timeout=60) as client:
        yield client


def rows(http: httpx.Client, job_id: str, **params: Any) -> list[dict[str, Any]]:
    """All rows of the latest run."""
    found: list[dict[str, Any]] = []
    while True:
        page = http.get(f"/jobs/{job_id}/results", params={"limit": 1_000, **params}).json()
        found += page["results"]
        if "next_cursor" not in page:
            return found
        params["cursor"] = page["next_cursor"]


def failures(http: httpx.Client, job_id: str, run_id: str) -> dict[str, Any]:
    """The failure groups of a run."""
    found: dict[str, Any] = http.get(f"/jobs/{job_id}/runs/{run_id}/failures").json()
    assert sum(group["count"] for group in found["groups"]) == found["failed"]
    return found


def test_a_rerun_of_two_groups_out_of_five_leaves_all_else_as_it_was(
    server: ConveyorServer, http: httpx.Client, sizes: tuple[int, int]
) -> None:
    count, status = sizes
    scripts = [*KINDS, {}, {}, {}, {}, {}]
    tasks = [{"url": server.url(f"p{n}", **scripts[n % 10])} for n in range(count)]
    made = http.post("/jobs", json={"tasks": tasks, "max_attempts": 1}).json()
    job_id = made["job_id"]
    server.drain(timeout=300)
    before = failures(http, job_id, made["latest_run"]["run_id"])
    assert [group["count"] for group in before["groups"]] == [count // 10] * 5
    healed = [group for group in before["groups"] if group["code"] in ("first", "second")]
    chosen = {group["group"] for group in healed}
    bodies = {
        row["task_id"]: httpx.get(row["result_url"], timeout=SECONDS).content
        for row in rows(http, job_id, status="successful")[:20]
    }

    answer = http.post(
        f"/jobs/{job_id}/rerun", params={"status": "failed", "group": ",".join(chosen)}
    )

    assert answer.status_code == status, answer.text
    again = RerunJobResponse.model_validate(answer.json())
    assert again.retried_tasks == sum(group["count"] for group in healed) == count // 5
    assert again.inherited_tasks == count - again.retried_tasks
    server.drain(timeout=300)
    run_id = again.latest_run.run_id
    after = failures(http, job_id, run_id)
    assert {group["group"] for group in after["groups"]} == {
        group["group"] for group in before["groups"]
    } - chosen
    stats = http.get(f"/jobs/{job_id}/runs/{run_id}").json()["stats"]
    assert (stats["total"], stats["successful"]) == (count, count - count * 3 // 10)
    assert stats["inherited"] == again.inherited_tasks
    for task_id, body in bodies.items():
        assert http.get(f"/jobs/{job_id}/tasks/{task_id}/content").content == body
    listed = rows(http, job_id, status="failed")
    groups = {group["group"]: group["count"] for group in after["groups"]}
    for group, size in groups.items():
        assert len([row for row in listed if row["failure_group"] == group]) == size
