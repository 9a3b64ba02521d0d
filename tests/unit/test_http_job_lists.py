"""Lists of jobs and of runs over HTTP: order, pages, filters, cursors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from zenrows.batch.models import ListJobRunsResponse, ListJobsResponse, Run

from tests.unit.http_api import Api, open_api, problem_of

NOWHERE = "01ARZ3NDEKTSV4RRFFQ69G5FAV"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with open_api(tmp_path / "data") as opened:
        yield opened


async def test_jobs_are_listed_newest_first_page_by_page(api: Api) -> None:
    made = [(await api.submit(1))["job_id"] for _ in range(5)]
    opened = (await api.submit(0, status="open"))["job_id"]

    seen: list[str] = []
    cursor: str | None = None
    while True:
        params = {"limit": "2"} | ({"cursor": cursor} if cursor else {})
        page = ListJobsResponse.model_validate(
            (await api.client.get("/v1/jobs", params=params)).json()
        )
        assert len(page.jobs) == 2
        seen += [job.job_id for job in page.jobs]
        cursor = page.next_cursor
        if cursor is None:
            break

    assert seen == [opened, *reversed(made)]
    only_open = await api.client.get("/v1/jobs", params={"status": "open"})
    assert [job["job_id"] for job in only_open.json()["jobs"]] == [opened]
    scheduled = await api.client.get("/v1/jobs", params={"type": "scheduled"})
    assert scheduled.json() == {"jobs": []}


async def test_a_cursor_of_another_list_is_refused(api: Api) -> None:
    for _ in range(2):
        await api.submit(1)
    cursor = (await api.client.get("/v1/jobs", params={"limit": "1"})).json()["next_cursor"]

    filtered = await api.client.get("/v1/jobs", params={"cursor": cursor, "status": "closed"})
    foreign = await api.foreign.get("/v1/jobs", params={"cursor": cursor})

    problem_of(filtered, status=400, code="invalid_argument")
    problem_of(foreign, status=400, code="invalid_argument")


BAD_PAGES = (
    "limit=0",
    "limit=101",
    "limit=1e1",
    "limit=-1",
    "limit=",
    "limit=5&limit=6",
    "limit=%D9%A1",
    "cursor=AAAA",
    "cursor=%FF%00",
    "cursor=" + "A" * 5_000,
)


async def test_bad_query_values_of_lists_are_refused(api: Api) -> None:
    job = await api.submit(1)

    for query in BAD_PAGES:
        runs = await api.client.get(f"/v1/jobs/{job['job_id']}/runs?{query}")
        problem_of(runs, status=400, code="invalid_argument")
    for query in (*BAD_PAGES, "status=unknown", "status=", "type=weekly"):
        jobs = await api.client.get(f"/v1/jobs?{query}")
        problem_of(jobs, status=400, code="invalid_argument")


async def test_runs_are_listed_and_read(api: Api) -> None:
    job = await api.submit(1)
    path = f"/v1/jobs/{job['job_id']}"
    for _ in range(2):
        await api.client.post(f"{path}/stop")
        assert (await api.client.post(f"{path}/rerun")).status_code == 201

    first = ListJobRunsResponse.model_validate(
        (await api.client.get(f"{path}/runs", params={"limit": "2"})).json()
    )
    second = ListJobRunsResponse.model_validate(
        (await api.client.get(f"{path}/runs", params={"cursor": first.next_cursor})).json()
    )

    exact = await api.client.get(f"{path}/runs", params={"limit": "3"})
    assert ListJobRunsResponse.model_validate(exact.json()).next_cursor is None
    assert [run.run_sequence for run in first.runs] == [3, 2]
    assert [run.run_sequence for run in second.runs] == [1]
    assert second.next_cursor is None
    read = await api.client.get(f"{path}/runs/{second.runs[0].run_id}")
    assert Run.model_validate(read.json()) == second.runs[0]
    missing = await api.client.get(f"{path}/runs/{NOWHERE}")
    problem_of(missing, status=404, code="not_found")
