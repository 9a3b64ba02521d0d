"""The contract of every exports adapter, sentence by sentence of the port."""

from __future__ import annotations

import msgspec
import pytest

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.binding import Exports, Runs
from conveyor.ports.exports import Export, ExportFormat, ExportStatus
from tests.conformance.world import CALLER, World

LIFETIME = 43_200_000


@pytest.fixture
async def run(world: World) -> tuple[str, str]:
    """A job and its run."""
    return await world.submit(3)


async def create(
    exports: Exports, world: World, run: tuple[str, str], *, lifetime: int = LIFETIME
) -> Export:
    """A new export of a run."""
    export = Export(
        export_id=world.clock.new_id(),
        job_id=run[0],
        run_id=run[1],
        format=ExportFormat.CSV,
        status=ExportStatus.PENDING,
        created_at=world.now,
        updated_at=world.now,
        expires_at=world.now + lifetime,
    )
    await exports.create_export(export)
    return export


async def delete(runs: Runs, world: World, run: tuple[str, str]) -> None:
    """Turn a run to a tombstone."""
    await runs.delete_run(CALLER, *run, now=world.now)


async def test_an_export_is_found_as_it_was_written(
    exports: Exports, world: World, run: tuple[str, str]
) -> None:
    export = await create(exports, world, run)
    assert await exports.get_export(export.export_id) == export
    assert await exports.get_export(run[1]) is None


async def test_an_export_that_waits_is_touched_and_is_not_begun_by_it(
    exports: Exports, runs: Runs, world: World, run: tuple[str, str]
) -> None:
    waiting, ended = [await create(exports, world, run) for _ in range(2)]
    assert await exports.end_export(ended.export_id, size=7, error=None, now=world.now)
    completed = await exports.get_export(ended.export_id)
    await world.clock.advance(1)
    for export_id in (waiting.export_id, ended.export_id, world.clock.new_id()):
        await exports.touch_export(export_id, now=world.now)
    touched = msgspec.structs.replace(waiting, updated_at=world.now)
    assert await exports.get_export(waiting.export_id) == touched
    assert await exports.get_export(ended.export_id) == completed
    assert await exports.unfinished_exports(before=world.now) == []
    assert await exports.unfinished_exports(before=world.now + 1) == [touched]
    await delete(runs, world, run)
    await world.clock.advance(1)
    await exports.touch_export(waiting.export_id, now=world.now)
    assert await exports.get_export(waiting.export_id) == touched


async def test_an_export_needs_a_run_that_is_there(
    exports: Exports, runs: Runs, world: World, run: tuple[str, str]
) -> None:
    other_job, _ = await world.submit(1)
    for missing in ((run[0], run[0]), (other_job, run[1])):
        with pytest.raises(ConveyorError) as refused:
            await create(exports, world, missing)
        assert refused.value.code is ErrorCode.NOT_FOUND
    await delete(runs, world, run)
    with pytest.raises(ConveyorError) as refused:
        await create(exports, world, run)
    assert refused.value.code is ErrorCode.NOT_FOUND
    assert await exports.unfinished_exports(before=world.now + 1) == []


async def test_an_export_begins_again_and_again_until_it_has_ended(
    exports: Exports, world: World, run: tuple[str, str]
) -> None:
    export = await create(exports, world, run)
    for _ in range(2):
        await world.clock.advance(1)
        begun = await exports.begin_export(export.export_id, now=world.now)
        running = ExportStatus.RUNNING
        assert begun == msgspec.structs.replace(export, status=running, updated_at=world.now)
    assert await exports.end_export(export.export_id, size=7, error=None, now=world.now)

    completed = await exports.get_export(export.export_id)
    assert completed is not None
    assert (completed.status, completed.size, completed.error) == ("completed", 7, None)
    assert await exports.begin_export(export.export_id, now=world.now) is None
    assert not await exports.end_export(export.export_id, size=8, error=None, now=world.now)
    assert await exports.get_export(export.export_id) == completed


