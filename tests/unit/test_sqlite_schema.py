"""Files of an older or newer schema, and files that are none."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from conveyor.dev.sqlite import open_store
from conveyor.dev.sqlite.schema import STEPS
from conveyor.domain import ids
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import Callback
from conveyor.testing.clock import FakeClock
from tests.conformance.world import CALLER, World


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "conveyor.db"


def build_older(path: Path, version: int) -> None:
    """A file as an older schema left it: a run that inherits a row of another one."""
    connection = sqlite3.connect(path)
    for statement in STEPS[0]:
        connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {version}")
    connection.execute(
        "INSERT INTO jobs VALUES ('JOB', ?, 'closed', 1, 1, NULL, NULL, NULL, '{}', 'html', "
        "100, 5, 3, 14, 1, 'stripe', x'', 'SECOND', 2, 1)",
        (CALLER,),
    )
    for sequence, run_id in enumerate(("FIRST", "SECOND"), start=1):
        connection.execute(
            "INSERT INTO runs VALUES (?1, ?2, 'JOB', ?1, 'completed', 1, 1, 'manual', 0, 1, 1, "
            "1, 1, 0, '{}', 0, 0, NULL, NULL, NULL, 1, 0)",
            (sequence, run_id),
        )
        connection.execute(
            "INSERT INTO tasks (task_key, state, task_id, created_at, updated_at, source_run_id, "
            'spec) VALUES (? << 35, 1, ?, 1, 1, ?, \'{"url":"http://a/"}\')',
            (sequence, ids.task_id("FIRST", 0), "FIRST" if sequence == 2 else None),
        )
    for step in STEPS[1:version]:
        for statement in step:
            connection.execute(statement)
    connection.commit()
    connection.close()


@pytest.mark.slow
@pytest.mark.parametrize("version", range(1, len(STEPS)))
async def test_an_older_file_is_upgraded_in_place(path: Path, version: int) -> None:
    build_older(path, version)
    store = await open_store(path, now=0)
    page = await store.tasks.page_tasks("SECOND", statuses=None, after=None, limit=10)
    assert [(task.source_run_id, task.spec.url) for task in page.tasks] == [("FIRST", "http://a/")]
    with pytest.raises(ConveyorError) as refusal:
        await store.runs.delete_run(CALLER, "JOB", "FIRST", now=1)
    assert refusal.value.code is ErrorCode.RUN_HAS_DESCENDANTS
    changes = await store.runs.dispatch_changes(since=1)
    assert [change.run_id for change in changes] == ["FIRST", "SECOND"]
    assert await store.runs.dispatch_changes(since=2) == []
    job = await store.jobs.find_job("JOB")
    assert job is not None
    assert job.callback is None
    world = World(store, FakeClock())
    new_job, new_run = await world.submit(1, callback=Callback("a token"))
    await store.runs.stop_run(CALLER, new_job, now=world.now)
    assert await store.outbox.due_entries(now=world.now, limit=10) == [new_run]
    await store.aclose()
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA user_version").fetchone() == (len(STEPS),)
    connection.close()


async def test_a_newer_file_is_refused_untouched(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {len(STEPS) + 1}")
    connection.execute("CREATE TABLE of_the_future (x)")
    connection.commit()
    connection.close()
    with pytest.raises(ConveyorError, match="newer Conveyor") as refusal:
        await open_store(path, now=0)
    assert refusal.value.code is ErrorCode.UNAVAILABLE
    assert "\n" not in refusal.value.detail
    connection = sqlite3.connect(path)
    tables = connection.execute("SELECT name FROM sqlite_master").fetchall()
    assert tables == [("of_the_future",)]
    connection.close()


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
    build_older(path, 1)
    broken = (STEPS[0], (*STEPS[1], "SELECT no_such_function()"))
    monkeypatch.setattr("conveyor.dev.sqlite.schema.STEPS", broken)
    with pytest.raises(ConveyorError):
        await open_store(path, now=0)
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA user_version").fetchone() == (1,)
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    assert "run_sources" not in tables
    connection.close()
