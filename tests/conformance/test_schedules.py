"""The contract of every schedules adapter, sentence by sentence of the port."""

from __future__ import annotations

import asyncio

import pytest
from msgspec import structs

from conveyor.domain.errors import ErrorCode
from conveyor.domain.model import IngestStatus, Job, JobStatus, RunStatus
from conveyor.domain.schedule import Calendar, Rate, Schedule
from conveyor.domain.scheduling import (
    FireStatus,
    Overlap,
    SkipReason,
)
from conveyor.domain.webhooks import Webhook
from conveyor.ports.binding import Jobs
from conveyor.ports.maintenance import StuckIngest
from conveyor.ports.outbox import EntryKey, Outbox, Subscriber
from conveyor.ports.records import IdempotencyScope, KeyInUse, StoredResponse
from conveyor.ports.schedules import ScheduleChange, Schedules
from tests.conformance.bindings import BindingKind
from tests.conformance.scheduled_jobs import (
    EVERY_HOUR,
    HOUR,
    ONCE,
    fire,
    moved,
    note,
    note_fires,
    read_job,
    schedule_job,
    template,
    with_run,
)
from tests.conformance.world import CALLER, World, refused

HOOK = Webhook("https://example.com/hook")
STRANGER = "another caller"
DAILY = Schedule(
    calendar=Calendar(hours=(2, 14), weekdays=(), month_days=(1, 31)), timezone="America/New_York"
)


async def due(world: World, *, now: int | None = None, limit: int = 100) -> list[str]:
    """Return the ids of the jobs that are due now, or at another time."""
    at = world.now if now is None else now
    found = await world.store.schedules.due_schedules(now=at, limit=limit)
    assert all(job.scheduling is not None for job in found)
    return [job.job_id for job in found]


async def listed(world: World, *, after: str = "", limit: int = 100) -> list[str]:
    """Return the ids of scheduled jobs."""
    return [
        job.job_id for job in await world.store.schedules.list_schedules(after=after, limit=limit)
    ]


async def move(world: World, job_id: str, **fields: object) -> Job:
    """Change the scheduling of a job as it stands."""
    before = await read_job(world, job_id)
    after = moved(world, before, **fields)
    assert await world.store.schedules.change_schedule(ScheduleChange(before=before, after=after))
    return after


# -- scheduled jobs among others --


async def test_a_scheduled_job_is_made_without_a_run(jobs: Jobs, world: World) -> None:
    job = await schedule_job(world)
    assert await jobs.find_job(job.job_id) == job
    view = await world.view(job.job_id)
    assert (view.job, view.latest_run) == (job, None)
    assert await world.store.runs.get_run(CALLER, job.job_id, None) is None
    assert await world.store.runs.list_runs(CALLER, job.job_id, before=None, limit=10) == []
    assert await world.store.runs.dispatchable_runs() == []
    assert await jobs.get_job(STRANGER, job.job_id) is None


@pytest.mark.parametrize("schedule", [EVERY_HOUR, ONCE, DAILY], ids=["rate", "at", "calendar"])
async def test_every_field_of_a_scheduling_is_kept(world: World, schedule: Schedule) -> None:
    job = await schedule_job(
        world,
        schedule=schedule,
        template=template(1_000_000),
        overlap=Overlap.WAIT,
        paused=True,
        next_at=None,
        next_nominal="2026-03-29T02:00:00",
        last_nominal="2026-03-28T02:00:00",
        waiting="2026-03-27T02:00:00",
        waiting_at=world.now - 2,
        last_at=world.now - 1,
        look_at=world.now + 3,
        zones_version="2026b",
        key_hash="sha256:0123",
        of_job={"webhook": HOOK, "metadata": {"ключ": "é"}, "sealed_key": b"\x00\xff"},
    )
    assert await read_job(world, job.job_id) == job
    assert (await world.view(job.job_id)).job == job
    assert await world.store.schedules.list_schedules(after="", limit=10) == [job]


async def test_a_scheduled_job_that_exists_is_not_made_again(jobs: Jobs, world: World) -> None:
    job = await schedule_job(world)
    other = structs.replace(job, sealed_key=b"other")
    answer = StoredResponse(201, b"{}")
    await refused(ErrorCode.CONFLICT, jobs.create_job(other, None, [], answer=answer, once=None))
    assert await read_job(world, job.job_id) == job


