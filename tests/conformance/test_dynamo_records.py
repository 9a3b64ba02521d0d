"""Jobs, runs and keys on DynamoDB when answers are lost, calls break off between two steps, and
batches are done in part: faults that no single-process store can show."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from conveyor.domain.errors import ErrorCode
from conveyor.domain.model import JobStatus, Run, RunFailure, RunStatus
from conveyor.domain.shards import ONE_SHARD
from conveyor.ports.records import ClaimedKey, IdempotencyScope, KeyInUse, StoredResponse
from conveyor.prod.aws.calls import Parameters
from conveyor.prod.dynamodb.run_rows import RunPlace
from conveyor.prod.dynamodb.schema import intent_key, place_key
from conveyor.testing.aws_faults import ATTEMPTS
from conveyor.testing.clock import FakeClock
from tests.conformance.dynamo_records import (
    DB,
    INSERT,
    LAPSE,
    TRANSACT,
    Bench,
    away,
    lose_every_answer,
    more_runs,
    open_bench,
)
from tests.conformance.world import CALLER, refused

pytestmark = pytest.mark.extended


@pytest.fixture
async def bench(clock: FakeClock) -> AsyncIterator[Bench]:
    """An empty table with two processes on it."""
    async with open_bench(clock) as opened:
        yield opened


# Every answer lost once


async def test_a_job_is_made_once(bench: Bench) -> None:
    job, run, tasks = bench.world.draft(60)
    await bench.key("scope")
    lose_every_answer(bench)
    await bench.store.jobs.create_job(
        job, run, tasks, answer=StoredResponse(201, b"made"), once=IdempotencyScope("scope")
    )
    # The intent, three batches of rows, the transaction.
    assert bench.faults.fired == 5
    view = await bench.other.view(job.job_id)
    assert (view.job, view.latest_run) == (job, run)
    assert len(await bench.other.rows(run.run_id)) == 60
    assert await bench.intents() == 0
    assert await bench.key("scope") == StoredResponse(201, b"made")


async def test_tasks_are_added_once(bench: Bench) -> None:
    job_id, run_id = await bench.world.submit(2, closed=False)
    await bench.key("add")
    lose_every_answer(bench)
    answer = await bench.world.append(job_id, 3, last_batch=True, once=IdempotencyScope("add"))
    # Reserved, written, counted.
    assert bench.faults.fired == 3
    assert answer.body == b"3 2"
    view = await bench.other.view(job_id)
    assert (view.job.status, view.job.version) == (JobStatus.CLOSED, 2)
    assert view.latest_run is not None
    assert (view.latest_run.next_index, view.latest_run.last_batch_received) == (5, True)
    await bench.nothing_half_added(job_id, run_id, [0, 1, 2, 3, 4])
    assert await bench.key("add") == answer


async def test_a_job_is_closed_once(bench: Bench) -> None:
    job_id, run_id = await bench.world.submit(1, closed=False)
    await bench.world.succeed(run_id, 0)
    lose_every_answer(bench)
    view = await bench.store.jobs.close_job(CALLER, job_id, now=bench.world.now)
    assert bench.faults.fired == 1
    assert view.latest_run is not None
    assert (view.job.version, view.latest_run.status) == (2, RunStatus.COMPLETED)
    assert await bench.other.view(job_id) == view


async def test_a_run_is_stopped_paused_and_failed_once(bench: Bench) -> None:
    stopped, _ = await bench.world.submit(1)
    failed, failed_run = await bench.world.submit(1)
    runs, now = bench.store.runs, bench.world.now
    lose_every_answer(bench)
    paused = await runs.pause_run(CALLER, stopped, paused=True, now=now)
    assert (paused.paused, paused.version) == (True, 2)
    run = await runs.stop_run(CALLER, stopped, now=now)
    assert (run.status, run.version) == (RunStatus.STOPPED, 3)
    assert await runs.fail_run(failed_run, reason=RunFailure.INGEST_FAILED, detail="d", now=now)
    assert (await bench.other.run(failed)).version == 2
    assert bench.faults.fired == 3


async def test_deleting_and_purging_come_to_their_end(bench: Bench) -> None:
    job_id, run_id = await bench.world.submit(1)
    other_job, other_run = await bench.world.submit(1)
    jobs, runs, now = bench.store.jobs, bench.store.runs, bench.world.now
    lose_every_answer(bench)
    assert await jobs.delete_job(CALLER, job_id, now=now) == [run_id]
    await runs.delete_run(CALLER, other_job, other_run, now=now)
    assert (await bench.other.view(job_id)).job.version == 2
    view = await bench.other.view(other_job)
    assert (view.job.version, view.job.latest_run_id) == (2, None)
    assert (await bench.other.run(other_job, other_run)).version == 2
    for gone in (run_id, other_run):
        await runs.purge_run(gone)
        assert await bench.table.get(place_key(gone)) is None
    await jobs.purge_job(job_id)
    assert await bench.other.store.jobs.find_job(job_id) is None
    assert bench.faults.fired == 5


async def test_a_key_is_claimed_by_who_claimed_it(bench: Bench) -> None:
    lose_every_answer(bench)
    assert await bench.key("scope", created_id="FIRST") == ClaimedKey("FIRST", taken_over=False)
    taken = await bench.key("scope", created_id="SECOND", after=LAPSE)
    assert taken == ClaimedKey("FIRST", taken_over=True)
    # Written; refused, taken over, and found to be its own.
    assert bench.faults.fired == 4
    assert await bench.key("scope", after=LAPSE) == KeyInUse()
    await bench.release("scope", created_id="FIRST", after=LAPSE)
    assert await bench.key("scope", created_id="NEW") == ClaimedKey("NEW", taken_over=False)


async def test_of_many_one_takes_a_lapsed_key_over(bench: Bench) -> None:
    await bench.key("scope", created_id="FIRST")
    claims = await asyncio.gather(*(bench.key("scope", after=LAPSE) for _ in range(10)))
    assert claims.count(ClaimedKey("FIRST", taken_over=True)) == 1
    assert claims.count(KeyInUse()) == 9


# Calls that break off between two steps


async def test_a_job_whose_rows_were_cut_off_is_not_there(bench: Bench) -> None:
    job, run, tasks = bench.world.draft(60)
    bench.faults.fail(DB, INSERT, away(), nth=2, times=9)
    create = bench.store.jobs.create_job(
        job, run, tasks, answer=StoredResponse(201, b""), once=None
    )
    await refused(ErrorCode.UNAVAILABLE, create)
    jobs = bench.other.store.jobs
    assert await jobs.find_job(job.job_id) is None
    assert await jobs.list_jobs(CALLER, status=None, before=None, limit=5) == []
    assert await bench.other.rows(run.run_id) == []
    assert await bench.intents() == 1


async def test_a_job_that_was_made_unheard_is_not_made_again(bench: Bench) -> None:
    job, run, tasks = bench.world.draft(3)
    bench.faults.vanish(DB, TRANSACT)
    for code in (ErrorCode.UNAVAILABLE, ErrorCode.CONFLICT):
        create = bench.store.jobs.create_job(
            job, run, tasks, answer=StoredResponse(201, b""), once=None
        )
        await refused(code, create)
        assert (await bench.other.view(job.job_id)).latest_run == run
        assert len(await bench.other.rows(run.run_id)) == 3
        assert await bench.intents() == 0


async def test_who_is_too_late_with_a_job_takes_its_rows_back(bench: Bench) -> None:
    job, run, tasks = bench.world.draft(3)
    place = RunPlace(run.run_id, job.job_id, 1, ONE_SHARD)

    async def abandon() -> None:
        await bench.table.update(
            intent_key(job.job_id, run.run_id),
            "SET abandoned = :yes",
            condition="attribute_exists(pk)",
            yes=True,
        )

    bench.faults.before(DB, TRANSACT, abandon)
    create = bench.store.jobs.create_job(
        job, run, tasks, answer=StoredResponse(201, b""), once=None
    )
    await refused(ErrorCode.UNAVAILABLE, create)
    assert await bench.intents() == 0
    assert await bench.table.get(place.task_key(tasks[0].task_id)) is None


async def test_tasks_that_cannot_be_counted_are_taken_back(bench: Bench) -> None:
    job_id, run_id = await bench.world.submit(2, closed=False)
    bench.faults.fail(DB, TRANSACT, away(), nth=2)
    bench.faults.lose_answer(DB, "update_item", times=2)
    bench.faults.lose_answer(DB, "delete_item", times=3)
    await refused(ErrorCode.UNAVAILABLE, bench.world.append(job_id, 3))
    assert bench.faults.fired == 6
    await bench.nothing_half_added(job_id, run_id, [0, 1])
    # An index is never given twice.
    assert (await bench.world.append(job_id, 1)).body == b"1 5"
    await bench.nothing_half_added(job_id, run_id, [0, 1, 5])


async def test_tasks_that_were_counted_unheard_stay(bench: Bench) -> None:
    job_id, run_id = await bench.world.submit(0, closed=False)
    await bench.key("add")
    bench.faults.vanish(DB, TRANSACT, nth=2)
    await refused(
        ErrorCode.UNAVAILABLE, bench.world.append(job_id, 2, once=IdempotencyScope("add"))
    )
    await bench.nothing_half_added(job_id, run_id, [0, 1])
    assert (await bench.world.append(job_id, 2, once=IdempotencyScope("add"))).body == b"2 0"
    await bench.nothing_half_added(job_id, run_id, [0, 1])


async def test_an_addition_that_was_cut_off_counts_against_the_quota_alone(bench: Bench) -> None:
    job_id, run_id = await bench.world.submit(2, closed=False)
    bench.faults.fail(DB, INSERT, away())
    bench.faults.fail(DB, "update_item", away())
    await refused(ErrorCode.UNAVAILABLE, bench.world.append(job_id, 3))
    item = await bench.run_item(job_id)
    assert (item["reserved"], item["total"]) == ({"2": 3}, 2)
    await refused(ErrorCode.QUOTA_EXCEEDED, bench.world.append(job_id, 1, max_tasks=5))
    assert (await bench.world.append(job_id, 1, max_tasks=6)).body == b"1 5"
    assert [row.index for row in await bench.other.rows(run_id)] == [0, 1, 5]


async def test_a_job_of_many_runs_is_deleted_in_the_end(bench: Bench) -> None:
    job_id, first = await bench.world.submit(0, closed=False)
    run_ids = [first, *await more_runs(bench, job_id, count=119)]
    bench.faults.vanish(DB, TRANSACT)
    delete = bench.store.jobs.delete_job
    await refused(ErrorCode.UNAVAILABLE, delete(CALLER, job_id, now=bench.world.now))
    view = await bench.other.view(job_id)
    assert view.job.status is JobStatus.DELETED
    assert await delete(CALLER, job_id, now=bench.world.now) == run_ids
    assert sorted(await bench.store.runs.deleted_runs()) == [(job_id, one) for one in run_ids]
    again = await bench.other.view(job_id)
    assert again.job.version == view.job.version
    # Whoever waits for the last run hears of its end.
    assert again.latest_run is not None
    assert (again.latest_run.run_id, again.latest_run.status) == (run_ids[-1], RunStatus.DELETED)


@pytest.mark.parametrize("way", ["run", "latest run", "runs", "job", "jobs"])
async def test_whoever_reads_the_last_count_reads_the_end_of_the_run(
    bench: Bench, way: str
) -> None:
    """The status follows the counters in a second write: a reader may come before that."""
    job_id, run_id = await bench.world.submit(1)
    jobs, runs = bench.other.store.jobs, bench.other.store.runs
    shown: list[Run | None] = []

    async def look() -> None:
        assert (await bench.run_item(job_id))["status"] == "running"
        if way == "runs":
            shown.extend(await runs.list_runs(CALLER, job_id, before=None, limit=10))
        elif way == "jobs":
            views = await jobs.list_jobs(CALLER, status=None, before=None, limit=10)
            shown.extend(view.latest_run for view in views)
        elif way == "job":
            shown.append((await bench.other.view(job_id)).latest_run)
        else:
            shown.append(await bench.other.run(job_id, run_id if way == "run" else None))

    def changes_status(parameters: Parameters) -> bool:
        return "known_version" in parameters["ConditionExpression"]

    bench.faults.before(DB, "update_item", look, where=changes_status)
    settled = await bench.world.succeed(run_id, 0)

    [run] = shown
    assert run is not None
    assert (run.status, run.stats.completed) == (RunStatus.COMPLETED, 1)
    assert settled.run_status is RunStatus.COMPLETED
    assert (await bench.run_item(job_id))["version"] == run.version


# Batches done in part, and throttling


async def test_what_batches_leave_undone_is_done_by_the_next(bench: Bench) -> None:
    bench.faults.split(DB, INSERT, times=3)
    bench.faults.split(DB, "batch_get_item", times=3)
    before = bench.stats.throttles.total()
    job_id, run_id = await bench.world.submit(60)
    listed = [job_id, *[(await bench.world.submit(0, closed=False))[0] for _ in range(4)]]
    views = await bench.store.jobs.list_jobs(CALLER, status=None, before=None, limit=10)
    assert bench.faults.fired == 6
    assert [view.job.job_id for view in views] == listed[::-1]
    assert all(view.latest_run is not None for view in views)
    assert len(await bench.other.rows(run_id)) == 60
    assert bench.stats.throttles[DB, INSERT] > 0
    assert bench.stats.throttles[DB, "batch_get_item"] > 0
    assert bench.stats.throttles.total() - before == bench.stats.undone.total()


async def test_throttling_is_waited_out_as_long_as_there_are_tries(bench: Bench) -> None:
    bench.faults.throttle(DB, TRANSACT, times=ATTEMPTS + 2)
    await refused(ErrorCode.UNAVAILABLE, bench.world.submit(1))
    job_id, _ = await bench.world.submit(1)
    assert (await bench.other.view(job_id)).latest_run is not None
