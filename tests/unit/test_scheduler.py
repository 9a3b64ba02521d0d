"""Firing schedules over the development store in virtual time."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import anyio
import pytest
from msgspec import structs

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import RunStatus
from conveyor.domain.schedule import ZONES_VERSION, Calendar, Rate, Schedule
from conveyor.domain.scheduling import Overlap
from conveyor.domain.webhooks import Webhook
from conveyor.handlers import fire
from conveyor.handlers.fire import PUT_OFF
from conveyor.handlers.sweep import SweepOptions
from conveyor.ports.handler import UNEXPECTED_LOGGER
from conveyor.ports.maintenance import StuckIngest
from conveyor.ports.outbox import EntryKey, Subscriber
from conveyor.testing.clock import START
from tests.unit.schedule_world import (
    DAILY,
    DAY,
    HOUR,
    HOURLY,
    INTERVAL,
    Schedules,
    open_schedules,
)
from tests.unit.wired_handlers import sweeper


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[Schedules]:
    async with open_schedules(tmp_path) as opened:
        yield opened


async def test_a_due_schedule_makes_a_run_and_asks_for_its_rows(world: Schedules) -> None:
    job = await world.add()
    await world.look(HOUR - 1)
    assert await world.runs(job) == []

    await world.look(2)

    [run] = await world.runs(job)
    assert (run.trigger, run.run_sequence, run.status) == ("scheduled", 1, RunStatus.RUNNING)
    assert (await world.job(job.job_id)).latest_run_id == run.run_id
    [row] = await world.fires(job)
    assert (row.status, row.run_id, row.instant) == ("started", run.run_id, START + 3_600_000)
    assert world.outcomes == {"started": 1}
    assert world.schedulers[-1].late == 1.0
    assert await world.work() == 1
    assert len(await world.rows(run.run_id)) == 3


async def test_more_are_due_than_one_page_holds(world: Schedules) -> None:
    jobs = [await world.write(world.draft()) for _ in range(2 * fire.PAGE + 5)]
    await world.look(HOUR)
    assert world.outcomes == {"started": len(jobs)}


@pytest.mark.slow
async def test_a_virtual_year_of_a_time_inside_the_gap_fires_on_each_day(world: Schedules) -> None:
    """With rows and all: 365 runs in a row, each of which ends before the next."""
    job = await world.add(Schedule(calendar=Calendar((2,)), timezone="Europe/Berlin"), rows=1)
    for _ in range(365):
        next_at = (await world.scheduling(job)).next_at
        assert next_at is not None
        await world.look((next_at - world.clock.now()) / 1_000)
        await world.stop(job)
    fires = await world.fires(job)
    assert {one.status.value for one in fires} == {"started"}
    days = [one.nominal[:10] for one in fires]
    assert len(days) == len(set(days)) == 365
    assert [run.run_sequence for run in await world.runs(job)] == list(range(1, 366))


@pytest.mark.guarantee("G21")
@pytest.mark.slow
async def test_four_workers_make_one_run_of_each_of_a_thousand(world: Schedules) -> None:
    """And none more when the clock is set back by three hours, and comes there again."""
    jobs = [await world.write(world.draft(DAILY)) for _ in range(1_000)]
    workers = [world.scheduler() for _ in range(4)]
    await world.clock.advance(8 * HOUR)

    async with anyio.create_task_group() as group:
        for worker in workers:
            group.start_soon(worker.fire)

    assert world.outcomes == {"started": 1_000}
    world.clock.shift(-3 * HOUR)
    for _ in range(7):
        for worker in workers:
            await worker.fire()
        await world.clock.advance(HOUR / 2)
    assert world.outcomes == {"started": 1_000}
    for job in jobs[::100]:
        [run] = await world.runs(job)
        assert run.run_id == (await world.job(job.job_id)).latest_run_id


@pytest.mark.guarantee("G21")
async def test_fires_missed_while_nobody_looked_are_one_run_and_one_row(world: Schedules) -> None:
    job = await world.add()
    await world.look(5 * HOUR + 60)
    [run] = await world.runs(job)
    missed, started = await world.fires(job)
    assert (missed.status, missed.count) == ("missed", 4)
    assert (missed.instant, missed.last_instant) == (START + 3_600_000, START + 4 * 3_600_000)
    assert (started.instant, started.run_id) == (START + 5 * 3_600_000, run.run_id)
    assert world.outcomes == {"missed": 4, "started": 1}


async def test_a_fire_that_is_a_week_late_is_not_made_up_for(world: Schedules) -> None:
    job = await world.add(Schedule(rate=Rate(10, "day")))
    await world.look(18 * DAY)
    assert await world.runs(job) == []
    assert await world.record(job) == [("missed", "too_late", 1)]


async def test_fires_of_a_pause_are_counted_and_the_next_one_after_it_is_made(
    world: Schedules,
) -> None:
    job = await world.add(paused=True)
    for _ in range(4):
        await world.look(HOUR)
    assert await world.record(job) == [("skipped", "paused", 4)]
    await world.change(job, paused=False)
    await world.look(60)
    assert await world.runs(job) == []
    await world.look(HOUR)
    assert await world.record(job) == [("skipped", "paused", 4), ("started", None, 1)]
    assert len(await world.runs(job)) == 1


async def test_a_live_run_is_not_overtaken(world: Schedules) -> None:
    job = await world.add()
    for _ in range(3):
        await world.look(HOUR)
    assert await world.record(job) == [("started", None, 1), ("skipped", "run_live", 2)]
    await world.stop(job)
    await world.look(HOUR)
    assert len(await world.runs(job)) == 2


async def test_a_fire_that_waits_starts_soon_after_the_end_of_the_run(world: Schedules) -> None:
    job = await world.add(overlap=Overlap.WAIT)
    await world.look(HOUR)
    await world.look(HOUR)
    await world.stop(job)
    waited = world.clock.now()
    while len(await world.runs(job)) < 2:
        await world.look(INTERVAL)
    assert world.clock.now() - waited <= 2 * INTERVAL * 1_000
    assert await world.record(job) == [("started", None, 1), ("started", None, 1)]
    _, second = await world.fires(job)
    assert second.instant == START + 2 * 3_600_000


async def test_fires_that_wait_take_no_place_of_those_that_are_due(world: Schedules) -> None:
    """A page of them is not read by each look: they are looked at now and then."""
    jobs = [await world.write(world.draft(overlap=Overlap.WAIT)) for _ in range(fire.PAGE)]
    await world.look(HOUR)
    await world.look(HOUR)
    other = await world.write(world.draft(Schedule(rate=Rate(1, "minute"))))
    versions = {job.job_id: (await world.job(job.job_id)).version for job in jobs}
    for _ in range(12):
        await world.look(INTERVAL)
    assert len(await world.runs(other)) == 1
    written = [(await world.job(job.job_id)).version - versions[job.job_id] for job in jobs]
    assert set(written) <= set(range(1, 13))


async def test_a_quota_refuses_a_fire(world: Schedules) -> None:
    world.max_active_jobs = 2
    jobs = [await world.write(world.draft()) for _ in range(3)]
    other = await world.write(world.draft(caller="other", sealed_key=world.sealed("other")))
    await world.clock.advance(HOUR)
    await world.scheduler().fire()
    records = [status for job in jobs for status, _, _ in await world.record(job)]
    assert sorted(records) == ["skipped", "started", "started"]
    assert world.outcomes == {"started": 3, "quota_exceeded": 1}
    assert await world.record(other) == [("started", None, 1)]


async def test_a_fire_seals_the_key_anew_so_that_an_old_secret_can_be_dropped(
    world: Schedules,
) -> None:
    old, new = b"an old root secret of the tests", b"a new root secret of the tests"
    job = await world.add(sealed_key=world.sealed("caller", old))
    paused = await world.add(sealed_key=world.sealed("caller", old), paused=True)
    await world.clock.advance(HOUR)
    await world.scheduler(new, old).fire()
    await world.stop(job)
    await world.change(paused, paused=False)
    await world.clock.advance(HOUR)
    await world.scheduler(new).fire()
    assert await world.record(job) == [("started", None, 1), ("started", None, 1)]
    assert await world.record(paused) == [("skipped", "paused", 1), ("started", None, 1)]


async def test_a_key_that_no_secret_opens_is_told_of(
    world: Schedules, caplog: pytest.LogCaptureFixture
) -> None:
    job = await world.add()
    await world.clock.advance(HOUR)
    with caplog.at_level("WARNING"):
        await world.scheduler(b"quite another root secret").fire()
    assert await world.runs(job) == []
    assert await world.record(job) == [("skipped", "key_unreadable", 1)]
    [record] = caplog.records
    assert record.getMessage() == "fires made no run"
    assert record.__dict__["reason"] == "key_unreadable"
    assert (record.__dict__["job_id"], record.__dict__["count"]) == (job.job_id, 1)


async def test_one_broken_job_stops_no_other(
    world: Schedules, caplog: pytest.LogCaptureFixture
) -> None:
    """More of them than a page holds: a zone that is gone, say."""
    caplog.set_level(logging.CRITICAL, UNEXPECTED_LOGGER)
    caplog.set_level(logging.WARNING)
    gone = Schedule(calendar=Calendar((9,)), timezone="Mars/Olympus")
    broken = [world.draft(HOURLY) for _ in range(fire.PAGE + 1)]
    for job in broken:
        assert job.scheduling is not None
        scheduling = structs.replace(job.scheduling, schedule=gone, next_at=START + 1)
        await world.write(structs.replace(job, scheduling=scheduling))
    good = await world.add()
    await world.look(HOUR)
    assert len(await world.runs(good)) == 1
    assert world.outcomes == {"failed": len(broken), "started": 1}
    warned = [one for one in caplog.records if one.getMessage() == "fires made no run"]
    assert {one.__dict__["reason"] for one in warned} == {"failed"}

    before = world.schedulers[-1]
    await world.look(INTERVAL)
    assert world.schedulers[-1].outcomes == {}
    await world.clock.advance(PUT_OFF)
    await before.fire()
    assert before.outcomes["failed"] == 2 * len(broken)


async def test_a_store_that_is_away_puts_nothing_off(world: Schedules) -> None:
    class Away:
        async def get_run(self, *names: object) -> None:
            raise ConveyorError(ErrorCode.UNAVAILABLE, "away")

    job = await world.add()
    await world.clock.advance(HOUR)
    away = dataclasses.replace(world.binding, runs=cast(Any, Away()))
    await world.scheduler(binding=away).fire()
    assert world.outcomes == {"failed": 1}
    await world.look()
    assert len(await world.runs(job)) == 1


@pytest.mark.guarantee("G19")
async def test_a_message_that_is_lost_is_found_by_the_sweeper(world: Schedules) -> None:
    class Deaf:
        async def send(self, *args: object) -> None:
            raise ConveyorError(ErrorCode.UNAVAILABLE, "away")

    job = await world.add()
    await world.clock.advance(HOUR)
    deaf = dataclasses.replace(world.binding, queues=cast(Any, Deaf()))
    await world.scheduler(binding=deaf).fire()
    [run] = await world.runs(job)
    assert world.outcomes == {"started": 1}
    assert await world.binding.ingestion.stuck_ingests(before=world.clock.now() + 1) == [
        StuckIngest(job.job_id, run.run_id, template=True)
    ]
    await world.clock.advance(600)
    options = SweepOptions(
        interval=60,
        quiet_after=300,
        row_retention_days=30,
        delivery_retention_days=30,
        fire_retention_days=30,
    )
    await sweeper(world.binding, world.clock, options=options).sweep()
    await world.work()
    assert len(await world.rows(run.run_id)) == 3


async def test_other_rules_of_zones_are_heeded_before_their_time_comes(world: Schedules) -> None:
    """The store holds an instant that the present rules have an hour earlier."""
    job = await world.add(DAILY)
    right = (await world.scheduling(job)).next_at
    assert right is not None
    await world.change(job, zones_version="1970a", next_at=right + 3_600_000)
    await world.look()
    scheduling = await world.scheduling(job)
    assert (scheduling.next_at, scheduling.zones_version) == (right, ZONES_VERSION)
    await world.look((right - world.clock.now()) / 1_000)
    [row] = await world.fires(job)
    assert (row.nominal, row.status) == ("2026-01-01T09:00:00", "started")


async def test_a_run_of_a_job_with_a_webhook_has_its_entry_in_the_outbox(world: Schedules) -> None:
    job = await world.add(webhook=Webhook(url="https://hooks.test/", signature=False))
    await world.look(HOUR)
    [run] = await world.runs(job)
    await world.stop(job)
    due = await world.binding.outbox.due_entries(now=world.clock.now(), limit=10)
    assert due == [EntryKey(run.run_id, Subscriber.WEBHOOK)]


async def test_a_deleted_job_fires_no_more(world: Schedules) -> None:
    job = await world.add()
    await world.binding.jobs.delete_job(job.caller, job.job_id, now=world.clock.now())
    await world.look(HOUR)
    assert world.outcomes == {}
