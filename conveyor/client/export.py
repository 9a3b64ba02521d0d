"""Exports: start one, wait for it, and download it as one file."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import httpx
from tenacity import retry_if_exception_type

from conveyor.client.api import Api, retrying
from conveyor.client.commands import ServerTarget, Terminal, about
from conveyor.client.download import prepare, replacing
from conveyor.client.errors import ClientError, ServerRefused, ServerUnreachable
from conveyor.client.jobs import find_job
from conveyor.client.output import clean, printable, size
from conveyor.client.program import SUCCEEDED
from conveyor.client.progress import TransferView, describe, meter_for
from conveyor.client.watch import GROWTH, PATIENCE, latest_run
from conveyor.client.wire import ExportReply, RunReply
from conveyor.domain.errors import ErrorCode

FIRST_INTERVAL = 0.1
LAST_INTERVAL = 2.0
ATTEMPTS = 3
FORMS = {".zip": "zip", ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".parquet": "parquet"}
"""Format of an export by the suffix of its file."""


async def export_job(
    target: ServerTarget,
    terminal: Terminal,
    job_id: str,
    *,
    run_id: str | None,
    out: Path | None,
    form: str,
    force: bool,
) -> int:
    """Export the results of a run (the latest by default) into one file.

    Without `out`, write to standard output.
    """
    if out is not None:
        _see_that_it_can_be_written(out, force=force)
    async with target.connect(terminal) as api:
        job_id = await find_job(api, job_id)
        with about(job_id):
            run = await (_run(api, job_id, run_id) if run_id else latest_run(api, job_id))
            if run.live:
                terminal.warn(
                    f"the run is {describe(run)}: the export holds each row as it is when read, and"
                    " the bodies of tasks that have ended by then"
                )
            with meter_for(sys.stderr, api.pace) as meter:
                export = await export_run(api, run, form, meter)
                done = await fetch_export(api, run, export, out, meter, force=force)
    if out is not None:
        terminal.say(f"{size(done)} in {clean(str(out))}")
        terminal.give(
            {
                "job_id": job_id,
                "run_id": run.run_id,
                "format": form,
                "file": str(out),
                "bytes": done,
            }
        )
    return SUCCEEDED


async def _run(api: Api, job_id: str, run_id: str) -> RunReply:
    unknown = ClientError(f"job {printable(job_id)} has no run {printable(run_id)}")
    if not run_id.strip("."):
        # In a path it would name something else.
        raise unknown
    try:
        return await api.run(job_id, run_id)
    except ServerRefused as refusal:
        if refusal.code != ErrorCode.NOT_FOUND:
            raise
        raise unknown from None


async def export_run(api: Api, run: RunReply, form: str, meter: TransferView) -> ExportReply:
    """Start an export and wait until it is completed.

    Raises ClientError with the server's reason if it fails.
    """
    export = await api.start_export(run.job_id, run.run_id, form=form)
    meter.begin("making the export")
    interval = FIRST_INTERVAL
    answered_at = api.pace.monotonic()
    while export.live:
        await api.pace.sleep(interval)
        interval = min(interval * GROWTH, LAST_INTERVAL)
        meter.move()
        try:
            export = await api.export(run.job_id, run.run_id, export.export_id)
        except ServerUnreachable:
            if api.pace.monotonic() - answered_at > PATIENCE:
                raise
            continue
        answered_at = api.pace.monotonic()
    if export.status != "completed":
        raise ClientError(f"the export failed: {printable(export.error or export.status)}")
    return export


async def fetch_export(
    api: Api,
    run: RunReply,
    export: ExportReply,
    target: Path | None,
    meter: TransferView,
    *,
    force: bool,
) -> int:
    """Download a completed export and return the number of bytes.

    The file appears once it is complete; with `target` None the bytes go to standard output. A
    broken transfer into a file starts again. Raises ClientError if the download fails, or if the
    file cannot be written or exists and `force` is not set.
    """

    async def attempt() -> int:
        # The link expires before the export; each look gives a fresh one.
        fresh = await api.export(run.job_id, run.run_id, export.export_id)
        if fresh.download_url is None:
            raise ClientError("the export is completed, but has no link")
        with _writing(target, force=force) as file:
            return await _transfer(api, fresh.download_url, file, meter)

    # Bytes written to standard output cannot be withdrawn.
    attempts = 1 if target is None else ATTEMPTS
    try:
        done: int = await retrying(api.pace, attempts, retry_if_exception_type(httpx.RequestError))(
            attempt
        )
    except httpx.RequestError as error:
        reason = clean(str(error)) or type(error).__name__
        raise ClientError(f"export download failed: {reason}") from None
    return done


def _see_that_it_can_be_written(target: Path, *, force: bool) -> None:
    """Check the target before the export starts, which may take hours."""
    if target.is_dir():
        raise ClientError(f"{clean(str(target))} is a directory")
    if not force:
        refuse_to_replace(target)
    if target.exists() and not target.is_file():
        # A user who may write to devices could replace one by a file.
        raise ClientError(f"{clean(str(target))} exists and is not a regular file")
    prepare(target.parent)


def refuse_to_replace(target: Path) -> None:
    """Raise ClientError if a file of that name exists."""
    if os.path.lexists(target):
        raise ClientError(f"{clean(str(target))} already exists (--force replaces it)")


@contextmanager
def _writing(target: Path | None, *, force: bool) -> Iterator[BinaryIO]:
    if target is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    try:
        with replacing(target) as file:
            yield file
            if not force:
                # It may have appeared while the export was made.
                refuse_to_replace(target)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ClientError(f"cannot write {clean(str(target))}: {reason}") from None


async def _transfer(api: Api, url: str, file: BinaryIO, meter: TransferView) -> int:
    done = 0
    async with api.download(url) as response:
        length = response.headers.get("Content-Length", "")
        meter.begin("downloading", int(length) if length.isdecimal() else None)
        async for chunk in response.aiter_raw():
            file.write(chunk)
            done += len(chunk)
            meter.move(done)
    return done
