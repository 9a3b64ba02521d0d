"""Exports: start one, wait for it, and download it as one file."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO

from conveyor.client.commands import ServerTarget, Terminal, about
from conveyor.client.directory import Destination, replacing
from conveyor.client.download import ATTEMPTS, export_run, transfer_export
from conveyor.client.errors import ClientError
from conveyor.client.jobs import find_job
from conveyor.client.output import clean, size
from conveyor.client.program import SUCCEEDED
from conveyor.client.progress import describe, meter_for
from conveyor.client.watch import named_run

FORMS = {".zip": "zip", ".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".parquet": "parquet"}
"""Format of an export by the suffix of its file."""


def form_of(target: Path) -> str | None:
    """Return the format that the name of a file asks for, zip without a suffix; None if it asks for
    something else."""
    return FORMS.get(target.suffix.lower()) if target.suffix else "zip"


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
            run = await named_run(api, job_id, run_id, server=target.named)
            if run.live:
                terminal.warn(
                    f"the run is {describe(run)}: the export holds each row as it is when read, and"
                    " the bodies of tasks that have ended by then"
                )
            with meter_for(sys.stderr, api.pace) as meter:
                export = await export_run(api, run, form, meter)
                done = await transfer_export(
                    api,
                    run,
                    export,
                    partial(_writing, out, force=force),
                    meter,
                    # Bytes written to standard output cannot be withdrawn.
                    attempts=1 if out is None else ATTEMPTS,
                )
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


def _see_that_it_can_be_written(target: Path, *, force: bool) -> None:
    """Check the target before the export starts, which may take hours."""
    if target.is_dir():
        raise ClientError(f"{clean(str(target))} is a directory")
    if not force:
        refuse_to_replace(target)
    if target.exists() and not target.is_file():
        # A user who may write to devices could replace one by a file.
        raise ClientError(f"{clean(str(target))} exists and is not a regular file")
    Destination(target.parent).try_out()


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
