"""Scheduled jobs on DynamoDB, for tests: made, fired, and looked at as they lie there."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import structs

from conveyor.domain import ids
from conveyor.domain.fires import run_from_template
from conveyor.domain.model import Job, JobStatus
from conveyor.domain.schedule import Rate, Schedule
from conveyor.domain.scheduling import FireRecord, FireStatus, Scheduling, SkipReason, Template
from conveyor.ports.ingestion import StagedRows
from conveyor.ports.records import IdempotencyScope, StoredResponse
from conveyor.ports.schedules import ScheduleChange
from tests.conformance.world import CALLER, World, spec

HOURLY = Schedule(rate=Rate(1, "hour"))
AT = Schedule(at="2027-09-01T09:00", timezone="Europe/Berlin")
HOUR = 3_600_000
MADE = StoredResponse(201, b"made")
DONE = StoredResponse(200, b"done")


def draft(
    world: World, *, next_at: int | None = 0, schedule: Schedule = HOURLY, **fields: Any
) -> Job:
    """A scheduled job, not written yet. A `next_at` of 0 stands for this instant."""
    scheduling = Scheduling(
        schedule=schedule,
        template=Template(rows=2, units=2, chunks=(0,)),
        anchor=world.now,
        next_at=world.now if next_at == 0 else next_at,
    )
    return Job(
        job_id=world.clock.new_id(),
        status=JobStatus.CLOSED,
        created_at=world.now,
        updated_at=world.now,
        scheduling=scheduling,
        **({"caller": CALLER} | fields),
    )


async def scheduled(
    world: World,
    *,
    next_at: int | None = 0,
    once: IdempotencyScope | None = None,
    **fields: Any,
) -> Job:
    """Write a scheduled job."""
    job = draft(world, next_at=next_at, **fields)
    await world.store.jobs.create_job(job, None, [], answer=MADE, once=once)
    return job


def moved(job: Job, *, next_at: int | None) -> Job:
    """The next version of a job, with another next fire."""
    assert job.scheduling is not None
    scheduling = structs.replace(job.scheduling, next_at=next_at)
    return structs.replace(job, scheduling=scheduling, version=job.version + 1)


def fire(world: World, job: Job) -> ScheduleChange:
    """The change of a fire that makes a run; the next one is an hour later."""
    assert job.scheduling is not None
    assert job.scheduling.next_at is not None
    instant = job.scheduling.next_at
    after, run = run_from_template(
        job, run_id=world.clock.new_id(), trigger="scheduled", now=world.now
    )
    row = structs.replace(
        skipped(world, instant), status=FireStatus.STARTED, reason=None, run_id=run.run_id
    )
    after = structs.replace(moved(job, next_at=instant + HOUR), latest_run_id=after.latest_run_id)
    after = structs.replace(after, run_count=run.run_sequence)
    return ScheduleChange(before=job, after=after, run=run, fires=(row,))


def skipped(world: World, instant: int) -> FireRecord:
    """A new row of a fire that was skipped."""
    return FireRecord(
        fire_id=world.clock.new_id(),
        status=FireStatus.SKIPPED,
        nominal="2026-01-01T00:00:00",
        instant=instant,
        last_nominal="2026-01-01T00:00:00",
        last_instant=instant,
        noted_at=world.now,
        reason=SkipReason.RUN_LIVE,
    )


async def fired(world: World, job: Job) -> Job:
    """Fire a job, and return it afterwards."""
    change = fire(world, job)
    assert await world.store.schedules.change_schedule(change)
    return change.after


async def finished(world: World, job: Job) -> None:
    """Write the tasks of a job's live run, and end each successfully."""
    run_id = job.latest_run_id
    assert run_id is not None
    pairs = [(ids.task_id(run_id, index), spec(index)) for index in range(2)]
    rows = StagedRows(0, 2, msgspec.json.encode(pairs))
    assert await world.store.ingestion.write_rows(run_id, rows, now=world.now)
    await world.store.ingestion.finish_ingest(run_id, now=world.now)
    for index in range(2):
        await world.succeed(run_id, index)


async def due(world: World, *, limit: int = 100) -> list[str]:
    """Return the ids of the jobs that are due."""
    found = await world.store.schedules.due_schedules(now=world.now, limit=limit)
    return [job.job_id for job in found]


async def listed(world: World, *, after: str = "", limit: int = 100) -> list[str]:
    """Return the ids of the scheduled jobs."""
    found = await world.store.schedules.list_schedules(after=after, limit=limit)
    return [job.job_id for job in found]


async def run_ids(world: World, job_id: str) -> list[str]:
    """Return the ids of the runs of a job, oldest first."""
    runs = await world.store.runs.list_runs(CALLER, job_id, before=None, limit=100)
    return [run.run_id for run in reversed(runs)]


async def fires(world: World, job_id: str) -> list[FireRecord]:
    """Return the rows of a job's fires, newest first."""
    return await world.store.schedules.list_fires(job_id, before=None, limit=100)
