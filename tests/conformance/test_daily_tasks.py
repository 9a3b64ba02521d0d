"""The limit of tasks a day of a caller: exact, over each way in, whole or not at all."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from msgspec import structs

from conveyor.dev.sqlite import SqliteStore
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import Ingest, IngestStatus, RunStats, TaskStatus
from conveyor.ports.records import ClaimedKey, IdempotencyScope, StoredResponse
from conveyor.ports.schedules import ScheduleChange
from conveyor.prod.dynamodb.schema import daily_tasks_key
from conveyor.records.quotas import DAY, day_of
from conveyor.testing.clock import FakeClock
from tests.conformance.bindings import BindingKind, Store
from tests.conformance.dynamo_records import lose_every_answer, open_bench
from tests.conformance.scheduled_jobs import read_job, schedule_job, template, with_run
from tests.conformance.world import CALLER, World

LIMIT = 10
STRANGER = "another caller"


@pytest.fixture
async def store(
    binding_kind: BindingKind, tmp_path: Path, clock: FakeClock
) -> AsyncIterator[Store]:
    """An empty store with the limit."""
    opened = await binding_kind.open(tmp_path, clock.now(), daily_tasks=LIMIT)
    yield opened
    await opened.aclose()


async def over(awaitable: Awaitable[object], world: World) -> ConveyorError:
    """Await a call that the limit refuses, with a text and a pause that tell the day's end."""
    with pytest.raises(ConveyorError) as raised:
        await awaitable
    error = raised.value
    left = (day_of(world.now) + 1) * DAY - world.now
    assert error.code is ErrorCode.QUOTA_EXCEEDED
    assert error.retry_after == -(-left // 1_000)
    assert f"at most {LIMIT} tasks a day" in error.detail
    return error


async def has_room(world: World, tasks: int) -> None:
    """Use up what is left of the day, which is so many tasks."""
    await over(world.submit(tasks + 1), world)
    if tasks:
        await world.submit(tasks)
    await over(world.submit(1), world)


async def claim_key(world: World, scope: str) -> IdempotencyScope:
    """Claim an idempotency key for one write."""
    claim = await world.store.idempotency.claim_idempotency_key(
        scope,
        fingerprint=b"body",
        created_id="ID",
        now=world.now,
        lapses_at=world.now + 60_000,
        expires_at=world.now + DAY,
    )
    assert isinstance(claim, ClaimedKey)
    return IdempotencyScope(scope)


async def test_a_submit_over_the_limit_leaves_nothing(world: World) -> None:
    await world.submit(7)
    job, run, tasks = world.draft(4)
    answer = StoredResponse(201, b"{}")

    await over(world.store.jobs.create_job(job, run, tasks, answer=answer, once=None), world)

    assert await world.store.jobs.find_job(job.job_id) is None
    assert await world.rows(run.run_id) == []
    await world.submit(LIMIT, caller=STRANGER)
    await has_room(world, 3)


async def test_the_text_of_the_refusal_names_limit_and_end(world: World) -> None:
    await world.clock.advance((DAY - world.now % DAY) / 1_000 - 1.5)
    error = await over(world.submit(LIMIT + 1), world)
    assert error.retry_after == 2
    assert "CONVEYOR_CALLER_DAILY_TASKS" in error.detail
    assert "T00:00:00Z" in error.detail


async def test_the_next_day_of_utc_begins_anew(world: World) -> None:
    await world.submit(LIMIT)
    await over(world.submit(1), world)
    await world.clock.advance((DAY - world.now % DAY) / 1_000 - 0.001)
    await over(world.submit(1), world)
    await world.clock.advance(0.001)
    await has_room(world, LIMIT)


async def test_rows_that_follow_count_when_they_are_accepted(world: World) -> None:
    job, run, _ = world.draft(0)
    ingest = Ingest(status=IngestStatus.PENDING, end=8, chunks=(0,))
    run = structs.replace(run, ingest=ingest, stats=RunStats(total=8), next_index=8)
    answer = StoredResponse(202, b"{}")
    await world.store.jobs.create_job(job, run, [], answer=answer, once=None)
    await has_room(world, 2)


async def test_an_addition_over_the_limit_leaves_nothing(world: World) -> None:
    job_id, run_id = await world.submit(4, closed=False)
    await world.append(job_id, 3)

    await over(world.append(job_id, 4, last_batch=True), world)

    view = await world.view(job_id)
    assert view.job.status.value == "open"
    assert (await world.run(job_id)).stats.total == 7
    assert [row.index for row in await world.rows(run_id)] == list(range(7))
    await world.append(job_id, 3)
    await over(world.append(job_id, 1), world)
    # Without a task nothing is to be counted.
    await world.append(job_id, 0, last_batch=True)
    assert (await world.view(job_id)).job.status.value == "closed"


@pytest.mark.parametrize("large_from", [10_000, 1])
async def test_of_a_rerun_the_tasks_that_start_afresh_count(world: World, large_from: int) -> None:
    job_id, run_id = await world.submit(4)
    for index in range(3):
        await world.succeed(run_id, index)
    await world.fail(run_id, 3)

    new_id, _ = await world.rerun(job_id, TaskStatus.FAILED, large_from=large_from)
    await world.rerun(job_id, TaskStatus.FAILED, large_from=large_from, run_id=new_id)

    await has_room(world, 5)


async def test_a_rerun_over_the_limit_leaves_the_run_before_as_the_latest(world: World) -> None:
    job_id, run_id = await world.submit(6)
    for index in range(5):
        await world.fail(run_id, index)
    await world.succeed(run_id, 5)
    new_id = world.clock.new_id()

    await over(world.rerun(job_id, TaskStatus.FAILED, run_id=new_id), world)
    await over(world.rerun(job_id, run_id=new_id), world)
    await over(world.rerun(job_id, large_from=1, run_id=new_id), world)

    assert (await world.view(job_id)).job.latest_run_id == run_id
    assert await world.rows(new_id) == []
    await world.rerun(job_id, TaskStatus.SUCCESSFUL, run_id=new_id)
    await has_room(world, 3)


async def test_runs_of_a_schedule_count(world: World) -> None:
    """One over the limit changes nothing; one of a job that was changed meanwhile is no refusal."""
    schedules = world.store.schedules
    job = first = await schedule_job(world, template=template(rows=5))
    for _ in range(2):
        after, run = with_run(world, job)
        assert await schedules.change_schedule(ScheduleChange(before=job, after=after, run=run))
        job = await read_job(world, job.job_id)
    after, run = with_run(world, job)
    change = ScheduleChange(before=job, after=after, run=run)
    await over(schedules.change_schedule(change), world)
    assert await read_job(world, job.job_id) == job
    assert await world.store.runs.get_run(CALLER, job.job_id, run.run_id) is None
    after, run = with_run(world, first)
    assert not await schedules.change_schedule(ScheduleChange(before=first, after=after, run=run))


async def test_a_repeated_request_counts_once(world: World) -> None:
    once = await claim_key(world, "submit")
    job_id, _ = await world.submit(3, closed=False, once=once)
    with pytest.raises(ConveyorError) as again:
        await world.submit(3, once=once)
    assert again.value.code is ErrorCode.CONFLICT
    added = await claim_key(world, "add")
    first = await world.append(job_id, 4, once=added)
    # What is left would not take it a second time.
    assert await world.append(job_id, 4, once=added) == first
    await has_room(world, 3)


async def test_crossing_requests_fill_the_day_to_the_last_task(world: World) -> None:
    """Submits and additions in all orders: none is half accepted, and none is lost."""
    job_id, run_id = await world.submit(0, closed=False)
    outcomes: list[int] = []

    async def accept(work: Any, tasks: int) -> None:
        try:
            await work()
        except ConveyorError as error:
            if error.code is not ErrorCode.QUOTA_EXCEEDED:
                raise
        else:
            outcomes.append(tasks)

    async with anyio.create_task_group() as group:
        for _ in range(6):
            group.start_soon(accept, partial(world.submit, 1), 1)
            group.start_soon(accept, partial(world.append, job_id, 1), 1)

    assert sum(outcomes) == LIMIT
    jobs = await world.store.jobs.list_jobs(CALLER, status=None, before=None, limit=100)
    runs = [view.latest_run for view in jobs]
    assert sum(run.stats.total for run in runs if run is not None) == LIMIT
    assert len(await world.rows(run_id)) == (await world.run(job_id)).stats.total
    await over(world.submit(1), world)


async def test_without_a_limit_nothing_is_counted(
    binding_kind: BindingKind, tmp_path: Path, clock: FakeClock
) -> None:
    opened = await binding_kind.open(tmp_path, clock.now())
    world = World(opened, clock)
    job_id, _ = await world.submit(LIMIT + 1, closed=False)
    await world.append(job_id, LIMIT + 1)
    assert (await world.run(job_id)).stats.total == 2 * LIMIT + 2
    await opened.aclose()


async def test_counts_of_days_long_over_go(world: World, sqlite_store: SqliteStore) -> None:
    for _ in range(4):
        await world.submit(1)
        await world.clock.advance(DAY / 1_000)
    rows = await sqlite_store.database.read(
        lambda reader: reader.execute("SELECT day, tasks FROM daily_tasks").fetchall()
    )
    today = day_of(world.now)
    assert rows == [(today - 2, 1), (today - 1, 1)]


@pytest.mark.slow
async def test_lost_answers_count_nothing_twice(clock: FakeClock) -> None:
    """Every write of DynamoDB is carried out twice; the count of the day goes by itself."""
    async with open_bench(clock, daily_tasks=LIMIT) as bench:
        lose_every_answer(bench)
        job_id, run_id = await bench.world.submit(2, closed=False)
        await bench.world.append(job_id, 2, last_batch=True)
        for index in range(4):
            await bench.world.fail(run_id, index)
        await bench.world.rerun(job_id, TaskStatus.FAILED)
        today = day_of(clock.now())
        item = await bench.table.get(daily_tasks_key(CALLER, today))
        assert item is not None
        assert item["tasks"] == 8
        assert item["ttl"] == (today + 3) * 86_400
        await has_room(bench.other, 2)
