"""The rows that reads of jobs, runs and failure groups touch are counted, each about once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from conveyor.domain.model import Problem, TaskFailure
from tests.conformance.world import CALLER, World

JOBS = 3
PROBLEM = Problem(code="blocked", title="Blocked", status=502, detail="no")

Read = Callable[[World, str, str], Awaitable[object]]

READS: dict[str, tuple[Read, int]] = {
    "a job": (lambda world, job, _: world.store.jobs.get_job(CALLER, job), 1),
    "a job of anybody": (lambda world, job, _: world.store.jobs.find_job(job), 1),
    "jobs": (
        lambda world, _job, _run: world.store.jobs.list_jobs(
            CALLER, status=None, before=None, limit=10
        ),
        JOBS,
    ),
    "a run": (lambda world, job, run: world.store.runs.get_run(CALLER, job, run), 1),
    "the latest run": (lambda world, job, _: world.store.runs.get_run(CALLER, job, None), 1),
    "runs": (
        lambda world, job, _: world.store.runs.list_runs(CALLER, job, before=None, limit=10),
        1,
    ),
    "changed runs": (
        lambda world, _job, _run: world.store.runs.changed_runs(None, before=None, limit=10),
        JOBS,
    ),
    "failure groups": (lambda world, _, run: world.store.tasks.failure_groups(run), 2),
}


@pytest.mark.parametrize("name", READS)
async def test_the_rows_behind_a_page_are_counted(world: World, name: str) -> None:
    made = [await world.submit(2) for _ in range(JOBS)]
    job_id, run_id = made[0]
    await world.fail(run_id, 0, TaskFailure.BLOCKED, PROBLEM)
    read, rows = READS[name]
    before, returned = world.store.rows_read, world.store.rows_returned
    assert await read(world, job_id, run_id)
    # A store keeps a job and its latest run in one row or in two.
    assert rows <= world.store.rows_read - before <= 2 * rows
    assert world.store.rows_returned == returned


async def test_what_is_not_there_is_not_counted(world: World) -> None:
    before = world.store.rows_read
    assert await world.store.jobs.get_job(CALLER, "J") is None
    assert await world.store.runs.get_run(CALLER, "J", "R") is None
    assert await world.store.tasks.failure_groups("R") is None
    assert world.store.rows_read == before
