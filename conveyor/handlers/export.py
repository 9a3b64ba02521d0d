"""Make exports: turn the results of a run into one blob.

An export reads the rows of its run in portions, each with the bodies that are still there.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import NamedTuple

import anyio
from anyio import to_thread

from conveyor.aio.concurrency import for_each
from conveyor.aio.resilience import log_and_continue
from conveyor.domain.errors import ConveyorError
from conveyor.domain.export_rows import Exported
from conveyor.domain.model import Job, Task, TaskStatus
from conveyor.domain.shards import shards_of
from conveyor.handlers.export_writers import Writer, archive
from conveyor.ports.blobs import BlobReader, Blobs
from conveyor.ports.clock import Clock
from conveyor.ports.exports import Export, ExportFormat, ExportStatus, ExportWork
from conveyor.ports.handler import ACKNOWLEDGE, Outcome, Throttled
from conveyor.ports.queues import (
    CONTROL_QUEUE,
    DEAD_LETTER_QUEUE,
    Delivery,
    ExportMessage,
    Queues,
)
from conveyor.ports.records import JobLookup
from conveyor.ports.tasks import TaskReader
from conveyor.records.blob_keys import export_key
from conveyor.records.expiry import Expiry
from conveyor.records.packed_bodies import PackedBody, neighbours, packed_body
from conveyor.records.sharded_reads import all_tasks

PORTION_ROWS = 128
PORTION_BYTES = 4 * 1024 * 1024
"""A portion ends at either bound; a larger body has a portion of its own."""

READS_AT_A_TIME = 4


class TooLarge(Exception):
    """The bodies of a run exceed the largest export."""


class ExportSource:
    """The rows of one run, read once."""

    def __init__(
        self, clock: Clock, job: Job, run_id: str, *, tasks: TaskReader, blobs: BlobReader
    ) -> None:
        self._clock = clock
        self._job = job
        self._run_id = run_id
        self._tasks = tasks
        self._blobs = blobs
        self._expiry = Expiry(tasks)

    async def portions(self, *, max_bytes: int) -> AsyncGenerator[list[Exported], None]:
        """Yield every row in submission order. Raises TooLarge before it reads a body beyond
        `max_bytes` of bodies in all."""
        rows: list[Task] = []
        held = total = 0
        tasks = all_tasks(self._tasks, self._run_id, shards_of(self._job))
        async for task in tasks:
            size = _body_size(task)
            total += size
            if total > max_bytes:
                raise TooLarge
            if rows and (len(rows) == PORTION_ROWS or held + size > PORTION_BYTES):
                yield await self._with_bodies(rows)
                rows, held = [], 0
            rows.append(task)
            held += size
        if rows:
            yield await self._with_bodies(rows)

    async def _with_bodies(self, tasks: list[Task]) -> list[Exported]:
        now = self._clock.now()
        ends = await self._expiry.of(tasks, self._job.result_ttl_days, horizon=now)
        bodies: list[tuple[bytes, ...] | None] = [None] * len(tasks)

        async def read(one: _Read) -> None:
            for place, body in zip(one.places, await self._read(one, tasks), strict=True):
                bodies[place] = body

        due = [place for place, end in enumerate(ends) if end is not None and end > now]
        await for_each(read, _reads(tasks, due), limit=READS_AT_A_TIME)
        return [Exported(task, body) for task, body in zip(tasks, bodies, strict=True)]

    async def _read(self, read: _Read, tasks: Sequence[Task]) -> list[tuple[bytes, ...] | None]:
        if read.keys:
            found = await self._blobs.read_neighbours(read.keys)
            return [None if body is None else (body,) for body in found]
        [place] = read.places
        result = tasks[place].result
        if result is None:
            return [None]
        pieces = await self._blobs.open(result.blob_key, size=result.size)
        return [None if pieces is None else tuple([piece async for piece in pieces])]


class _Read(NamedTuple):
    """One read: of the body of a row, or of several packed ones by their `keys`. `places` are those
    of the rows."""

    places: list[int]
    keys: list[str]


def _reads(tasks: Sequence[Task], due: Sequence[int]) -> list[_Read]:
    """Share the bodies of rows out over as few reads as can be."""
    alone: list[_Read] = []
    packed: dict[PackedBody, list[int]] = {}
    for place in due:
        result = tasks[place].result
        body = None if result is None else packed_body(result.blob_key)
        if result is not None and body is not None and body.size == result.size:
            packed.setdefault(body, []).append(place)
        else:
            alone.append(_Read([place], []))
    together = []
    for group in neighbours(packed):
        named = [(place, body.key) for body in group for place in packed[body]]
        together.append(_Read([place for place, _ in named], [key for _, key in named]))
    return alone + together


def _body_size(task: Task) -> int:
    return task.result.size if task.status is TaskStatus.SUCCESSFUL and task.result else 0


TRIES = 5
"""Errors in this process after which it gives an export up."""
BUSY_PAUSE = 2.0
"""Seconds that an export waits while another one is being made here."""

_GIB = 1 << 30
_WRITERS = {
    ExportFormat.ZIP: ("conveyor.handlers.export_writers", "zip_pieces"),
    ExportFormat.JSONL: ("conveyor.handlers.export_writers", "jsonl_pieces"),
    ExportFormat.CSV: ("conveyor.handlers.export_writers", "csv_pieces"),
    ExportFormat.PARQUET: ("conveyor.handlers.export_parquet", "parquet_pieces"),
}

_log = logging.getLogger("conveyor.handlers")


class _Withdrawn(Exception):
    """The export has ended or expired, or its run was deleted, while it was being made."""


class _Impossible(Exception):
    """The export can never be made; the text is shown to its caller."""


class ExportHandler:
    """The handler of export messages.

    It makes one export at a time, which leaves the other slots of the control lane free. Making one
    twice is harmless: nobody sees a byte of it until it is complete.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        exports: ExportWork,
        jobs: JobLookup,
        tasks: TaskReader,
        blobs: Blobs,
        queues: Queues,
        max_bytes: int,
    ) -> None:
        self._clock = clock
        self._exports = exports
        self._jobs = jobs
        self._tasks = tasks
        self._blobs = blobs
        self._queues = queues
        self._max_bytes = max_bytes
        self._active: dict[str, anyio.CancelScope] = {}
        self._errors: dict[str, int] = {}

    async def handle(self, delivery: Delivery, _throttled: Throttled) -> Outcome:
        """Make one export, from the beginning."""
        message = delivery.message
        assert isinstance(message, ExportMessage)
        if message.export_id in self._active:
            return ACKNOWLEDGE
        if self._active:
            # Touch it, so that no sweeper sends it again. Send a fresh copy, so that waiting does
            # not wear the message out.
            await self._exports.touch_export(message.export_id, now=self._clock.now())
            await self._queues.send(CONTROL_QUEUE, message, delay=BUSY_PAUSE)
            return ACKNOWLEDGE
        with anyio.CancelScope() as scope:
            self._active[message.export_id] = scope
            try:
                await self._attempt(message)
            finally:
                del self._active[message.export_id]
        if scope.cancelled_caught:
            await self._clean_up(message)
        return ACKNOWLEDGE

    async def renew(self) -> None:
        """Mark exports in work as being made, and end those that nobody wants any more."""
        for export_id in list(self._active):
            await log_and_continue(
                _log, "renewing an export failed", partial(self._renew, export_id)
            )

    async def _renew(self, export_id: str) -> None:
        if await self._exports.begin_export(export_id, now=self._clock.now()) is None:
            scope = self._active.get(export_id)
            if scope is not None:
                scope.cancel()

    async def _attempt(self, message: ExportMessage) -> None:
        try:
            await self._make(message)
        except _Withdrawn:
            await self._clean_up(message)
        except _Impossible as error:
            await self._end(message, error=str(error))
        except Exception as error:
            errors = self._errors.get(message.export_id, 0) + 1
            if errors < TRIES:
                self._errors[message.export_id] = errors
                raise
            _log.exception("gave up an export", extra={"export_id": message.export_id})
            await self._give_up(message, error)
        self._errors.pop(message.export_id, None)

    async def _make(self, message: ExportMessage) -> None:
        export = await self._begin(message)
        job = await self._jobs.find_job(message.job_id)
        if job is None:
            raise _Withdrawn
        writer = await to_thread.run_sync(_writer, export.format)
        source = ExportSource(
            self._clock, job, message.run_id, tasks=self._tasks, blobs=self._blobs
        )
        async with (
            aclosing(source.portions(max_bytes=self._max_bytes)) as portions,
            aclosing(self._checked(archive(writer, portions), message)) as blocks,
        ):
            try:
                size = await self._blobs.put(_key(message), blocks)
            except TooLarge:
                limit = self._max_bytes // _GIB
                raise _Impossible(f"results are larger than {limit} gb") from None
        await self._end(message, size=size)

    async def _begin(self, message: ExportMessage) -> Export:
        export = await self._exports.begin_export(message.export_id, now=self._clock.now())
        if export is None:
            raise _Withdrawn
        return export

    async def _checked(
        self, blocks: AsyncGenerator[bytes, None], message: ExportMessage
    ) -> AsyncGenerator[bytes, None]:
        """Yield the blocks; look at the export once more before its bytes become visible."""
        async with aclosing(blocks):
            async for block in blocks:
                yield block
        await self._begin(message)

    async def _end(
        self, message: ExportMessage, *, size: int | None = None, error: str | None = None
    ) -> None:
        now = self._clock.now()
        if not await self._exports.end_export(message.export_id, size=size, error=error, now=now):
            await self._clean_up(message)

    async def _clean_up(self, message: ExportMessage) -> None:
        """Remove the bytes of an unwanted export, unless another worker completed it."""
        export = await self._exports.get_export(message.export_id)
        if export is None or export.status is not ExportStatus.COMPLETED:
            await self._blobs.delete(_key(message))

    async def _give_up(self, message: ExportMessage, error: Exception) -> None:
        reason = error.detail if isinstance(error, ConveyorError) else type(error).__name__
        await self._end(message, error=f"the export could not be made: {reason}")
        letter = ExportMessage(message.job_id, message.run_id, message.export_id, reason=reason)
        await self._queues.send(DEAD_LETTER_QUEUE, letter)


def _writer(export_format: ExportFormat) -> Writer:
    # Load a writer when it is first needed, because its libraries are large.
    module, function = _WRITERS[export_format]
    try:
        writer: Writer = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "pyarrow":
            raise
        raise _Impossible(
            "parquet needs the extra parquet where the worker runs: "
            "pip install 'conveyor-batch[parquet]'"
        ) from None
    return writer


def _key(message: ExportMessage) -> str:
    return export_key(message.job_id, message.run_id, message.export_id)
