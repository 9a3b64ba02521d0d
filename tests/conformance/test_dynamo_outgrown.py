"""A task whose history would outgrow what an item of the table may have."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
import pytest

from conveyor.domain.model import EventKind, RunStatus, Spend, TaskFailure, TaskStatus
from conveyor.domain.shards import ONE_SHARD
from conveyor.domain.task_rules import Failed, Retry, Settlement
from conveyor.prod.aws.calls import AwsRefused
from conveyor.prod.dynamodb.recount import recount
from conveyor.prod.dynamodb.run_rows import DynamoRunRows, RunPlaces
from conveyor.prod.dynamodb.schema import task_key
from conveyor.prod.dynamodb.task_rows import is_too_large
from conveyor.testing.clock import FakeClock
from tests.conformance.dynamo_records import Bench, open_bench
from tests.conformance.world import CLAIM_LENGTH, PROBLEM

pytestmark = pytest.mark.extended

LONG = msgspec.structs.replace(PROBLEM, detail="x" * 90_000)


@pytest.fixture
async def bench(clock: FakeClock) -> AsyncIterator[Bench]:
    async with open_bench(clock) as opened:
        yield opened


async def test_a_row_that_would_outgrow_its_item_begins_its_history_anew(bench: Bench) -> None:
    world = bench.world
    job_id, run_id = await world.submit(1)
    kept = []
    for attempt in range(6):
        task = await world.claimed(run_id, 0)
        event = world.attempt(task, LONG)
        last: Settlement = Failed(event, PROBLEM, TaskFailure.RATE_LIMITED)
        settled = await world.settle(task, last if attempt == 5 else Retry(event, world.now))
        assert settled.applied
        history = await world.store.tasks.task_history(run_id, task.task_id)
        assert history is not None
        kept.append(len(history))

    assert kept == [1, 2, 3, 4, 1, 2]
    assert settled.run_status is RunStatus.COMPLETED
    [row] = await world.rows(run_id)
    assert (row.status, row.attempts, row.error) == (TaskStatus.FAILED, 6, PROBLEM)
    assert (await world.run(job_id)).stats.failed == 1


async def test_a_recount_finds_what_a_dropped_history_spent(bench: Bench) -> None:
    world = bench.world
    job_id, run_id = await world.submit(1)
    for attempt in range(10):
        task = await world.claimed(run_id, 0)
        event = msgspec.structs.replace(world.attempt(task, LONG), spend=Spend(3, 0.1))
        last: Settlement = Failed(event, PROBLEM, TaskFailure.RATE_LIMITED)
        await world.settle(task, last if attempt == 9 else Retry(event, world.now))
    history = await world.store.tasks.task_history(run_id, task.task_id)
    assert history is not None
    assert len(history) == 2
    records = DynamoRunRows(bench.table, RunPlaces(bench.table))

    await recount(records, run_id, now=world.now)

    stats = (await world.run(job_id)).stats
    assert stats.spend.credits == 30
    assert stats.spend.cost == pytest.approx(1.0)


async def fill_up(bench: Bench, job_id: str, task_id: str, run_id: str) -> None:
    """Make a row as long as the table takes it."""
    key = task_key(job_id, run_id, task_id, ONE_SHARD)
    taken, refused = 0, 500_000
    while refused - taken > 1:
        length = (taken + refused) // 2
        try:
            await bench.table.update(
                key,
                "SET padding = :padding",
                condition="attribute_exists(pk)",
                padding="x" * length,
            )
        except AwsRefused as error:
            if not is_too_large(error):
                raise
            refused = length
        else:
            taken = length


@pytest.mark.parametrize("lapses", [False, True])
async def test_a_row_without_room_for_a_claim_is_claimed_all_the_same(
    bench: Bench, lapses: bool
) -> None:
    """A row that waits for its next attempt; and one whose claim has lapsed, which also gets an
    interruption into its history."""
    world = bench.world
    job_id, run_id = await world.submit(1)
    task = await world.claimed(run_id, 0)
    long = msgspec.structs.replace(PROBLEM, detail="x" * 1_000)
    assert (await world.settle(task, Retry(world.attempt(task, long), world.now))).applied
    if lapses:
        await world.claimed(run_id, 0)
        await world.clock.advance(CLAIM_LENGTH / 1_000)
    await fill_up(bench, job_id, task.task_id, run_id)

    again = await world.claimed(run_id, 0)
    assert (await world.settle(again, world.success(again))).applied

    history = await world.store.tasks.task_history(run_id, task.task_id)
    assert history is not None
    kinds = [EventKind.INTERRUPTION, EventKind.ATTEMPT] if lapses else [EventKind.ATTEMPT]
    assert [event.kind for event in history] == kinds
    records = DynamoRunRows(bench.table, RunPlaces(bench.table))
    await recount(records, run_id, now=world.now)
    stats = (await world.run(job_id)).stats
    assert (stats.successful, stats.spend) == (1, Spend(2, 0.5))
