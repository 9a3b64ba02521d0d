"""Large reruns: planned at once, copied in stretches, exact despite any interference."""

from __future__ import annotations

import pytest

from conveyor.dev.sqlite import SqliteStore
from conveyor.domain import ids
from conveyor.domain.errors import CallInFlight, ConveyorError, ErrorCode
from conveyor.domain.model import Ingest, IngestStatus, RunStatus, TaskFailure, TaskStatus
from conveyor.domain.shards import Shards
from conveyor.domain.task_rules import Failed, Released
from conveyor.ports.binding import Ingestion
from tests.conformance.large_runs import LAYOUTS, Large
from tests.conformance.world import CALLER, CLAIM_LENGTH, PROBLEM, World


@pytest.fixture
def ingestion(world: World) -> Ingestion:
    """The port."""
    return world.store.ingestion


@pytest.fixture(params=LAYOUTS, ids=lambda shards: f"{shards.count}-{shards.scheme}")
def shards(request: pytest.FixtureRequest) -> Shards:
    """Each layout in turn."""
    layout: Shards = request.param
    return layout


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


@pytest.mark.parametrize(("status", "left"), [(TaskStatus.PENDING, 7), (TaskStatus.PROCESSING, 3)])
async def test_pending_is_told_from_processing_by_the_copies(
    world: World, shards: Shards, status: TaskStatus, left: int
) -> None:
    """The plan, which reads no row, presumes the unfinished tasks of both kinds."""
    large = await Large(world, shards, 11).make()
    await large.write(0, 11)
    await large.finish()
    await large.succeed(10)
    for index in range(3):
        await world.claimed(large.run_id, index)
    await world.store.runs.stop_run(CALLER, large.job_id, now=world.now)
    await world.clock.advance(CLAIM_LENGTH / 1_000)
    replay = _Replay(world, large)
    assert await replay.make(status) == f"10 1 {large.run_id}"
    assert (await world.run(large.job_id, replay.run_id)).stats.total == 11
    assert len(await replay.copy(0, 11) or []) == left
    await world.store.ingestion.finish_ingest(replay.run_id, now=world.now)
    stats = (await world.run(large.job_id, replay.run_id)).stats
    assert (stats.total, stats.successful) == (left + 1, 1)


async def test_a_copy_waits_for_the_call_of_a_task_and_no_other(
    world: World, shards: Shards
) -> None:
    """A large rerun is made at once; no row is copied while it is claimed."""
    large = await Large(world, shards, 10).make()
    await large.write(0, 10)
    await large.finish()
    undone, done, lost = [await world.claimed(large.run_id, index) for index in (5, 6, 7)]
    await world.store.runs.stop_run(CALLER, large.job_id, now=world.now)
    replay = _Replay(world, large)
    assert await replay.make() == f"10 0 {large.run_id}"

    assert len(await replay.copy(0, 5) or []) == 5
    for claimed, settlement in ((undone, Released()), (done, world.success(done))):
        with pytest.raises(CallInFlight):
            await replay.copy(5, 10)
        copied = {row.index for row in await world.rows(replay.run_id, shards.count)}
        assert not copied & {5, 6, 7} - {undone.index}
        assert (await world.run(large.job_id, replay.run_id)).ingest == (
            Ingest(status=IngestStatus.PENDING, next_index=5, end=10)
        )
        await world.settle(claimed, settlement)
    with pytest.raises(CallInFlight) as held:
        await replay.copy(5, 10)
    assert (held.value.run_id, held.value.task_id) == (large.run_id, lost.task_id)
    assert held.value.code is ErrorCode.RUN_NOT_TERMINAL
    await world.clock.advance(CLAIM_LENGTH / 1_000)
    assert [index for index, _ in await replay.copy(5, 10) or []] == [5, 6, 7, 8, 9]
    await world.store.ingestion.finish_ingest(replay.run_id, now=world.now)

    rows = await world.rows(replay.run_id, shards.count)
    assert [row.index for row in rows] == list(range(10))
    assert {row.status for row in rows} == {TaskStatus.PENDING}


async def test_tasks_that_fail_behind_the_plan_keep_within_the_total(
    world: World, shards: Shards
) -> None:
    """A copier that worked all it was given before the end of the ingestion shows no more ended
    tasks than there are tasks."""
    large = await Large(world, shards, 6).make()
    await large.write(0, 6)
    await large.finish()
    await world.fail(large.run_id, 0)
    late = [await world.claimed(large.run_id, index) for index in (1, 2)]
    await world.store.runs.stop_run(CALLER, large.job_id, now=world.now)
    replay = _Replay(world, large)
    assert await replay.make(TaskStatus.FAILED) == f"1 0 {large.run_id}"
    for task in late:
        await world.settle(task, Failed(world.attempt(task), PROBLEM, TaskFailure.TIMEOUT))
    references = await replay.copy(0, 6) or []
    assert [index for index, _ in references] == [0, 1, 2]
    for index, task_id in references:
        task = await world.claimed(replay.run_id, index, task_id=task_id)
        await world.settle(task, world.success(task))
        stats = (await world.run(large.job_id, replay.run_id)).stats
        assert stats.completed <= stats.total
    assert await world.store.ingestion.finish_ingest(replay.run_id, now=world.now) is (
        RunStatus.COMPLETED
    )
    stats = (await world.run(large.job_id, replay.run_id)).stats
    assert (stats.total, stats.successful) == (3, 3)


async def test_a_stop_while_the_copy_is_held_counts_the_rows_that_are_there(
    world: World, shards: Shards
) -> None:
    large = await Large(world, shards, 10).make()
    await large.write(0, 10)
    await large.finish()
    await world.claimed(large.run_id, 9)
    await world.store.runs.stop_run(CALLER, large.job_id, now=world.now)
    replay = _Replay(world, large)
    await replay.make()
    with pytest.raises(CallInFlight):
        await replay.copy(0, 10)
    await world.store.runs.stop_run(CALLER, large.job_id, now=world.now)
    assert await replay.copy(0, 10) is None
    await world.store.ingestion.finish_ingest(replay.run_id, now=world.now)
    rows = await world.rows(replay.run_id, shards.count)
    assert (await world.run(large.job_id, replay.run_id)).stats.total == len(rows) < 10


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


async def test_a_source_that_is_gone_is_told(
    world: World, ingestion: Ingestion, sqlite_store: SqliteStore
) -> None:
    source = await _ended(world, Shards())
    replay = _Replay(world, source)
    await replay.make()
    await sqlite_store.database.write(
        lambda connection: connection.execute("DELETE FROM runs WHERE run_id = ?", (source.run_id,))
    )
    with pytest.raises(ConveyorError) as gone:
        await replay.copy(0, 10)
    assert gone.value.code is ErrorCode.NOT_FOUND
