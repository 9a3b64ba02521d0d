"""The entries that wait for a webhook, in every adapter: who writes them, and what they note."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from msgspec import structs

from conveyor.domain import ids
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import (
    Callback,
    Ingest,
    IngestStatus,
    RunFailure,
    RunStats,
    RunStatus,
    TaskStatus,
)
from conveyor.domain.run_events import RunFinished
from conveyor.domain.webhooks import EventType, Webhook
from conveyor.ports.binding import Jobs, Runs
from conveyor.ports.outbox import EntryKey, Outbox, OutboxEntry, Subscriber
from conveyor.ports.records import StoredResponse
from tests.conformance.world import CALLER, World, refused

LEASE = 60_000
LATER = 30_000
TOKEN = Callback("a token that nobody may see")
HOOK = Webhook("https://example.com/hook?a=%20é", True, (EventType.FAILED, EventType.STOPPED))
OTHER = Webhook("https://example.org/")
STOPPED = RunFinished('{"event_type":"run.stopped"}', "Conveyor.RunStopped")


def key(run_id: str) -> EntryKey:
    """Return the key of the entry for a webhook."""
    return EntryKey(run_id, Subscriber.WEBHOOK)


async def due(outbox: Outbox, world: World, *, now: int | None = None) -> list[EntryKey]:
    """Return the entries due now, or at another time."""
    return await outbox.due_entries(now=world.now if now is None else now, limit=100)


async def taken(outbox: Outbox, world: World, entry: EntryKey) -> OutboxEntry:
    """Lease an entry for a minute."""
    leased = await outbox.lease_entry(entry, now=world.now, lapses_at=world.now + LEASE)
    assert leased is not None
    return leased


async def put_off(outbox: Outbox, world: World, run_id: str) -> None:
    """Look at the entry of a live run, and put it off."""
    entry = await taken(outbox, world, key(run_id))
    await outbox.reschedule_entry(entry, due_at=world.now + LATER, attempts=0)


async def set_webhook(world: World, job_id: str, webhook: Webhook | None) -> None:
    """Set or remove the webhook of a job."""
    job = await world.store.jobs.set_webhook(CALLER, job_id, webhook, now=world.now)
    assert (job.job_id, job.webhook) == (job_id, webhook)


async def test_a_job_with_a_webhook_has_an_entry_from_the_start(
    outbox: Outbox, world: World
) -> None:
    job_id, run_id = await world.submit(1, webhook=HOOK)
    await world.submit(1)

    assert await due(outbox, world) == [key(run_id)]
    assert (await world.view(job_id)).job.webhook == HOOK
    assert await taken(outbox, world, key(run_id)) == OutboxEntry(
        job_id=job_id,
        run_id=run_id,
        subscriber=Subscriber.WEBHOOK,
        callback=None,
        lease=world.now + LEASE,
        run=await world.run(job_id),
    )


@pytest.mark.parametrize("webhook", [HOOK, OTHER, None], ids=["full", "usual", "none"])
async def test_a_webhook_is_read_as_it_was_written(
    jobs: Jobs, world: World, webhook: Webhook | None
) -> None:
    job_id, _ = await world.submit(1, webhook=webhook)
    found = await jobs.find_job(job_id)
    [listed] = await jobs.list_jobs(CALLER, status=None, before=None, limit=10)
    assert found == listed.job == (await world.view(job_id)).job
    assert found is not None
    assert found.webhook == webhook


async def test_each_subscriber_has_an_entry_of_its_own(outbox: Outbox, world: World) -> None:
    _, run_id = await world.submit(1, webhook=HOOK, callback=TOKEN)
    both = {EntryKey(run_id, subscriber) for subscriber in Subscriber}
    assert set(await due(outbox, world)) == both

    waiting = await taken(outbox, world, EntryKey(run_id, Subscriber.CALLBACK))
    assert waiting.callback == TOKEN
    assert await due(outbox, world) == [key(run_id)]
    hooked = await taken(outbox, world, key(run_id))
    assert await due(outbox, world) == []
    await outbox.drop_entry(hooked)
    await outbox.reschedule_entry(waiting, due_at=world.now, attempts=0)
    assert await due(outbox, world) == [EntryKey(run_id, Subscriber.CALLBACK)]


async def test_a_payload_is_of_one_subscriber_alone(outbox: Outbox, world: World) -> None:
    job_id, run_id = await world.submit(1, webhook=HOOK, callback=TOKEN)
    await world.store.runs.stop_run(CALLER, job_id, now=world.now)
    waiting = await taken(outbox, world, EntryKey(run_id, Subscriber.CALLBACK))
    assert await outbox.fix_payload(waiting, STOPPED, now=world.now)
    hooked = await taken(outbox, world, key(run_id))
    assert (hooked.ending, hooked.decided_at, hooked.ended_as) == (None, 0, RunStatus.STOPPED)


async def test_a_submit_that_is_refused_leaves_no_entry(outbox: Outbox, world: World) -> None:
    job, run, tasks = world.draft(1)
    create = world.store.jobs.create_job
    await create(job, run, tasks, answer=StoredResponse(201, b""), once=None)
    with pytest.raises(ConveyorError):
        await create(
            structs.replace(job, webhook=HOOK),
            run,
            tasks,
            answer=StoredResponse(201, b""),
            once=None,
        )
    assert await due(outbox, world) == []


async def test_a_webhook_that_is_set_writes_the_entry_of_the_live_run(
    outbox: Outbox, world: World
) -> None:
    job_id, run_id = await world.submit(1, callback=TOKEN)
    await world.clock.advance(1)
    await set_webhook(world, job_id, HOOK)

    assert (await world.view(job_id)).job.webhook == HOOK
    assert await due(outbox, world, now=world.now - 1) == [EntryKey(run_id, Subscriber.CALLBACK)]
    assert await due(outbox, world) == [EntryKey(run_id, Subscriber.CALLBACK), key(run_id)]
    entry = await taken(outbox, world, key(run_id))
    assert (entry.job_id, entry.callback, entry.ended_as) == (job_id, None, None)
    assert entry.run == await world.run(job_id)


async def test_a_paused_run_and_one_that_ingests_are_live(
    outbox: Outbox, runs: Runs, world: World
) -> None:
    paused, paused_run = await world.submit(1)
    await runs.pause_run(CALLER, paused, paused=True, now=world.now)
    job, run, _ = world.draft(3)
    ingest = Ingest(status=IngestStatus.PENDING, end=3, chunks=(0,))
    run = structs.replace(run, ingest=ingest)
    answer = StoredResponse(202, b"")
    await world.store.jobs.create_job(job, run, [], answer=answer, once=None)
    drained, drained_run = await world.submit(1, closed=False)
    await world.succeed(drained_run, 0)
    for job_id in (paused, job.job_id, drained):
        await set_webhook(world, job_id, HOOK)
    assert set(await due(outbox, world)) == {key(paused_run), key(run.run_id), key(drained_run)}


async def test_an_entry_that_is_there_is_not_written_again(outbox: Outbox, world: World) -> None:
    job_id, run_id = await world.submit(1, webhook=HOOK)
    await put_off(outbox, world, run_id)
    for webhook in (OTHER, None, HOOK, HOOK):
        await world.clock.advance(1)
        await set_webhook(world, job_id, webhook)

    assert await due(outbox, world) == []  # it is due when it was to be, and not at once
    await world.clock.advance(LATER / 1_000)
    assert await due(outbox, world) == [key(run_id)]


async def test_a_webhook_that_was_taken_away_and_set_again_is_told_once(
    outbox: Outbox, world: World
) -> None:
    job_id, run_id = await world.submit(1)
    for webhook in (HOOK, None, OTHER):
        await set_webhook(world, job_id, webhook)
    await world.succeed(run_id, 0)

    assert await due(outbox, world) == [key(run_id)]
    entry = await taken(outbox, world, key(run_id))
    assert entry.ended_as is RunStatus.COMPLETED
    await outbox.drop_entry(entry)
    for webhook in (None, HOOK):
        await set_webhook(world, job_id, webhook)
    assert await due(outbox, world) == []


async def test_an_entry_waits_for_the_webhook_under_which_its_run_ended(
    outbox: Outbox, world: World
) -> None:
    job_id, first = await world.submit(1, webhook=HOOK)

    async def is_owed(run_id: str) -> bool:
        """Tell whether the job's present webhook waits for the end of a run."""
        entry = await taken(outbox, world, key(run_id))
        await outbox.reschedule_entry(entry, due_at=world.now, attempts=0)
        return entry.webhook_number == (await world.view(job_id)).job.webhook_number

    for webhook in (OTHER, None, HOOK):
        await set_webhook(world, job_id, webhook)
        assert await is_owed(first)
    await world.succeed(first, 0)
    second, _ = await world.rerun(job_id)
    await stop(world, job_id, second)
    await set_webhook(world, job_id, OTHER)
    assert [await is_owed(run_id) for run_id in (first, second)] == [True, True]
    for webhook in (None, OTHER):
        await set_webhook(world, job_id, webhook)
    assert [await is_owed(run_id) for run_id in (first, second)] == [False, False]
    third, _ = await world.rerun(job_id)
    assert await is_owed(third)


