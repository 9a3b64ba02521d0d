"""The contract of every sweeping adapter, sentence by sentence of the port."""

from __future__ import annotations

import msgspec
import pytest

from conveyor.dev.sqlite import SqliteStore
from conveyor.domain import ids
from conveyor.domain.model import (
    Ingest,
    IngestStatus,
    JobStatus,
    RunFailure,
    RunStatus,
    TaskStatus,
)
from conveyor.domain.schedule import Schedule
from conveyor.ports.binding import Jobs, Runs, Tasks
from conveyor.ports.maintenance import ENDED_FOR, DuePosition, EndedRun, Sweeping
from conveyor.ports.records import StoredResponse
from conveyor.ports.schedules import ScheduleChange
from tests.conformance.bindings import Store
from tests.conformance.scheduled_jobs import (
    EVERY_HOUR,
    HOUR,
    ONCE,
    fire,
    moved,
    read_job,
    schedule_job,
    template,
)
from tests.conformance.world import CALLER, CLAIM_LENGTH, World, all_ended


@pytest.fixture
def sweeping(store: Store) -> Sweeping:
    """The sweeping port of the store."""
    return store.sweeping


async def _quiet(sweeping: Sweeping, before: int) -> list[str]:
    return [run.run_id for run in await sweeping.quiet_runs(before=before)]


async def _ended(sweeping: Sweeping, before: int) -> list[str]:
    return [run.run_id for run in await _look(sweeping, before)]


async def _look(
    sweeping: Sweeping, before: int, after: DuePosition | None = None, limit: int = 10
) -> list[EndedRun]:
    """Find the runs that ended before an instant and whose queues no sweeper has dropped."""
    return await sweeping.ended_runs(
        now=before - 1 + ENDED_FOR, row_days=30, after=after, limit=limit
    )


async def _end_rerun(world: World, run_id: str, task_id: str) -> None:
    """Let the one task succeed that a rerun does again, under its old id."""
    task = await world.claimed(run_id, 1, task_id=task_id)
    await world.settle(task, world.success(task))


async def test_one_at_a_time_may_sweep(sweeping: Sweeping) -> None:
    assert await sweeping.claim_sweep(now=1_000, lapses_at=2_000)
    assert not await sweeping.claim_sweep(now=1_999, lapses_at=9_000)
    assert await sweeping.claim_sweep(now=2_000, lapses_at=3_000)
    assert not await sweeping.claim_sweep(now=2_500, lapses_at=9_000)


async def test_a_run_is_quiet_that_has_work_and_in_which_nothing_was_written(
    world: World, runs: Runs, sweeping: Sweeping
) -> None:
    job_id, run_id = await world.submit(3)
    written_at = world.now
    assert await _quiet(sweeping, written_at) == []
    [run] = await sweeping.quiet_runs(before=written_at + 1)
    assert (run.job_id, run.run_id, run.updated_at) == (job_id, run_id, written_at)
    await world.clock.advance(10)
    await world.succeed(run_id, 0)
    assert await _quiet(sweeping, world.now) == []
    assert await _quiet(sweeping, world.now + 1) == [run_id]
    await runs.pause_run(CALLER, job_id, paused=True, now=world.now)
    assert await _quiet(sweeping, world.now + 1) == []
    await runs.pause_run(CALLER, job_id, paused=False, now=world.now)
    assert await _quiet(sweeping, world.now + 1) == [run_id]
    await runs.stop_run(CALLER, job_id, now=world.now)
    assert await _quiet(sweeping, world.now + 1) == []


async def test_runs_without_work_and_runs_that_ingest_are_not_quiet(
    world: World, jobs: Jobs, sweeping: Sweeping
) -> None:
    await world.submit(0, closed=False)
    _, drained = await world.submit(1, closed=False)
    await world.succeed(drained, 0)
    job, run, _ = world.draft(5)
    ingesting = Ingest(status=IngestStatus.PENDING, end=5, chunks=(0,))
    run = msgspec.structs.replace(run, ingest=ingesting)
    await jobs.create_job(job, run, [], answer=StoredResponse(202, b"{}"), once=None)
    assert await _quiet(sweeping, world.now + 1) == []
    assert await sweeping.reconcile_run(run.run_id, now=world.now) is RunStatus.RUNNING
    assert (await world.run(job.job_id)).stats.total == 5


