"""The list of runs by their last change of status or pause, of one caller and of all."""

from __future__ import annotations

import pytest

from conveyor.domain.model import RunStatus
from conveyor.ports.records import ChangedRun, RunPosition
from tests.conformance.world import CALLER, World

STRANGER = "stranger"


async def listed(
    world: World, caller: str | None = CALLER, *, limit: int = 3, live: bool | None = None
) -> list[ChangedRun]:
    """Every page of the list, one after the other."""
    found: list[ChangedRun] = []
    before: RunPosition | None = None
    while page := await world.store.runs.changed_runs(
        caller, before=before, limit=limit, live=live
    ):
        assert len(page) <= limit
        found += page
        before = page[-1].position
    places = [(one.position.changed_at, one.position.run_id) for one in found]
    assert places == sorted(places, reverse=True)
    assert len(set(places)) == len(places)
    return found


async def ids_of(
    world: World, caller: str | None = CALLER, *, limit: int = 3, live: bool | None = None
) -> list[str]:
    """The ids of the list."""
    return [one.run.run_id for one in await listed(world, caller, limit=limit, live=live)]


async def test_the_run_that_changed_last_comes_first(world: World) -> None:
    made = []
    for _ in range(4):
        made.append(await world.submit(2))
        await world.clock.advance(1)
    jobs, runs = [job for job, _ in made], [run for _, run in made]
    assert await ids_of(world) == list(reversed(runs))

    await world.store.runs.pause_run(CALLER, jobs[1], paused=True, now=world.now)
    await world.clock.advance(1)
    await world.succeed(runs[0], 0)  # counters are no such change
    assert await ids_of(world) == [runs[1], runs[3], runs[2], runs[0]]
    await world.succeed(runs[0], 1)
    await world.clock.advance(1)
    await world.store.runs.stop_run(CALLER, jobs[2], now=world.now)
    assert await ids_of(world) == [runs[2], runs[0], runs[1], runs[3]]
    assert await ids_of(world, live=True) == [runs[1], runs[3]]
    assert await ids_of(world, live=False, limit=1) == [runs[2], runs[0]]
    assert await ids_of(world, None, live=False) == [runs[2], runs[0]]

    await world.clock.advance(1)
    again, _ = await world.rerun(jobs[0])
    assert await ids_of(world, limit=1) == [again, runs[2], runs[0], runs[1], runs[3]]
    for one in await listed(world):
        assert one.run == await world.run(one.job.job_id, one.run.run_id)
        assert one.job == (await world.view(one.job.job_id)).job


async def test_runs_of_one_instant_are_each_listed_once(world: World) -> None:
    runs = [run_id for _, run_id in [await world.submit(1) for _ in range(5)]]
    for limit in (1, 2, 5):
        assert await ids_of(world, limit=limit) == sorted(runs, reverse=True)
        assert await ids_of(world, None, limit=limit, live=True) == sorted(runs, reverse=True)


@pytest.mark.parametrize("live", [None, True])
async def test_each_caller_has_a_list_and_there_is_one_of_all(
    world: World, live: bool | None
) -> None:
    own = [run_id for _, run_id in [await world.submit(1) for _ in range(2)]]
    _, strange = await world.submit(1, caller=STRANGER)
    assert await ids_of(world, live=live) == sorted(own, reverse=True)
    assert await ids_of(world, STRANGER, live=live) == [strange]
    assert await ids_of(world, "nobody", live=live) == []
    assert await ids_of(world, None, live=live) == sorted([*own, strange], reverse=True)


async def test_deleted_runs_and_those_of_deleted_jobs_are_left_out(world: World) -> None:
    kept, first = await world.submit(1)
    gone, _ = await world.submit(1)
    await world.store.runs.stop_run(CALLER, kept, now=world.now)
    second, _ = await world.rerun(kept)
    await world.store.runs.stop_run(CALLER, kept, now=world.now)
    await world.store.jobs.delete_job(CALLER, gone, now=world.now)
    assert sorted(await ids_of(world)) == sorted([first, second])
    await world.store.runs.delete_run(CALLER, kept, first, now=world.now)
    [left] = await listed(world, None)
    assert (left.run.run_id, left.run.status) == (second, RunStatus.STOPPED)
    assert await ids_of(world, None, live=False) == [second]
    assert await ids_of(world, live=True) == []
