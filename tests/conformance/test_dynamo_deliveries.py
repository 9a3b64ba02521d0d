"""Deliveries on DynamoDB: lost answers at every step, entries of the indexes, marks of late ones,
and items that this version cannot read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count

import pytest

from conveyor.aio.concurrency import for_each
from conveyor.clock import SystemClock
from conveyor.domain.deliveries import (
    DeliveryStatus,
    EventDelivery,
    begin_attempt,
    dropped,
    end_attempt,
    event_id,
    put_off,
    replayed,
)
from conveyor.domain.errors import ErrorCode
from conveyor.domain.model import Callback
from conveyor.domain.webhooks import EventType, Webhook
from conveyor.handlers.notify import Notifier
from conveyor.handlers.settle import EventSettler
from conveyor.ports.deliveries import DeliveryFilter
from conveyor.ports.outbox import Subscriber
from conveyor.prod.aws.calls import Answer, Aws, Parameters
from conveyor.prod.dynamodb.client import DamagedRow, Item, NewerRow, Query, Table
from conveyor.prod.dynamodb.deliveries import LATE, MOST_READ, DynamoDeliveries
from conveyor.prod.dynamodb.schema import (
    BY_DISPATCH,
    DELIVERIES,
    ENDED_DELIVERIES,
    TIME_TO_LIVE,
    by_time,
    delivery_key,
    delivery_mark_key,
    late_delivery_key,
)
from conveyor.testing.aws_faults import FaultyAws
from conveyor.testing.clock import FakeClock
from tests.conformance.dynamo_records import (
    DAY,
    DB,
    TRANSACT,
    Bench,
    away,
    lose_every_answer,
    open_bench,
)
from tests.conformance.dynamo_versions import (
    LATER,
    Versions,
    open_versions,
    what_later_versions_wrote,
)
from tests.conformance.sent_deliveries import DELIVERED, LEASE, REFUSED, new_delivery, owe
from tests.conformance.world import CALLER, World, refused

pytestmark = pytest.mark.extended

Step = Callable[[EventDelivery, int], EventDelivery]


@pytest.fixture
async def bench(clock: FakeClock) -> AsyncIterator[Bench]:
    """An empty table with a process behind faults and one beside them."""
    async with open_bench(clock) as opened:
        yield opened


@pytest.fixture
async def versions(clock: FakeClock) -> AsyncIterator[Versions]:
    """An empty table, and processes of three versions."""
    async with open_versions(clock) as opened:
        yield opened


def begin(delivery: EventDelivery, now: int) -> EventDelivery:
    return begin_attempt(delivery, now=now, lapses_at=now + LEASE)


def succeed(delivery: EventDelivery, now: int) -> EventDelivery:
    number, ladder = delivery.attempt_count, delivery.ladder
    return end_attempt(delivery, number, ladder, DELIVERED, now=now, random=0.0)


def fail(delivery: EventDelivery, now: int) -> EventDelivery:
    number, ladder = delivery.attempt_count, delivery.ladder
    return end_attempt(delivery, number, ladder, REFUSED, now=now, random=0.0)


def drop(delivery: EventDelivery, now: int) -> EventDelivery:
    return dropped(delivery, now=now)


def wait(delivery: EventDelivery, now: int) -> EventDelivery:
    return put_off(delivery, due_at=now + LEASE, now=now)


def replay(delivery: EventDelivery, now: int) -> EventDelivery:
    return replayed(delivery, now=now)


STEPS: list[Step] = [begin, fail, begin, succeed, drop, wait, replay]


async def read(world: World, delivery: EventDelivery) -> EventDelivery | None:
    """Read a delivery as it is now."""
    return await world.store.deliveries.get_delivery(delivery.caller, delivery.delivery_id)


async def item_of(bench: Bench, delivery: EventDelivery) -> Item:
    """A delivery as it lies there."""
    item = await bench.table.get(delivery_key(delivery.caller, delivery.delivery_id))
    assert item is not None
    return item


async def due(world: World) -> list[EventDelivery]:
    return await world.store.deliveries.due_deliveries(now=world.now, limit=100)


async def listed(world: World, *, since: int = 0, job_id: str | None = None) -> list[EventDelivery]:
    wanted = DeliveryFilter(caller=CALLER, job_id=job_id, since=since)
    return await world.store.deliveries.list_deliveries(wanted, limit=1_000)


# -- lost answers --


async def test_every_step_is_made_once_although_every_answer_is_lost_once(bench: Bench) -> None:
    lose_every_answer(bench)
    deliveries, world = bench.store.deliveries, bench.world
    delivery = new_delivery(world)
    assert await deliveries.create_delivery(delivery)
    assert not await deliveries.create_delivery(delivery)
    for step in STEPS:
        await world.clock.advance(1)
        after = step(delivery, world.now)
        assert await deliveries.change_delivery(delivery, after)
        assert await read(bench.other, delivery) == after
        delivery = after

    assert delivery.version == 1 + len(STEPS)
    assert bench.faults.fired == 2 + len(STEPS)


def answered_late(bench: Bench, meanwhile: Callable[[], Awaitable[None]]) -> DynamoDeliveries:
    """Return deliveries whose next write is carried out, and again after what happens meanwhile."""
    bench.faults.after(DB, TRANSACT, meanwhile)
    lossy = FaultyAws(bench.faults)
    lossy.lose_answer(DB, TRANSACT)
    return DynamoDeliveries(Table(lossy, bench.table.name, SystemClock()))


async def test_a_delivery_is_this_calls_own_also_if_a_worker_took_it_before_the_answer(
    bench: Bench,
) -> None:
    delivery = new_delivery(bench.world)
    begun = begin(delivery, bench.world.now)

    async def take() -> None:
        assert await bench.other.store.deliveries.change_delivery(delivery, begun)

    assert await answered_late(bench, take).create_delivery(delivery)
    assert await read(bench.other, delivery) == begun


@pytest.mark.parametrize("step", [begin, drop, wait, replay])
async def test_a_change_is_this_calls_own_also_if_a_replay_came_before_the_answer(
    bench: Bench, step: Step
) -> None:
    delivery = await owe(bench.other)
    after = step(delivery, bench.world.now)
    later = replayed(after, now=bench.world.now)

    async def ask_again() -> None:
        assert await bench.other.store.deliveries.change_delivery(after, later)

    assert await answered_late(bench, ask_again).change_delivery(delivery, after)
    assert await read(bench.other, delivery) == later


async def test_a_change_that_gets_no_answer_may_have_been_made(bench: Bench) -> None:
    delivery = await owe(bench.world)
    begun = begin(delivery, bench.world.now)
    bench.faults.vanish(DB, TRANSACT)
    await refused(ErrorCode.UNAVAILABLE, bench.store.deliveries.change_delivery(delivery, begun))

    # Another worker may have made the same one: only the lease's end tells.
    assert not await bench.store.deliveries.change_delivery(delivery, begun)
    assert await read(bench.world, delivery) == begun
    assert await due(bench.world) == []
    await bench.world.clock.advance(LEASE / 1_000)
    assert await due(bench.world) == [begun]


async def test_a_change_loses_to_one_between_its_read_and_its_write(bench: Bench) -> None:
    delivery = await owe(bench.world)
    first = replayed(delivery, now=bench.world.now)

    async def ask_again() -> None:
        assert await bench.other.store.deliveries.change_delivery(delivery, first)

    bench.faults.before(DB, TRANSACT, ask_again)
    after = begin(delivery, bench.world.now)
    assert not await bench.store.deliveries.change_delivery(delivery, after)
    assert await read(bench.world, delivery) == first


def notifier(world: World) -> Notifier:
    """A worker's looks at the outbox."""
    store = world.store
    settler = EventSettler(
        world.clock,
        outbox=store.outbox,
        deliveries=store.deliveries,
        jobs=store.jobs,
        interval=60.0,
        origin="",
    )
    tellers = {Subscriber.WEBHOOK: settler.tell}
    return Notifier(world.clock, outbox=store.outbox, tellers=tellers)


