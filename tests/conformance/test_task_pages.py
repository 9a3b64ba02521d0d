"""The contract of every tasks adapter with many rows: pages, references, scrubs."""

from __future__ import annotations

import asyncio

import pytest

from conveyor.domain import ids
from conveyor.domain.model import TaskStatus
from conveyor.ports.binding import Jobs, Tasks
from tests.conformance.bindings import BindingKind
from tests.conformance.world import CALLER, F, P, R, S, World


async def read_all(
    tasks: Tasks, run_id: str, statuses: frozenset[TaskStatus] | None, limit: int
) -> tuple[list[int], int, int]:
    """Indexes in the order given, rows read, pages."""
    indexes: list[int] = []
    after, read, pages = None, 0, 0
    while True:
        page = await tasks.page_tasks(run_id, statuses=statuses, after=after, limit=limit)
        assert len(page.tasks) <= limit
        indexes += [task.index for task in page.tasks]
        read, pages = read + page.rows_read, pages + 1
        if page.next_index is None:
            return indexes, read, pages
        assert page.next_index == page.tasks[-1].index
        after = page.next_index


async def mixed(world: World, count: int) -> tuple[str, dict[TaskStatus, list[int]]]:
    """A run whose rows take every status in turn."""
    _, run_id = await world.submit(count)
    await world.submit(count)
    expected: dict[TaskStatus, list[int]] = {P: [], R: [], S: [], F: []}
    for index in range(count):
        kind = (P, R, S, F)[index % 4]
        expected[kind].append(index)
        if kind is R:
            await world.claimed(run_id, index)
        elif kind is S:
            await world.succeed(run_id, index)
        elif kind is F:
            await world.fail(run_id, index)
    return run_id, expected


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 40, 41, 1_000])
async def test_pages_give_each_row_once_in_order(
    world: World, tasks: Tasks, limit: int, binding_kind: BindingKind
) -> None:
    run_id, expected = await mixed(world, 40)
    indexes, read, pages = await read_all(tasks, run_id, None, limit)
    assert indexes == list(range(40))
    assert read == 40
    assert pages == -(-40 // limit)
    for chosen in ({P}, {R}, {S}, {F}, {P, R}, {S, F}, {P, F}, {R, S}, {P, R, S}, {P, R, S, F}):
        indexes, read, pages = await read_all(tasks, run_id, frozenset(chosen), limit)
        assert indexes == sorted(index for status in chosen for index in expected[status])
        if binding_kind.filtered_pages_read_only_matches:
            assert read == len(indexes)
    assert await read_all(tasks, run_id, frozenset(), limit) == ([], 0, 1)


async def test_a_page_that_ends_with_the_run_says_so(world: World, tasks: Tasks) -> None:
    job_id, run_id = await world.submit(4, closed=False)
    page = await tasks.page_tasks(run_id, statuses=None, after=1, limit=2)
    assert (page.next_index, page.rows_read) == (None, 2)
    await world.append(job_id, 1)
    page = await tasks.page_tasks(run_id, statuses=None, after=1, limit=2)
    assert page.next_index == 3


@pytest.mark.guarantee("G13")
async def test_paging_while_tasks_finish_gives_each_row_once(world: World, tasks: Tasks) -> None:
    _, run_id = await world.submit(30)

    async def work() -> None:
        for index in range(30):
            await world.succeed(run_id, index)

    working = asyncio.create_task(work())
    reads = [await read_all(tasks, run_id, None, limit) for limit in range(1, 31)]
    await working
    assert all(indexes == list(range(30)) for indexes, _, _ in reads)


async def test_a_run_that_does_not_exist_has_no_tasks(world: World, tasks: Tasks) -> None:
    unknown = world.clock.new_id()
    page = await tasks.page_tasks(unknown, statuses=None, after=None, limit=10)
    assert (page.tasks, page.next_index, page.rows_read) == ([], None, 0)
    assert await tasks.unfinished_after(unknown, -1, 10) == []
    assert await tasks.scrub_tasks(unknown, 10) == 0


async def test_unfinished_rows_come_in_order(world: World, tasks: Tasks) -> None:
    run_id, expected = await mixed(world, 20)
    unfinished = sorted(expected[P] + expected[R])
    references = [(index, ids.task_id(run_id, index)) for index in unfinished]
    assert await tasks.unfinished_after(run_id, -1, 100) == references
    assert await tasks.unfinished_after(run_id, -1, 3) == references[:3]
    assert await tasks.unfinished_after(run_id, references[2][0], 3) == references[3:6]
    assert await tasks.unfinished_after(run_id, references[-1][0], 3) == []


@pytest.mark.guarantee("G10")
async def test_a_scrub_removes_a_deleted_runs_rows_in_steps(
    world: World, jobs: Jobs, tasks: Tasks
) -> None:
    job_id, run_id = await world.submit(10)
    for index in range(0, 10, 2):
        await world.succeed(run_id, index)
    await world.claimed(run_id, 1)
    _, other_run = await world.submit(10)
    await world.succeed(other_run, 3)
    assert await tasks.scrub_tasks(run_id, 100) == 0
    await jobs.delete_job(CALLER, job_id, now=world.now)
    assert [await tasks.scrub_tasks(run_id, 4) for _ in range(4)] == [4, 4, 2, 0]
    assert await world.rows(run_id) == []
    assert await tasks.task_history(run_id, ids.task_id(run_id, 0)) is None
    assert len(await world.rows(other_run)) == 10
    history = await tasks.task_history(other_run, ids.task_id(other_run, 3))
    assert history is not None
    assert len(history) == 1
