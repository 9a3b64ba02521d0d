"""Schedules on DynamoDB: their entries in the index, lost answers, and many who fire at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from msgspec import structs

from conveyor.clock import SystemClock
from conveyor.dev.queues import LocalSignals, MemoryQueues
from conveyor.domain.api_keys import NONCE_LENGTH, KeySealer
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.fires import with_next_fire
from conveyor.domain.model import Job, JobStatus, RunStatus
from conveyor.domain.scheduling import FireStatus
from conveyor.domain.webhooks import Webhook
from conveyor.handlers.fire import Scheduler, SchedulerOptions, SchedulerPorts
from conveyor.ports.maintenance import StuckIngest
from conveyor.ports.outbox import Subscriber
from conveyor.ports.records import IdempotencyScope
from conveyor.ports.schedules import ScheduleChange
from conveyor.prod.dynamodb.client import Item
from conveyor.prod.dynamodb.schema import TIME_TO_LIVE, fire_key, job_key, place_key, schedules
from conveyor.prod.dynamodb.store import StoreTerms, open_store
from conveyor.testing.clock import FakeClock
from tests.conformance.bindings import Store
from tests.conformance.dynamo_records import (
    DB,
    TRANSACT,
    Bench,
    away,
    lose_every_answer,
    open_bench,
)
from tests.conformance.dynamo_schedules import (
    AT,
    DONE,
    HOUR,
    HOURLY,
    MADE,
    draft,
    due,
    finished,
    fire,
    fired,
    fires,
    listed,
    moved,
    run_ids,
    scheduled,
    skipped,
)
from tests.conformance.world import CALLER, World, refused

pytestmark = pytest.mark.extended

ONCE = IdempotencyScope("fire")


@pytest.fixture
async def bench(clock: FakeClock) -> AsyncIterator[Bench]:
    """An empty table with a process behind faults and one beside them."""
    async with open_bench(clock) as opened:
        yield opened


async def job_item(bench: Bench, job: Job) -> Item:
    """A job as it lies there."""
    item = await bench.table.get(job_key(job.job_id))
    assert item is not None
    return item


async def entry(bench: Bench, job: Job) -> tuple[object, object]:
    """The index keys of a job as it lies there."""
    item = await job_item(bench, job)
    return item.get("gsi2pk"), item.get("gsi2sk")


# -- the index --


async def test_every_change_of_a_job_keeps_its_entry_in_the_index_right(bench: Bench) -> None:
    world, store = bench.world, bench.store
    job = await scheduled(world)
    partition = schedules(job.job_id)
    assert await entry(bench, job) == (partition, f"{world.now:015}#{job.job_id}")

    after = await fired(world, job)
    later = (partition, f"{world.now + HOUR:015}#{job.job_id}")
    assert await entry(bench, job) == later
    [run_id] = await run_ids(world, job.job_id)
    await store.runs.stop_run(CALLER, job.job_id, now=world.now)
    await store.runs.delete_run(CALLER, job.job_id, run_id, now=world.now)
    assert await entry(bench, job) == later

    view = await world.view(job.job_id)
    assert view.job.version > after.version
    ended = moved(view.job, next_at=None)
    assert await store.schedules.change_schedule(ScheduleChange(before=view.job, after=ended))
    assert await entry(bench, job) == (partition, f"~#{job.job_id}")

    await store.jobs.delete_job(CALLER, job.job_id, now=world.now)
    assert await entry(bench, job) == (None, None)
    assert await listed(world) == await due(world) == []


async def test_a_regular_job_is_in_no_partition_of_schedules(bench: Bench) -> None:
    job_id, _ = await bench.world.submit(1, closed=False)
    await bench.store.jobs.close_job(CALLER, job_id, now=bench.world.now)
    assert "gsi2pk" not in await job_item(bench, (await bench.world.view(job_id)).job)


async def test_what_the_index_says_of_a_job_is_checked_by_the_job(bench: Bench) -> None:
    """An index lags behind, and an older version deletes a job without its entry."""
    world = bench.world
    done, gone, due_now = [await scheduled(world) for _ in range(3)]
    await fired(world, done)
    await bench.store.jobs.delete_job(CALLER, gone.job_id, now=world.now)
    for job in (done, gone):
        await bench.table.update(
            job_key(job.job_id),
            "SET gsi2pk = :partition, gsi2sk = :place",
            condition="attribute_exists(pk)",
            partition=schedules(job.job_id),
            place=f"{0:015}#{job.job_id}",
        )

    for limit in (1, 2, 10):
        assert await due(world, limit=limit) == [due_now.job_id]
    assert await listed(world) == sorted([done.job_id, due_now.job_id])


async def test_the_longest_due_come_first_over_all_partitions(bench: Bench) -> None:
    world = bench.world
    jobs = [await scheduled(world, next_at=world.now - number) for number in range(12)]
    await scheduled(world, next_at=world.now + 1)
    await scheduled(world, next_at=None)
    assert len({schedules(job.job_id) for job in jobs}) > 1

    wanted = [job.job_id for job in reversed(jobs)]
    assert await due(world) == wanted
    bench.faults.calls.clear()
    assert await due(world, limit=5) == wanted[:5]
    # A page of each partition, and no more jobs than are wanted.
    assert bench.faults.calls == [(DB, "query")] * 4 + [(DB, "batch_get_item")]


async def test_schedules_are_listed_by_id_with_those_that_fire_no_more(bench: Bench) -> None:
    world = bench.world
    jobs = [
        await scheduled(world, next_at=None if number % 3 else world.now - number, caller=caller)
        for number, caller in enumerate(["one", "two", CALLER] * 4)
    ]
    wanted = sorted(job.job_id for job in jobs)

    found: list[str] = []
    while page := await listed(world, after=found[-1] if found else "", limit=5):
        found += page
    assert found == wanted


# -- jobs without a run --


async def test_a_job_without_a_run_is_made_once_although_answers_are_lost(bench: Bench) -> None:
    lose_every_answer(bench)
    await bench.key("fire")
    job = await scheduled(bench.world, once=ONCE)

    view = await bench.other.view(job.job_id)
    assert (view.job, view.latest_run) == (job, None)
    assert await bench.key("fire") == MADE
    again = bench.store.jobs.create_job(job, None, [], answer=MADE, once=None)
    await refused(ErrorCode.CONFLICT, again)


async def test_of_two_submits_under_one_key_one_makes_its_job(bench: Bench) -> None:
    world = bench.world
    await bench.key("fire")
    bench.faults.before(DB, TRANSACT, lambda: _submit(bench.other, ONCE))

    await refused(ErrorCode.CONFLICT, _submit(world, ONCE))
    assert bench.faults.fired == 1
    assert len(await listed(world)) == 1


async def test_a_job_whose_key_is_gone_is_made_all_the_same(bench: Bench) -> None:
    await bench.key("fire")
    bench.faults.before(DB, TRANSACT, lambda: bench.release("fire"))

    await _submit(bench.world, ONCE)
    assert bench.faults.fired == 1
    assert len(await listed(bench.world)) == 1


async def _submit(world: World, once: IdempotencyScope) -> None:
    await scheduled(world, once=once)


async def test_a_job_that_never_ran_is_deleted_and_purged(bench: Bench) -> None:
    lose_every_answer(bench)
    world, jobs = bench.world, bench.store.jobs
    job = await scheduled(world)
    row = skipped(world, world.now)
    change = ScheduleChange(before=job, after=moved(job, next_at=None), fires=(row,))
    assert await bench.store.schedules.change_schedule(change)

    await jobs.purge_job(job.job_id)
    assert await fires(world, job.job_id) == [row]
    assert await jobs.delete_job(CALLER, job.job_id, now=world.now) == []
    assert await jobs.delete_job(CALLER, job.job_id, now=world.now) == []
    await jobs.purge_job(job.job_id)
    assert await jobs.find_job(job.job_id) is None
    assert await fires(world, job.job_id) == []


async def test_a_purge_that_was_cut_off_is_ended_by_the_next(bench: Bench) -> None:
    world, jobs = bench.world, bench.store.jobs
    job = await fired(world, await scheduled(world))
    [run_id] = await jobs.delete_job(CALLER, job.job_id, now=world.now)
    await jobs.purge_job(job.job_id)
    assert len(await fires(world, job.job_id)) == 1

    await bench.store.runs.purge_run(run_id)
    bench.faults.fail(DB, "delete_item", away())
    with pytest.raises(ConveyorError, match="away"):
        await jobs.purge_job(job.job_id)
    assert await jobs.find_job(job.job_id) is not None
    await jobs.purge_job(job.job_id)
    assert await jobs.find_job(job.job_id) is None
    assert await fires(world, job.job_id) == []


async def test_jobs_are_listed_by_kind(bench: Bench) -> None:
    world, jobs = bench.world, bench.store.jobs
    regular, _ = await world.submit(1)
    idle = await scheduled(world, next_at=None)
    running = await fired(world, await scheduled(world))
    await scheduled(world, caller="another")
    gone = await scheduled(world)
    await jobs.delete_job(CALLER, gone.job_id, now=world.now)
    second, _ = await world.submit(1)

    async def found(scheduled: bool | None, limit: int = 10) -> list[str]:
        views = await jobs.list_jobs(
            CALLER, status=None, before=None, limit=limit, scheduled=scheduled
        )
        return [view.job.job_id for view in views]

    assert await found(True) == [running.job_id, idle.job_id]
    assert await found(False) == [second, regular]
    assert await found(None) == [second, running.job_id, idle.job_id, regular]
    assert await found(True, limit=1) == [running.job_id]
    [deleted] = await jobs.list_jobs(
        CALLER, status=JobStatus.DELETED, before=None, limit=10, scheduled=True
    )
    assert (deleted.job.job_id, deleted.latest_run) == (gone.job_id, None)


async def test_jobs_of_both_kinds_are_paged_together_and_each_kind_reads_its_own(
    bench: Bench,
) -> None:
    world, jobs = bench.world, bench.store.jobs
    made = [
        (await world.submit(1))[0] if number % 3 else (await scheduled(world)).job_id
        for number in range(14)
    ]

    found: list[str] = []
    while page := await jobs.list_jobs(
        CALLER, status=None, before=found[-1] if found else None, limit=4
    ):
        found += [view.job.job_id for view in page]
    assert found == made[::-1]
    bench.faults.calls.clear()
    assert len(await jobs.list_jobs(CALLER, status=None, before=None, limit=9, scheduled=True)) == 5
    # The index, and the jobs: no run of them is there.
    assert bench.faults.calls == [(DB, "query"), (DB, "batch_get_item")]


# -- changes --


async def test_a_fire_makes_one_run_although_every_answer_is_lost_once(bench: Bench) -> None:
    lose_every_answer(bench)
    world = bench.world
    job = await scheduled(world)
    await bench.key("fire")
    change = structs.replace(fire(world, job), answer=DONE, once=ONCE)
    assert await bench.store.schedules.change_schedule(change)

    view = await bench.other.view(job.job_id)
    assert (view.job, view.latest_run) == (change.after, change.run)
    assert await fires(bench.other, job.job_id) == list(change.fires)
    assert await bench.key("fire") == DONE
    assert bench.faults.fired >= 2
    assert not await bench.store.schedules.change_schedule(fire(world, job))
    assert await run_ids(world, job.job_id) == [view.job.latest_run_id]


async def test_a_fire_that_was_never_answered_is_not_made_again(bench: Bench) -> None:
    world = bench.world
    job = await scheduled(world)
    bench.faults.vanish(DB, TRANSACT)
    with pytest.raises(ConveyorError):
        await bench.store.schedules.change_schedule(fire(world, job))

    assert not await bench.store.schedules.change_schedule(fire(world, job))
    assert await due(world) == []
    [row] = await fires(world, job.job_id)
    assert await run_ids(world, job.job_id) == [row.run_id]


@pytest.mark.parametrize("weather", [lambda _bench: None, lose_every_answer])
async def test_of_many_who_fire_at_once_one_does(
    bench: Bench, weather: Callable[[Bench], None]
) -> None:
    weather(bench)
    world = bench.world
    job = await scheduled(world)
    worlds = [bench.world, bench.other] * 4
    done = await asyncio.gather(
        *(one.store.schedules.change_schedule(fire(one, job)) for one in worlds)
    )

    assert sum(done) == 1
    [row] = await fires(world, job.job_id)
    assert await run_ids(world, job.job_id) == [row.run_id]


async def test_of_many_who_write_the_same_one_does(bench: Bench) -> None:
    job = await scheduled(bench.world)
    change = ScheduleChange(before=job, after=moved(job, next_at=None))
    worlds = [bench.world, bench.other] * 4
    done = await asyncio.gather(*(one.store.schedules.change_schedule(change) for one in worlds))

    assert sum(done) == 1


@pytest.mark.parametrize("other", ["fire", "change", "delete", "purge"])
async def test_a_fire_that_comes_too_late_leaves_nothing(bench: Bench, other: str) -> None:
    world, second = bench.world, bench.other
    job = await scheduled(world)
    mine = fire(world, job)
    assert mine.run is not None

    async def be_first() -> None:
        match other:
            case "fire":
                await fired(second, job)
            case "change":
                change = ScheduleChange(before=job, after=moved(job, next_at=None))
                assert await second.store.schedules.change_schedule(change)
            case _:
                await second.store.jobs.delete_job(CALLER, job.job_id, now=world.now)
                if other == "purge":
                    await second.store.jobs.purge_job(job.job_id)

    bench.faults.before(DB, TRANSACT, be_first)
    assert not await bench.store.schedules.change_schedule(mine)
    assert bench.faults.fired == 1
    assert await bench.table.get(place_key(mine.run.run_id)) is None
    assert mine.run.run_id not in await run_ids(world, job.job_id)
    assert mine.fires[0] not in await fires(world, job.job_id)


async def test_a_rerun_takes_the_number_that_a_fire_wanted(bench: Bench) -> None:
    world = bench.world
    job = await fired(world, await scheduled(world))
    await finished(world, job)

    async def rerun() -> None:
        await bench.other.rerun(job.job_id, large_from=1)

    bench.faults.before(DB, TRANSACT, rerun)
    assert not await bench.store.schedules.change_schedule(fire(world, job))
    first, second = await run_ids(world, job.job_id)
    view = await world.view(job.job_id)
    assert (view.job.latest_run_id, view.job.run_count) == (second, 2)
    assert first == job.latest_run_id
    assert view.job.scheduling == job.scheduling


async def test_a_change_under_a_key_that_was_answered_meanwhile_is_refused(bench: Bench) -> None:
    world = bench.world
    job = await scheduled(world)
    await bench.key("fire")
    change = structs.replace(fire(world, job), answer=DONE, once=ONCE)
    bench.faults.before(DB, TRANSACT, lambda: _submit(bench.other, ONCE))

    await refused(ErrorCode.CONFLICT, bench.store.schedules.change_schedule(change))
    assert await run_ids(world, job.job_id) == []
    assert await bench.key("fire") == MADE


async def test_a_change_whose_key_is_gone_is_made_all_the_same(bench: Bench) -> None:
    world = bench.world
    job = await scheduled(world)
    await bench.key("fire")
    bench.faults.before(DB, TRANSACT, lambda: bench.release("fire"))
    change = structs.replace(fire(world, job), answer=DONE, once=ONCE)

    assert await bench.store.schedules.change_schedule(change)
    assert len(await run_ids(world, job.job_id)) == 1


async def test_each_fired_run_of_a_job_with_a_webhook_has_an_entry_in_the_outbox(
    bench: Bench,
) -> None:
    lose_every_answer(bench)
    world = bench.world
    job = await scheduled(world, webhook=Webhook(url="https://a.test/hook", signature=False))
    plain = await fired(world, await scheduled(world))
    runs = []
    for _ in range(2):
        job = await fired(world, job)
        runs.append(job.latest_run_id)
        await bench.store.runs.stop_run(CALLER, job.job_id, now=world.now)

    entries = await bench.other.store.outbox.due_entries(now=world.now, limit=10)
    assert sorted(entries) == sorted((run_id, Subscriber.WEBHOOK) for run_id in runs)
    assert plain.latest_run_id not in runs
    leased = await bench.other.store.outbox.lease_entry(
        entries[0], now=world.now, lapses_at=world.now + HOUR
    )
    assert leased is not None
    assert (leased.job_id, leased.ended_as) == (job.job_id, RunStatus.STOPPED)


async def test_a_job_waits_at_the_time_when_it_is_looked_at(bench: Bench) -> None:
    world = bench.world
    job = await scheduled(world)
    assert job.scheduling is not None
    later = structs.replace(job.scheduling, look_at=world.now + 5_000)
    after = structs.replace(job, scheduling=later, version=2)
    assert await bench.store.schedules.change_schedule(ScheduleChange(before=job, after=after))
    assert await due(world) == []
    await world.clock.advance(5)
    assert await due(world) == [job.job_id]


async def test_a_fired_run_works_and_ends_as_any_other(bench: Bench) -> None:
    world = bench.world
    job = await fired(world, await scheduled(world))
    run = await world.run(job.job_id)
    assert run.ingest is not None
    assert run.ingest.template
    assert [one.run_id for one in await bench.store.runs.dispatchable_runs()] == [run.run_id]
    assert await bench.store.ingestion.stuck_ingests(before=world.now + 1) == [
        StuckIngest(job.job_id, run.run_id, template=True)
    ]
    await finished(world, job)
    assert (await world.run(job.job_id)).status is RunStatus.COMPLETED


# -- the rows of fires --


async def test_a_row_is_kept_for_its_retention_after_its_last_change(bench: Bench) -> None:
    world = bench.world
    job = await scheduled(world)
    first = skipped(world, world.now)
    after = moved(job, next_at=world.now + HOUR)
    change = ScheduleChange(before=job, after=after, fires=(first,))
    assert await bench.store.schedules.change_schedule(change)
    await world.clock.advance(7.5)
    more = structs.replace(first, count=2, last_instant=world.now, noted_at=world.now)
    last = moved(after, next_at=None)
    change = ScheduleChange(before=after, after=last, fires=(more,))
    assert await bench.store.schedules.change_schedule(change)

    assert await fires(world, job.job_id) == [more]
    item = await bench.table.get(fire_key(job.job_id, first.fire_id))
    assert item is not None
    kept_until = world.now + 30 * 24 * HOUR
    assert kept_until <= item[TIME_TO_LIVE] * 1_000 < kept_until + 1_000
    assert await bench.store.schedules.drop_old_fires(before=2**60, limit=10) == 0


async def test_the_retention_of_rows_is_the_stores(bench: Bench) -> None:
    world = bench.world
    kept = await open_store(
        bench.faults,
        table=bench.table.name,
        clock=SystemClock(),
        worker="w",
        terms=StoreTerms(fire_days=2),
    )
    job = await scheduled(world)
    row = skipped(world, world.now)
    change = ScheduleChange(before=job, after=moved(job, next_at=None), fires=(row,))
    assert await kept.schedules.change_schedule(change)
    await kept.aclose()

    item = await bench.table.get(fire_key(job.job_id, row.fire_id))
    assert item is not None
    assert item[TIME_TO_LIVE] - world.now // 1_000 in (172_800, 172_801)


async def test_rows_are_paged_newest_first(bench: Bench) -> None:
    world = bench.world
    job = await scheduled(world)
    other = await scheduled(world)
    rows = [skipped(world, world.now + number) for number in range(7)]
    for one, mine in ((job, tuple(rows)), (other, (skipped(world, world.now),))):
        change = ScheduleChange(before=one, after=moved(one, next_at=None), fires=mine)
        assert await bench.store.schedules.change_schedule(change)

    found = []
    before = None
    while page := await bench.store.schedules.list_fires(job.job_id, before=before, limit=3):
        found += page
        before = page[-1].fire_id
    assert found == rows[::-1]


# -- retention --


@pytest.mark.parametrize(
    ("schedule", "next_at", "stays"),
    [("at", None, False), ("at", 1, True), ("rate", 1, True), ("rate", None, True)],
)
async def test_retention_takes_runs_and_leaves_jobs_that_may_fire(
    bench: Bench, schedule: str, next_at: int | None, stays: bool
) -> None:
    lose_every_answer(bench)
    world = bench.world
    rule = AT if schedule == "at" else HOURLY
    job = await fired(world, await scheduled(world, schedule=rule))
    change = ScheduleChange(before=job, after=moved(job, next_at=next_at))
    assert await bench.store.schedules.change_schedule(change)
    await finished(world, job)
    run = await world.run(job.job_id)
    assert await bench.store.sweeping.expire_run(run.run_id, now=world.now) == [run.run_id]
    view = await world.view(job.job_id)
    assert view.job.latest_run_id is None
    assert view.job.status is (JobStatus.CLOSED if stays else JobStatus.DELETED)
    assert await listed(world) == ([job.job_id] if stays else [])
    if stays:
        assert view.latest_run is None
        again = await fired(world, structs.replace(view.job, scheduling=job.scheduling))
        assert (again.run_count, len(await run_ids(world, job.job_id))) == (2, 1)


# -- many workers --


async def test_many_workers_make_one_run_of_each_of_many_schedules(bench: Bench) -> None:
    """Four workers over one table; some writes of three of them are answered late or never. Then
    the clock is set back."""
    clock = bench.world.clock
    secret = (b"a root secret",)
    more = [
        await open_store(
            bench.faults, table=bench.table.name, clock=SystemClock(), worker=f"worker-{number}"
        )
        for number in range(2)
    ]
    stores: list[Store] = [bench.store, bench.other.store, *more]
    sealed = KeySealer(secret).seal("key", caller=CALLER, nonce=clock.token(NONCE_LENGTH))
    jobs = [due_now(bench.world, sealed) for _ in range(MANY)]
    create = bench.other.store.jobs.create_job
    await asyncio.gather(*(create(job, None, [], answer=MADE, once=None) for job in jobs))
    for nth in range(1, 3 * MANY, 10):
        bench.faults.lose_answer(DB, TRANSACT, nth=nth)
        bench.faults.vanish(DB, TRANSACT, nth=nth + 5)
    workers = [worker_of(store, clock, secret) for store in stores]

    await asyncio.gather(*(worker.fire() for worker in workers))
    while await due(bench.other):
        await workers[1].fire()
    runs = [await run_ids(bench.other, job.job_id) for job in jobs]
    assert [len(one) for one in runs] == [1] * MANY
    rows = [await fires(bench.other, job.job_id) for job in jobs]
    assert [[(row.status, row.run_id) for row in one] for one in rows] == [
        [(FireStatus.STARTED, run_id)] for [run_id] in runs
    ]
    # A fire whose answer was lost for good is counted by nobody.
    assert MANY / 2 < sum(worker.outcomes.get("started", 0) for worker in workers) <= MANY
    assert bench.faults.fired > 0
    assert len(await bench.other.store.runs.dispatchable_runs()) == MANY

    clock.shift(-3 * HOUR / 1_000)
    await asyncio.gather(*(worker.fire() for worker in workers))
    assert [await run_ids(bench.other, job.job_id) for job in jobs] == runs
    for store in more:
        await store.aclose()


MANY = 60


def due_now(world: World, sealed_key: bytes) -> Job:
    """A job that fires each hour, and now; not written yet."""
    job = draft(world, sealed_key=sealed_key)
    assert job.scheduling is not None
    began = world.now - HOUR
    scheduling = with_next_fire(structs.replace(job.scheduling, anchor=began), after=began)
    assert scheduling.next_at == world.now
    return structs.replace(job, scheduling=scheduling)


def worker_of(store: Store, clock: FakeClock, secrets: tuple[bytes, ...]) -> Scheduler:
    """The scheduler of a worker."""
    ports = SchedulerPorts(
        schedules=store.schedules,
        jobs=store.jobs,
        runs=store.runs,
        queues=MemoryQueues(store.tasks.unfinished_after, clock),
        signals=LocalSignals(),
        sealer=KeySealer(secrets),
    )
    options = SchedulerOptions(interval=5.0, catch_up=7 * 86_400.0, max_active_jobs=0)
    return Scheduler(ports, clock, options=options)