async def test_a_scheduled_submit_stores_its_answer(world: World) -> None:
    key, draft = IdempotencyScope("scope"), world.draft(0)[0]
    await _claim(world, key, draft.job_id)
    job = structs.replace(
        draft, latest_run_id=None, run_count=0, scheduling=(await schedule_job(world)).scheduling
    )
    answer = StoredResponse(201, b'{"job":1}')
    await world.store.jobs.create_job(job, None, [], answer=answer, once=key)
    assert await _claim(world, key, draft.job_id) == answer


async def test_lists_tell_scheduled_jobs_from_regular_ones(jobs: Jobs, world: World) -> None:
    made: list[tuple[str, bool]] = []
    for scheduled in (False, True, True, False, True):
        job_id = (await schedule_job(world)).job_id if scheduled else (await world.submit(1))[0]
        made.append((job_id, scheduled))
        await world.clock.advance(1)
    await schedule_job(world, of_job={"caller": STRANGER})
    gone = (await schedule_job(world)).job_id
    await jobs.delete_job(CALLER, gone, now=world.now)

    async def ids(
        scheduled: bool | None,
        *,
        limit: int = 10,
        before: str | None = None,
        status: JobStatus | None = None,
    ) -> list[str]:
        found = await jobs.list_jobs(
            CALLER, status=status, before=before, limit=limit, scheduled=scheduled
        )
        return [view.job.job_id for view in found]

    newest_first = made[::-1]
    for kind in (True, False):
        wanted = [job_id for job_id, scheduled in newest_first if scheduled is kind]
        assert await ids(kind) == wanted
        assert await ids(kind, limit=2) == wanted[:2]
        assert await ids(kind, limit=2, before=wanted[0]) == wanted[1:3]
        assert await ids(kind, status=JobStatus.CLOSED) == wanted
        assert await ids(kind, status=JobStatus.OPEN) == []
    assert await ids(None) == [job_id for job_id, _ in newest_first]
    assert await ids(True, status=JobStatus.DELETED) == [gone]
    assert await ids(False, status=JobStatus.DELETED) == []


async def test_operations_on_runs_find_none_before_the_first_fire(jobs: Jobs, world: World) -> None:
    job = await schedule_job(world)
    runs = world.store.runs
    await refused(ErrorCode.NO_PRIOR_RUN, runs.stop_run(CALLER, job.job_id, now=world.now))
    await refused(
        ErrorCode.NO_PRIOR_RUN, runs.pause_run(CALLER, job.job_id, paused=True, now=world.now)
    )
    await refused(ErrorCode.NO_PRIOR_RUN, world.rerun(job.job_id))
    await refused(ErrorCode.JOB_NOT_OPEN, world.append(job.job_id, 1))
    view = await jobs.close_job(CALLER, job.job_id, now=world.now)
    assert (view.job, view.latest_run) == (job, None)


async def test_a_webhook_that_is_set_without_a_run_owes_nothing(
    jobs: Jobs, outbox: Outbox, world: World
) -> None:
    job = await schedule_job(world)
    after = await jobs.set_webhook(CALLER, job.job_id, HOOK, now=world.now)
    assert after == structs.replace(job, webhook=HOOK, webhook_number=1, version=job.version + 1)
    assert await read_job(world, job.job_id) == after
    assert await outbox.due_entries(now=world.now, limit=10) == []
    assert await due(world, now=world.now + HOUR) == [job.job_id]


# -- what is due --


async def test_what_is_due_comes_longest_due_first(world: World) -> None:
    made = [
        (await schedule_job(world, next_at=world.now + after * 1_000)).job_id
        for after in (5, 1, 3, 2, 4)
    ]
    in_order = [made[number] for number in (1, 3, 2, 4, 0)]
    theirs = await schedule_job(world, next_at=world.now + 6_000, of_job={"caller": STRANGER})
    await world.submit(1)

    assert await due(world) == []
    assert await due(world, now=world.now + 1_000) == in_order[:1]
    assert await due(world, now=world.now + 2_999) == in_order[:2]
    assert await due(world, now=world.now + 6_000) == [*in_order, theirs.job_id]
    assert await due(world, now=world.now + 6_000, limit=3) == in_order[:3]


