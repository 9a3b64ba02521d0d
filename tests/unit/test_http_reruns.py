"""Reruns over HTTP."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from zenrows.batch.models import RerunJobResponse

from conveyor.domain import ids
from conveyor.domain.model import Task, TaskStatus
from conveyor.domain.task_rules import Released
from conveyor.handlers.ingest import HELD_PAUSE, IngestHandler
from conveyor.ports.handler import ACKNOWLEDGE
from conveyor.ports.queues import CONTROL_QUEUE, run_queue
from conveyor.ports.records import StoredResponse
from tests.unit.http_api import PAGE, Api, open_api, problem_of
from tests.unit.wired_handlers import ingest_handler

DAY = 86_400.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with open_api(tmp_path / "data") as opened:
        yield opened


async def rerun(api: Api, job: dict[str, Any], **params: str) -> httpx.Response:
    """Ask for a rerun."""
    return await api.client.post(f"/v1/jobs/{job['job_id']}/rerun", params=params)


async def enqueued(api: Api, run_id: str) -> set[str | None]:
    """The tasks that wait in a run's queue, 10 at most."""
    deliveries = await api.binding.queues.receive(run_queue(run_id), limit=10, visibility=60)
    return {getattr(delivery.message, "task_id", None) for delivery in deliveries}


async def test_a_full_rerun_starts_every_task_afresh(api: Api) -> None:
    job = await api.submit(3)
    before = await api.drain(job, failing=1)

    response = await rerun(api, job)

    answer = RerunJobResponse.model_validate(response.json())
    assert response.status_code == 201
    assert answer.latest_run.run_sequence == 2
    assert answer.latest_run.status.value == "running"
    assert answer.rerun_of == job["latest_run"]["run_id"]
    assert (answer.retried_tasks, answer.inherited_tasks) == (3, 0)
    after = await api.tasks_of(answer.latest_run.run_id)
    assert [task.task_id for task in after] == [task.task_id for task in before]
    assert {task.status for task in after} == {TaskStatus.PENDING}
    assert {task.source_run_id for task in after} == {None}
    assert await enqueued(api, answer.latest_run.run_id) == {task.task_id for task in before}
    read = await api.client.get(f"/v1/jobs/{job['job_id']}")
    assert read.json()["latest_run"]["run_id"] == answer.latest_run.run_id


async def test_a_partial_rerun_redoes_what_matches_and_inherits_the_rest(api: Api) -> None:
    job = await api.submit(4)
    before = await api.drain(job, failing=2)
    first = job["latest_run"]["run_id"]

    response = await rerun(api, job, status="failed")

    answer = RerunJobResponse.model_validate(response.json())
    second = answer.latest_run.run_id
    assert (answer.retried_tasks, answer.inherited_tasks) == (2, 2)
    stats = answer.latest_run.stats
    assert (stats.total, stats.completed, stats.successful) == (4, 2, 2)
    assert await enqueued(api, second) == {task.task_id for task in before[:2]}
    results = await api.client.get(f"/v1/jobs/{job['job_id']}/results")
    rows = results.json()["results"]
    assert [row.get("source_run_id") for row in rows] == [None, None, first, first]
    body = await api.client.get(f"/v1/jobs/{job['job_id']}/tasks/{before[3].task_id}/content")
    assert body.content == PAGE
    assert (await api.bare.get(rows[3]["result_url"])).content == PAGE
    pinned = await api.client.delete(f"/v1/jobs/{job['job_id']}/runs/{first}")
    problem_of(pinned, status=409, code="run_has_descendants")


async def test_a_rerun_closes_an_open_job(api: Api) -> None:
    job = await api.submit(1, status="open")
    await api.client.post(f"/v1/jobs/{job['job_id']}/stop")

    response = await rerun(api, job)

    assert response.json()["status"] == "closed"


async def test_a_rerun_of_a_live_run_is_refused(api: Api) -> None:
    job = await api.submit(1)

    problem_of(await rerun(api, job), status=409, code="run_not_terminal")


async def test_a_partial_rerun_that_matches_nothing_is_refused(api: Api) -> None:
    job = await api.submit(1)
    await api.drain(job)

    problem_of(await rerun(api, job, status="failed"), status=409, code="no_matching_tasks")


async def test_a_partial_rerun_comes_too_late_after_its_window(api: Api) -> None:
    job = await api.submit(1)
    await api.drain(job, failing=1)
    api.clock.shift(10 * DAY + 1)

    late = await rerun(api, job, status="failed")
    full = await rerun(api, job)

    problem_of(late, status=409, code="partial_rerun_window_expired")
    assert full.status_code == 201


async def test_states_that_do_not_exist_are_refused(api: Api) -> None:
    job = await api.submit(1)

    for status in ("", "unknown", "failed,", ",", "all", "failed;pending", "FAILED", "expired"):
        refused = await rerun(api, job, status=status)
        problem_of(refused, status=400, code="invalid_argument")


async def test_a_filter_in_the_body_is_not_taken_for_a_full_rerun(api: Api) -> None:
    job = await api.submit(1)
    await api.drain(job, failing=1)

    response = await api.client.post(f"/v1/jobs/{job['job_id']}/rerun", json={"status": "failed"})

    problem_of(response, status=400, code="invalid_argument")
    assert (await api.client.post(f"/v1/jobs/{job['job_id']}/rerun", json={})).status_code == 201


