"""The binding: one set of adapters, whose roles bootstrap passes to the service and the workers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from conveyor.ports.blobs import Blobs
from conveyor.ports.dead_letters import DeadLetterQueue
from conveyor.ports.deliveries import Deliveries
from conveyor.ports.exports import ExportRequests, ExportWork
from conveyor.ports.ingestion import IngestWork
from conveyor.ports.inputs import InputSlots
from conveyor.ports.maintenance import (
    ExportUpkeep,
    InputExpiry,
    JobPurge,
    RunTombstones,
    StuckIngests,
    Sweeping,
    TaskScrubs,
)
from conveyor.ports.outbox import Callbacks, Outbox
from conveyor.ports.pacing import Pacing
from conveyor.ports.permits import Permits
from conveyor.ports.pipeline import Pipeline
from conveyor.ports.queues import Queues, Signals
from conveyor.ports.records import (
    ApiRuns,
    Idempotency,
    JobReader,
    JobWriter,
    RunWrites,
    WorkerRuns,
)
from conveyor.ports.robots import RobotsFiles
from conveyor.ports.schedules import Schedules
from conveyor.ports.signing_keys import SigningKeys
from conveyor.ports.tasks import TaskClaims, TaskReader, UnfinishedTasks
from conveyor.ports.workers import Workers


class Jobs(JobReader, JobWriter, JobPurge, Protocol):
    """All of JobReader, JobWriter and JobPurge."""


class Runs(WorkerRuns, ApiRuns, RunTombstones, Protocol):
    """All of WorkerRuns, ApiRuns and RunTombstones."""


class Tasks(TaskClaims, TaskReader, UnfinishedTasks, TaskScrubs, Protocol):
    """All of TaskClaims, TaskReader, UnfinishedTasks and TaskScrubs."""


class Ingestion(IngestWork, StuckIngests, Protocol):
    """All of IngestWork and StuckIngests."""


class Inputs(InputSlots, InputExpiry, Protocol):
    """All of InputSlots and InputExpiry."""


class Exports(ExportRequests, ExportWork, ExportUpkeep, Protocol):
    """All of ExportRequests, ExportWork and ExportUpkeep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """The adapters of one store; `aclose` flushes and closes them all.

    `root_secret` is the same in every process of a fleet, and all other secrets are derived from
    it. Callers' keys are sealed with the first of `sealing_secrets`, or with the root secret if the
    tuple is empty. Without a `pipeline`, each task is claimed and settled by itself. Without
    `run_writes`, runs that are watched are read again and again. Without `dead_letters`, nobody is
    shown any.
    """

    jobs: Jobs
    runs: Runs
    idempotency: Idempotency
    tasks: Tasks
    ingestion: Ingestion
    inputs: Inputs
    exports: Exports
    sweeping: Sweeping
    outbox: Outbox
    signing_keys: SigningKeys
    deliveries: Deliveries
    schedules: Schedules
    callbacks: Callbacks
    queues: Queues
    blobs: Blobs
    permits: Permits
    pacing: Pacing
    robots: RobotsFiles
    signals: Signals
    workers: Workers
    root_secret: bytes
    sealing_secrets: tuple[bytes, ...] = ()
    pipeline: Pipeline | None = None
    run_writes: RunWrites | None = None
    dead_letters: DeadLetterQueue | None = None
    aclose: Callable[[], Awaitable[None]]