@pytest.mark.parametrize("scheme", ["stripe", "fnv32a"])
@pytest.mark.parametrize("shards", [1, 3])
async def test_due_references_are_those_that_could_be_worked_now_in_order(
    world: World, sweeping: Sweeping, shards: int, scheme: str
) -> None:
    _, run_id = await world.submit(40, task_shard_count=shards, shard_scheme=scheme)
    await world.succeed(run_id, 3)
    await world.fail(run_id, 4)
    await world.claimed(run_id, 7)
    delayed = await world.claimed(run_id, 9)
    await world.settle(delayed, world.retry(delayed, after=5_000))

    async def due(after: int = -1, limit: int = 100) -> list[int]:
        found = await sweeping.due_references(run_id, after=after, limit=limit, now=world.now)
        assert [task for _, task in found] == [ids.task_id(run_id, index) for index, _ in found]
        return [index for index, _ in found]

    expected = [index for index in range(40) if index not in (3, 4, 7, 9)]
    assert await due() == expected
    assert await due(limit=10) == expected[:10]
    assert await due(after=5, limit=3) == [6, 8, 10]
    assert await due(after=39) == []
    await world.clock.advance(5)
    assert 9 in await due()
    assert 7 not in await due()
    await world.clock.advance(CLAIM_LENGTH / 1_000)
    assert 7 in await due()


async def test_a_run_that_is_not_live_has_nothing_due(
    world: World, runs: Runs, sweeping: Sweeping
) -> None:
    job_id, run_id = await world.submit(3)
    await runs.stop_run(CALLER, job_id, now=world.now)
    for run in (run_id, world.clock.new_id()):
        found = await sweeping.due_references(run, after=-1, limit=10, now=world.now)
        assert found == []


async def test_reconciling_changes_nothing_of_what_is_right(
    world: World, runs: Runs, sweeping: Sweeping
) -> None:
    job_id, run_id = await world.submit(3)
    await world.succeed(run_id, 0)
    before = await world.run(job_id)
    await world.clock.advance(10)
    assert await sweeping.reconcile_run(run_id, now=world.now) is RunStatus.RUNNING
    assert await world.run(job_id) == before
    await runs.stop_run(CALLER, job_id, now=world.now)
    assert await sweeping.reconcile_run(run_id, now=world.now) is RunStatus.STOPPED
    assert await sweeping.reconcile_run(world.clock.new_id(), now=world.now) is None


async def test_ended_runs_come_by_their_time_and_page_by_page(
    world: World, runs: Runs, sweeping: Sweeping
) -> None:
    made = [await world.submit(1, result_ttl_days=days) for days in (1, 2, 3, 4, 5)]
    await world.clock.advance(10)
    completed, stopped, failed, deleted, _live = made
    await world.succeed(completed[1], 0)
    await runs.stop_run(CALLER, stopped[0], now=world.now)
    await runs.fail_run(
        failed[1], reason=RunFailure.INSUFFICIENT_CREDITS, detail="no", now=world.now
    )
    await runs.delete_run(CALLER, *deleted, now=world.now)
    first = await _look(sweeping, world.now + 1, limit=2)
    due_at = world.now + ENDED_FOR
    assert first == [
        EndedRun(*completed, world.now, 1, swept=False, queue_dropped=False, due_at=due_at),
        EndedRun(*stopped, world.now, 2, swept=False, queue_dropped=False, due_at=due_at),
    ]
    rest = await _look(sweeping, world.now + 1, DuePosition(due_at, stopped[1]), limit=2)
    assert [run.run_id for run in rest] == [failed[1]]
    assert await _ended(sweeping, world.now) == []


async def test_a_run_that_others_draw_from_ends_with_the_last_of_them(
    world: World, runs: Runs, sweeping: Sweeping
) -> None:
    job_id, first = await world.submit(2)
    await world.succeed(first, 0)
    await world.fail(first, 1)
    await world.clock.advance(100)
    second, _ = await world.rerun(job_id, TaskStatus.FAILED)
    await world.clock.advance(3_600)
    assert await _look_now(world) == []
    await world.clock.advance(100)
    await _end_rerun(world, second, ids.task_id(first, 1))
    ended_at = world.now
    await world.clock.advance(3_599)
    assert await _look_now(world) == []
    await world.clock.advance(1)
    found = await _look_now(world)
    assert [(run.run_id, run.ended_at) for run in found] == [(first, ended_at), (second, ended_at)]
    await runs.delete_run(CALLER, job_id, second, now=world.now)
    assert [run.run_id for run in await _look_now(world)] == [first]


