"""The contract of every outbox adapter, sentence by sentence of the port."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from msgspec import structs

from conveyor.domain import ids
from conveyor.domain.errors import ConveyorError
from conveyor.domain.model import Callback, Ingest, IngestStatus, RunFailure, RunStats, RunStatus
from conveyor.domain.run_events import RunFinished
from conveyor.ports.outbox import (
    CLOCKS_APART,
    LONGEST_LEASE,
    EntryKey,
    Outbox,
    OutboxEntry,
    Subscriber,
)
from conveyor.ports.records import StoredResponse
from tests.conformance.world import CALLER, World

LEASE = 60_000
HEARTBEAT = 30_000
WAITING = Callback("a token that nobody may see")
DONE = RunFinished('{"event_type":"run.completed"}')
STOPPED = RunFinished('{"event_type":"run.stopped"}', "Conveyor.RunStopped")


async def submit(world: World, count: int = 1, *, closed: bool = True) -> tuple[str, str]:
    """A job whose end somebody waits for."""
    return await world.submit(count, closed=closed, callback=WAITING)


def key(run_id: str) -> EntryKey:
    """Return the key of the entry for a callback."""
    return EntryKey(run_id, Subscriber.CALLBACK)


async def due(
    outbox: Outbox, world: World, *, now: int | None = None, limit: int = 10
) -> list[str]:
    """Return the runs whose entries are due, all of them for callbacks."""
    found = await outbox.due_entries(now=world.now if now is None else now, limit=limit)
    assert found == [key(entry.run_id) for entry in found]
    return [entry.run_id for entry in found]


async def take(outbox: Outbox, world: World, run_id: str) -> OutboxEntry | None:
    """Try to lease a notice for a minute."""
    return await outbox.lease_entry(key(run_id), now=world.now, lapses_at=world.now + LEASE)


async def taken(outbox: Outbox, world: World, run_id: str) -> OutboxEntry:
    """Lease a notice for a minute."""
    entry = await take(outbox, world, run_id)
    assert entry is not None
    return entry


async def put_off(outbox: Outbox, world: World, entry: OutboxEntry, *, attempts: int = 0) -> None:
    """Give a notice back until the next heartbeat."""
    await outbox.reschedule_entry(entry, due_at=world.now + HEARTBEAT, attempts=attempts)


async def advance(world: World, milliseconds: int) -> None:
    await world.clock.advance(milliseconds / 1_000)


async def test_a_job_with_a_callback_has_a_notice_from_the_start(
    outbox: Outbox, world: World
) -> None:
    job_id, run_id = await submit(world)
    await world.submit(1)

    assert await due(outbox, world) == [run_id]
    assert (await world.view(job_id)).job.callback == WAITING
    entry = await taken(outbox, world, run_id)
    assert entry == OutboxEntry(
        job_id=job_id,
        run_id=run_id,
        subscriber=Subscriber.CALLBACK,
        callback=WAITING,
        lease=world.now + LEASE,
        run=await world.run(job_id),
    )
    assert WAITING.task_token not in repr(entry)


async def test_a_submit_that_is_refused_leaves_no_notice(outbox: Outbox, world: World) -> None:
    job, run, tasks = world.draft(1)
    create = world.store.jobs.create_job
    await create(job, run, tasks, answer=StoredResponse(201, b""), once=None)
    again = structs.replace(job, callback=WAITING)
    with pytest.raises(ConveyorError):
        await create(again, run, tasks, answer=StoredResponse(201, b""), once=None)

    assert await due(outbox, world) == []


async def test_the_longest_due_come_first_and_no_more_than_asked_for(
    outbox: Outbox, world: World
) -> None:
    runs = []
    for _ in range(5):
        runs.append((await submit(world))[1])
        await advance(world, 1)
    leased = await taken(outbox, world, runs[0])

    assert await due(outbox, world, limit=2) == runs[1:3]
    assert await due(outbox, world, limit=4) == runs[1:]
    await outbox.reschedule_entry(leased, due_at=world.now, attempts=0)
    assert await due(outbox, world) == [*runs[1:], runs[0]]
    assert await due(outbox, world, now=world.now - 6) == []


async def test_a_leased_notice_is_nobody_elses_until_the_lease_lapses(
    outbox: Outbox, world: World
) -> None:
    _, run_id = await submit(world)
    first = await taken(outbox, world, run_id)
    assert await due(outbox, world) == []
    assert await take(outbox, world, run_id) is None
    await advance(world, LEASE - 1)
    assert await take(outbox, world, run_id) is None
    await advance(world, 1)
    assert await due(outbox, world) == [run_id]
    second = await taken(outbox, world, run_id)

    assert (first.lease, second.lease) == (world.now, world.now + LEASE)
    assert not await outbox.fix_payload(first, DONE, now=world.now)
    await put_off(outbox, world, first)
    await outbox.drop_entry(first)
    await advance(world, LEASE)
    assert await due(outbox, world) == [run_id]
    assert (await taken(outbox, world, run_id)).ending is None


async def test_a_notice_that_is_not_due_or_not_there_is_not_to_be_had(
    outbox: Outbox, world: World
) -> None:
    _, run_id = await submit(world)
    assert await outbox.lease_entry(key(run_id), now=world.now - 1, lapses_at=world.now) is None
    await put_off(outbox, world, await taken(outbox, world, run_id))
    assert (await due(outbox, world), await take(outbox, world, run_id)) == ([], None)
    assert await take(outbox, world, "another run") is None
    await advance(world, HEARTBEAT)
    assert await due(outbox, world) == [run_id]
    assert (await taken(outbox, world, run_id)).attempts == 0


async def test_a_lease_of_a_clock_that_was_set_back_does_not_count(
    outbox: Outbox, world: World
) -> None:
    _, run_id = await submit(world)
    ahead = world.now + LONGEST_LEASE + 1
    lost = await outbox.lease_entry(key(run_id), now=ahead - LEASE, lapses_at=ahead)
    assert lost is not None
    # A minute is the most that two clocks may differ by.
    inside = ahead - CLOCKS_APART
    assert await outbox.lease_entry(key(run_id), now=world.now, lapses_at=inside) is None
    assert await due(outbox, world) == [run_id]
    second = await taken(outbox, world, run_id)
    await outbox.drop_entry(lost)
    assert await outbox.fix_payload(second, DONE, now=world.now)


async def test_how_a_run_ended_is_noted_whatever_becomes_of_it(
    outbox: Outbox, world: World
) -> None:
    job_id, run_id = await submit(world)
    first = await taken(outbox, world, run_id)
    assert first.ended_as is None
    await put_off(outbox, world, first)
    await world.succeed(run_id, 0)
    await world.store.jobs.delete_job(CALLER, job_id, now=world.now)
    await world.store.runs.purge_run(run_id)
    entry = await taken(outbox, world, run_id)
    assert (entry.run, entry.ended_as) == (None, RunStatus.COMPLETED)


async def test_a_run_that_was_deleted_while_it_went_on_ended_as_that(
    outbox: Outbox, world: World
) -> None:
    job_id, run_id = await submit(world)
    await world.store.jobs.delete_job(CALLER, job_id, now=world.now)
    assert (await taken(outbox, world, run_id)).ended_as is RunStatus.DELETED


async def succeed(world: World, _job_id: str, run_id: str) -> None:
    await world.succeed(run_id, 0)


async def stop(world: World, job_id: str, _run_id: str) -> None:
    await world.store.runs.stop_run(CALLER, job_id, now=world.now)


async def fail(world: World, _job_id: str, run_id: str) -> None:
    runs = world.store.runs
    assert await runs.fail_run(
        run_id, reason=RunFailure.INSUFFICIENT_CREDITS, detail="no", now=world.now
    )


async def delete_run(world: World, job_id: str, run_id: str) -> None:
    await world.store.runs.delete_run(CALLER, job_id, run_id, now=world.now)


async def delete_job(world: World, job_id: str, _run_id: str) -> None:
    await world.store.jobs.delete_job(CALLER, job_id, now=world.now)


End = Callable[[World, str, str], Awaitable[None]]
ENDS: list[tuple[End, RunStatus]] = [
    (succeed, RunStatus.COMPLETED),
    (stop, RunStatus.STOPPED),
    (fail, RunStatus.FAILED),
    (delete_run, RunStatus.DELETED),
    (delete_job, RunStatus.DELETED),
]


@pytest.mark.parametrize(("end", "status"), ENDS, ids=[end.__name__ for end, _ in ENDS])
async def test_the_end_of_a_run_makes_its_notice_due(
    outbox: Outbox, world: World, end: End, status: RunStatus
) -> None:
    job_id, run_id = await submit(world)
    await put_off(outbox, world, await taken(outbox, world, run_id))
    await advance(world, 2)
    await end(world, job_id, run_id)

    assert await due(outbox, world, now=world.now - 1) == []
    assert await due(outbox, world) == [run_id]
    run = (await taken(outbox, world, run_id)).run
    assert run is not None
    assert (run.status, run.updated_at) == (status, world.now)


async def test_an_open_job_ends_by_its_close_or_last_batch(outbox: Outbox, world: World) -> None:
    made = [await submit(world, closed=False) for _ in range(3)]
    for _, run_id in made:
        await world.succeed(run_id, 0)
        await put_off(outbox, world, await taken(outbox, world, run_id))
    assert await due(outbox, world) == []
    await advance(world, 1)
    await world.store.jobs.close_job(CALLER, made[0][0], now=world.now)
    await world.append(made[1][0], 0, last_batch=True)
    await world.append(made[2][0], 1, last_batch=True)

    assert sorted(await due(outbox, world)) == sorted([made[0][1], made[1][1]])
    await world.succeed(made[2][1], 1)
    assert sorted(await due(outbox, world)) == sorted(run_id for _, run_id in made)


async def test_a_run_without_rows_ends_with_its_ingestion(outbox: Outbox, world: World) -> None:
    job, run, _ = world.draft(0, callback=WAITING)
    ingest = Ingest(status=IngestStatus.PENDING, end=0)
    run = structs.replace(run, status=RunStatus.RUNNING, stats=RunStats(total=0), ingest=ingest)
    await world.store.jobs.create_job(job, run, [], answer=StoredResponse(201, b""), once=None)
    await put_off(outbox, world, await taken(outbox, world, run.run_id))
    assert await due(outbox, world) == []
    ended = await world.store.ingestion.finish_ingest(run.run_id, now=world.now)

    assert ended is RunStatus.COMPLETED
    assert await due(outbox, world) == [run.run_id]


async def test_what_was_told_is_not_due_again(outbox: Outbox, world: World) -> None:
    job_id, run_id = await submit(world)
    await world.succeed(run_id, 0)
    entry = await taken(outbox, world, run_id)
    assert await outbox.fix_payload(entry, DONE, now=world.now)
    await outbox.drop_entry(entry)
    await world.store.sweeping.expire_run(run_id, now=world.now)
    assert (await world.run(job_id, run_id)).status is RunStatus.DELETED
    assert await due(outbox, world) == []


async def test_a_rerun_has_no_notice(outbox: Outbox, world: World) -> None:
    job_id, run_id = await submit(world)
    await world.succeed(run_id, 0)
    await outbox.drop_entry(await taken(outbox, world, run_id))
    second, _ = await world.rerun(job_id)
    task = await world.claimed(second, 0, task_id=ids.task_id(run_id, 0))
    await world.settle(task, world.success(task))

    assert (await world.run(job_id)).status is RunStatus.COMPLETED
    assert await due(outbox, world) == []


async def test_an_end_during_a_delivery_is_due_when_that_is_put_off(
    outbox: Outbox, world: World
) -> None:
    job_id, run_id = await submit(world)
    entry = await taken(outbox, world, run_id)
    await advance(world, 3)
    await stop(world, job_id, run_id)
    ended_at = world.now
    assert await due(outbox, world) == []
    await advance(world, 2)
    await put_off(outbox, world, entry)

    assert await due(outbox, world, now=ended_at - 1) == []
    assert await due(outbox, world, now=ended_at) == [run_id]


@pytest.mark.parametrize("gone", [False, True])
async def test_an_untold_end_stays_due_when_its_run_is_deleted(
    outbox: Outbox, world: World, gone: bool
) -> None:
    job_id, run_id = await submit(world)
    await stop(world, job_id, run_id)
    entry = await taken(outbox, world, run_id)
    await delete_job(world, job_id, run_id)
    if gone:
        await purge(world, job_id, run_id)
    await put_off(outbox, world, entry)
    assert await due(outbox, world) == [run_id]


async def test_what_is_told_is_settled_once(outbox: Outbox, world: World) -> None:
    _, run_id = await submit(world)
    await world.succeed(run_id, 0)
    entry = await taken(outbox, world, run_id)
    assert await outbox.fix_payload(entry, DONE, now=world.now)
    assert not await outbox.fix_payload(entry, STOPPED, now=world.now + 1)
    decided_at = world.now
    await put_off(outbox, world, entry, attempts=1)
    assert await due(outbox, world) == []
    await advance(world, HEARTBEAT)

    again = await taken(outbox, world, run_id)
    assert (again.ending, again.decided_at, again.attempts) == (DONE, decided_at, 1)
    assert not await outbox.fix_payload(again, STOPPED, now=world.now)
    await outbox.drop_entry(again)
    await advance(world, LEASE)
    assert await due(outbox, world) == []
    assert await take(outbox, world, run_id) is None


async def test_a_later_end_does_not_hasten_what_is_being_told(outbox: Outbox, world: World) -> None:
    job_id, run_id = await submit(world)
    await stop(world, job_id, run_id)
    entry = await taken(outbox, world, run_id)
    assert await outbox.fix_payload(entry, STOPPED, now=world.now)
    await put_off(outbox, world, entry, attempts=1)
    await delete_run(world, job_id, run_id)
    assert await due(outbox, world) == []


async def purge(world: World, job_id: str, run_id: str) -> None:
    await world.store.runs.purge_run(run_id)
    await world.store.jobs.purge_job(job_id)


@pytest.mark.parametrize("decided", [False, True])
async def test_a_notice_outlives_its_run_and_its_job(
    outbox: Outbox, world: World, decided: bool
) -> None:
    job_id, run_id = await submit(world)
    if decided:
        entry = await taken(outbox, world, run_id)
        assert await outbox.fix_payload(entry, STOPPED, now=world.now)
        await put_off(outbox, world, entry, attempts=1)
    await delete_job(world, job_id, run_id)
    await purge(world, job_id, run_id)
    await advance(world, HEARTBEAT)

    assert await due(outbox, world) == [run_id]
    entry = await taken(outbox, world, run_id)
    assert (entry.run, entry.job_id, entry.callback) == (None, job_id, WAITING)
    assert entry.ending == (STOPPED if decided else None)
