"""Large runs and reruns on a table that two processes share, one of them behind a faulty
transport."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio.to_thread
import msgspec

from conveyor.clock import SystemClock
from conveyor.domain import ids
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import Ingest, IngestStatus, RunStats, RunStatus, Task, TaskStatus
from conveyor.domain.shards import Shards
from conveyor.ports.ingestion import StagedRows
from conveyor.ports.records import StoredResponse
from conveyor.prod.aws.client import AwsClient
from conveyor.prod.aws.opening import over_clients
from conveyor.prod.dynamodb.client import Item, Table
from conveyor.prod.dynamodb.runs import query_all
from conveyor.prod.dynamodb.schema import (
    BY_OWNER,
    all_partitions,
    run_key,
    table_parameters,
    task_partition,
)
from conveyor.prod.dynamodb.store import DynamoStore, open_store
from conveyor.testing.aws_faults import FaultyAws
from conveyor.testing.clock import FakeClock
from tests.conformance.production_store import account, dynamodb, new_name
from tests.conformance.world import World, spec

DB = "dynamodb"
INSERT = "batch_execute_statement"
TRANSACT = "transact_write_items"
UPDATE = "update_item"
WRITES = ("put_item", UPDATE, "delete_item", TRANSACT, INSERT, "batch_write_item")


@dataclass(frozen=True, slots=True)
class Process:
    """One process, and short words for what it does to large runs."""

    world: World

    async def large(self, size: int, *, shards: int = 2) -> tuple[str, str]:
        """Make a job with a run whose rows are not written yet; (job_id, run_id)."""
        job, run, _ = self.world.draft(0, task_shard_count=shards)
        run = msgspec.structs.replace(
            run,
            status=RunStatus.RUNNING,
            ingest=Ingest(status=IngestStatus.PENDING, end=size, chunks=(0,)),
            next_index=size,
            stats=RunStats(total=size),
        )
        await self.world.store.jobs.create_job(
            job, run, [], answer=StoredResponse(202, b""), once=None
        )
        return job.job_id, run.run_id

    async def write(self, run_id: str, first: int, end: int) -> bool:
        """Write a stretch of a submit."""
        pairs = [(ids.task_id(run_id, index), spec(index)) for index in range(first, end)]
        rows = StagedRows(first, end - first, msgspec.json.encode(pairs))
        return await self.world.store.ingestion.write_rows(run_id, rows, now=self.world.now)

    async def copy(self, run_id: str, first: int, end: int) -> list[int] | None:
        """Copy a stretch of a rerun; the indexes that are to be worked."""
        found = await self.world.store.ingestion.copy_rows(
            run_id, first_index=first, end_index=end, now=self.world.now
        )
        return None if found is None else [index for index, _ in found]

    async def finish(self, run_id: str) -> RunStatus | None:
        """Latch."""
        return await self.world.store.ingestion.finish_ingest(run_id, now=self.world.now)

    async def ended(self, states: str, *, shards: int = 2) -> tuple[str, str]:
        """A stopped run of tasks that were left as the letters say: `s`uccessful, `f`ailed,
        `p`ending or claimed (`r`), with the claims lapsed by now."""
        job_id, run_id = await self.world.submit(len(states), task_shard_count=shards)
        for index, state in enumerate(states):
            match state:
                case "s":
                    await self.world.succeed(run_id, index)
                case "f":
                    await self.world.fail(run_id, index)
                case "r":
                    await self.world.claimed(run_id, index)
        if "p" in states or "r" in states:
            await self.world.store.runs.stop_run("caller", job_id, now=self.world.now)
        await self.world.clock.advance(60)
        return job_id, run_id

    async def row(self, run_id: str, index: int) -> Task:
        """A task by its index."""
        [found] = [task for task in await self.world.rows(run_id, 2) if task.index == index]
        return found

    async def succeed(self, run_id: str, *tasks: Task) -> None:
        """Work tasks of a rerun, which carry the ids of an earlier run, to their end."""
        for task in tasks:
            claimed = await self.world.claimed(run_id, task.index, task_id=task.task_id)
            await self.world.settle(claimed, self.world.success(claimed))


@dataclass(frozen=True, slots=True)
class Ingests:
    """One table, and two processes on it: `one` behind `faults`, `other` beside it."""

    faults: FaultyAws
    table: Table
    one: Process
    other: Process

    def lose_every_answer(self) -> None:
        """From now on each write of the first process is made twice."""
        for operation in WRITES:
            self.faults.lose_answer(DB, operation, times=1_000)

    async def item(self, job_id: str, run_sequence: int) -> Item:
        """A run's row as it lies there."""
        item = await self.table.get(run_key(job_id, run_sequence))
        assert item is not None
        return item

    async def rows_left(self, job_id: str) -> int:
        """Task rows of a job of two shards, whether a run leads to them or not."""
        shards = Shards(2)
        partitions = [task_partition(job_id, shards, shard) for shard in range(shards.count)]
        return sum([await self.table.count(one, begins_with="Task#") for one in partitions])

    async def intents(self) -> int:
        """Runs whose rows are being written before them."""
        return len(await query_all(self.table, all_partitions("intents"), index=BY_OWNER))

    async def exact(self, job_id: str, run_id: str, states: str) -> None:
        """The rows stand as the letters say, each once, and the counters say the same."""
        rows = await self.other.world.rows(run_id, 2)
        found = "".join(_LETTERS[row.status] for row in rows)
        assert found == states, found
        stats = (await self.other.world.run(job_id, run_id)).stats
        assert (stats.total, stats.successful, stats.failed) == (
            len(states),
            states.count("s"),
            states.count("f"),
        )
        assert sum(stats.failure_reasons.values()) == stats.failed


_LETTERS = {
    TaskStatus.PENDING: "p",
    TaskStatus.PROCESSING: "r",
    TaskStatus.SUCCESSFUL: "s",
    TaskStatus.FAILED: "f",
}


@asynccontextmanager
async def open_ingests(clock: FakeClock) -> AsyncIterator[Ingests]:
    """An empty table. Ids and tokens come from a real clock: virtual ones make the same in each
    test, and a transaction whose token is known already is not carried out."""
    client, options = await anyio.to_thread.run_sync(dynamodb)
    system = SystemClock()
    aws = over_clients({DB: client}, options, system, credentials=account())
    name = new_name()
    await aws.call(DB, "create_table", table_parameters(name))
    faults = FaultyAws(aws)

    async def process(seam: FaultyAws | AwsClient) -> DynamoStore:
        worker = secrets.token_hex(6)
        return await open_store(seam, table=name, clock=system, worker=worker, flush_interval=0)

    stores = [await process(faults), await process(aws)]
    one, other = (Process(World(store, clock)) for store in stores)
    yield Ingests(faults, Table(aws, name, system), one, other)
    for store in stores:
        await store.aclose()
    await aws.call(DB, "delete_table", {"TableName": name})
    await aws.aclose()


def away() -> ConveyorError:
    """Return the error of the transport while the service stays away."""
    return ConveyorError(ErrorCode.UNAVAILABLE, "away")


def moves_checkpoint(parameters: object) -> bool:
    """Return whether an update moves a checkpoint."""
    assert isinstance(parameters, dict)
    return "ingest_next = " in parameters["UpdateExpression"]


async def plan(
    bench: Ingests, states: str, *statuses: TaskStatus, shards: int = 2
) -> tuple[str, str, str]:
    """A large rerun of a run that was left like this; (job_id, source, run)."""
    job_id, source = await bench.other.ended(states, shards=shards)
    run_id, _ = await bench.other.world.rerun(job_id, *statuses, large_from=1)
    return job_id, source, run_id
