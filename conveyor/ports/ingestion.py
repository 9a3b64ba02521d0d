"""The ingestion port: how the rows of large runs come to be written, exactly once, step by step.

Whatever is written is conditional on its absence, and on the run still ingesting: a message that
comes twice, or an ingester that wakes up late, changes nothing.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from conveyor.domain.model import Ingest, RunStatus


class StagedRows(msgspec.Struct, frozen=True):
    """A stretch of a staged list: `count` tasks from `first_index` on.

    `rows` is a JSON array of `count` pairs, each the task's id and its TaskSpec as an object.
    """

    first_index: int
    count: int
    rows: bytes


class Ingesting(msgspec.Struct, frozen=True, kw_only=True):
    """A run whose ingestion has not ended; `live` tells whether its tasks may still be worked."""

    job_id: str
    run_id: str
    live: bool
    ingest: Ingest
    rerun_of: str | None = None


class IngestWork(Protocol):
    """The rows of large runs as a worker writes them."""

    async def ingesting(self, run_id: str) -> Ingesting | None:
        """Return the progress of a run; None if it is gone, deleted, or done with ingesting."""
        ...

    async def write_rows(self, run_id: str, rows: StagedRows, *, now: int) -> bool:
        """Insert the pending rows that are absent, and move the checkpoint behind them.

        Return False and write nothing if the run is not live or done with ingesting.
        """
        ...

    async def copy_rows(
        self, run_id: str, *, first_index: int, end_index: int, now: int
    ) -> list[tuple[int, str]] | None:
        """Copy the source's rows with an index from `first_index` below `end_index`, as the run's
        `Ingest` says, where they are absent, and move the checkpoint to `end_index`.

        Return references, (index, task_id) each, to the rows to be worked; None, with nothing
        written, if the run is not live or done with ingesting. Raises
        ConveyorError(not_found) where the source is gone; CallInFlight, and the checkpoint stays,
        where a task of the stretch is under a live claim in the source.
        """
        ...

    async def finish_ingest(self, run_id: str, *, now: int) -> RunStatus | None:
        """End the ingestion; return the run's status after it, None if it is gone or deleted.

        With every row written the total of a submit stays what it was, and a drained run of a
        closed job is complete. Of a rerun, and of a run that is no longer live, total and counters
        become those of its rows.
        Without effect where it was ended before.
        """
        ...

    async def fail_ingest(self, run_id: str, *, detail: str, now: int) -> bool:
        """End a live run as `failed` with reason ingest_failed, because its rows cannot be written,
        and its ingestion with it; True if this call did it."""
        ...
