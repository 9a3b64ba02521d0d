"""Another program holds SQLite's write lock, the file is taken away, or its bytes are damaged."""

from __future__ import annotations

import asyncio
import logging
import random
import re
import resource
import shutil
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from conveyor.dev.binding import open_binding
from conveyor.dev.sqlite import SqliteStore, database, open_store
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.settings import load
from conveyor.testing.clock import FakeClock
from conveyor.testing.local_server import API_KEY, serving
from tests.conformance.world import CALLER, World
from tests.patient import SECONDS

SLICES = 4
INSERT = (
    "INSERT INTO idempotency_keys (scope, fingerprint, created_id, lapses_at, expires_at) "
    "VALUES (?, x'', '', 0, 0)"
)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Attempts:
    """Counts the tries of a group, and sets an event after as many as are `awaited`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.made = 0
        self.awaited = 1
        self.reached = asyncio.Event()
        self._loop = loop

    def count(self) -> None:
        """Count one."""
        self.made += 1
        if self.made == self.awaited:
            self._loop.call_soon_threadsafe(self.reached.set)


@pytest.fixture
async def attempts(monkeypatch: pytest.MonkeyPatch) -> Attempts:
    counted = Attempts(asyncio.get_running_loop())
    transaction = database._transaction

    def counting(group: list[Any], connection: sqlite3.Connection) -> list[Any]:
        counted.count()
        return transaction(group, connection)

    monkeypatch.setattr(database, "_transaction", counting)
    monkeypatch.setattr(database, "_BUSY_TIMEOUT", 0.1)
    monkeypatch.setattr(database, "_SLICES", SLICES)
    return counted


@pytest.fixture
async def store(tmp_path: Path, attempts: Attempts) -> AsyncIterator[SqliteStore]:
    opened = await open_store(tmp_path / "conveyor.db", now=0)
    attempts.made = 0
    yield opened
    await opened.aclose()


@contextmanager
def locked(path: Path) -> Iterator[sqlite3.Connection]:
    """The write lock, held by somebody else."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield other


def write(store: SqliteStore, number: int) -> asyncio.Task[Any]:
    return asyncio.create_task(
        store.database.write(lambda writer: writer.execute(INSERT, (str(number),)).rowcount)
    )


def refused(error: object) -> None:
    assert isinstance(error, ConveyorError)
    assert error.code is ErrorCode.UNAVAILABLE
    assert error.detail == "another program has locked conveyor.db"


