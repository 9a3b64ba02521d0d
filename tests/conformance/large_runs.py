"""Large runs whose rows are still to be written, in every layout."""

from __future__ import annotations

import msgspec

from conveyor.domain import ids
from conveyor.domain.model import Ingest, IngestStatus, Run, RunStatus
from conveyor.domain.shards import Shards, ShardScheme
from conveyor.ports.ingestion import StagedRows
from conveyor.ports.records import StoredResponse
from tests.conformance.world import World, spec

LAYOUTS = [
    Shards(),
    Shards(3, ShardScheme.STRIPE),
    Shards(8, ShardScheme.FNV32A),
]


class Large:
    """A large run whose rows are not written yet."""

    def __init__(self, world: World, shards: Shards, size: int) -> None:
        self.world = world
        self.shards = shards
        self.size = size
        self.job_id = self.run_id = ""

    async def make(self, *, closed: bool = True) -> Large:
        """Write the job and its run."""
        job, run, _ = self.world.draft(
            0,
            closed=closed,
            task_shard_count=self.shards.count,
            shard_scheme=self.shards.scheme.value,
        )
        ingest = Ingest(status=IngestStatus.PENDING, end=self.size, chunks=(0,))
        run = msgspec.structs.replace(
            run,
            status=RunStatus.RUNNING,
            ingest=ingest,
            next_index=self.size,
            stats=msgspec.structs.replace(run.stats, total=self.size),
        )
        await self.world.store.jobs.create_job(
            job, run, [], answer=StoredResponse(202, b"{}"), once=None
        )
        self.job_id, self.run_id = job.job_id, run.run_id
        return self

    def rows(self, first: int, end: int) -> StagedRows:
        """A stretch as it is staged."""
        pairs = [(ids.task_id(self.run_id, index), spec(index)) for index in range(first, end)]
        return StagedRows(first, end - first, msgspec.json.encode(pairs))

    async def write(self, first: int, end: int) -> bool:
        """Write a stretch."""
        return await self.world.store.ingestion.write_rows(
            self.run_id, self.rows(first, end), now=self.world.now
        )

    async def finish(self) -> RunStatus | None:
        """Latch."""
        return await self.world.store.ingestion.finish_ingest(self.run_id, now=self.world.now)

    async def run(self) -> Run:
        """The run as it stands."""
        return await self.world.run(self.job_id, self.run_id)

    async def indexes(self) -> list[int]:
        """The indexes of all rows."""
        return [task.index for task in await self.world.rows(self.run_id, self.shards.count)]

    async def succeed(self, index: int) -> None:
        """Work one task to its end."""
        await self.world.succeed(self.run_id, index)