async def test_a_due_job_comes_as_it_stands(schedules: Schedules, world: World) -> None:
    job = await schedule_job(world, of_job={"webhook": HOOK, "sealed_key": b"\x00"})
    assert await schedules.due_schedules(now=world.now + HOUR, limit=10) == [job]


async def test_a_job_without_a_further_fire_is_not_due(world: World) -> None:
    job = await schedule_job(world, schedule=ONCE, next_at=None)
    assert await due(world, now=1 << 50) == []
    await move(world, job.job_id, next_at=world.now)
    assert await due(world) == [job.job_id]
    await move(world, job.job_id, next_at=None)
    assert await due(world, now=1 << 50) == []
    assert await listed(world) == [job.job_id]


@pytest.mark.parametrize("next_at", [None, HOUR], ids=["no further fire", "a further fire"])
async def test_a_job_is_due_when_it_is_to_be_looked_at(world: World, next_at: int | None) -> None:
    """A fire that waits for the end of a run is looked at before, and after, the next one."""
    next_fire = None if next_at is None else world.now + next_at
    job = await schedule_job(world, next_at=next_fire, look_at=world.now + 5_000, waiting="then")
    assert await due(world, now=world.now + 4_999) == []
    assert await due(world, now=world.now + 5_000) == [job.job_id]
    await move(world, job.job_id, look_at=world.now + 2 * HOUR)
    assert await due(world, now=world.now + 2 * HOUR - 1) == []
    assert await due(world, now=world.now + 2 * HOUR) == [job.job_id]
    await move(world, job.job_id, look_at=None, waiting="")
    assert await due(world, now=world.now + HOUR) == ([] if next_at is None else [job.job_id])


async def test_a_paused_job_is_due_all_the_same(world: World) -> None:
    """The one that looks decides about a pause, and notes it."""
    job = await schedule_job(world, paused=True, next_at=world.now)
    assert await due(world) == [job.job_id]


async def test_a_changed_job_is_due_when_it_says_now(world: World) -> None:
    job = await schedule_job(world, next_at=world.now)
    await move(world, job.job_id, next_at=world.now + 5_000)
    assert await due(world) == []
    await move(world, job.job_id, next_at=world.now - 7 * 86_400_000)
    assert await due(world) == [job.job_id]
    assert await due(world, now=world.now - 8 * 86_400_000) == []


async def test_a_job_is_due_at_the_look_that_is_set_and_not_at_its_next_fire(world: World) -> None:
    waits = await schedule_job(world, next_at=world.now + HOUR, look_at=world.now + 5_000)
    put_off = await schedule_job(world, next_at=world.now, look_at=world.now + 6_000)
    over = await schedule_job(world, schedule=ONCE, next_at=None, look_at=world.now + 7_000)
    assert await due(world) == []
    later = world.now + 7_000
    assert await due(world, now=later) == [waits.job_id, put_off.job_id, over.job_id]
    await move(world, put_off.job_id, look_at=None)
    await move(world, over.job_id, look_at=None)
    assert await due(world, now=later) == [put_off.job_id, waits.job_id]


async def test_a_deleted_job_is_not_due_and_not_listed(jobs: Jobs, world: World) -> None:
    first, second = [await schedule_job(world, next_at=world.now) for _ in range(2)]
    before = await read_job(world, first.job_id)
    assert await jobs.delete_job(CALLER, first.job_id, now=world.now) == []
    assert await due(world) == [second.job_id]
    assert await listed(world) == [second.job_id]
    # Whoever looked before comes too late.
    after, run = with_run(world, before)
    change = ScheduleChange(before=before, after=after, run=run, fires=(note(world),))
    assert not await world.store.schedules.change_schedule(change)
    assert await due(world) == [second.job_id]
    assert (await read_job(world, first.job_id)).status is JobStatus.DELETED
    assert await world.store.runs.run_exists(run.run_id) is False


async def test_an_operation_on_the_job_moves_no_fire(jobs: Jobs, world: World) -> None:
    job = await schedule_job(world, next_at=world.now)
    await jobs.set_webhook(CALLER, job.job_id, HOOK, now=world.now)
    await fire(world, job.job_id)
    await world.store.runs.pause_run(CALLER, job.job_id, paused=True, now=world.now)
    await world.store.runs.stop_run(CALLER, job.job_id, now=world.now)
    assert await due(world, now=world.now + HOUR - 1) == []
    assert await due(world, now=world.now + HOUR) == [job.job_id]


