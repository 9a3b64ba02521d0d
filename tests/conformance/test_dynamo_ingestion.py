"""Ingestion on DynamoDB when answers are lost, ingesters break off between two steps, and others
interfere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from conveyor.domain.errors import ErrorCode
from conveyor.domain.model import RunStatus, TaskStatus
from conveyor.ports.maintenance import StuckIngest
from conveyor.prod.dynamodb.schema import run_key
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
from tests.conformance.world import CALLER, refused

pytestmark = pytest.mark.extended


@pytest.fixture
async def bench(clock: FakeClock) -> AsyncIterator[Ingests]:
    """An empty table."""
    async with open_ingests(clock) as opened:
        yield opened


# Every answer lost once


async def test_rows_are_written_and_counted_once(bench: Ingests) -> None:
    job_id, run_id = await bench.other.large(60)
    bench.lose_every_answer()
    assert await bench.one.write(run_id, 0, 60)
    assert await bench.one.finish(run_id) is RunStatus.RUNNING
    # Three batches of rows, the checkpoint, the latch.
    assert bench.faults.fired == 5
    await bench.exact(job_id, run_id, "p" * 60)
    run = await bench.other.world.run(job_id, run_id)
    assert run.ingest is not None
    assert (run.ingest.next_index, run.ingesting, run.version) == (60, False, 2)


async def test_a_checkpoint_moved_unheard_is_told_from_one_that_another_moved(
    bench: Ingests,
) -> None:
    job_id, _, run_id = await plan(bench, "sffsp", TaskStatus.FAILED)
    bench.faults.lose_answer(DB, UPDATE, where=moves_checkpoint)
    assert await bench.one.copy(run_id, 0, 5) == [1, 2]
    assert bench.faults.fired == 1
    assert "recopied" not in await bench.item(job_id, 2)


async def test_a_run_whose_rows_cannot_be_written_fails_once(bench: Ingests) -> None:
    job_id, run_id = await bench.other.large(4)
    await bench.one.write(run_id, 0, 2)
    bench.lose_every_answer()
    ingestion, now = bench.one.world.store.ingestion, bench.one.world.now
    assert await ingestion.fail_ingest(run_id, detail="gone", now=now)
    await bench.exact(job_id, run_id, "pp")
    run = await bench.other.world.run(job_id, run_id)
    assert (run.status, run.ingesting, run.version) == (RunStatus.FAILED, False, 3)


# Ingesters that break off between two steps


async def test_an_ingester_that_died_before_its_checkpoint_is_followed(bench: Ingests) -> None:
    job_id, run_id = await bench.other.large(4)
    bench.faults.fail(DB, UPDATE, away(), where=moves_checkpoint)
    await refused(ErrorCode.UNAVAILABLE, bench.one.write(run_id, 0, 4))
    await bench.other.world.succeed(run_id, 1)
    assert await bench.other.write(run_id, 0, 4)
    assert await bench.other.finish(run_id) is RunStatus.RUNNING
    await bench.exact(job_id, run_id, "pspp")


async def test_a_failure_that_was_cut_off_is_completed(bench: Ingests) -> None:
    job_id, run_id = await bench.other.large(4)
    await bench.other.write(run_id, 0, 3)
    bench.faults.fail(DB, UPDATE, away(), nth=2)
    one, other = bench.one.world.store.ingestion, bench.other.world.store.ingestion
    now = bench.one.world.now
    await refused(ErrorCode.UNAVAILABLE, one.fail_ingest(run_id, detail="gone", now=now))
    assert await other.stuck_ingests(before=now + 1) == [StuckIngest(job_id, run_id)]
    state = await other.ingesting(run_id)
    assert state is not None
    assert not state.live
    assert await bench.other.finish(run_id) is RunStatus.FAILED
    await bench.exact(job_id, run_id, "ppp")
    assert await other.stuck_ingests(before=now + 1) == []


# Two at once


async def test_two_ingesters_write_every_row_once(bench: Ingests) -> None:
    job_id, run_id = await bench.other.large(40)
    for first in range(0, 40, 10):
        written = await asyncio.gather(
            bench.one.write(run_id, first, first + 10),
            bench.other.write(run_id, max(0, first - 10), first + 10),
        )
        assert list(written) == [True, True]
    ends = await asyncio.gather(bench.one.finish(run_id), bench.other.finish(run_id))
    assert list(ends) == [RunStatus.RUNNING, RunStatus.RUNNING]
    await bench.exact(job_id, run_id, "p" * 40)


async def test_the_checkpoint_never_moves_back(bench: Ingests) -> None:
    job_id, run_id = await bench.other.large(6)

    async def overtake() -> None:
        for first in (0, 2, 4):
            await bench.other.write(run_id, first, first + 2)

    bench.faults.before(DB, UPDATE, overtake, where=moves_checkpoint)
    assert await bench.one.write(run_id, 0, 2)
    assert bench.faults.fired == 1
    assert (await bench.item(job_id, 1))["ingest_next"] == 6


@pytest.mark.parametrize("step", ["rows", "checkpoint"])
async def test_one_that_wakes_up_when_all_is_done_changes_nothing(
    bench: Ingests, step: str
) -> None:
    job_id, run_id = await bench.other.large(3)

    async def overtake() -> None:
        await bench.other.write(run_id, 0, 3)
        await bench.other.finish(run_id)
        for index in range(3):
            await bench.other.world.succeed(run_id, index)

    if step == "rows":
        bench.faults.before(DB, INSERT, overtake)
    else:
        bench.faults.before(DB, UPDATE, overtake, where=moves_checkpoint)
    assert await bench.one.write(run_id, 0, 3) is False
    assert await bench.one.finish(run_id) is RunStatus.COMPLETED
    await bench.exact(job_id, run_id, "sss")


# A run that ends in the middle


@pytest.mark.parametrize("is_finished", [False, True])
async def test_rows_of_a_run_that_was_stopped_meanwhile_are_counted(
    bench: Ingests, is_finished: bool
) -> None:
    job_id, run_id = await bench.other.large(6)
    await bench.one.write(run_id, 0, 2)

    async def stop() -> None:
        await bench.other.world.store.runs.stop_run(CALLER, job_id, now=bench.one.world.now)
        if is_finished:
            assert await bench.other.finish(run_id) is RunStatus.STOPPED

    bench.faults.before(DB, INSERT, stop)
    assert await bench.one.write(run_id, 2, 4) is False
    assert await bench.one.finish(run_id) is RunStatus.STOPPED
    await bench.exact(job_id, run_id, "pppp")


async def test_rows_that_come_between_the_count_and_the_end_are_counted(bench: Ingests) -> None:
    job_id, run_id = await bench.other.large(6)
    await bench.one.write(run_id, 0, 2)
    counted, gate = asyncio.Event(), asyncio.Event()
    ends: list[asyncio.Task[RunStatus | None]] = []

    async def hold() -> None:
        counted.set()
        await gate.wait()

    async def stop_and_count() -> None:
        await bench.other.world.store.runs.stop_run(CALLER, job_id, now=bench.one.world.now)
        ends.append(asyncio.create_task(bench.one.finish(run_id)))
        await counted.wait()

    bench.faults.before(DB, UPDATE, hold, where=latches)
    bench.faults.before(DB, INSERT, stop_and_count)
    assert await bench.one.write(run_id, 2, 4) is False
    gate.set()
    assert await ends[0] is RunStatus.STOPPED
    await bench.exact(job_id, run_id, "pppp")


@pytest.mark.parametrize("is_purged", [False, True])
async def test_rows_of_a_run_that_was_deleted_meanwhile_are_gone(
    bench: Ingests, is_purged: bool
) -> None:
    job_id, run_id = await bench.other.large(6)
    await bench.one.write(run_id, 0, 2)
    store = bench.other.world.store

    async def delete() -> None:
        await store.jobs.delete_job(CALLER, job_id, now=bench.one.world.now)
        assert await store.tasks.scrub_tasks(run_id, 10) == 2
        if is_purged:
            await store.runs.purge_run(run_id)

    bench.faults.before(DB, INSERT, delete)
    assert await bench.one.write(run_id, 2, 4) is False
    assert await bench.one.finish(run_id) is None
    assert await bench.rows_left(job_id) == 0


async def test_a_run_can_be_paused_between_rows_and_checkpoint(bench: Ingests) -> None:
    job_id, run_id = await bench.other.large(2)

    async def pause() -> None:
        runs = bench.other.world.store.runs
        await runs.pause_run(CALLER, job_id, paused=True, now=bench.one.world.now)

    bench.faults.before(DB, UPDATE, pause, where=moves_checkpoint)
    bench.faults.before(DB, UPDATE, pause, where=latches)
    assert await bench.one.write(run_id, 0, 2)
    assert await bench.one.finish(run_id) is RunStatus.RUNNING
    await bench.exact(job_id, run_id, "pp")


# Counters


async def test_the_last_task_and_the_end_complete_the_run_whoever_is_first(
    bench: Ingests,
) -> None:
    job_id, run_id = await bench.other.large(2)
    await bench.one.write(run_id, 0, 2)
    await bench.other.world.succeed(run_id, 0)

    async def settle() -> None:
        await bench.other.world.succeed(run_id, 1)

    bench.faults.before(DB, UPDATE, settle, where=latches)
    assert await bench.one.finish(run_id) is RunStatus.COMPLETED
    await bench.exact(job_id, run_id, "ss")


async def test_a_drained_run_ends_in_one_write_with_its_ingestion(bench: Ingests) -> None:
    job_id, run_id = await bench.other.large(1)
    await bench.one.write(run_id, 0, 1)
    await bench.other.world.succeed(run_id, 0)
    bench.faults.fail(DB, UPDATE, away(), nth=2)
    assert await bench.one.finish(run_id) is RunStatus.COMPLETED
    assert bench.faults.fired == 0
    await bench.exact(job_id, run_id, "s")


async def test_the_total_is_never_below_what_may_be_worked(bench: Ingests) -> None:
    """A worker of the source died before it had counted what it ended: the plan is too low."""
    job_id, source = await bench.other.ended("sssff")
    await bench.table.update(
        run_key(job_id, 1), "ADD successful :less", condition="attribute_exists(pk)", less=-2
    )
    run_id, told = await bench.other.world.rerun(job_id, TaskStatus.SUCCESSFUL, large_from=1)
    assert told == f"1 2 {source}"
    for first, total in ((0, 3), (1, 4), (2, 5), (3, 5)):
        await bench.one.copy(run_id, first, first + 1)
        run = await bench.other.world.run(job_id, run_id)
        assert run.stats.total == total
        if first < 3:
            await bench.other.succeed(run_id, await bench.other.row(run_id, first))
    await bench.one.copy(run_id, 4, 5)
    assert await bench.one.finish(run_id) is RunStatus.COMPLETED
    await bench.exact(job_id, run_id, "sssff")


def latches(parameters: object) -> bool:
    """Return whether an update ends an ingestion."""
    assert isinstance(parameters, dict)
    return bool(parameters["ExpressionAttributeValues"].get(":set_ingesting") == {"BOOL": False})