@pytest.mark.parametrize(
    ("runs", "lost"),
    [(30, False), (30, True), pytest.param(500, True, marks=pytest.mark.full)],
)
async def test_of_three_notifiers_each_run_has_one_delivery(
    bench: Bench, runs: int, lost: bool
) -> None:
    """Without faults, and with every third answer lost."""
    calls = count(1)

    def every_third(_parameters: Parameters) -> bool:
        return next(calls) % 3 == 0

    for operation in ("update_item", "delete_item", TRANSACT):
        bench.faults.lose_answer(DB, operation, times=100_000 if lost else 0, where=every_third)
    hook = Webhook("https://hooks.example.com", False, tuple(EventType))
    made: list[str] = []

    async def run_to_its_end(_number: int) -> None:
        job_id, run_id = await bench.world.submit(1, webhook=hook)
        await bench.world.store.runs.stop_run(CALLER, job_id, now=bench.world.now)
        made.append(run_id)

    await for_each(run_to_its_end, range(runs), limit=8)
    looks = [notifier(world) for world in (bench.world, bench.world, bench.other)]
    await asyncio.gather(*(look.deliver() for look in looks))

    assert (bench.faults.fired > runs) is lost
    told = await listed(bench.other)
    assert sorted(one.run_id for one in told) == sorted(made)
    assert await bench.store.outbox.due_entries(now=bench.world.now, limit=10) == []


