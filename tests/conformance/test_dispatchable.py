"""The runs that may have work, and the reports of changes to them."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from contextlib import suppress

import anyio
import pytest

from conveyor.domain.errors import ConveyorError
from conveyor.domain.hosts import Politeness
from conveyor.domain.model import DispatchableRun, RunFailure, Task, TaskStatus
from conveyor.domain.task_rules import Released, Settlement
from conveyor.ports.binding import Jobs, Runs
from conveyor.ports.records import DispatchChange
from conveyor.ports.tasks import Claimed
from tests.conformance.bindings import BindingKind
from tests.conformance.world import CALLER, CLAIM_LENGTH, World


async def named(world: World, since: int) -> set[str]:
    """Return the runs named by changes, each once and as it is now."""
    changes = await world.store.runs.dispatch_changes(since=since)
    for change in changes:
        assert change.run == await world.store.runs.dispatchable_run(change.run_id)
    run_ids = {change.run_id for change in changes}
    assert len(run_ids) == len(changes)
    return run_ids


async def standing(world: World, made: list[tuple[str, str]]) -> dict[str, tuple[object, ...]]:
    """Status and pause of every run that there is, of those (job_id, run_id)."""
    runs = [await world.store.runs.get_run(CALLER, *one) for one in made]
    return {run.run_id: (run.status, run.paused) for run in runs if run is not None}


async def test_only_running_unpaused_runs_are_dispatchable(
    world: World, jobs: Jobs, runs: Runs
) -> None:
    made_at = world.now
    job_id, run_id = await world.submit(1, priority=9, max_inflight=3)
    await world.clock.advance(1)
    waiting, waiting_run = await world.submit(0, closed=False)
    stopped, stopped_run = await world.submit(1)
    await runs.stop_run(CALLER, stopped, now=world.now)
    expected = DispatchableRun(
        run_id=run_id, job_id=job_id, priority=9, max_inflight=3, created_at=made_at, caller=CALLER
    )
    assert await runs.dispatchable_runs() == [expected]
    assert await runs.dispatchable_run(run_id) == expected
    for other in (waiting_run, stopped_run, world.clock.new_id()):
        assert await runs.dispatchable_run(other) is None
    await runs.pause_run(CALLER, job_id, paused=True, now=world.now)
    assert await runs.dispatchable_runs() == []
    assert await runs.dispatchable_run(run_id) is None
    await world.append(waiting, 1)
    assert [run.run_id for run in await runs.dispatchable_runs()] == [waiting_run]
    await jobs.delete_job(CALLER, waiting, now=world.now)
    assert await runs.dispatchable_runs() == []


async def test_a_worker_learns_the_politeness_of_a_run_however_it_finds_it(
    world: World, runs: Runs
) -> None:
    manners = Politeness(per_host=2, per_host_rate=0.5)
    _, rude = await world.submit(1)
    job_id, run_id = await world.submit(1, politeness=manners)
    assert (await world.view(job_id)).job.politeness == manners
    found = {run.run_id: run.politeness for run in await runs.dispatchable_runs()}
    assert found == {rude: None, run_id: manners}
    assert await named(world, 0) == {rude, run_id}
    read = await runs.dispatchable_run(run_id)
    assert read is not None
    assert (read.politeness, read.caller) == (manners, CALLER)
    await runs.pause_run(CALLER, job_id, paused=True, now=world.now)
    assert DispatchChange(run_id, None) in await runs.dispatch_changes(since=0)
    changed = await runs.changed_runs(CALLER, before=None, limit=9)
    assert {one.run.run_id for one in changed} == {rude, run_id}


async def test_changes_are_told_from_their_very_millisecond_on(world: World, runs: Runs) -> None:
    made_at = world.now
    job_id, first = await world.submit(1, priority=9, max_inflight=3)
    await world.clock.advance(1)
    _, second = await world.submit(1)
    told = DispatchableRun(
        run_id=first, job_id=job_id, priority=9, max_inflight=3, created_at=made_at, caller=CALLER
    )
    assert DispatchChange(first, told) in await runs.dispatch_changes(since=made_at)
    assert await named(world, made_at) == {first, second}
    assert await named(world, made_at + 1) == await named(world, world.now) == {second}
    assert await named(world, world.now + 1) == set()
    await runs.pause_run(CALLER, job_id, paused=True, now=world.now)
    assert DispatchChange(first, None) in await runs.dispatch_changes(since=world.now)


async def test_a_tombstone_is_told_of_until_its_purge(world: World, jobs: Jobs, runs: Runs) -> None:
    job_id, run_id = await world.submit(1)
    await jobs.delete_job(CALLER, job_id, now=world.now)
    assert await runs.dispatch_changes(since=world.now) == [DispatchChange(run_id, None)]
    await runs.purge_run(run_id)
    assert await runs.dispatch_changes(since=0) == []


class Walk:
    """A store that random calls are made to, refused ones too."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.made: list[tuple[str, str]] = []
        self._random = random.Random(seed)
        self._held: list[Task] = []
        often = (self._submit, self._claim, self._settle, self._pause, self._rerun)
        seldom = (self._stop, self._fail, self._delete_run, self._delete_job, self._purge)
        self._steps: list[Callable[[], Awaitable[None]]] = [
            *(often * 3),
            *((self._append, self._close) * 2),
            *seldom,
        ]

    async def step(self) -> None:
        """Calls of one kind, all at once."""
        with suppress(ConveyorError):
            await self._random.choice(self._steps)()

    def _any(self) -> tuple[str, str]:
        return self._random.choice(self.made[-6:])

    async def _submit(self) -> None:
        closed = self._random.random() < 0.5
        count = self._random.randrange(closed, 4)
        self.made.append(await self.world.submit(count, closed=closed))

    async def _append(self) -> None:
        last_batch = self._random.random() < 0.2
        await self.world.append(self._any()[0], self._random.randrange(3), last_batch=last_batch)

    async def _claim(self) -> None:
        rows = await self.world.rows(self._any()[1])
        async with anyio.create_task_group() as group:
            for row in rows:
                group.start_soon(self._claim_one, row)

    async def _claim_one(self, row: Task) -> None:
        claim = await self.world.claim(row.run_id, row.index, task_id=row.task_id)
        if isinstance(claim, Claimed):
            self._held.append(claim.task)

    async def _settle(self) -> None:
        count = self._random.randint(0, len(self._held))
        ending, self._held = self._held[:count], self._held[count:]
        async with anyio.create_task_group() as group:
            for task in ending:
                success = self.world.success(task)
                ways: list[Settlement] = [*[success] * 4, self.world.retry(task), Released()]
                group.start_soon(self.world.settle, task, self._random.choice(ways))

    async def _close(self) -> None:
        await self.world.store.jobs.close_job(CALLER, self._any()[0], now=self.world.now)

    async def _stop(self) -> None:
        await self.world.store.runs.stop_run(CALLER, self._any()[0], now=self.world.now)

    async def _pause(self) -> None:
        paused = self._random.random() < 0.5
        runs = self.world.store.runs
        await runs.pause_run(CALLER, self._any()[0], paused=paused, now=self.world.now)

    async def _rerun(self) -> None:
        job_id, _ = self._any()
        statuses = self._random.choice([(), (TaskStatus.SUCCESSFUL,), (TaskStatus.PENDING,)])
        run_id, _ = await self.world.rerun(job_id, *statuses)
        self.made.append((job_id, run_id))

    async def _fail(self) -> None:
        reason, (_, run_id) = RunFailure.INSUFFICIENT_CREDITS, self._any()
        await self.world.store.runs.fail_run(run_id, reason=reason, detail="", now=self.world.now)

    async def _delete_run(self) -> None:
        await self.world.store.runs.delete_run(CALLER, *self._any(), now=self.world.now)

    async def _delete_job(self) -> None:
        await self.world.store.jobs.delete_job(CALLER, self._any()[0], now=self.world.now)

    async def _purge(self) -> None:
        job_id, run_id = self._any()
        await self.world.store.tasks.scrub_tasks(run_id, 10)
        await self.world.store.runs.purge_run(run_id)
        await self.world.store.jobs.purge_job(job_id)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.extended) for seed in range(2, 6))]
)
async def test_whatever_happens_just_the_changes_are_told(
    world: World, seed: int, binding_kind: BindingKind
) -> None:
    walk = Walk(world, seed)
    walk.made.append(await world.submit(2, closed=False))
    told = 0
    steps = round(100 * binding_kind.effort)
    for number in range(steps):
        before = await standing(world, walk.made)
        await world.clock.advance(0.001 if number % 10 else CLAIM_LENGTH / 1_000)
        since = world.now
        await walk.step()
        after = await standing(world, walk.made)
        changed = {run_id for run_id, state in after.items() if before.get(run_id) != state}
        assert await named(world, since) == changed
        told += len(changed)
    assert told > steps / 6
