"""Rows of a shape that this version does not know: nothing of them is shown or touched, and nothing
beside them fails for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable

import msgspec
import pytest
from msgspec import structs

from conveyor.domain import ids
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.input_spec import InputType
from conveyor.domain.model import Job, RunFailure, RunStatus, TaskStatus
from conveyor.domain.shards import ONE_SHARD
from conveyor.http.problems import problem_response
from conveyor.ports.inputs import JobInput
from conveyor.ports.records import KeyClaim
from conveyor.ports.schedules import ScheduleChange
from conveyor.prod.dynamodb import client
from conveyor.prod.dynamodb.client import RETRY_AFTER, NewerRow
from conveyor.prod.dynamodb.schema import (
    ROW_SHAPE,
    UNSPREAD_INTENTS,
    Key,
    by_time,
    export_item_key,
    fire_key,
    idempotency_key,
    input_item_key,
    intent_key,
    job_key,
    run_key,
    task_key,
)
from conveyor.prod.dynamodb.sweeping import PATIENCE
from conveyor.testing.clock import FakeClock
from tests.conformance.dynamo_schedules import (
    due,
    finished,
    fire,
    fired,
    fires,
    listed,
    moved,
    scheduled,
    skipped,
)
from tests.conformance.dynamo_versions import (
    Versions,
    export_of,
    open_versions,
    pause,
)
from tests.conformance.world import CALLER, World, all_ended

pytestmark = pytest.mark.extended

HOUR = 3_600_000
DAY = 24 * HOUR
FAILED = TaskStatus.FAILED


@pytest.fixture
async def versions(clock: FakeClock) -> AsyncIterator[Versions]:
    """An empty table, and processes of three versions."""
    async with open_versions(clock) as opened:
        yield opened


def slot(input_id: str, *, expires_at: int) -> JobInput:
    return JobInput(
        input_id=input_id,
        caller=CALLER,
        type=InputType.URLS,
        content_type="text/plain",
        created_at=1,
        upload_until=expires_at,
        expires_at=expires_at,
    )


async def claim_key(world: World) -> KeyClaim:
    return await world.store.idempotency.claim_idempotency_key(
        "scope",
        fingerprint=b"",
        created_id="ID",
        now=world.now,
        lapses_at=world.now + 1,
        expires_at=world.now + DAY,
    )


async def untouched(versions: Versions, key: Key, *acts: Awaitable[object]) -> None:
    """Each act is refused for an item of a higher shape, and changes nothing of it."""
    before = await versions.item(key)
    for act in acts:
        with pytest.raises(NewerRow):
            await act
        assert await versions.item(key) == before


async def test_a_job_of_a_higher_shape_is_neither_shown_nor_changed(versions: Versions) -> None:
    job_id, run_id = await versions.newer.submit(1, closed=False)
    other_id, _ = await versions.today.submit(1)
    await versions.raise_shape(job_key(job_id))
    world, store = versions.today, versions.today.store
    await untouched(
        versions,
        job_key(job_id),
        world.view(job_id),
        store.jobs.find_job(job_id),
        world.append(job_id, 1),
        store.jobs.close_job(CALLER, job_id, now=world.now),
        store.runs.stop_run(CALLER, job_id, now=world.now),
        pause(world, job_id, paused=True),
        world.rerun(job_id),
        store.jobs.delete_job(CALLER, job_id, now=world.now),
        store.runs.delete_run(CALLER, job_id, run_id, now=world.now),
    )
    listed = await store.jobs.list_jobs(CALLER, status=None, before=None, limit=10)
    assert [view.job.job_id for view in listed] == [other_id]


async def test_a_run_of_a_higher_shape_is_neither_shown_nor_changed(versions: Versions) -> None:
    job_id, run_id = await versions.newer.submit(2, closed=False)
    world, store = versions.today, versions.today.store
    claimed = await world.claimed(run_id, 0)
    export = export_of(world, job_id, run_id)
    await store.exports.create_export(export)
    key = run_key(job_id, 1)
    await versions.raise_shape(key)
    await untouched(
        versions,
        key,
        world.view(job_id),
        world.run(job_id, run_id),
        world.run(job_id),
        world.append(job_id, 1),
        store.jobs.close_job(CALLER, job_id, now=world.now),
        store.runs.stop_run(CALLER, job_id, now=world.now),
        store.runs.fail_run(run_id, reason=RunFailure.INGEST_FAILED, detail="", now=world.now),
        store.jobs.delete_job(CALLER, job_id, now=world.now),
        store.exports.create_export(export_of(world, job_id, run_id)),
        store.exports.begin_export(export.export_id, now=world.now),
        store.exports.end_export(export.export_id, size=1, error=None, now=world.now),
        world.settle(claimed, world.success(claimed)),
        store.ingestion.ingesting(run_id),
        store.tasks.scrub_tasks(run_id, 10),
        store.runs.purge_run(run_id),
    )
    # Whoever made the claim gives it back: the task is left to those that know its run.
    await untouched(versions, key, world.claim(run_id, 1))
    await store.tasks.release_claim(run_id, ids.task_id(run_id, 1), worker="worker")
    task = await versions.item(task_key(job_id, run_id, ids.task_id(run_id, 1), ONE_SHARD))
    assert (task["status"], task["attempts"], task["events"]) == ("pending", 0, [])


async def test_a_task_of_a_higher_shape_is_neither_claimed_nor_shown(versions: Versions) -> None:
    job_id, run_id = await versions.newer.submit(3)
    world, store = versions.today, versions.today.store
    held = await world.claimed(run_id, 1)
    for index in (0, 1):
        key = task_key(job_id, run_id, ids.task_id(run_id, index), ONE_SHARD)
        await versions.raise_shape(key)
        renewed = [(run_id, held.task_id, held.claim_number)]
        await untouched(
            versions,
            key,
            world.claim(run_id, index),
            store.tasks.release_claim(run_id, ids.task_id(run_id, index), worker="worker"),
            store.tasks.get_task(run_id, ids.task_id(run_id, index)),
            store.tasks.task_history(run_id, ids.task_id(run_id, index)),
            # A page is whole or none at all: nobody is to miss a result without knowing.
            world.rows(run_id),
        )
    await untouched(
        versions,
        key,
        world.settle(held, world.success(held)),
        store.tasks.renew_claims(renewed, claimed_until=world.now + HOUR),
    )
    await world.succeed(run_id, 2)
    assert (await world.run(job_id)).stats.successful == 1


async def test_other_records_of_a_higher_shape_are_left_alone(versions: Versions) -> None:
    job_id, run_id = await versions.today.submit(1)
    world, store = versions.today, versions.today.store
    export = export_of(world, job_id, run_id)
    await store.exports.create_export(export)
    await store.inputs.create_input(slot("INPUT", expires_at=world.now + 1))
    await claim_key(world)
    for key, acts in (
        (
            export_item_key(export.export_id),
            [
                store.exports.get_export(export.export_id),
                store.exports.begin_export(export.export_id, now=world.now),
                store.exports.drop_export(export.export_id),
            ],
        ),
        (
            input_item_key("INPUT"),
            [
                store.inputs.get_input("INPUT"),
                store.inputs.input_uploaded("INPUT", size=3),
                store.inputs.drop_input("INPUT"),
            ],
        ),
        (
            idempotency_key("scope"),
            [
                claim_key(world),
                store.idempotency.release_idempotency_key(
                    "scope", created_id="ID", lapses_at=world.now + 1
                ),
            ],
        ),
    ):
        await versions.raise_shape(key)
        await untouched(versions, key, *acts)
    await world.clock.advance(2 * HOUR / 1000)
    assert await store.inputs.expired_inputs(now=world.now, limit=1) == []
    assert await store.exports.expired_exports(now=world.now, limit=1) == []
    assert await store.exports.unfinished_exports(before=world.now) == []


async def test_what_has_expired_is_found_behind_what_is_not_known(versions: Versions) -> None:
    world, inputs = versions.today, versions.today.store.inputs
    for number in range(5):
        await inputs.create_input(slot(f"INPUT{number}", expires_at=world.now + number))
    for number in range(3):
        await versions.raise_shape(input_item_key(f"INPUT{number}"))
    assert await inputs.expired_inputs(now=world.now + 9, limit=1) == ["INPUT3"]


async def test_sweeps_and_lists_pass_over_runs_of_a_higher_shape(versions: Versions) -> None:
    world, store = versions.today, versions.today.store
    jobs = [await world.submit(2) for _ in range(2)]
    for job_id, run_id in jobs:
        await world.fail(run_id, 0)
        await world.succeed(run_id, 1)
        await world.rerun(job_id, FAILED)
    (newer_id, newer_run), (job_id, first_run) = jobs
    second = await world.run(job_id)
    await versions.raise_shape(run_key(newer_id, 2))
    assert [
        view.job.job_id
        for view in await store.jobs.list_jobs(CALLER, status=None, before=None, limit=10)
    ] == [job_id]
    assert [
        run.run_id for run in await store.runs.list_runs(CALLER, newer_id, before=None, limit=10)
    ] == [newer_run]
    newer = msgspec.json.decode((await versions.item(job_key(newer_id)))["job"], type=Job)
    assert newer.latest_run_id is not None
    assert await store.runs.dispatchable_run(newer.latest_run_id) is None
    await world.clock.advance(3 * 86_400)
    quiet = await store.sweeping.quiet_runs(before=world.now)
    assert [run.run_id for run in quiet] == [second.run_id]
    await world.store.runs.stop_run(CALLER, job_id, now=world.now)
    await world.clock.advance(86_400)
    ended = await all_ended(store, world.now)
    # A run that another draws on counts with it, so one of a higher shape keeps its source.
    assert [run.run_id for run in ended] == sorted([first_run, second.run_id])
    assert await store.sweeping.expire_run(newer_run, now=world.now) == []
    assert await store.sweeping.expire_run(first_run, now=world.now) == [first_run]


async def test_a_schedule_of_a_higher_shape_is_left_to_those_that_know_it(
    versions: Versions,
) -> None:
    world, store = versions.today, versions.today.store
    newer = await scheduled(versions.newer, next_at=world.now - 1)
    job = await scheduled(world)
    await versions.raise_shape(job_key(newer.job_id))
    await untouched(
        versions,
        job_key(newer.job_id),
        store.schedules.change_schedule(fire(world, newer)),
        store.jobs.delete_job(CALLER, newer.job_id, now=world.now),
    )
    for limit in (1, 10):
        assert await due(world, limit=limit) == [job.job_id]
        assert await listed(world, limit=limit) == [job.job_id]


async def test_a_fire_of_a_higher_shape_is_neither_shown_nor_written_over(
    versions: Versions,
) -> None:
    world, store = versions.today, versions.today.store
    job = await scheduled(world)
    first, second = (skipped(world, world.now) for _ in range(2))
    after = moved(job, next_at=world.now)
    change = ScheduleChange(before=job, after=after, fires=(first, second))
    assert await store.schedules.change_schedule(change)
    key = fire_key(job.job_id, first.fire_id)
    await versions.raise_shape(key)

    assert await fires(world, job.job_id) == [second]
    more = structs.replace(first, count=2)
    change = ScheduleChange(before=after, after=moved(after, next_at=None), fires=(more,))
    await untouched(versions, key, store.schedules.change_schedule(change))
    assert await due(world) == [job.job_id]
    await store.jobs.delete_job(CALLER, job.job_id, now=world.now)
    await store.jobs.purge_job(job.job_id)
    assert await versions.items() == []


async def test_a_run_is_left_to_versions_with_schedules_while_it_is_written_from_a_template(
    versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions that know the first shape only would look for its rows in the wrong place, and fail
    the run."""
    world, store = versions.today, versions.today.store
    job = await fired(world, await scheduled(world))
    run_id = job.latest_run_id
    assert run_id is not None
    key = run_key(job.job_id, 1)
    await pause(world, job.job_id, paused=True)
    await pause(world, job.job_id, paused=False)
    with monkeypatch.context() as older:
        older.setattr(client, "KNOWN_SHAPE", ROW_SHAPE)
        assert await store.ingestion.stuck_ingests(before=world.now + DAY) == []
        await untouched(
            versions,
            key,
            store.ingestion.ingesting(run_id),
            store.ingestion.fail_ingest(run_id, detail="", now=world.now),
            store.runs.stop_run(CALLER, job.job_id, now=world.now),
            pause(world, job.job_id, paused=True),
        )
    await finished(world, job)
    with monkeypatch.context() as older:
        older.setattr(client, "KNOWN_SHAPE", ROW_SHAPE)
        assert (await world.run(job.job_id)).status is RunStatus.COMPLETED


