"""Scheduled jobs of tests, the changes of one step at a time, and rows of their fires."""

from __future__ import annotations

from typing import Any

from msgspec import structs

from conveyor.domain.fires import run_from_template
from conveyor.domain.model import Job, Run
from conveyor.domain.schedule import Rate, Schedule
from conveyor.domain.scheduling import FireRecord, FireStatus, Scheduling, Template
from conveyor.ports.records import StoredResponse
from conveyor.ports.schedules import ScheduleChange
from tests.conformance.world import World

EVERY_HOUR = Schedule(rate=Rate(1, "hour"))
ONCE = Schedule(at="2027-09-01T09:00", timezone="Europe/Berlin")
HOUR = 3_600_000


def template(rows: int = 3) -> Template:
    """A list of tasks in one chunk."""
    return Template(rows=rows, units=rows, chunks=(0,))


def scheduling(world: World, **fields: Any) -> Scheduling:
    """A schedule that fires each hour, due in an hour, unless fields say otherwise."""
    usual: dict[str, Any] = {
        "schedule": EVERY_HOUR,
        "template": template(),
        "anchor": world.now,
        "next_at": world.now + HOUR,
        "next_nominal": "2026-01-01T01:00:00",
        "zones_version": "2026a",
    }
    return Scheduling(**(usual | fields))


async def schedule_job(world: World, *, of_job: dict[str, Any] | None = None, **fields: Any) -> Job:
    """Write a scheduled job, without a run, and return it; `fields` are of its scheduling."""
    job, _, _ = world.draft(0, **(of_job or {}))
    job = structs.replace(
        job, latest_run_id=None, run_count=0, scheduling=scheduling(world, **fields)
    )
    await world.store.jobs.create_job(job, None, [], answer=StoredResponse(201, b"{}"), once=None)
    return job


async def read_job(world: World, job_id: str) -> Job:
    """Return a job as it stands."""
    job = await world.store.jobs.find_job(job_id)
    assert job is not None
    return job


def moved(world: World, job: Job, **fields: Any) -> Job:
    """The next version of a job; `fields` are of its scheduling."""
    assert job.scheduling is not None
    return structs.replace(
        job,
        scheduling=structs.replace(job.scheduling, **fields),
        updated_at=max(job.updated_at, world.now),
        version=job.version + 1,
    )


def with_run(world: World, job: Job, **fields: Any) -> tuple[Job, Run]:
    """The next version of a job with a run of its template; `fields` are of its scheduling."""
    after, run = run_from_template(
        job, run_id=world.clock.new_id(), trigger="scheduled", now=world.now
    )
    assert after.scheduling is not None
    return structs.replace(after, scheduling=structs.replace(after.scheduling, **fields)), run


def note(world: World, **fields: Any) -> FireRecord:
    """A row of a fire that is due now."""
    usual: dict[str, Any] = {
        "fire_id": world.clock.new_id(),
        "status": FireStatus.STARTED,
        "nominal": "2026-01-01T01:00:00",
        "instant": world.now,
        "last_nominal": "2026-01-01T01:00:00",
        "last_instant": world.now,
        "noted_at": world.now,
    }
    return FireRecord(**(usual | fields))


async def fire(world: World, job_id: str, *fires: FireRecord) -> Run:
    """Make a run by the job's schedule, due again in an hour, and note fires: by default this
    one."""
    before = await read_job(world, job_id)
    after, run = with_run(world, before, next_at=world.now + HOUR)
    noted = fires or (note(world, run_id=run.run_id),)
    change = ScheduleChange(before=before, after=after, run=run, fires=noted)
    assert await world.store.schedules.change_schedule(change)
    return run


async def note_fires(world: World, job_id: str, *fires: FireRecord) -> None:
    """Note fires without a run."""
    before = await read_job(world, job_id)
    change = ScheduleChange(before=before, after=moved(world, before), fires=fires)
    assert await world.store.schedules.change_schedule(change)
