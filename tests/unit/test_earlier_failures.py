"""A database of the version before failure groups opens: what failed in it counts as `other`."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from conveyor.dev.sqlite import SqliteStore, open_store
from conveyor.dev.sqlite.schema import GROUPS_AND_SHAPES
from conveyor.domain import ids
from conveyor.domain.failure_groups import OTHER_GROUP, group_filter
from conveyor.domain.model import Format, GroupFilter, RunStatus, StoredBody, TaskFailure
from conveyor.domain.result_shape import SIZE_CLASSES, ResultShape
from conveyor.testing.clock import FakeClock
from tests.conformance.world import CALLER, PROBLEM, F, P, World
from tests.unit.earlier_files import (
    BEFORE_GROUPS,
    BEFORE_GROUPS_IN_TASKS,
    EarlierFile,
    write_earlier_file,
)

BODY = StoredBody("key", 5, "text/html; charset=x", Format.HTML)
SHAPE = ResultShape((0, 1, *[0] * (SIZE_CLASSES - 2)), {"text/html": 1})


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Upgraded:
    """A run of the earlier version, of which tasks 0 and 1 have failed, 2 is successful, and 3 and
    4 are pending, in a store of the present one."""

    store: SqliteStore
    world: World
    run_id: str

    async def job_id(self) -> str:
        """The id of its job."""
        [listed] = await self.store.runs.changed_runs(CALLER, before=None, limit=10)
        return listed.job.job_id

    async def counts(self, run_id: str) -> tuple[int, int, int]:
        """`failed`, the count of what is in no group, and the number of groups."""
        groups = await self.world.groups(run_id)
        return groups.failed, groups.other, len(groups.groups)


@pytest.fixture
async def upgraded(tmp_path: Path) -> AsyncIterator[Upgraded]:
    clock, path, runs = FakeClock(), tmp_path / "conveyor.db", list[str]()

    def fill(file: EarlierFile) -> None:
        runs.append(file.submit(5))
        for index in (0, 1):
            file.fail(runs[0], index, PROBLEM, TaskFailure.TIMEOUT)
        file.succeed(runs[0], 2, BODY)

    write_earlier_file(path, clock, version=BEFORE_GROUPS, fill=fill)
    store = await open_store(path, now=clock.now())
    yield Upgraded(store, World(store, clock), runs[0])
    await store.aclose()


async def test_earlier_failures_count_as_other(upgraded: Upgraded) -> None:
    world, run_id = upgraded.world, upgraded.run_id
    assert await upgraded.counts(run_id) == (2, 2, 0)
    rows = await world.rows(run_id)
    assert [(row.failure, row.failure_group) for row in rows[:2]] == [
        (TaskFailure.TIMEOUT, None)
    ] * 2
    page = await world.store.tasks.page_tasks(
        run_id,
        statuses=frozenset({F}),
        after=None,
        limit=10,
        groups=group_filter(frozenset({OTHER_GROUP}), []),
    )
    assert [task.index for task in page.tasks] == [0, 1]

    # No group begins in such a run, as nobody knows what its earlier failures would be in.
    await world.fail(run_id, 3)
    assert await upgraded.counts(run_id) == (3, 3, 0)


async def test_a_sweep_counts_the_shape_and_leaves_the_failures_in_other(
    upgraded: Upgraded,
) -> None:
    world, run_id = upgraded.world, upgraded.run_id
    job_id = await upgraded.job_id()
    assert (await world.run(job_id)).stats.shape == ResultShape()
    for _ in range(2):
        status = await world.store.sweeping.reconcile_run(run_id, now=world.now)
        assert status is RunStatus.RUNNING
        assert (await world.run(job_id)).stats.shape == SHAPE
        assert await upgraded.counts(run_id) == (2, 2, 0)


@pytest.mark.parametrize("large_from", [10_000, 2], ids=["small", "large"])
async def test_earlier_failures_are_rerun_and_inherited(
    upgraded: Upgraded, large_from: int
) -> None:
    world, job_id = upgraded.world, await upgraded.job_id()
    await world.store.runs.stop_run(CALLER, job_id, now=world.now)
    inheriting, told = await world.rerun(job_id, P, large_from=large_from)
    assert told == f"2 3 {upgraded.run_id}"
    assert await upgraded.counts(inheriting) == (2, 2, 0)
    if large_from == 2:
        await copy(world, inheriting)
    assert await upgraded.counts(inheriting) == (2, 2, 0)
    assert (await world.run(job_id)).stats.shape == SHAPE
    await world.store.runs.stop_run(CALLER, job_id, now=world.now)

    again, told = await world.rerun(job_id, groups=[OTHER_GROUP], large_from=large_from)
    assert told == f"2 1 {inheriting}"
    if large_from == 2:
        await copy(world, again)
    task = await world.claimed(again, 0, task_id=ids.task_id(upgraded.run_id, 0))
    await world.settle(task, world.success(task))
    assert await upgraded.counts(again) == (0, 0, 0)


async def copy(world: World, run_id: str) -> None:
    """Do all the ingestion of a large rerun."""
    ingestion = world.store.ingestion
    await ingestion.copy_rows(run_id, first_index=0, end_index=5, now=world.now)
    await ingestion.finish_ingest(run_id, now=world.now)


async def test_a_rerun_under_way_counts_what_an_earlier_version_has_copied(
    upgraded: Upgraded,
) -> None:
    world, job_id = upgraded.world, await upgraded.job_id()
    await world.store.runs.stop_run(CALLER, job_id, now=world.now)
    run_id, _ = await world.rerun(job_id, P, large_from=2)
    ingestion = world.store.ingestion
    await ingestion.copy_rows(run_id, first_index=0, end_index=2, now=world.now)
    [count] = [one for one in GROUPS_AND_SHAPES if "SET inherited_copied" in one]

    def upgrade_again(writer: sqlite3.Connection) -> None:
        writer.execute("UPDATE runs SET inherited_copied = 0")
        writer.execute(count)

    await upgraded.store.database.write(upgrade_again)
    await ingestion.copy_rows(run_id, first_index=2, end_index=5, now=world.now)
    await ingestion.finish_ingest(run_id, now=world.now)
    assert (await world.run(job_id)).stats.inherited == 3


async def test_the_group_of_a_failed_task_is_kept(tmp_path: Path) -> None:
    clock, path, runs = FakeClock(), tmp_path / "conveyor.db", list[str]()
    group_id = "abcdefghijkl"

    def fill(file: EarlierFile) -> None:
        runs.append(file.submit(4))
        for index in (0, 2):
            file.fail(runs[0], index, PROBLEM, TaskFailure.TIMEOUT)
        file.connection.execute(
            "UPDATE histories SET failure_group = ? WHERE task_key & 3 = 2", (group_id,)
        )

    write_earlier_file(path, clock, version=BEFORE_GROUPS_IN_TASKS, fill=fill)
    store = await open_store(path, now=clock.now())
    rows = await World(store, clock).rows(runs[0])
    page = await store.tasks.page_tasks(
        runs[0],
        statuses=frozenset({F}),
        after=None,
        limit=10,
        groups=GroupFilter(frozenset({group_id})),
    )
    await store.aclose()

    assert [row.failure_group for row in rows] == [None, None, group_id, None]
    assert [task.index for task in page.tasks] == [2]
