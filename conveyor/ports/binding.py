"""One set of adapters, as bootstrap hands it to the rooms above."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from conveyor.ports.blobs import Blobs
from conveyor.ports.exports import Exports
from conveyor.ports.ingestion import Ingestion
from conveyor.ports.inputs import Inputs
from conveyor.ports.outbox import Callbacks, Outbox
from conveyor.ports.permits import Permits
from conveyor.ports.queues import Queues, Signals
from conveyor.ports.records import Idempotency, Jobs, Runs
from conveyor.ports.sweeping import Sweeping
from conveyor.ports.tasks import Tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """Every port of one store; `aclose` flushes and closes them all.

    `root_secret` is what all other secrets are derived from, the same on every process. What
    callers' keys are sealed with comes before it, where that is something else.
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
    callbacks: Callbacks
    queues: Queues
    blobs: Blobs
    permits: Permits
    signals: Signals
    root_secret: bytes
    sealing_secrets: tuple[bytes, ...] = ()
    aclose: Callable[[], Awaitable[None]]