async def test_the_same_webhook_again_changes_nothing(jobs: Jobs, world: World) -> None:
    job_id, _ = await world.submit(1)
    first = await jobs.set_webhook(CALLER, job_id, HOOK, now=world.now)
    await world.clock.advance(1)
    assert await jobs.set_webhook(CALLER, job_id, HOOK, now=world.now) == first
    assert (await world.view(job_id)).job == first
    changed = await jobs.set_webhook(CALLER, job_id, OTHER, now=world.now)
    assert changed.version > first.version
    assert changed.updated_at == world.now
    assert (await world.view(job_id)).job == changed


async def test_nobody_else_has_a_job_to_set_a_webhook_on(
    jobs: Jobs, outbox: Outbox, world: World
) -> None:
    job_id, run_id = await world.submit(1)

    async def refuse(caller: str, job: str) -> None:
        await refused(ErrorCode.NOT_FOUND, jobs.set_webhook(caller, job, HOOK, now=world.now))

    await refuse("another caller", job_id)
    await refuse(CALLER, world.clock.new_id())
    await jobs.delete_job(CALLER, job_id, now=world.now)
    await refuse(CALLER, job_id)
    await world.store.runs.purge_run(run_id)
    await jobs.purge_job(job_id)
    await refuse(CALLER, job_id)
    assert await due(outbox, world) == []