async def test_schedules_are_listed_by_id_page_by_page(world: World) -> None:
    made = []
    for caller in (CALLER, STRANGER, CALLER):
        for next_at in (world.now + HOUR, None):
            job = await schedule_job(world, next_at=next_at, of_job={"caller": caller})
            made.append(job.job_id)
        await world.submit(1)
        await world.clock.advance(1)
    made.sort()
    assert await listed(world) == made
    assert await listed(world, limit=2) == made[:2]
    assert await listed(world, after=made[1], limit=3) == made[2:5]
    assert await listed(world, after=made[-1]) == []


# -- one step --


async def test_a_fire_is_one_step(schedules: Schedules, outbox: Outbox, world: World) -> None:
    job = await schedule_job(world, next_at=world.now, of_job={"webhook": HOOK})
    await world.clock.advance(2)
    after, run = with_run(world, job, next_at=world.now + HOUR, last_nominal="2026-01-01T01:00:00")
    missed = note(world, status=FireStatus.MISSED, count=3)
    started = note(world, run_id=run.run_id)
    change = ScheduleChange(before=job, after=after, run=run, fires=(missed, started))
    assert await schedules.change_schedule(change)

    view = await world.view(job.job_id)
    assert (view.job, view.latest_run) == (after, run)
    assert await world.run(job.job_id, run.run_id) == run
    assert (run.run_sequence, run.trigger, run.status) == (1, "scheduled", RunStatus.RUNNING)
    assert await schedules.list_fires(job.job_id, before=None, limit=10) == [started, missed]
    assert await outbox.due_entries(now=world.now, limit=10) == [
        EntryKey(run.run_id, Subscriber.WEBHOOK)
    ]
    assert await due(world) == []
    assert await due(world, now=world.now + HOUR) == [job.job_id]


async def test_the_run_of_a_fire_is_to_be_ingested(world: World) -> None:
    job = await schedule_job(world, template=template(5))
    run = await fire(world, job.job_id)
    found = await world.store.ingestion.ingesting(run.run_id)
    assert found is not None
    assert (found.job_id, found.live, found.rerun_of) == (job.job_id, True, None)
    assert found.ingest == run.ingest
    assert found.ingest.template
    assert found.ingest.status is IngestStatus.PENDING
    stuck = await world.store.ingestion.stuck_ingests(before=world.now + 1)
    assert stuck == [StuckIngest(job.job_id, run.run_id, template=True)]
    [dispatchable] = await world.store.runs.dispatchable_runs()
    assert dispatchable.run_id == run.run_id


async def test_a_fire_of_a_job_without_a_webhook_owes_nothing(outbox: Outbox, world: World) -> None:
    job = await schedule_job(world)
    await fire(world, job.job_id)
    assert await outbox.due_entries(now=world.now, limit=10) == []


async def test_runs_of_fires_are_numbered_and_the_newest_is_the_latest(world: World) -> None:
    job = await schedule_job(world, template=template(1))
    made = []
    for _ in range(3):
        made.append(await fire(world, job.job_id))
        await world.store.runs.stop_run(CALLER, job.job_id, now=world.now)
        await world.clock.advance(1)
    runs = await world.store.runs.list_runs(CALLER, job.job_id, before=None, limit=10)
    assert [(run.run_id, run.run_sequence) for run in runs] == [
        (run.run_id, number) for number, run in zip((3, 2, 1), made[::-1], strict=True)
    ]
    latest = (await world.view(job.job_id)).latest_run
    assert latest is not None
    assert latest.run_id == made[-1].run_id
    assert (await read_job(world, job.job_id)).run_count == 3


async def test_a_change_without_a_run_leaves_the_latest(world: World) -> None:
    job = await schedule_job(world, template=template(1))
    run = await fire(world, job.job_id)
    after = await move(world, job.job_id, paused=True, next_at=world.now + 7)
    view = await world.view(job.job_id)
    assert (view.job, view.latest_run) == (after, run)
    assert after.latest_run_id == run.run_id


