"""Deletion of jobs and runs over HTTP: the effects at once, and those after the scrub."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from zenrows.batch.models import Job, Run

from conveyor.ports.handler import ACKNOWLEDGE
from conveyor.ports.queues import CONTROL_QUEUE, DeleteMessage, Delivery
from tests.unit.http_api import Api, open_api, problem_of
from tests.unit.wired_handlers import delete_handler


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with open_api(tmp_path / "data") as opened:
        yield opened


@pytest.mark.guarantee("G10")
async def test_a_deleted_job_is_a_tombstone_and_then_gone(api: Api) -> None:
    job = await api.submit(2)
    path = f"/v1/jobs/{job['job_id']}"
    run_id = job["latest_run"]["run_id"]

    deleted = await api.client.delete(path)

    assert (deleted.status_code, deleted.content) == (202, b"")
    shown = (await api.client.get(path)).json()
    assert shown["status"] == shown["latest_run"]["status"] == "deleted"
    assert Job.model_validate(shown).latest_run == Run.model_validate(shown["latest_run"])
    assert (await api.client.get("/v1/jobs?status=deleted")).json()["jobs"] == [shown]
    assert (await api.client.delete(path)).status_code == 202
    assert job["job_id"] not in (await api.client.get("/v1/jobs")).text
    for method, rest in [
        ("POST", "/close"),
        ("POST", "/stop"),
        ("POST", "/pause"),
        ("POST", "/resume"),
        ("POST", "/rerun"),
        ("GET", "/runs"),
        ("GET", "/results"),
        ("GET", f"/runs/{run_id}"),
        ("GET", f"/runs/{run_id}/results"),
        ("DELETE", f"/runs/{run_id}"),
        ("GET", "/webhook"),
    ]:
        response = await api.client.request(method, path + rest)
        problem_of(response, status=404, code="not_found")
    added = await api.client.post(f"{path}/tasks", json={"tasks": [{"url": "https://a.test/"}]})
    problem_of(added, status=404, code="not_found")

    [message, *_] = await api.binding.queues.receive(CONTROL_QUEUE, limit=10, visibility=60)
    assert message.message == DeleteMessage(job["job_id"], run_id)
    await api.binding.runs.purge_run(run_id)
    await api.binding.jobs.purge_job(job["job_id"])
    problem_of(await api.client.get(path), status=404, code="not_found")
    problem_of(await api.client.delete(path), status=404, code="not_found")


async def test_deleting_the_latest_run_brings_back_the_one_before(api: Api) -> None:
    job = await api.submit(1)
    path = f"/v1/jobs/{job['job_id']}"
    first = job["latest_run"]["run_id"]
    await api.client.post(f"{path}/stop")
    second = (await api.client.post(f"{path}/rerun")).json()["latest_run"]["run_id"]

    assert (await api.client.delete(f"{path}/runs/{second}")).status_code == 202
    assert (await api.client.delete(f"{path}/runs/{second}")).status_code == 202

    assert (await api.client.get(path)).json()["latest_run"]["run_id"] == first
    read = await api.client.get(f"{path}/runs/{second}")
    assert Run.model_validate(read.json()).status.value == "deleted"
    results = await api.client.get(f"{path}/runs/{second}/results")
    problem_of(results, status=404, code="not_found")
    messages = await api.binding.queues.receive(CONTROL_QUEUE, limit=10, visibility=60)
    assert messages[0].message == DeleteMessage(job["job_id"], second)


async def test_a_job_without_runs_is_gone_as_soon_as_it_is_deleted(api: Api) -> None:
    job = await api.submit(1)
    path = f"/v1/jobs/{job['job_id']}"
    run_id = job["latest_run"]["run_id"]
    await api.client.delete(f"{path}/runs/{run_id}")
    await api.binding.tasks.scrub_tasks(run_id, 10)
    await api.binding.runs.purge_run(run_id)
    assert "latest_run" not in (await api.client.get(path)).json()
    problem_of(await api.client.get(f"{path}/results"), status=404, code="not_found")
    problem_of(await api.client.post(f"{path}/stop"), status=409, code="no_prior_run")
    problem_of(await api.client.post(f"{path}/rerun"), status=409, code="no_prior_run")

    await api.client.delete(path)

    problem_of(await api.client.get(path), status=404, code="not_found")


@pytest.mark.guarantee("G10")
@pytest.mark.parametrize("a_worker_died", [False, True])
async def test_a_job_goes_with_the_last_of_its_runs(api: Api, a_worker_died: bool) -> None:
    job = await api.submit(1)
    path = f"/v1/jobs/{job['job_id']}"
    first = job["latest_run"]["run_id"]
    await api.client.post(f"{path}/stop")
    second = (await api.client.post(f"{path}/rerun")).json()["latest_run"]["run_id"]
    await api.client.delete(path)
    handler = delete_handler(api.binding, api.clock, visibility=60.0)

    async def scrubbed(run_id: str) -> None:
        message = DeleteMessage(job["job_id"], run_id, final=True)
        delivery = Delivery(CONTROL_QUEUE, message, "receipt", 1)
        assert await handler.handle(delivery, lambda: None) == ACKNOWLEDGE

    await scrubbed(second)
    assert (await api.client.get(path)).json()["status"] == "deleted"
    if a_worker_died:
        # It had removed the run, and not yet the job: the message comes again.
        await api.binding.tasks.scrub_tasks(first, 10)
        await api.binding.runs.purge_run(first)
    assert (await api.client.get(path)).json()["status"] == "deleted"
    await scrubbed(first)
    problem_of(await api.client.get(path), status=404, code="not_found")
