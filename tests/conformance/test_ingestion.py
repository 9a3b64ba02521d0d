"""Writing the rows of large runs: exactly once, in any order of accidents."""

from __future__ import annotations

import pytest

from conveyor.domain import ids
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import IngestStatus, RunFailure, RunStatus, TaskStatus
from conveyor.domain.shards import Shards
from conveyor.ports.binding import Ingestion
from conveyor.ports.maintenance import StuckIngest
from conveyor.ports.tasks import Claimed, NotClaimable
from tests.conformance.large_runs import LAYOUTS, Large
from tests.conformance.world import CALLER, World, spec


@pytest.fixture
def ingestion(world: World) -> Ingestion:
    """The port."""
    return world.store.ingestion


@pytest.fixture(params=LAYOUTS, ids=lambda shards: f"{shards.count}-{shards.scheme}")
def shards(request: pytest.FixtureRequest) -> Shards:
    """Each layout in turn."""
    layout: Shards = request.param
    return layout


async def test_rows_are_written_as_they_were_staged(world: World, shards: Shards) -> None:
    large = await Large(world, shards, 25).make()

    assert await large.write(0, 10)
    assert await large.write(10, 25)
    assert await large.finish() is RunStatus.RUNNING

    rows = await world.rows(large.run_id, shards.count)
    assert [(row.index, row.task_id, row.spec) for row in rows] == [
        (index, ids.task_id(large.run_id, index), spec(index)) for index in range(25)
    ]
    assert {row.status for row in rows} == {TaskStatus.PENDING}
    assert (await large.run()).stats.total == 25


@pytest.mark.guarantee("G2")
async def test_a_stretch_written_again_resets_no_row(world: World, shards: Shards) -> None:
    large = await Large(world, shards, 10).make()
    await large.write(0, 10)
    for index in range(0, 10, 2):
        await large.succeed(index)
    before = await world.rows(large.run_id, shards.count)

    assert await large.write(0, 10)
    assert await large.write(0, 5)

    assert await world.rows(large.run_id, shards.count) == before
    run = await large.run()
    assert (run.stats.total, run.stats.successful) == (10, 5)
    assert run.ingest is not None
    assert run.ingest.next_index == 10


@pytest.mark.guarantee("G4")
async def test_a_drained_run_is_not_complete_before_its_last_row(
    world: World, shards: Shards
) -> None:
    large = await Large(world, shards, 4).make()
    await large.write(0, 2)
    await large.succeed(0)
    await large.succeed(1)
    assert (await large.run()).status is RunStatus.RUNNING
    await large.write(2, 4)
    await large.succeed(2)
    await large.succeed(3)
    assert (await large.run()).status is RunStatus.RUNNING

    assert await large.finish() is RunStatus.COMPLETED

    run = await large.run()
    assert (run.status, run.ingesting) == (RunStatus.COMPLETED, False)
    assert run.ingest is not None
    assert run.ingest.status is IngestStatus.DONE


async def test_the_last_settlement_completes_a_run_that_has_latched(
    world: World, shards: Shards
) -> None:
    large = await Large(world, shards, 1).make()
    await large.write(0, 1)
    await large.finish()
    settled = await world.succeed(large.run_id, 0)
    assert settled.run_status is RunStatus.COMPLETED


async def test_an_open_job_waits_for_more_once_it_has_latched(world: World) -> None:
    large = await Large(world, Shards(2), 2).make(closed=False)
    with pytest.raises(ConveyorError) as refused:
        await world.append(large.job_id, 1)
    assert refused.value.code is ErrorCode.RUN_NOT_TERMINAL
    await large.write(0, 2)
    await large.succeed(0)
    await large.succeed(1)

    assert await large.finish() is RunStatus.PENDING

    await world.append(large.job_id, 3, last_batch=True)
    assert await large.indexes() == [0, 1, 2, 3, 4]
    assert (await large.run()).status is RunStatus.RUNNING


async def test_closing_during_the_ingestion_completes_nothing(world: World) -> None:
    large = await Large(world, Shards(2), 2).make(closed=False)
    await large.write(0, 2)
    await large.succeed(0)
    await large.succeed(1)
    view = await world.store.jobs.close_job(CALLER, large.job_id, now=world.now)
    assert view.latest_run is not None
    assert view.latest_run.status is RunStatus.RUNNING
    assert await large.finish() is RunStatus.COMPLETED


