"""Results over HTTP: pages, filters, cursors, bodies, signed links, histories, expiry."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from zenrows.batch.models import TaskHistoryResponse, TaskResult

from conveyor.domain.model import Event, EventKind, Problem, Spend, Task
from conveyor.domain.task_rules import Retry
from conveyor.ports.tasks import Claimed
from tests.unit.http_api import Api, open_api, problem_of
from tests.unit.result_pages import listed

NOWHERE = "01ARZ3NDEKTSV4RRFFQ69G5FAV"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with open_api(tmp_path / "data") as opened:
        yield opened


@pytest.mark.guarantee("G12")
async def test_a_result_tells_what_was_asked_and_what_came(api: Api) -> None:
    task = {
        "url": "https://user:pw@site.test/ä?q=1#x",
        "external_id": "a-1",
        "metadata": {"k": "v"},
        "method": "post",
        "body": {"secret": "never listed"},
    }
    response = await api.client.post("/v1/jobs", json={"tasks": [task]})
    job = response.json()
    await api.drain(job)

    page = await api.client.get(f"/v1/jobs/{job['job_id']}/results")

    [row] = page.json()["results"]
    assert row["url"] == task["url"]
    assert (row["external_id"], row["metadata"], row["method"]) == ("a-1", {"k": "v"}, "POST")
    assert (row["status"], row["type"]) == ("successful", "html")
    assert row["run_id"] == job["latest_run"]["run_id"]
    assert "never listed" not in page.text
    assert "next_cursor" not in page.json()
    TaskResult.model_validate(row)


async def test_filters_let_through_what_they_name(api: Api) -> None:
    job = await api.submit(6)
    run_id = job["latest_run"]["run_id"]
    tasks = await api.tasks_of(run_id)
    await api.succeed(job["job_id"], run_id, tasks[0].task_id)
    await api.fail(run_id, tasks[1].task_id)
    await api.claim(run_id, tasks[2].task_id)

    path = f"/v1/jobs/{job['job_id']}/results"
    by_filter = {
        name: [row.url.path for row in await listed(api, path, status=name)]
        for name in ("all", "successful", "failed", "processing")
    }

    assert by_filter == {
        "all": [f"/{n}" for n in range(6)],
        "successful": ["/0"],
        "failed": ["/1"],
        "processing": ["/2", "/3", "/4", "/5"],
    }
    states = [row.status.value for row in await listed(api, path)]
    assert states == ["successful", "failed", "processing", "pending", "pending", "pending"]


@pytest.mark.guarantee("G13")
@pytest.mark.parametrize("status", ["all", "successful", "processing"])
async def test_every_page_size_gives_each_row_once_in_order(api: Api, status: str) -> None:
    job = await api.submit(11)
    run_id = job["latest_run"]["run_id"]
    for task in (await api.tasks_of(run_id))[::2]:
        await api.succeed(job["job_id"], run_id, task.task_id)
    wanted = {
        "all": list(range(11)),
        "successful": list(range(0, 11, 2)),
        "processing": list(range(1, 11, 2)),
    }[status]

    for limit in range(1, 13):
        for path in (f"/v1/jobs/{job['job_id']}", f"/v1/jobs/{job['job_id']}/runs/{run_id}"):
            rows = await listed(api, f"{path}/results", status=status, limit=str(limit))
            assert [int(str(row.url.path)[1:]) for row in rows] == wanted


async def test_a_task_id_serves_as_a_cursor(api: Api) -> None:
    job = await api.submit(4)
    tasks = await api.tasks_of(job["latest_run"]["run_id"])

    rows = await api.client.get(
        f"/v1/jobs/{job['job_id']}/results", params={"cursor": tasks[1].task_id}
    )

    assert [row["task_id"] for row in rows.json()["results"]] == [
        task.task_id for task in tasks[2:]
    ]


BAD_QUERIES = (
    "limit=0",
    "limit=1001",
    "limit=x",
    "status=pending",
    "status=",
    "status=all&status=failed",
    "cursor=nonsense",
    "cursor=" + "0" * 25,
    "cursor=%00",
)


async def test_bad_query_values_are_refused(api: Api) -> None:
    job = await api.submit(1)

    for query in BAD_QUERIES:
        response = await api.client.get(f"/v1/jobs/{job['job_id']}/results?{query}")

        problem_of(response, status=400, code="invalid_argument")


async def test_an_empty_cursor_is_none(api: Api) -> None:
    job = await api.submit(1)
    path = f"/v1/jobs/{job['job_id']}"

    for list_path in ("/v1/jobs", f"{path}/runs", f"{path}/results"):
        page = await api.client.get(list_path, params={"cursor": "", "limit": "1"})
        assert page.json() == (await api.client.get(list_path, params={"limit": "1"})).json()


async def test_a_cursor_works_only_where_it_was_made(api: Api) -> None:
    first, second = await api.submit(3), await api.submit(3)
    path = f"/v1/jobs/{first['job_id']}"
    run_id = first["latest_run"]["run_id"]
    page = await api.client.get(f"{path}/results", params={"limit": "1"})
    cursor = page.json()["next_cursor"]
    forged = ("A" if cursor[0] != "A" else "B") + cursor[1:]

    for refused, params in [
        (f"{path}/results", {"cursor": cursor, "status": "failed"}),
        (f"{path}/results", {"cursor": forged}),
        (f"/v1/jobs/{second['job_id']}/results", {"cursor": cursor}),
    ]:
        response = await api.client.get(refused, params=params)
        problem_of(response, status=400, code="invalid_argument")
    accepted = await api.client.get(f"{path}/runs/{run_id}/results", params={"cursor": cursor})
    assert len(accepted.json()["results"]) == 2


async def test_paging_the_latest_run_stays_in_the_run_it_began_with(api: Api) -> None:
    job = await api.submit(3)
    path = f"/v1/jobs/{job['job_id']}"
    page = await api.client.get(f"{path}/results", params={"limit": "1"})
    await api.client.post(f"{path}/stop")
    rerun = (await api.client.post(f"{path}/rerun")).json()

    rest = await api.client.get(f"{path}/results", params={"cursor": page.json()["next_cursor"]})
    elsewhere = await api.client.get(
        f"{path}/runs/{rerun['latest_run']['run_id']}/results",
        params={"cursor": page.json()["next_cursor"]},
    )

    assert {row["run_id"] for row in rest.json()["results"]} == {job["latest_run"]["run_id"]}
    problem_of(elsewhere, status=400, code="invalid_argument")


@pytest.mark.parametrize("kind", ["about:blank", "", "/relative", "http://[::1", "no type at all"])
async def test_the_type_of_a_stored_problem_always_reads_as_a_url(api: Api, kind: str) -> None:
    job = await api.submit(1)
    [task] = await api.tasks_of(job["latest_run"]["run_id"])
    await api.fail(task.run_id, task.task_id, Problem("X1", "Oops", 500, kind))

    [row] = await listed(api, f"/v1/jobs/{job['job_id']}/results")

    assert row.error is not None
    assert row.error.code == "X1"
    assert row.result_url is None


async def test_a_history_tells_attempts_and_interruptions(api: Api) -> None:
    job = await api.submit(1)
    [task] = await api.tasks_of(job["latest_run"]["run_id"])
    path = f"/v1/jobs/{job['job_id']}"
    assert (await history(api, path, task)) == []
    claimed = await api.claim(task.run_id, task.task_id)
    problem = Problem("T1", "Timed out", 504)
    await api.settle(claimed, Retry(attempt(api, 1, problem), api.clock.now()))
    await api.claim(task.run_id, task.task_id, seconds=5)
    api.clock.shift(6)
    now = api.clock.now()
    claim = await api.binding.tasks.claim_task(
        task.run_id,
        task.task_id,
        worker="next",
        now=now,
        claimed_until=now + 60_000,
        max_interruptions=10,
    )
    assert isinstance(claim, Claimed)

    first, second = await history(api, path, task)

    assert (first["kind"], first["attempt"]) == ("attempt", 1)
    assert first["error"]["code"] == "T1"
    assert first["spend"] == {"credits": 5, "cost": 0.25}
    assert (second["kind"], second["attempt"]) == ("interruption", 2)
    missing = await api.client.get(f"{path}/tasks/{'0' * 26}/history")
    problem_of(missing, status=404, code="not_found")


async def history(api: Api, path: str, task: Task) -> list[dict[str, Any]]:
    """The events of a task, which both routes must tell alike."""
    latest = await api.client.get(f"{path}/tasks/{task.task_id}/history")
    named = await api.client.get(f"{path}/runs/{task.run_id}/tasks/{task.task_id}/history")
    assert latest.json() == named.json()
    TaskHistoryResponse.model_validate(latest.json())
    events: list[dict[str, Any]] = latest.json()["events"]
    return events


def attempt(api: Api, number: int, problem: Problem) -> Event:
    """An attempt that failed."""
    now = api.clock.now()
    return Event(
        kind=EventKind.ATTEMPT,
        attempt=number,
        started_at=now - 5,
        ended_at=now,
        error=problem,
        spend=Spend(5, 0.25),
    )
