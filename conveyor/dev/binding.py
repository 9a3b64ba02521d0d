"""The development binding: a data directory and every adapter over it.

Opening it also clears up after an earlier process that was killed. Nothing else runs by then, so a
blob that no record names belongs to nobody.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from conveyor.dev.call_table import CallTable, read_begun
from conveyor.dev.callbacks import FileCallbacks
from conveyor.dev.directory import DataDirectory
from conveyor.dev.files import FileBlobs, holds_bodies
from conveyor.dev.pacing import MemoryPacing, MemoryRobots
from conveyor.dev.permits import MemoryPermits, MemoryWorkers
from conveyor.dev.queues import LocalSignals, MemoryQueues
from conveyor.dev.sqlite import SqliteStore, open_store
from conveyor.dev.sqlite.upcoming import newest_instant
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.ids import is_ulid
from conveyor.ports.binding import Binding
from conveyor.ports.clock import Clock
from conveyor.ports.idle import MovedClock, OpenWork
from conveyor.ports.pipeline import Pipeline
from conveyor.ports.queues import (
    CONTROL_QUEUE,
    DeleteMessage,
    ExportMessage,
    ingest_message,
)
from conveyor.records.blob_keys import (
    TEMPLATES,
    export_key,
    input_key,
    staged_prefix,
    template_list_prefix,
    template_lists,
)
from conveyor.records.task_sending import may_have_policy

Contents = tuple[SqliteStore, FileBlobs, CallTable]

_log = logging.getLogger("conveyor.dev")

FOREVER = 1 << 62
"""An instant after all others, also where the clock was set back."""
ALL = sys.maxsize


CLAIMS_AT_ONCE = 50
"""Most tasks that one operation claims: with more, a task costs hardly less."""


async def runs_to_scrub(store: SqliteStore, blobs: FileBlobs) -> list[tuple[str, str]]:
    """List the runs whose deletion was left unfinished, as (job_id, run_id): tombstones, and runs
    that have bodies, exports or staged tasks but no record.

    A run has no record if it was purged before a late body came, or if the process was killed
    between staging its tasks and writing it.
    """
    deleted = await store.runs.deleted_runs()
    known = await store.known_runs()
    found = sorted(run for run in await blobs.runs() if run[1] not in known)
    return deleted + list(filter(_are_ulids, found))


def _are_ulids(names: tuple[str, ...]) -> bool:
    """Tell whether names are ours: others in the directory are left to whoever put them there."""
    return all(map(is_ulid, names))


async def remove_unnamed(store: SqliteStore, blobs: FileBlobs) -> None:
    """Remove bodies of calls that were never settled, staged tasks of runs that have been ingested,
    templates that no job names, exports without a record, and uploads whose slot is gone.

    The claims of the earlier process name those bodies, so they must not be void yet.
    """
    await blobs.remove_unsettled(await store.claimed_bodies())
    known = await store.known_runs()
    ingesting = {one.run_id for one in await store.ingestion.stuck_ingests(before=FOREVER)}
    for job_id, run_id in await blobs.staged_runs():
        if run_id in known and run_id not in ingesting:
            await blobs.delete_prefix(staged_prefix(job_id, run_id))
    for job_id, list_id in template_lists(await blobs.list_keys(TEMPLATES, after="", limit=ALL)):
        job = await store.jobs.find_job(job_id)
        # That of a job which is being deleted goes with its runs.
        if job is None or job.scheduling is None or job.scheduling.template.list_id != list_id:
            await blobs.delete_prefix(template_list_prefix(job_id, list_id))
    for job_id, run_id, export_id in filter(_are_ulids, await blobs.export_ids()):
        if run_id in known and await store.exports.get_export(export_id) is None:
            await blobs.delete(export_key(job_id, run_id, export_id))
    for input_id in filter(is_ulid, await blobs.input_ids()):
        if await store.inputs.get_input(input_id) is None:
            await blobs.delete(input_key(input_id))


class KeptClock(MovedClock, Protocol):
    """A clock that is moved by hand and goes on after a restart."""

    @property
    def is_start_given(self) -> bool:
        """True for a clock that is to begin at a certain instant."""
        ...

    def keep_in(self, path: Path, *, newest: int = -1) -> None:
        """Go on from the instant and ids in a file, if it is there, and keep them in it; from the
        `newest` instant that is stored, if that is later.

        Raises ConveyorError(unavailable) for a damaged file.
        """
        ...

    def save(self) -> None:
        """Write the file."""
        ...


@dataclass(frozen=True, slots=True)
class DevBinding:
    """The ports, and the parts behind them that metrics and tests look at."""

    ports: Binding
    directory: DataDirectory
    store: SqliteStore
    queues: MemoryQueues
    callbacks: FileCallbacks
    clear: Callable[[], Awaitable[None]]
    """Remove all data but secrets and signing keys. No worker may run meanwhile."""
    fill: Callable[[Path], Awaitable[None]]
    """Take over the data of another directory, which nobody has open. No worker may run meanwhile.
    Raises ConveyorError(conflict) where there is data already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevOptions:
    """The most references of a run in memory, and receives of a message; and the tasks that a
    caller has accepted a day, 0 for no limit. With `host_limits` the server has some for hosts."""

    queue_window: int = 10_000
    max_receives: int = 1_000
    daily_tasks: int = 0
    host_limits: bool = False


