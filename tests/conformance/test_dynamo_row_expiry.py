"""The time to live of settled task rows on DynamoDB, against a table that removes what is past it
at the very second."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest

from conveyor.domain import ids
from conveyor.domain.model import RunStatus, TaskFailure, TaskStatus
from conveyor.ports.maintenance import DuePosition
from conveyor.prod.dynamodb.client import Item, Query
from conveyor.prod.dynamodb.run_rows import DynamoRunRows, RunPlaces
from conveyor.prod.dynamodb.schema import TIME_TO_LIVE, run_key
from conveyor.prod.dynamodb.sweeping import DynamoSweeping
from conveyor.testing.clock import FakeClock
from tests.conformance.dynamo_records import DAY, Bench, open_bench
from tests.conformance.world import CALLER, CLAIM_LENGTH, MAX_INTERRUPTIONS

pytestmark = pytest.mark.extended

RESULT_DAYS, ROW_DAYS, SPARE_DAYS = 14, 30, 32
KEPT = (RESULT_DAYS + ROW_DAYS + SPARE_DAYS) * DAY


@pytest.fixture
async def bench(clock: FakeClock) -> AsyncIterator[Bench]:
    """An empty table."""
    async with open_bench(clock) as opened:
        yield opened


async def rows(bench: Bench, job_id: str) -> list[Item]:
    """The task rows of a job as they lie there, whatever became of their runs."""
    found: list[Item] = []
    async for page in bench.table.pages(Query(f"Job#{job_id}", begins_with="Task#")):
        found += page.items
    return found


async def lifetimes(bench: Bench, job_id: str) -> list[int | None]:
    """The milliseconds that each row of a job has left; None if it stays."""
    ends = [item.get(TIME_TO_LIVE) for item in await rows(bench, job_id)]
    return [None if end is None else end * 1_000 - bench.world.now for end in ends]


async def remove_expired(bench: Bench) -> None:
    """Remove what is past its time, as DynamoDB does in the end."""
    answer = await bench.table.call(
        "scan",
        FilterExpression="#ttl <= :now",
        ExpressionAttributeNames={"#ttl": TIME_TO_LIVE},
        ExpressionAttributeValues={":now": {"N": str(bench.world.now // 1_000)}},
    )
    for item in answer["Items"]:
        key = {name: item[name] for name in ("pk", "sk")}
        await bench.table.call("delete_item", Key=key)


async def pass_days(bench: Bench, days: float) -> None:
    """Let time pass, and then a sweep, before the table removes anything."""
    await bench.world.clock.advance(days * DAY / 1_000)
    await look(bench)
    await remove_expired(bench)


async def look(bench: Bench) -> Sequence[str]:
    """Sweep as a worker does; the ids of the ended runs for which something is due."""
    sweeping, now = bench.store.sweeping, bench.world.now
    ended = await sweeping.ended_runs(now=now, row_days=ROW_DAYS, after=None, limit=100)
    while len(ended) % 100 == 0 and ended:
        last = DuePosition(ended[-1].due_at, ended[-1].run_id)
        ended += await sweeping.ended_runs(now=now, row_days=ROW_DAYS, after=last, limit=100)
    for run in ended:
        await sweeping.mark_queue_dropped(run.run_id)
        if now - run.ended_at >= run.result_ttl_days * DAY:
            await sweeping.mark_swept(run.run_id)
    await sweeping.tidy(now=now)
    return [run.run_id for run in ended]


async def test_a_row_gets_its_time_to_live_with_its_end_and_not_before(bench: Bench) -> None:
    world = bench.world
    job_id, run_id = await world.submit(5)
    await world.succeed(run_id, 0)
    await world.fail(run_id, 1, TaskFailure.TIMEOUT)
    retried = await world.claimed(run_id, 2)
    await world.settle(retried, world.retry(retried))
    await world.claimed(run_id, 3)
    found = await lifetimes(bench, job_id)
    assert found == [KEPT, KEPT, None, None, None]
    await world.clock.advance(10)
    await world.succeed(run_id, 4)
    assert (await lifetimes(bench, job_id))[4] == KEPT


async def test_a_task_that_was_interrupted_too_often_gets_one_too(bench: Bench) -> None:
    world = bench.world
    job_id, run_id = await world.submit(1)
    for _ in range(MAX_INTERRUPTIONS + 1):
        await world.claim(run_id, 0)
        await world.clock.advance(CLAIM_LENGTH / 1_000)
    await world.claim(run_id, 0)
    [row] = await world.rows(run_id)
    assert row.status is TaskStatus.FAILED
    assert await lifetimes(bench, job_id) == [KEPT]


async def test_rows_that_are_kept_for_ever_get_none(clock: FakeClock) -> None:
    async with open_bench(clock, row_days=0) as bench:
        job_id, run_id = await bench.world.submit(2)
        await bench.world.succeed(run_id, 0)
        await bench.world.fail(run_id, 1)
        await bench.world.rerun(job_id, TaskStatus.FAILED)
        assert set(await lifetimes(bench, job_id)) == {None}


async def test_a_result_that_a_rerun_takes_over_lives_as_long_as_one_of_its_own(
    bench: Bench,
) -> None:
    world = bench.world
    job_id, run_id = await world.submit(2)
    await world.succeed(run_id, 0)
    await world.fail(run_id, 1)
    await world.clock.advance(20 * DAY / 1_000)
    await world.rerun(job_id, TaskStatus.FAILED)
    left = await lifetimes(bench, job_id)
    assert sorted(left, key=lambda end: end or 0) == [None, KEPT - 20 * DAY, KEPT - 20 * DAY, KEPT]


async def test_an_open_run_of_120_days_loses_no_row_and_no_count(bench: Bench) -> None:
    world = bench.world
    job_id, run_id = await world.submit(1, closed=False)
    await world.succeed(run_id, 0)
    for done in range(1, 25):
        await world.append(job_id, 1)
        await world.succeed(run_id, done)
        await pass_days(bench, 5)
        assert len(await rows(bench, job_id)) == done + 1
        await bench.store.sweeping.reconcile_run(run_id, now=world.now)
        run = await world.run(job_id)
        assert (run.stats.successful, run.stats.total) == (done + 1, done + 1)
    assert None not in await lifetimes(bench, job_id)
    await bench.store.jobs.close_job(CALLER, job_id, now=world.now)
    # However it ends, each row outlives what the run itself may.
    left = [end for end in await lifetimes(bench, job_id) if end is not None]
    assert min(left) >= (RESULT_DAYS + ROW_DAYS) * DAY


async def test_a_run_that_a_live_one_draws_on_loses_no_row(bench: Bench) -> None:
    world = bench.world
    job_id, run_id = await world.submit(2)
    await world.succeed(run_id, 0)
    await world.fail(run_id, 1)
    again, _ = await world.rerun(job_id, TaskStatus.FAILED)
    for _ in range(24):
        await pass_days(bench, 5)
        assert len(await world.rows(run_id)) == 2
        assert len(await world.rows(again)) == 2
    task = await world.claimed(again, 1, task_id=ids.task_id(run_id, 1))
    await world.settle(task, world.success(task))
    left = [end for end in await lifetimes(bench, job_id) if end is not None]
    assert len(left) == 4
    assert min(left) >= (RESULT_DAYS + ROW_DAYS) * DAY


async def test_stamps_go_on_where_a_look_reached_its_bound(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conveyor.prod.dynamodb.row_expiry.MOST_STAMPED", 2)
    world = bench.world
    job_id, run_id = await world.submit(7, closed=False, task_shard_count=2, shard_scheme="stripe")
    for index in range(6):
        await world.succeed(run_id, index)
    await world.clock.advance(31 * DAY / 1_000)
    update = ("dynamodb", "update_item", "ok")
    before = bench.stats.calls[update]
    for _ in range(20):
        await bench.store.sweeping.tidy(now=world.now)
    # Each row once, the position after each page, then the run.
    assert 6 + 1 < bench.stats.calls[update] - before <= 6 + 8 + 1
    before = bench.stats.calls[update]
    await bench.store.sweeping.tidy(now=world.now)
    assert bench.stats.calls[update] == before
    assert await stamped(bench, job_id) == [KEPT] * 6


async def stamped(bench: Bench, job_id: str) -> list[int]:
    """The time that the rows of a job in two shards have left, without those that stay."""
    items = [item for shard in range(2) for item in await shard_rows(bench, job_id, shard)]
    return [item[TIME_TO_LIVE] * 1_000 - bench.world.now for item in items if TIME_TO_LIVE in item]


async def test_a_process_that_sweeps_next_goes_on_where_another_one_was_ended(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conveyor.prod.dynamodb.row_expiry.MOST_STAMPED", 2)
    world, table = bench.world, bench.table
    job_id, run_id = await world.submit(7, closed=False, task_shard_count=2, shard_scheme="stripe")
    for index in range(6):
        await world.succeed(run_id, index)
    await world.clock.advance(31 * DAY / 1_000)
    for _ in range(10):
        await DynamoSweeping(DynamoRunRows(table, RunPlaces(table))).tidy(now=world.now)
    assert await stamped(bench, job_id) == [KEPT] * 6
    item = await bench.run_item(job_id)
    assert item["rows_stamped_at"] == world.now - DAY
    assert "stamping" not in item


async def test_a_position_left_by_a_stamping_that_has_ended_leaves_out_no_row(
    bench: Bench,
) -> None:
    world = bench.world
    job_id, run_id = await world.submit(3, closed=False, task_shard_count=2, shard_scheme="stripe")
    for index in range(2):
        await world.succeed(run_id, index)
    key = run_key(job_id, 1)
    stamped_at = (await bench.run_item(job_id))["created_at"]
    await bench.table.update(
        key, "SET stamping = :old", condition="attribute_exists(pk)", old=[stamped_at + DAY, 1, 1]
    )
    await world.clock.advance(31 * DAY / 1_000)
    await bench.store.sweeping.tidy(now=world.now)
    assert await stamped(bench, job_id) == [KEPT] * 2


async def shard_rows(bench: Bench, job_id: str, shard: int) -> list[Item]:
    """The task rows of a shard of a job."""
    found: list[Item] = []
    async for page in bench.table.pages(Query(f"Job#{job_id}#TS{shard}", begins_with="Task#")):
        found += page.items
    return found


async def scrub(bench: Bench, run_id: str) -> int:
    """Remove the rows of a deleted run in small steps; the number removed."""
    removed = 0
    while count := await bench.store.tasks.scrub_tasks(run_id, 2):
        removed += count
    return removed


async def test_retention_leaves_settled_rows_to_the_table_and_nobody_sees_them(
    bench: Bench,
) -> None:
    world = bench.world
    job_id, run_id = await world.submit(8)
    for index in range(4):
        await world.succeed(run_id, index)
    await bench.store.runs.stop_run(CALLER, job_id, now=world.now)
    await world.clock.advance((RESULT_DAYS + ROW_DAYS) * DAY / 1_000)
    assert await bench.store.sweeping.expire_run(run_id, now=world.now) == [run_id]
    assert await scrub(bench, run_id) == 4  # those that never ended
    assert await scrub(bench, run_id) == 0
    await bench.store.runs.purge_run(run_id)
    await bench.store.jobs.purge_job(job_id)
    assert [item["status"] for item in await rows(bench, job_id)] == ["successful"] * 4
    for store in (bench.store, bench.other.store):
        assert await store.jobs.get_job(CALLER, job_id) is None
        page = await store.tasks.page_tasks(run_id, statuses=None, after=None, limit=10)
        assert page.tasks == []
        for item in await rows(bench, job_id):
            assert await store.tasks.get_task(run_id, item["task_id"]) is None
            assert await store.tasks.task_history(run_id, item["task_id"]) is None
    await world.clock.advance((SPARE_DAYS + 1) * DAY / 1_000)
    await remove_expired(bench)
    assert await rows(bench, job_id) == []


async def test_a_delete_that_a_caller_asked_for_removes_every_row_at_once(bench: Bench) -> None:
    world = bench.world
    job_id, run_id = await world.submit(4)
    for index in range(4):
        await world.succeed(run_id, index)
    again, _ = await world.rerun(job_id)
    assert set(await bench.store.jobs.delete_job(CALLER, job_id, now=world.now)) == {run_id, again}
    assert (await scrub(bench, run_id), await scrub(bench, again)) == (4, 4)
    assert await rows(bench, job_id) == []


async def test_a_row_past_its_time_that_is_still_there_counts_as_there(bench: Bench) -> None:
    """A sweep that comes late finds what the table has not removed yet."""
    world = bench.world
    job_id, run_id = await world.submit(2, closed=False)
    await world.succeed(run_id, 0)
    await world.clock.advance((KEPT + DAY) / 1_000)
    assert [row.status for row in await world.rows(run_id)] == [
        TaskStatus.SUCCESSFUL,
        TaskStatus.PENDING,
    ]
    assert await bench.store.sweeping.reconcile_run(run_id, now=world.now) is RunStatus.RUNNING
    assert (await world.run(job_id)).stats.successful == 1
    await bench.store.sweeping.tidy(now=world.now)
    assert await lifetimes(bench, job_id) == [KEPT, None]
