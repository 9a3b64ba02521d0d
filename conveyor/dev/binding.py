"""Opening the development binding: a data directory and every adapter over it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from conveyor.dev.directory import DataDirectory
from conveyor.dev.files import FileBlobs
from conveyor.dev.permits import MemoryPermits
from conveyor.dev.queues import MemoryQueues
from conveyor.dev.signals import LocalSignals
from conveyor.dev.sqlite import SqliteStore, open_store
from conveyor.domain.errors import ConveyorError
from conveyor.ports.binding import Binding
from conveyor.ports.clock import Clock
from conveyor.ports.queues import CONTROL_QUEUE, DeleteMessage


@dataclass(frozen=True, slots=True)
class DevBinding:
    """The ports, and what only this binding has: its directory and its store, for metrics."""

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
    queued again. Raises ConveyorError where the directory is in use, not usable, or of a newer
    schema.
    """
    directory = DataDirectory.open(data_dir, clock, secret=secret)
    try:
        store = await open_store(directory.database, now=clock.now())
        blobs = FileBlobs(directory.blobs)
    except ConveyorError as error:
        directory.close()
        raise ConveyorError(error.code, f"{data_dir}: {error.detail}") from None
    except BaseException:
        directory.close()
        raise
    queues = MemoryQueues(
        store.tasks.unfinished_after, clock, window=queue_window, max_receives=max_receives
    )

    async def close() -> None:
        await blobs.aclose()
        await store.aclose()
        directory.close()

    binding = Binding(
        jobs=store.jobs,
        runs=store.runs,
        idempotency=store.idempotency,
        tasks=store.tasks,
        queues=queues,
        blobs=blobs,
        permits=MemoryPermits(clock),
        signals=LocalSignals(),
        root_secret=directory.secret,
        aclose=close,
    )
    await store.void_claims(clock.now())
    for job_id, run_id in await _to_scrub(store, blobs):
        await queues.send(CONTROL_QUEUE, DeleteMessage(job_id, run_id))
    return DevBinding(binding, directory, store, queues)


async def _to_scrub(store: SqliteStore, blobs: FileBlobs) -> list[tuple[str, str]]:
    """Runs whose deletion an earlier process left unfinished: tombstones, and bodies of no run.

    A process that is killed between a body and its settlement leaves a file that no row names;
    where the run was deleted meanwhile, nothing else would ever find it.
    """
    deleted = await store.runs.deleted_runs()
    known = await store.known_runs()
    orphans = [run for run in await blobs.result_runs() if run[1] not in known]
    return deleted + orphans
