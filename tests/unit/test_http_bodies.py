"""Bodies of results over HTTP: as they were scraped, by signed links, and until they expire."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from conveyor.domain.model import Problem
from tests.unit.http_api import ORIGIN, PAGE, PAGE_TYPE, Api, open_api, problem_of
from tests.unit.result_pages import listed

DAY = 86_400.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with open_api(tmp_path / "data") as opened:
        yield opened


@pytest.mark.guarantee("G11")
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
        assert head.status_code == 200
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
    assert head.status_code == 200
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
    run_id = job["latest_run"]["run_id"]
    await api.binding.tasks.scrub_tasks(run_id, 10)
    await api.binding.runs.purge_run(run_id)
    await api.binding.jobs.purge_job(job["job_id"])
    problem_of(await api.bare.get(str(row.result_url)), status=404, code="not_found")


@pytest.mark.parametrize("left", [None, 0, 5])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_a_body_that_lost_bytes_is_told_before_the_answer_begins(
    api: Api, left: int | None, method: str
) -> None:
    job = await api.submit(1)
    [task] = await api.drain(job)
    path = f"/v1/jobs/{job['job_id']}"
    [row] = await listed(api, f"{path}/results")
    stored = await api.binding.tasks.get_task(job["latest_run"]["run_id"], task.task_id)
    assert stored is not None
    assert stored.result is not None
    if left is None:
        await api.binding.blobs.delete(stored.result.blob_key)
    else:
        await api.binding.blobs.put(stored.result.blob_key, PAGE[:left])
    by_key = await api.client.request(method, f"{path}/tasks/{task.task_id}/content")
    by_link = await api.bare.request(method, str(row.result_url))
    for answer in (by_key, by_link):
        assert answer.status_code == 410
        if method == "GET":
            problem = problem_of(answer, status=410, code="result_expired")
            assert "missing, or lost some bytes" in problem["detail"]


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