async def _look_now(world: World) -> list[EndedRun]:
    return await world.store.sweeping.ended_runs(now=world.now, row_days=1, after=None, limit=10)


async def test_a_run_is_found_once_something_is_due_for_it(
    world: World, sweeping: Sweeping
) -> None:
    day, days = 86_400_000, 30
    _, run_id = await world.submit(1, result_ttl_days=2)
    await world.succeed(run_id, 0)
    ended_at = world.now

    async def is_found(after_end: int, row_days: int = days) -> bool:
        found = await sweeping.ended_runs(
            now=ended_at + after_end, row_days=row_days, after=None, limit=10
        )
        return [run.run_id for run in found] == [run_id]

    due_after = ENDED_FOR
    for done in (sweeping.mark_queue_dropped, sweeping.mark_swept, None):
        assert [await is_found(due_after - 1), await is_found(due_after)] == [False, True]
        if done is not None:
            await done(run_id)
            due_after = (2 if done == sweeping.mark_queue_dropped else 2 + days) * day
    assert not await is_found(999 * day, row_days=0)
    assert not await is_found(due_after, row_days=days + 1)
    assert await is_found(due_after + day, row_days=days + 1)
    assert await is_found(due_after - day, row_days=days - 1)


async def test_a_mark_tells_that_bodies_or_the_queue_are_gone_and_nothing_else(
    world: World, sweeping: Sweeping
) -> None:
    job_id, run_id = await world.submit(1)
    await world.succeed(run_id, 0)
    before = await world.run(job_id)

    async def marks() -> tuple[bool, bool]:
        [ended] = await all_ended(world.store, world.now)
        return ended.swept, ended.queue_dropped

    assert await marks() == (False, False)
    await sweeping.mark_queue_dropped(run_id)
    assert await marks() == (False, True)
    await sweeping.mark_swept(run_id)
    assert await marks() == (True, True)
    assert await world.run(job_id) == before
    gone = world.clock.new_id()
    await sweeping.mark_queue_dropped(gone)
    await sweeping.mark_swept(gone)
    assert len(await all_ended(world.store, world.now)) == 1


async def test_an_expired_run_is_deleted_and_its_job_with_the_last_one(
    world: World, tasks: Tasks, sweeping: Sweeping
) -> None:
    job_id, first = await world.submit(2)
    await world.succeed(first, 0)
    await world.fail(first, 1)
    second, _ = await world.rerun(job_id, TaskStatus.FAILED)
    assert await sweeping.expire_run(second, now=world.now) == []  # it still runs
    await _end_rerun(world, second, ids.task_id(first, 1))
    assert await sweeping.expire_run(first, now=world.now) == [first]
    view = await world.view(job_id)
    assert view.job.status is JobStatus.CLOSED
    assert view.latest_run is not None
    assert view.latest_run.run_id == second
    assert (await world.run(job_id, first)).status is RunStatus.DELETED
    assert await sweeping.expire_run(second, now=world.now) == [second]
    view = await world.view(job_id)
    assert view.job.status is JobStatus.DELETED
    assert view.latest_run == await world.run(job_id, second)
    await tasks.scrub_tasks(first, 10)
    assert await tasks.scrub_tasks(first, 10) == 0
    assert await sweeping.expire_run(world.clock.new_id(), now=world.now) == []


async def _end_fired_run(world: World, job_id: str) -> str:
    """Let a scheduled job fire, and end its run with its ingestion."""
    run = await fire(world, job_id)
    await world.store.runs.stop_run(CALLER, job_id, now=world.now)
    await world.store.ingestion.finish_ingest(run.run_id, now=world.now)
    return run.run_id


