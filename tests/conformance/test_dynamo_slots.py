"""Exports and inputs on DynamoDB when answers are lost and others interfere, and the lifetime of
their items."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from conveyor.ports.exports import Export, ExportFormat, ExportStatus
from conveyor.ports.inputs import InputType, JobInput
from conveyor.prod.dynamodb.schema import export_item_key, input_item_key
from conveyor.testing.clock import FakeClock
from tests.conformance.dynamo_ingests import DB, TRANSACT, Ingests, away, open_ingests
from tests.conformance.world import CALLER

pytestmark = pytest.mark.extended

HOUR = 3_600_000
DAY = 24 * HOUR


@pytest.fixture
async def bench(clock: FakeClock) -> AsyncIterator[Ingests]:
    """An empty table."""
    async with open_ingests(clock) as opened:
        yield opened


def draft_export(bench: Ingests, run: tuple[str, str]) -> Export:
    """An export of a run, not written yet."""
    now = bench.one.world.now
    return Export(
        export_id=bench.one.world.clock.new_id(),
        job_id=run[0],
        run_id=run[1],
        format=ExportFormat.JSONL,
        status=ExportStatus.PENDING,
        created_at=now,
        updated_at=now,
        expires_at=now + HOUR,
    )


def draft_input(bench: Ingests) -> JobInput:
    """A slot, not written yet."""
    now = bench.one.world.now
    return JobInput(
        input_id=bench.one.world.clock.new_id(),
        caller=CALLER,
        type=InputType.URLS,
        content_type="text/plain",
        created_at=now,
        upload_until=now + HOUR,
        expires_at=now + DAY,
    )


async def test_an_export_is_made_begun_and_ended_once(bench: Ingests) -> None:
    export = draft_export(bench, await bench.other.world.submit(1))
    bench.lose_every_answer()
    exports, now = bench.one.world.store.exports, bench.one.world.now
    await exports.create_export(export)
    begun = await exports.begin_export(export.export_id, now=now)
    assert begun is not None
    assert begun.status is ExportStatus.RUNNING
    assert await exports.end_export(export.export_id, size=7, error=None, now=now)
    assert bench.faults.fired == 3
    found = await bench.other.world.store.exports.get_export(export.export_id)
    assert found is not None
    assert (found.status, found.size) == (ExportStatus.COMPLETED, 7)


async def test_an_export_that_is_made_again_keeps_how_far_it_is(bench: Ingests) -> None:
    export = draft_export(bench, await bench.other.world.submit(1))
    exports, now = bench.one.world.store.exports, bench.one.world.now
    await exports.create_export(export)
    begun = await exports.begin_export(export.export_id, now=now)
    await exports.create_export(export)
    assert await exports.get_export(export.export_id) == begun


async def test_of_two_ends_of_an_export_the_first_counts(bench: Ingests) -> None:
    export = draft_export(bench, await bench.other.world.submit(1))
    await bench.other.world.store.exports.create_export(export)
    now = bench.one.world.now

    async def end() -> None:
        exports = bench.other.world.store.exports
        assert await exports.end_export(export.export_id, size=7, error=None, now=now)

    bench.faults.before(DB, TRANSACT, end)
    exports = bench.one.world.store.exports
    assert not await exports.end_export(export.export_id, size=None, error="no", now=now)
    found = await exports.get_export(export.export_id)
    assert found is not None
    assert (found.status, found.size, found.error) == (ExportStatus.COMPLETED, 7, None)


@pytest.mark.parametrize("step", ["create", "begin", "end"])
async def test_nothing_is_written_of_a_run_that_is_deleted_meanwhile(
    bench: Ingests, step: str
) -> None:
    job_id, run_id = await bench.other.world.submit(1)
    export = draft_export(bench, (job_id, run_id))
    exports, now = bench.one.world.store.exports, bench.one.world.now
    if step != "create":
        await bench.other.world.store.exports.create_export(export)

    async def delete() -> None:
        await bench.other.world.store.runs.delete_run(CALLER, job_id, run_id, now=now)

    bench.faults.before(DB, TRANSACT, delete)
    match step:
        case "create":
            with pytest.raises(Exception, match="no such run"):
                await exports.create_export(export)
        case "begin":
            assert await exports.begin_export(export.export_id, now=now) is None
        case "end":
            assert not await exports.end_export(export.export_id, size=1, error=None, now=now)
    found = await exports.get_export(export.export_id)
    assert found == (None if step == "create" else export)


async def test_an_export_goes_with_its_run_before_an_index_knows_of_it(bench: Ingests) -> None:
    job_id, run_id = await bench.other.world.submit(1)
    store = bench.one.world.store
    exports = [draft_export(bench, (job_id, run_id)) for _ in range(2)]
    for export in exports:
        await store.exports.create_export(export)
    await store.exports.drop_export(exports[0].export_id)
    await store.jobs.delete_job(CALLER, job_id, now=bench.one.world.now)
    await store.tasks.scrub_tasks(run_id, 10)
    bench.faults.fail(DB, "query", away(), where=lambda parameters: "IndexName" in parameters)
    await store.runs.purge_run(run_id)
    await store.jobs.purge_job(job_id)
    assert bench.faults.fired == 0
    assert (await bench.table.call("scan", ConsistentRead=True))["Items"] == []


async def test_a_slot_is_made_once_and_keeps_its_upload(bench: Ingests) -> None:
    slot = draft_input(bench)
    bench.lose_every_answer()
    inputs = bench.one.world.store.inputs
    await inputs.create_input(slot)
    assert await inputs.input_uploaded(slot.input_id, size=9)
    await inputs.create_input(slot)
    assert bench.faults.fired == 3
    found = await inputs.get_input(slot.input_id)
    assert found is not None
    assert found.size == 9


async def test_items_stay_a_day_beyond_their_end(bench: Ingests) -> None:
    """The sweeper removes the bytes with the item: it has to see it first."""
    export, slot = draft_export(bench, await bench.other.world.submit(1)), draft_input(bench)
    await bench.one.world.store.exports.create_export(export)
    await bench.one.world.store.inputs.create_input(slot)
    for key, expires_at in (
        (export_item_key(export.export_id), export.expires_at),
        (input_item_key(slot.input_id), slot.expires_at),
    ):
        item = await bench.table.get(key)
        assert item is not None
        assert item["ttl"] == (expires_at + DAY) // 1_000


async def test_what_an_index_still_knows_of_is_passed_over(bench: Ingests) -> None:
    run = await bench.other.world.submit(1)
    gone, there = draft_export(bench, run), draft_export(bench, run)
    exports, now = bench.other.world.store.exports, bench.one.world.now
    for export in (gone, there):
        await exports.create_export(export)

    async def drop() -> None:
        await exports.drop_export(gone.export_id)

    for find in ("unfinished", "expired"):
        bench.faults.after(DB, "query", drop)
        one = bench.one.world.store.exports
        if find == "unfinished":
            found = await one.unfinished_exports(before=now + 1)
        else:
            found = await one.expired_exports(now=now + HOUR, limit=5)
        assert found == [there]
        await exports.create_export(gone)
