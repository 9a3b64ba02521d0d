"""The cost of looking for changed runs in the SQLite store, and the effect of a clock set back."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from conveyor.dev.sqlite import SqliteStore, open_store
from conveyor.dev.sqlite.claims import COUNT
from conveyor.dev.sqlite.runs import CHANGES, changed_sql
from conveyor.ports.records import RunPosition
from conveyor.testing.clock import FakeClock
from tests.conformance.world import CALLER, World

MARGIN = 60_000
"""Milliseconds that a reader subtracts from its mark."""
FINISHED, LIVE = 100_000, 50
STEPS_A_RUN = 60
"""A bound on what SQLite does for one run that is found, in steps of its machine."""
STEPS_A_LISTED_RUN = 150
"""The same for one that is read whole, with its job."""


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


async def test_changes_are_found_by_their_index(store: SqliteStore) -> None:
    def explain(reader: sqlite3.Connection) -> list[str]:
        return [row[3] for row in reader.execute(f"EXPLAIN QUERY PLAN {CHANGES}", (0,))]

    assert await store.database.read(explain) == [
        "SEARCH runs USING INDEX runs_by_dispatch_change (dispatch_changed_at>?)",
        "SEARCH jobs USING PRIMARY KEY (job_id=?)",
    ]


async def test_a_run_that_counts_writes_to_no_index(store: SqliteStore) -> None:
    def written(connection: sqlite3.Connection) -> set[str]:
        names = dict(connection.execute("SELECT rootpage, name FROM sqlite_schema").fetchall())
        sql = COUNT.sql(1)
        program = connection.execute(f"EXPLAIN {sql}", (None,) * sql.count("?")).fetchall()
        return {names[row[3]] for row in program if row[1] == "OpenWrite"}

    assert await store.database.write(written) == {"runs"}


def insert_finished(writer: sqlite3.Connection) -> None:
    """Many runs that completed long ago, each copied from a run that did."""
    columns = [row[1] for row in writer.execute("PRAGMA table_info(runs)")]
    values = {name: name for name in columns} | {
        "run_no": "NULL",
        "run_id": "'finished-' || number",
        "run_sequence": "number",
        "status": "'completed'",
        "dispatch_changed_at": "number",
    }
    writer.execute(
        f"WITH RECURSIVE numbers (number) AS (SELECT 2 UNION ALL SELECT number + 1 FROM numbers "
        f"WHERE number <= {FINISHED}) INSERT INTO runs ({', '.join(columns)}) "
        f"SELECT {', '.join(values[name] for name in columns)} FROM numbers, "
        "(SELECT * FROM runs WHERE run_no = 1)"
    )


@pytest.mark.slow
async def test_a_look_costs_what_has_changed(store: SqliteStore, world: World) -> None:
    jobs = [(await world.submit(1))[0] for _ in range(LIVE)]
    await store.database.write(insert_finished)
    await world.clock.advance(1)
    since = world.now
    for job_id in jobs[:3]:
        await store.runs.pause_run(CALLER, job_id, paused=True, now=world.now)
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return 0

    await store.database.read(lambda reader: reader.set_progress_handler(count, 1))
    assert await store.runs.dispatch_changes(since=since + 1) == []
    nothing = steps
    assert len(await store.runs.dispatch_changes(since=since)) == 3
    changed = steps - nothing
    assert len(await store.runs.dispatchable_runs()) == LIVE - 3
    everything = steps - nothing - changed
    assert nothing < STEPS_A_RUN
    assert changed < STEPS_A_RUN * 4
    assert everything < STEPS_A_RUN * (LIVE + 1)


@pytest.mark.parametrize("live", [None, False, True])
@pytest.mark.parametrize("of_caller", [False, True])
async def test_changed_runs_are_found_by_their_index(
    store: SqliteStore, of_caller: bool, live: bool | None
) -> None:
    sql = changed_sql(of_caller=of_caller, live=live, below=True)
    values = {"caller": CALLER, "changed_at": 0, "run_id": "", "limit": 1}

    def explain(reader: sqlite3.Connection) -> list[str]:
        return [row[3] for row in reader.execute(f"EXPLAIN QUERY PLAN {sql}", values)]

    runs, jobs = await store.database.read(explain)
    kind = {None: "", True: "live_", False: "ended_"}[live]
    assert f"USING INDEX {kind}runs{'_of_caller' if of_caller else ''}" in runs
    assert "(dispatch_changed_at,run_id)<(?,?)" in runs
    assert jobs == "SEARCH jobs USING PRIMARY KEY (job_id=?)"


@pytest.mark.slow
@pytest.mark.parametrize("live", [None, False, True])
@pytest.mark.parametrize("caller", [CALLER, None])
async def test_a_page_of_changed_runs_costs_what_it_holds(
    store: SqliteStore, world: World, caller: str | None, live: bool | None
) -> None:
    for _ in range(LIVE):
        await world.submit(1)
    await store.database.write(insert_finished)
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return 0

    await store.database.read(lambda reader: reader.set_progress_handler(count, 1))
    before: RunPosition | None = None
    for _ in range(4):
        steps = 0
        page = await store.runs.changed_runs(caller, before=before, limit=10, live=live)
        assert len(page) == 10
        assert steps < STEPS_A_LISTED_RUN * 11
        before = page[-1].position


async def test_a_clock_set_back_hides_no_run_that_was_at_work(
    store: SqliteStore, world: World
) -> None:
    job_id, run_id = await world.submit(2)
    await world.clock.advance(86_400)
    await world.succeed(run_id, 0)
    mark = world.now
    world.clock.shift(-3_600)
    await store.runs.pause_run(CALLER, job_id, paused=True, now=world.now)
    changes = await store.runs.dispatch_changes(since=mark - MARGIN)
    assert [change.run_id for change in changes] == [run_id]


class Reader:
    """Looks again and again, as a discoverer does: from its last mark, less a margin."""

    def __init__(self, world: World) -> None:
        self.mark = world.now
        self._world = world

    async def look(self) -> set[str]:
        """Return the reported runs."""
        since, self.mark = self.mark - MARGIN, self._world.now
        changes = await self._world.store.runs.dispatch_changes(since=since)
        return {change.run_id for change in changes}


@pytest.mark.parametrize("seed", range(5))
async def test_a_clock_set_back_hides_a_change_from_one_look_at_most(
    store: SqliteStore, world: World, seed: int
) -> None:
    chance = random.Random(seed)
    made = [await world.submit(1) for _ in range(5)]
    reader = Reader(world)
    ahead, owed = 0, set[str]()
    for _ in range(60):
        if chance.random() < 0.3:
            assert owed <= await reader.look()
            owed = set()
            await world.clock.advance(86_400)
            await reader.look()
        await world.clock.advance(chance.uniform(0, 20))
        if chance.random() < 0.5:
            world.clock.shift(-chance.uniform(1, 7_200))
        job_id, run_id = chance.choice(made)
        paused = not (await world.run(job_id)).paused
        await store.runs.pause_run(CALLER, job_id, paused=paused, now=world.now)
        ahead += reader.mark - MARGIN > world.now
        await world.clock.advance(chance.uniform(0, 5))
        told = await reader.look()
        assert owed <= told
        owed = {run_id} - told
    assert ahead