async def test_an_export_fails_with_its_error(
    exports: Exports, world: World, run: tuple[str, str]
) -> None:
    export = await create(exports, world, run)
    assert await exports.end_export(export.export_id, size=None, error="no", now=world.now)
    failed = await exports.get_export(export.export_id)
    assert failed is not None
    assert (failed.status, failed.size, failed.error) == ("failed", None, "no")
    assert await exports.begin_export(export.export_id, now=world.now) is None


async def test_nothing_begins_or_ends_of_a_deleted_run(
    exports: Exports, runs: Runs, world: World, run: tuple[str, str]
) -> None:
    export = await create(exports, world, run)
    await exports.begin_export(export.export_id, now=world.now)
    await delete(runs, world, run)
    assert await exports.begin_export(export.export_id, now=world.now) is None
    assert not await exports.end_export(export.export_id, size=1, error=None, now=world.now)


async def test_nothing_begins_or_ends_past_its_time(
    exports: Exports, world: World, run: tuple[str, str]
) -> None:
    export = await create(exports, world, run, lifetime=1_000)
    await world.clock.advance(1)
    assert await exports.begin_export(export.export_id, now=world.now) is None
    assert not await exports.end_export(export.export_id, size=1, error=None, now=world.now)
    assert await exports.get_export(export.export_id) == export


async def test_unfinished_exports_are_those_not_touched_for_a_while(
    exports: Exports, world: World, run: tuple[str, str]
) -> None:
    pending, begun, ended = [await create(exports, world, run) for _ in range(3)]
    await exports.end_export(ended.export_id, size=1, error=None, now=world.now)
    await world.clock.advance(5)
    running = await exports.begin_export(begun.export_id, now=world.now)

    assert await exports.unfinished_exports(before=pending.updated_at) == []
    assert await exports.unfinished_exports(before=world.now) == [pending]
    assert await exports.unfinished_exports(before=world.now + 1) == [pending, running]


async def test_expired_exports_are_found_whatever_became_of_them(
    exports: Exports, world: World, run: tuple[str, str]
) -> None:
    late = await create(exports, world, run, lifetime=3_000)
    soon = await create(exports, world, run, lifetime=1_000)
    await create(exports, world, run, lifetime=9_000)
    await exports.end_export(soon.export_id, size=1, error=None, now=world.now)
    await world.clock.advance(3)

    found = await exports.expired_exports(now=world.now, limit=10)
    assert [one.export_id for one in found] == [soon.export_id, late.export_id]
    assert await exports.expired_exports(now=world.now, limit=1) == found[:1]


async def test_the_newest_exports_of_a_run_are_listed(
    exports: Exports, world: World, run: tuple[str, str]
) -> None:
    other = await world.submit(1)
    assert await exports.latest_exports(*run, limit=3) == []
    made = []
    for _ in range(4):
        made.append(await create(exports, world, run))
        await create(exports, world, other)
        await world.clock.advance(1)
    gone = made.pop(2)
    await exports.drop_export(gone.export_id)
    assert await exports.latest_exports(*run, limit=2) == [made[2], made[1]]
    assert await exports.latest_exports(*run, limit=10) == made[::-1]
    assert await exports.latest_exports(other[0], run[1], limit=10) == []


async def test_a_dropped_export_is_gone(
    exports: Exports, world: World, run: tuple[str, str]
) -> None:
    export = await create(exports, world, run)
    for _ in range(2):
        await exports.drop_export(export.export_id)
        assert await exports.get_export(export.export_id) is None


async def test_exports_go_with_their_run(
    exports: Exports, runs: Runs, world: World, run: tuple[str, str]
) -> None:
    export = await create(exports, world, run)
    other = await create(exports, world, await world.submit(1))
    await runs.purge_run(run[1])
    assert await exports.get_export(export.export_id) == export
    await delete(runs, world, run)
    await runs.purge_run(run[1])
    assert await exports.get_export(export.export_id) is None
    assert await exports.get_export(other.export_id) == other