# -- where an item lies --


async def index_keys(bench: Bench, partition: str) -> list[str]:
    """Sort keys of a partition of the index, in its order."""
    page = await bench.table.page(Query(partition, index=BY_DISPATCH))
    return [item["sk"] for item in page.items]


async def test_a_delivery_is_found_by_its_job_and_by_what_comes_next(bench: Bench) -> None:
    world, deliveries = bench.world, bench.store.deliveries
    delivery = await owe(world, job_id="JOB")
    item = await item_of(bench, delivery)
    where = [f"Delivery#{delivery.delivery_id}"]
    mark = await bench.table.get(delivery_mark_key("JOB", delivery.delivery_id))
    assert mark is not None
    assert mark["caller"] == CALLER
    assert item["pk"] == f"Deliveries#{CALLER}"
    assert TIME_TO_LIVE not in item
    assert await index_keys(bench, DELIVERIES) == where

    await world.clock.advance(1)
    waiting = wait(delivery, world.now)
    assert await deliveries.change_delivery(delivery, waiting)
    item = await item_of(bench, delivery)
    assert item["gsi2sk"] == by_time(world.now + LEASE, delivery.delivery_id)
    ended = drop(waiting, world.now)
    assert await deliveries.change_delivery(waiting, ended)
    item = await item_of(bench, delivery)
    assert item["gsi2sk"] == by_time(world.now, delivery.delivery_id)
    assert await index_keys(bench, DELIVERIES) == []
    assert await index_keys(bench, ENDED_DELIVERIES) == where


class CountedReads:
    """A transport that counts the items that queries read."""

    def __init__(self, aws: Aws) -> None:
        self.read = 0
        self._aws = aws

    async def call(self, service: str, operation: str, parameters: Parameters) -> Answer:
        answer = await self._aws.call(service, operation, parameters)
        self.read += answer.get("ScannedCount", 0)
        return answer

    def presign(self, operation: str, parameters: Parameters, *, seconds: int) -> str:
        return self._aws.presign(operation, parameters, seconds=seconds)


@pytest.mark.parametrize("job_id", [None, "a job"])
async def test_a_list_from_an_instant_on_reads_no_older_ones(
    bench: Bench, job_id: str | None
) -> None:
    world = bench.world
    for _ in range(5):
        await owe(world)
    await world.clock.advance(LATE / 1_000 + 1)
    recent = await owe(world)
    counted = CountedReads(bench.faults)
    deliveries = DynamoDeliveries(Table(counted, bench.table.name, SystemClock()))
    wanted = DeliveryFilter(caller=CALLER, job_id=job_id, since=world.now)

    assert await deliveries.list_deliveries(wanted, limit=10) == [recent]
    # The marks of a job are small, and read from the first one on.
    assert counted.read == (1 if job_id is None else 6)


