"""Failure groups in the SQLite store: what they cost, and how a recount repairs them."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from conveyor.dev.sqlite import SqliteStore, open_store
from conveyor.dev.sqlite.tasks import OF_ONE_GROUP
from conveyor.domain.failure_groups import MOST_GROUPS
from conveyor.domain.model import GroupFilter, Problem, TaskFailure
from conveyor.testing.clock import FakeClock
from tests.conformance.world import CALLER, F, World

TABLES = ("failure_groups", "failure_counts")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    opened = await open_store(tmp_path / "conveyor.db", now=0, max_readers=1)
    yield opened
    await opened.aclose()


@pytest.fixture
def world(store: SqliteStore) -> World:
    return World(store, FakeClock())


def problem(kind: int) -> Problem:
    words = "".join(chr(ord("a") + int(digit)) for digit in str(kind))
    return Problem(code="blocked", title="Blocked", status=502, detail=words)


async def failed_run(world: World, kinds: list[int]) -> tuple[str, str]:
    """Submit a run with a task more than fail, one of each kind in turn."""
    job_id, run_id = await world.submit(len(kinds) + 1)
    for index, kind in enumerate(kinds):
        await world.fail(run_id, index, TaskFailure.BLOCKED, problem(kind))
        await world.clock.advance(1)
    return job_id, run_id


async def rows_of(store: SqliteStore, table: str) -> list[tuple[object, ...]]:
    return await store.database.read(
        lambda reader: reader.execute(f"SELECT * FROM {table}").fetchall()
    )


async def test_a_success_asks_for_no_group(store: SqliteStore, world: World) -> None:
    _, run_id = await world.submit(3)
    statements: list[str] = []
    await store.database.write(lambda writer: writer.set_trace_callback(statements.append))
    await world.succeed(run_id, 0)
    assert any("UPDATE runs" in statement for statement in statements)
    assert not [one for one in statements if any(table in one for table in TABLES)]

    await world.fail(run_id, 1)
    assert [one for one in statements if "failure_groups" in one]
    statements.clear()
    await world.succeed(run_id, 2)
    assert not [one for one in statements if any(table in one for table in TABLES)]


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE failure_counts SET counts = replace(counts, '[2,', '[7,')",
        "UPDATE failure_counts SET counts = json_set(counts, '$.aaaaaaaaaaaa', json('[3,0]'))",
        "UPDATE failure_counts SET counts = '{}'; UPDATE runs SET failed = 9",
        "DELETE FROM failure_counts; UPDATE runs SET failed = 9",
    ],
)
async def test_a_sweep_sets_groups_right(store: SqliteStore, world: World, damage: str) -> None:
    _, run_id = await failed_run(world, [0, 1, 0, 1, 2])
    groups, counts = await world.groups(run_id), await rows_of(store, "failure_counts")

    def change(writer: sqlite3.Connection) -> None:
        for statement in damage.split(";"):
            writer.execute(statement)

    await store.database.write(change)
    assert await rows_of(store, "failure_counts") != counts
    await store.sweeping.reconcile_run(run_id, now=world.now)
    assert await world.groups(run_id) == groups
    await world.fail(run_id, 5, TaskFailure.BLOCKED, problem(0))
    assert (await world.groups(run_id)).other == 0


async def test_a_group_whose_count_is_lost_begins_anew(store: SqliteStore, world: World) -> None:
    _, run_id = await failed_run(world, [0])

    def damage(writer: sqlite3.Connection) -> None:
        writer.execute("DELETE FROM failure_counts")
        writer.execute("UPDATE runs SET failed = 0")

    await store.database.write(damage)
    await world.fail(run_id, 1, TaskFailure.BLOCKED, problem(0))
    [group] = (await world.groups(run_id)).groups
    assert (group.count, group.first_at, group.last_at) == (1, world.now, world.now)


async def test_groups_without_a_row_of_theirs_begin_from_their_tasks(
    store: SqliteStore, world: World
) -> None:
    _, run_id = await failed_run(world, [0, 1, 0, 1, 0, 0])
    before = await world.groups(run_id)

    def damage(writer: sqlite3.Connection) -> None:
        for table in TABLES:
            writer.execute(f"DELETE FROM {table}")
        writer.execute("UPDATE runs SET failed = 0")

    await store.database.write(damage)
    await store.sweeping.reconcile_run(run_id, now=world.now)
    assert await world.groups(run_id) == before


async def test_a_recount_keeps_no_more_groups_than_a_run_may_have(
    store: SqliteStore, world: World
) -> None:
    _, run_id = await failed_run(world, list(range(MOST_GROUPS + 5)))
    before = await world.groups(run_id)
    assert (len(before.groups), before.other) == (MOST_GROUPS, 5)

    def damage(writer: sqlite3.Connection) -> None:
        for table in TABLES:
            writer.execute(f"DELETE FROM {table}")
        writer.execute("UPDATE runs SET failed = 0")

    await store.database.write(damage)
    await store.sweeping.reconcile_run(run_id, now=world.now)
    after = await world.groups(run_id)
    assert (len(after.groups), after.other) == (MOST_GROUPS, 5)


async def test_groups_go_with_their_run(store: SqliteStore, world: World) -> None:
    job_id, run_id = await failed_run(world, [0, 1])
    _, other = await failed_run(world, [0])
    await store.jobs.delete_job(CALLER, job_id, now=world.now)
    await store.runs.purge_run(other)  # it is not deleted
    await store.runs.purge_run(run_id)
    assert await store.tasks.failure_groups(run_id) is None
    assert len((await world.groups(other)).groups) == 1
    assert [len(await rows_of(store, table)) for table in TABLES] == [1, 1]


async def test_a_page_of_a_group_is_found_in_the_index_of_states(
    store: SqliteStore, world: World
) -> None:
    def explain(reader: sqlite3.Connection) -> list[str]:
        plan = reader.execute(f"EXPLAIN QUERY PLAN {OF_ONE_GROUP}", ("run", 0, 1, 1, "group"))
        return [row[3] for row in plan]

    assert (
        "SEARCH tasks USING COVERING INDEX tasks_by_state (state=? AND task_key>? AND task_key<?)"
        in await store.database.read(explain)
    )
    _, run_id = await failed_run(world, [0, 1, 1, 1, 0])
    rare = (await world.groups(run_id)).groups[1]
    page = await store.tasks.page_tasks(
        run_id,
        statuses=frozenset({F}),
        after=None,
        limit=10,
        groups=GroupFilter(frozenset({rare.group_id})),
    )
    assert ([task.index for task in page.tasks], page.rows_read) == ([0, 4], 2)


async def test_reading_groups_counts_a_row_for_each_and_one_for_the_rest(
    store: SqliteStore, world: World
) -> None:
    _, run_id = await failed_run(world, [0, 1, 1])
    before = store.rows_read
    found = await store.tasks.failure_groups(run_id)
    assert found is not None
    assert (len(found.groups), store.rows_read - before) == (2, 3)
