"""The records and tasks ports on one DynamoDB table, put together."""

from __future__ import annotations

from dataclasses import dataclass

from conveyor.ports.clock import Clock
from conveyor.prod.aws.calls import Aws
from conveyor.prod.dynamodb.client import Table
from conveyor.prod.dynamodb.exports import DynamoExports
from conveyor.prod.dynamodb.idempotency import DynamoIdempotency
from conveyor.prod.dynamodb.ingestion import DynamoIngestion
from conveyor.prod.dynamodb.inputs import DynamoInputs
from conveyor.prod.dynamodb.jobs import DynamoJobs
from conveyor.prod.dynamodb.outbox import DynamoOutbox
from conveyor.prod.dynamodb.run_rows import DynamoRunRows, RunPlaces
from conveyor.prod.dynamodb.runs import DynamoRuns
from conveyor.prod.dynamodb.sweeping import DynamoSweeping
from conveyor.prod.dynamodb.tasks import DynamoTasks

FLUSH_INTERVAL = 0.1
"""Seconds between two additions to one run's counters, unless told otherwise."""


@dataclass(frozen=True, slots=True)
class DynamoStore:
    """The ports over one table. Belongs to one event loop."""

    table: Table
    jobs: DynamoJobs
    runs: DynamoRuns
    idempotency: DynamoIdempotency
    tasks: DynamoTasks
    ingestion: DynamoIngestion
    inputs: DynamoInputs
    exports: DynamoExports
    sweeping: DynamoSweeping
    outbox: DynamoOutbox

    @property
    def rows_read(self) -> int:
        """Task rows that pages have touched."""
        return self.tasks.rows_read

    @property
    def rows_returned(self) -> int:
        """Task rows that pages have returned."""
        return self.tasks.rows_returned

    async def aclose(self) -> None:
        """Write what is pending. No call of any port may follow; the seam stays the caller's."""
        await self.tasks.aclose()


async def open_store(
    aws: Aws,
    *,
    table: str,
    clock: Clock,
    worker: str,
    flush_interval: float = FLUSH_INTERVAL,
    patience: float = 0.0,
) -> DynamoStore:
    """The store on a table that is there. `worker` names this process: no other one, later ones
    included, has the same name. `flush_interval` in seconds, and so is `patience`: for how long the
    end of a task is tried again where the table is away."""
    place = Table(aws, table, clock)
    records = DynamoRunRows(place, RunPlaces(place))
    return DynamoStore(
        table=place,
        jobs=DynamoJobs(records),
        runs=DynamoRuns(records),
        idempotency=DynamoIdempotency(place),
        tasks=DynamoTasks(records, worker=worker, flush_interval=flush_interval, patience=patience),
        ingestion=DynamoIngestion(records),
        inputs=DynamoInputs(place),
        exports=DynamoExports(records),
        sweeping=DynamoSweeping(records),
        outbox=DynamoOutbox(records),
    )
