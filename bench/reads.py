"""Measures the rows that a store reads for each row of a list of results, and the cost of a page in
short and long lists.

Uses the real development store, without HTTP. `gather` reads as the service does; `naive` asks each
shard for a whole page and keeps the positions of the rows it returned. Milliseconds are medians of
single pages. The rows of --tasks are those of the long list; enumerations are of 20,000 rows.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import anyio
import msgspec

from bench.harness import Figure, Options, Row, Scenario, median
from conveyor.clock import SystemClock
from conveyor.dev.binding import open_binding
from conveyor.domain import ids
from conveyor.domain.model import (
    Event,
    EventKind,
    Ingest,
    IngestStatus,
    Job,
    JobStatus,
    Problem,
    Run,
    RunStats,
    RunStatus,
    Task,
    TaskFailure,
    TaskSpec,
)
from conveyor.domain.shards import Shards, ShardScheme
from conveyor.domain.task_rules import Failed
from conveyor.ports.binding import Binding
from conveyor.ports.ingestion import StagedRows
from conveyor.ports.records import StoredResponse
from conveyor.ports.tasks import Claimed
from conveyor.records.sharded_reads import (
    START,
    Read,
    ShardCursor,
    ShardRead,
    ShardRows,
    merge_page,
    task_reader,
)
from conveyor.service.results import FILTERS, LEAST_READ, READ_PER_ROW

ENUMERATED = 20_000
SHORT = 10_000
PAGES = (100, 1_000)
LAYOUTS = (Shards(1), *(Shards(count, scheme) for scheme in ShardScheme for count in (8, 16)))
SAMPLES = 50
FAILURES = 10
STATEMENT = 1_000
NOBODY = "benchmark"

Page = Callable[[Sequence[int]], Awaitable[ShardCursor[Task]]]


@dataclass(frozen=True, slots=True)
class Written:
    """A run in the store: its job, itself, its layout, and the number of its rows."""

    job_id: str
    run_id: str
    shards: Shards
    rows: int


class Store:
    """A development store in a directory of its own, and the runs written to it."""

    def __init__(self, binding: Binding, clock: SystemClock) -> None:
        self.binding = binding
        self._clock = clock

    async def write(self, shards: Shards, rows: int) -> Written:
        """Write a run of pending rows, as ingestion does."""
        job_id, run_id, now = self._clock.new_id(), self._clock.new_id(), self._clock.now()
        job = Job(
            job_id=job_id,
            caller=NOBODY,
            status=JobStatus.CLOSED,
            created_at=now,
            updated_at=now,
            task_shard_count=shards.count,
            shard_scheme=shards.scheme.value,
            latest_run_id=run_id,
            run_count=1,
        )
        run = Run(
            run_id=run_id,
            job_id=job_id,
            run_sequence=1,
            status=RunStatus.RUNNING,
            created_at=now,
            updated_at=now,
            last_batch_received=True,
            next_index=rows,
            stats=RunStats(total=rows),
            ingest=Ingest(status=IngestStatus.PENDING, end=rows),
        )
        await self.binding.jobs.create_job(
            job, run, [], answer=StoredResponse(201, b"{}"), once=None
        )
        for staged in _staged(run_id, rows):
            assert await self.binding.ingestion.write_rows(run_id, staged, now=now)
        await self.binding.ingestion.finish_ingest(run_id, now=now)
        return Written(job_id, run_id, shards, rows)

    async def fail(self, run_id: str, index: int) -> None:
        """End a task as failed."""
        now = self._clock.now()
        claim = await self.binding.tasks.claim_task(
            run_id,
            ids.task_id(run_id, index),
            worker=NOBODY,
            now=now,
            claimed_until=now + 60_000,
            max_interruptions=1,
        )
        assert isinstance(claim, Claimed)
        problem = Problem("gone", "Gone", 410)
        event = Event(
            kind=EventKind.ATTEMPT, attempt=1, started_at=now, ended_at=now, error=problem
        )
        settlement = Failed(event, problem, TaskFailure.BAD_TARGET)
        task = claim.task
        await self.binding.tasks.settle_task(
            run_id, task.task_id, task.claim_number, settlement, now=now
        )

    def pages(self, run: Written, limit: int, status: str = "all") -> Page:
        """Make a function that reads a page as the service does."""
        statuses = FILTERS[status]
        return partial(
            merge_page,
            task_reader(self.binding.tasks, run.run_id, statuses=statuses),
            run.shards,
            limit=limit,
            end=run.rows,
            most_read=None if statuses is None else max(LEAST_READ, READ_PER_ROW * limit),
        )

    def naive_pages(self, run: Written, limit: int) -> Page:
        """Make a function that reads a page by asking every shard for a whole one."""
        read = task_reader(self.binding.tasks, run.run_id, statuses=None)
        return partial(naive_page, read, run.shards, limit=limit)


def _staged(run_id: str, rows: int) -> Iterator[StagedRows]:
    for first in range(0, rows, STATEMENT):
        count = min(STATEMENT, rows - first)
        named = enumerate(ids.task_ids(run_id, first, count), start=first)
        pairs = [(task_id, TaskSpec(url=f"https://site.test/{index}")) for index, task_id in named]
        yield StagedRows(first, count, msgspec.json.encode(pairs))


async def naive_page(
    read: Read[Task], shards: Shards, positions: Sequence[int], *, limit: int
) -> ShardCursor[Task]:
    """Read by the usual fan-out: all shards at once, each for a full page, merged and cut."""
    answers: dict[int, ShardRows[Task]] = {}

    async def ask(shard: int) -> None:
        answers[shard] = await read(ShardRead(shard, positions[shard], limit))

    async with anyio.create_task_group() as group:
        for shard in range(shards.count):
            group.start_soon(ask, shard)
    found = sorted(
        ((task, shard) for shard, answer in answers.items() for task in answer.rows),
        key=lambda pair: pair[0].index,
    )
    after = list(positions)
    for task, shard in found[:limit]:
        after[shard] = task.index
    more = len(found) > limit or any(answer.next_index is not None for answer in answers.values())
    read_rows = sum(answer.rows_read for answer in answers.values())
    return ShardCursor([task for task, _ in found[:limit]], tuple(after), more, read_rows, 1)


async def enumerate_all(page: Page, run: Written) -> tuple[float, float, float]:
    """Walk a run; return rows read per row, rounds a page, milliseconds a page."""
    positions: Sequence[int] = (START,) * run.shards.count
    rows = read = rounds = 0
    milliseconds = []
    while True:
        started = time.perf_counter()
        got = await page(positions)
        milliseconds.append((time.perf_counter() - started) * 1e3)
        assert [task.index for task in got.rows] == list(range(rows, rows + len(got.rows)))
        rows, read, rounds = rows + len(got.rows), read + got.rows_read, rounds + got.rounds
        positions = got.positions
        if not got.more:
            assert rows == run.rows
            return read / rows, rounds / len(milliseconds), median(milliseconds)


async def compare(store: Store, run: Written, limit: int, repeats: int) -> dict[str, Figure]:
    """Measure both ways of reading, several times."""
    figures: dict[str, Figure] = {}
    ways = {"gather": store.pages(run, limit), "naive": store.naive_pages(run, limit)}
    for name, page in ways.items():
        walks = [await enumerate_all(page, run) for _ in range(repeats)]
        reads, rounds, _ = walks[0]
        figures[f"{name} read/row"] = round(reads, 3)
        figures[f"{name} rounds"] = round(rounds, 2)
        figures[f"{name} ms"] = round(median([walk[2] for walk in walks]), 2)
    return figures


async def sampled(page: Page, run: Written, repeats: int) -> dict[str, Figure]:
    """Read pages at positions spread over the whole list."""
    milliseconds, most_read = [], 0
    for sample in range(SAMPLES * repeats):
        start = sample % SAMPLES * (run.rows - PAGES[-1]) // SAMPLES
        started = time.perf_counter()
        got = await page((start - 1,) * run.shards.count)
        milliseconds.append((time.perf_counter() - started) * 1e3)
        most_read = max(most_read, got.rows_read)
    return {"ms": round(median(milliseconds), 2), "most read": most_read}


async def rare(page: Page, run: Written) -> dict[str, Figure]:
    """Read every page of a rare status."""
    positions: Sequence[int] = (START,) * run.shards.count
    found, milliseconds, most_read = 0, [], 0
    while True:
        started = time.perf_counter()
        got = await page(positions)
        milliseconds.append((time.perf_counter() - started) * 1e3)
        found, most_read = found + len(got.rows), max(most_read, got.rows_read)
        positions = got.positions
        if not got.more:
            assert found == FAILURES
            return {
                "ms": round(median(milliseconds), 2),
                "most read": most_read,
                "pages": len(milliseconds),
                "found": found,
            }


async def lengths(store: Store, runs: Sequence[Written], options: Options) -> list[Row]:
    """Measure pages of a short and a long list, side by side."""
    rows = []
    for limit in PAGES:
        for status in ("all", "processing"):
            for run in runs:
                figures = await sampled(store.pages(run, limit, status), run, options.repeats)
                rows.append(Row(f"{status}, page {limit}, of {run.rows:,}", figures))
    for run in runs:
        for index in range(FAILURES):
            await store.fail(run.run_id, index * run.rows // FAILURES)
        figures = await rare(store.pages(run, PAGES[0], "failed"), run)
        rows.append(Row(f"failed, page {PAGES[0]}, of {run.rows:,}", figures))
    return rows


async def measure(options: Options) -> list[Row]:
    """Measure everything in one store; `--only enumeration` or `--only length` for a part."""
    clock = SystemClock()
    dev = await open_binding(options.directory("reads") / "data", clock)
    store = Store(dev.ports, clock)
    rows = []
    try:
        for shards in LAYOUTS if options.wants("enumeration") else ():
            run = await store.write(shards, ENUMERATED)
            for limit in PAGES:
                name = f"{shards.count} × {shards.scheme}, page {limit}"
                rows.append(Row(name, await compare(store, run, limit, options.repeats)))
        if options.wants("length"):
            runs = [await store.write(Shards(8), size) for size in (SHORT, options.tasks)]
            rows += await lengths(store, runs, options)
    finally:
        await dev.ports.aclose()
    return rows


def run(options: Options) -> list[Row]:
    """Measure enumerations of each layout, then pages of short and of long lists."""
    return anyio.run(measure, options)


SCENARIO = Scenario(name="reads", run=run)
