"""Templates go with their jobs, and never before: whatever is killed in between."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from conveyor.domain.model import RunStatus
from conveyor.domain.schedule import Schedule
from conveyor.handlers.sweep import STAGED_FOR, TEMPLATES_INTERVAL, Sweeper, SweepOptions
from conveyor.ports.queues import CONTROL_QUEUE, DeleteMessage
from conveyor.service import Service, ServiceOptions
from conveyor.testing.clock import FakeClock
from tests.unit.schedule_world import (
    API_KEY,
    CALLER,
    DAY,
    HOUR,
    VISIBILITY,
    Schedules,
    open_schedules,
)
from tests.unit.wired_handlers import sweeper
from tests.webhooks import loopback_webhooks


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[Schedules]:
    async with open_schedules(tmp_path) as opened:
        yield opened


def _sweeper(world: Schedules) -> Sweeper:
    options = SweepOptions(
        interval=60,
        quiet_after=300,
        row_retention_days=30,
        delivery_retention_days=30,
        fire_retention_days=30,
    )
    return sweeper(world.binding, world.clock, options=options)


async def _scrub(world: Schedules) -> None:
    """Handle deletions, with the second pass that follows the first."""
    await world.work()
    await world.clock.advance(VISIBILITY + 1)
    await world.work()


@pytest.mark.guarantee("G10")
async def test_deleting_a_job_removes_its_template_at_the_end(world: Schedules) -> None:
    job, other = await world.add(), await world.add()
    await world.look(HOUR)
    await world.work()
    run_ids = await world.binding.jobs.delete_job(CALLER, job.job_id, now=world.clock.now())
    for run_id in run_ids:
        await world.binding.queues.send(CONTROL_QUEUE, DeleteMessage(job.job_id, run_id))
    await _scrub(world)
    assert await world.binding.jobs.find_job(job.job_id) is None
    assert await world.fires(job) == []
    [left] = await world.templates()
    assert left.startswith(f"templates/{other.job_id}/")


@pytest.mark.parametrize("is_told", [True, False])
async def test_deleting_a_job_that_never_fired_leaves_nothing(
    world: Schedules, *, is_told: bool
) -> None:
    """Also where the api dies after the tombstone: the sweeper sends what it did not."""
    service = Service(
        world.binding,
        ServiceOptions(public_origin="http://127.0.0.1:9000"),
        world.clock,
        webhooks=loopback_webhooks(world.clock),
    )
    caller = service.identify(API_KEY)
    job = await world.add(caller=caller.caller_id)
    if is_told:
        await service.lifecycle.delete_job(caller.caller_id, job.job_id)
    else:
        now = world.clock.now()
        assert await world.binding.jobs.delete_job(caller.caller_id, job.job_id, now=now) == []
        await _sweeper(world).sweep()
    assert (await world.job(job.job_id)).status == "deleted"
    await world.work()
    assert await world.binding.jobs.find_job(job.job_id) is None
    assert await world.templates() == []


async def test_deleting_a_run_keeps_the_template(world: Schedules) -> None:
    job = await world.add()
    await world.look(HOUR)
    await world.work()
    [run] = await world.runs(job)
    await world.stop(job)
    await world.binding.runs.delete_run(CALLER, job.job_id, run.run_id, now=world.clock.now())
    await world.binding.queues.send(CONTROL_QUEUE, DeleteMessage(job.job_id, run.run_id))
    await _scrub(world)
    assert await world.runs(job) == []
    assert len(await world.templates()) == 1
    await world.look(HOUR)
    assert (await world.runs(job))[-1].status is RunStatus.RUNNING


async def test_a_single_time_that_has_fired_goes_with_its_run(world: Schedules) -> None:
    job = await world.add(Schedule(at="2026-01-01T12:00", timezone="UTC"))
    await world.look(12 * HOUR)
    await world.work()
    await world.stop(job)
    sweep = _sweeper(world)
    for _ in range(50):
        await world.clock.advance(DAY)
        await sweep.sweep()
        await _scrub(world)
    assert await world.binding.jobs.find_job(job.job_id) is None
    assert await world.templates() == []


async def test_lists_that_a_submit_left_behind_are_removed_after_a_day(world: Schedules) -> None:
    """One of a job that was never written, and one of an attempt that another one overtook."""
    lost = await world.stage(world.draft())
    job = await world.add()
    assert job.scheduling is not None
    await world.stage(world.draft(job_id=job.job_id))
    assert len(await world.templates()) == 3
    sweep = _sweeper(world)
    await sweep.sweep()
    await world.clock.advance(TEMPLATES_INTERVAL)
    await sweep.sweep()
    assert len(await world.templates()) == 3, "a submit may still be under way"
    await world.clock.advance(STAGED_FOR / 1_000)
    await sweep.sweep()
    [left] = await world.templates()
    assert left.startswith(f"templates/{job.job_id}/{job.scheduling.template.list_id}/")
    assert await world.binding.jobs.find_job(lost.job_id) is None


async def test_many_templates_are_looked_at_in_turns(world: Schedules) -> None:
    """No look outlasts the claim of its sweep, and the next one goes on."""
    from conveyor.handlers import sweep

    class SlowBlobs:
        def __init__(self) -> None:
            self.pages: list[str] = []

        async def list_keys(self, prefix: str, *, after: str, limit: int) -> list[str]:
            self.pages.append(after)
            first = int(after[-11:]) + 1 if after else 0
            await world.clock.advance(10.0)
            count = limit if len(self.pages) < 3 else limit - 1
            job_id = "0" * 26
            return [f"{prefix}{job_id}/{job_id}/{first + n:011}" for n in range(count)]

        async def delete_prefix(self, prefix: str, **_: Any) -> int:
            return 0

    blobs = SlowBlobs()
    look = sweep.Templates(
        world.clock,
        jobs=world.binding.jobs,
        blobs=cast(Any, blobs),
        queues=world.binding.queues,
    )
    for _ in range(3):
        await look.look(until=world.clock.monotonic() + 1.0)
    assert len(blobs.pages) == 3
    assert blobs.pages == sorted(set(blobs.pages))
    await look.look(until=world.clock.monotonic() + 1.0)
    assert len(blobs.pages) == 3


@pytest.mark.guarantee("G10")
async def test_a_boot_clears_what_a_kill_left_of_templates(tmp_path: Path) -> None:
    clock = FakeClock()
    async with open_schedules(tmp_path, clock=clock) as world:
        lost = await world.stage(world.draft())
        job = await world.add()
        await world.stage(world.draft(job_id=job.job_id))
        unfired, fired = await world.add(), await world.add()
        await world.look(HOUR)
        assert unfired.scheduling is not None
        await world.change(unfired, paused=True)
        for one in (unfired, fired):
            await world.binding.jobs.delete_job(CALLER, one.job_id, now=clock.now())
        assert len(await world.templates()) == 5
    async with open_schedules(tmp_path, clock=clock) as world:
        await _scrub(world)
        assert job.scheduling is not None
        [left] = await world.templates()
        assert left.startswith(f"templates/{job.job_id}/{job.scheduling.template.list_id}/")
        for one in (lost, unfired, fired):
            assert await world.binding.jobs.find_job(one.job_id) is None
