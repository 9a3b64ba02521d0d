"""Rows that come, or move, after the end of a run on DynamoDB, without anybody being left to count
them: an ingester that is too late, a worker that is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from conveyor.domain.errors import ErrorCode
from conveyor.domain.ids import task_id
from conveyor.domain.model import RunStatus, TaskStatus
from conveyor.domain.shards import ONE_SHARD
from conveyor.prod.dynamodb.client import DamagedRow
from conveyor.prod.dynamodb.runs import query_all
from conveyor.prod.dynamodb.schema import BY_OWNER, all_partitions, task_key
from conveyor.prod.dynamodb.sweeping import PATIENCE
from conveyor.testing.clock import FakeClock
from tests.conformance.dynamo_ingests import (
    DB,
    INSERT,
    TRANSACT,
    UPDATE,
    Ingests,
    away,
    moves_checkpoint,
    open_ingests,
)
from tests.conformance.world import CALLER, refused

pytestmark = pytest.mark.extended

SECRET = "a-text-that-is-in-the-row"


@pytest.fixture
async def bench(clock: FakeClock) -> AsyncIterator[Ingests]:
    """An empty table."""
    async with open_ingests(clock) as opened:
        yield opened


async def settle(bench: Ingests) -> None:
    """Let a sweep pass that is late enough."""
    world = bench.other.world
    await world.clock.advance(PATIENCE / 1_000)
    await world.store.sweeping.tidy(now=world.now)


async def unsettled(bench: Ingests) -> list[str]:
    """The runs that a sweep would look at, by the index."""
    found = await query_all(bench.table, all_partitions("unsettled"), index=BY_OWNER)
    return [item["run_id"] for item in found]


@pytest.mark.parametrize("is_claimed", [False, True])
async def test_rows_that_came_too_late_are_counted_once_no_call_is_under_way(
    bench: Ingests, is_claimed: bool
) -> None:
    """A stopped run whose end has been made still has a call under way when they come."""
    job_id, run_id = await bench.other.large(6)
    await bench.one.write(run_id, 0, 2)
    world = bench.other.world
    if is_claimed:
        await world.claimed(run_id, 0)

    async def stop() -> None:
        await world.store.runs.stop_run(CALLER, job_id, now=world.now)
        assert await bench.other.finish(run_id) is RunStatus.STOPPED

    bench.faults.before(DB, INSERT, stop)
    assert await bench.one.write(run_id, 2, 4) is False
    assert (await world.run(job_id)).stats.total == (2 if is_claimed else 4)
    assert await unsettled(bench) == [run_id]
    # As long as something is under way, or may still come, the run is left for later.
    await world.store.sweeping.tidy(now=world.now)
    assert await unsettled(bench) == [run_id]
    await settle(bench)
    await bench.exact(job_id, run_id, "rppp" if is_claimed else "pppp")
    assert await unsettled(bench) == []


async def test_rows_of_an_ingester_that_died_behind_them_are_counted(bench: Ingests) -> None:
    job_id, run_id = await bench.other.large(6)
    await bench.one.write(run_id, 0, 2)
    world = bench.other.world

    async def stop() -> None:
        await world.store.runs.stop_run(CALLER, job_id, now=world.now)
        assert await bench.other.finish(run_id) is RunStatus.STOPPED

    bench.faults.before(DB, INSERT, stop)
    bench.faults.fail(DB, UPDATE, away(), where=moves_checkpoint)
    await refused(ErrorCode.UNAVAILABLE, bench.one.write(run_id, 2, 4))
    assert (await world.run(job_id)).stats.total == 2
    await settle(bench)
    await bench.exact(job_id, run_id, "pppp")
    assert await unsettled(bench) == []


async def test_copies_of_an_ingester_that_died_behind_them_are_counted(bench: Ingests) -> None:
    job_id, _ = await bench.other.ended("sffsf")
    run_id, _ = await bench.other.world.rerun(job_id, TaskStatus.FAILED, large_from=1)
    await bench.one.copy(run_id, 0, 2)
    world = bench.other.world

    async def stop() -> None:
        await world.store.runs.stop_run(CALLER, job_id, now=world.now)
        assert await bench.other.finish(run_id) is RunStatus.STOPPED

    bench.faults.before(DB, INSERT, stop)
    bench.faults.fail(DB, UPDATE, away(), where=moves_checkpoint)
    await refused(ErrorCode.UNAVAILABLE, bench.one.copy(run_id, 2, 4))
    await settle(bench)
    await bench.exact(job_id, run_id, "spps")


async def test_rows_that_come_while_the_run_is_being_settled_are_counted(bench: Ingests) -> None:
    """The sweeper has counted, and is about to say that all is well."""
    job_id, run_id = await bench.other.large(6)
    await bench.other.write(run_id, 0, 2)
    world, sweeper = bench.other.world, bench.one.world

    late, held = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        held.set()
        await late.wait()

    bench.faults.before(DB, INSERT, hold)
    writing = asyncio.create_task(bench.one.write(run_id, 2, 4))
    await held.wait()
    await world.store.runs.stop_run(CALLER, job_id, now=world.now)
    assert await bench.other.finish(run_id) is RunStatus.STOPPED
    await world.clock.advance(PATIENCE / 1_000)

    async def overtake() -> None:
        late.set()
        assert await writing is False

    bench.faults.before(DB, UPDATE, overtake, where=settles_run)
    await sweeper.store.sweeping.tidy(now=world.now)
    await bench.exact(job_id, run_id, "pppp")
    assert await unsettled(bench) == [run_id]
    await settle(bench)
    assert await unsettled(bench) == []


async def test_an_ingester_that_comes_after_the_sweep_has_it_look_again(bench: Ingests) -> None:
    """Its own recount does not get through."""
    job_id, run_id = await bench.other.large(6)
    await bench.one.write(run_id, 0, 2)
    world = bench.other.world

    async def stop() -> None:
        await world.store.runs.stop_run(CALLER, job_id, now=world.now)
        assert await bench.other.finish(run_id) is RunStatus.STOPPED
        await settle(bench)
        assert await unsettled(bench) == []

    bench.faults.before(DB, INSERT, stop)
    bench.faults.fail(DB, "query", away())
    await refused(ErrorCode.UNAVAILABLE, bench.one.write(run_id, 2, 4))
    assert (await world.run(job_id)).stats.total == 2
    await settle(bench)
    await bench.exact(job_id, run_id, "pppp")
    assert await unsettled(bench) == []


async def test_an_end_that_nobody_counted_of_a_stopped_run_is_counted(bench: Ingests) -> None:
    """A worker is lost between the end of a row and its addition; nothing is quiet by then."""
    job_id, run_id = await bench.other.world.submit(2, task_shard_count=2)
    world, dying = bench.other.world, bench.one.world
    task = await dying.claimed(run_id, 0)
    await world.store.runs.stop_run(CALLER, job_id, now=world.now)
    bench.faults.fail(DB, TRANSACT, away(), where=adds, times=1_000)
    await refused(ErrorCode.UNAVAILABLE, dying.settle(task, dying.success(task)))
    assert (await world.run(job_id)).stats.successful == 0
    await settle(bench)
    await bench.exact(job_id, run_id, "sp")
    run = await world.run(job_id)
    assert (run.status, run.updated_at) == (RunStatus.STOPPED, world.now)


async def uncounted(bench: Ingests) -> tuple[str, str]:
    """A stopped run of a task that ended and was not counted; (job_id, run_id)."""
    job_id, run_id = await bench.other.world.submit(1)
    dying = bench.one.world
    task = await dying.claimed(run_id, 0)
    await dying.store.runs.stop_run(CALLER, job_id, now=dying.now)
    # The end of the row is written, and what would count it is not.
    bench.faults.fail(DB, TRANSACT, away(), where=adds, times=1_000)
    await refused(ErrorCode.UNAVAILABLE, dying.settle(task, dying.success(task)))
    return job_id, run_id


@pytest.mark.parametrize(
    "changes",
    [
        {"status": None},
        {"status": SECRET},
        {"status": [SECRET]},
        {"task_id": SECRET},
        {"claimed_until": SECRET},
        {"events": None},
        {"events": [SECRET]},
        {"events": ['{"spend":{"cost":"NaN"}}']},
    ],
    ids=str,
)
async def test_a_damaged_row_costs_the_counts_of_its_own_run_alone(
    bench: Ingests, caplog: pytest.LogCaptureFixture, changes: dict[str, Any]
) -> None:
    runs = [await uncounted(bench) for _ in range(3)]
    job_id, run_id = runs[1]
    key = task_key(job_id, run_id, task_id(run_id, 0), ONE_SHARD)
    item = await bench.table.get(key)
    assert item is not None
    left = {name: value for name, value in {**item, **changes}.items() if value is not None}
    await bench.table.put(key, left)
    await settle(bench)
    assert await unsettled(bench) == [run_id]
    for other in (runs[0], runs[2]):
        await bench.exact(*other, "s")
    with pytest.raises(DamagedRow):
        await bench.other.world.store.sweeping.reconcile_run(run_id, now=bench.other.world.now)
    told = [record.getMessage() for record in caplog.records if "damaged" in record.getMessage()]
    assert told
    assert all(f"{key.pk} {key.sk}" in line for line in told)
    assert SECRET not in caplog.text


async def test_a_count_that_does_not_get_through_is_told_and_costs_no_other(
    bench: Ingests, caplog: pytest.LogCaptureFixture
) -> None:
    runs = dict([await uncounted(bench) for _ in range(3)])
    bench.faults.fail(DB, "query", away(), where=reads_rows)
    world = bench.one.world
    await world.clock.advance(PATIENCE / 1_000)
    await world.store.sweeping.tidy(now=world.now)
    [left] = await unsettled(bench)
    assert left in runs.values()
    told = [
        record.getMessage()
        for record in caplog.records
        if "recounting the ended run" in record.message
    ]
    assert told == [f"recounting the ended run {left} failed: unavailable: away"]
    await settle(bench)
    assert await unsettled(bench) == []
    for job_id, run_id in runs.items():
        await bench.exact(job_id, run_id, "s")


async def test_a_run_that_ended_by_itself_is_not_recounted(bench: Ingests) -> None:
    job_id, run_id = await bench.other.world.submit(1, task_shard_count=2)
    await bench.other.world.succeed(run_id, 0)
    assert await unsettled(bench) == []
    await settle(bench)
    assert (await bench.item(job_id, 1))["counter_epoch"] == 0


def settles_run(parameters: object) -> bool:
    """Return whether an update marks a run as settled."""
    assert isinstance(parameters, dict)
    return bool(parameters["ExpressionAttributeValues"].get(":set_unsettled") == {"BOOL": False})


def reads_rows(parameters: object) -> bool:
    """Return whether a query asks for rows of tasks to count them."""
    assert isinstance(parameters, dict)
    return "claimed_until" in parameters.get("ProjectionExpression", "")


def adds(parameters: object) -> bool:
    """Return whether a transaction makes the item in which a process counts."""
    assert isinstance(parameters, dict)
    return any(
        "counts" in part.get("Put", {}).get("Item", {}) for part in parameters["TransactItems"]
    )