@pytest.mark.parametrize("job_id", [None, "a job"])
async def test_deliveries_long_after_their_runs_are_listed_by_the_time_they_were_made(
    bench: Bench, job_id: str | None
) -> None:
    """No worker ran for a day: the ids are of the ends, the deliveries of now."""
    world, ended_at = bench.world, bench.world.now
    before = await owe(world)
    await world.clock.advance(DAY / 1_000)
    since = world.now

    def owed(number: int) -> EventDelivery:
        run_id = f"run {number}"
        end = ended_at + number + 1
        return new_delivery(
            world, run_id=run_id, delivery_id=event_id(run_id, "run.completed", ended_at=end)
        )

    late = [owed(number) for number in range(MOST_READ + 20)]

    async def write(delivery: EventDelivery) -> None:
        assert await bench.store.deliveries.create_delivery(delivery)

    await for_each(write, late, limit=8)
    recent = await owe(world)
    newest_first = [recent, *reversed(late)]
    assert await listed(world, since=since, job_id=job_id) == newest_first
    assert await listed(world, job_id=job_id) == [*newest_first, before]

    wanted = DeliveryFilter(caller=CALLER, job_id=job_id, since=since, before=late[5].delivery_id)
    found = await bench.store.deliveries.list_deliveries(wanted, limit=3)
    assert found == [late[4], late[3], late[2]]


async def test_nothing_is_left_of_deliveries_that_are_removed(bench: Bench) -> None:
    world, deliveries = bench.world, bench.store.deliveries
    ended_at = world.now
    await world.clock.advance(DAY / 1_000)

    async def late(job_id: str) -> EventDelivery:
        run_id = world.clock.new_id()
        delivery_id = event_id(run_id, "run.completed", ended_at=ended_at)
        return await owe(world, run_id=run_id, delivery_id=delivery_id, job_id=job_id)

    async def marks(*deliveries: EventDelivery) -> list[bool]:
        """Tell whether each has a mark: that of late ones, and that beside the job."""
        keys = [
            key
            for one in deliveries
            for key in (
                late_delivery_key(CALLER, one.delivery_id),
                delivery_mark_key(one.job_id, one.delivery_id),
            )
        ]
        return [await bench.table.get(key) is not None for key in keys]

    job_id, run_id = await world.submit(1)
    of_job, old, kept = await late(job_id), await late("another"), await late("another")
    assert await marks(of_job, old, kept) == [True] * 6
    assert await deliveries.change_delivery(old, drop(old, world.now))
    assert await deliveries.drop_old_deliveries(before=world.now + 1, limit=10) == 1
    await world.store.jobs.delete_job(CALLER, job_id, now=world.now)
    await world.store.runs.purge_run(run_id)
    await world.store.jobs.purge_job(job_id)

    assert await marks(of_job, old, kept) == [False] * 4 + [True] * 2
    assert await listed(world) == [kept]


async def test_the_deliveries_of_a_job_go_before_an_index_knows_of_them(bench: Bench) -> None:
    world = bench.world
    job_id, run_id = await world.submit(1)
    for _ in range(3):
        await owe(world, job_id=job_id)
    await world.store.jobs.delete_job(CALLER, job_id, now=world.now)
    await world.store.tasks.scrub_tasks(run_id, 10)
    await world.store.runs.purge_run(run_id)
    bench.faults.fail(DB, "query", away(), where=lambda parameters: "IndexName" in parameters)
    await world.store.jobs.purge_job(job_id)

    assert bench.faults.fired == 0
    assert (await bench.table.call("scan", ConsistentRead=True))["Items"] == []


async def test_a_delivery_that_is_replayed_while_old_ones_are_removed_stays(bench: Bench) -> None:
    world, deliveries = bench.world, bench.store.deliveries
    delivery = await owe(world)
    ended = drop(delivery, world.now)
    assert await deliveries.change_delivery(delivery, ended)
    again = replayed(ended, now=world.now)

    async def ask_again() -> None:
        assert await bench.other.store.deliveries.change_delivery(ended, again)

    bench.faults.before(DB, TRANSACT, ask_again)
    assert await deliveries.drop_old_deliveries(before=world.now + 1, limit=10) == 0
    assert await read(world, delivery) == again


