"""Files of an older or newer schema, and files that are not databases."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from conveyor.dev.sqlite import open_store
from conveyor.dev.sqlite.schema import APPLICATION_ID, STEPS, schema_problem
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import WaitReason
from conveyor.domain.task_rules import Deferred
from conveyor.testing.clock import FakeClock
from tests.conformance.world import World
from tests.unit.earlier_files import write_earlier_file


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "conveyor.db"


def query(path: Path, statement: str) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(statement).fetchall()
    finally:
        connection.close()


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def build(path: Path, *, version: int, application: int) -> None:
    """Make a file by hand, with a table that no version of Conveyor knows."""
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE unknown (x)")
    connection.execute(f"PRAGMA application_id = {application}")
    connection.execute(f"PRAGMA user_version = {version}")
    connection.commit()
    connection.close()


async def test_a_new_file_says_whose_it_is_and_how_many_steps_it_took(path: Path) -> None:
    store = await open_store(path, now=0)
    await store.aclose()
    assert query(path, "PRAGMA application_id") == [(APPLICATION_ID,)]
    assert query(path, "PRAGMA user_version") == [(len(STEPS),)]


async def test_an_older_file_is_upgraded_in_place(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await open_store(path, now=0)
    world = World(store, FakeClock())
    _job_id, run_id = await world.submit(2)
    await store.aclose()
    later = ("ALTER TABLE tasks ADD COLUMN later INTEGER NOT NULL DEFAULT 7",)
    monkeypatch.setattr("conveyor.dev.sqlite.schema.STEPS", (*STEPS, later))

    for _ in range(2):  # the second time there is nothing left to do
        store = await open_store(path, now=0)
        page = await store.tasks.page_tasks(run_id, statuses=None, after=None, limit=10)
        await store.aclose()
        assert [task.index for task in page.tasks] == [0, 1]
        assert query(path, "SELECT later FROM tasks") == [(7,), (7,)]
        assert query(path, "PRAGMA user_version") == [(len(STEPS) + 1,)]


async def test_rows_of_the_first_schema_can_say_why_they_wait(path: Path) -> None:
    runs: list[str] = []
    write_earlier_file(path, FakeClock(), version=1, fill=lambda file: runs.append(file.submit(2)))
    [run_id] = runs
    store = await open_store(path, now=0)
    world = World(store, FakeClock())
    task = await world.claimed(run_id, 0)
    await world.settle(task, Deferred(world.now + 1, WaitReason.OUTAGE))
    assert [row.waiting for row in await world.rows(run_id)] == [WaitReason.OUTAGE, None]
    await store.aclose()


@pytest.mark.parametrize(
    ("version", "application", "words"),
    [
        (len(STEPS) + 1, APPLICATION_ID, "newer Conveyor"),
        (1, 0, "development version before 0.1.0"),
        (6, 0, "development version before 0.1.0"),
    ],
)
async def test_a_file_of_another_schema_is_refused_untouched(
    path: Path, version: int, application: int, words: str
) -> None:
    build(path, version=version, application=application)
    before = contents(path.parent)
    with pytest.raises(ConveyorError, match=words) as refusal:
        await open_store(path, now=0)
    assert refusal.value.code is ErrorCode.UNAVAILABLE
    assert "\n" not in refusal.value.detail
    assert contents(path.parent) == before


def make_unusable(path: Path, kind: str) -> None:
    if kind == "text":
        path.write_bytes(b"this is not a database at all" * 100)
    else:
        path.mkdir()


@pytest.mark.parametrize("kind", ["text", "directory"])
async def test_what_is_no_database_is_refused_without_its_path(path: Path, kind: str) -> None:
    make_unusable(path, kind)
    with pytest.raises(ConveyorError) as refusal:
        await open_store(path, now=0)
    assert refusal.value.code is ErrorCode.UNAVAILABLE
    assert str(path) not in str(refusal.value)


async def test_a_step_that_fails_leaves_the_older_file(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await open_store(path, now=0)
    await store.aclose()
    broken = ("CREATE TABLE half_done (x)", "SELECT no_such_function()")
    monkeypatch.setattr("conveyor.dev.sqlite.schema.STEPS", (*STEPS, broken))
    with pytest.raises(ConveyorError):
        await open_store(path, now=0)
    assert query(path, "PRAGMA user_version") == [(len(STEPS),)]
    assert query(path, "SELECT name FROM sqlite_master WHERE name = 'half_done'") == []


def test_a_log_with_something_in_it_tells_that_a_file_was_removed(path: Path) -> None:
    log = path.with_name("conveyor.db-wal")
    assert schema_problem(path) is None
    log.touch()
    assert schema_problem(path) is None
    log.write_bytes(b"x")
    assert "missing or empty" in (schema_problem(path) or "")
