"""Write the rows of a run: from the chunks that its submit staged, from the template of its
scheduled job, or from the run it reruns.

A worker may be killed at any instant here, and two workers may do the same work at once: rows are
written only if they are absent, and the checkpoint moves with them.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence

import anyio.lowlevel
import msgspec

from conveyor.domain import ids
from conveyor.domain.errors import CallInFlight, ConveyorError, ErrorCode
from conveyor.domain.model import Ingest
from conveyor.domain.states import LIVE_RUN_STATES
from conveyor.ports.blobs import Blobs
from conveyor.ports.clock import Clock
from conveyor.ports.handler import ACKNOWLEDGE, Outcome, Throttled
from conveyor.ports.ingestion import Ingesting, IngestWork, StagedRows
from conveyor.ports.queues import (
    CONTROL_QUEUE,
    DEAD_LETTER_QUEUE,
    Delivery,
    IngestMessage,
    Queues,
    Signals,
    TemplateMessage,
)
from conveyor.records.blob_keys import staged_key, staged_prefix, template_key
from conveyor.records.task_sending import TaskSender

STRETCH = 250
"""Indexes whose rows are written in one step: a rerun copies as many, and a line of a staged chunk
holds no more. Few, because claims and settlements wait for the step."""

HELD_PAUSE = 2.0
"""Seconds until an ingestion that could not go on looks again, such as a copy that met a call under
way in its source."""

_log = logging.getLogger("conveyor.handlers")
_pairs = msgspec.json.Decoder(list[tuple[str, msgspec.Raw]])
_encode = msgspec.json.Encoder().encode


class IngestFailed(Exception):
    """The rows can never be written. The text is shown to the caller."""


class IngestHandler:
    """The handler of ingest and template messages."""

    def __init__(
        self,
        clock: Clock,
        *,
        ingestion: IngestWork,
        blobs: Blobs,
        queues: Queues,
        signals: Signals,
        sender: TaskSender,
    ) -> None:
        self._clock = clock
        self._ingestion = ingestion
        self._blobs = blobs
        self._queues = queues
        self._signals = signals
        self._sender = sender

    async def handle(self, delivery: Delivery, _throttled: Throttled) -> Outcome:
        """Go on from the checkpoint to the end, then latch."""
        message = delivery.message
        assert isinstance(message, IngestMessage | TemplateMessage)
        state = await self._ingestion.ingesting(message.run_id)
        if state is None:
            await self._remove_staged(message)
            return ACKNOWLEDGE
        await self._queues.open_run(message.job_id, message.run_id)
        try:
            whole = state.live and await self._write(state)
        except IngestFailed as broken:
            await self._give_up(message, str(broken))
            return ACKNOWLEDGE
        except CallInFlight:
            # Send a fresh copy: waiting then wears no message out, and takes no slot of the lane.
            await self._queues.send(CONTROL_QUEUE, message, delay=HELD_PAUSE)
            return ACKNOWLEDGE
        if not whole:
            # The run was stopped, failed or deleted, or another ingester was quicker.
            state = await self._ingestion.ingesting(message.run_id)
            if state is not None and state.live:
                return Outcome(hide_for=HELD_PAUSE)
        status = await self._ingestion.finish_ingest(message.run_id, now=self._clock.now())
        await self._remove_staged(message)
        if status is not None and status not in LIVE_RUN_STATES:
            await self._queues.drop_run(message.run_id)
            self._signals.run_ended(message.run_id)
        else:
            self._signals.run_changed(message.run_id)
        return ACKNOWLEDGE

    async def renew(self) -> None:
        """Renew nothing: an ingestion holds only its message."""

    async def _write(self, state: Ingesting) -> bool:
        """Write the missing rows; return whether all are written."""
        if state.rerun_of is not None:
            return await self._copy(state)
        return await self._write_staged(state)

    async def _copy(self, state: Ingesting) -> bool:
        unsent: list[tuple[int, str]] = []
        for first in range(_resumed(state.ingest), state.ingest.end, STRETCH):
            end = min(first + STRETCH, state.ingest.end)
            try:
                references = await self._ingestion.copy_rows(
                    state.run_id, first_index=first, end_index=end, now=self._clock.now()
                )
            except ConveyorError as error:
                if error.code is not ErrorCode.NOT_FOUND:
                    raise
                raise IngestFailed("the run to copy from is gone") from None
            if references is None:
                return False
            unsent += references
            if end > state.ingest.next_index:
                await self._announce(state, unsent)
                unsent = []
        # These were copied before, and most likely sent: send them once, not at every retry.
        await self._announce(state, unsent)
        return True

    async def _write_staged(self, state: Ingesting) -> bool:
        ingest = state.ingest
        ends = [*ingest.chunks[1:], ingest.end]
        for first, end in zip(ingest.chunks, ends, strict=bool(ingest.chunks)):
            if end <= _resumed(ingest):
                continue
            try:
                whole = await self._write_chunk(state, first, end)
            except IngestFailed:
                now = await self._ingestion.ingesting(state.run_id)
                whole = now is not None and now.live
                # Rows that are written no longer need their chunk. If their references were not
                # sent, the sweeper sends them once nothing moves in the run.
                if now is not None and whole and now.ingest.next_index < end:
                    raise
            if not whole:
                return False
        return True

    async def _write_chunk(self, state: Ingesting, first: int, end: int) -> bool:
        """Write the missing rows of one chunk; return False if the run no longer ingests."""
        pieces = await self._blobs.open(_chunk_key(state, first))
        if pieces is None:
            raise IngestFailed("a part of the staged list is missing")
        index = first
        async for line in _lines(pieces):
            rows, references, urls = _read_line(line, index, state)
            index += rows.count
            if index <= _resumed(state.ingest):
                continue
            if not await self._ingestion.write_rows(state.run_id, rows, now=self._clock.now()):
                return False
            await self._announce(state, references, urls)
        if index != end:
            raise IngestFailed("a part of the staged list is damaged")
        return True

    async def _announce(
        self,
        state: Ingesting,
        references: Sequence[tuple[int, str]],
        urls: Iterable[str] | None = None,
    ) -> None:
        """Enqueue tasks, to be worked while later ones are still being written."""
        if references:
            await self._sender.send(
                state.job_id,
                state.run_id,
                references,
                politeness=state.politeness,
                urls=urls,
                rows=state.ingest.end,
            )
            self._signals.run_changed(state.run_id)
        await anyio.lowlevel.checkpoint()

    async def _give_up(self, message: IngestMessage | TemplateMessage, reason: str) -> None:
        """Fail the run, unless another ingester has finished it."""
        now = self._clock.now()
        if not await self._ingestion.fail_ingest(message.run_id, detail=reason, now=now):
            return
        _log.error("a run could not be ingested", extra={"run_id": message.run_id, "error": reason})
        dead = msgspec.structs.replace(message, reason=reason)
        await self._queues.send(DEAD_LETTER_QUEUE, dead)
        await self._remove_staged(message)
        await self._queues.drop_run(message.run_id)
        self._signals.run_ended(message.run_id)

    async def _remove_staged(self, message: IngestMessage | TemplateMessage) -> None:
        prefix = staged_prefix(message.job_id, message.run_id)
        await self._blobs.delete_prefix(prefix)


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the lines of one staged chunk."""
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line
    if rest:
        raise IngestFailed("a part of the staged list is damaged")