async def test_a_latch_before_the_last_row_is_a_fault_of_the_caller(
    world: World, ingestion: Ingestion
) -> None:
    large = await Large(world, Shards(2), 4).make()
    await large.write(0, 2)
    with pytest.raises(ValueError, match="not written yet"):
        await ingestion.finish_ingest(large.run_id, now=world.now)
    assert (await large.run()).ingesting


async def test_an_ingester_that_wakes_up_late_writes_nothing(world: World, shards: Shards) -> None:
    large = await Large(world, shards, 3).make()
    await large.write(0, 3)
    await large.finish()
    for index in range(3):
        await large.succeed(index)
    before = await world.rows(large.run_id, shards.count)

    assert await large.write(0, 3) is False
    assert await large.finish() is RunStatus.COMPLETED

    assert await world.rows(large.run_id, shards.count) == before
    assert await world.store.ingestion.ingesting(large.run_id) is None


@pytest.mark.guarantee("G3")
async def test_a_stopped_run_counts_the_rows_that_it_has(world: World, shards: Shards) -> None:
    large = await Large(world, shards, 30).make()
    await large.write(0, 12)
    await large.succeed(3)
    await world.fail(large.run_id, 4)
    await world.store.runs.stop_run(CALLER, large.job_id, now=world.now)

    assert await large.write(12, 20) is False
    state = await world.store.ingestion.ingesting(large.run_id)
    assert state is not None
    assert not state.live
    assert await large.finish() is RunStatus.STOPPED

    run = await large.run()
    stats = run.stats
    assert (stats.total, stats.successful, stats.failed) == (12, 1, 1)
    assert stats.failure_reasons == {"timeout": 1}
    assert not run.ingesting
    assert await large.indexes() == list(range(12))


async def test_a_deleted_run_is_not_written_to(world: World, ingestion: Ingestion) -> None:
    large = await Large(world, Shards(2), 4).make()
    await large.write(0, 2)
    await world.store.jobs.delete_job(CALLER, large.job_id, now=world.now)

    assert await large.write(2, 4) is False
    assert await ingestion.ingesting(large.run_id) is None
    assert await large.finish() is None
    assert await ingestion.stuck_ingests(before=world.now + 1) == []
    assert await world.store.tasks.scrub_tasks(large.run_id, 100) == 2


async def test_a_run_whose_rows_cannot_be_written_fails(world: World, ingestion: Ingestion) -> None:
    large = await Large(world, Shards(2), 4).make()
    await large.write(0, 2)
    await large.succeed(0)

    assert await ingestion.fail_ingest(large.run_id, detail="a chunk is gone", now=world.now)
    assert not await ingestion.fail_ingest(large.run_id, detail="again", now=world.now)

    run = await large.run()
    assert (run.status, run.failure_reason) == (RunStatus.FAILED, RunFailure.INGEST_FAILED)
    assert (run.failure_detail, run.stats.total) == ("a chunk is gone", 2)
    assert not run.ingesting
    assert isinstance(await world.claim(large.run_id, 1), NotClaimable)
    _, rerun = await world.rerun(large.job_id)
    assert rerun == f"2 0 {large.run_id}"


async def test_what_has_not_moved_on_is_stuck(world: World, ingestion: Ingestion) -> None:
    large = await Large(world, Shards(), 4).make()
    began = world.now
    await world.clock.advance(10)
    await large.write(0, 2)

    assert await ingestion.stuck_ingests(before=began + 1) == []
    assert await ingestion.stuck_ingests(before=world.now + 1) == [
        StuckIngest(large.job_id, large.run_id)
    ]
    await large.write(2, 4)
    await large.finish()
    assert await ingestion.stuck_ingests(before=world.now + 1) == []


async def test_a_run_can_be_paused_and_read_while_it_ingests(world: World, shards: Shards) -> None:
    large = await Large(world, shards, 6).make()
    await large.write(0, 3)
    await world.store.runs.pause_run(CALLER, large.job_id, paused=True, now=world.now)
    assert await large.write(3, 6)
    assert await large.finish() is RunStatus.RUNNING
    assert isinstance(await world.claim(large.run_id, 5), Claimed)


async def test_an_open_job_without_tasks_has_nothing_to_write(world: World) -> None:
    large = await Large(world, Shards(2), 0).make(closed=False)
    assert await large.finish() is RunStatus.PENDING
    await world.append(large.job_id, 2, last_batch=True)
    assert await large.indexes() == [0, 1]
