"""Submits whose list is checked by a child process, and whose rows come after the answer."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from conveyor.domain import ids
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import IngestStatus
from conveyor.ports.binding import Jobs
from conveyor.ports.queues import IngestMessage
from conveyor.service import Service
from conveyor.service.submit import READ_HERE
from tests.unit.http_api import KEY, Api, open_api, problem_of
from tests.unit.large_api import (
    children,
    control_messages,
    eventually,
    large_body,
    nothing_is_left,
    post,
    rows_of,
    run_of,
    staged_files,
    staged_rows,
    tasks_of,
)
from tests.webhooks import loopback_webhooks

KEYED = {"Idempotency-Key": "order-1"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with open_api(tmp_path / "data") as opened:
        yield opened


async def test_two_tasks_that_may_come_later(api: Api) -> None:
    response = await api.client.post("/v1/jobs", json={"tasks": tasks_of(2), "async": True})

    assert response.status_code == 202
    job = response.json()
    assert job["accepted_tasks"] == 2
    latest = job["latest_run"]
    assert (latest["status"], latest["ingest_status"]) == ("running", "pending")
    assert latest["stats"]["total"] == 2
    assert staged_rows(api, job) == [
        (ids.task_id(latest["run_id"], index), f"https://site.test/{index}") for index in range(2)
    ]
    assert await control_messages(api) == [IngestMessage(job["job_id"], latest["run_id"])]
    assert await rows_of(api, job) == []
    run = await run_of(api, job)
    assert run.ingest is not None
    assert (run.ingest.status, run.ingest.end) == (IngestStatus.PENDING, 2)
    assert (run.ingest.chunks, run.next_index) == ((0,), 2)
    shown = (await api.client.get(f"/v1/jobs/{job['job_id']}")).json()
    assert shown["latest_run"]["ingest_status"] == "pending"


async def test_a_run_that_was_written_at_once_tells_of_no_ingestion(api: Api) -> None:
    job = await api.submit(2)

    assert "ingest_status" not in job["latest_run"]


async def test_no_task_is_added_while_those_of_the_submit_are_written(api: Api) -> None:
    document = {"tasks": tasks_of(1), "async": True, "status": "open"}
    job = (await api.client.post("/v1/jobs", json=document)).json()

    added = await api.client.post(f"/v1/jobs/{job['job_id']}/tasks", json={"tasks": tasks_of(1)})

    problem_of(added, status=409, code="run_not_terminal")


@pytest.mark.slow
async def test_twelve_thousand_inline_tasks(api: Api) -> None:
    body = json.dumps({"tasks": tasks_of(12_000)}).encode()
    assert len(body) > READ_HERE

    response = await post(api, body)

    assert response.status_code == 202
    job = response.json()
    run_id = job["latest_run"]["run_id"]
    assert job["latest_run"]["stats"]["total"] == 12_000
    assert staged_rows(api, job) == [
        (ids.task_id(run_id, index), f"https://site.test/{index}") for index in range(12_000)
    ]
    run = await run_of(api, job)
    assert run.ingest is not None
    assert run.ingest.chunks == (0, 10_000)
    found = await api.binding.jobs.find_job(job["job_id"])
    assert found is not None
    assert (found.task_shard_count, found.shard_scheme) == (8, "stripe")
    assert children() == []


async def test_a_large_list_in_a_small_document(tmp_path: Path) -> None:
    async with open_api(tmp_path / "data", async_threshold=3) as api:
        few = await api.client.post("/v1/jobs", json={"tasks": tasks_of(2)})
        many = await api.client.post("/v1/jobs", json={"tasks": tasks_of(3)})

        assert (few.status_code, many.status_code) == (201, 202)
        assert len(staged_rows(api, many.json())) == 3


async def test_a_large_document_of_few_tasks_is_written_at_once(api: Api) -> None:
    response = await post(api, large_body(3, name="n", external_id="e", zenrows_params={"wait": 5}))

    assert response.status_code == 201
    job = response.json()
    run_id = job["latest_run"]["run_id"]
    rows = await rows_of(api, job)
    assert [(row.index, row.task_id, row.spec.url) for row in rows] == [
        (index, ids.task_id(run_id, index), f"https://site.test/{index}") for index in range(3)
    ]
    shown = (await api.client.get(f"/v1/jobs/{job['job_id']}")).json()
    assert (shown["name"], shown["external_id"]) == ("n", "e")
    assert shown["zenrows_params"] == {"wait": "5"}
    found = await api.binding.jobs.find_job(job["job_id"])
    assert found is not None
    assert found.task_shard_count == 1
    assert staged_files(api) == []
    assert api.binding.queues.depth(f"run-{run_id}") == 3


@pytest.mark.parametrize(
    ("options", "count", "document", "shards"),
    [
        ({}, 3, {}, 1),
        ({}, 3, {"status": "open"}, 8),
        ({"task_shard_count": 16, "shard_scheme": "fnv32a"}, 3, {"status": "open"}, 16),
        ({"task_shard_count": 1}, 2_100, {}, 1),
        ({}, 1_999, {}, 1),
        ({}, 2_001, {}, 8),
        ({"async_threshold": 3}, 3, {}, 8),
    ],
)
async def test_rows_are_spread_where_it_pays(
    tmp_path: Path, options: dict[str, Any], count: int, document: dict[str, Any], shards: int
) -> None:
    async with open_api(tmp_path / "data", **options) as api:
        response = await api.client.post("/v1/jobs", json={"tasks": tasks_of(count), **document})

        found = await api.binding.jobs.find_job(response.json()["job_id"])
        assert found is not None
        assert found.task_shard_count == shards
        if shards > 1:
            assert found.shard_scheme == options.get("shard_scheme", "stripe")


async def test_a_few_heavy_tasks_are_spread_too(api: Api) -> None:
    body = {"method": "POST", "body": "x" * 16_000}
    heavy = [{**task, **body} for task in tasks_of(140)]

    response = await api.client.post("/v1/jobs", json={"tasks": heavy})

    assert response.status_code == 201
    found = await api.binding.jobs.find_job(response.json()["job_id"])
    assert found is not None
    assert found.task_shard_count == 8


@pytest.mark.guarantee("G1")
@pytest.mark.slow
async def test_every_bad_task_is_listed_and_nothing_is_left(api: Api) -> None:
    tasks = tasks_of(12_000)
    tasks[7] = {"url": "gopher://x/"}
    tasks[11_999] = {"url": "https://a.test/", "method": "PUT"}

    response = await post(api, json.dumps({"tasks": tasks}).encode(), **KEYED)

    problem = problem_of(response, status=400, code="invalid_argument")
    assert [(bad["index"], bad["reason"]) for bad in problem["invalid_tasks"]] == [
        (7, "unsupported_scheme"),
        (11_999, "unsupported_method"),
    ]
    await nothing_is_left(api)
    assert (await post(api, large_body(1), **KEYED)).status_code == 201


@pytest.mark.slow
async def test_what_is_wrong_with_a_large_document(api: Api) -> None:
    hook = {"url": "http://10.0.0.1/", "signature": False}
    asked: list[tuple[bytes, int, str]] = [
        (large_body(12_000, webhook=hook), 400, "callback_url_unresolvable"),
        (large_body(100_001), 400, "invalid_argument"),
        (large_body(0), 400, "invalid_argument"),
        (b"[" * READ_HERE * 2, 400, "invalid_argument"),
        (large_body(1)[:-1], 400, "invalid_argument"),
    ]
    for body, status, code in asked:
        problem_of(await post(api, body), status=status, code=code)
    await nothing_is_left(api)


@pytest.mark.guarantee("G14")
async def test_a_replay_of_a_large_submit_is_byte_equal(api: Api) -> None:
    body = json.dumps({"tasks": tasks_of(12_000)}).encode()
    first = await post(api, body, **KEYED)

    again = await post(api, body, **KEYED)
    other = await post(api, body + b" ", **KEYED)

    assert (first.status_code, again.status_code) == (202, 202)
    assert again.content == first.content
    assert again.headers["Idempotency-Replayed"] == "true"
    problem_of(other, status=409, code="idempotency_key_conflict")
    assert len((await api.client.get("/v1/jobs")).json()["jobs"]) == 1


async def test_a_list_that_may_not_be_written_is_not_left_behind(tmp_path: Path) -> None:
    async with open_api(tmp_path / "data", max_active_jobs=1) as api:
        await api.submit(1)

        response = await api.client.post("/v1/jobs", json={"tasks": tasks_of(2), "async": True})

        problem_of(response, status=429, code="quota_exceeded")
        assert staged_files(api) == []
        assert await control_messages(api) == []


class LosesAnswers:
    """Jobs whose writes happen and then seem to have failed."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._jobs, name)

    async def create_job(self, *args: Any, **more: Any) -> None:
        await self._jobs.create_job(*args, **more)
        raise ConveyorError(ErrorCode.UNAVAILABLE, "the answer was lost")


