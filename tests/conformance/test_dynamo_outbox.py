"""The outbox on DynamoDB where answers are lost, and where a process dies between the end of a run
and the write that makes its entries due."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

import pytest

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import Callback, Job, RunStatus
from conveyor.domain.run_events import RunFinished
from conveyor.domain.webhooks import Webhook
from conveyor.ports.outbox import EntryKey, OutboxEntry, Subscriber
from conveyor.prod.aws.calls import Parameters
from conveyor.prod.dynamodb.client import Item
from conveyor.prod.dynamodb.runs import MOST_RUNS
from conveyor.prod.dynamodb.schema import KNOWN_SHAPE, ROW_SHAPE, TIME_TO_LIVE, Key, notice_key
from conveyor.testing.clock import FakeClock
from tests.conformance.dynamo_records import (
    DB,
    TRANSACT,
    Bench,
    away,
    lose_every_answer,
    more_runs,
    open_bench,
)
from tests.conformance.world import CALLER, World, refused

pytestmark = pytest.mark.extended

LEASE = 60_000
HEARTBEAT = 30_000
WAITING = Callback("a token")
HOOK = Webhook("https://hooks.example.com/runs")
CALLBACK, WEBHOOK = Subscriber.CALLBACK, Subscriber.WEBHOOK
ENDING = RunFinished('{"event_type":"run.stopped"}', "Conveyor.RunStopped")


@pytest.fixture
async def bench(clock: FakeClock) -> AsyncIterator[Bench]:
    """An empty table with a process behind faults and one beside them."""
    async with open_bench(clock) as opened:
        yield opened


async def submit(bench: Bench, *, closed: bool = True) -> tuple[str, str]:
    """A job of one task whose end a state machine and a webhook wait for."""
    return await bench.world.submit(1, closed=closed, callback=WAITING, webhook=HOOK)


def both(run_id: str) -> list[EntryKey]:
    """The keys of both entries of a run, as they come if both are due at one instant."""
    return [EntryKey(run_id, CALLBACK), EntryKey(run_id, WEBHOOK)]


async def take(world: World, run_id: str, subscriber: Subscriber = CALLBACK) -> OutboxEntry | None:
    """Try to lease an entry for a minute."""
    return await world.store.outbox.lease_entry(
        EntryKey(run_id, subscriber), now=world.now, lapses_at=world.now + LEASE
    )


async def taken(world: World, run_id: str, subscriber: Subscriber = CALLBACK) -> OutboxEntry:
    """Lease an entry for a minute."""
    entry = await take(world, run_id, subscriber)
    assert entry is not None
    assert entry.key == (run_id, subscriber)
    return entry


async def say_alive(world: World, run_id: str) -> None:
    """Put both entries of a live run off, as a worker does."""
    for subscriber in Subscriber:
        entry = await taken(world, run_id, subscriber)
        due_at = world.now + HEARTBEAT
        await world.store.outbox.reschedule_entry(entry, due_at=due_at, attempts=0)


async def due(bench: Bench) -> list[EntryKey]:
    """Return the entries that the other process finds due."""
    return await bench.other.store.outbox.due_entries(now=bench.world.now, limit=10)


async def entry_item(bench: Bench, run_id: str, subscriber: Subscriber = CALLBACK) -> Item | None:
    """An entry as it lies there."""
    return await bench.table.get(notice_key(run_id, subscriber))


async def stop(world: World, job_id: str, run_id: str) -> None:
    await world.store.runs.stop_run(CALLER, job_id, now=world.now)


async def last_task(world: World, job_id: str, run_id: str) -> None:
    await world.store.jobs.close_job(CALLER, job_id, now=world.now)
    await world.succeed(run_id, 0)


async def close(world: World, job_id: str, run_id: str) -> None:
    await world.succeed(run_id, 0)
    await world.store.jobs.close_job(CALLER, job_id, now=world.now)


async def last_batch(world: World, job_id: str, run_id: str) -> None:
    await world.succeed(run_id, 0)
    await world.append(job_id, 0, last_batch=True)


async def delete_run(world: World, job_id: str, run_id: str) -> None:
    await world.store.runs.delete_run(CALLER, job_id, run_id, now=world.now)


async def delete_job(world: World, job_id: str, run_id: str) -> None:
    await world.store.jobs.delete_job(CALLER, job_id, now=world.now)


End = Callable[[World, str, str], Awaitable[None]]
ENDS: list[End] = [stop, last_task, close, last_batch, delete_run, delete_job]


def hastens(parameters: Parameters) -> bool:
    """Return whether a write is the one after the end of a run."""
    return "SET ended_as" in parameters["UpdateExpression"]


@pytest.mark.parametrize("subscriber", Subscriber)
@pytest.mark.parametrize("end", ENDS)
async def test_an_end_is_told_although_every_answer_is_lost_once(
    bench: Bench, end: End, subscriber: Subscriber
) -> None:
    lose_every_answer(bench)
    outbox, world = bench.store.outbox, bench.world
    job_id, run_id = await submit(bench, closed=False)
    await say_alive(world, run_id)
    assert await due(bench) == []
    await world.clock.advance(1)
    await end(world, job_id, run_id)
    assert await due(bench) == both(run_id)

    entry = await taken(world, run_id, subscriber)
    assert entry.run is not None
    assert entry.run.status not in (RunStatus.RUNNING, RunStatus.PENDING)
    assert (entry.ended_as, entry.ended_at) == (entry.run.status, world.now)
    assert await outbox.fix_payload(entry, ENDING, now=world.now)
    await outbox.reschedule_entry(entry, due_at=world.now + 2_000, attempts=1)
    assert await due(bench) == [key for key in both(run_id) if key.subscriber is not subscriber]
    await world.clock.advance(2)
    again = await taken(world, run_id, subscriber)
    assert (again.ending, again.attempts) == (ENDING, 1)
    await outbox.drop_entry(again)
    assert await entry_item(bench, run_id, subscriber) is None
    assert bench.faults.fired >= 8


@pytest.mark.parametrize("end", ENDS)
async def test_an_end_whose_second_write_is_lost_is_seen_when_the_entry_is_due_again(
    bench: Bench, end: End
) -> None:
    job_id, run_id = await submit(bench, closed=False)
    await say_alive(bench.world, run_id)
    bench.faults.fail(DB, "update_item", away(), times=10, where=hastens)
    await bench.world.clock.advance(1)
    ended_at = bench.world.now
    await end(bench.world, job_id, run_id)
    assert bench.faults.fired >= 2
    assert await due(bench) == []

    await bench.world.clock.advance(HEARTBEAT / 1_000)
    assert await due(bench) == both(run_id)
    for subscriber in Subscriber:
        entry = await taken(bench.other, run_id, subscriber)
        assert entry.run is not None
        assert entry.run.status not in (RunStatus.RUNNING, RunStatus.PENDING)
        # The id of an event is made of this instant, whichever write noted it.
        assert entry.ended_at == ended_at


async def test_an_end_that_was_not_noted_is_by_whoever_deletes_the_run(bench: Bench) -> None:
    job_id, run_id = await submit(bench)
    await say_alive(bench.world, run_id)
    bench.faults.fail(DB, "update_item", away(), times=10, where=hastens)
    await bench.world.succeed(run_id, 0)
    assert bench.faults.fired >= 1
    await bench.other.store.jobs.delete_job(CALLER, job_id, now=bench.world.now)

    assert (await taken(bench.other, run_id)).ended_as is RunStatus.COMPLETED


async def test_what_is_being_told_is_not_hastened_by_a_second_end(bench: Bench) -> None:
    job_id, run_id = await submit(bench)
    bench.faults.fail(DB, "update_item", away(), times=2, where=hastens)
    await stop(bench.world, job_id, run_id)
    assert bench.faults.fired == 2
    outbox, now = bench.store.outbox, bench.world.now
    for subscriber in Subscriber:
        entry = await taken(bench.world, run_id, subscriber)
        assert await outbox.fix_payload(entry, ENDING, now=now)
        await outbox.reschedule_entry(entry, due_at=now + 2_000, attempts=1)
    await delete_run(bench.world, job_id, run_id)

    assert await due(bench) == []


async def test_who_takes_a_notice_brings_its_run_to_the_end_that_another_left_open(
    bench: Bench,
) -> None:
    _, run_id = await submit(bench)

    def ends_the_run(parameters: Parameters) -> bool:
        return ":set_status" in parameters.get("ExpressionAttributeValues", {})

    bench.faults.fail(DB, "update_item", away(), times=10, where=ends_the_run)
    with suppress(ConveyorError):
        await bench.world.succeed(run_id, 0)
    assert bench.faults.fired >= 1

    entry = await taken(bench.other, run_id)
    assert entry.run is not None
    assert entry.run.status is RunStatus.COMPLETED


@pytest.mark.parametrize("weather", [lambda _bench: None, lose_every_answer])
async def test_one_of_many_who_want_a_notice_at_one_instant_gets_it(
    bench: Bench, weather: Callable[[Bench], None]
) -> None:
    weather(bench)
    _, run_id = await submit(bench)
    worlds = [bench.world, bench.other] * 4
    got = await asyncio.gather(*(take(world, run_id) for world in worlds))

    assert sum(entry is not None for entry in got) == 1


async def test_an_entry_lies_apart_until_it_is_dropped(bench: Bench) -> None:
    job_id, run_id = await submit(bench)
    for subscriber in Subscriber:
        item = await entry_item(bench, run_id, subscriber)
        assert item is not None
        assert (item["shape"], item["job_id"], item["attempts"]) == (ROW_SHAPE, job_id, 0)
        assert TIME_TO_LIVE not in item
    run_item = await bench.run_item(job_id)
    assert (run_item["calls_back"], run_item["notifies"]) == (True, True)

    other_job, other_run = await bench.world.submit(1)
    assert [await entry_item(bench, other_run, one) for one in Subscriber] == [None, None]
    assert not {"calls_back", "notifies"} & (await bench.run_item(other_job)).keys()
    bench.faults.calls.clear()
    await stop(bench.world, other_job, other_run)
    assert bench.faults.calls.count((DB, "update_item")) == 1


async def test_an_entry_of_a_newer_shape_holds_up_nobody(bench: Bench) -> None:
    job_id, run_id = await submit(bench)
    for subscriber in Subscriber:
        await bench.table.update(
            notice_key(run_id, subscriber),
            "SET shape = :newer",
            condition="attribute_exists(pk)",
            newer=KNOWN_SHAPE + 1,
        )
    other_job, other_run = await submit(bench)
    await stop(bench.world, job_id, run_id)
    await stop(bench.world, other_job, other_run)

    assert (await bench.world.run(job_id)).status is RunStatus.STOPPED
    assert await due(bench) == both(other_run)


@pytest.mark.parametrize("change", [{"run_id": None}, {"due_at": "x"}, {"sk": "Pager"}], ids=str)
async def test_a_damaged_entry_costs_itself_alone(bench: Bench, change: Item) -> None:
    _, run_id = await submit(bench)
    item = await entry_item(bench, run_id, WEBHOOK)
    assert item is not None
    await bench.table.delete(notice_key(run_id, WEBHOOK))
    left = {name: value for name, value in {**item, **change}.items() if value is not None}
    await bench.table.put(Key(left.pop("pk"), left.pop("sk")), left)

    assert await due(bench) == [EntryKey(run_id, CALLBACK)]


async def test_an_entry_of_the_version_before_is_read_as_that_of_a_callback(bench: Bench) -> None:
    """The version before knew no webhooks: a run's row said of the callback alone that it waits,
    and the entry lies where it lay."""
    job_id, run_id = await bench.world.submit(1, callback=WAITING)
    assert notice_key(run_id, CALLBACK) == (f"Notice#{run_id}", "Notice")
    bench.faults.calls.clear()
    await stop(bench.world, job_id, run_id)
    # The end, and the one entry there is.
    assert bench.faults.calls.count((DB, "update_item")) == 2

    entry = await taken(bench.other, run_id)
    assert (entry.callback, entry.ended_as) == (WAITING, RunStatus.STOPPED)


# -- a webhook that is set while the run goes on --


async def set_webhook(world: World, job_id: str, webhook: Webhook | None = HOOK) -> Job:
    """Set the webhook of a job."""
    return await world.store.jobs.set_webhook(CALLER, job_id, webhook, now=world.now)


async def test_a_webhook_is_set_once_although_every_answer_is_lost_once(bench: Bench) -> None:
    job_id, run_id = await bench.world.submit(1)
    lose_every_answer(bench)
    await bench.world.clock.advance(1)
    job = await set_webhook(bench.world, job_id)
    again = await set_webhook(bench.world, job_id)

    assert (job.webhook, job.version, job.updated_at) == (HOOK, 2, bench.world.now)
    assert again == job == (await bench.other.view(job_id)).job
    assert await due(bench) == [EntryKey(run_id, WEBHOOK)]
    assert (await taken(bench.world, run_id, WEBHOOK)).callback is None
    await stop(bench.world, job_id, run_id)
    item = await entry_item(bench, run_id, WEBHOOK)
    assert item is not None
    assert item["ended_as"] == RunStatus.STOPPED


async def test_a_webhook_that_is_set_by_a_call_without_an_answer_is_set_again(
    bench: Bench,
) -> None:
    job_id, run_id = await bench.world.submit(1)
    bench.faults.vanish(DB, TRANSACT)
    await refused(ErrorCode.UNAVAILABLE, set_webhook(bench.world, job_id))
    job = await set_webhook(bench.other, job_id)

    assert (job.webhook, job.version) == (HOOK, 2)
    assert await due(bench) == [EntryKey(run_id, WEBHOOK)]


async def test_a_webhook_that_is_set_again_leaves_the_entry_as_it_is(bench: Bench) -> None:
    job_id, run_id = await submit(bench)
    entry = await taken(bench.world, run_id, WEBHOOK)
    await bench.world.clock.advance(1)
    await set_webhook(bench.world, job_id, None)
    await set_webhook(bench.world, job_id)

    item = await entry_item(bench, run_id, WEBHOOK)
    assert item is not None
    assert (item["leased_until"], item["due_at"]) == (entry.lease, entry.lease - LEASE)


async def test_a_run_that_ends_before_the_webhook_is_written_owes_nothing(bench: Bench) -> None:
    job_id, run_id = await bench.world.submit(1)
    bench.faults.before(DB, TRANSACT, lambda: stop(bench.other, job_id, run_id))
    job = await set_webhook(bench.world, job_id)

    assert bench.faults.fired == 1
    assert job.webhook == HOOK
    assert await entry_item(bench, run_id, WEBHOOK) is None


async def test_a_run_that_is_made_before_the_webhook_is_written_has_an_entry(
    bench: Bench,
) -> None:
    job_id, run_id = await bench.world.submit(1)
    await stop(bench.world, job_id, run_id)
    made: list[str] = []

    async def rerun() -> None:
        made.append((await bench.other.rerun(job_id))[0])

    bench.faults.before(DB, TRANSACT, rerun)
    await set_webhook(bench.world, job_id)

    assert await due(bench) == [EntryKey(made[0], WEBHOOK)]


async def test_a_webhook_that_is_set_while_a_rerun_is_made_waits_for_it(bench: Bench) -> None:
    job_id, run_id = await bench.world.submit(1)
    await stop(bench.world, job_id, run_id)

    async def set_it() -> None:
        await set_webhook(bench.other, job_id)

    bench.faults.before(DB, TRANSACT, set_it)
    second, _ = await bench.world.rerun(job_id)

    assert bench.faults.fired == 1
    assert await due(bench) == [EntryKey(second, WEBHOOK)]


@pytest.mark.parametrize("large_from", [1, 100])
async def test_each_rerun_has_an_entry_although_every_answer_is_lost_once(
    bench: Bench, large_from: int
) -> None:
    job_id, run_id = await submit(bench)
    await stop(bench.world, job_id, run_id)
    lose_every_answer(bench)
    await bench.world.clock.advance(1)
    second, _ = await bench.world.rerun(job_id, large_from=large_from)

    assert await due(bench) == [*both(run_id), EntryKey(second, WEBHOOK)]
    run_item = await bench.run_item(job_id, 2)
    assert "calls_back" not in run_item
    assert run_item["notifies"] is True


async def test_the_deletion_of_a_job_notes_the_end_of_each_run_once(bench: Bench) -> None:
    job_id, run_id = await submit(bench)
    runs = await more_runs(bench, job_id, count=2 * MOST_RUNS)
    bench.faults.calls.clear()
    await delete_job(bench.world, job_id, run_id)

    # One attempt an entry of each run: those were written without any but the first.
    marks = len([run_id, *runs]) + 1
    assert bench.faults.calls.count((DB, "update_item")) == marks
    assert await due(bench) == both(run_id)
