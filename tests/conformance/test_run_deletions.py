"""The contract of every runs adapter for deleted runs, until they are purged."""

from __future__ import annotations

import msgspec

from conveyor.domain.errors import ErrorCode
from conveyor.domain.model import (
    JobStatus,
)
from conveyor.ports.binding import Runs
from tests.conformance.world import CALLER, World, refused


async def test_deleting_a_run_is_idempotent_until_the_purge(world: World, runs: Runs) -> None:
    job_id, run_id = await world.submit(1)
    await runs.delete_run(CALLER, job_id, run_id, now=world.now)
    await runs.delete_run(CALLER, job_id, run_id, now=world.now)
    view = await world.view(job_id)
    assert (view.job.latest_run_id, view.latest_run) == (None, None)
    assert view.job.status is JobStatus.CLOSED
    assert await runs.deleted_runs() == [(job_id, run_id)]
    assert await runs.run_exists(run_id)
    await runs.purge_run(run_id)
    await runs.purge_run(run_id)
    assert not await runs.run_exists(run_id)
    assert await runs.deleted_runs() == []
    await refused(ErrorCode.NOT_FOUND, runs.delete_run(CALLER, job_id, run_id, now=world.now))


async def test_a_tombstone_tells_since_when_nobody_has_touched_it(world: World, runs: Runs) -> None:
    deleted = [await world.submit(1) for _ in range(2)]
    live = await world.submit(1)
    for job_id, run_id in deleted:
        await runs.delete_run(CALLER, job_id, run_id, now=world.now)
    assert await runs.deleted_runs(before=world.now) == []
    await world.clock.advance(10)
    assert sorted(await runs.deleted_runs(before=world.now)) == sorted(deleted)
    before = await world.run(*deleted[0]), await world.run(*live)
    for run_id in (deleted[0][1], live[1], world.clock.new_id()):
        await runs.touch_tombstone(run_id, now=world.now)
    assert await runs.deleted_runs(before=world.now) == [deleted[1]]
    # By a clock that is behind.
    await runs.touch_tombstone(deleted[0][1], now=world.now - 5_000)
    assert await runs.deleted_runs(before=world.now) == [deleted[1]]
    after = await world.run(*deleted[0]), await world.run(*live)
    assert after == (msgspec.structs.replace(before[0], updated_at=world.now), before[1])
    await world.clock.advance(1)
    assert sorted(await runs.deleted_runs(before=world.now)) == sorted(deleted)
    await runs.purge_run(deleted[0][1])
    await runs.touch_tombstone(deleted[0][1], now=world.now)
    assert await runs.deleted_runs() == [deleted[1]]


async def test_a_run_of_another_job_cannot_be_deleted(world: World, runs: Runs) -> None:
    job_id, _ = await world.submit(1)
    _, other_run = await world.submit(1)
    await refused(ErrorCode.NOT_FOUND, runs.delete_run(CALLER, job_id, other_run, now=world.now))