async def test_a_fire_seals_the_key_anew(world: World) -> None:
    job = await schedule_job(world, of_job={"sealed_key": b"under the old secret"})
    after, run = with_run(world, job)
    after = structs.replace(after, sealed_key=b"\x00under the first secret")
    change = ScheduleChange(before=job, after=after, run=run)
    assert await world.store.schedules.change_schedule(change)
    assert await read_job(world, job.job_id) == after


async def test_a_change_of_another_version_changes_nothing(
    schedules: Schedules, outbox: Outbox, world: World
) -> None:
    before = await schedule_job(world, next_at=world.now, of_job={"webhook": HOOK})
    known = await move(world, before.job_id, next_at=world.now + 5_000)
    after, run = with_run(world, before, next_at=world.now + HOUR)
    change = ScheduleChange(before=before, after=after, run=run, fires=(note(world),))

    assert not await schedules.change_schedule(change)
    assert await read_job(world, before.job_id) == known
    assert await world.store.runs.run_exists(run.run_id) is False
    assert await schedules.list_fires(before.job_id, before=None, limit=10) == []
    assert await outbox.due_entries(now=world.now, limit=10) == []


async def test_a_job_that_is_gone_is_not_changed(
    schedules: Schedules, jobs: Jobs, world: World
) -> None:
    job = await schedule_job(world)
    await jobs.delete_job(CALLER, job.job_id, now=world.now)
    await jobs.purge_job(job.job_id)
    after, run = with_run(world, job)
    change = ScheduleChange(before=job, after=after, run=run, fires=(note(world),))
    assert not await schedules.change_schedule(change)
    assert await jobs.find_job(job.job_id) is None
    assert await world.store.runs.run_exists(run.run_id) is False
    assert await schedules.list_fires(job.job_id, before=None, limit=10) == []
    assert await listed(world) == []


async def test_one_of_many_fires(schedules: Schedules, outbox: Outbox, world: World) -> None:
    for number in range(1, 4):
        job = await schedule_job(
            world, next_at=world.now, template=template(1), of_job={"webhook": HOOK}
        )
        steps = []
        for _ in range(8):
            after, run = with_run(world, job, next_at=world.now + HOUR)
            row = note(world, run_id=run.run_id)
            steps.append(ScheduleChange(before=job, after=after, run=run, fires=(row,)))
        fired = await asyncio.gather(*(schedules.change_schedule(step) for step in steps))

        assert sum(fired) == 1
        winner = steps[fired.index(True)]
        view = await world.view(job.job_id)
        assert (view.job, view.latest_run) == (winner.after, winner.run)
        rows = await schedules.list_fires(job.job_id, before=None, limit=10)
        assert rows == list(winner.fires)
        runs = await world.store.runs.list_runs(CALLER, job.job_id, before=None, limit=10)
        assert runs == [winner.run]
        assert len(await outbox.due_entries(now=world.now, limit=100)) == number


async def test_one_of_many_has_a_change_that_all_write_the_same(
    schedules: Schedules, world: World
) -> None:
    job = await schedule_job(world)
    change = ScheduleChange(before=job, after=moved(world, job, paused=True))
    made = await asyncio.gather(*(schedules.change_schedule(change) for _ in range(8)))
    assert sum(made) == 1
    assert await read_job(world, job.job_id) == change.after


async def test_a_fire_and_whoever_sets_the_webhook_do_not_undo_each_other(
    schedules: Schedules, jobs: Jobs, world: World
) -> None:
    for _ in range(5):
        job = await schedule_job(world, template=template(1))
        after, run = with_run(world, job, next_at=world.now + HOUR)
        change = ScheduleChange(before=job, after=after, run=run)
        fired, _ = await asyncio.gather(
            schedules.change_schedule(change),
            jobs.set_webhook(CALLER, job.job_id, HOOK, now=world.now),
        )
        known = await read_job(world, job.job_id)
        assert known.webhook == HOOK
        assert known.version == job.version + 1 + fired
        assert known.latest_run_id == (run.run_id if fired else None)
        assert await world.store.runs.run_exists(run.run_id) is fired


