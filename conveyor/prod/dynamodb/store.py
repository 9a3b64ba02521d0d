"""`DynamoStore`: the adapters of the records, tasks and other storage ports over one table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from conveyor.ports.clock import Clock
from conveyor.prod.aws.calls import Aws
from conveyor.prod.dynamodb.client import ROW_RETENTION_DAYS, Table
from conveyor.prod.dynamodb.deliveries import DynamoDeliveries
from conveyor.prod.dynamodb.expiring import DynamoExports, DynamoInputs
from conveyor.prod.dynamodb.idempotency import DynamoIdempotency
from conveyor.prod.dynamodb.ingestion import DynamoIngestion
from conveyor.prod.dynamodb.jobs import DynamoJobs
from conveyor.prod.dynamodb.outbox import DynamoOutbox
from conveyor.prod.dynamodb.run_rows import DynamoRunRows, RunPlaces
from conveyor.prod.dynamodb.runs import DynamoRuns
from conveyor.prod.dynamodb.schedules import FIRE_RETENTION_DAYS, DynamoSchedules
from conveyor.prod.dynamodb.signing_keys import DynamoSigningKeys
from conveyor.prod.dynamodb.sweeping import DynamoSweeping
from conveyor.prod.dynamodb.tasks import DynamoTasks

FLUSH_INTERVAL = 0.1
"""Seconds between two writes of what a process has counted in a run, by default."""


class StoreTerms(NamedTuple):
    """The days that rows stay: those of fires after their last change, those of tasks past their
    results, for ever if that is 0. And the tasks that a caller has accepted a day, 0 for no
    limit."""

    fire_days: int = FIRE_RETENTION_DAYS
    row_days: int = ROW_RETENTION_DAYS
    daily_tasks: int = 0


USUAL_TERMS = StoreTerms()


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
    signing_keys: DynamoSigningKeys
    deliveries: DynamoDeliveries
    schedules: DynamoSchedules

    @property
    def rows_read(self) -> int:
        """Task rows read for pages, and rows of jobs, runs and failure groups."""
        return self.tasks.rows_read + self.table.records_read

    @property
    def rows_returned(self) -> int:
        """Task rows returned for pages."""
        return self.tasks.rows_returned

    async def aclose(self) -> None:
        """Write pending additions. No call of a port may follow; `aws` stays open, as it is the
        caller's."""
        await self.tasks.aclose()


async def open_store(
    aws: Aws,
    *,
    table: str,
    clock: Clock,
    worker: str,
    flush_interval: float = FLUSH_INTERVAL,
    patience: float = 0.0,
    terms: StoreTerms = USUAL_TERMS,
) -> DynamoStore:
    """Open the store on an existing table.

    `worker` names this process; no other process, now or later, has the same name. `patience` is
    the time in seconds, like `flush_interval`, during which a settlement is retried while the table
    is unavailable.
    """
    client = Table(aws, table, clock, row_days=terms.row_days)
    records = DynamoRunRows(client, RunPlaces(client), daily_tasks=terms.daily_tasks)
    return DynamoStore(
        table=client,
        jobs=DynamoJobs(records),
        runs=DynamoRuns(records),
        idempotency=DynamoIdempotency(client),
        tasks=DynamoTasks(records, worker=worker, flush_interval=flush_interval, patience=patience),
        ingestion=DynamoIngestion(records),
        inputs=DynamoInputs(client),
        exports=DynamoExports(records),
        sweeping=DynamoSweeping(records),
        outbox=DynamoOutbox(records),
        signing_keys=DynamoSigningKeys(client),
        deliveries=DynamoDeliveries(client),
        schedules=DynamoSchedules(records, fire_retention_days=terms.fire_days),
    )
