"""Jobs and runs on DynamoDB when another process acts between two steps of a call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from conveyor.domain.errors import ErrorCode
from conveyor.domain.model import Job, JobStatus, RunStatus
from conveyor.domain.shards import ONE_SHARD
from conveyor.ports.records import ClaimedKey, IdempotencyScope, StoredResponse
from conveyor.ports.schedules import ScheduleChange
from conveyor.prod.dynamodb.run_rows import DynamoRunRows, RunPlace, RunPlaces
from conveyor.prod.dynamodb.schema import run_key
from conveyor.prod.dynamodb.submitting import Reservation, cancel_reservation
from conveyor.testing.clock import FakeClock
from tests.conformance.dynamo_records import (
    DB,
    TRANSACT,
    Bench,
    more_runs,
    open_bench,
)
from tests.conformance.dynamo_schedules import (
    AT,
    HOUR,
    finished,
    fired,
    listed,
    moved,
    run_ids,
    scheduled,
)
from tests.conformance.world import CALLER, World, refused

pytestmark = pytest.mark.extended


@pytest.fixture
async def bench(clock: FakeClock) -> AsyncIterator[Bench]:
    """An empty table with two processes on it."""
    async with open_bench(clock) as opened:
        yield opened


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("end", ["closed", "stopped", "deleted"])
async def test_an_addition_that_comes_too_late_leaves_nothing(
    bench: Bench, end: str, step: int
) -> None:
    """The run ends before its indexes are reserved, or before its rows are counted."""
    job_id, run_id = await bench.world.submit(1, closed=False)
    await bench.world.succeed(run_id, 0)
    other, now = bench.other.store, bench.world.now

    async def end_it() -> None:
        match end:
            case "closed":
                await other.jobs.close_job(CALLER, job_id, now=now)
            case "stopped":
                await other.runs.stop_run(CALLER, job_id, now=now)
            case "deleted":
                await other.jobs.delete_job(CALLER, job_id, now=now)

    bench.faults.before(DB, TRANSACT, end_it, nth=step)
    await refused(ErrorCode.JOB_NOT_OPEN, bench.world.append(job_id, 2))
    await bench.nothing_half_added(job_id, run_id, [0])
    if end == "closed":
        assert (await bench.other.run(job_id)).status is RunStatus.COMPLETED


async def test_an_addition_that_was_given_up_meanwhile_is_not_counted(bench: Bench) -> None:
    job_id, run_id = await bench.world.submit(1, closed=False)
    records = DynamoRunRows(bench.table, RunPlaces(bench.table))
    place = RunPlace(run_id, job_id, 1, ONE_SHARD)

    async def give_up() -> None:
        assert await cancel_reservation(records, place, Reservation(1, 2), now=bench.world.now)

    bench.faults.before(DB, TRANSACT, give_up, nth=2)
    await refused(ErrorCode.UNAVAILABLE, bench.world.append(job_id, 2))
    await bench.nothing_half_added(job_id, run_id, [0])


async def test_additions_of_two_processes_both_count(bench: Bench) -> None:
    job_id, run_id = await bench.world.submit(0, closed=False)
    answers: list[StoredResponse] = []

    async def add() -> None:
        answers.append(await bench.other.append(job_id, 2))

    for nth in (1, 3):
        bench.faults.before(DB, TRANSACT, add, nth=nth)
    answers.append(await bench.world.append(job_id, 1))
    assert bench.faults.fired == 2
    assert [answer.body for answer in answers] == [b"2 0", b"2 3", b"1 2"]
    await bench.nothing_half_added(job_id, run_id, [0, 1, 2, 3, 4])


async def test_of_two_under_one_key_the_second_answers_for_both(bench: Bench) -> None:
    job_id, run_id = await bench.world.submit(0, closed=False)
    await bench.key("add")

    async def add() -> None:
        await bench.other.append(job_id, 2, once=IdempotencyScope("add"))

    bench.faults.before(DB, TRANSACT, add, nth=2)
    answer = await bench.world.append(job_id, 2, once=IdempotencyScope("add"))
    assert answer.body == b"2 2"
    assert await bench.key("add") == answer
    await bench.nothing_half_added(job_id, run_id, [2, 3])


async def test_an_addition_whose_key_is_gone_happens_all_the_same(bench: Bench) -> None:
    job_id, run_id = await bench.world.submit(0, closed=False)
    await bench.key("add")

    async def release() -> None:
        await bench.release("add")

    bench.faults.before(DB, TRANSACT, release, nth=2)
    assert (await bench.world.append(job_id, 2, once=IdempotencyScope("add"))).body == b"2 0"
    await bench.nothing_half_added(job_id, run_id, [0, 1])
    assert await bench.key("add", created_id="NEW") == ClaimedKey("NEW", taken_over=False)


async def test_adders_of_one_process_do_not_wear_each_other_out(bench: Bench) -> None:
    job_id, run_id = await bench.world.submit(0, closed=False)
    await asyncio.gather(*(bench.world.append(job_id, 1) for _ in range(40)))
    await bench.nothing_half_added(job_id, run_id, list(range(40)))
    # Two transactions each, and one more where another adder had moved the run meanwhile.
    assert bench.faults.calls.count((DB, TRANSACT)) <= 1 + 40 * 4


@pytest.mark.parametrize("way", ["close", "empty last batch"])
async def test_closing_completes_what_a_worker_left_unsettled(bench: Bench, way: str) -> None:
    """A worker counts its last task and dies before it looks at what that means for the run."""
    job_id, run_id = await bench.world.submit(1, closed=False)

    async def count() -> None:
        await bench.table.update(
            run_key(job_id, 1),
            "ADD successful :one",
            condition="attribute_exists(pk)",
            one=1,
        )

    bench.faults.before(DB, TRANSACT, count)
    if way == "close":
        await bench.store.jobs.close_job(CALLER, job_id, now=bench.world.now)
    else:
        await bench.world.append(job_id, 0, last_batch=True)
    assert bench.faults.fired == 1
    assert (await bench.other.run(job_id, run_id)).status is RunStatus.COMPLETED


async def test_closing_and_the_last_task_complete_the_run_whoever_is_first(bench: Bench) -> None:
    job_id, run_id = await bench.world.submit(1, closed=False)
    task = await bench.other.claimed(run_id, 0)

    async def settle() -> None:
        await bench.other.settle(task, bench.other.success(task))

    bench.faults.before(DB, TRANSACT, settle)
    view = await bench.store.jobs.close_job(CALLER, job_id, now=bench.world.now)
    assert view.latest_run is not None
    assert view.latest_run.status is RunStatus.COMPLETED


@pytest.mark.parametrize("operation", ["get_item", "batch_get_item"])
async def test_a_job_and_its_run_are_of_one_moment(bench: Bench, operation: str) -> None:
    job_id, run_id = await bench.world.submit(1, closed=False)
    await bench.world.succeed(run_id, 0)

    async def close() -> None:
        await bench.other.store.jobs.close_job(CALLER, job_id, now=bench.world.now)

    bench.faults.before(DB, operation, close, nth=2)
    jobs = bench.store.jobs
    if operation == "get_item":
        view = await jobs.get_job(CALLER, job_id)
    else:
        [view] = await jobs.list_jobs(CALLER, status=None, before=None, limit=5)
    assert bench.faults.fired == 1
    assert view is not None
    assert view.latest_run is not None
    assert (view.job.status, view.latest_run.status) == (JobStatus.CLOSED, RunStatus.COMPLETED)


async def test_time_never_goes_back(bench: Bench) -> None:
    """A worker whose clock is ahead counts a task while another process stops the run."""
    job_id, run_id = await bench.world.submit(2)
    ahead = bench.world.now + 30_000

    async def count() -> None:
        task = await bench.other.claimed(run_id, 0)
        tasks = bench.other.store.tasks
        await tasks.settle_task(
            run_id, task.task_id, task.claim_number, bench.other.success(task), now=ahead
        )

    bench.faults.before(DB, "update_item", count)
    run = await bench.store.runs.stop_run(CALLER, job_id, now=bench.world.now)
    assert (run.status, run.updated_at, run.stats.successful) == (RunStatus.STOPPED, ahead, 1)


@pytest.mark.parametrize("way", ["delete", "expire"])
async def test_a_run_that_goes_while_a_fire_makes_another_leaves_the_new_one(
    bench: Bench, way: str
) -> None:
    world = bench.world
    job = await fired(world, await scheduled(world))
    await finished(world, job)
    assert job.latest_run_id is not None
    bench.faults.before(DB, TRANSACT, lambda: _fire(bench.other, job))
    if way == "delete":
        await bench.store.runs.delete_run(CALLER, job.job_id, job.latest_run_id, now=world.now)
    else:
        await bench.store.sweeping.expire_run(job.latest_run_id, now=world.now)

    assert bench.faults.fired == 1
    view = await bench.other.view(job.job_id)
    assert (view.job.status, view.job.run_count) == (JobStatus.CLOSED, 2)
    assert view.latest_run is not None
    assert await run_ids(world, job.job_id) == [view.latest_run.run_id] == [view.job.latest_run_id]


async def _fire(world: World, job: Job) -> None:
    await fired(world, job)


async def test_a_schedule_that_is_set_while_its_last_run_expires_keeps_its_job(
    bench: Bench,
) -> None:
    """An `at` that has fired goes with its run, unless it is given another time meanwhile."""
    world = bench.world
    job = await fired(world, await scheduled(world, schedule=AT))
    await finished(world, job)
    over = moved(job, next_at=None)
    assert await bench.store.schedules.change_schedule(ScheduleChange(before=job, after=over))

    async def set_anew() -> None:
        change = ScheduleChange(before=over, after=moved(over, next_at=world.now + HOUR))
        assert await bench.other.store.schedules.change_schedule(change)

    bench.faults.before(DB, TRANSACT, set_anew)
    assert job.latest_run_id is not None
    await bench.store.sweeping.expire_run(job.latest_run_id, now=world.now)
    assert bench.faults.fired == 1
    assert await run_ids(world, job.job_id) == []
    assert await listed(world) == [job.job_id]


async def test_the_latest_run_is_the_newest_that_is_left(bench: Bench) -> None:
    job_id, first = await bench.world.submit(0, closed=False)
    second, third = await more_runs(bench, job_id, count=2)

    async def delete_second() -> None:
        await bench.other.store.runs.delete_run(CALLER, job_id, second, now=bench.world.now)

    bench.faults.before(DB, TRANSACT, delete_second)
    await bench.store.runs.delete_run(CALLER, job_id, third, now=bench.world.now)
    view = await bench.other.view(job_id)
    assert view.latest_run is not None
    assert (view.latest_run.run_id, view.job.latest_run_id) == (first, first)