USUAL_OPTIONS = DevOptions()


async def open_binding(
    data_dir: Path,
    clock: Clock,
    *,
    secret: str = "",
    older_secrets: Sequence[bytes] = (),
    options: DevOptions = USUAL_OPTIONS,
    moved: KeptClock | None = None,
) -> DevBinding:
    """Open a data directory and everything in it; the caller closes it by `ports.aclose`.

    A clock that is moved by hand is given once more as `moved`, goes on from where it is kept in
    the directory, and counts the work of the adapters.

    Claims of an earlier process are void from here on, and deletions that it left unfinished are
    queued again. Raises ConveyorError where the directory is in use, not usable, of another schema,
    without the records of its bodies, or where its jobs belong to another root secret.
    """
    directory = DataDirectory.open(data_dir, clock, secret=secret)
    has_run = directory.database.exists()
    async with AsyncExitStack() as opened:
        opened.callback(directory.close)
        try:
            _take_up_clock(moved, directory, opened)
            work = None if moved is None else moved.work
            store, blobs, calls = await _open_contents(
                directory, clock, older_secrets, opened, work=work, daily_tasks=options.daily_tasks
            )
            queues = MemoryQueues(
                store.tasks.unfinished_after,
                clock if moved is None else moved.looks,
                task_hosts=store.tasks.task_hosts,
                window=options.queue_window,
                max_receives=options.max_receives,
            )
            queues.has_policy = partial(may_have_policy, store.runs, options.host_limits)
            await _take_over(store, blobs, queues)
            memory = _memory(store, queues, clock, has_run=has_run)
            await memory.pacing.take_up()
        except ConveyorError as error:
            raise ConveyorError(error.code, f"{directory.path}: {error.detail}") from None
        aclose = opened.pop_all().aclose
    callbacks = FileCallbacks(directory.callbacks, clock, work=work)
    ports = _ports(directory, (store, blobs, calls), callbacks, memory, aclose)
    clear = _clearing(store, blobs, callbacks, memory)
    fill = _filling(store, blobs, memory, clock)
    return DevBinding(ports, directory, store, queues, callbacks, clear, fill)


def _take_up_clock(
    moved: KeptClock | None, directory: DataDirectory, opened: AsyncExitStack
) -> None:
    """Go on from where the directory kept a clock that is moved by hand, and keep it at the end."""
    if moved is not None:
        _keep(moved, directory)
        opened.callback(_save_last, moved)
    elif directory.clock.exists() and not directory.is_clock_told():
        _log.warning(
            "an earlier server of this directory was on a clock that is moved by hand (--clock "
            "manual): what it wrote may be of another time than the present"
        )
        directory.note_clock_told()


def _clearing(
    store: SqliteStore, blobs: FileBlobs, callbacks: FileCallbacks, memory: _Memory
) -> Callable[[], Awaitable[None]]:
    async def clear() -> None:
        memory.clear()
        # Rows first: bodies without a row are removed by the next start.
        await store.clear()
        await blobs.clear()
        await callbacks.clear()

    return clear


def _filling(
    store: SqliteStore, blobs: FileBlobs, memory: _Memory, clock: Clock
) -> Callable[[Path], Awaitable[None]]:
    async def fill(source: Path) -> None:
        await store.check_empty()
        memory.clear()
        # Bodies first: rows name them.
        await blobs.take(source / "blobs")
        await store.fill(source / "conveyor.db")
        await store.void_claims(clock.now())
        await _take_over(store, blobs, memory.queues)
        await memory.pacing.take_up()

    return fill


