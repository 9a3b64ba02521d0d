"""Schedules of a development server at work, in virtual time: from the submit to the results."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.unit.outage_world import OutageWorld, outage_world

MINUTE = 60.0
EACH_MINUTE = {"rate": {"every": 1, "unit": "minute"}}
TASKS = [
    {"url": f"https://site.test/{number}", "external_id": f"task-{number}"} for number in range(5)
]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def _submit(world: OutageWorld, **fields: Any) -> str:
    document = {"type": "scheduled", "tasks": TASKS, **fields}
    answer = await world.client.post("/v1/jobs", json=document)
    assert answer.status_code == 201, answer.text
    job_id: str = answer.json()["job_id"]
    return job_id


async def _runs(world: OutageWorld, job_id: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await world.get(f"/v1/jobs/{job_id}/runs"))["runs"]
    return found


async def _until_run(world: OutageWorld, job_id: str, number: int) -> dict[str, Any]:
    """Let time pass until a job has so many runs, and the newest is over. Threads may need real
    time for what is done already."""
    for _ in range(120):
        runs = await _runs(world, job_id)
        if len(runs) == number and runs[0]["status"] != "running":
            return runs[0]
        await world.clock.advance(2.0)
    raise AssertionError(f"{len(runs)} runs")


@pytest.mark.slow
async def test_each_minute_has_a_run_with_the_results_of_all_tasks(tmp_path: Path) -> None:
    async with outage_world(tmp_path) as world:
        job_id = await _submit(world, schedule=EACH_MINUTE)
        await world.clock.advance(MINUTE - 10.0)
        assert await _runs(world, job_id) == []
        for number in (1, 2):
            run = await _until_run(world, job_id, number)
            assert (run["status"], run["trigger"]) == ("completed", "scheduled")
            page = await world.get(f"/v1/jobs/{job_id}/runs/{run['run_id']}/results")
            assert [row["external_id"] for row in page["results"]] == [
                task["external_id"] for task in TASKS
            ]
            assert {row["status"] for row in page["results"]} == {"successful"}
        assert world.gateway.answers == 2 * len(TASKS)
        page = (await world.client.get("/metrics")).text
        assert 'conveyor_fires_total{outcome="started"} 2.0' in page
        [late] = re.findall(r"^conveyor_fire_late_seconds (\S+)$", page, re.MULTILINE)
        assert 0 <= float(late) < 60


@pytest.mark.slow
async def test_fires_over_the_tasks_of_a_day_are_skipped(tmp_path: Path) -> None:
    async with outage_world(tmp_path, caller_daily_tasks=len(TASKS) + 2) as world:
        job_id = await _submit(world, schedule=EACH_MINUTE)
        await world.clock.advance(MINUTE - 10.0)
        await _until_run(world, job_id, 1)
        await world.clock.advance(2 * MINUTE)
        fires = (await world.get(f"/v1/jobs/{job_id}/schedule/fires"))["fires"]
        [skipped, started] = [(one["status"], one.get("reason")) for one in fires]
        assert (skipped, started) == (("skipped", "quota_exceeded"), ("started", None))
        assert len(await _runs(world, job_id)) == 1
        # Two tasks are left of the day.
        await world.submit(2)


@pytest.mark.slow
async def test_fires_at_a_limit_of_unfinished_jobs_are_skipped(tmp_path: Path) -> None:
    async with outage_world(tmp_path, max_active_jobs=1) as world:
        job_id = await _submit(world, schedule=EACH_MINUTE)
        world.gateway.leaves_at, world.gateway.away = 0.0, 1e9
        await world.submit(1)
        await world.clock.advance(MINUTE + 10.0)
        assert await _runs(world, job_id) == []
        fires = (await world.get(f"/v1/jobs/{job_id}/schedule/fires"))["fires"]
        assert [(one["status"], one["reason"]) for one in fires] == [("skipped", "quota_exceeded")]
