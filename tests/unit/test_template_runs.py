"""Runs of a template: their rows, and what can be done with them as with other runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec import structs

from conveyor.domain import ids
from conveyor.domain.fires import with_schedule
from conveyor.domain.model import Job, Run, RunFailure, RunStatus, TaskStatus
from conveyor.domain.schedule import Rate, Schedule
from conveyor.handlers.sweep import SweepOptions
from conveyor.ports.queues import CONTROL_QUEUE, TemplateMessage
from conveyor.ports.records import Rerun, RerunRequest, StoredResponse
from conveyor.records.blob_keys import template_key
from conveyor.testing.clock import START
from tests.unit.schedule_world import (
    CALLER,
    DAY,
    HOUR,
    Schedules,
    open_schedules,
    spec,
)
from tests.unit.wired_handlers import sweeper

ROWS = 1_234


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[Schedules]:
    async with open_schedules(tmp_path) as opened:
        yield opened


async def _fired(world: Schedules, job: Job, after: float = HOUR) -> Run:
    """Fire a job, and have the rows of its run written."""
    await world.look(after)
    await world.work()
    return (await world.runs(job))[-1]


async def _check_rows(world: Schedules, run: Run, count: int) -> None:
    rows = await world.rows(run.run_id)
    assert [row.index for row in rows] == list(range(count))
    assert [row.task_id for row in rows] == ids.task_ids(run.run_id, 0, count)
    assert [row.spec for row in rows] == [spec(index) for index in range(count)]


async def test_each_run_has_the_rows_of_the_template_in_order(world: Schedules) -> None:
    """Also 400 days after the submit, with the sweeper at work all the time."""
    job = await world.add(rows=ROWS)
    sweep = sweeper(
        world.binding,
        world.clock,
        options=SweepOptions(
            interval=60,
            quiet_after=300,
            row_retention_days=30,
            delivery_retention_days=30,
            fire_retention_days=30,
        ),
    )
    kept = await world.templates()
    for _ in range(3):
        run = await _fired(world, job)
        await _check_rows(world, run, ROWS)
        await world.stop(job)
    await world.change(job, paused=True)
    for _ in range(20):
        await world.look(20 * DAY)
        await sweep.sweep()
        await world.work()
    await world.change(job, paused=False)

    run = await _fired(world, job)

    await _check_rows(world, run, ROWS)
    assert await world.templates() == kept
    assert (await world.record(job))[-1] == ("started", None, 1)
    assert [one.run_sequence for one in await world.runs(job)] == [4]


async def test_a_schedule_paused_for_90_days_is_still_there_and_fires(world: Schedules) -> None:
    job = await world.add()
    await _fired(world, job)
    await world.stop(job)
    await world.change(job, paused=True)
    sweep = sweeper(
        world.binding,
        world.clock,
        options=SweepOptions(
            interval=60,
            quiet_after=300,
            row_retention_days=30,
            delivery_retention_days=30,
            fire_retention_days=30,
        ),
    )
    for _ in range(91):
        await world.look(DAY)
        await sweep.sweep()
        await world.work()
        await world.look(60)
        await world.work()
    assert await world.runs(job) == [], "retention takes the run"
    await world.change(job, paused=False)
    run = await _fired(world, job)
    assert run.run_sequence == 2
    await _check_rows(world, run, 3)


async def test_a_run_that_is_killed_while_it_ingests_goes_on(world: Schedules) -> None:
    """The message comes again, behind rows that are written; and once more when all are."""
    job = await world.add(rows=600)
    await world.look(HOUR)
    [run] = await world.runs(job)
    message = TemplateMessage(job.job_id, run.run_id)
    await world.work()
    await world.binding.queues.send(CONTROL_QUEUE, message)
    await world.binding.queues.send(CONTROL_QUEUE, message)
    await world.work()
    await _check_rows(world, run, 600)
    assert len(await world.templates()) == 1


async def test_a_template_that_lost_a_part_fails_the_run_and_says_so(world: Schedules) -> None:
    job = await world.add(rows=300)
    assert job.scheduling is not None
    key = template_key(job.job_id, job.scheduling.template.list_id, 0)
    await world.binding.blobs.delete(key)
    run = await _fired(world, job)
    assert (run.status, run.failure_reason) == (RunStatus.FAILED, RunFailure.INGEST_FAILED)
    assert run.failure_detail == "a part of the staged list is missing"


async def test_another_schedule_leaves_the_live_run_alone(world: Schedules) -> None:
    job = await world.add()
    run = await _fired(world, job)
    scheduling = await world.scheduling(job)
    now = world.clock.now()
    twice = with_schedule(scheduling, Schedule(rate=Rate(2, "hour")), now=now)
    await world.change(job, anchor=twice.anchor, schedule=twice.schedule, next_at=twice.next_at)
    assert (await world.runs(job))[-1].status is RunStatus.RUNNING
    await world.drain(run)
    assert (await world.runs(job))[-1].status is RunStatus.COMPLETED
    await world.look(HOUR)
    assert len(await world.runs(job)) == 1
    assert len({(await _fired(world, job)).run_id, run.run_id}) == 2
    assert (await world.fires(job))[-1].instant == now + 2 * 3_600_000


async def _rerun(world: Schedules, job: Job, statuses: frozenset[TaskStatus] | None) -> Run:
    request = RerunRequest(
        caller=CALLER,
        job_id=job.job_id,
        run_id=world.clock.new_id(),
        statuses=statuses,
        window_start=START,
        large_from=1_000,
        now=world.clock.now(),
    )

    def answer(_made: Rerun) -> StoredResponse:
        return StoredResponse(201, b"{}")

    await world.binding.runs.rerun(request, answer=answer, once=None)
    return (await world.runs(job))[-1]


async def test_a_fired_run_is_paused_stopped_and_rerun_as_any_other(world: Schedules) -> None:
    job = await world.add(rows=4)
    run = await _fired(world, job)
    for paused in (True, False):
        now = world.clock.now()
        changed = await world.binding.runs.pause_run(CALLER, job.job_id, paused=paused, now=now)
        assert (changed.run_id, changed.paused) == (run.run_id, paused)
    for task in (await world.rows(run.run_id))[:3]:
        await world.succeed(run, task)
    await world.stop(job)

    partial = await _rerun(world, job, frozenset({TaskStatus.PENDING}))

    rows = await world.rows(partial.run_id)
    assert [row.status for row in rows] == [TaskStatus.SUCCESSFUL] * 3 + [TaskStatus.PENDING]
    await world.look(HOUR)
    assert (await world.record(job))[-1] == ("skipped", "run_live", 1)
    await world.stop(job)
    full = await _rerun(world, job, None)
    assert [row.index for row in await world.rows(full.run_id)] == [0, 1, 2, 3]
    await world.stop(job)
    last = await _fired(world, job)
    await _check_rows(world, last, 4)
    assert [one.trigger for one in await world.runs(job)] == [
        "scheduled",
        "manual",
        "manual",
        "scheduled",
    ]


async def test_a_large_template_is_spread_over_the_shards_of_its_job(world: Schedules) -> None:
    job = await world.add(rows=700, task_shard_count=4)
    run = await _fired(world, job)
    pages = [
        await world.binding.tasks.page_tasks(
            run.run_id, shard=shard, statuses=None, after=None, limit=1_000
        )
        for shard in range(4)
    ]
    assert [len(page.tasks) for page in pages] == [175] * 4
    found = sorted((row.index, row.task_id) for page in pages for row in page.tasks)
    assert found == list(enumerate(ids.task_ids(run.run_id, 0, 700)))


async def test_a_run_deleted_before_its_rows_are_written_has_none(world: Schedules) -> None:
    job = await world.add()
    await world.look(HOUR)
    [run] = await world.runs(job)
    now = world.clock.now()
    await world.binding.runs.stop_run(CALLER, job.job_id, now=now)
    await world.binding.runs.delete_run(CALLER, job.job_id, run.run_id, now=now)
    await world.work()
    assert await world.rows(run.run_id) == []
    assert len(await world.templates()) == 1
    again = await _fired(world, job)
    assert again.run_sequence == 2
    assert structs.replace(again, run_id=run.run_id).status is RunStatus.RUNNING