@pytest.mark.parametrize("schedule", [EVERY_HOUR, ONCE], ids=["rate", "at that is to come"])
async def test_a_scheduled_job_stays_when_its_last_run_expires(
    world: World, sweeping: Sweeping, schedule: Schedule
) -> None:
    job = await schedule_job(world, schedule=schedule, template=template(1))
    run_id = await _end_fired_run(world, job.job_id)
    before = await read_job(world, job.job_id)
    assert await sweeping.expire_run(run_id, now=world.now) == [run_id]

    view = await world.view(job.job_id)
    assert (view.job.status, view.latest_run) == (JobStatus.CLOSED, None)
    assert view.job.scheduling == before.scheduling
    assert view.job.run_count == before.run_count
    await world.store.runs.purge_run(run_id)
    await world.store.jobs.purge_job(job.job_id)
    due = await world.store.schedules.due_schedules(now=world.now + HOUR, limit=10)
    assert due == [await read_job(world, job.job_id)]
    following = await fire(world, job.job_id)
    assert following.run_sequence == 2


async def test_a_rate_without_a_next_fire_stays_too(world: World, sweeping: Sweeping) -> None:
    job = await schedule_job(world, template=template(1))
    run_id = await _end_fired_run(world, job.job_id)
    known = await read_job(world, job.job_id)
    change = ScheduleChange(before=known, after=moved(world, known, next_at=None))
    assert await world.store.schedules.change_schedule(change)
    assert await sweeping.expire_run(run_id, now=world.now) == [run_id]
    assert (await read_job(world, job.job_id)).status is JobStatus.CLOSED


@pytest.mark.parametrize("waits", [False, True])
async def test_a_single_at_that_has_fired_goes_with_its_last_run_unless_one_waits(
    world: World, sweeping: Sweeping, waits: bool
) -> None:
    job = await schedule_job(world, schedule=ONCE, template=template(1))
    first, second = [await _end_fired_run(world, job.job_id) for _ in range(2)]
    known = await read_job(world, job.job_id)
    after = moved(world, known, next_at=None, waiting="2027-09-01T09:00:00" if waits else "")
    change = ScheduleChange(before=known, after=after)
    assert await world.store.schedules.change_schedule(change)

    assert await sweeping.expire_run(first, now=world.now) == [first]
    assert (await read_job(world, job.job_id)).status is JobStatus.CLOSED
    assert await sweeping.expire_run(second, now=world.now) == [second]
    status = (await read_job(world, job.job_id)).status
    assert status is (JobStatus.CLOSED if waits else JobStatus.DELETED)


async def test_a_claim_of_a_clock_that_was_set_back_counts_for_nothing(sweeping: Sweeping) -> None:
    year = 365 * 86_400_000
    assert await sweeping.claim_sweep(now=year, lapses_at=year + 48_000)
    assert await sweeping.claim_sweep(now=1_000, lapses_at=49_000)
    assert not await sweeping.claim_sweep(now=2_000, lapses_at=50_000)


async def test_a_run_stays_while_one_that_has_not_ended_draws_on_it(
    world: World, runs: Runs, sweeping: Sweeping
) -> None:
    job_id, source = await world.submit(6)
    for index in range(6):
        await world.fail(source, index)
    copied, _ = await world.rerun(job_id, large_from=1)
    assert await sweeping.expire_run(source, now=world.now) == []
    await runs.stop_run(CALLER, job_id, now=world.now)
    # It has stopped, but its rows are not counted yet: what was copied still tells of the source.
    assert await _ended(sweeping, world.now + 1) == []
    assert await sweeping.expire_run(source, now=world.now) == []
    assert await sweeping.expire_run(copied, now=world.now) == []
    await world.store.ingestion.finish_ingest(copied, now=world.now)
    assert await sweeping.expire_run(source, now=world.now) == [source]


async def test_counters_are_left_alone_while_a_call_is_under_way(
    world: World, sweeping: Sweeping, sqlite_store: SqliteStore
) -> None:
    job_id, run_id = await world.submit(2)
    await world.succeed(run_id, 0)
    task = await world.claimed(run_id, 1)
    with_claim = await world.run(job_id)
    await sqlite_store.database.write(
        lambda connection: connection.execute("UPDATE runs SET successful = 0")
    )
    assert await sweeping.reconcile_run(run_id, now=world.now) is RunStatus.RUNNING
    assert (await world.run(job_id)).stats.successful == 0
    await world.clock.advance(CLAIM_LENGTH / 1_000)
    assert await sweeping.reconcile_run(run_id, now=world.now) is RunStatus.RUNNING
    assert (await world.run(job_id)).stats == with_claim.stats
    settled = await world.settle(task, world.success(task))
    assert settled.run_status is RunStatus.COMPLETED
