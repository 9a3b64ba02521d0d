"""The SQLite store beyond its ports: groups, faults and boots."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import pytest
from msgspec import structs

from conveyor.dev.sqlite import SqliteStore, claims, open_store, rows, tasks
from conveyor.dev.sqlite.rows import MOST_ROWS, KeyStatement, RowsStatement
from conveyor.dev.sqlite.tasks import UNFINISHED, page_sql
from conveyor.dev.sqlite.upcoming import KeptDays, SqliteUpcoming
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import Callback, RunStatus, TaskStatus
from conveyor.ports.deliveries import DeliveryFilter
from conveyor.ports.outbox import EntryKey, Subscriber
from conveyor.ports.records import StoredResponse
from conveyor.ports.tasks import Claimed, ClaimedElsewhere
from conveyor.testing.clock import FakeClock
from tests.conformance.scheduled_jobs import note, note_fires, schedule_job
from tests.conformance.sent_deliveries import begin, owe
from tests.conformance.world import CALLER, World

INSERT_KEY = (
    "INSERT INTO idempotency_keys (scope, fingerprint, created_id, lapses_at, expires_at) "
    "VALUES (?, x'', '', 0, 0)"
)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "conveyor.db"


@pytest.fixture
async def store(path: Path) -> AsyncIterator[SqliteStore]:
    opened = await open_store(path, now=0)
    yield opened
    await opened.aclose()


@pytest.fixture
def world(store: SqliteStore) -> World:
    return World(store, FakeClock())


async def scopes(store: SqliteStore) -> list[str]:
    rows = await store.database.read(
        lambda reader: reader.execute("SELECT scope FROM idempotency_keys").fetchall()
    )
    return [scope for (scope,) in rows]


async def write_key(store: SqliteStore, scope: str) -> None:
    def insert(writer: sqlite3.Connection) -> None:
        writer.execute(INSERT_KEY, (scope,))

    await store.database.write(insert)


async def test_whatever_is_queued_is_one_group(store: SqliteStore) -> None:
    before = store.groups
    await asyncio.gather(*(write_key(store, str(number)) for number in range(100)))
    assert store.groups == before + 1
    assert store.operations == 100


async def test_claims_and_settlements_share_groups(store: SqliteStore, world: World) -> None:
    _, run_id = await world.submit(100)
    before = store.groups
    await asyncio.gather(*(world.succeed(run_id, index) for index in range(100)))
    assert store.groups == before + 2


async def test_a_failing_write_spares_its_neighbours(store: SqliteStore) -> None:
    def half(writer: sqlite3.Connection) -> None:
        writer.execute(INSERT_KEY, ("half",))
        raise RuntimeError("broken")

    results = await asyncio.gather(
        write_key(store, "before"),
        store.database.write(half),
        write_key(store, "before"),
        write_key(store, "after"),
        return_exceptions=True,
    )
    assert [type(result) for result in results] == [
        type(None),
        RuntimeError,
        sqlite3.IntegrityError,
        type(None),
    ]
    assert await scopes(store) == ["after", "before"]


async def test_a_write_that_undoes_the_group_spares_its_neighbours(store: SqliteStore) -> None:
    def undo(writer: sqlite3.Connection) -> None:
        writer.execute("ROLLBACK")
        raise sqlite3.OperationalError("disk I/O error")

    results = await asyncio.gather(
        write_key(store, "before"),
        store.database.write(undo),
        write_key(store, "after"),
        return_exceptions=True,
    )
    assert isinstance(results[1], ConveyorError)
    assert results[1].code is ErrorCode.UNAVAILABLE
    assert await scopes(store) == ["after", "before"]


async def test_a_failing_batch_fails_no_other_item(store: SqliteStore) -> None:
    def batch(writer: sqlite3.Connection, items: list[int]) -> list[int]:
        if 3 in items:
            raise RuntimeError("broken")
        for item in items:
            writer.execute(INSERT_KEY, (str(item),))
        return items

    results = await asyncio.gather(
        *(store.database.write_batched(batch, number) for number in range(5)),
        return_exceptions=True,
    )
    assert [result for result in results if isinstance(result, int)] == [0, 1, 2, 4]
    assert isinstance(results[3], RuntimeError)
    assert await scopes(store) == ["0", "1", "2", "4"]


async def test_a_cancelled_caller_does_not_stop_its_write(store: SqliteStore) -> None:
    writing = asyncio.create_task(write_key(store, "cancelled"))
    other = asyncio.create_task(write_key(store, "other"))
    await asyncio.sleep(0)
    writing.cancel()
    await other
    assert writing.cancelled()
    assert await scopes(store) == ["cancelled", "other"]


async def test_a_closed_store_refuses_politely(path: Path) -> None:
    store = await open_store(path, now=0)
    queued = asyncio.gather(*(write_key(store, str(number)) for number in range(10)))
    await asyncio.sleep(0)
    await store.aclose()
    await queued
    await store.aclose()
    for late in (write_key(store, "late"), store.runs.dispatchable_runs()):
        with pytest.raises(ConveyorError, match="closed") as refusal:
            await late
        assert refusal.value.code is ErrorCode.UNAVAILABLE
    reopened = await open_store(path, now=-1)
    assert len(await scopes(reopened)) == 10
    await reopened.aclose()


@pytest.mark.slow
async def test_a_full_disk_is_unavailable_and_passes(store: SqliteStore, world: World) -> None:
    def limit(writer: sqlite3.Connection, pages: int) -> None:
        writer.execute(f"PRAGMA max_page_count = {pages}").fetchone()

    await world.submit(10)
    await store.database.write(lambda writer: limit(writer, 1))
    job, run, tasks = world.draft(5_000)
    results = await asyncio.gather(
        store.jobs.create_job(job, run, tasks, answer=StoredResponse(201, b""), once=None),
        write_key(store, "small"),
        return_exceptions=True,
    )
    assert isinstance(results[0], ConveyorError)
    assert results[0].code is ErrorCode.UNAVAILABLE
    assert results[0].detail == "the disk is full"
    assert results[1] is None
    assert await store.jobs.find_job(job.job_id) is None
    await store.database.write(lambda writer: limit(writer, 1_000_000))
    await store.jobs.create_job(job, run, tasks, answer=StoredResponse(201, b""), once=None)
    assert len(await world.rows(run.run_id)) == 5_000


async def test_readers_cannot_write(store: SqliteStore) -> None:
    with pytest.raises(ConveyorError) as refusal:
        await store.database.read(lambda reader: reader.execute(INSERT_KEY, ("x",)))
    assert refusal.value.code is ErrorCode.UNAVAILABLE


async def test_a_store_with_an_upload_is_not_filled(store: SqliteStore, tmp_path: Path) -> None:
    source = await open_store(tmp_path / "source.db", now=0)
    await source.aclose()
    await store.database.write(
        lambda writer: writer.execute("INSERT INTO job_inputs VALUES ('I', 9, 5, '{}')")
    )
    for refused in (store.check_empty(), store.fill(source.path)):
        with pytest.raises(ConveyorError, match="there are uploads already"):
            await refused


def _leave(scope: str, lapses_at: int, writer: sqlite3.Connection) -> None:
    writer.execute(INSERT_KEY, (scope,))
    writer.execute("INSERT INTO sweeps VALUES (1, ?)", (lapses_at,))


async def test_filling_a_store_removes_no_row(store: SqliteStore, tmp_path: Path) -> None:
    """Answers to idempotency keys outlive what was made, and a sweep may be under way."""
    source = await open_store(tmp_path / "source.db", now=0)
    await store.database.write(partial(_leave, "own", 1))
    await source.database.write(partial(_leave, "other", 2))
    await source.aclose()
    await store.fill(source.path)
    assert sorted(await scopes(store)) == ["other", "own"]
    sweeps = await store.database.read(
        lambda reader: reader.execute("SELECT lapses_at FROM sweeps").fetchall()
    )
    assert sweeps == [(1,)]


@pytest.mark.guarantee("G7")
async def test_everything_is_there_after_a_restart(path: Path) -> None:
    clock = FakeClock()
    store = await open_store(path, now=clock.now())
    world = World(store, clock)
    job_id, run_id = await world.submit(3)
    await world.succeed(run_id, 0)
    await world.claimed(run_id, 1)
    before = (await world.view(job_id), await world.rows(run_id))
    await store.aclose()
    world.store = await open_store(path, now=clock.now())
    assert (await world.view(job_id), await world.rows(run_id)) == before
    assert isinstance(await world.claim(run_id, 1), ClaimedElsewhere)
    await world.store.aclose()


@pytest.mark.guarantee("G7")
async def test_a_boot_voids_the_claims_of_live_runs(store: SqliteStore, world: World) -> None:
    live_job, live = await world.submit(4)
    stopped_job, stopped = await world.submit(2)
    held = [await world.claimed(live, index) for index in (0, 2)]
    late = await world.claimed(stopped, 0)
    await store.runs.stop_run(CALLER, stopped_job, now=world.now)
    assert await store.void_claims(world.now) == 2
    assert [row.status for row in await world.rows(stopped)] == [TaskStatus.PENDING] * 2
    assert not (await world.settle(late, world.success(late))).applied
    claim = await world.claim(live, 0)
    assert isinstance(claim, Claimed)
    assert claim.task.interruptions == 1
    assert not (await world.settle(held[0], world.success(held[0]))).applied
    assert isinstance(await world.claim(live, 1), Claimed)
    assert (await world.run(live_job)).status is RunStatus.RUNNING
    assert (await world.rerun(stopped_job))[1].startswith("2 0")


async def test_a_boot_ends_the_leases_of_notices(store: SqliteStore, world: World) -> None:
    _, run_id = await world.submit(1, callback=Callback("a token"))
    outbox, now, key = store.outbox, world.now, EntryKey(run_id, Subscriber.CALLBACK)
    earlier = await outbox.lease_entry(key, now=now, lapses_at=now + 60_000)
    assert earlier is not None
    assert await outbox.due_entries(now=now, limit=1) == []
    await store.void_claims(now)

    assert await outbox.due_entries(now=now, limit=1) == [key]
    assert await outbox.lease_entry(key, now=now, lapses_at=now + 60_001) is not None
    await outbox.drop_entry(earlier)
    assert await outbox.due_entries(now=now + 60_001, limit=1) == [key]


async def test_a_boot_ends_the_leases_of_deliveries(store: SqliteStore, world: World) -> None:
    begun = await begin(world, await owe(world))
    waiting = await owe(world, due_at=world.now + 1)
    assert await store.deliveries.due_deliveries(now=world.now, limit=10) == []
    await store.void_claims(world.now)

    [found] = await store.deliveries.due_deliveries(now=world.now, limit=10)
    assert found == structs.replace(begun, leased_until=0)
    assert await store.deliveries.get_delivery(CALLER, waiting.delivery_id) == waiting
    again = await begin(world, found)
    assert [one.number for one in again.attempts] == [1, 2]


async def test_a_boot_removes_what_is_left_of_a_job_without_a_run(path: Path) -> None:
    clock = FakeClock()
    store = await open_store(path, now=clock.now())
    world = World(store, clock)
    job_id, run_id = await world.submit(1)
    kept, _ = await world.submit(1)
    for owner in (job_id, kept):
        await owe(world, job_id=owner)
    scheduled = await schedule_job(world)
    await note_fires(world, scheduled.job_id, note(world))
    for deleted in (job_id, scheduled.job_id):
        await store.jobs.delete_job(CALLER, deleted, now=world.now)
    await store.runs.purge_run(run_id)
    await store.aclose()

    store = await open_store(path, now=clock.now())
    deliveries = await store.deliveries.list_deliveries(DeliveryFilter(caller=CALLER), limit=10)
    assert [one.job_id for one in deliveries] == [kept]
    assert await store.schedules.list_fires(scheduled.job_id, before=None, limit=10) == []
    for gone in (job_id, scheduled.job_id):
        assert await store.jobs.find_job(gone) is None
    await store.aclose()


@pytest.mark.guarantee("G18")
async def test_a_boot_touches_claims_and_no_pending_row(store: SqliteStore, world: World) -> None:
    _, run_id = await world.submit(5_000)
    await world.claimed(run_id, 4_000)
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return 0

    await store.database.write(lambda writer: writer.set_progress_handler(count, 10))
    assert await store.void_claims(world.now) == 1
    await store.database.write(lambda writer: writer.set_progress_handler(None, 10))
    assert steps < 50


STATUS_SETS: list[frozenset[TaskStatus] | None] = [
    None,
    *(frozenset({status}) for status in TaskStatus),
    frozenset({TaskStatus.PENDING, TaskStatus.PROCESSING}),
    frozenset({TaskStatus.SUCCESSFUL, TaskStatus.FAILED}),
    frozenset({TaskStatus.PENDING, TaskStatus.FAILED}),
]
MANY_ROWS = [
    statement.sql(MOST_ROWS)
    for module in (rows, claims, tasks)
    for statement in vars(module).values()
    if isinstance(statement, KeyStatement | RowsStatement)
]


@pytest.mark.parametrize("sql", [UNFINISHED, *map(page_sql, STATUS_SETS), *MANY_ROWS])
async def test_no_statement_on_tasks_scans_a_table_or_sorts(store: SqliteStore, sql: str) -> None:
    def explain(reader: sqlite3.Connection) -> list[str]:
        values: tuple[object, ...] = ("run", 0, 10, 1)
        if sql is UNFINISHED:
            values = (1, 0, 10)
        elif sql in MANY_ROWS:
            values = (None,) * sql.count("?")
        return [row[3] for row in reader.execute(f"EXPLAIN QUERY PLAN {sql}", values)]

    plan = await store.database.read(explain)
    scans = {line.split()[1] for line in plan if line.startswith("SCAN")}
    assert not scans & {"tasks", "t", "claims", "c", "histories", "h", "runs", "r", "jobs", "j"}
    assert not any("TEMP B-TREE" in line for line in plan)


def test_there_are_statements_to_look_at() -> None:
    assert len(MANY_ROWS) == 12


async def test_a_page_costs_what_it_returns(store: SqliteStore, world: World) -> None:
    _, run_id = await world.submit(500)
    read, returned = store.rows_read, store.rows_returned
    page = await store.tasks.page_tasks(run_id, statuses=None, after=99, limit=50)
    assert page.next_index == 149
    assert (store.rows_read - read, store.rows_returned - returned) == (50, 50)


async def test_the_log_has_a_size_while_open(path: Path) -> None:
    store = await open_store(path, now=0)
    await write_key(store, "x")
    assert store.wal_size() > 0
    await store.aclose()
    assert store.wal_size() == 0


async def test_expired_keys_go_when_the_store_is_opened(path: Path) -> None:
    store = await open_store(path, now=0)
    for number in range(3):
        await store.idempotency.claim_idempotency_key(
            str(number),
            fingerprint=b"",
            created_id="",
            now=0,
            lapses_at=1,
            expires_at=10 + number,
        )
    await store.aclose()
    store = await open_store(path, now=11)
    assert await scopes(store) == ["2"]
    await store.aclose()


async def test_rows_that_a_queue_is_filled_from_are_counted(
    store: SqliteStore, world: World
) -> None:
    _, run_id = await world.submit(10)
    read, returned = store.rows_read, store.rows_returned

    assert len(await store.tasks.unfinished_after(run_id, 3, 4)) == 4

    assert store.rows_returned == returned + 4
    assert read + 4 <= store.rows_read <= read + 10


async def test_what_is_due_is_read_again_once_something_was_written_and_not_before(
    store: SqliteStore, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    upcoming, database = SqliteUpcoming(store.database, KeptDays(1, 1, 1)), store.database
    read, reads = database.read, []

    async def counted(call: Callable[[sqlite3.Connection], object]) -> object:
        reads.append(call)
        return await read(call)

    async def due() -> list[tuple[str, float, bool, bool]]:
        with monkeypatch.context() as patched:
            patched.setattr(database, "read", counted)
            return [
                (one.what, one.after, one.is_work, one.is_expiry)
                for one in await upcoming.due(world.now)
            ]

    assert await due() == await due() == []
    assert len(reads) == 1
    await owe(world, due_at=world.now + 5_000)
    assert await due() == await due() == [("deliveries", 5.0, True, False)]
    assert len(reads) == 2
