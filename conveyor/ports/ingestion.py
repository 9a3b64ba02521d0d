"""The ingestion port: writing the rows of large runs exactly once, step by step.

Every write is conditional on the row's absence, and on the run still ingesting: a message that
comes twice, or an ingester that wakes up late, changes nothing.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from conveyor.domain.hosts import Politeness
from conveyor.domain.model import Ingest, RunStatus


class StagedRows(msgspec.Struct, frozen=True):
    """A stretch of a staged list: `count` tasks from `first_index` on.

    `rows` is a JSON array of `count` pairs, each the task's id and its TaskSpec as an object.
    """

    first_index: int
    count: int
    rows: bytes


class Ingesting(msgspec.Struct, frozen=True, kw_only=True):
    """A run whose ingestion has not ended. If `live` is True, its tasks may still be worked.
    `politeness` is that of its job."""

    job_id: str
    run_id: str
    live: bool
    ingest: Ingest
    rerun_of: str | None = None
    politeness: Politeness | None = None


class IngestWork(Protocol):
    """Ingestion of large runs, for workers."""

    async def ingesting(self, run_id: str) -> Ingesting | None:
        """Return the ingestion of a run; None if the run is gone, deleted, or done with
        ingesting."""
        ...

    async def write_rows(self, run_id: str, rows: StagedRows, *, now: int) -> bool:
        """Insert the staged rows that are absent, as pending, move the checkpoint behind them, and
        return True.

        Return False and write nothing if the run is not live, or done with ingesting.
        """
        ...

    async def copy_rows(
        self, run_id: str, *, first_index: int, end_index: int, now: int
    ) -> list[tuple[int, str]] | None:
        """Copy the absent rows of a stretch from the run's source, as the run's `Ingest` states,
        and move the checkpoint to `end_index`.

        The stretch holds the indexes from `first_index` up to, but not including, `end_index`.
        Return references, (index, task_id) each, to the rows to be worked. Return None and write
        nothing if the run is not live, or done with ingesting. Raises ConveyorError(not_found) if
        the source is gone; CallInFlight, with the checkpoint unmoved, if a task of the stretch is
        under a live claim in the source.
        """
        ...

    async def finish_ingest(self, run_id: str, *, now: int) -> RunStatus | None:
        """End the ingestion of a run; return the run's status after it, None if it is gone or
        deleted.

        If every row of a submitted list is written, the run's total stays as it was, and a drained
        run of a closed job is complete. For a rerun, and for a run that is no longer live, compute
        total and counters from its rows. Change nothing if the ingestion has ended before.
        """
        ...

    async def fail_ingest(self, run_id: str, *, detail: str, now: int) -> bool:
        """End a live run and its ingestion as `failed` with reason ingest_failed, because its rows
        cannot be written; return True if this call ended it."""
        ...