async def test_a_locked_file_is_told_once_and_a_group_is_tried_as_a_whole(
    store: SqliteStore, attempts: Attempts, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with locked(store.path):
        writes = [write(store, number) for number in range(50)]
        for error in await asyncio.gather(*writes, return_exceptions=True):
            refused(error)
        assert attempts.made == SLICES
        # It has been waited for already: those that come later are told sooner.
        for error in await asyncio.gather(write(store, 50), return_exceptions=True):
            refused(error)
        assert attempts.made == SLICES + 1
        assert await store.jobs.find_job("reading goes on") is None
    assert await write(store, 51) == 1
    assert caplog.messages == [
        "another program has locked conveyor.db: writes wait for it",
        "conveyor.db is free again",
    ]


async def test_a_file_that_is_free_again_in_time_costs_nobody_anything(
    store: SqliteStore, attempts: Attempts
) -> None:
    groups = store.groups
    attempts.awaited = 2
    with locked(store.path) as other:
        writes = [write(store, number) for number in range(50)]
        await attempts.reached.wait()
        other.execute("ROLLBACK")
        assert await asyncio.gather(*writes) == [1] * 50
    assert store.groups == groups + 1


async def test_closing_waits_for_no_other_program(store: SqliteStore, attempts: Attempts) -> None:
    with locked(store.path):
        waiting = write(store, 1)
        await attempts.reached.wait()
        later = write(store, 2)
        await asyncio.sleep(0)
        store.database.hurry()
        await store.aclose()
        for error in await asyncio.gather(waiting, later, return_exceptions=True):
            refused(error)
    assert attempts.made <= 3 < SLICES


def test_a_file_locked_against_readers_costs_a_group_of_reads_one_wait() -> None:
    tried: list[sqlite3.Connection] = []
    operations = (busy, tried.append, tried.append)
    with closing(asyncio.new_event_loop()) as loop, closing(sqlite3.connect(":memory:")) as reader:
        group = [database._Queued(None, (one,), loop.create_future()) for one in operations]
        results = database._read(group, reader)
    assert len(results) == len(operations)
    for result in results:
        refused(result.error)
    assert tried == []


def busy(_reader: sqlite3.Connection) -> None:
    error = sqlite3.OperationalError("database is locked")
    error.sqlite_errorcode = sqlite3.SQLITE_BUSY
    error.sqlite_errorname = "SQLITE_BUSY"
    raise error


@pytest.mark.slow
@pytest.mark.parametrize("part", ["", "blobs"])
@pytest.mark.parametrize("way", ["removed", "moved and moved back"])
def test_a_server_without_its_data_directory_takes_nothing_on(
    tmp_path: Path, way: str, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    job = {"tasks": [{"url": "https://site.test/"}]}
    settings = load({}, data_dir=str(data), port=0, gateway="fake", shutdown_grace=0.0)
    with (
        serving(settings) as (info, _),
        httpx.Client(headers={"X-API-Key": API_KEY}, timeout=SECONDS, trust_env=False) as client,
    ):
        ready = info.api.replace("/v1", "/readyz")
        assert client.post(f"{info.api}/jobs", json=job).status_code == 201
        assert client.get(ready).status_code == 200
        if way == "removed":
            shutil.rmtree(data / part)
        else:
            (data / part).rename(elsewhere)
        for _ in range(3):
            answers = [client.get(ready), client.post(f"{info.api}/jobs", json=job)]
            answers.append(client.get(f"{info.api}/jobs"))
            assert [answer.status_code for answer in answers] == [503] * 3
            assert "directory was removed or replaced" in answers[1].json()["detail"]
        said = [text for text in caplog.messages if "while its server runs" in text]
        assert len(said) == 1
        assert not (data / part).exists()
        if way != "removed":
            elsewhere.rename(data / part)
            assert client.get(ready).status_code == 200
            assert client.post(f"{info.api}/jobs", json=job).status_code == 201


async def test_a_body_that_comes_late_makes_no_directory_anew(tmp_path: Path) -> None:
    dev = await open_binding(tmp_path / "data", FakeClock())
    shutil.rmtree(tmp_path / "data")
    assert dev.ports.pipeline is not None
    [error] = await dev.ports.pipeline.bodies.put_new([("results/30/a/b/c", b"late")])
    assert isinstance(error, ConveyorError)
    with pytest.raises(ConveyorError):
        await dev.ports.blobs.put("inputs/late", b"late")
    assert not (tmp_path / "data").exists()
    await dev.ports.aclose()


@pytest.mark.slow
async def test_a_group_with_a_large_operation_opens_no_file(
    store: SqliteStore, attempts: Attempts
) -> None:
    def fill(file: sqlite3.Connection) -> None:
        file.executemany(INSERT, [(f"{number:0500}",) for number in range(2_000)])

    def change(file: sqlite3.Connection) -> int:
        return file.execute("UPDATE idempotency_keys SET created_id = 'changed'").rowcount

    await store.database.write(fill)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        made = await asyncio.gather(*(store.database.write(change) for _ in range(3)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert made == [2_000] * 3
    assert attempts.made == 2


async def test_damaged_bytes_are_told_with_the_name_of_the_file(tmp_path: Path) -> None:
    """Whatever bytes are flipped: a server works with what it can read, or says what is damaged."""
    whole = tmp_path / "whole"
    dev = await open_binding(whole, FakeClock())
    world = World(dev.store, FakeClock())
    _, run_id = await world.submit(100)
    for index in range(20):
        await world.succeed(run_id, index)
    await dev.ports.aclose()
    content = (whole / "conveyor.db").read_bytes()
    draw = random.Random(5)
    told: list[ConveyorError] = []
    for number in range(60):
        damaged = tmp_path / str(number)
        damaged.mkdir()
        shutil.copy(whole / "secret", damaged)
        changed = bytearray(content)
        for _ in range(draw.choice([1, 20, 400])):
            changed[draw.randrange(12_000 if number % 2 else len(changed))] = draw.randrange(256)
        (damaged / "conveyor.db").write_bytes(changed)
        try:
            await look_through(damaged, run_id)
        except ConveyorError as error:
            told.append(error)
    assert len(told) > 20
    assert {error.code for error in told} == {ErrorCode.UNAVAILABLE}
    assert [e.detail for e in told if not re.search("conveyor.db|its schema is", e.detail)] == []


async def look_through(directory: Path, run_id: str) -> None:
    """Open a directory and read what callers read. Raises ConveyorError."""
    dev = await open_binding(directory, FakeClock(seed=2))
    try:
        await dev.store.jobs.list_jobs(CALLER, status=None, before=None, limit=50)
        page = await dev.store.tasks.page_tasks(run_id, statuses=None, after=None, limit=100)
        for task in page.tasks[:30]:
            await dev.store.tasks.task_history(run_id, task.task_id)
    finally:
        await dev.ports.aclose()