async def test_a_rerun_waits_for_calls_in_flight(api: Api) -> None:
    job = await api.submit(2)
    [task, _] = await api.tasks_of(job["latest_run"]["run_id"])
    claimed = await api.claim(task.run_id, task.task_id)
    await api.client.post(f"/v1/jobs/{job['job_id']}/stop")
    answers: list[httpx.Response] = []

    async def ask() -> None:
        answers.append(await rerun(api, job, status="pending"))

    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        await until_asleep(api)
        assert not answers
        await api.settle(claimed, Released())
        await api.clock.advance(1)

    assert answers[0].json()["retried_tasks"] == 2


async def test_a_rerun_gives_up_on_calls_that_never_end(api: Api) -> None:
    job = await api.submit(1)
    [task] = await api.tasks_of(job["latest_run"]["run_id"])
    await api.claim(task.run_id, task.task_id)
    await api.client.post(f"/v1/jobs/{job['job_id']}/stop")
    answers: list[httpx.Response] = []

    async def ask() -> None:
        answers.append(await rerun(api, job))

    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        while not answers:
            await until_asleep(api)
            await api.clock.advance(0.05)

    problem_of(answers[0], status=409, code="run_not_terminal")
    assert 5 <= api.clock.monotonic() < 6
    assert len((await api.client.get(f"/v1/jobs/{job['job_id']}/runs")).json()["runs"]) == 1


async def test_a_rerun_waits_for_calls_in_flight_in_every_shard(api: Api) -> None:
    job = await api.submit(3, status="open")
    run_id = job["latest_run"]["run_id"]
    claimed = await api.claim(run_id, ids.task_id(run_id, 2))
    await api.client.post(f"/v1/jobs/{job['job_id']}/stop")
    answers: list[httpx.Response] = []

    async def ask() -> None:
        answers.append(await rerun(api, job))

    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        await until_asleep(api)
        assert not answers
        await api.settle(claimed, Released())
        await api.clock.advance(1)

    assert answers[0].json()["retried_tasks"] == 3


async def test_waiting_for_calls_in_flight_asks_the_store_a_few_times(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time it looks through all rows of the run. In between one row is looked at, ever less
    often, however many calls there are and however they end."""
    job = await api.submit(40)
    tasks = await api.tasks_of(job["latest_run"]["run_id"])
    held = [await api.claim(task.run_id, task.task_id) for task in tasks[10:40]]
    await api.client.post(f"/v1/jobs/{job['job_id']}/stop")
    looks: Counter[str] = Counter()

    async def make(*args: Any, **named: Any) -> StoredResponse:
        looks["reruns"] += 1
        return await real_rerun(*args, **named)

    async def one(*args: Any) -> Task | None:
        looks["single rows"] += 1
        return await real_one(*args)

    real_rerun, real_one = api.binding.runs.rerun, api.binding.tasks.get_task
    monkeypatch.setattr(api.binding.runs, "rerun", make)
    monkeypatch.setattr(api.binding.tasks, "get_task", one)
    monkeypatch.setattr(api.binding.tasks, "page_tasks", None)
    answers: list[httpx.Response] = []

    async def ask() -> None:
        answers.append(await rerun(api, job))

    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        while not answers:
            await until_asleep(api)
            # Just before each look the call ends that is looked at.
            if held:
                await api.settle(held.pop(0), Released())
            await api.clock.advance(0.05)

    assert answers[0].status_code == 201
    assert 2 <= looks["reruns"] <= 14
    assert looks["single rows"] <= 14


async def test_a_large_rerun_waits_for_no_call(tmp_path: Path) -> None:
    async with open_api(tmp_path / "data", async_threshold=2) as api:
        document = {"tasks": [{"url": f"https://site.test/{number}"} for number in range(3)]}
        job = (await api.client.post("/v1/jobs", json=document)).json()
        ingest = ingest_handler(api.binding, api.clock)
        await ingested(api, ingest)
        claimed = await api.claim(
            job["latest_run"]["run_id"], ids.task_id(job["latest_run"]["run_id"], 1)
        )
        await api.client.post(f"/v1/jobs/{job['job_id']}/stop")

        answer = await rerun(api, job)
        assert answer.status_code == 202
        assert not api.clock.pending
        run_id = answer.json()["latest_run"]["run_id"]
        for _ in range(3):
            await ingested(api, ingest)
            assert await api.tasks_of(run_id) == []
            assert await enqueued(api, run_id) == set()
            await api.clock.advance(HELD_PAUSE)
        await api.settle(claimed, Released())
        await ingested(api, ingest)
        assert len(await api.tasks_of(run_id)) == 3
        assert len(await enqueued(api, run_id)) == 3
        assert await api.binding.queues.receive(CONTROL_QUEUE, limit=10, visibility=60) == []


async def ingested(api: Api, handler: IngestHandler) -> None:
    """Do the one thing that waits in the control lane."""
    [delivery] = await api.binding.queues.receive(CONTROL_QUEUE, limit=10, visibility=60)
    assert await handler.handle(delivery, lambda: None) == ACKNOWLEDGE
    await api.binding.queues.delete(CONTROL_QUEUE, [delivery.receipt])


async def test_a_claim_that_has_lapsed_holds_up_nothing(api: Api) -> None:
    job = await api.submit(1)
    [task] = await api.tasks_of(job["latest_run"]["run_id"])
    await api.claim(task.run_id, task.task_id, seconds=1)
    await api.client.post(f"/v1/jobs/{job['job_id']}/stop")
    api.clock.shift(2)

    assert (await rerun(api, job)).status_code == 201


async def until_asleep(api: Api) -> None:
    """Wait, in real time, until the server sleeps or has answered."""
    with anyio.move_on_after(0.2):
        while not api.clock.pending:  # noqa: ASYNC110  (a fake clock has no event for this)
            await anyio.sleep(0.001)
