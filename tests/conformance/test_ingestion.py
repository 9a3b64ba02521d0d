"""Writing the rows of large runs: exactly once, in any order of accidents."""

from __future__ import annotations

import msgspec
import pytest

from conveyor.domain import ids
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import (
    Ingest,
    IngestStatus,
    Run,
    RunFailure,
    RunStatus,
    TaskStatus,
)
from conveyor.domain.shards import Shards, ShardScheme
from conveyor.ports.ingestion import Ingestion, StagedRows
from conveyor.ports.records import Answer
from conveyor.ports.tasks import Claimed, Finished
from tests.conformance.world import CALLER, CLAIM_LENGTH, World, spec

LAYOUTS = [
    Shards(),
    Shards(3, ShardScheme.STRIPE),
    Shards(8, ShardScheme.FNV32A),
]


@pytest.fixture
def ingestion(world: World) -> Ingestion:
    """The port."""
    return world.store.ingestion


@pytest.fixture(params=LAYOUTS, ids=lambda shards: f"{shards.count}-{shards.scheme}")
def shards(request: pytest.FixtureRequest) -> Shards:
    """Each layout in turn."""
    layout: Shards = request.param
    return layout


class Large:
    """A large run whose rows are not written yet."""

    def __init__(self, world: World, shards: Shards, size: int) -> None:
        self.world = world
        self.shards = shards
        self.size = size
        self.job_id = self.run_id = ""

    async def make(self, *, closed: bool = True) -> Large:
        """Write the job and its run."""
        job, run, _ = self.world.draft(
            0,
            closed=closed,
            task_shard_count=self.shards.count,
            shard_scheme=self.shards.scheme.value,
        )
        ingest = Ingest(status=IngestStatus.PENDING, end=self.size, chunks=(0,))
        run = msgspec.structs.replace(
            run,
            status=RunStatus.RUNNING,
            ingest=ingest,
            next_index=self.size,
            stats=msgspec.structs.replace(run.stats, total=self.size),
        )
        await self.world.store.jobs.create_job(job, run, [], answer=Answer(202, b"{}"), once=None)
        self.job_id, self.run_id = job.job_id, run.run_id
        return self

    def rows(self, first: int, end: int) -> StagedRows:
        """A stretch as it is staged."""
        pairs = [(ids.task_id(self.run_id, index), spec(index)) for index in range(first, end)]
        return StagedRows(first, end - first, msgspec.json.encode(pairs))

    async def write(self, first: int, end: int) -> bool:
        """Write a stretch."""
        return await self.world.store.ingestion.write_rows(
            self.run_id, self.rows(first, end), now=self.world.now
        )

    async def finish(self) -> RunStatus | None:
        """Latch."""
        return await self.world.store.ingestion.finish_ingest(self.run_id, now=self.world.now)

    async def run(self) -> Run:
        """The run as it stands."""
        return await self.world.run(self.job_id, self.run_id)

    async def indexes(self) -> list[int]:
        """The indexes of all rows."""
        return [task.index for task in await self.world.rows(self.run_id, self.shards.count)]

    async def succeed(self, index: int) -> None:
        """Work one task to its end."""
        await self.world.succeed(self.run_id, index)


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
    assert isinstance(await world.claim(large.run_id, 1), Finished)
    _, rerun = await world.rerun(large.job_id)
    assert rerun == f"2 0 {large.run_id}"


async def test_what_has_not_moved_on_is_stuck(world: World, ingestion: Ingestion) -> None:
    large = await Large(world, Shards(), 4).make()
    began = world.now
    await world.clock.advance(10)
    await large.write(0, 2)

    assert await ingestion.stuck_ingests(before=began + 1) == []
    assert await ingestion.stuck_ingests(before=world.now + 1) == [(large.job_id, large.run_id)]
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


class _Replay:
    """A large rerun of a run of which some tasks have ended."""

    def __init__(self, world: World, source: Large) -> None:
        self.world = world
        self.source = source
        self.run_id = ""

    async def make(self, *statuses: TaskStatus) -> str:
        """Plan it; "retried inherited source"."""
        self.run_id, told = await self.world.rerun(self.source.job_id, *statuses, large_from=5)
        return told

    async def copy(self, first: int, end: int) -> list[tuple[int, str]] | None:
        """Copy a stretch."""
        return await self.world.store.ingestion.copy_rows(
            self.run_id, first_index=first, end_index=end, now=self.world.now
        )


