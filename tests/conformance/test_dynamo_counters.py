"""Counters on DynamoDB match the rows, whichever answers are lost and whichever process
recounts."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import RunStatus, Spend, TaskFailure
from conveyor.domain.task_rules import Failed, Released
from conveyor.ports.tasks import NotClaimable, Settled
from conveyor.prod.dynamodb.run_rows import Change, RunVersionConflict
from tests.conformance.dynamo_runs import (
    TableBench,
    additions,
    all_writes,
    check,
    scans,
    settles,
)
from tests.conformance.world import CLAIM_LENGTH, MAX_INTERRUPTIONS, PROBLEM, World

pytestmark = pytest.mark.extended

LAPSE = CLAIM_LENGTH / 1_000


async def work_three_tasks(bench: TableBench, world: World) -> str:
    """One succeeds, one fails at the second try, one is given up by the store."""
    _, run_id = await world.submit(3)
    for _ in range(MAX_INTERRUPTIONS + 1):
        await world.claimed(run_id, 2)
        await world.clock.advance(LAPSE)
    assert (await world.succeed(run_id, 0)).applied
    task = await world.claimed(run_id, 1)
    assert (await world.settle(task, world.retry(task))).applied
    task = await world.claimed(run_id, 1)
    assert (await world.settle(task, Released())).applied
    assert (await world.fail(run_id, 1)).applied
    assert await world.claim(run_id, 2) == NotClaimable(RunStatus.COMPLETED)
    return run_id


async def test_the_answer_of_each_write_is_lost_once(bench: TableBench, one: World) -> None:
    await work_three_tasks(bench, one)
    count = sum(all_writes(*call) for call in bench.seam.calls)
    assert count == 20
    bench.seam.calls.clear()
    for lost in range(count):
        bench.seam.lose_answers(all_writes, passed=lost)
        run_id = await work_three_tasks(bench, one)
        assert bench.seam.faults == []
        run = (await bench.row(run_id)).run
        assert (run.status, run.stats.successful, run.stats.failed) == (RunStatus.COMPLETED, 1, 2)
        assert run.stats.spend == Spend(3, 0.75)
        await check(bench, run_id)
    # What was not answered is recognised: no row is counted for it.
    assert not any(scans(*call) for call in bench.seam.calls)


async def test_the_answer_of_every_write_is_lost(bench: TableBench, one: World) -> None:
    bench.seam.lose_answers(all_writes, count=1_000)
    run_id = await work_three_tasks(bench, one)
    assert (await bench.row(run_id)).run.version == 2
    await check(bench, run_id)


async def test_settlements_that_come_meanwhile_go_with_the_next_addition(
    bench: TableBench, one: World
) -> None:
    _, run_id = await one.submit(10)
    held = bench.seam.acquire_or_renew(additions)
    tasks = await asyncio.gather(*(one.claimed(run_id, index) for index in range(10)))
    settling = [asyncio.create_task(one.settle(task, one.success(task))) for task in tasks]
    await held.met.wait()
    await bench.seam.until_answered(settles, 10)
    held.gate.set()
    settled = await asyncio.gather(*settling)
    assert Counter(one.run_status for one in settled) == {"running": 9, "completed": 1}
    assert sum(additions(*call) for call in bench.seam.calls) == 2
    assert len(await bench.items(run_id)) == 1
    await check(bench, run_id)


@pytest.mark.parametrize("carried_out", [True, False])
async def test_an_addition_that_is_not_answered_is_made_with_the_next(
    bench: TableBench, one: World, carried_out: bool
) -> None:
    _, run_id = await one.submit(3)
    bench.seam.be_away(additions, carried_out=carried_out)
    with pytest.raises(ConveyorError) as refused:
        await one.succeed(run_id, 0)
    assert refused.value.code is ErrorCode.UNAVAILABLE
    assert (await bench.row(run_id)).run.stats.successful == carried_out
    # Delivered again, its message is forgotten: the row has moved.
    assert await one.claim(run_id, 0) == NotClaimable()
    await one.succeed(run_id, 1)
    assert (await bench.row(run_id)).run.stats.successful == 2
    assert (await one.succeed(run_id, 2)).run_status is RunStatus.COMPLETED
    await check(bench, run_id)


@pytest.mark.parametrize("carried_out", [True, False])
async def test_an_addition_that_is_not_answered_is_made_again_by_itself(
    bench: TableBench, one: World, carried_out: bool
) -> None:
    _, run_id = await one.submit(1)
    bench.seam.be_away(additions, carried_out=carried_out, count=2)
    with pytest.raises(ConveyorError):
        await one.succeed(run_id, 0)
    while (await bench.row(run_id)).run.status is not RunStatus.COMPLETED:
        await bench.clock.advance(0.5)
    await check(bench, run_id)


async def test_what_is_pending_is_added_at_the_end(bench: TableBench, one: World) -> None:
    _, run_id = await one.submit(2)
    bench.seam.be_away(additions, carried_out=False)
    with pytest.raises(ConveyorError):
        await one.succeed(run_id, 0)
    await bench.end(one)
    assert (await bench.row(run_id)).run.stats.successful == 1


async def test_a_cancelled_settlement_is_counted(bench: TableBench, one: World) -> None:
    _, run_id = await one.submit(1)
    held = bench.seam.acquire_or_renew(additions)
    settling = asyncio.create_task(one.succeed(run_id, 0))
    await held.met.wait()
    settling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await settling
    held.gate.set()
    await bench.end(one)
    assert (await bench.row(run_id)).run.status is RunStatus.COMPLETED
    await check(bench, run_id)


@pytest.mark.parametrize("first", ["close", "addition", "both"])
async def test_a_close_crossing_the_last_addition_leaves_no_run_hanging(
    bench: TableBench, one: World, first: str
) -> None:
    _, run_id = await one.submit(1, closed=False)
    held = bench.seam.acquire_or_renew(additions)
    settling = asyncio.create_task(one.succeed(run_id, 0))
    await held.met.wait()
    if first == "close":
        await close_run(bench, run_id)
        held.gate.set()
    else:
        held.gate.set()
        if first == "addition":
            await settling
        await close_run(bench, run_id)
    assert (await settling).applied
    assert (await bench.row(run_id)).run.status is RunStatus.COMPLETED
    await check(bench, run_id)


async def test_completed_never_passes_the_total_nor_shrinks(
    bench: TableBench, one: World, two: World
) -> None:
    _, run_id = await one.submit(40, task_shard_count=4)
    bench.seam.lose_answers(additions, count=1_000)
    seen = [0]

    async def watch() -> None:
        while seen[-1] < 40:
            run = (await bench.row(run_id)).run
            assert seen[-1] <= run.stats.completed <= run.stats.total == 40
            seen.append(run.stats.completed)

    watching = asyncio.create_task(watch())
    settled = await asyncio.gather(
        *((one, two)[index % 2].succeed(run_id, index) for index in range(40))
    )
    await watching
    assert [one.applied for one in settled] == [True] * 40
    await check(bench, run_id, shards=4)
    assert (await bench.row(run_id)).run.status is RunStatus.COMPLETED


async def test_an_addition_to_a_deleted_run_does_not_apply(bench: TableBench, one: World) -> None:
    _, run_id = await one.submit(2)
    tasks = [await one.claimed(run_id, index) for index in range(2)]
    row = await bench.row(run_id)
    await bench.outside.change(row, Change(status=RunStatus.DELETED), now=one.now)
    assert await one.settle(tasks[0], one.success(tasks[0])) == Settled(False, None)
    await bench.outside.table.delete(row.place.key)
    failed = Failed(one.attempt(tasks[1]), PROBLEM, TaskFailure.OTHER)
    assert await one.settle(tasks[1], failed) == Settled(False, None)


async def close_run(bench: TableBench, run_id: str) -> None:
    """Make the change to a run that closing its job makes."""
    while True:
        row = await bench.row(run_id)
        try:
            change = Change(sets={"last_batch_received": True})
            row = await bench.outside.change(row, change, now=bench.clock.now())
        except RunVersionConflict:
            continue
        await bench.outside.write_late_status(row, now=bench.clock.now())
        return
