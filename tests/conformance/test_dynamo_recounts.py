"""Recounts on DynamoDB correct the counters and nothing else, whichever processes work
meanwhile."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from conveyor.domain.errors import ConveyorError
from conveyor.domain.model import RunStatus
from conveyor.domain.task_rules import Released
from conveyor.ports.tasks import ClaimedElsewhere, Settled
from conveyor.prod.aws.calls import Parameters
from conveyor.prod.dynamodb.client import Plain
from conveyor.prod.dynamodb.recount import recount
from conveyor.prod.dynamodb.run_rows import Change
from conveyor.prod.dynamodb.sweeping import DynamoSweeping
from tests.conformance.dynamo_runs import (
    TableBench,
    additions,
    changes,
    check,
    scans,
    writes,
)
from tests.conformance.world import CLAIM_LENGTH, World

pytestmark = pytest.mark.extended

LAPSE = CLAIM_LENGTH / 1_000


@pytest.mark.parametrize("carried_out", [True, False])
async def test_a_row_that_nobody_knows_to_have_moved_is_recounted(
    bench: TableBench, one: World, carried_out: bool
) -> None:
    _, run_id = await one.submit(2)
    task = await one.claimed(run_id, 0)
    bench.seam.be_away(writes, carried_out=carried_out)
    with pytest.raises(ConveyorError):
        await one.settle(task, one.success(task))
    if not carried_out:
        assert (await one.settle(task, one.success(task))).applied
    while (await bench.row(run_id)).run.stats.successful == 0:
        await bench.clock.advance(0.5)
    assert (await one.succeed(run_id, 1)).run_status is RunStatus.COMPLETED
    await check(bench, run_id)


async def test_a_recount_before_an_addition_counts_its_row(bench: TableBench, one: World) -> None:
    _, run_id = await one.submit(1)
    held = bench.seam.acquire_or_renew(additions)
    settling = asyncio.create_task(one.succeed(run_id, 0))
    await held.met.wait()
    row = await recount(bench.outside, run_id, now=bench.clock.now())
    assert row is not None
    assert (row.run.status, row.run.stats.successful) == (RunStatus.COMPLETED, 1)
    assert row.counter_epoch == 1
    held.gate.set()
    assert await settling == Settled(True, RunStatus.COMPLETED)
    await check(bench, run_id)
    assert (await bench.row(run_id)).counter_epoch == 1


async def test_a_recount_that_missed_a_row_is_made_again(bench: TableBench, one: World) -> None:
    """Counted before the row moved, written after that: the process finds its item closed."""
    _, run_id = await one.submit(2)
    await one.succeed(run_id, 0)
    task = await one.claimed(run_id, 1)
    await distort(bench, run_id)
    written = bench.seam.acquire_or_renew(changes, passed=1)
    later = bench.clock.now() + CLAIM_LENGTH
    recounting = asyncio.create_task(recount(bench.records, run_id, now=later))
    await written.met.wait()
    [item] = await bench.items(run_id)
    assert item.closed
    added = bench.seam.acquire_or_renew(additions)
    settling = asyncio.create_task(one.settle(task, one.success(task)))
    await added.met.wait()
    added.gate.set()
    written.gate.set()
    row = await recounting
    assert row is not None
    assert (row.run.stats.successful, row.counter_epoch) == (1, 1)
    while not settling.done():
        await bench.clock.advance(0.5)
    assert await settling == Settled(True, RunStatus.COMPLETED)
    await check(bench, run_id)


async def test_a_recount_that_finds_a_task_in_work_counts_nothing(
    bench: TableBench, one: World, two: World
) -> None:
    """Items are closed by then: what they hold goes over, and what was refused is added to it."""
    _, run_id = await one.submit(4)
    await one.succeed(run_id, 0)
    await two.succeed(run_id, 1)
    await distort(bench, run_id)
    late = await one.claimed(run_id, 2)
    held = bench.seam.acquire_or_renew(changes)
    later = bench.clock.now() + CLAIM_LENGTH
    recounting = asyncio.create_task(recount(bench.records, run_id, now=later))
    await held.met.wait()
    # It was about to close them; this claim outlasts the time by which it tells live ones.
    await bench.clock.advance(LAPSE)
    busy = await two.claimed(run_id, 3)
    held.gate.set()
    row = await recounting
    assert row is not None
    assert (row.counter_epoch, row.carried, row.recounting) == (1, True, "")
    assert (row.base.completed, row.run.stats.completed) == (2, 2)
    # The first process knew the epoch before, and has not counted in the new one.
    assert (await one.settle(late, one.success(late))).applied
    assert (await bench.row(run_id)).run.stats.successful == 3
    assert await two.settle(busy, two.success(busy)) == Settled(True, RunStatus.COMPLETED)
    assert (await bench.row(run_id)).counter_epoch == 1


async def test_a_recount_crossed_by_an_addition_counts_again(bench: TableBench, one: World) -> None:
    _, run_id = await one.submit(3)
    task = await one.claimed(run_id, 1)
    await one.succeed(run_id, 0)
    await distort(bench, run_id)
    written = bench.seam.acquire_or_renew(changes)
    later = bench.clock.now() + CLAIM_LENGTH
    recounting = asyncio.create_task(recount(bench.records, run_id, now=later))
    await written.met.wait()
    assert (await one.settle(task, one.success(task))).applied
    written.gate.set()
    row = await recounting
    assert row is not None
    assert (row.run.status, row.run.stats.successful) == (RunStatus.RUNNING, 2)
    await check(bench, run_id)


async def test_a_dropped_addition_waits_for_the_tasks_in_work(
    bench: TableBench, one: World, two: World
) -> None:
    _, run_id = await one.submit(2)
    busy = await two.claimed(run_id, 1)
    task = await one.claimed(run_id, 0)
    later = bench.clock.now() + CLAIM_LENGTH
    await distort(bench, run_id)
    await recount(bench.outside, run_id, now=later)
    assert await one.settle(task, one.success(task)) == Settled(True, RunStatus.RUNNING)
    assert (await bench.row(run_id)).run.stats.successful == 0
    # The second process is refused too, and finds nobody at work any more.
    assert await two.settle(busy, two.success(busy)) == Settled(True, RunStatus.COMPLETED)
    await check(bench, run_id)
    await bench.end(one)


async def test_a_recount_that_had_to_wait_is_made_up_for(
    bench: TableBench, one: World, two: World
) -> None:
    _, run_id = await one.submit(2)
    task = await one.claimed(run_id, 0)
    await distort(bench, run_id)
    await recount(bench.outside, run_id, now=bench.clock.now() + CLAIM_LENGTH)
    busy = await two.claimed(run_id, 1)
    assert await one.settle(task, one.success(task)) == Settled(True, RunStatus.RUNNING)
    assert await two.settle(busy, two.success(busy)) == Settled(True, RunStatus.RUNNING)
    while (await bench.row(run_id)).run.status is not RunStatus.COMPLETED:
        await bench.clock.advance(0.5)
    await check(bench, run_id)


async def test_a_recount_leaves_what_is_right_and_what_is_in_work(
    bench: TableBench, one: World
) -> None:
    _, run_id = await one.submit(2)
    await one.succeed(run_id, 0)
    before = await bench.row(run_id)
    assert await recount(bench.outside, run_id, now=one.now) == before
    await distort(bench, run_id)
    task = await one.claimed(run_id, 1)
    distorted = await bench.row(run_id)
    assert await recount(bench.outside, run_id, now=one.now) == distorted
    await one.settle(task, Released())
    row = await recount(bench.outside, run_id, now=one.now)
    assert row is not None
    assert row.run.stats == before.run.stats
    assert await recount(bench.outside, one.clock.new_id(), now=one.now) is None


@pytest.mark.parametrize("mark", ["reserved", "given_up"])
async def test_tasks_that_are_only_being_added_are_no_part_of_the_run(
    bench: TableBench, one: World, mark: str
) -> None:
    _, run_id = await one.submit(3)
    await put_on_run(bench, run_id, mark, {"2": 1})
    counted = await recount(bench.outside, run_id, now=one.now)
    assert counted is not None
    assert counted.run.stats.total == 2
    assert await one.claim(run_id, 2) == ClaimedElsewhere(one.now + 1_000)
    rows = await one.rows(run_id)
    assert [(row.status, row.claim_number) for row in rows] == [("pending", 0)] * 3


async def test_tasks_that_were_added_since_are_not_counted(bench: TableBench, one: World) -> None:
    """Reserving leaves the version alone: the next index tells."""
    _, run_id = await one.submit(3)
    await put_on_run(bench, run_id, "next_index", 2)
    counted = await recount(bench.outside, run_id, now=one.now)
    assert counted is not None
    assert counted.run.stats.total == 2


@pytest.mark.parametrize("counts", [True, False])
async def test_a_paused_run_ends_though_the_worker_of_its_last_task_has_died(
    bench: TableBench, one: World, counts: bool
) -> None:
    """Before it counted, or before it looked."""
    _, run_id = await one.submit(2)
    await one.succeed(run_id, 0)
    task = await one.claimed(run_id, 1)
    place = (await bench.row(run_id)).place
    row = await bench.outside.read_bare(place)
    assert row is not None
    await bench.outside.change(row, Change(paused=True), now=one.now)
    bench.seam.be_away(looks if counts else additions, carried_out=False, count=10_000)
    with suppress(ConveyorError):
        await one.settle(task, one.success(task))
    sweeping = DynamoSweeping(bench.outside)
    await sweeping.tidy(now=one.now)
    row = await bench.outside.read_bare(place)
    assert row is not None
    assert row.live
    await bench.clock.advance(16 * 60)
    await sweeping.tidy(now=one.now)
    row = await bench.outside.read_bare(place)
    assert row is not None
    assert row.run.status is RunStatus.COMPLETED
    await check(bench, run_id)


async def test_a_paused_run_with_tasks_left_is_recounted_once_after_each_change(
    bench: TableBench, one: World
) -> None:
    _, run_id = await one.submit(2)
    await one.succeed(run_id, 0)
    row = await bench.row(run_id)
    await bench.outside.change(row, Change(paused=True), now=one.now)
    sweeping = DynamoSweeping(bench.records)
    for _ in range(4):
        await bench.clock.advance(16 * 60)
        await sweeping.tidy(now=one.now)
    assert sum(scans(*call) for call in bench.seam.calls) == 1
    assert (await bench.row(run_id)).run.status is RunStatus.RUNNING


def looks(operation: str, _parameters: Parameters) -> bool:
    """Reads of a run and of its items."""
    return operation in ("get_item", "query")


async def distort(bench: TableBench, run_id: str) -> None:
    """Put the counters wrong."""
    await put_on_run(bench, run_id, "credits", 7)


async def put_on_run(bench: TableBench, run_id: str, name: str, value: Plain) -> None:
    """Set an attribute of a run's row, whatever it was."""
    place = (await bench.row(run_id)).place
    await bench.outside.table.update(
        place.key,
        f"SET #{name} = :value",
        condition="attribute_exists(pk)",
        value=value,
    )
