"""Jobs over HTTP: submitting, reading, adding, closing, stopping, pausing, deleting."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from zenrows.batch.models import (
    AddTasksResponse,
    Job,
    Run,
    SubmitJobResponse,
)

from conveyor.domain.api_keys import KeySealer
from conveyor.ports.queues import run_queue
from tests.disk import body_files, files_below
from tests.unit.http_api import KEY, Api, open_api, problem_of


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with open_api(tmp_path / "data") as opened:
        yield opened


async def test_a_submit_answers_with_job_and_run(api: Api) -> None:
    answer = SubmitJobResponse.model_validate(await api.submit(3))

    assert answer.accepted_tasks == 3
    assert answer.status.value == "closed"
    assert answer.latest_run is not None
    assert answer.latest_run.status.value == "running"
    assert (answer.latest_run.stats.total, answer.latest_run.stats.completed) == (3, 0)
    assert answer.latest_run.run_sequence == 1


@pytest.mark.guarantee("G12")
async def test_a_job_comes_back_as_it_was_submitted(api: Api) -> None:
    fields: dict[str, Any] = {
        "name": "Näme",
        "external_id": "order.1",
        "metadata": {"team": "a"},
        "zenrows_params": {"js_render": True, "wait": 20, "custom_headers": {"Referer": "x"}},
        "max_inflight": 7,
        "priority": 9,
        "max_attempts": 2,
        "result_ttl_days": 30,
        "politeness": {"per_host": 3, "per_host_rate": 0.5, "robots": False},
    }
    submitted = await api.submit(1, **fields)

    response = await api.client.get(f"/v1/jobs/{submitted['job_id']}")

    body = response.json()
    job = Job.model_validate(body)
    assert (job.name, job.external_id, job.metadata) == ("Näme", "order.1", {"team": "a"})
    assert job.type.value == "regular"
    assert job.format is not None
    assert job.format.value == "html"
    assert job.zenrows_params is not None
    assert job.zenrows_params["js_render"] == "true"
    assert job.zenrows_params["wait"] == "20"
    assert job.zenrows_params["custom_headers"] == '{"Referer":"x"}'
    assert job.latest_run == SubmitJobResponse.model_validate(submitted).latest_run
    for name in ("max_inflight", "priority", "max_attempts", "result_ttl_days", "politeness"):
        assert body[name] == fields[name]
    assert body["created_at"].endswith("Z")
    assert len(body["created_at"]) == len("2026-01-01T00:00:00.000Z")
    assert "ingest_status" not in body["latest_run"]
    assert "pause_state" not in body["latest_run"]


async def test_the_tasks_are_written_and_enqueued_before_the_answer(api: Api) -> None:
    submitted = await api.submit(3)
    run_id = submitted["latest_run"]["run_id"]

    deliveries = await api.binding.queues.receive(run_queue(run_id), limit=10, visibility=60)

    rows = await api.tasks_of(run_id)
    assert [row.index for row in rows] == [0, 1, 2]
    assert [row.spec.url for row in rows] == [f"https://site.test/{n}" for n in range(3)]
    assert {delivery.message.run_id for delivery in deliveries} == {run_id}
    assert len(deliveries) == 3
    assert run_id in await api.binding.signals.wait()


@pytest.mark.guarantee("G16")
async def test_the_key_is_sealed_for_the_worker_and_nowhere_in_the_clear(
    api: Api, tmp_path: Path
) -> None:
    submitted = await api.submit(1)

    job = await api.binding.jobs.find_job(submitted["job_id"])

    assert job is not None
    assert KeySealer([api.binding.root_secret]).unseal(job) == KEY
    files = list(files_below(tmp_path / "data"))
    assert files
    assert not [path for path in files if KEY.encode() in path.read_bytes()]


@pytest.mark.guarantee("G1")
async def test_every_bad_task_is_listed_and_nothing_is_created(api: Api) -> None:
    tasks = [
        {"url": "https://good.test/"},
        {"url": "ftp://bad.test/"},
        {"url": "https://bad.test/", "external_id": "no spaces"},
        {"url": "https://user:hunter2@bad.test:x/"},
    ]

    response = await api.client.post("/v1/jobs", json={"tasks": tasks})

    problem = problem_of(response, status=400, code="invalid_argument")
    assert [(task["index"], task["reason"]) for task in problem["invalid_tasks"]] == [
        (1, "unsupported_scheme"),
        (2, "invalid_external_id"),
        (3, "malformed_url"),
    ]
    assert "hunter2" not in response.text
    assert (await api.client.get("/v1/jobs")).json() == {"jobs": []}


MALFORMED = (
    b"",
    b"[]",
    b"null",
    b"{",
    b'{"tasks": 5}',
    b'{"tasks": []}',
    b'{"tasks": [{"url": "https://a.test/"}], "tasks": []}',
    b'{"tasks": [{"url": "https://a.test/"}], "priority": 10}',
    b'{"tasks": [{"url": "https://a.test/"}], "priority": true}',
    b'{"tasks": [{"url": "https://a.test/"}], "name": "\xff"}',
    b'{"tasks": [null]}',
    b'{"tasks": [{"url": {}}]}',
    b'{"tasks": [{"url": "https://a.test/"}], "zenrows_params": {"no_such": 1}}',
    b"[" * 100_000,
)


async def test_a_malformed_submit_is_refused(api: Api) -> None:
    for body in MALFORMED:
        response = await api.client.post(
            "/v1/jobs", content=body, headers={"Content-Type": "application/json"}
        )

        problem_of(response, status=400, code="invalid_argument")
    assert (await api.client.get("/v1/jobs")).json() == {"jobs": []}


async def test_an_open_job_takes_tasks_until_its_last_batch(api: Api) -> None:
    job = await api.submit(0, status="open")
    assert job["latest_run"]["status"] == "pending"
    assert job["latest_run"]["last_batch_received"] is False
    path = f"/v1/jobs/{job['job_id']}/tasks"

    first = await api.client.post(path, json={"tasks": [{"url": "https://a.test/"}] * 2})
    last = await api.client.post(
        path, json={"tasks": [{"url": "https://b.test/"}], "last_batch": True}
    )
    late = await api.client.post(path, json={"tasks": [{"url": "https://c.test/"}]})

    answer = AddTasksResponse.model_validate(first.json())
    assert (answer.accepted_tasks, answer.job_status.value) == (2, "open")
    assert answer.latest_run.status.value == "running"
    answer = AddTasksResponse.model_validate(last.json())
    assert (answer.accepted_tasks, answer.job_status.value) == (1, "closed")
    assert answer.latest_run.last_batch_received is True
    problem_of(late, status=409, code="job_not_open")
    run_id = job["latest_run"]["run_id"]
    deliveries = await api.binding.queues.receive(run_queue(run_id), limit=10, visibility=60)
    rows = await api.tasks_of(run_id)
    assert [row.index for row in rows] == [0, 1, 2]
    assert {row.task_id for row in rows} == {
        getattr(delivery.message, "task_id", None) for delivery in deliveries
    }


async def test_adding_to_a_stopped_open_job_is_refused(api: Api) -> None:
    job = await api.submit(1, status="open")
    await api.client.post(f"/v1/jobs/{job['job_id']}/stop")

    response = await api.client.post(
        f"/v1/jobs/{job['job_id']}/tasks", json={"tasks": [{"url": "https://a.test/"}]}
    )

    problem_of(response, status=409, code="job_not_open")


async def test_an_open_job_holds_only_so_many_tasks(tmp_path: Path) -> None:
    async with open_api(tmp_path / "data", max_open_job_tasks=3) as api:
        job = await api.submit(2, status="open")

        response = await api.client.post(
            f"/v1/jobs/{job['job_id']}/tasks", json={"tasks": [{"url": "https://a.test/"}] * 2}
        )

        problem_of(response, status=429, code="quota_exceeded")
        assert len(await api.tasks_of(job["latest_run"]["run_id"])) == 2


async def test_closing_completes_a_run_with_nothing_left(api: Api) -> None:
    job = await api.submit(1, status="open")
    await api.drain(job)
    path = f"/v1/jobs/{job['job_id']}"
    assert (await api.client.get(path)).json()["latest_run"]["status"] == "pending"

    closed = await api.client.post(f"{path}/close")
    again = await api.client.post(f"{path}/close")

    answer = Job.model_validate(closed.json())
    assert answer.status.value == "closed"
    assert answer.latest_run is not None
    assert answer.latest_run.status.value == "completed"
    assert again.json() == closed.json()


@pytest.mark.parametrize("verb", ["stop", "cancel"])
async def test_stopping_is_final_and_idempotent(api: Api, verb: str) -> None:
    job = await api.submit(2)
    path = f"/v1/jobs/{job['job_id']}"
    run_id = job["latest_run"]["run_id"]

    stopped = await api.client.post(f"{path}/{verb}")
    again = await api.client.post(f"{path}/{verb}")

    assert Run.model_validate(stopped.json()).status.value == "stopped"
    assert again.json() == stopped.json()
    assert api.binding.queues.depth(run_queue(run_id)) == 0
    assert await api.binding.runs.dispatchable_run(run_id) is None


async def test_a_completed_run_cannot_be_stopped_or_paused(api: Api) -> None:
    job = await api.submit(1)
    await api.drain(job)
    path = f"/v1/jobs/{job['job_id']}"

    problem_of(await api.client.post(f"{path}/stop"), status=409, code="run_not_stoppable")
    problem_of(await api.client.post(f"{path}/pause"), status=409, code="conflict")
    problem_of(await api.client.post(f"{path}/resume"), status=409, code="conflict")


async def test_a_pause_shows_until_the_run_is_resumed(api: Api) -> None:
    job = await api.submit(1)
    path = f"/v1/jobs/{job['job_id']}"

    paused = await api.client.post(f"{path}/pause")
    repeated = await api.client.post(f"{path}/pause")
    resumed = await api.client.post(f"{path}/resume")

    run = Run.model_validate(paused.json())
    assert run.pause_state is not None
    assert (run.pause_state.value, run.status.value) == ("paused", "running")
    assert repeated.json()["pause_state"] == "paused"
    assert "pause_state" not in resumed.json()


async def test_unfinished_jobs_are_limited_where_that_is_set(tmp_path: Path) -> None:
    async with open_api(tmp_path / "data", max_active_jobs=2) as api:
        job = await api.submit(1)
        await api.submit(1)
        document = {"tasks": [{"url": "https://a.test/"}]}

        refused = await api.client.post("/v1/jobs", json=document)
        foreign = await api.foreign.post("/v1/jobs", json=document)
        await api.drain(job)
        allowed = await api.client.post("/v1/jobs", json=document)

        problem_of(refused, status=429, code="quota_exceeded")
        assert (foreign.status_code, allowed.status_code) == (201, 201)


async def test_the_tasks_of_a_day_are_limited_where_that_is_set(tmp_path: Path) -> None:
    async with open_api(tmp_path / "data", daily_tasks=4) as api:
        job = await api.submit(2)
        await api.drain(job)
        keyed = {"Idempotency-Key": "one"}
        path = f"/v1/jobs/{job['job_id']}/rerun"
        made = await api.client.post(path, headers=keyed)
        again = await api.client.post(path, headers=keyed)
        assert (made.status_code, again.content) == (201, made.content)
        await api.drain(made.json())
        kept = body_files(api.directory)
        document = {"tasks": [{"url": "https://a.test/"}] * 2}

        for one in (
            await api.client.post("/v1/jobs", json=document),
            await api.client.post("/v1/jobs", json=document | {"async": True}),
            await api.client.post(path),
        ):
            problem = problem_of(one, status=429, code="quota_exceeded")
            assert problem["detail"] == (
                "at most 4 tasks a day are accepted (CONVEYOR_CALLER_DAILY_TASKS); "
                "this day ends at 2026-01-02T00:00:00Z"
            )
            assert one.headers["Retry-After"] == "86400"
        assert body_files(api.directory) == kept

        foreign = await api.foreign.post("/v1/jobs", json=document)
        await api.clock.advance(86_400.0)
        allowed = await api.client.post(path)
        assert (foreign.status_code, allowed.status_code) == (201, 201)


async def test_failures_are_told_by_reason_and_no_reason_where_none_failed(api: Api) -> None:
    job = await api.submit(3)
    path = f"/v1/jobs/{job['job_id']}"
    assert "failure_reasons" not in job["latest_run"]["stats"]

    await api.drain(job, failing=2)

    stats = (await api.client.get(path)).json()["latest_run"]["stats"]
    assert (stats["failed"], stats["failure_reasons"]) == (2, {"blocked": 2})
