"""A run's row does not keep the number of every process that ever counted in it. That no addition
is made twice, nor lost, holds all the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from conveyor.domain.errors import ConveyorError
from conveyor.domain.model import RunStatus
from conveyor.ports.tasks import Settled
from conveyor.prod.dynamodb.counters import MOST_SEQUENCES
from conveyor.prod.dynamodb.sweeping import DynamoSweeping
from conveyor.testing.clock import FakeClock
from tests.conformance.dynamo_runs import TableBench, additions, changes, check, open_bench
from tests.conformance.world import CLAIM_LENGTH, World

pytestmark = pytest.mark.extended


@pytest.fixture
async def bench(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TableBench]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    opened = await open_bench(clock)
    yield opened
    await opened.aclose()


@pytest.fixture
def one(bench: TableBench) -> World:
    """A process."""
    return bench.world(worker="one")


@pytest.fixture
def two(bench: TableBench) -> World:
    """Another one."""
    return bench.world(worker="two")


@pytest.fixture
def sweeping(bench: TableBench) -> DynamoSweeping:
    """A process that sweeps."""
    return DynamoSweeping(bench.outside)


async def have_been_counted_in(bench: TableBench, run_id: str, processes: int) -> None:
    """Let so many processes that are gone by now have counted in a run, beside those that did."""
    row = await bench.row(run_id)
    others = {f"gone-{number}": 7 for number in range(len(row.sequences), processes)}
    await bench.outside.table.update(
        row.place.key,
        "SET sequences = :sequences",
        condition="attribute_exists(pk)",
        sequences={**others, **row.sequences},
    )


async def test_a_run_at_rest_forgets_them_once_there_are_many(
    bench: TableBench, one: World, sweeping: DynamoSweeping
) -> None:
    _, run_id = await one.submit(1, closed=False)
    await one.succeed(run_id, 0)
    await have_been_counted_in(bench, run_id, MOST_SEQUENCES)
    few = await bench.row(run_id)
    await sweeping.tidy(now=one.now)
    assert await bench.row(run_id) == few
    await have_been_counted_in(bench, run_id, MOST_SEQUENCES + 1)
    await bench.clock.advance(3_600)
    await sweeping.tidy(now=one.now)
    row = await bench.row(run_id)
    assert (row.sequences, row.counter_epoch) == ({}, few.counter_epoch + 1)
    # Nothing of the run itself has moved.
    assert row.run.status is RunStatus.PENDING
    assert row.run.updated_at == few.run.updated_at
    assert row.dispatch_changed_at == few.dispatch_changed_at
    await check(bench, run_id)


async def test_a_run_at_work_keeps_them_and_a_quiet_one_does_not(
    bench: TableBench, one: World, sweeping: DynamoSweeping
) -> None:
    _, run_id = await one.submit(2)
    await one.succeed(run_id, 0)
    await one.claimed(run_id, 1)
    await have_been_counted_in(bench, run_id, MOST_SEQUENCES + 1)
    busy = await bench.row(run_id)
    await sweeping.tidy(now=one.now)
    await sweeping.reconcile_run(run_id, now=one.now)
    assert await bench.row(run_id) == busy
    await bench.clock.advance(CLAIM_LENGTH / 1_000)
    await sweeping.tidy(now=one.now)
    assert await bench.row(run_id) == busy
    await sweeping.reconcile_run(run_id, now=one.now)
    row = await bench.row(run_id)
    assert (row.sequences, row.counter_epoch) == ({}, 1)
    assert row.run.updated_at == busy.run.updated_at
    assert (await one.succeed(run_id, 1)).run_status is RunStatus.COMPLETED
    await check(bench, run_id)


@pytest.mark.parametrize("carried_out", [True, False])
async def test_what_was_not_answered_is_added_once(
    bench: TableBench, one: World, two: World, sweeping: DynamoSweeping, carried_out: bool
) -> None:
    """The cost of a try, of which the process that spent it does not know whether it was added; all
    tasks have ended since."""
    _, run_id = await one.submit(1, closed=False)
    task = await one.claimed(run_id, 0)
    bench.seam.be_away(additions, carried_out=carried_out)
    with pytest.raises(ConveyorError):
        await one.settle(task, one.retry(task))
    assert (await two.succeed(run_id, 0)).run_status is RunStatus.PENDING
    await have_been_counted_in(bench, run_id, MOST_SEQUENCES + 1)
    await sweeping.tidy(now=one.now)
    assert (await bench.row(run_id)).sequences == {}
    tried = len([call for call in bench.seam.calls if additions(*call)])
    await bench.clock.advance(2.0)
    # It is tried again, under an epoch that has passed, and dropped.
    await bench.end(one)
    assert len([call for call in bench.seam.calls if additions(*call)]) == tried + 1
    assert (await bench.row(run_id)).sequences == {}
    await check(bench, run_id)


async def test_a_try_that_comes_late_is_not_added_again(
    bench: TableBench, one: World, sweeping: DynamoSweeping
) -> None:
    """Two tries of one addition: the first is held up, the second answered."""
    _, run_id = await one.submit(1, closed=False)
    await one.succeed(run_id, 0)
    [late] = [call for call in bench.seam.calls if additions(*call)]
    await have_been_counted_in(bench, run_id, MOST_SEQUENCES + 1)
    await sweeping.tidy(now=one.now)
    row = await bench.row(run_id)
    with pytest.raises(ConveyorError, match="ConditionalCheckFailed"):
        await bench.seam.call("dynamodb", *late)
    assert await bench.row(run_id) == row


async def test_an_addition_that_crosses_it_is_counted_once(
    bench: TableBench, one: World, sweeping: DynamoSweeping
) -> None:
    _, run_id = await one.submit(2)
    await one.succeed(run_id, 0)
    task = await one.claimed(run_id, 1)
    await have_been_counted_in(bench, run_id, MOST_SEQUENCES + 1)
    held = bench.seam.acquire_or_renew(changes)
    sweeper = DynamoSweeping(bench.records)
    later = one.now + CLAIM_LENGTH
    forgetting = asyncio.create_task(sweeper.reconcile_run(run_id, now=later))
    await held.met.wait()
    assert await one.settle(task, one.success(task)) == Settled(True, RunStatus.COMPLETED)
    held.gate.set()
    assert await forgetting is RunStatus.COMPLETED
    await check(bench, run_id)


async def test_processes_that_knew_the_epoch_before_go_on_counting(
    bench: TableBench, one: World, two: World, sweeping: DynamoSweeping
) -> None:
    _, run_id = await one.submit(4)
    for world, index in ((one, 0), (two, 1)):
        await world.succeed(run_id, index)
    await have_been_counted_in(bench, run_id, MOST_SEQUENCES + 1)
    await sweeping.reconcile_run(run_id, now=one.now)
    before = len(bench.seam.calls)
    assert (await one.succeed(run_id, 2)).applied
    assert (await two.succeed(run_id, 3)).run_status is RunStatus.COMPLETED
    # Each has seen the row since, with its claim: nothing is dropped, nor counted anew.
    assert "query" not in {operation for operation, _ in bench.seam.calls[before:]}
    assert set((await bench.row(run_id)).sequences) == {"one", "two"}
    await check(bench, run_id)
