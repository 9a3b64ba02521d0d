"""The other operations of the API on scheduled jobs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from zenrows.batch.models import RerunJobResponse

from conveyor.domain.fires import run_from_template
from conveyor.ports.queues import DeleteMessage, TemplateMessage
from conveyor.ports.schedules import ScheduleChange
from tests.unit.http_api import Api, open_api, problem_of
from tests.unit.large_api import control_messages, tasks_of
from tests.unit.scheduled_api import (
    KEYED,
    MINUTE,
    RATE,
    shown,
    stored,
    submit,
)


@pytest.fixture
def anyio_backend() -> str:
    """The store runs on asyncio."""
    return "asyncio"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with open_api(tmp_path / "data") as opened:
        yield opened


async def test_the_tasks_of_a_scheduled_job_never_change(api: Api) -> None:
    job_id = await submit(api, RATE)
    path = f"/v1/jobs/{job_id}"

    for response in (
        await api.client.post(f"{path}/tasks", json={"tasks": tasks_of(1)}),
        await api.client.post(f"{path}/close"),
    ):
        problem_of(response, status=409, code="job_not_open")


async def test_nothing_is_found_before_the_first_run(api: Api) -> None:
    path = f"/v1/jobs/{await submit(api, RATE)}"

    problem_of(await api.client.get(f"{path}/results"), status=404, code="not_found")
    assert (await api.client.get(f"{path}/runs")).json() == {"runs": []}
    for operation in ("stop", "cancel", "pause", "resume", "rerun?status=failed"):
        response = await api.client.post(f"{path}/{operation}")
        problem_of(response, status=409, code="no_prior_run")


async def test_a_rerun_without_a_run_makes_the_first_one(api: Api) -> None:
    job_id = await submit(api, RATE)

    response = await api.client.post(f"/v1/jobs/{job_id}/rerun", headers=KEYED)
    again = await api.client.post(f"/v1/jobs/{job_id}/rerun", headers=KEYED)

    assert response.status_code == 202
    made = RerunJobResponse.model_validate_json(response.content, strict=True)
    assert (made.rerun_of, made.retried_tasks, made.inherited_tasks) == (None, 3, 0)
    run = response.json()["latest_run"]
    assert (run["trigger"], run["ingest_status"], run["run_sequence"]) == ("manual", "pending", 1)
    assert run["stats"]["total"] == 3
    assert again.content == response.content
    assert again.headers["Idempotency-Replayed"] == "true"
    assert await control_messages(api) == [TemplateMessage(job_id, run["run_id"])]
    second = await api.client.post(f"/v1/jobs/{job_id}/rerun")
    problem_of(second, status=409, code="run_not_terminal")
    _, plan = await stored(api, job_id)
    assert plan.next_at == plan.anchor + 15 * MINUTE


async def test_a_rerun_that_meets_a_fire_replays_no_second_list(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = await submit(api, RATE)
    change = api.binding.schedules.change_schedule
    sleep = api.clock.sleep
    fired: list[str] = []

    async def meet(made: ScheduleChange) -> bool:
        if not fired:
            fired.append(api.clock.new_id())
            job, _ = await stored(api, job_id)
            after, run = run_from_template(
                job, run_id=fired[0], trigger="scheduled", now=api.clock.now()
            )
            assert await change(ScheduleChange(before=job, after=after, run=run))
        return await change(made)

    async def at_once(_seconds: float) -> None:
        await sleep(0)

    monkeypatch.setattr(api.binding.schedules, "change_schedule", meet)
    monkeypatch.setattr(api.clock, "sleep", at_once)
    response = await api.client.post(f"/v1/jobs/{job_id}/rerun")

    problem_of(response, status=409, code="run_not_terminal")
    [run] = (await api.client.get(f"/v1/jobs/{job_id}/runs")).json()["runs"]
    assert (run["run_id"], run["trigger"]) == (fired[0], "scheduled")


async def test_a_rerun_after_all_runs_were_deleted_takes_the_template(api: Api) -> None:
    job_id = await submit(api, RATE)
    path = f"/v1/jobs/{job_id}"
    first = (await api.client.post(f"{path}/rerun")).json()["latest_run"]
    await api.client.post(f"{path}/stop")
    assert (await api.client.delete(f"{path}/runs/{first['run_id']}")).status_code == 202

    response = await api.client.post(f"{path}/rerun")

    assert response.status_code == 202
    run = response.json()["latest_run"]
    assert (run["run_sequence"], run["stats"]["total"]) == (2, 3)
    assert "rerun_of" not in response.json()


async def test_a_deleted_job_has_no_schedule(api: Api) -> None:
    job_id = await submit(api, RATE)
    await api.client.post(f"/v1/jobs/{job_id}/rerun")
    assert (await api.client.delete(f"/v1/jobs/{job_id}")).status_code == 202

    assert (await shown(api, job_id))["status"] == "deleted"
    for method, path in [("GET", ""), ("PUT", ""), ("POST", "/state"), ("GET", "/fires")]:
        response = await api.client.request(method, f"/v1/jobs/{job_id}/schedule{path}", json=RATE)
        problem_of(response, status=404, code="not_found")
    problem_of(await api.client.post(f"/v1/jobs/{job_id}/close"), status=404, code="not_found")


async def test_a_job_can_be_deleted_before_its_first_run(api: Api) -> None:
    job_id = await submit(api, RATE)

    assert (await api.client.delete(f"/v1/jobs/{job_id}")).status_code == 202

    assert (await api.client.get("/v1/jobs")).json() == {"jobs": []}
    assert (await shown(api, job_id))["status"] == "deleted"
    assert await control_messages(api) == [DeleteMessage(job_id, job_id)]
