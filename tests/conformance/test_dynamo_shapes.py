"""Rows of older and newer versions beside those of this one: within a shape nothing is dropped."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest
from msgspec import structs

from conveyor.domain.model import JobStatus, RunFailure, RunStatus, TaskStatus
from conveyor.domain.shards import ONE_SHARD
from conveyor.ports.exports import ExportStatus
from conveyor.ports.permits import LeaseRequest
from conveyor.ports.schedules import ScheduleChange
from conveyor.prod.dynamodb.client import Item, merge_json
from conveyor.prod.dynamodb.permits import DynamoPermits
from conveyor.prod.dynamodb.schema import (
    export_item_key,
    fire_key,
    job_key,
    permits_key,
    run_key,
    task_key,
)
from conveyor.testing.clock import FakeClock
from tests.conformance.dynamo_schedules import fires, moved, scheduled, skipped
from tests.conformance.dynamo_versions import (
    LATER,
    Versions,
    export_of,
    open_versions,
    pause,
    what_later_versions_wrote,
)
from tests.conformance.world import CALLER, World

pytestmark = pytest.mark.extended

FAILED = TaskStatus.FAILED


@pytest.fixture
async def versions(clock: FakeClock) -> AsyncIterator[Versions]:
    """An empty table, and processes of three versions."""
    async with open_versions(clock) as opened:
        yield opened


def kept(items: list[Item]) -> dict[tuple[str, str], dict[str, object]]:
    """Return the items that the newer process wrote."""
    return {(one["pk"], one["sk"]): what_later_versions_wrote(one) for one in items}


@pytest.mark.parametrize("turn", range(3))
async def test_a_job_passes_through_three_versions_and_loses_nothing(
    versions: Versions, turn: int
) -> None:
    """Each step is made by another version than the one before, each first step by each."""
    order = [versions.newer, versions.older, versions.today]
    turns = itertools.cycle(order[turn:] + order[:turn])
    seen: dict[tuple[str, str], dict[str, object]] = {}

    async def step(act: Callable[[World], Awaitable[object]]) -> None:
        await act(next(turns))
        now = kept(await versions.items())
        for key, before in seen.items():
            assert before.items() <= now.get(key, before).items(), key
        seen.clear()
        seen.update(now)

    made: list[tuple[str, str]] = []

    async def submit(world: World) -> None:
        made.append(await world.submit(3, closed=False))

    await step(submit)
    [(job_id, run_id)] = made
    store = next(turns).store
    await step(lambda world: world.append(job_id, 2))
    await step(lambda world: world.succeed(run_id, 0))
    await step(lambda world: pause(world, job_id, paused=True))
    await step(lambda world: pause(world, job_id, paused=False))
    await step(lambda world: world.fail(run_id, 3))
    await step(lambda world: world.append(job_id, 1, last_batch=True))
    await step(lambda world: world.succeed(run_id, 5))
    await step(lambda world: world.store.runs.stop_run(CALLER, job_id, now=world.now))
    await step(lambda world: world.rerun(job_id, FAILED))
    run = await versions.today.run(job_id)
    assert (run.stats.total, run.stats.successful) == (3, 2)
    await step(lambda world: world.rows(run.run_id))
    [left] = [row for row in await versions.today.rows(run.run_id) if row.status != "successful"]
    await step(lambda world: end(world, run.run_id, left.task_id))
    assert (await versions.today.run(job_id)).status is RunStatus.COMPLETED
    view = await versions.today.view(job_id)
    assert (view.job.status, view.job.run_count) == (JobStatus.CLOSED, 2)
    await step(lambda world: world.store.runs.delete_run(CALLER, job_id, run.run_id, now=world.now))
    await step(lambda world: world.store.jobs.delete_job(CALLER, job_id, now=world.now))
    assert await store.runs.deleted_runs() == sorted([(job_id, run_id), (job_id, run.run_id)])


async def end(world: World, run_id: str, task_id: str) -> None:
    task = await world.claimed(run_id, 0, task_id=task_id)
    await world.settle(task, world.success(task))


async def test_what_a_newer_version_wrote_of_a_job_outlives_this_ones_changes(
    versions: Versions,
) -> None:
    job_id, run_id = await versions.newer.submit(1, closed=False)
    mine = versions.today.store
    await versions.today.append(job_id, 1, last_batch=True)
    await mine.runs.fail_run(
        run_id, reason=RunFailure.SUBSCRIPTION_INACTIVE, detail="", now=versions.today.now
    )
    _, told = await versions.today.rerun(job_id)
    assert told == f"2 0 {run_id}"
    job = await versions.item(job_key(job_id))
    assert what_later_versions_wrote(job) == {LATER: "kept", "job": [1, {"deep": None}]}
    assert msgspec.json.decode(job["job"])["run_count"] == 2
    run = await versions.item(run_key(job_id, 1))
    assert run[LATER] == "kept"
    # The spec of a row that is made of another one stays the text that it is.
    rows = [one for one in await versions.items() if one["sk"].startswith("Task#")]
    assert len(rows) == 4
    assert sum("spec" in what_later_versions_wrote(row) for row in rows) == 2


async def test_a_schedule_and_its_fires_keep_what_a_newer_version_wrote(
    versions: Versions,
) -> None:
    job = await scheduled(versions.newer)
    row = skipped(versions.newer, versions.newer.now)
    after = moved(job, next_at=versions.newer.now)
    change = ScheduleChange(before=job, after=after, fires=(row,))
    assert await versions.newer.store.schedules.change_schedule(change)
    more = structs.replace(row, count=2)
    last = moved(after, next_at=None)
    change = ScheduleChange(before=after, after=last, fires=(more,))
    assert await versions.today.store.schedules.change_schedule(change)

    for version in (versions.older, versions.today):
        assert await fires(version, job.job_id) == [more]
        assert await version.store.schedules.list_schedules(after="", limit=9) == [last]
    wanted = {"job": job_key(job.job_id), "fire": fire_key(job.job_id, row.fire_id)}
    for text, key in wanted.items():
        item = await versions.item(key)
        assert what_later_versions_wrote(item).keys() >= {text}
        assert what_later_versions_wrote(item)[text] == [1, {"deep": None}]


async def test_an_inherited_row_keeps_the_texts_of_its_source(versions: Versions) -> None:
    job_id, run_id = await versions.newer.submit(2)
    await versions.newer.succeed(run_id, 0)
    await versions.newer.fail(run_id, 1)
    new_id, told = await versions.today.rerun(job_id, FAILED)
    assert told == f"1 1 {run_id}"
    rows = await versions.today.rows(new_id)
    for row in rows:
        item = await versions.item(task_key(job_id, new_id, row.task_id, ONE_SHARD))
        wanted = {"spec", "result"} if row.index == 0 else {"spec"}
        assert what_later_versions_wrote(item).keys() == wanted


async def test_an_export_keeps_what_a_newer_version_wrote(versions: Versions) -> None:
    job_id, run_id = await versions.today.submit(1)
    export = export_of(versions.today, job_id, run_id)
    await versions.newer.store.exports.create_export(export)
    mine, now = versions.today.store.exports, versions.today.now
    assert await mine.begin_export(export.export_id, now=now) is not None
    assert await mine.end_export(export.export_id, size=7, error=None, now=now)
    item = await versions.item(export_item_key(export.export_id))
    assert what_later_versions_wrote(item).keys() == {LATER, "export"}
    read = await versions.older.store.exports.get_export(export.export_id)
    assert read is not None
    assert (read.status, read.size) == (ExportStatus.COMPLETED, 7)


async def test_the_counts_of_a_copy_keep_what_a_newer_version_wrote(versions: Versions) -> None:
    job_id, run_id = await versions.newer.submit(3)
    for index in range(3):
        await versions.newer.fail(run_id, index)
    new_id, _ = await versions.newer.rerun(job_id, FAILED, large_from=1)
    for world, first in ((versions.newer, 0), (versions.today, 1)):
        await world.store.ingestion.copy_rows(
            new_id, first_index=first, end_index=first + 1, now=world.now
        )
    item = await versions.item(run_key(job_id, 2))
    assert what_later_versions_wrote(item).keys() == {LATER, "planned", "copied", "ingest"}
    assert msgspec.json.decode(item["copied"])["fresh"] == 2


async def test_entries_of_a_ledger_may_have_more_than_is_known(versions: Versions) -> None:
    clock = versions.table.clock
    one, other = (DynamoPermits(versions.table, clock) for _ in range(2))
    holding = LeaseRequest(job_id="JOB", holder="one", count=2, before=0, sequence=1)
    assert (await one.acquire_or_renew(holding, limit=3, lease=30.0)).granted
    key = permits_key("JOB")
    await versions.table.update(
        key,
        "SET #entries.#one = list_append(#entries.#one, :kept)",
        condition="attribute_exists(pk)",
        kept=["kept"],
    )
    more = LeaseRequest(job_id="JOB", holder="other", count=2, before=0, sequence=1)
    refused = await other.acquire_or_renew(more, limit=3, lease=30.0)
    assert (refused.granted, refused.free) == (False, 1)
    assert (await versions.item(key))["entries"]["one"][-1] == "kept"


class Inner(msgspec.Struct, frozen=True, omit_defaults=True):
    colour: str = ""


class Outer(msgspec.Struct, frozen=True):
    name: str
    inner: Inner | None = None


def test_a_text_is_rewritten_with_what_is_not_known_of_it() -> None:
    text = '{"name":"old","inner":{"colour":"red","later":1},"later":[null]}'
    assert msgspec.json.decode(merge_json(text, Outer("new", Inner()))) == {
        "name": "new",
        "inner": {"later": 1},
        "later": [None],
    }
    assert msgspec.json.decode(merge_json(text, Outer("new")))["inner"] is None
    assert merge_json("", Outer("new")) == '{"name":"new","inner":null}'