async def test_many_jobs_fire_side_by_side(schedules: Schedules, world: World) -> None:
    made = [await schedule_job(world, next_at=world.now, template=template(1)) for _ in range(12)]

    async def worker() -> int:
        count = 0
        for job in await schedules.due_schedules(now=world.now, limit=100):
            after, run = with_run(world, job, next_at=world.now + HOUR)
            change = ScheduleChange(before=job, after=after, run=run)
            count += await schedules.change_schedule(change)
        return count

    assert sum(await asyncio.gather(*(worker() for _ in range(3)))) == len(made)
    assert await due(world) == []
    assert len(await world.store.runs.dispatchable_runs()) == len(made)


# -- answers --


async def _claim(world: World, key: IdempotencyScope, created_id: str) -> object:
    return await world.store.idempotency.claim_idempotency_key(
        key.scope,
        fingerprint=b"body",
        created_id=created_id,
        now=world.now,
        lapses_at=world.now + 60_000,
        expires_at=world.now + 86_400_000,
    )


async def test_an_answer_is_stored_with_its_change(schedules: Schedules, world: World) -> None:
    job, key = await schedule_job(world), IdempotencyScope("scope")
    after, run = with_run(world, job)
    await _claim(world, key, run.run_id)
    answer = StoredResponse(201, b'{"run":"\x00"}')
    stale = ScheduleChange(
        before=structs.replace(job, version=7), after=after, run=run, answer=answer, once=key
    )
    assert not await schedules.change_schedule(stale)
    assert isinstance(await _claim(world, key, run.run_id), KeyInUse)
    assert await schedules.change_schedule(structs.replace(stale, before=job))
    assert await _claim(world, key, run.run_id) == answer


async def test_a_request_that_was_answered_makes_no_second_run(
    schedules: Schedules, world: World
) -> None:
    job, key = await schedule_job(world, template=template(1)), IdempotencyScope("scope")
    after, run = with_run(world, job)
    await _claim(world, key, run.run_id)
    answer = StoredResponse(201, b"{}")
    change = ScheduleChange(before=job, after=after, run=run, answer=answer, once=key)
    assert await schedules.change_schedule(change)
    await world.store.runs.stop_run(CALLER, job.job_id, now=world.now)

    again, second = with_run(world, await read_job(world, job.job_id))
    late = ScheduleChange(before=after, after=again, run=second, answer=answer, once=key)
    await refused(ErrorCode.CONFLICT, schedules.change_schedule(late))
    assert await read_job(world, job.job_id) == after
    assert await world.store.runs.run_exists(second.run_id) is False


async def test_a_run_that_exists_is_not_made_again(schedules: Schedules, world: World) -> None:
    job = await schedule_job(world, template=template(1))
    run = await fire(world, job.job_id)
    known = await read_job(world, job.job_id)
    again, _ = with_run(world, known)
    again = structs.replace(again, latest_run_id=run.run_id)
    twin = structs.replace(run, run_sequence=2)
    await refused(
        ErrorCode.CONFLICT,
        schedules.change_schedule(ScheduleChange(before=known, after=again, run=twin)),
    )
    assert await read_job(world, job.job_id) == known
    assert await world.store.runs.list_runs(CALLER, job.job_id, before=None, limit=9) == [run]


# -- the record of fires --


async def test_fires_are_listed_newest_first_and_page_by_page(
    schedules: Schedules, world: World
) -> None:
    job, other = [await schedule_job(world) for _ in range(2)]
    rows = [note(world) for _ in range(7)]
    await note_fires(world, job.job_id, *rows[:4])
    await note_fires(world, other.job_id, note(world))
    await note_fires(world, job.job_id, *rows[4:])

    newest_first = rows[::-1]
    assert await schedules.list_fires(job.job_id, before=None, limit=100) == newest_first
    assert await schedules.list_fires(job.job_id, before=None, limit=3) == newest_first[:3]
    page = await schedules.list_fires(job.job_id, before=rows[4].fire_id, limit=3)
    assert page == newest_first[3:6]
    assert await schedules.list_fires(job.job_id, before=rows[0].fire_id, limit=3) == []
    assert len(await schedules.list_fires(other.job_id, before=None, limit=100)) == 1
    assert await schedules.list_fires(world.clock.new_id(), before=None, limit=100) == []