async def test_a_list_stays_staged_where_its_job_was_written_after_all(api: Api) -> None:
    jobs: Any = LosesAnswers(api.binding.jobs)
    service = Service(
        dataclasses.replace(api.binding, jobs=jobs),
        api.service.options,
        api.clock,
        webhooks=loopback_webhooks(api.clock),
    )
    body = [json.dumps({"tasks": tasks_of(2), "async": True}).encode()]

    with pytest.raises(ConveyorError, match="lost"):
        await service.submissions.submit(service.identify(KEY), body, keyed=None)

    [job] = (await api.client.get("/v1/jobs")).json()["jobs"]
    assert len(staged_rows(api, job)) == 2


@pytest.mark.guarantee("G14")
async def test_who_takes_over_a_claim_finds_the_list_that_was_staged(api: Api) -> None:
    """The earlier request wrote its job under another key's claim, as after a crash in between."""
    body = json.dumps({"tasks": tasks_of(2), "async": True}).encode()
    first = (await post(api, body)).json()
    await api.binding.idempotency.claim_idempotency_key(
        scope_of(KEYED["Idempotency-Key"], api),
        fingerprint=hashlib.sha256(body).digest(),
        created_id=first["job_id"],
        now=api.clock.now(),
        lapses_at=api.clock.now(),
        expires_at=api.clock.now() + 1_000_000,
    )

    again = await post(api, body, **KEYED)

    assert (again.status_code, again.json()["job_id"]) == (202, first["job_id"])
    assert again.json()["latest_run"]["run_id"] == first["latest_run"]["run_id"]
    assert len(staged_rows(api, first)) == 2
    assert len(staged_files(api)) == 1


