"""Rows that are not what they should be: one costs its own run, and nothing beside it fails."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from conveyor.domain.errors import ErrorCode
from conveyor.domain.ids import task_id
from conveyor.domain.model import TaskStatus
from conveyor.domain.shards import ONE_SHARD
from conveyor.ports.deliveries import DeliveryFilter
from conveyor.ports.schedules import ScheduleChange
from conveyor.prod.dynamodb.client import DamagedRow, UnreadableRow
from conveyor.prod.dynamodb.schema import (
    DELIVERIES,
    ENDED_DELIVERIES,
    EXPORTS,
    INPUTS,
    OUTBOX,
    UNSPREAD_INTENTS,
    Key,
    export_item_key,
    fire_key,
    job_key,
    place_key,
    run_key,
    task_key,
    task_sort_key,
)
from conveyor.prod.dynamodb.sweeping import PATIENCE
from conveyor.testing.clock import FakeClock
from tests.conformance.dynamo_schedules import (
    due,
    fire,
    fired,
    fires,
    moved,
    scheduled,
    skipped,
)
from tests.conformance.dynamo_versions import Versions, export_of, open_versions
from tests.conformance.world import CALLER, all_ended

pytestmark = pytest.mark.extended

DAY = 86_400_000
DELIVERY_INDEX = [DELIVERIES, ENDED_DELIVERIES]
PARTITIONS = {
    "gsi1": [
        "ingesting#0",
        "unsettled#0",
        "ended#0",
        "aging#0",
        "aged#0",
        "deleted#0",
        "intents#0",
        UNSPREAD_INTENTS,
    ],
    "gsi2": ["active#0", "idle#1", INPUTS, EXPORTS, OUTBOX, *DELIVERY_INDEX, "schedules#2"],
}
SECRET = "a-text-that-is-in-the-row"


@pytest.fixture
async def versions(clock: FakeClock) -> AsyncIterator[Versions]:
    """An empty table, and processes on it."""
    async with open_versions(clock) as opened:
        yield opened


async def damage(versions: Versions, key: Key, **changes: Any) -> None:
    """Let an item be another; None removes an attribute."""
    item = {**await versions.item(key), **changes}
    await versions.table.delete(key)
    left = {name: value for name, value in item.items() if value is not None}
    await versions.table.put(key, left)


def was_told(caplog: pytest.LogCaptureFixture, key: str) -> bool:
    """Return whether an error in the log names a row."""
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    return any(key in record.getMessage() for record in errors)


async def look_at_everything(versions: Versions, now: int) -> set[str]:
    """Make every call that reads the index, as workers, sweepers and callers do; each must succeed.
    Return the ids of runs and jobs found."""
    store = versions.today.store
    found: list[object] = []
    found += [run.run_id for run in await store.runs.dispatchable_runs()]
    found += [one.run_id for one in await store.runs.dispatch_changes(since=0) if one.run]
    found += [
        view.job.job_id
        for view in await store.jobs.list_jobs(CALLER, status=None, before=None, limit=10)
    ]
    found += [run.run_id for run in await store.sweeping.quiet_runs(before=now)]
    found += [run.run_id for run in await all_ended(store, now)]
    await store.ingestion.stuck_ingests(before=now)
    await store.runs.deleted_runs()
    await store.outbox.due_entries(now=now, limit=9)
    assert await store.deliveries.due_deliveries(now=now, limit=9) == []
    assert await store.deliveries.drop_old_deliveries(before=now, limit=9) == 0
    wanted = DeliveryFilter(caller=CALLER, job_id="JOB")
    assert await store.deliveries.list_deliveries(wanted, limit=9) == []
    found += [job.job_id for job in await store.schedules.due_schedules(now=now, limit=9)]
    found += [job.job_id for job in await store.schedules.list_schedules(after="", limit=9)]
    await store.exports.unfinished_exports(before=now)
    assert await store.exports.expired_exports(now=now, limit=9) == []
    assert await store.inputs.expired_inputs(now=now, limit=9) == []
    await store.sweeping.tidy(now=now)
    await store.sweeping.tidy(now=now + PATIENCE + 1)
    return {str(one) for one in found}


@pytest.mark.parametrize(
    "changes",
    [
        {"run_id": None},
        {"max_inflight": None},
        {"max_inflight": SECRET},
        {"total": None},
        {"updated_at": SECRET},
        {"status": SECRET},
        {"shape": SECRET},
        {"job_id": 7},
    ],
    ids=str,
)
async def test_a_damaged_run_costs_itself_alone(
    versions: Versions, caplog: pytest.LogCaptureFixture, changes: dict[str, Any]
) -> None:
    world, store = versions.today, versions.today.store
    job_id, run_id = await world.submit(2)
    other_job, other_run = await world.submit(2)
    await damage(versions, run_key(job_id, 1), **changes)
    await world.clock.advance(DAY / 1_000)
    found = await look_at_everything(versions, world.now)
    assert {other_job, other_run} <= found
    assert not {job_id} & found
    assert run_id not in {run.run_id for run in await store.sweeping.quiet_runs(before=world.now)}
    assert await store.runs.dispatchable_run(run_id) is None
    assert await store.runs.list_runs(CALLER, job_id, before=None, limit=9) == []
    for act in (world.view(job_id), world.claim(run_id, 0), store.runs.purge_run(run_id)):
        with pytest.raises(UnreadableRow) as caught:
            await act
        if "shape" not in changes:
            assert isinstance(caught.value, DamagedRow)
            assert caught.value.code is ErrorCode.INTERNAL
            assert "damaged" in caught.value.detail
    await world.succeed(other_run, 0)
    if "shape" not in changes:
        assert was_told(caplog, f"Job#{job_id}")
    assert SECRET not in caplog.text


@pytest.mark.parametrize("changes", [{"job": None}, {"job": "\0{"}, {"latest_run_sequence": "x"}])
async def test_a_damaged_job_costs_itself_alone(
    versions: Versions, changes: dict[str, Any]
) -> None:
    world, store = versions.today, versions.today.store
    job_id, _ = await world.submit(1)
    other_job, other_run = await world.submit(1)
    await damage(versions, job_key(job_id), **changes)
    found = await look_at_everything(versions, world.now + 1)
    assert {other_job, other_run} <= found
    assert job_id not in found
    for act in (store.jobs.get_job(CALLER, job_id), store.jobs.find_job(job_id)):
        with pytest.raises(DamagedRow):
            await act


@pytest.mark.parametrize("changes", [{"job": None}, {"job": "\0{"}, {"latest_run_sequence": "x"}])
async def test_a_damaged_schedule_costs_itself_alone(
    versions: Versions, changes: dict[str, Any]
) -> None:
    world, store = versions.today, versions.today.store
    damaged = await scheduled(world, next_at=world.now - 1)
    job = await scheduled(world)
    await damage(versions, job_key(damaged.job_id), **changes)
    found = await look_at_everything(versions, world.now + 1)
    assert job.job_id in found
    assert damaged.job_id not in found
    assert await due(world, limit=1) == [job.job_id]
    with pytest.raises(DamagedRow):
        await store.schedules.change_schedule(fire(world, damaged))
    await fired(world, job)


@pytest.mark.parametrize("changes", [{"fire": None}, {"fire": "{"}, {"fire": 7}])
async def test_a_damaged_fire_costs_itself_alone_until_it_is_written_anew(
    versions: Versions, changes: dict[str, Any]
) -> None:
    world, store = versions.today, versions.today.store
    job = await scheduled(world)
    first, second = (skipped(world, world.now) for _ in range(2))
    after = moved(job, next_at=world.now)
    change = ScheduleChange(before=job, after=after, fires=(first, second))
    assert await store.schedules.change_schedule(change)
    await damage(versions, fire_key(job.job_id, first.fire_id), **changes)
    assert await fires(world, job.job_id) == [second]
    assert await store.schedules.list_fires(job.job_id, before=second.fire_id, limit=9) == []

    change = ScheduleChange(before=after, after=moved(after, next_at=None), fires=(first,))
    assert await store.schedules.change_schedule(change)
    assert await fires(world, job.job_id) == [second, first]


async def test_other_damaged_rows_cost_themselves_alone(versions: Versions) -> None:
    world, store = versions.today, versions.today.store
    job_id, run_id = await world.submit(2)
    export = export_of(world, job_id, run_id)
    await store.exports.create_export(export)
    first = task_id(run_id, 0)
    await damage(versions, export_item_key(export.export_id), export="{")
    await damage(versions, task_key(job_id, run_id, first, ONE_SHARD), spec="{")
    await damage(versions, place_key(run_id), shard_count="x")
    await world.clock.advance(DAY / 1_000)
    await look_at_everything(versions, world.now)
    for act in (
        store.exports.get_export(export.export_id),
        store.exports.begin_export(export.export_id, now=world.now),
    ):
        with pytest.raises(DamagedRow):
            await act
    # This process knows the place already; another reads it.
    with pytest.raises(DamagedRow):
        await versions.older.claim(run_id, 1)
    with pytest.raises(DamagedRow):
        await store.tasks.get_task(run_id, first)
    await world.succeed(run_id, 1)


@pytest.mark.parametrize(
    "changes",
    [{"status": SECRET}, {"attempts": None}, {"claimed_until": SECRET}, {"claim_number": None}],
    ids=str,
)
async def test_a_damaged_task_costs_itself_alone(
    versions: Versions, caplog: pytest.LogCaptureFixture, changes: dict[str, Any]
) -> None:
    world, store = versions.today, versions.today.store
    job_id, run_id = await world.submit(2)
    first = task_id(run_id, 0)
    await world.claim(run_id, 0)
    await damage(versions, task_key(job_id, run_id, first, ONE_SHARD), **changes)
    await world.clock.advance(DAY / 1_000)
    for act in (world.claim(run_id, 0), store.tasks.get_task(run_id, first)):
        with pytest.raises(DamagedRow):
            await act
    await world.succeed(run_id, 1)
    assert was_told(caplog, f"Job#{job_id} {task_sort_key(run_id, first)}")
    assert SECRET not in caplog.text


@pytest.mark.parametrize("changes", [{"task_id": None}, {"status": None}, {"spec": None}], ids=str)
async def test_a_rerun_of_a_damaged_task_says_which_row_it_is(
    versions: Versions, caplog: pytest.LogCaptureFixture, changes: dict[str, Any]
) -> None:
    world = versions.today
    job_id, run_id = await world.submit(2)
    first = task_id(run_id, 0)
    await world.succeed(run_id, 0)
    await world.fail(run_id, 1)
    await damage(versions, task_key(job_id, run_id, first, ONE_SHARD), **changes)
    with pytest.raises(DamagedRow):
        await world.rerun(job_id, TaskStatus.FAILED)
    assert was_told(caplog, f"Job#{job_id} {task_sort_key(run_id, first)}")


@pytest.mark.parametrize("shape", [None, 1, "x"])
async def test_what_does_not_belong_into_an_index_is_passed_over(
    versions: Versions, shape: object
) -> None:
    world = versions.today
    job_id, run_id = await world.submit(1)
    for index, partitions in PARTITIONS.items():
        for partition in partitions:
            item: dict[str, Any] = {f"{index}pk": partition, f"{index}sk": f"{0:015}#x"}
            if shape is not None:
                item["shape"] = shape
            await versions.table.put(Key(f"Junk#{partition}", "x"), item)
    assert {job_id, run_id} <= await look_at_everything(versions, world.now + DAY)
