"""Copying of rows for a rerun on DynamoDB when answers are lost, copiers break off, and others
interfere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from conveyor.domain.errors import ErrorCode
from conveyor.domain.model import RunStatus
from conveyor.prod.dynamodb.schema import pin_key
from conveyor.testing.clock import FakeClock
from tests.conformance.dynamo_ingests import (
    DB,
    INSERT,
    UPDATE,
    Ingests,
    away,
    moves_checkpoint,
    open_ingests,
    plan,
)
from tests.conformance.world import CALLER, F, P, R, refused

pytestmark = pytest.mark.extended


@pytest.fixture
async def bench(clock: FakeClock) -> AsyncIterator[Ingests]:
    """An empty table."""
    async with open_ingests(clock) as opened:
        yield opened


async def test_rows_are_copied_and_counted_once(bench: Ingests) -> None:
    job_id, _, run_id = await plan(bench, "sffsp", F)
    bench.lose_every_answer()
    assert await bench.one.copy(run_id, 0, 2) == [1]
    assert await bench.one.copy(run_id, 2, 5) == [2]
    assert await bench.one.finish(run_id) is RunStatus.RUNNING
    await bench.exact(job_id, run_id, "spps")
    # What was copied had been added up: the end read no row for it.
    assert "recopied" not in await bench.item(job_id, 2)


async def test_a_copier_that_died_before_its_checkpoint_is_followed(bench: Ingests) -> None:
    job_id, _, run_id = await plan(bench, "sffsp", F)
    bench.faults.fail(DB, UPDATE, away(), where=moves_checkpoint)
    await refused(ErrorCode.UNAVAILABLE, bench.one.copy(run_id, 0, 5))
    await bench.other.succeed(run_id, await bench.other.row(run_id, 1))
    # Row 1 has been worked since, and is told from those that came with their end.
    assert await bench.other.copy(run_id, 0, 5) == [2]
    assert await bench.other.finish(run_id) is RunStatus.RUNNING
    await bench.exact(job_id, run_id, "ssps")
    assert "recopied" not in await bench.item(job_id, 2)


async def test_a_source_is_let_go_of_before_the_end(bench: Ingests) -> None:
    """Cut off between the two, the end is made again, and nothing is read of the source."""
    job_id, source, run_id = await plan(bench, "sf")
    await bench.one.copy(run_id, 0, 2)
    bench.faults.fail(DB, UPDATE, away())
    await refused(ErrorCode.UNAVAILABLE, bench.one.finish(run_id))
    await bench.other.world.store.runs.delete_run(CALLER, job_id, source, now=bench.one.world.now)
    await bench.other.world.store.tasks.scrub_tasks(source, 10)
    await bench.other.world.store.runs.purge_run(source)
    assert await bench.one.copy(run_id, 0, 2) == [0, 1]
    assert await bench.one.finish(run_id) is RunStatus.RUNNING
    await bench.exact(job_id, run_id, "pp")


async def test_two_copiers_count_every_row_once(bench: Ingests) -> None:
    job_id, _, run_id = await plan(bench, "sffsffspsfsf", F, P)
    for first, end in ((0, 5), (5, 8), (8, 12)):
        copied = await asyncio.gather(
            bench.one.copy(run_id, first, end), bench.other.copy(run_id, first, end)
        )
        assert copied[0] == copied[1]
    ends = await asyncio.gather(bench.one.finish(run_id), bench.other.finish(run_id))
    assert list(ends) == [RunStatus.RUNNING, RunStatus.RUNNING]
    await bench.exact(job_id, run_id, "sppsppspspsp")


async def test_stretches_that_overlap_are_counted_once(bench: Ingests) -> None:
    job_id, _, run_id = await plan(bench, "sffsff", F)

    async def overtake() -> None:
        assert await bench.other.copy(run_id, 0, 3) == [1, 2]

    bench.faults.before(DB, UPDATE, overtake, where=moves_checkpoint)
    assert await bench.one.copy(run_id, 0, 6) == [1, 2, 4, 5]
    assert await bench.one.finish(run_id) is RunStatus.RUNNING
    await bench.exact(job_id, run_id, "sppspp")


@pytest.mark.parametrize("step", ["rows", "checkpoint"])
async def test_a_copier_that_wakes_up_when_all_is_done_changes_nothing(
    bench: Ingests, step: str
) -> None:
    job_id, source, run_id = await plan(bench, "sffs", F)
    old = await bench.other.world.rows(source, 2)

    async def overtake() -> None:
        assert await bench.other.copy(run_id, 0, 4) == [1, 2]
        await bench.other.finish(run_id)
        await bench.other.succeed(run_id, old[1], old[2])

    if step == "rows":
        bench.faults.before(DB, INSERT, overtake)
    else:
        bench.faults.before(DB, UPDATE, overtake, where=moves_checkpoint)
    assert await bench.one.copy(run_id, 0, 4) is None
    assert (await bench.other.world.run(job_id, run_id)).status is RunStatus.COMPLETED
    await bench.exact(job_id, run_id, "ssss")


@pytest.mark.parametrize("is_finished", [False, True])
async def test_a_row_that_two_copiers_saw_differently_is_counted(
    bench: Ingests, is_finished: bool
) -> None:
    """One reads a task whose claim has lapsed; before it writes, the worker gives the task back,
    and the other copier leaves it out."""
    job_id, source, run_id = await plan(bench, "rsr", R, shards=1)
    left = await bench.other.row(source, 2)

    async def overtake() -> None:
        await bench.other.world.settle(left, bench.other.world.retry(left))
        assert await bench.other.copy(run_id, 0, 3) == [0]
        if is_finished:
            await bench.other.finish(run_id)

    bench.faults.before(DB, INSERT, overtake)
    copied = await bench.one.copy(run_id, 0, 3)
    assert copied == (None if is_finished else [0, 2])
    assert await bench.one.finish(run_id) is RunStatus.RUNNING
    await bench.exact(job_id, run_id, "psp")


async def test_rows_of_a_rerun_that_was_stopped_meanwhile_are_counted(bench: Ingests) -> None:
    job_id, _, run_id = await plan(bench, "sffsf", F)
    await bench.one.copy(run_id, 0, 2)

    async def stop() -> None:
        await bench.other.world.store.runs.stop_run(CALLER, job_id, now=bench.one.world.now)

    bench.faults.before(DB, INSERT, stop)
    assert await bench.one.copy(run_id, 2, 4) is None
    assert await bench.one.finish(run_id) is RunStatus.STOPPED
    await bench.exact(job_id, run_id, "spps")


async def test_a_plan_that_was_too_high_is_corrected(bench: Ingests) -> None:
    """A task of the source that was left under a claim is given back behind the plan."""
    job_id, source = await bench.other.ended("rsr")
    left = await bench.other.row(source, 0)
    run_id, told = await bench.other.world.rerun(job_id, R, large_from=1)
    assert told == f"2 1 {source}"
    await bench.other.world.settle(left, bench.other.world.retry(left))
    assert await bench.one.copy(run_id, 0, 3) == [2]
    await bench.other.succeed(run_id, await bench.other.row(run_id, 2))
    assert (await bench.other.world.run(job_id, run_id)).status is RunStatus.RUNNING
    # Told again, the rerun says what it came to.
    assert await bench.one.finish(run_id) is RunStatus.COMPLETED
    await bench.exact(job_id, run_id, "ss")
    assert (await bench.other.world.rerun(job_id, R, run_id=run_id))[1] == f"1 1 {source}"


async def test_a_full_rerun_is_unpinned_at_its_end(bench: Ingests) -> None:
    job_id, source, run_id = await plan(bench, "sf")
    pin = pin_key(job_id, source, run_id)
    assert await bench.table.get(pin) is not None
    await bench.one.copy(run_id, 0, 2)
    assert await bench.table.get(pin) is not None
    await bench.one.finish(run_id)
    assert await bench.table.get(pin) is None


async def test_calls_of_a_copied_stretch(bench: Ingests) -> None:
    """Read the run and the source, each shard's rows, write 25 rows a call, move the checkpoint."""
    _, _, run_id = await plan(bench, "s" * 60)
    before = len(bench.faults.calls)
    assert await bench.one.copy(run_id, 0, 60) == list(range(60))
    operations = [operation for _, operation in bench.faults.calls[before:]]
    assert {operation: operations.count(operation) for operation in set(operations)} == {
        # Two places, looked up once, and two runs.
        "get_item": 4,
        "query": 2,
        INSERT: 4,
        UPDATE: 1,
    }
