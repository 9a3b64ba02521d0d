"""The outbox on DynamoDB where answers are lost, and where a process dies between the end of a run
and the write that makes its notice due."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

import pytest

from conveyor.domain.errors import ConveyorError
from conveyor.domain.model import Callback, RunStatus
from conveyor.domain.run_events import RunFinished
from conveyor.ports.outbox import OutboxEntry
from conveyor.prod.aws.calls import Parameters
from conveyor.prod.dynamodb.client import Item
from conveyor.prod.dynamodb.schema import ROW_SHAPE, TIME_TO_LIVE, notice_key
from conveyor.testing.clock import FakeClock
from tests.conformance.dynamo_records import DB, Bench, away, lose_every_answer, open_bench
from tests.conformance.world import CALLER, World

pytestmark = pytest.mark.extended

LEASE = 60_000
HEARTBEAT = 30_000
WAITING = Callback("a token")
ENDING = RunFinished('{"event_type":"run.stopped"}', "Conveyor.RunStopped")


@pytest.fixture
async def bench(clock: FakeClock) -> AsyncIterator[Bench]:
    """An empty table with a process behind faults and one beside them."""
    async with open_bench(clock) as opened:
        yield opened


async def submit(bench: Bench, *, closed: bool = True) -> tuple[str, str]:
    """A job of one task whose end somebody waits for."""
    return await bench.world.submit(1, closed=closed, callback=WAITING)


async def take(world: World, run_id: str) -> OutboxEntry | None:
    """Try to lease a notice for a minute."""
    return await world.store.outbox.lease_entry(run_id, now=world.now, lapses_at=world.now + LEASE)


async def taken(world: World, run_id: str) -> OutboxEntry:
    """Lease a notice for a minute."""
    notice = await take(world, run_id)
    assert notice is not None
    return notice


async def say_alive(world: World, run_id: str) -> None:
    """Touch a live run, as a worker does."""
    notice = await taken(world, run_id)
    due_at = world.now + HEARTBEAT
    await world.store.outbox.reschedule_entry(notice, due_at=due_at, attempts=0)


async def due(bench: Bench) -> list[str]:
    """Return the entries that the other process finds due."""
    return await bench.other.store.outbox.due_entries(now=bench.world.now, limit=10)


async def notice_item(bench: Bench, run_id: str) -> Item | None:
    """A notice as it lies there."""
    return await bench.table.get(notice_key(run_id))


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


@pytest.mark.parametrize("end", ENDS)
async def test_an_end_is_told_although_every_answer_is_lost_once(bench: Bench, end: End) -> None:
    lose_every_answer(bench)
    outbox, world = bench.store.outbox, bench.world
    job_id, run_id = await submit(bench, closed=False)
    await say_alive(world, run_id)
    assert await due(bench) == []
    await end(world, job_id, run_id)
    assert await due(bench) == [run_id]

    notice = await taken(world, run_id)
    assert notice.run is not None
    assert notice.run.status not in (RunStatus.RUNNING, RunStatus.PENDING)
    assert await outbox.fix_payload(notice, ENDING, now=world.now)
    await outbox.reschedule_entry(notice, due_at=world.now + 2_000, attempts=1)
    assert await due(bench) == []
    await world.clock.advance(2)
    again = await taken(world, run_id)
    assert (again.ending, again.attempts) == (ENDING, 1)
    await outbox.drop_entry(again)
    assert await notice_item(bench, run_id) is None
    assert bench.faults.fired >= 8


@pytest.mark.parametrize("end", ENDS)
async def test_an_end_whose_second_write_is_lost_is_seen_at_the_next_heartbeat(
    bench: Bench, end: End
) -> None:
    job_id, run_id = await submit(bench, closed=False)
    await say_alive(bench.world, run_id)
    bench.faults.fail(DB, "update_item", away(), times=10, where=hastens)
    await end(bench.world, job_id, run_id)
    assert bench.faults.fired >= 1
    assert await due(bench) == []

    await bench.world.clock.advance(HEARTBEAT / 1_000)
    assert await due(bench) == [run_id]
    run = (await taken(bench.other, run_id)).run
    assert run is not None
    assert run.status not in (RunStatus.RUNNING, RunStatus.PENDING)


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
    bench.faults.fail(DB, "update_item", away(), where=hastens)
    await stop(bench.world, job_id, run_id)
    assert bench.faults.fired == 1
    outbox, now = bench.store.outbox, bench.world.now
    notice = await taken(bench.world, run_id)
    assert await outbox.fix_payload(notice, ENDING, now=now)
    await outbox.reschedule_entry(notice, due_at=now + 2_000, attempts=1)
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

    notice = await taken(bench.other, run_id)
    assert notice.run is not None
    assert notice.run.status is RunStatus.COMPLETED


@pytest.mark.parametrize("weather", [lambda _bench: None, lose_every_answer])
async def test_one_of_many_who_want_a_notice_at_one_instant_gets_it(
    bench: Bench, weather: Callable[[Bench], None]
) -> None:
    weather(bench)
    _, run_id = await submit(bench)
    worlds = [bench.world, bench.other] * 4
    got = await asyncio.gather(*(take(world, run_id) for world in worlds))

    assert sum(notice is not None for notice in got) == 1


async def test_a_notice_lies_apart_until_it_is_dropped(bench: Bench) -> None:
    job_id, run_id = await submit(bench)
    item = await notice_item(bench, run_id)
    assert item is not None
    assert (item["shape"], item["job_id"], item["attempts"]) == (ROW_SHAPE, job_id, 0)
    assert TIME_TO_LIVE not in item
    assert (await bench.run_item(job_id))["calls_back"] is True

    other_job, other_run = await bench.world.submit(1)
    assert await notice_item(bench, other_run) is None
    assert "calls_back" not in await bench.run_item(other_job)
    bench.faults.calls.clear()
    await stop(bench.world, other_job, other_run)
    assert bench.faults.calls.count((DB, "update_item")) == 1


async def test_a_notice_of_a_newer_shape_holds_up_nobody(bench: Bench) -> None:
    job_id, run_id = await submit(bench)
    await bench.table.update(
        notice_key(run_id),
        "SET shape = :newer",
        condition="attribute_exists(pk)",
        newer=ROW_SHAPE + 1,
    )
    other_job, other_run = await submit(bench)
    await stop(bench.world, job_id, run_id)
    await stop(bench.world, other_job, other_run)

    assert (await bench.world.run(job_id)).status is RunStatus.STOPPED
    assert await due(bench) == [other_run]
