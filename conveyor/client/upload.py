"""Submitting a file: a slot, the bytes into it as a stream, and a job that names the slot."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio.to_thread

from conveyor.client.api import Api
from conveyor.client.errors import ClientError, InvalidTasks, ServerRefused
from conveyor.client.file_input import OpenInput
from conveyor.client.output import printable
from conveyor.client.reasons import sentence
from conveyor.client.submit import LISTED_TASKS, JobOptions, job_fields
from conveyor.client.transfer import Meter
from conveyor.client.wire import InvalidTaskReply, SubmitReply
from conveyor.domain.errors import InvalidTaskReason

PIECE_BYTES = 256 * 1_024


async def submit_file(
    api: Api,
    source: OpenInput,
    options: JobOptions,
    meter: Meter,
    *,
    idempotency_key: str | None = None,
) -> SubmitReply:
    """Create a closed job over the tasks of a file, which is never in memory as a whole.

    All or nothing: no job is made where the file or a task in it is refused. Raises InvalidTasks,
    ClientError where the file shrinks meanwhile, or whatever `Api` raises.
    """
    slot = await api.create_input(source.slot)
    meter.begin(f"sending {source.short_name}", source.size)
    await api.upload(slot.upload, source.size, lambda: _pieces(source, meter))
    meter.begin(f"checking {source.short_name}")
    body = {**job_fields(options), "file_input_id": slot.file_input_id}
    key = idempotency_key or api.pace.token(16).hex()
    try:
        reply, _replayed = await api.submit(body, idempotency_key=key)
    except ServerRefused as refusal:
        raise _explained(refusal, source) from None
    return reply


async def _pieces(source: OpenInput, meter: Meter) -> AsyncIterator[bytes]:
    sent = 0
    source.file.seek(0)
    while sent < source.size:
        # No more than was announced, should the file grow meanwhile.
        wanted = min(PIECE_BYTES, source.size - sent)
        piece = await anyio.to_thread.run_sync(source.file.read, wanted)
        if not piece:
            raise ClientError(f"{source.name} became shorter while it was sent")
        yield piece
        sent += len(piece)
        meter.move(sent)


def _explained(refusal: ServerRefused, source: OpenInput) -> ClientError:
    """The refusal with a line for each bad task; how many there are in all, it says itself."""
    if not refusal.invalid_tasks:
        return refusal
    lines = [_line(source.name, bad) for bad in refusal.invalid_tasks[:LISTED_TASKS]]
    headless = not source.slot.get("csv", {"header": True})["header"]
    if headless and refusal.invalid_tasks[0].index == 0:
        lines.append("if the first record names the columns, say so with --header")
    return InvalidTasks(str(refusal), lines)


def _line(name: str, bad: InvalidTaskReply) -> str:
    where = "" if bad.line is None else f" at line {bad.line:,}"
    parts = [name, f"record {bad.index + 1:,}{where}"]
    if bad.reason == InvalidTaskReason.INVALID_ARGUMENT and bad.value:
        # Of a record that cannot be read at all, the value says why.
        return ": ".join([*parts, printable(bad.value)])
    parts += [printable(bad.value)] if bad.value else []
    return ": ".join([*parts, sentence(bad)])