async def test_every_field_of_a_fire_is_kept(schedules: Schedules, world: World) -> None:
    job = await schedule_job(world)
    skipped = note(
        world,
        status=FireStatus.SKIPPED,
        reason=SkipReason.QUOTA_EXCEEDED,
        last_nominal="2026-01-01T09:00:00",
        last_instant=world.now + 8 * HOUR,
        noted_at=world.now + 1,
        count=9,
    )
    started = note(world, run_id="a run")
    await note_fires(world, job.job_id, skipped, started)
    found = await schedules.list_fires(job.job_id, before=None, limit=100)
    assert found == [started, skipped]


async def test_a_row_whose_id_is_there_replaces_that_row(
    schedules: Schedules, world: World
) -> None:
    job = await schedule_job(world)
    first = note(world, status=FireStatus.SKIPPED, reason=SkipReason.PAUSED)
    second = note(world, status=FireStatus.MISSED, count=4)
    await note_fires(world, job.job_id, first, second)
    more = structs.replace(first, count=2, last_instant=world.now + HOUR, noted_at=world.now + 9)
    third = note(world)
    await note_fires(world, job.job_id, more, third)
    found = await schedules.list_fires(job.job_id, before=None, limit=100)
    assert found == [third, second, more]
    # A field that has no value any more is gone.
    less = structs.replace(more, reason=None, count=1, status=FireStatus.STARTED, run_id="a run")
    await note_fires(world, job.job_id, less)
    assert (await schedules.list_fires(job.job_id, before=None, limit=100))[-1] == less


async def test_old_fires_go(schedules: Schedules, world: World, binding_kind: BindingKind) -> None:
    job, other = [await schedule_job(world) for _ in range(2)]
    old = [note(world, noted_at=world.now - 1 - number) for number in range(3)]
    border = note(world, noted_at=world.now)
    await note_fires(world, job.job_id, *old[:2], border)
    await note_fires(world, other.job_id, old[2])

    counts = [await schedules.drop_old_fires(before=world.now, limit=2) for _ in range(3)]
    left = await schedules.list_fires(job.job_id, before=None, limit=10)
    if binding_kind.ages_by_time_to_live:
        assert (counts, left) == ([0, 0, 0], [border, *old[1::-1]])
    else:
        assert (counts, left) == ([2, 1, 0], [border])
        assert await schedules.list_fires(other.job_id, before=None, limit=10) == []


async def test_fires_go_with_their_job(schedules: Schedules, jobs: Jobs, world: World) -> None:
    job, other = [await schedule_job(world, template=template(1)) for _ in range(2)]
    for number in range(30):
        await note_fires(world, job.job_id, note(world, count=number + 1))
    run = await fire(world, job.job_id)
    kept = note(world)
    await note_fires(world, other.job_id, kept)

    await jobs.purge_job(job.job_id)
    assert await jobs.delete_job(CALLER, job.job_id, now=world.now) == [run.run_id]
    await jobs.purge_job(job.job_id)
    assert len(await schedules.list_fires(job.job_id, before=None, limit=100)) == 31
    await world.store.runs.purge_run(run.run_id)
    await jobs.purge_job(job.job_id)
    assert await jobs.find_job(job.job_id) is None
    assert await schedules.list_fires(job.job_id, before=None, limit=100) == []
    assert await schedules.list_fires(other.job_id, before=None, limit=100) == [kept]
    assert await listed(world) == [other.job_id]


async def test_a_job_that_never_fired_is_removed_at_once(
    schedules: Schedules, jobs: Jobs, world: World
) -> None:
    job = await schedule_job(world)
    await note_fires(world, job.job_id, note(world, status=FireStatus.MISSED, count=3))
    assert await jobs.delete_job(CALLER, job.job_id, now=world.now) == []
    await jobs.purge_job(job.job_id)
    assert await jobs.find_job(job.job_id) is None
    assert await schedules.list_fires(job.job_id, before=None, limit=100) == []


async def test_an_anchored_rate_and_its_unit_are_kept(world: World) -> None:
    job = await schedule_job(world, schedule=Schedule(rate=Rate(90, "minute"), timezone="UTC"))
    after = await move(world, job.job_id, schedule=Schedule(rate=Rate(2, "day")), anchor=7)
    assert await read_job(world, job.job_id) == after