async def _ended(world: World, shards: Shards) -> Large:
    """Ten tasks: 0 to 3 successful, 4 and 5 failed, the others pending when it was stopped."""
    large = await Large(world, shards, 10).make()
    await large.write(0, 10)
    await large.finish()
    for index in range(4):
        await large.succeed(index)
    await world.fail(large.run_id, 4)
    await world.fail(large.run_id, 5)
    await world.store.runs.stop_run(CALLER, large.job_id, now=world.now)
    return large


async def test_a_large_rerun_is_planned_and_then_copied(world: World, shards: Shards) -> None:
    source = await _ended(world, shards)
    replay = _Replay(world, source)
    assert await replay.make() == f"10 0 {source.run_id}"
    run = await world.run(source.job_id, replay.run_id)
    assert (run.stats.total, run.stats.completed, run.ingesting) == (10, 0, True)
    assert await world.rows(replay.run_id, shards.count) == []

    references = await replay.copy(0, 4)
    assert references == [(index, ids.task_id(source.run_id, index)) for index in range(4)]
    assert await replay.copy(0, 4) == references
    assert len(await replay.copy(4, 10) or []) == 6
    assert await world.store.ingestion.finish_ingest(replay.run_id, now=world.now) is (
        RunStatus.RUNNING
    )

    rows = await world.rows(replay.run_id, shards.count)
    assert [row.task_id for row in rows] == [ids.task_id(source.run_id, i) for i in range(10)]
    assert {row.status for row in rows} == {TaskStatus.PENDING}
    await world.store.runs.delete_run(CALLER, source.job_id, source.run_id, now=world.now)


async def test_a_large_partial_rerun_inherits_what_it_does_not_repeat(
    world: World, shards: Shards
) -> None:
    source = await _ended(world, shards)
    replay = _Replay(world, source)
    assert await replay.make(TaskStatus.FAILED) == f"2 4 {source.run_id}"
    run = await world.run(source.job_id, replay.run_id)
    assert (run.stats.total, run.stats.successful, run.stats.failed) == (6, 4, 0)
    assert run.stats.failure_reasons == {}
    with pytest.raises(ConveyorError) as pinned:
        await world.store.runs.delete_run(CALLER, source.job_id, source.run_id, now=world.now)
    assert pinned.value.code is ErrorCode.RUN_HAS_DESCENDANTS

    assert [index for index, _ in await replay.copy(0, 10) or []] == [4, 5]
    await world.store.ingestion.finish_ingest(replay.run_id, now=world.now)

    rows = await world.rows(replay.run_id, shards.count)
    assert [(row.index, row.status, row.source_run_id) for row in rows] == [
        *[(index, TaskStatus.SUCCESSFUL, source.run_id) for index in range(4)],
        *[(index, TaskStatus.PENDING, None) for index in (4, 5)],
    ]
    assert all(row.result is not None for row in rows[:4])
    assert {(row.error, row.failure, row.result) for row in rows[4:]} == {(None, None, None)}
    for index in (4, 5):
        task = await world.claimed(replay.run_id, index, task_id=ids.task_id(source.run_id, index))
        await world.settle(task, world.success(task))
    run = await world.run(source.job_id, replay.run_id)
    assert (run.status, run.stats.successful, run.stats.total) == (RunStatus.COMPLETED, 6, 6)


async def test_a_rerun_stopped_while_it_copies_counts_its_rows(
    world: World, shards: Shards
) -> None:
    source = await _ended(world, shards)
    replay = _Replay(world, source)
    await replay.make(TaskStatus.PENDING)
    await replay.copy(0, 3)
    await world.store.runs.stop_run(CALLER, source.job_id, now=world.now)

    assert await replay.copy(3, 10) is None
    with pytest.raises(ConveyorError) as refused:
        await world.rerun(source.job_id)
    assert refused.value.code is ErrorCode.RUN_NOT_TERMINAL
    await world.store.ingestion.finish_ingest(replay.run_id, now=world.now)

    stats = (await world.run(source.job_id, replay.run_id)).stats
    assert (stats.total, stats.successful, stats.failed) == (3, 3, 0)
    _, told = await world.rerun(source.job_id)
    assert told == f"3 0 {replay.run_id}"


