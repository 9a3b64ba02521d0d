"""Items whose index entries move while the index is read, and are found twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from conveyor.domain.deliveries import put_off
from conveyor.domain.model import Callback, Job
from conveyor.ports.outbox import EntryKey, OutboxEntry, Subscriber
from conveyor.ports.schedules import ScheduleChange
from conveyor.prod.aws.calls import Parameters
from conveyor.prod.dynamodb import schema
from conveyor.prod.dynamodb.client import SHAPE
from conveyor.prod.dynamodb.schema import (
    PARTITION_KEY,
    SORT_KEY,
    Key,
    job_key,
    place_key,
    run_key,
)
from conveyor.testing.aws_faults import Match
from conveyor.testing.clock import FakeClock
from tests.conformance.dynamo_records import DB, LAPSE, Bench, open_bench
from tests.conformance.dynamo_schedules import MADE, draft, moved
from tests.conformance.sent_deliveries import begin, change, owe
from tests.conformance.world import CALLER, all_ended

pytestmark = pytest.mark.extended


@pytest.fixture
async def bench(clock: FakeClock) -> AsyncIterator[Bench]:
    """An empty table with two processes on it."""
    async with open_bench(clock) as opened:
        yield opened


def watch_batches(bench: Bench) -> list[list[str]]:
    """The keys of each batch that is asked for from now on."""
    batches: list[list[str]] = []

    def note(parameters: Parameters) -> bool:
        [request] = parameters["RequestItems"].values()
        batches.append([f"{key['pk']['S']} {key['sk']['S']}" for key in request["Keys"]])
        return False

    bench.faults.lose_answer(DB, "batch_get_item", where=note)
    return batches


def move_between(bench: Bench, key: Key, *, first: str, then: str) -> None:
    """Let the index be read while a run moves: `first` is read before that, `then` after it."""
    was_read = asyncio.Event()

    def partition(name: str) -> Match:
        return lambda parameters: name == _partition(parameters)

    async def move() -> None:
        await was_read.wait()
        await bench.table.update(
            key, "SET gsi1pk = :then", condition="attribute_exists(pk)", then=then
        )

    async def note() -> None:
        was_read.set()

    bench.faults.after(DB, "query", note, where=partition(first))
    bench.faults.before(DB, "query", move, where=partition(then))


def _partition(parameters: Parameters) -> str:
    name: str = parameters["ExpressionAttributeValues"][":partition"]["S"]
    return name


async def test_an_ended_run_that_is_settled_meanwhile_is_listed_once(bench: Bench) -> None:
    ended: dict[str, str] = {}
    for _ in range(5):
        job_id, run_id = await bench.other.submit(1)
        await bench.other.succeed(run_id, 0)
        ended[run_id] = job_id
    mover = sorted(ended)[2]
    first, then = schema.unsettled(mover), schema.aging(mover)
    key = run_key(ended[mover], 1)
    await bench.table.update(key, "SET gsi1pk = :at", condition="attribute_exists(pk)", at=first)
    move_between(bench, key, first=first, then=then)
    batches = watch_batches(bench)
    found = await all_ended(bench.store, bench.world.now)
    assert [run.run_id for run in found] == sorted(ended)
    assert bench.faults.fired == 2
    # DynamoDB refuses a batch that asks for one item twice.
    assert all(len(set(batch)) == len(batch) for batch in batches)


async def test_a_schedule_that_moves_within_what_is_due_is_found_once(bench: Bench) -> None:
    """Its entry is on the first page of its partition, and again on the second."""
    world = bench.world
    await world.clock.advance(10)
    found: list[Job] = []
    while len(found) < 4:
        job = draft(world, next_at=world.now - 4_000 + len(found))
        if schema.schedules(job.job_id) == schema.all_partitions("schedules")[0]:
            found.append(job)
    for job in found:
        await bench.other.store.jobs.create_job(job, None, [], answer=MADE, once=None)
    deleted, unchanged, moving, last = found
    await bench.other.store.jobs.delete_job(CALLER, deleted.job_id, now=world.now)
    await bench.table.update(
        job_key(deleted.job_id),
        "SET gsi2pk = :first, gsi2sk = :begin",
        condition="attribute_exists(pk)",
        first=schema.schedules(deleted.job_id),
        begin=schema.by_time(0, ""),
    )

    async def move() -> None:
        change = ScheduleChange(before=moving, after=moved(moving, next_at=world.now))
        assert await bench.other.store.schedules.change_schedule(change)

    def is_second(parameters: Parameters) -> bool:
        return "ExclusiveStartKey" in parameters

    bench.faults.before(DB, "query", move, where=is_second)
    due = await bench.store.schedules.due_schedules(now=world.now, limit=3)
    assert bench.faults.fired == 1
    assert [job.job_id for job in due] == [unchanged.job_id, last.job_id, moving.job_id]


def move_before_second_page(bench: Bench, move: Callable[[], Awaitable[None]]) -> None:
    """Let something happen between the first and the second page of a query."""
    bench.faults.before(
        DB, "query", move, where=lambda parameters: "ExclusiveStartKey" in parameters
    )


async def test_a_delivery_that_moves_within_what_is_due_is_found_once(bench: Bench) -> None:
    world, now = bench.world, bench.world.now
    leased, unchanged, moving, last = [
        await owe(bench.other, due_at=now - 4_000 + number) for number in range(4)
    ]
    await begin(bench.other, leased)
    after = put_off(moving, due_at=now, now=now)

    async def move() -> None:
        await change(bench.other, moving, after)

    move_before_second_page(bench, move)
    due = await bench.store.deliveries.due_deliveries(now=world.now, limit=3)
    assert bench.faults.fired == 1
    assert due == [unchanged, last, after]


async def test_an_outbox_entry_that_moves_within_what_is_due_is_found_once(bench: Bench) -> None:
    world = bench.world
    keys: list[EntryKey] = []
    for _ in range(4):
        _, run_id = await bench.other.submit(1, callback=Callback("token"))
        keys.append(EntryKey(run_id, Subscriber.CALLBACK))
        await world.clock.advance(1)

    async def lease(key: EntryKey) -> OutboxEntry:
        entry = await bench.other.store.outbox.lease_entry(
            key, now=world.now, lapses_at=world.now + LAPSE
        )
        assert entry is not None
        return entry

    leased, unchanged, moving, last = keys
    await lease(leased)

    async def move() -> None:
        entry = await lease(moving)
        await bench.other.store.outbox.reschedule_entry(entry, due_at=world.now, attempts=0)

    move_before_second_page(bench, move)
    due = await bench.store.outbox.due_entries(now=world.now, limit=3)
    assert bench.faults.fired == 1
    assert due == [unchanged, last, moving]


async def test_a_batch_asks_for_each_item_once(bench: Bench) -> None:
    made = [await bench.other.submit(0) for _ in range(60)]
    wanted = [place_key(run_id) for _, run_id in made]
    batches = watch_batches(bench)
    found = await bench.store.table.get_many([*wanted, *reversed(wanted)])
    assert set(found) == set(wanted)
    assert [len(batch) for batch in batches] == [60]


async def test_a_batch_brings_the_attributes_that_it_names(bench: Bench) -> None:
    wanted = [run_key((await bench.other.submit(0))[0], 1) for _ in range(2)]
    whole = await bench.store.table.get_many(wanted)
    found = await bench.store.table.get_many(wanted, names=("status", "missing"))
    for key in wanted:
        assert found[key] == {
            name: whole[key][name] for name in (PARTITION_KEY, SORT_KEY, SHAPE, "status")
        }
