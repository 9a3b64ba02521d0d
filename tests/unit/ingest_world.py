"""A large run of a development binding, and the handler that ingests it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from conveyor.dev.binding import DevBinding, open_binding
from conveyor.domain import ids
from conveyor.domain.model import (
    Ingest,
    IngestStatus,
    Job,
    JobStatus,
    Run,
    RunStats,
    RunStatus,
    TaskSpec,
)
from conveyor.ports.handler import Outcome
from conveyor.ports.queues import CONTROL_QUEUE, Delivery, IngestMessage
from conveyor.ports.records import StoredResponse
from conveyor.records.blob_keys import staged_key, staged_prefix
from conveyor.testing.clock import FakeClock
from tests.unit.wired_handlers import ingest_handler

CALLER = "caller"
LINE = 4
CHUNK = 8


@asynccontextmanager
async def large_run(directory: Path, size: int = 30) -> AsyncIterator[Ingestion]:
    """A staged run of an empty development binding under virtual time."""
    opened = await open_binding(directory, FakeClock())
    ingestion = Ingestion(opened, FakeClock(), size)
    await ingestion.stage()
    yield ingestion
    await opened.ports.aclose()


class Ingestion:
    """A large run of a development binding, and the handler that ingests it."""

    def __init__(self, dev: DevBinding, clock: FakeClock, size: int) -> None:
        self.binding = dev.ports
        self.clock = clock
        self.size = size
        self.job_id, self.run_id = clock.new_id(), clock.new_id()
        self.message = IngestMessage(self.job_id, self.run_id)
        self.delivery = Delivery(CONTROL_QUEUE, self.message, "receipt", 1)

    async def stage(self, *, shards: int = 2) -> None:
        """Stage the list and write the job."""
        chunks = range(0, self.size, CHUNK)
        for first in chunks:
            await self.binding.blobs.put(
                staged_key(self.job_id, self.run_id, first), self.chunk(first)
            )
        now = self.clock.now()
        job = Job(
            job_id=self.job_id,
            caller=CALLER,
            status=JobStatus.CLOSED,
            created_at=now,
            updated_at=now,
            task_shard_count=shards,
            latest_run_id=self.run_id,
            run_count=1,
        )
        run = Run(
            run_id=self.run_id,
            job_id=self.job_id,
            run_sequence=1,
            status=RunStatus.RUNNING,
            created_at=now,
            updated_at=now,
            last_batch_received=True,
            next_index=self.size,
            stats=RunStats(total=self.size),
            ingest=Ingest(status=IngestStatus.PENDING, end=self.size, chunks=tuple(chunks)),
        )
        await self.binding.jobs.create_job(
            job, run, [], answer=StoredResponse(202, b"{}"), once=None
        )

    def chunk(self, first: int) -> bytes:
        """The lines of one chunk."""
        end = min(first + CHUNK, self.size)
        return b"".join(
            self.line(start, min(start + LINE, end)) + b"\n" for start in range(first, end, LINE)
        )

    def line(self, start: int, end: int) -> bytes:
        """One line of a chunk."""
        return msgspec.json.encode(
            [
                (ids.task_id(self.run_id, index), TaskSpec(f"https://example.com/{index}"))
                for index in range(start, end)
            ]
        )

    async def handle(self) -> Outcome:
        """Let a handler do it, once."""
        handler = ingest_handler(self.binding, self.clock)
        return await handler.handle(self.delivery, lambda: None)

    async def run(self) -> Run:
        """The run as it stands."""
        run = await self.binding.runs.get_run(CALLER, self.job_id, self.run_id)
        assert run is not None
        return run

    async def indexes(self) -> list[int]:
        """The rows that are there."""
        found = await self.binding.tasks.unfinished_after(self.run_id, -1, 10_000)
        return [index for index, _ in found]

    async def staged(self) -> int:
        """Count the staged chunks, and remove them."""
        return await self.binding.blobs.delete_prefix(staged_prefix(self.job_id, self.run_id))

    async def stop(self) -> None:
        """Stop the run."""
        await self.binding.runs.stop_run(CALLER, self.job_id, now=self.clock.now())