def scope_of(key: str, api: Api) -> str:
    caller = api.service.identify(KEY).caller_id
    return hashlib.sha256("\n".join((caller, "POST", "/v1/jobs?", key)).encode()).hexdigest()


@pytest.mark.slow
@pytest.mark.skipif(
    sys.version_info < (3, 11, 7),
    reason="asyncio of early patches reports the pipe of a dead child as an error nobody took",
)
async def test_a_child_killed_from_outside_is_answered_503(api: Api) -> None:
    answers: list[httpx.Response] = []

    async def submit() -> None:
        answers.append(await post(api, large_body(100_000), **KEYED))

    async with anyio.create_task_group() as group:
        group.start_soon(submit)
        await eventually(lambda: bool(children()))
        os.kill(children()[0], signal.SIGKILL)

    problem_of(answers[0], status=503, code="unavailable")
    assert children() == []
    await nothing_is_left(api)
    assert (await post(api, large_body(1), **KEYED)).status_code == 201


@pytest.mark.slow
async def test_lists_that_are_checked_at_the_same_time_do_not_mix(api: Api) -> None:
    answers: dict[int, httpx.Response] = {}

    async def submit(count: int) -> None:
        answers[count] = await post(api, json.dumps({"tasks": tasks_of(count)}).encode())

    async with anyio.create_task_group() as group:
        for count in (10_001, 10_002, 10_003):
            group.start_soon(submit, count)

    for count, response in answers.items():
        assert response.status_code == 202
        rows = staged_rows(api, response.json())
        assert [url for _, url in rows] == [task["url"] for task in tasks_of(count)]
