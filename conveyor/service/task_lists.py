"""Loads lists of tasks from a document or a file: checks them, then holds or stages them.

A short list is held until its request writes the rows. A long one is staged in chunks as it is
checked, and is never in memory as a whole; that of a scheduled job always is staged, as the
template of its runs.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

import anyio
import anyio.lowlevel
import msgspec
from msgspec import structs

from conveyor.domain import ids
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.model import NewTask, TaskSpec
from conveyor.domain.remarks import Remarks
from conveyor.domain.shards import MOST_UNITS_IN_ONE_SHARD, WRITE_UNIT, write_units
from conveyor.domain.submission import JobRequest, Limits
from conveyor.intake.frames import Chunk, Csv, Head, ListSource, ValidationRequest
from conveyor.intake.rows import RowWriter
from conveyor.ports.blobs import BlobReader, Blobs
from conveyor.ports.clock import Clock
from conveyor.ports.idle import OpenWork
from conveyor.ports.inputs import InputSlots, JobInput
from conveyor.records.blob_keys import (
    input_key,
    staged_key,
    staged_prefix,
    template_key,
    template_list_prefix,
)
from conveyor.service.context import ServiceOptions
from conveyor.service.file_inputs import file_too_large
from conveyor.service.list_validation import ListValidator, Pieces

MOST_HELD = 67_108_864
"""Maximum bytes of a list held in memory; a longer list is large, however few its tasks."""

_SPARE_BYTES = 128
_encoder = msgspec.json.Encoder()
_pairs = msgspec.json.Decoder(list[tuple[str, TaskSpec]])
_log = logging.getLogger("conveyor.service")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskList:
    """A valid list: its number of rows, and the write units to write them.

    It is either held in `tasks`, or staged in `chunks`, named by their first indexes. A file has
    remarks of its own.
    """

    rows: int
    units: int
    tasks: Sequence[NewTask] = ()
    chunks: tuple[int, ...] | None = None
    remarks: Remarks = Remarks()

    @property
    def staged(self) -> bool:
        """Return whether its rows are written after the answer rather than before."""
        return self.chunks is not None


@dataclass(slots=True)
class StagedList:
    """The staging area of one list, and the chunks put there: the rows of the run `run_id`, or the
    template of a scheduled job, of which `run_id` tells attempts apart."""

    blobs: Blobs
    job_id: str = field(kw_only=True)
    run_id: str = field(kw_only=True)
    is_template: bool = False
    chunks: list[int] = field(default_factory=list)

    async def put(self, chunk: Chunk) -> None:
        """Stage a chunk. Not cut short, so that nothing appears after `discard`."""
        self.chunks.append(chunk.first_index)
        with anyio.CancelScope(shield=True):
            await self.blobs.put(self._key(chunk.first_index), chunk.content)

    async def discard(self) -> None:
        """Remove the staged chunks. Raises nothing: the caller must see the original error."""
        if not self.chunks:
            return
        prefix = template_list_prefix if self.is_template else staged_prefix
        with anyio.CancelScope(shield=True):
            try:
                await self.blobs.delete_prefix(prefix(self.job_id, self.run_id))
            except Exception as error:
                _log.warning(
                    "a staged list could not be removed",
                    extra={"run_id": self.run_id, "error": type(error).__name__},
                )

    def _key(self, first_index: int) -> str:
        key = template_key if self.is_template else staged_key
        return key(self.job_id, self.run_id, first_index)


class TaskListLoader:
    """Checks lists of tasks and stages them.

    Every method raises ConveyorError as the check does; the caller discards what was staged.
    """

    def __init__(
        self,
        inputs: InputSlots,
        blobs: BlobReader,
        options: ServiceOptions,
        clock: Clock,
        *,
        work: OpenWork | None = None,
    ) -> None:
        self._inputs = inputs
        self._blobs = blobs
        self._options = options
        self._clock = clock
        self._validator = ListValidator(
            clock, max_seconds=options.max_validation_seconds, work=work
        )

    async def from_document(
        self,
        to: StagedList,
        pieces: Sequence[bytes],
        limits: Limits,
        check: Callable[[JobRequest], Awaitable[None]],
    ) -> tuple[JobRequest, TaskList]:
        """Return the request in a large document, without its tasks, and the list of them. `check`
        may refuse the request before any task is stored."""
        hopper = _Buffer(to, large_from=self._options.async_threshold)
        requests: list[JobRequest] = []

        async def take(frame: Head | Chunk) -> None:
            if isinstance(frame, Chunk):
                await hopper.take(frame)
                return
            await check(frame.request)
            requests.append(frame.request)
            to.is_template = frame.request.schedule is not None
            many = frame.tasks >= self._options.async_threshold
            hopper.large = to.is_template or frame.request.force_async or many

        work = ValidationRequest(source=ListSource.DOCUMENT, run_id=to.run_id, limits=limits)
        done = await self._validator.stage(work, pieces, total=sum(map(len, pieces)), sink=take)
        [request] = requests
        return request, await hopper.finish(done.rows, done.units)

    async def from_file(self, to: StagedList, request: JobRequest, caller_id: str) -> TaskList:
        """Return the tasks in the uploaded file that a request names.

        The file is read once: a later upload changes nothing. Also raises ConveyorError:
        file_input_not_found; file_input_not_uploaded; payload_too_large.
        """
        slot = await self._slot(request.file_input_id or "", caller_id)
        size, pieces = await self._uploaded(slot)
        to.is_template = request.schedule is not None
        work = ValidationRequest(
            source=ListSource(slot.type.value),
            run_id=to.run_id,
            job_params=request.params,
            csv=Csv(**structs.asdict(slot.csv)) if slot.csv is not None else None,
            max_rows=self._options.max_input_rows,
            max_bytes=self._options.max_input_bytes,
            skip_invalid=request.skip_invalid,
        )
        large = to.is_template or request.force_async
        return await self._staged_file(to, work, pieces, size, large=large)

    async def _uploaded(self, slot: JobInput) -> tuple[int, Pieces]:
        """Return the bytes of the file in a slot, and its pieces.

        A store with links of its own does not report uploads, so it is asked here.
        """
        blobs, key = self._blobs, input_key(slot.input_id)
        size = await blobs.size(key)
        if size is not None and size > self._options.max_input_bytes:
            raise file_too_large(self._options.max_input_bytes)
        pieces = None if size is None else await blobs.open(key)
        if size is None or pieces is None:
            raise ConveyorError(
                ErrorCode.FILE_INPUT_NOT_UPLOADED, "nothing has been uploaded to this file input"
            )
        return size, pieces

    async def _staged_file(
        self, to: StagedList, work: ValidationRequest, pieces: Pieces, size: int, *, large: bool
    ) -> TaskList:
        hopper = _Buffer(to, large_from=self._options.async_threshold, large=large)

        async def take(frame: Head | Chunk) -> None:
            if isinstance(frame, Chunk):
                await hopper.take(frame)

        done = await self._validator.stage(work, pieces, total=size, sink=take)
        tasks = await hopper.finish(done.rows, done.units)
        return replace(tasks, remarks=done.remarks)

    async def from_specs(self, to: StagedList, request: JobRequest, document: int) -> TaskList:
        """Return the tasks of a small document of `document` bytes."""
        rows = len(request.specs)
        to.is_template = request.schedule is not None
        is_small = not request.force_async and rows < self._options.async_threshold
        if is_small and not to.is_template:
            tasks = [
                NewTask(index, ids.task_id(to.run_id, index), spec)
                for index, spec in enumerate(request.specs)
            ]
            return TaskList(rows=rows, units=_units(request.specs, document), tasks=tasks)
        chunks: list[Chunk] = []
        writer = RowWriter(to.run_id, chunks.append)
        writer.add(request.specs)
        done = writer.finish()
        for chunk in chunks:
            await to.put(chunk)
        return TaskList(rows=done.rows, units=done.units, chunks=tuple(to.chunks))

    async def _slot(self, input_id: str, caller_id: str) -> JobInput:
        slot = await self._inputs.get_input(input_id) if ids.is_ulid(input_id) else None
        if slot is None or slot.caller != caller_id or slot.expires_at <= self._clock.now():
            raise ConveyorError(ErrorCode.FILE_INPUT_NOT_FOUND, "no such file input")
        return slot


@dataclass(slots=True)
class _Buffer:
    """Holds chunks back while the list may still turn out small, and puts them from then on."""

    to: StagedList
    large_from: int = field(kw_only=True)
    large: bool = field(kw_only=True, default=False)
    rows: int = 0
    held_bytes: int = 0
    held: list[Chunk] = field(default_factory=list)

    async def take(self, chunk: Chunk) -> None:
        self.rows += chunk.count
        self.held_bytes += len(chunk.content)
        self.held.append(chunk)
        if self.large or self.rows >= self.large_from or self.held_bytes > MOST_HELD:
            self.large = True
            while self.held:
                await self.to.put(self.held.pop(0))

    async def finish(self, rows: int, units: int) -> TaskList:
        if self.large:
            return TaskList(rows=rows, units=units, chunks=tuple(self.to.chunks))
        tasks: list[NewTask] = []
        while self.held:
            chunk = self.held.pop(0)
            for line in chunk.content.splitlines():
                start = len(tasks)
                for offset, (task_id, spec) in enumerate(_pairs.decode(line)):
                    tasks.append(NewTask(start + offset, task_id, spec))
                await anyio.lowlevel.checkpoint()
        return TaskList(rows=rows, units=units, tasks=tasks)


def _units(specs: Sequence[TaskSpec], document: int) -> int:
    """Return the write units of the tasks in a document of `document` bytes, or an upper bound
    where that makes no difference.

    A task is stored in at most twice the bytes that it was sent in, and some more: escapes within
    escapes, and the content type of a body.
    """
    most = len(specs) + (2 * document + _SPARE_BYTES * len(specs)) // WRITE_UNIT
    if most <= MOST_UNITS_IN_ONE_SHARD:
        return most
    return sum(write_units(len(_encoder.encode(spec))) for spec in specs)
