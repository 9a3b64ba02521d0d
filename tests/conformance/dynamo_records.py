"""A table with two processes on it, one behind a transport with faults, for tests of records."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio.to_thread
from msgspec import structs

from conveyor.clock import SystemClock
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.shards import ONE_SHARD
from conveyor.ports.records import KeyClaim
from conveyor.prod.aws.calls import Aws, CallStats
from conveyor.prod.aws.opening import over_clients
from conveyor.prod.aws.refusals import DeployedAws
from conveyor.prod.dynamodb.client import Item, Table
from conveyor.prod.dynamodb.job_rows import JobRow, job_item
from conveyor.prod.dynamodb.run_rows import RunPlace, new_run_item
from conveyor.prod.dynamodb.runs import query_all
from conveyor.prod.dynamodb.schema import (
    BY_OWNER,
    all_partitions,
    job_key,
    place_key,
    run_key,
    table_parameters,
)
from conveyor.prod.dynamodb.store import DynamoStore, StoreTerms, open_store
from conveyor.testing.aws_faults import FaultyAws
from conveyor.testing.clock import FakeClock
from tests.conformance.production_store import account, dynamodb, new_name
from tests.conformance.world import World

DB = "dynamodb"
TRANSACT = "transact_write_items"
INSERT = "batch_execute_statement"
WRITES = ("put_item", "update_item", "delete_item", TRANSACT, INSERT, "batch_write_item")
LAPSE = 60_000
DAY = 86_400_000


@dataclass(frozen=True, slots=True)
class Bench:
    """One table, and two processes on it: `world` behind `faults`, `other` beside it."""

    faults: FaultyAws
    stats: CallStats
    table: Table
    store: DynamoStore
    world: World
    other: World

    async def run_item(self, job_id: str, run_sequence: int = 1) -> Item:
        """A run's row as it lies there."""
        item = await self.table.get(run_key(job_id, run_sequence))
        assert item is not None
        return item

    async def intents(self) -> int:
        """Jobs whose rows are being written."""
        return len(await query_all(self.table, all_partitions("intents"), index=BY_OWNER))

    async def key(self, scope: str, *, created_id: str = "ID", after: int = 0) -> KeyClaim:
        """Claim a key."""
        now = self.world.now + after
        return await self.store.idempotency.claim_idempotency_key(
            scope,
            fingerprint=b"body",
            created_id=created_id,
            now=now,
            lapses_at=now + LAPSE,
            expires_at=now + DAY,
        )

    async def release(self, scope: str, *, created_id: str = "ID", after: int = 0) -> None:
        """Release a key that was claimed then."""
        await self.store.idempotency.release_idempotency_key(
            scope, created_id=created_id, lapses_at=self.world.now + after + LAPSE
        )

    async def nothing_half_added(self, job_id: str, run_id: str, indexes: list[int]) -> None:
        """Just these rows are there, all of them counted, and no reservation."""
        item = await self.run_item(job_id)
        assert (item["reserved"], item.get("given_up", {})) == ({}, {})
        assert item["total"] == len(indexes)
        assert [row.index for row in await self.other.rows(run_id)] == indexes


class _Clock(SystemClock):
    """A real clock but for the time of day, which is virtual."""

    def __init__(self, virtual: FakeClock) -> None:
        super().__init__()
        self._virtual = virtual

    def now(self) -> int:
        return self._virtual.now()


@asynccontextmanager
async def open_bench(
    clock: FakeClock, *, row_days: int = 30, daily_tasks: int = 0
) -> AsyncIterator[Bench]:
    """An empty table, removed in the end. Rows stay `row_days` past their results; a caller has
    `daily_tasks` accepted a day, 0 for no limit.

    Ids and tokens come from a real clock: virtual ones make the same in each test, and a
    transaction whose token is known already is not carried out.
    """
    client, options = await anyio.to_thread.run_sync(dynamodb)
    system = _Clock(clock)
    aws = over_clients({DB: client}, options, system, credentials=account())
    name = new_name()
    await aws.call(DB, "create_table", table_parameters(name))
    faults = FaultyAws(aws)

    async def process(behind: Aws) -> DynamoStore:
        seam = DeployedAws(behind, aws.stats, system, resources={})
        worker = secrets.token_hex(6)
        return await open_store(
            seam,
            table=name,
            clock=system,
            worker=worker,
            flush_interval=0,
            terms=StoreTerms(row_days=row_days, daily_tasks=daily_tasks),
        )

    store, other = await process(faults), await process(aws)
    worlds = World(store, clock), World(other, clock)
    yield Bench(faults, aws.stats, Table(aws, name, system), store, *worlds)
    await store.aclose()
    await other.aclose()
    await aws.call(DB, "delete_table", {"TableName": name})
    await aws.aclose()


def away() -> ConveyorError:
    """Return the error of the transport while a service stays away."""
    return ConveyorError(ErrorCode.UNAVAILABLE, "away")


def lose_every_answer(bench: Bench) -> None:
    """From now on every write is carried out twice, as one whose first answer was lost."""
    for operation in WRITES:
        bench.faults.lose_answer(DB, operation, times=1_000)


async def more_runs(bench: Bench, job_id: str, *, count: int) -> list[str]:
    """Further runs of a job, written as they would lie there."""
    view = await bench.other.view(job_id)
    job, first = view.job, view.latest_run
    assert first is not None
    made = [bench.world.clock.new_id() for _ in range(count)]

    async def write(run_sequence: int, run_id: str) -> None:
        run = structs.replace(first, run_id=run_id, run_sequence=run_sequence)
        place = RunPlace(run_id, job_id, run_sequence, ONE_SHARD)
        await bench.table.put(place.key, new_run_item(run, job))
        await bench.table.put(place_key(run_id), place.item())

    await asyncio.gather(*(write(number, one) for number, one in enumerate(made, start=2)))
    job = structs.replace(job, latest_run_id=made[-1], run_count=count + 1)
    await bench.table.put(job_key(job_id), job_item(JobRow(job, count + 1)))
    return made
