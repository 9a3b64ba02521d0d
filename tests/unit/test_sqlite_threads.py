"""The thread on which a group of writes runs: the loop's own for a short batch, or the writer's."""

from __future__ import annotations

import asyncio
import math
import sqlite3
import threading
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from conveyor.dev.sqlite import SqliteStore, database, open_store
from conveyor.domain.errors import ConveyorError

INSERT = (
    "INSERT INTO idempotency_keys (scope, fingerprint, created_id, lapses_at, expires_at) "
    "VALUES (?, zeroblob(2000), '', 0, 0)"
)
MOST = database._MOST_HERE


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SqliteStore]:
    # Else the thread depends on how busy the machine is: a write that took long sends the next ones
    # to the other.
    monkeypatch.setattr("conveyor.aio.concurrency.SLOW", math.inf)
    opened = await open_store(tmp_path / "conveyor.db", now=0)
    await opened.database.write(lambda writer: None)
    yield opened
    await opened.aclose()


def insert(writer: sqlite3.Connection, items: list[int]) -> list[bool]:
    """Write a row an item; tell whether that was on the loop's thread."""
    writer.executemany(INSERT, [(str(item),) for item in items])
    return [threading.current_thread() is threading.main_thread()] * len(items)


async def write(store: SqliteStore, first: int, count: int = 2) -> bool:
    here = await store.database.write_many(insert, range(first, first + count))
    assert len(here) == count
    return bool(here[0])


async def test_a_short_batch_is_written_before_anybody_waits(store: SqliteStore) -> None:
    groups = store.groups
    future = store.database._writes.submit(insert, range(MOST))
    assert future.done()
    assert future.result() == [True] * MOST
    assert store.groups == groups + 1


async def test_a_long_batch_and_one_item_go_to_the_writers_thread(store: SqliteStore) -> None:
    assert not await write(store, 0, MOST + 1)
    assert not await store.database.write_batched(insert, MOST + 1)


async def test_a_batch_overtakes_nothing_that_is_queued(store: SqliteStore) -> None:
    order: list[str] = []
    other = asyncio.create_task(store.database.write(lambda writer: order.append("operation")))
    await asyncio.sleep(0)
    assert not await write(store, 0)
    order.append("batch")
    await other
    assert order == ["operation", "batch"]
    assert await write(store, 2)


async def test_the_loop_waits_for_no_lock_of_another_program(store: SqliteStore) -> None:
    with closing(sqlite3.connect(store.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        writing = asyncio.create_task(write(store, 0))
        for _ in range(3):
            await asyncio.sleep(0)
        assert not writing.done()
        other.execute("ROLLBACK")
    assert not await writing
    assert await write(store, 2)


async def test_after_slow_work_the_writers_thread_is_asked(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conveyor.aio.concurrency.SLOW", 0.0)
    assert await write(store, 0)
    assert not await write(store, 2)


async def test_the_log_is_checkpointed_now_and_then(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_HERE_IN_A_ROW", 4)
    monkeypatch.setattr(database, "_CHECKPOINT_PAGES", 20)
    here = [await write(store, 2 * number) for number in range(50)]
    assert here == ([True] * 4 + [False]) * 10
    one = store.wal_size() / 50
    for number in range(50, 500):
        await write(store, 2 * number)
    assert store.wal_size() < 200 * one


async def test_after_a_lock_that_is_gone_a_batch_on_the_loop_says_so(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A later lock is waited for, and told, as the first one was."""
    caplog.set_level("INFO")
    monkeypatch.setattr(database, "_BUSY_TIMEOUT", 0.04)
    with closing(sqlite3.connect(store.path, isolation_level=None)) as other:
        for number in range(2):
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(ConveyorError, match="another program has locked"):
                await write(store, 4 * number)
            assert store.database._writes._attempts == 1
            other.execute("ROLLBACK")
            assert await write(store, 4 * number + 2)
            assert store.database._writes._attempts > 1
    assert caplog.messages == 2 * [
        "another program has locked conveyor.db: writes wait for it",
        "conveyor.db is free again",
    ]
