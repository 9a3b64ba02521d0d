"""Keys and callers: each caller sees only its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from conveyor.http.app import V1_ROUTES
from tests.unit.http_api import Api, open_api, problem_of

EVERY = [(method, path) for path, methods in V1_ROUTES.items() for method in methods]
OF_A_JOB = [(method, path) for method, path in EVERY if "{job_id}" in path]
NOWHERE = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
TASKS = {"tasks": [{"url": "https://a.test/"}]}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with open_api(tmp_path / "data") as opened:
        yield opened


async def test_nothing_is_answered_without_a_key(api: Api) -> None:
    for method, path in EVERY:
        url = path.format(
            job_id=NOWHERE, run_id=NOWHERE, task_id="0" * 26, export_id=NOWHERE, delivery_id=NOWHERE
        )

        missing = await api.bare.request(method, url)
        in_query = await api.bare.request(method, url, params={"apikey": "k", "X-API-Key": "k"})
        empty = await api.bare.request(method, url, headers={"X-API-Key": ""})

        for response in (missing, in_query, empty):
            problem_of(response, status=401, code="unauthenticated")


async def test_a_key_that_no_header_should_hold_is_refused(api: Api) -> None:
    for key in (b"two words", b"caf\xe9", b"k" * 513, b"\x7f"):
        response = await api.bare.get("/v1/jobs", headers=[(b"X-API-Key", key)])

        problem_of(response, status=401, code="unauthenticated")


async def test_the_title_fits_a_missing_key_and_a_wrong_one(api: Api) -> None:
    missing = await api.bare.get("/v1/jobs")
    wrong = await api.bare.get("/v1/jobs", headers=[("X-API-Key", "two words")])

    assert missing.json()["title"] == wrong.json()["title"] == "No valid API key"


async def test_two_keys_are_none(api: Api) -> None:
    response = await api.bare.get(
        "/v1/jobs", headers=[("X-API-Key", "key-of-alice"), ("X-API-Key", "key-of-bob")]
    )

    problem_of(response, status=401, code="unauthenticated")


@pytest.mark.guarantee("G15")
async def test_a_foreign_job_does_not_exist(api: Api) -> None:
    job = await api.submit(1, status="open")
    run_id = job["latest_run"]["run_id"]
    [task] = await api.drain(job)
    before = (await api.client.get(f"/v1/jobs/{job['job_id']}")).content
    for method, path in OF_A_JOB:
        url = path.format(
            job_id=job["job_id"],
            run_id=run_id,
            task_id=task.task_id,
            export_id=NOWHERE,
            delivery_id=NOWHERE,
        )
        content = TASKS if path.endswith(("/tasks", "/webhook")) else None

        foreign = await api.foreign.request(method, url, json=content)
        missing = await api.client.request(
            method, url.replace(job["job_id"], NOWHERE), json=content
        )

        theirs = problem_of(foreign, status=404, code="not_found")
        nobodys = problem_of(missing, status=404, code="not_found")
        assert theirs["detail"] == nobodys["detail"]
    assert (await api.client.get(f"/v1/jobs/{job['job_id']}")).content == before


@pytest.mark.parametrize("garbage", ["x", "01arz3ndektsv4rrffq69g5fav", "%00", "%F0%9F%92%A9"])
async def test_an_id_that_cannot_be_one_is_not_found(api: Api, garbage: str) -> None:
    for method, path in OF_A_JOB:
        url = path.format(
            job_id=garbage, run_id=garbage, task_id=garbage, export_id=garbage, delivery_id=garbage
        )

        response = await api.client.request(
            method, url, json=TASKS if path.endswith("/tasks") else None
        )

        problem_of(response, status=404, code="not_found")


async def test_ids_of_runs_and_tasks_that_cannot_be_ones_are_not_found(api: Api) -> None:
    job = await api.submit(1)
    for method, path in OF_A_JOB:
        if not {"{run_id}", "{task_id}"} & set(path.split("/")):
            continue
        url = path.format(
            job_id=job["job_id"], run_id="x", task_id="x", export_id="x", delivery_id="x"
        )

        problem_of(await api.client.request(method, url), status=404, code="not_found")


async def test_another_jobs_run_is_not_found(api: Api) -> None:
    one, other = await api.submit(1), await api.submit(1)
    [task] = await api.drain(other)
    path = f"/v1/jobs/{one['job_id']}/runs/{other['latest_run']['run_id']}"

    for method, rest in [
        ("GET", ""),
        ("DELETE", ""),
        ("GET", "/results"),
        ("GET", f"/tasks/{task.task_id}/content"),
        ("GET", f"/tasks/{task.task_id}/history"),
    ]:
        response = await api.client.request(method, path + rest)
        problem_of(response, status=404, code="not_found")


async def test_fields_that_ask_for_nothing_are_taken(api: Api) -> None:
    nothing = {"async": False, "schedule": None, "webhook": None, "file_input_id": None}

    response = await api.client.post("/v1/jobs", json={**TASKS, **nothing})

    assert response.status_code == 201
    assert "warnings" not in response.json()


@pytest.mark.parametrize("schedule", [{"rate": {"every": 1, "unit": "day"}}, {}, "daily", 5])
async def test_the_schedule_of_a_regular_job_is_ignored(api: Api, schedule: object) -> None:
    for fields in ({"schedule": schedule}, {"type": "regular", "schedule": schedule}):
        response = await api.client.post("/v1/jobs", json={**TASKS, **fields})

        assert response.status_code == 201
        assert response.json()["warnings"] == ['"schedule" was ignored: the job is regular']
        assert (
            "schedule" not in (await api.client.get(f"/v1/jobs/{response.json()['job_id']}")).json()
        )


async def test_large_submits_come_later_and_larger_ones_are_refused(tmp_path: Path) -> None:
    async with open_api(tmp_path / "data", async_threshold=3, max_inline_tasks=5) as api:
        answers = [
            await api.client.post("/v1/jobs", json={"tasks": TASKS["tasks"] * count})
            for count in (2, 3, 5, 6)
        ]

        assert [answer.status_code for answer in answers[:3]] == [201, 202, 202]
        problem_of(answers[3], status=400, code="invalid_argument")