async def test_chains_of_large_reruns_keep_the_owner_of_a_body(world: World) -> None:
    shards = Shards(2)
    source = await _ended(world, shards)
    second = _Replay(world, source)
    await second.make(TaskStatus.FAILED)
    await second.copy(0, 10)
    await world.store.ingestion.finish_ingest(second.run_id, now=world.now)
    await world.store.runs.stop_run(CALLER, source.job_id, now=world.now)
    third = _Replay(world, source)
    await third.make(TaskStatus.PENDING)
    await third.copy(0, 10)
    await world.store.ingestion.finish_ingest(third.run_id, now=world.now)

    rows = await world.rows(third.run_id, shards.count)
    assert {row.source_run_id for row in rows if row.status is TaskStatus.SUCCESSFUL} == {
        source.run_id
    }
    for run_id in (source.run_id, second.run_id):
        with pytest.raises(ConveyorError) as pinned:
            await world.store.runs.delete_run(CALLER, source.job_id, run_id, now=world.now)
        assert pinned.value.code is ErrorCode.RUN_HAS_DESCENDANTS


async def test_a_body_owner_outlives_the_run_in_between(world: World) -> None:
    """A chain of large reruns pins whoever owns a body, not only the run that was replayed."""
    shards = Shards(2)
    source = await _ended(world, shards)
    second, third = _Replay(world, source), _Replay(world, source)
    for replay, status in ((second, TaskStatus.FAILED), (third, TaskStatus.PENDING)):
        await replay.make(status)
        await replay.copy(0, 10)
        await world.store.ingestion.finish_ingest(replay.run_id, now=world.now)
        await world.store.runs.stop_run(CALLER, source.job_id, now=world.now)
    [expired] = await world.store.sweeping.expire_run(second.run_id, now=world.now)
    assert expired == second.run_id
    with pytest.raises(ConveyorError) as pinned:
        await world.store.runs.delete_run(CALLER, source.job_id, source.run_id, now=world.now)
    assert pinned.value.code is ErrorCode.RUN_HAS_DESCENDANTS


async def test_a_plan_tells_pending_from_processing(world: World, shards: Shards) -> None:
    large = await Large(world, shards, 10).make()
    await large.write(0, 10)
    await large.finish()
    for index in range(3):
        await world.claimed(large.run_id, index)
    await world.store.runs.stop_run(CALLER, large.job_id, now=world.now)
    await world.clock.advance(CLAIM_LENGTH / 1_000)
    replay = _Replay(world, large)
    assert await replay.make(TaskStatus.PENDING) == f"7 0 {large.run_id}"
    assert len(await replay.copy(0, 10) or []) == 7


async def test_a_task_that_settles_behind_the_plan_is_counted_as_it_is_copied(
    world: World, shards: Shards
) -> None:
    """The claim had lapsed, so the rerun did not wait for it; its worker settles all the same."""
    large = await Large(world, shards, 5).make()
    await large.write(0, 5)
    await large.finish()
    await world.fail(large.run_id, 0)
    late = await world.claimed(large.run_id, 1)
    await world.store.runs.stop_run(CALLER, large.job_id, now=world.now)
    await world.clock.advance(CLAIM_LENGTH / 1_000)
    replay = _Replay(world, large)
    assert await replay.make(TaskStatus.FAILED) == f"1 0 {large.run_id}"
    await world.settle(late, world.success(late))
    await replay.copy(0, 5)
    await world.store.ingestion.finish_ingest(replay.run_id, now=world.now)

    stats = (await world.run(large.job_id, replay.run_id)).stats
    assert (stats.total, stats.successful, stats.failed) == (2, 1, 0)
    task = await world.claimed(replay.run_id, 0, task_id=ids.task_id(large.run_id, 0))
    settled = await world.settle(task, world.success(task))
    assert settled.run_status is RunStatus.COMPLETED


async def test_a_source_that_is_gone_is_told(world: World, ingestion: Ingestion) -> None:
    source = await _ended(world, Shards())
    replay = _Replay(world, source)
    await replay.make()
    remove = getattr(world.store, "database", None)
    if remove is None:
        pytest.skip("a pinned run cannot be taken away from outside")
    await remove.write(
        lambda connection: connection.execute("DELETE FROM runs WHERE run_id = ?", (source.run_id,))
    )
    with pytest.raises(ConveyorError) as gone:
        await replay.copy(0, 10)
    assert gone.value.code is ErrorCode.NOT_FOUND


async def test_an_open_job_without_tasks_has_nothing_to_write(world: World) -> None:
    large = await Large(world, Shards(2), 0).make(closed=False)
    assert await large.finish() is RunStatus.PENDING
    await world.append(large.job_id, 2, last_batch=True)
    assert await large.indexes() == [0, 1]
