"""Results over HTTP: pages, filters, cursors, bodies, signed links, histories, expiry."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from zenrows.batch.models import ListResultsResponse, TaskHistoryResponse, TaskResult

from conveyor.domain.model import Event, EventKind, Problem, Spend, Task
from conveyor.ports.tasks import Claimed, Retry
from tests.unit.http_api import ORIGIN, PAGE, PAGE_TYPE, Api, open_api, problem_of

NOWHERE = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
DAY = 86_400.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with open_api(tmp_path / "data") as opened:
        yield opened


async def listed(api: Api, path: str, **params: str) -> list[TaskResult]:
    """Every result, page after page."""
    rows: list[TaskResult] = []
    cursor: str | None = None
    while True:
        query = params | ({"cursor": cursor} if cursor else {})
        response = await api.client.get(path, params=query)
        assert response.status_code == 200, response.text
        page = ListResultsResponse.model_validate(response.json())
        rows += page.results
        cursor = page.next_cursor
        if cursor is None:
            return rows


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
    "cursor=",
    "cursor=nonsense",
    "cursor=" + "0" * 25,
    "cursor=%00",
)


async def test_bad_query_values_are_refused(api: Api) -> None:
    job = await api.submit(1)

    for query in BAD_QUERIES:
        response = await api.client.get(f"/v1/jobs/{job['job_id']}/results?{query}")

        problem_of(response, status=400, code="invalid_argument")


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


async def test_a_body_comes_back_byte_for_byte(api: Api) -> None:
    job = await api.submit(1)
    [task] = await api.drain(job)
    path = f"/v1/jobs/{job['job_id']}"
    run_path = f"{path}/runs/{job['latest_run']['run_id']}"

    for url in (
        f"{path}/tasks/{task.task_id}/content",
        f"{run_path}/tasks/{task.task_id}/content",
    ):
        response = await api.client.get(url)
        head = await api.client.head(url)

        assert response.status_code == 200
        assert response.content == PAGE
        assert response.headers["Content-Type"] == PAGE_TYPE
        assert response.headers["Content-Security-Policy"] == "sandbox"
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert response.headers["Content-Length"] == str(len(PAGE))
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["Content-Length"] == str(len(PAGE))


@pytest.mark.parametrize(
    ("stored", "served"),
    [("", "application/octet-stream"), ("text/html\r\nX: y", "application/octet-stream")],
)
async def test_a_content_type_that_no_header_can_hold_is_not_sent(
    api: Api, stored: str, served: str
) -> None:
    job = await api.submit(1)
    [task] = await api.tasks_of(job["latest_run"]["run_id"])
    await api.succeed(job["job_id"], task.run_id, task.task_id, body=b"", content_type=stored)

    response = await api.client.get(f"/v1/jobs/{job['job_id']}/tasks/{task.task_id}/content")

    assert (response.headers["Content-Type"], response.content) == (served, b"")


async def test_a_large_body_is_streamed_whole(api: Api) -> None:
    body = bytes(range(256)) * 8_192
    job = await api.submit(1)
    [task] = await api.tasks_of(job["latest_run"]["run_id"])
    await api.succeed(job["job_id"], task.run_id, task.task_id, body=body)

    response = await api.client.get(f"/v1/jobs/{job['job_id']}/tasks/{task.task_id}/content")

    assert response.content == body


async def test_content_of_a_task_that_has_not_succeeded(api: Api) -> None:
    job = await api.submit(2)
    run_id = job["latest_run"]["run_id"]
    first, second = await api.tasks_of(run_id)
    path = f"/v1/jobs/{job['job_id']}/tasks"
    problem = Problem("RESP001", "Nothing there", 404, "https://docs.test/RESP001", "gone")
    await api.fail(run_id, first.task_id, problem)

    failed = await api.client.get(f"{path}/{first.task_id}/content")
    pending = await api.client.get(f"{path}/{second.task_id}/content")
    missing = await api.client.get(f"{path}/{'0' * 26}/content")

    assert failed.status_code == 422
    assert failed.headers["Content-Type"] == "application/problem+json"
    assert failed.json() == {
        "type": "https://docs.test/RESP001",
        "title": "Nothing there",
        "status": 404,
        "detail": "gone",
        "code": "RESP001",
    }
    problem_of(pending, status=409, code="task_not_ready")
    problem_of(missing, status=404, code="not_found")


@pytest.mark.parametrize("kind", ["about:blank", "", "/relative", "http://[::1", "no type at all"])
async def test_the_type_of_a_stored_problem_always_reads_as_a_url(api: Api, kind: str) -> None:
    job = await api.submit(1)
    [task] = await api.tasks_of(job["latest_run"]["run_id"])
    await api.fail(task.run_id, task.task_id, Problem("X1", "Oops", 500, kind))

    [row] = await listed(api, f"/v1/jobs/{job['job_id']}/results")

    assert row.error is not None
    assert row.error.code == "X1"
    assert row.result_url is None


async def test_a_signed_link_needs_no_key(api: Api) -> None:
    job = await api.submit(1)
    [task] = await api.drain(job)
    [row] = await listed(api, f"/v1/jobs/{job['job_id']}/results")
    assert row.result_url is not None
    assert row.result_url.startswith(f"{ORIGIN}/v1/blobs/")

    response = await api.bare.get(row.result_url)
    head = await api.bare.head(row.result_url)

    assert response.status_code == 200
    assert response.content == PAGE
    assert response.headers["Content-Type"] == PAGE_TYPE
    assert response.headers["Content-Security-Policy"] == "sandbox"
    assert (head.status_code, head.content) == (200, b"")
    api.clock.shift(7_199)
    assert (await api.bare.get(row.result_url)).status_code == 200
    api.clock.shift(2)
    problem_of(await api.bare.get(row.result_url), status=403, code="permission_denied")


async def test_forged_and_swapped_links_are_refused(api: Api) -> None:
    job, other = await api.submit(2), await api.submit(1)
    tasks = await api.drain(job)
    [stranger] = await api.drain(other)
    rows = await listed(api, f"/v1/jobs/{job['job_id']}/results")
    link = str(rows[0].result_url)
    path, _, query = link.partition("?")
    expires, _, signature = query.partition("&")
    later = f"expires={int(expires.partition('=')[2]) + 60}"
    forgeries = [
        path,
        f"{path}?{expires}",
        f"{path}?{signature}",
        f"{path}?{later}&{signature}",
        f"{path}?{expires}&{signature[:-1]}",
        f"{path}?{expires}&{signature[:-2]}AA",
        f"{path}?{expires.replace('=', '=0')}&{signature}",
        f"{path}?expires=-1&{signature}",
        f"{path}?expires={'9' * 400}&{signature}",
        f"{path}?expires=%D9%A1&signature=%F0%9F%92%A9",
        link.replace(tasks[0].task_id, tasks[1].task_id),
        link.replace(job["job_id"], other["job_id"]).replace(tasks[0].task_id, stranger.task_id),
    ]

    assert (await api.bare.get(link)).status_code == 200
    for forged in forgeries:
        problem_of(await api.bare.get(forged), status=403, code="permission_denied")
    for broken in (link.replace(job["job_id"], "x"), link.replace(tasks[0].task_id, "x" * 26)):
        problem_of(await api.bare.get(broken), status=404, code="not_found")


async def test_a_link_dies_with_its_job_and_its_run(api: Api) -> None:
    job, other = await api.submit(1), await api.submit(1)
    await api.drain(job)
    await api.drain(other)
    [row] = await listed(api, f"/v1/jobs/{job['job_id']}/results")
    [other_row] = await listed(api, f"/v1/jobs/{other['job_id']}/results")

    await api.client.delete(f"/v1/jobs/{job['job_id']}")
    await api.client.delete(f"/v1/jobs/{other['job_id']}/runs/{other['latest_run']['run_id']}")

    problem_of(await api.bare.get(str(row.result_url)), status=404, code="not_found")
    problem_of(await api.bare.get(str(other_row.result_url)), status=404, code="not_found")


async def test_a_lost_body_is_not_found(api: Api) -> None:
    job = await api.submit(1)
    [task] = await api.drain(job)
    assert task.result is not None
    await api.binding.blobs.delete(task.result.blob_key)

    response = await api.client.get(f"/v1/jobs/{job['job_id']}/tasks/{task.task_id}/content")

    problem_of(response, status=404, code="not_found")


async def test_results_expire_and_their_rows_stay(api: Api) -> None:
    job = await api.submit(2, result_ttl_days=2)
    tasks = await api.drain(job, failing=1)
    path = f"/v1/jobs/{job['job_id']}"
    api.clock.shift(2 * DAY - 3_600)
    [almost] = await listed(api, f"{path}/results", status="successful")
    link = str(almost.result_url)
    assert almost.status.value == "successful"
    api.clock.shift(3_599)
    assert (await api.bare.get(link)).status_code == 200

    api.clock.shift(1)

    failed, expired = await listed(api, f"{path}/results")
    assert (failed.status.value, expired.status.value) == ("failed", "expired")
    assert expired.result_url is None
    [filtered] = await listed(api, f"{path}/results", status="successful")
    assert filtered == expired
    content = await api.client.get(f"{path}/tasks/{tasks[1].task_id}/content")
    problem_of(content, status=410, code="result_expired")
    problem_of(await api.bare.get(link), status=403, code="permission_denied")


async def test_an_inherited_result_expires_with_its_source(api: Api) -> None:
    job = await api.submit(2, result_ttl_days=2)
    await api.drain(job, failing=1)
    path = f"/v1/jobs/{job['job_id']}"
    api.clock.shift(DAY)
    rerun = await api.client.post(f"{path}/rerun", params={"status": "failed"})
    assert rerun.status_code == 201
    fresh, inherited = await listed(api, f"{path}/results")
    assert (fresh.status.value, inherited.status.value) == ("pending", "successful")
    assert inherited.source_run_id == job["latest_run"]["run_id"]
    assert (await api.bare.get(str(inherited.result_url))).content == PAGE

    api.clock.shift(DAY)

    _, expired = await listed(api, f"{path}/results")
    assert expired.status.value == "expired"
    content = await api.client.get(f"{path}/tasks/{inherited.task_id}/content")
    problem_of(content, status=410, code="result_expired")


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