async def test_versions_without_schedules_end_the_ingestion_of_a_stopped_run(
    versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, store = versions.today, versions.today.store
    job = await fired(world, await scheduled(world))
    assert job.latest_run_id is not None
    await store.runs.stop_run(CALLER, job.job_id, now=world.now)
    monkeypatch.setattr(client, "KNOWN_SHAPE", ROW_SHAPE)
    ended = await store.ingestion.finish_ingest(job.latest_run_id, now=world.now)
    assert ended is RunStatus.STOPPED
    assert await store.ingestion.ingesting(job.latest_run_id) is None


async def test_leftovers_of_a_higher_shape_do_not_keep_the_others(versions: Versions) -> None:
    world, store = versions.today, versions.today.store
    job_ids = ["AJOB", "BJOB", "CJOB"]
    for job_id in job_ids:
        await versions.table.put(
            intent_key(job_id, "RUN"),
            {
                "shape": 1,
                "job_id": job_id,
                "run_sequence": 1,
                "shard_count": 1,
                "shard_scheme": "stripe",
                "run_id": "RUN",
                "gsi1pk": UNSPREAD_INTENTS,
                "gsi1sk": by_time(world.now, job_id),
            },
        )
    await versions.raise_shape(intent_key("AJOB", "RUN"))
    now = world.now + PATIENCE + 1
    assert await store.sweeping.tidy(now=now) == 2
    left = [item["pk"] for item in await versions.items() if item["sk"].startswith("Intent#")]
    assert left == ["Job#AJOB"]
    assert "abandoned" not in await versions.item(intent_key("AJOB", "RUN"))


def test_a_caller_is_sent_to_another_process() -> None:
    error = NewerRow()
    answer = problem_response(error, request_id="R")
    assert answer.status_code == 503
    assert answer.headers["Retry-After"] == str(RETRY_AFTER)
    assert error.code is ErrorCode.UNAVAILABLE
    assert "\n" not in error.detail
    assert isinstance(error, ConveyorError)
