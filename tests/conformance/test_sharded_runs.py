"""Runs over several shards answer as those in one do: every row, once, in order."""

from __future__ import annotations

import pytest

from conveyor.dev.sqlite import SqliteStore
from conveyor.domain import ids
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import RunStatus, TaskStatus
from conveyor.domain.shards import Shards, ShardScheme
from conveyor.ports.tasks import Claimed
from tests.conformance.world import CALLER, World

LAYOUTS = [Shards(8, scheme) for scheme in ShardScheme]
MORE_LAYOUTS = [Shards(count, scheme) for count in (2, 16) for scheme in ShardScheme]


@pytest.fixture(
    params=[*LAYOUTS, *(pytest.param(one, marks=pytest.mark.extended) for one in MORE_LAYOUTS)],
    ids=lambda shards: f"{shards.count}-{shards.scheme}",
)
def shards(request: pytest.FixtureRequest) -> Shards:
    """Each layout in turn."""
    layout: Shards = request.param
    return layout


async def _submit(world: World, shards: Shards, count: int) -> tuple[str, str]:
    return await world.submit(
        count, task_shard_count=shards.count, shard_scheme=shards.scheme.value
    )


async def test_each_row_lies_in_its_shard(world: World, shards: Shards) -> None:
    _, run_id = await _submit(world, shards, 100)
    for shard in range(shards.count):
        page = await world.store.tasks.page_tasks(
            run_id, shard=shard, statuses=None, after=None, limit=1_000
        )
        assert [task.index for task in page.tasks] == [
            index for index in range(100) if shards.of(ids.task_id(run_id, index), index) == shard
        ]
        assert page.next_index is None
    beyond = await world.store.tasks.page_tasks(
        run_id, shard=shards.count, statuses=None, after=None, limit=1_000
    )
    assert beyond.tasks == []


async def test_neighbouring_runs_share_no_row(world: World, shards: Shards) -> None:
    made = [await _submit(world, shards, 20) for _ in range(3)]
    plain = await world.submit(20)
    await world.succeed(made[1][1], 7)

    for _, run_id in [*made, plain]:
        rows = await world.rows(run_id, shards.count)
        assert [row.task_id for row in rows] == [ids.task_id(run_id, i) for i in range(20)]
    await world.store.jobs.delete_job(CALLER, made[1][0], now=world.now)
    assert await world.store.tasks.scrub_tasks(made[1][1], 1_000) == 20
    for _, run_id in [made[0], made[2], plain]:
        assert len(await world.rows(run_id, shards.count)) == 20


async def test_a_run_is_drained_across_its_shards(world: World, shards: Shards) -> None:
    job_id, run_id = await _submit(world, shards, 20)
    for index in range(19):
        await world.succeed(run_id, index)
    assert (await world.run(job_id)).status is RunStatus.RUNNING
    settled = await world.fail(run_id, 19)
    assert settled.run_status is RunStatus.COMPLETED
    history = await world.store.tasks.task_history(run_id, ids.task_id(run_id, 19))
    assert history is not None
    assert len(history) == 1


async def test_claims_are_renewed_and_released_across_shards(world: World, shards: Shards) -> None:
    _, run_id = await _submit(world, shards, 20)
    claimed = [await world.claimed(run_id, index) for index in range(20)]
    until = world.now + 500_000
    await world.store.tasks.renew_claims(
        [(run_id, task.task_id, task.claim_number) for task in claimed], claimed_until=until
    )
    rows = await world.rows(run_id, shards.count)
    assert {row.claimed_until for row in rows} == {until}
    for task in claimed:
        await world.store.tasks.release_claim(run_id, task.task_id, worker="worker")
    rows = await world.rows(run_id, shards.count)
    assert {row.status for row in rows} == {TaskStatus.PENDING}


@pytest.mark.parametrize("limit", [1, 7, 64, 1_000])
async def test_references_come_in_order_across_shards(
    world: World, shards: Shards, limit: int
) -> None:
    count = 40 if limit == 1 else 150
    _, run_id = await _submit(world, shards, count)
    ended = (0, 17, count - 1)
    for index in ended:
        await world.succeed(run_id, index)
    found: list[int] = []
    after = -1
    while references := await world.store.tasks.unfinished_after(run_id, after, limit):
        found += [index for index, _ in references]
        after = references[-1][0]
    assert found == [index for index in range(count) if index not in ended]


async def test_a_small_rerun_keeps_the_layout(world: World, shards: Shards) -> None:
    job_id, run_id = await _submit(world, shards, 30)
    for index in range(10):
        await world.succeed(run_id, index)
    for index in range(10, 30):
        await world.fail(run_id, index)
    second, told = await world.rerun(job_id, TaskStatus.FAILED)
    assert told == f"20 10 {run_id}"
    rows = await world.rows(second, shards.count)
    assert [row.index for row in rows] == list(range(30))
    claim = await world.claim(second, 29, task_id=ids.task_id(run_id, 29))
    assert isinstance(claim, Claimed)


async def test_claims_of_live_runs_alone_lapse_at_boot(
    world: World, shards: Shards, sqlite_store: SqliteStore
) -> None:
    """A claim is told from its row's key to be of a live run, whichever shard it lies in."""
    _, live = await _submit(world, shards, 20)
    stopped_job, stopped = await _submit(world, shards, 20)
    for index in range(20):
        await world.claimed(live, index)
        await world.claimed(stopped, index)
    await world.store.runs.stop_run(CALLER, stopped_job, now=world.now)
    assert await sqlite_store.void_claims(world.now) == 20
    rows = await world.rows(stopped, shards.count)
    assert {row.status for row in rows} == {TaskStatus.PENDING}


async def test_a_rerun_waits_for_a_call_in_any_shard(world: World, shards: Shards) -> None:
    for index in (0, 1, 19):
        job_id, run_id = await _submit(world, shards, 20)
        await world.claimed(run_id, index)
        await world.store.runs.stop_run(CALLER, job_id, now=world.now)
        with pytest.raises(ConveyorError) as refused:
            await world.rerun(job_id)
        assert refused.value.code is ErrorCode.RUN_NOT_TERMINAL
