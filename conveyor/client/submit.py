"""Submit jobs: tasks in one request or in batches into an open job, files through a slot."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from conveyor.client.api import Api
from conveyor.client.errors import ClientError, InvalidTasks, ServerRefused, sentence
from conveyor.client.inputs import ARGUMENT, OpenInput, SourcedTask
from conveyor.client.output import count, printable
from conveyor.client.progress import TransferView
from conveyor.client.watch import run_of
from conveyor.client.wire import InvalidTaskReply, SubmitReply
from conveyor.domain.errors import ConveyorError, InvalidTask
from conveyor.domain.remarks import MAX_WARNINGS
from conveyor.domain.submission import Limits, parse_job, parse_task

ONE_REQUEST_TASKS = 9_999
BATCH_TASKS = 10_000
BATCH_BYTES = 24 * 1_024 * 1_024
LISTED_TASKS = 20


class JobOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """Fields of a job beside its tasks; the names are those of the wire. A job with a `schedule` is
    of the `type` scheduled."""

    zenrows_params: dict[str, str] | None = None
    name: str | None = None
    external_id: str | None = None
    max_inflight: int | None = None
    priority: int | None = None
    max_attempts: int | None = None
    skip_invalid: bool = False
    type: str | None = None
    schedule: dict[str, Any] | None = None
    webhook: dict[str, Any] | None = None
    politeness: dict[str, Any] | None = None


async def submit(
    api: Api,
    tasks: Sequence[SourcedTask],
    options: JobOptions,
    *,
    idempotency_key: str | None = None,
    on_sent: Callable[[int], None] = lambda _sent: None,
) -> SubmitReply:
    """Create a closed job from tasks; call `on_sent` with the number that the server has so far.

    All or nothing: if a task is refused, and not to be left out, no job remains. Raises
    InvalidTasks, or whatever `Api` raises.
    """
    key = idempotency_key or api.pace.token(16).hex()
    batches = list(_batches(tasks))
    # A scheduled job cannot be open, so its list is not sent in parts.
    if options.schedule or (len(batches) == 1 and len(tasks) <= ONE_REQUEST_TASKS):
        body = {**job_fields(options), "tasks": [task for batch in batches for task in batch]}
        try:
            reply, _replayed = await api.submit(body, idempotency_key=key)
        except ServerRefused as refusal:
            raise explained(refusal, tasks) from None
        on_sent(len(tasks))
        return reply
    return await _submit_open(api, tasks, batches, options, key=key, on_sent=on_sent)


async def _submit_open(
    api: Api,
    tasks: Sequence[SourcedTask],
    batches: list[list[msgspec.Raw]],
    options: JobOptions,
    *,
    key: str,
    on_sent: Callable[[int], None],
) -> SubmitReply:
    opening = {**job_fields(options), "status": "open", "tasks": []}
    reply, replayed = await api.submit(opening, idempotency_key=key)
    try:
        if not replayed:
            # Paused until it is complete, so that a refused batch costs no scrape.
            await api.change_run(reply.job_id, "pause")
        sent, warnings = 0, dict.fromkeys(reply.warnings)
        for number, batch in enumerate(batches, start=1):
            body = {"tasks": batch, "last_batch": number == len(batches)}
            try:
                added = await api.add_tasks(
                    reply.job_id, body, idempotency_key=f"{key[:96]}.add{number}"
                )
            except ServerRefused as refusal:
                raise explained(refusal, tasks[sent:]) from None
            warnings.update(dict.fromkeys(added.warnings))
            sent += len(batch)
            on_sent(sent)
        await _resume(api, reply.job_id, replayed=replayed)
    except BaseException:
        if not replayed:
            with anyio.move_on_after(3, shield=True):
                await _discard(api, reply.job_id)
        raise
    run = await api.run(reply.job_id, run_of(reply).run_id)
    return SubmitReply(
        job_id=reply.job_id,
        latest_run=run,
        accepted_tasks=len(tasks),
        warnings=tuple(warnings)[:MAX_WARNINGS],
    )


async def _resume(api: Api, job_id: str, *, replayed: bool) -> None:
    try:
        await api.change_run(job_id, "resume")
    except ServerRefused as refusal:
        # A repeated submit may find its job finished.
        if not (replayed and refusal.status == 409):
            raise


async def _discard(api: Api, job_id: str) -> None:
    try:
        await api.delete_job(job_id)
    except ClientError:
        return


def job_fields(options: JobOptions) -> dict[str, Any]:
    """Turn the options into fields of a submit."""
    fields: dict[str, Any] = msgspec.to_builtins(options)
    return fields


def plain_fields(options: JobOptions) -> dict[str, Any]:
    """Return fields of an open job without tasks and without a schedule, to be checked here."""
    plain = msgspec.structs.replace(options, type=None, schedule=None)
    return {**job_fields(plain), "status": "open"}


def _batches(tasks: Sequence[SourcedTask]) -> Iterator[list[msgspec.Raw]]:
    batch: list[msgspec.Raw] = []
    size = 0
    for task in tasks:
        encoded = msgspec.json.encode(task.body)
        if batch and (len(batch) == BATCH_TASKS or size + len(encoded) > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(msgspec.Raw(encoded))
        size += len(encoded)
    yield batch


def sifted(
    tasks: Sequence[SourcedTask], options: JobOptions
) -> tuple[Sequence[SourcedTask], list[str]]:
    """Leave out what no server gets where bad tasks are to be skipped: lines that could not be read
    and, of a list that goes in batches, the tasks that are bad by the rules of this version.

    Return the other tasks, and a line for each one left out. Raises InvalidTasks if none is left.
    """
    if not options.skip_invalid:
        return tasks, []
    lines = [task.problem for task in tasks if task.problem is not None]
    kept = [task for task in tasks if task.problem is None]
    if len(kept) > ONE_REQUEST_TASKS:
        kept, bad = _split(kept, options)
        lines += bad
    if not kept:
        raise InvalidTasks("no task is left, nothing submitted", _bounded(lines, len(lines)))
    return kept, lines


def _split(
    tasks: Sequence[SourcedTask], options: JobOptions
) -> tuple[list[SourcedTask], list[str]]:
    """Return the good tasks, and a line for each bad one. Raises ClientError for bad options."""
    try:
        params = parse_job(plain_fields(options), Limits()).params
    except ConveyorError as error:
        raise ClientError(printable(error.detail)) from None
    good: list[SourcedTask] = []
    lines: list[str] = []
    for index, task in enumerate(tasks):
        spec = parse_task(task.body, index, params)
        if isinstance(spec, InvalidTask):
            lines.append(line_of(reply_of(spec), tasks))
        else:
            good.append(task)
    return good, lines


def reply_of(bad: InvalidTask) -> InvalidTaskReply:
    """Return what a server would answer about a bad task."""
    return InvalidTaskReply(bad.index, bad.reason.value, bad.value, bad.line, bad.detail)


def skipped_lines(lines: Sequence[str], number: int) -> list[str]:
    """Return what to print about `number` tasks that were left out."""
    return [f"skipped {line}" for line in _bounded(lines, number)]


def warning_lines(warnings: Sequence[str]) -> list[str]:
    """Return what to print about fields that were ignored."""
    return [f"warning: {printable(warning)}" for warning in warnings]


def _bounded(lines: Sequence[str], number: int) -> list[str]:
    """Return the first lines about `number` tasks, and how many more there are."""
    shown = list(lines[:LISTED_TASKS])
    return [*shown, f"and {number - len(shown):,} more"] if number > len(shown) else shown


def explained(refusal: ServerRefused, tasks: Sequence[SourcedTask]) -> ClientError:
    """Add to a refusal the place that each bad task was read from."""
    bad = refusal.invalid_tasks
    if not bad:
        return refusal
    lines = _bounded([line_of(task, tasks) for task in bad[:LISTED_TASKS]], len(bad))
    return InvalidTasks(f"{count(len(bad), 'task')} refused, nothing submitted", lines)


def line_of(bad: InvalidTaskReply, tasks: Sequence[SourcedTask]) -> str:
    """Say where a bad task was read from, and what is wrong with it."""
    known = 0 <= bad.index < len(tasks)
    source = tasks[bad.index].source if known else f"task {bad.index}"
    # The value of an argument already says which one it is.
    parts = [] if source == ARGUMENT and bad.value else [source]
    parts += [printable(bad.value)] if bad.value else []
    return ": ".join([*parts, sentence(bad)])


PIECE_BYTES = 256 * 1_024


async def submit_file(
    api: Api,
    source: OpenInput,
    options: JobOptions,
    meter: TransferView,
    *,
    idempotency_key: str | None = None,
) -> SubmitReply:
    """Create a closed job from a file of tasks, streaming the file.

    All or nothing: if the file or a task in it is refused, no job is made. Raises InvalidTasks,
    ClientError if the file is too large or shrinks meanwhile, or whatever `Api` raises.
    """
    slot = await api.create_input(source.slot)
    most = slot.upload.max_bytes
    if most is not None and source.size > most:
        raise ClientError(
            f"{source.name} has {source.size:,} bytes, and the server takes {most:,}: split it, or "
            "raise CONVEYOR_MAX_INPUT_BYTES of the server; nothing was sent"
        )
    meter.begin(f"sending {source.short_name}", source.size)
    await api.upload(slot.upload, source.size, lambda: _pieces(source, meter))
    meter.begin(f"checking {source.short_name}")
    body = {**job_fields(options), "file_input_id": slot.file_input_id}
    key = idempotency_key or api.pace.token(16).hex()
    try:
        reply, _replayed = await api.submit(body, idempotency_key=key)
    except ServerRefused as refusal:
        raise upload_explained(refusal, source) from None
    return reply


async def _pieces(source: OpenInput, meter: TransferView) -> AsyncIterator[bytes]:
    sent = 0
    source.file.seek(0)
    while sent < source.size:
        # Send no more than announced if the file grows meanwhile.
        wanted = min(PIECE_BYTES, source.size - sent)
        piece = await anyio.to_thread.run_sync(source.file.read, wanted)
        if not piece:
            raise ClientError(f"{source.name} became shorter while it was sent")
        yield piece
        sent += len(piece)
        meter.move(sent)


def upload_explained(refusal: ServerRefused, source: OpenInput) -> ClientError:
    """Add to a refusal a line for each bad task; its own text says how many there are."""
    if not refusal.invalid_tasks:
        return refusal
    lines = [record_line(source.name, bad) for bad in refusal.invalid_tasks[:LISTED_TASKS]]
    headless = not source.slot.get("csv", {"header": True})["header"]
    if headless and refusal.invalid_tasks[0].index == 0:
        lines.append("add --header if the first record names the columns")
    return InvalidTasks(str(refusal), lines)


def record_line(name: str, bad: InvalidTaskReply) -> str:
    """Say where in a file a bad task is, and what is wrong with it."""
    where = "" if bad.line is None else f" at line {bad.line:,}"
    parts = [name, f"record {bad.index + 1:,}{where}"]
    if bad.value and bad.value != bad.detail:
        parts.append(printable(bad.value))
    return ": ".join([*parts, sentence(bad)])