def _resumed(ingest: Ingest) -> int:
    """Return where to go on: a stretch before the checkpoint, because its references may not have
    been sent."""
    return max(0, ingest.next_index - STRETCH)


def _chunk_key(state: Ingesting, first_index: int) -> str:
    if state.ingest.template:
        return template_key(state.job_id, state.ingest.list_id, first_index)
    return staged_key(state.job_id, state.run_id, first_index)


class _Url(msgspec.Struct):
    """The URL of a task, of all that its spec says."""

    url: str


_url = msgspec.json.Decoder(_Url)


def _read_line(
    line: bytes, first_index: int, state: Ingesting
) -> tuple[StagedRows, list[tuple[int, str]], Iterator[str]]:
    """Read one line; return its rows, the references to them, and their URLs, which are decoded
    only for somebody who asks."""
    try:
        pairs = _pairs.decode(line)
    except msgspec.DecodeError:
        raise IngestFailed("a part of the staged list is damaged") from None
    if state.ingest.template:
        # The rows of a template have ids of no run: each run gives them its own.
        task_ids = ids.task_ids(state.run_id, first_index, len(pairs))
        pairs = [(task_id, spec) for task_id, (_, spec) in zip(task_ids, pairs, strict=True)]
        line = _encode(pairs)
    references = [(first_index + offset, pair[0]) for offset, pair in enumerate(pairs)]
    urls = (_url.decode(spec).url for _, spec in pairs)
    return StagedRows(first_index, len(pairs), line), references, urls
