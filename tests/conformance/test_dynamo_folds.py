"""The counts of processes that are gone move into the base of a run. Nothing is counted twice, nor
lost, whoever reads, counts or comes back meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from conveyor.clock import SystemClock
from conveyor.domain.model import RunStatus
from conveyor.prod.aws.calls import AwsRefused, Parameters
from conveyor.prod.dynamodb import recount as recounting
from conveyor.prod.dynamodb.counter_sums import (
    CountedValues,
    new_process_item,
    process_item_key,
)
from conveyor.prod.dynamodb.recount import MOST_ITEMS, fold_items
from conveyor.prod.dynamodb.sweeping import DynamoSweeping
from conveyor.testing.clock import START
from tests.conformance.dynamo_runs import TableBench, additions, check
from tests.conformance.world import World

pytestmark = pytest.mark.extended

HOUR = 3_600


async def count_two(
    bench: TableBench, one: World, two: World, monkeypatch: pytest.MonkeyPatch
) -> str:
    """A run of four tasks in which each process has counted one, an hour ago; from now on two such
    items are many."""
    monkeypatch.setattr(recounting, "MOST_ITEMS", 1)
    _, run_id = await one.submit(4)
    await one.succeed(run_id, 0)
    await two.fail(run_id, 1)
    await bench.clock.advance(HOUR)
    return run_id


async def fold(bench: TableBench, run_id: str) -> int:
    """Fold what is old, as a process does that no fault hits."""
    row = await bench.outside.read_bare((await bench.row(run_id)).place)
    assert row is not None
    return await fold_items(bench.outside, row, now=bench.clock.now())


async def test_a_sweep_folds_the_items_of_processes_that_are_gone_once_there_are_many(
    bench: TableBench, one: World
) -> None:
    _, run_id = await one.submit(2)
    await one.succeed(run_id, 0)

    async def have_counted(processes: range) -> None:
        for number in processes:
            key = process_item_key(run_id, 1, 0, f"gone-{number}")
            await bench.outside.table.put(key, new_process_item(7, CountedValues(at=START)))

    await have_counted(range(MOST_ITEMS - 1))
    await bench.clock.advance(HOUR)
    few = await bench.row(run_id)
    sweeping = DynamoSweeping(bench.outside)
    await sweeping.tidy(now=one.now)
    assert await bench.row(run_id) == few
    await have_counted(range(MOST_ITEMS - 1, MOST_ITEMS))
    await bench.clock.advance(HOUR)
    # The index has the run by its last change, which this process has looked at before.
    await DynamoSweeping(bench.outside).tidy(now=one.now)
    row = await bench.row(run_id)
    assert (row.base.completed, row.folds, row.processes) == (1, 2, 0)
    # Nothing of the run itself has moved.
    assert row.run.stats == few.run.stats
    assert row.run.updated_at == few.run.updated_at
    assert row.dispatch_changed_at == few.dispatch_changed_at
    await check(bench, run_id)


async def test_items_that_were_written_of_late_stay(
    bench: TableBench, one: World, two: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = await count_two(bench, one, two, monkeypatch)
    await one.succeed(run_id, 2)
    assert await fold(bench, run_id) == 0
    assert not any(item.closed for item in await bench.items(run_id))


async def test_a_process_that_comes_back_goes_on_in_another_item(
    bench: TableBench, one: World, two: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = await count_two(bench, one, two, monkeypatch)
    assert await fold(bench, run_id) == 2
    assert (await one.succeed(run_id, 2)).applied
    assert (await bench.row(run_id)).run.stats.completed == 3
    assert (await two.succeed(run_id, 3)).run_status is RunStatus.COMPLETED
    found = {item.key.sk.split("#", 1)[1]: item.closed for item in await bench.items(run_id)}
    assert found == {"one#0": True, "two#0": True, "one#1": False, "two#1": False}
    await check(bench, run_id)


@pytest.mark.parametrize("carried_out", [True, False])
async def test_what_was_not_answered_before_a_fold_counts_once(
    bench: TableBench,
    one: World,
    two: World,
    monkeypatch: pytest.MonkeyPatch,
    carried_out: bool,
) -> None:
    run_id = await count_two(bench, one, two, monkeypatch)
    bench.seam.be_away(additions, carried_out=carried_out, count=1_000)
    settling = asyncio.gather(one.succeed(run_id, 2), return_exceptions=True)
    [error] = await settling
    assert isinstance(error, Exception)
    await bench.clock.advance(HOUR)
    bench.seam.faults.clear()
    monkeypatch.setattr(recounting, "GONE_AFTER", -1)
    assert await fold(bench, run_id) == 2
    assert (await bench.row(run_id)).base.completed == 2 + carried_out
    assert (await one.succeed(run_id, 3)).run_status is RunStatus.COMPLETED
    await check(bench, run_id)


async def test_a_fold_that_crosses_a_read_shows_in_no_counter(
    bench: TableBench, one: World, two: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = await count_two(bench, one, two, monkeypatch)
    before = await bench.row(run_id)

    def adds_up(operation: str, parameters: Parameters) -> bool:
        values = parameters.get("ExpressionAttributeValues", {})
        return operation == "query" and values[":partition"]["S"].startswith("Count#")

    held = bench.seam.acquire_or_renew(adds_up)
    reading = asyncio.create_task(bench.records.read_at(before.place))
    await held.met.wait()
    assert await fold(bench, run_id) == 2
    held.gate.set()
    crossed = await reading
    assert crossed is not None
    assert (crossed.base.completed, crossed.run.stats) == (0, before.run.stats)
    after = await bench.row(run_id)
    assert (after.base.completed, after.run.stats) == (2, before.run.stats)


async def test_a_flush_that_crosses_a_fold_makes_it_void(
    bench: TableBench, one: World, two: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = await count_two(bench, one, two, monkeypatch)
    held = bench.seam.acquire_or_renew(lambda operation, _: operation == "transact_write_items")
    row = await bench.outside.read_bare((await bench.row(run_id)).place)
    assert row is not None
    folding = asyncio.create_task(fold_items(bench.records, row, now=bench.clock.now()))
    await held.met.wait()
    assert (await one.succeed(run_id, 2)).applied
    held.gate.set()
    assert await folding == 0
    row = await bench.row(run_id)
    assert (row.base.completed, row.run.stats.completed) == (0, 3)
    await check(bench, run_id)


async def test_a_try_that_comes_after_a_fold_changes_nothing(
    bench: TableBench, one: World, two: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = await count_two(bench, one, two, monkeypatch)
    late = [call for call in bench.seam.calls if additions(*call)]
    assert await fold(bench, run_id) == 2
    row, items = await bench.row(run_id), await bench.items(run_id)
    for operation, parameters in late:
        token = {"ClientRequestToken": SystemClock().new_id()}
        anew = {**parameters, **(token if operation != "update_item" else {})}
        with pytest.raises(AwsRefused) as refused:
            await bench.seam.call("dynamodb", operation, anew)
        assert refused.value.is_condition
    assert (await bench.row(run_id), await bench.items(run_id)) == (row, items)
