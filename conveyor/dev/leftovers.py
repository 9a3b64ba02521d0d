"""What a process that was killed has left in the blob store, found at the next boot.

Nothing else runs by then, so that whatever no record names is nobody's.
"""

from __future__ import annotations

from conveyor.dev.files import FileBlobs
from conveyor.dev.sqlite import SqliteStore
from conveyor.ports.blobs import input_key, staged_prefix

_END_OF_TIME = 1 << 62
"""Later than any moment, also of a clock that was set back since."""


async def runs_to_scrub(store: SqliteStore, blobs: FileBlobs) -> list[tuple[str, str]]:
    """Runs whose deletion was left unfinished: tombstones, and bodies, exports and staged tasks of
    no run.

    A process that is killed between a body and its settlement leaves a file that no row names;
    where the run was deleted meanwhile, nothing else would ever find it. Nor would anything find
    the tasks that a submit had staged before its run was written.
    """
    deleted = await store.runs.deleted_runs()
    known = await store.known_runs()
    return deleted + sorted(run for run in await blobs.runs() if run[1] not in known)


async def remove_unnamed(store: SqliteStore, blobs: FileBlobs) -> None:
    """Remove staged tasks of runs that have been ingested, and uploads whose slot is gone."""
    known = await store.known_runs()
    ingesting = {run_id for _, run_id in await store.ingestion.stuck_ingests(before=_END_OF_TIME)}
    for job_id, run_id in await blobs.staged_runs():
        if run_id in known and run_id not in ingesting:
            await blobs.delete_prefix(staged_prefix(job_id, run_id))
    for input_id in await blobs.input_ids():
        if await store.inputs.get_input(input_id) is None:
            await blobs.delete(input_key(input_id))