class _Memory(NamedTuple):
    """The adapters that keep everything in memory."""

    queues: MemoryQueues
    signals: LocalSignals
    permits: MemoryPermits
    workers: MemoryWorkers
    pacing: MemoryPacing
    robots: MemoryRobots

    def clear(self) -> None:
        """Forget everything."""
        for one in self:
            one.clear()


def _memory(store: SqliteStore, queues: MemoryQueues, clock: Clock, *, has_run: bool) -> _Memory:
    """Make what an earlier process that `has_run` has taken with it."""
    return _Memory(
        queues,
        LocalSignals(),
        MemoryPermits(clock),
        MemoryWorkers(clock),
        MemoryPacing(clock, were_called=has_run, kept=store.closed_hosts),
        MemoryRobots(clock),
    )


def _keep(moved: KeptClock, directory: DataDirectory) -> None:
    """Have a clock go on in a directory: no earlier than what is stored there."""
    newest = newest_instant(directory.database)
    if newest >= 0 and moved.is_start_given and not directory.clock.exists():
        text = "--clock-start is for a new data directory, and this one has data of another clock"
        raise ConveyorError(ErrorCode.INVALID_ARGUMENT, text)
    moved.keep_in(directory.clock, newest=newest)


def _save_last(moved: KeptClock) -> None:
    """Write the file of a clock as its server ends, also where the directory is gone."""
    try:
        moved.save()
    except ConveyorError as error:
        _log.warning("the clock was not kept: %s", error.detail)


def _ports(
    directory: DataDirectory,
    contents: Contents,
    callbacks: FileCallbacks,
    memory: _Memory,
    aclose: Callable[[], Awaitable[None]],
) -> Binding:
    store, blobs, calls = contents
    return Binding(
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
        deliveries=store.deliveries,
        schedules=store.schedules,
        callbacks=callbacks,
        queues=memory.queues,
        blobs=blobs,
        permits=memory.permits,
        pacing=memory.pacing,
        robots=memory.robots,
        signals=memory.signals,
        workers=memory.workers,
        root_secret=directory.secret,
        pipeline=_pipeline(store, blobs, calls),
        run_writes=store.run_writes,
        aclose=aclose,
    )


def _pipeline(store: SqliteStore, blobs: FileBlobs, calls: CallTable) -> Pipeline:
    return Pipeline(claims_at_once=CLAIMS_AT_ONCE, tasks=store.tasks, bodies=blobs, calls=calls)


async def _open_contents(
    directory: DataDirectory,
    clock: Clock,
    older_secrets: Sequence[bytes],
    opened: AsyncExitStack,
    *,
    work: OpenWork | None,
    daily_tasks: int,
) -> Contents:
    """Open what is in the directory, and void what an earlier process left half done."""
    may_be_new = not holds_bodies(directory.blobs)
    store = await open_store(
        directory.database,
        now=clock.now(),
        may_be_new=may_be_new,
        work=work,
        daily_tasks=daily_tasks,
    )
    opened.push_async_callback(store.aclose)
    await store.agree([directory.secret, *older_secrets])
    blobs = FileBlobs(directory.blobs, work=work)
    opened.push_async_callback(blobs.aclose)
    store.database.file.watch(directory.blobs)
    await remove_unnamed(store, blobs)
    await store.void_claims(clock.now(), read_begun(directory.calls))
    # The table before is replaced only now: a boot that is killed up to here is made again.
    calls = CallTable(directory.calls, clock.new_id())
    opened.callback(calls.close)
    return store, blobs, calls


async def _take_over(store: SqliteStore, blobs: FileBlobs, queues: MemoryQueues) -> None:
    """Continue the work of an earlier process: send its control messages again, which were in its
    memory."""
    for job_id, run_id, template in await store.ingestion.stuck_ingests(before=FOREVER):
        await queues.send(CONTROL_QUEUE, ingest_message(job_id, run_id, template=template))
    for job_id, run_id in await runs_to_scrub(store, blobs):
        await queues.send(CONTROL_QUEUE, DeleteMessage(job_id, run_id))
    for export in await store.exports.unfinished_exports(before=FOREVER):
        message = ExportMessage(export.job_id, export.run_id, export.export_id)
        await queues.send(CONTROL_QUEUE, message)