@pytest.mark.parametrize("nth", [1, 2, 3])
async def test_a_purge_that_is_cut_off_ends_when_it_is_repeated(bench: Bench, nth: int) -> None:
    world = bench.world
    job_id, run_id = await world.submit(1, callback=Callback("token"))
    delivery = await owe(world, job_id=job_id)
    await world.store.jobs.delete_job(CALLER, job_id, now=world.now)
    await world.store.runs.purge_run(run_id)
    bench.faults.vanish(DB, "batch_write_item", nth=nth)
    await refused(ErrorCode.UNAVAILABLE, world.store.jobs.purge_job(job_id))
    assert await world.store.jobs.find_job(job_id) is not None
    await world.store.jobs.purge_job(job_id)

    assert await world.store.jobs.find_job(job_id) is None
    assert await read(world, delivery) is None
    assert Subscriber.CALLBACK in {
        key.subscriber for key in await world.store.outbox.due_entries(now=world.now, limit=10)
    }


# -- items that this version cannot read --


@pytest.mark.parametrize(
    "change", [{"delivery": None}, {"delivery": "{"}, {"delivery": 7}], ids=str
)
async def test_a_damaged_delivery_costs_itself_alone(bench: Bench, change: Item) -> None:
    delivery, other = await owe(bench.world), await owe(bench.world)
    item = {**await item_of(bench, delivery), **change}
    key = delivery_key(CALLER, delivery.delivery_id)
    left = {name: value for name, value in item.items() if value is not None}
    await bench.table.put(key, left)

    assert await due(bench.world) == [other]
    assert await listed(bench.world) == [other]
    assert await listed(bench.world, job_id=delivery.job_id) == [other]
    deliveries = bench.store.deliveries
    with pytest.raises(DamagedRow):
        await read(bench.world, delivery)
    with pytest.raises(DamagedRow):
        await deliveries.change_delivery(delivery, begin(delivery, bench.world.now))
    assert await bench.table.get(key) == left


async def test_a_delivery_of_a_higher_shape_is_neither_shown_nor_changed(
    versions: Versions,
) -> None:
    world, deliveries = versions.today, versions.today.store.deliveries
    delivery, other = await owe(versions.newer), await owe(world)
    ended = await owe(versions.newer)
    assert await deliveries.change_delivery(ended, drop(ended, world.now))
    for one in (delivery, ended):
        await versions.raise_shape(delivery_key(CALLER, one.delivery_id))
    before = [
        await versions.item(delivery_key(CALLER, one.delivery_id)) for one in (delivery, ended)
    ]

    assert await due(world) == [other]
    assert await listed(world) == [other]
    assert await listed(world, job_id=delivery.job_id) == [other]
    assert await deliveries.drop_old_deliveries(before=world.now + 1, limit=10) == 0
    for act in (
        read(world, delivery),
        deliveries.create_delivery(delivery),
        deliveries.change_delivery(delivery, begin(delivery, world.now)),
    ):
        with pytest.raises(NewerRow):
            await act
    assert before == [
        await versions.item(delivery_key(CALLER, one.delivery_id)) for one in (delivery, ended)
    ]


async def test_a_delivery_keeps_what_a_newer_version_wrote(versions: Versions) -> None:
    world = versions.today
    delivery = await owe(versions.newer)
    for step, by in zip(STEPS, [world, versions.older] * len(STEPS), strict=False):
        after = step(delivery, world.now)
        assert await by.store.deliveries.change_delivery(delivery, after)
        delivery = after

    assert await read(versions.newer, delivery) == delivery
    assert delivery.status is DeliveryStatus.PENDING
    item = await versions.item(delivery_key(CALLER, delivery.delivery_id))
    assert what_later_versions_wrote(item).keys() == {LATER, "delivery"}
