"""The development binding: a data directory and every adapter over it.

Opening it also clears up after an earlier process that was killed. Nothing else runs by then, so a
blob that no record names belongs to nobody.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from conveyor.dev.call_table import CallTable, read_begun
from conveyor.dev.callbacks import FileCallbacks
from conveyor.dev.directory import DataDirectory
from conveyor.dev.files import FileBlobs
from conveyor.dev.permits import MemoryPermits
from conveyor.dev.queues import LocalSignals, MemoryQueues
from conveyor.dev.sqlite import SqliteStore, open_store
from conveyor.domain.errors import ConveyorError
from conveyor.ports.binding import Binding
from conveyor.ports.clock import Clock
from conveyor.ports.pipeline import Pipeline
from conveyor.ports.queues import (
    CONTROL_QUEUE,
    DeleteMessage,
    ExportMessage,
    IngestMessage,
)
from conveyor.records.blob_keys import input_key, staged_prefix

FOREVER = 1 << 62
"""An instant after all others, also where the clock was set back."""


CLAIMS_AT_ONCE = 50
"""Most tasks that one operation claims: with more, a task costs hardly less."""


async def runs_to_scrub(store: SqliteStore, blobs: FileBlobs) -> list[tuple[str, str]]:
    """List the runs whose deletion was left unfinished, as (job_id, run_id): tombstones, and runs
    that have bodies, exports or staged tasks but no record.

    A process that is killed between writing a body and settling its task leaves a file that no row
    names; if the run was deleted meanwhile, nothing else would ever find it. Nor would anything
    find the tasks that a submit had staged before its run was written.
    """
    deleted = await store.runs.deleted_runs()
    known = await store.known_runs()
    return deleted + sorted(run for run in await blobs.runs() if run[1] not in known)


async def remove_unnamed(store: SqliteStore, blobs: FileBlobs) -> None:
    """Remove staged tasks of runs that have been ingested, and uploads whose slot is gone."""
    known = await store.known_runs()
    ingesting = {run_id for _, run_id in await store.ingestion.stuck_ingests(before=FOREVER)}
    for job_id, run_id in await blobs.staged_runs():
        if run_id in known and run_id not in ingesting:
            await blobs.delete_prefix(staged_prefix(job_id, run_id))
    for input_id in await blobs.input_ids():
        if await store.inputs.get_input(input_id) is None:
            await blobs.delete(input_key(input_id))


@dataclass(frozen=True, slots=True)
class DevBinding:
    """The ports, and the parts behind them that metrics and tests look at."""

    ports: Binding
    directory: DataDirectory
    store: SqliteStore
    queues: MemoryQueues


async def open_binding(
    data_dir: Path,
    clock: Clock,
    *,
    secret: str = "",
    queue_window: int = 10_000,
    max_receives: int = 1_000,
) -> DevBinding:
    """Open a data directory and everything in it; the caller closes it by `ports.aclose`.

    Claims of an earlier process are void from here on, and deletions that it left unfinished are
    queued again. Raises ConveyorError where the directory is in use, not usable, or of another
    schema.
    """
    directory = DataDirectory.open(data_dir, clock, secret=secret)
    store, blobs = await _open_contents(directory, data_dir, clock)
    queues = MemoryQueues(
        store.tasks.unfinished_after, clock, window=queue_window, max_receives=max_receives
    )

    await store.void_claims(clock.now(), read_begun(directory.calls))
    # The table before is replaced only now: a boot that is killed up to here is made again.
    calls = CallTable(directory.calls, clock.new_id())

    binding = Binding(
        jobs=store.jobs,
        runs=store.runs,
        idempotency=store.idempotency,
        tasks=store.tasks,
        ingestion=store.ingestion,
        inputs=store.inputs,
        exports=store.exports,
        sweeping=store.sweeping,
        outbox=store.outbox,
        signing_keys=store.signing_keys,
        callbacks=FileCallbacks(directory.callbacks, clock),
        queues=queues,
        blobs=blobs,
        permits=MemoryPermits(clock),
        signals=LocalSignals(),
        root_secret=directory.secret,
        pipeline=Pipeline(
            claims_at_once=CLAIMS_AT_ONCE, tasks=store.tasks, bodies=blobs, calls=calls
        ),
        aclose=partial(_close, directory, store, blobs, calls),
    )
    await _take_over(store, blobs, queues)
    return DevBinding(binding, directory, store, queues)


async def _close(
    directory: DataDirectory, store: SqliteStore, blobs: FileBlobs, calls: CallTable
) -> None:
    await blobs.aclose()
    await store.aclose()
    calls.close()
    directory.close()


async def _open_contents(
    directory: DataDirectory, data_dir: Path, clock: Clock
) -> tuple[SqliteStore, FileBlobs]:
    try:
        return await open_store(directory.database, now=clock.now()), FileBlobs(directory.blobs)
    except ConveyorError as error:
        directory.close()
        raise ConveyorError(error.code, f"{data_dir}: {error.detail}") from None
    except BaseException:
        directory.close()
        raise


async def _take_over(store: SqliteStore, blobs: FileBlobs, queues: MemoryQueues) -> None:
    """Continue the work of an earlier process: send its control messages again, which were in its
    memory."""
    for job_id, run_id in await store.ingestion.stuck_ingests(before=FOREVER):
        await queues.send(CONTROL_QUEUE, IngestMessage(job_id, run_id))
    await remove_unnamed(store, blobs)
    for job_id, run_id in await runs_to_scrub(store, blobs):
        await queues.send(CONTROL_QUEUE, DeleteMessage(job_id, run_id))
    for export in await store.exports.unfinished_exports(before=FOREVER):
        message = ExportMessage(export.job_id, export.run_id, export.export_id)
        await queues.send(CONTROL_QUEUE, message)