async def succeed(world: World, _job_id: str, run_id: str) -> None:
    await world.succeed(run_id, 0)


async def stop(world: World, job_id: str, _run_id: str) -> None:
    await world.store.runs.stop_run(CALLER, job_id, now=world.now)


async def fail(world: World, _job_id: str, run_id: str) -> None:
    await world.store.runs.fail_run(
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
OF_EACH_END = pytest.mark.parametrize(
    ("end", "status"), ENDS, ids=[end.__name__ for end, _ in ENDS]
)


@OF_EACH_END
async def test_the_end_of_a_run_is_noted_once_and_makes_its_entry_due(
    outbox: Outbox, world: World, end: End, status: RunStatus
) -> None:
    job_id, run_id = await world.submit(1, webhook=HOOK)
    await put_off(outbox, world, run_id)
    await world.clock.advance(2)
    await end(world, job_id, run_id)
    ended_at = world.now

    assert await due(outbox, world, now=ended_at - 1) == []
    assert await due(outbox, world) == [key(run_id)]
    entry = await taken(outbox, world, key(run_id))
    assert (entry.ended_as, entry.ended_at) == (status, ended_at)
    await outbox.reschedule_entry(entry, due_at=world.now + LATER, attempts=0)
    await world.clock.advance(3)
    await delete_job(world, job_id, run_id)
    await world.store.runs.touch_tombstone(run_id, now=world.now)
    later = await taken(outbox, world, key(run_id))
    assert (later.ended_as, later.ended_at) == (status, ended_at)


@OF_EACH_END
async def test_an_end_that_comes_during_a_lease_is_noted_too(
    outbox: Outbox, world: World, end: End, status: RunStatus
) -> None:
    job_id, run_id = await world.submit(1, webhook=HOOK)
    entry = await taken(outbox, world, key(run_id))
    await world.clock.advance(1)
    await end(world, job_id, run_id)
    ended_at = world.now
    await world.clock.advance(1)
    await outbox.reschedule_entry(entry, due_at=world.now + LATER, attempts=0)
    assert await due(outbox, world, now=ended_at - 1) == []
    assert await due(outbox, world, now=ended_at) == [key(run_id)]
    again = await taken(outbox, world, key(run_id))
    assert (again.ended_as, again.ended_at) == (status, ended_at)


@OF_EACH_END
async def test_a_run_that_ended_before_a_webhook_was_set_owes_nothing(
    outbox: Outbox, world: World, end: End, status: RunStatus
) -> None:
    job_id, run_id = await world.submit(1)
    await end(world, job_id, run_id)
    if end is not delete_job:
        await set_webhook(world, job_id, HOOK)
    assert await due(outbox, world) == []
    assert await outbox.lease_entry(key(run_id), now=world.now, lapses_at=world.now + 1) is None


async def test_an_entry_outlives_its_run_and_its_job(outbox: Outbox, world: World) -> None:
    job_id, run_id = await world.submit(1, webhook=HOOK)
    await put_off(outbox, world, run_id)
    await world.succeed(run_id, 0)
    ended_at = world.now
    await world.clock.advance(1)
    await world.store.jobs.delete_job(CALLER, job_id, now=world.now)
    await world.store.runs.purge_run(run_id)
    await world.store.jobs.purge_job(job_id)

    assert await due(outbox, world) == [key(run_id)]
    entry = await taken(outbox, world, key(run_id))
    assert (entry.job_id, entry.run) == (job_id, None)
    assert (entry.ended_as, entry.ended_at) == (RunStatus.COMPLETED, ended_at)


async def test_an_open_job_ends_by_its_close(outbox: Outbox, world: World) -> None:
    job_id, run_id = await world.submit(1, closed=False, webhook=HOOK)
    await world.succeed(run_id, 0)
    await put_off(outbox, world, run_id)
    assert await due(outbox, world) == []
    await world.clock.advance(1)
    await world.store.jobs.close_job(CALLER, job_id, now=world.now)
    assert await due(outbox, world) == [key(run_id)]
    entry = await taken(outbox, world, key(run_id))
    assert (entry.ended_as, entry.ended_at) == (RunStatus.COMPLETED, world.now)


async def test_a_run_without_rows_ends_with_its_ingestion(outbox: Outbox, world: World) -> None:
    job, run, _ = world.draft(0, webhook=HOOK)
    ingest = Ingest(status=IngestStatus.PENDING, end=0)
    run = structs.replace(run, status=RunStatus.RUNNING, stats=RunStats(), ingest=ingest)
    answer = StoredResponse(201, b"")
    await world.store.jobs.create_job(job, run, [], answer=answer, once=None)
    await put_off(outbox, world, run.run_id)
    await world.clock.advance(1)
    assert await world.store.ingestion.finish_ingest(run.run_id, now=world.now)
    entry = await taken(outbox, world, key(run.run_id))
    assert (entry.ended_as, entry.ended_at) == (RunStatus.COMPLETED, world.now)


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("statuses", [(), (TaskStatus.FAILED,)], ids=["full", "partial"])
async def test_a_rerun_has_an_entry_for_the_webhook_alone(
    outbox: Outbox, world: World, statuses: tuple[TaskStatus, ...], large: bool
) -> None:
    job_id, run_id = await world.submit(2, webhook=HOOK, callback=TOKEN)
    await world.succeed(run_id, 0)
    await world.fail(run_id, 1)
    for subscriber in Subscriber:
        await outbox.drop_entry(await taken(outbox, world, EntryKey(run_id, subscriber)))
    await world.clock.advance(1)
    second, _ = await world.rerun(job_id, *statuses, large_from=1 if large else 10_000)

    assert await due(outbox, world, now=world.now - 1) == []
    assert await due(outbox, world) == [key(second)]
    entry = await taken(outbox, world, key(second))
    assert (entry.run, entry.ended_as) == (await world.run(job_id, second), None)


async def test_the_end_of_a_rerun_is_its_own(outbox: Outbox, world: World) -> None:
    job_id, first = await world.submit(1, webhook=HOOK)
    await world.fail(first, 0)
    ended_at = world.now
    await world.clock.advance(1)
    second, _ = await world.rerun(job_id)
    await put_off(outbox, world, second)
    await world.clock.advance(1)
    task = await world.claimed(second, 0, task_id=ids.task_id(first, 0))
    await world.settle(task, world.success(task))

    assert await due(outbox, world) == [key(first), key(second)]  # longest due first
    ends = [(await taken(outbox, world, key(run_id))).ended_at for run_id in (first, second)]
    assert ends == [ended_at, world.now]


async def test_a_rerun_without_a_webhook_has_no_entry(outbox: Outbox, world: World) -> None:
    job_id, run_id = await world.submit(1, webhook=HOOK)
    await world.fail(run_id, 0)
    await outbox.drop_entry(await taken(outbox, world, key(run_id)))
    await set_webhook(world, job_id, None)
    second, _ = await world.rerun(job_id)
    assert await due(outbox, world) == []
    await set_webhook(world, job_id, HOOK)
    assert await due(outbox, world) == [key(second)]


async def test_an_answered_rerun_writes_no_second_entry(outbox: Outbox, world: World) -> None:
    job_id, run_id = await world.submit(1, webhook=HOOK)
    await world.fail(run_id, 0)
    await outbox.drop_entry(await taken(outbox, world, key(run_id)))
    second, first_answer = await world.rerun(job_id)
    await outbox.drop_entry(await taken(outbox, world, key(second)))
    assert (await world.rerun(job_id, run_id=second))[1] == first_answer
    assert await due(outbox, world) == []


async def test_many_who_set_a_webhook_at_once_come_one_after_the_other(
    jobs: Jobs, outbox: Outbox, world: World
) -> None:
    job_id, run_id = await world.submit(1)
    before = (await world.view(job_id)).job
    hooks = [Webhook(f"https://example.com/{number}") for number in range(8)]
    made = await asyncio.gather(
        *(jobs.set_webhook(CALLER, job_id, hook, now=world.now) for hook in hooks)
    )
    last = (await world.view(job_id)).job

    assert [job.webhook for job in made] == hooks
    assert sorted(job.version for job in made) == [before.version + n for n in range(1, 9)]
    assert last == max(made, key=lambda job: job.version)
    assert await due(outbox, world) == [key(run_id)]


async def test_a_webhook_set_while_its_run_ends_owes_one_event_or_none(
    jobs: Jobs, outbox: Outbox, world: World
) -> None:
    for _ in range(10):
        job_id, run_id = await world.submit(1)
        task = await world.claimed(run_id, 0)
        await asyncio.gather(
            jobs.set_webhook(CALLER, job_id, HOOK, now=world.now),
            world.settle(task, world.success(task)),
        )
        assert (await world.run(job_id)).status is RunStatus.COMPLETED
        assert (await world.view(job_id)).job.webhook == HOOK
        found = await due(outbox, world)
        assert found in ([], [key(run_id)])
        for entry in found:
            await outbox.drop_entry(await taken(outbox, world, entry))
