"""Check tasks on this machine, by the rules of a server of this version, and submit nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from conveyor.client.errors import ServerRefused
from conveyor.client.inputs import OpenInput, SourcedTask, hints_about
from conveyor.client.submit import (
    JobOptions,
    explained,
    job_fields,
    line_of,
    plain_fields,
    record_line,
    reply_of,
    sifted,
    skipped_lines,
    upload_explained,
    warning_lines,
)
from conveyor.domain.errors import ConveyorError
from conveyor.domain.remarks import Remarks
from conveyor.domain.submission import Limits, parse_job
from conveyor.intake.child import BLOCK_BYTES, read_file
from conveyor.intake.frames import Csv, ListSource, ValidationRequest

_ANY = 2**62
_NO_LIMITS = Limits(max_inline_tasks=_ANY, max_add_tasks=_ANY, max_open_job_tasks=_ANY)
_RUN_ID = "00000000000000000000000000"


def check_tasks(
    tasks: Sequence[SourcedTask] | OpenInput, options: JobOptions
) -> tuple[int, int, list[str]]:
    """Check tasks, or a file of tasks, as a submit would; return the number of good ones, that of
    those left out, and lines about these and about what was ignored.

    The limits of a server are not known here. Raises InvalidTasks, or ClientError.
    """
    hints: list[str] = []
    if isinstance(tasks, OpenInput):
        number, remarks = _check_file(tasks, options)
        lines = [record_line(tasks.name, reply_of(bad)) for bad in remarks.invalid_tasks]
        skipped = remarks.skipped
    else:
        tasks, lines = sifted(tasks, options)
        number, remarks = _check_list(tasks, options)
        skipped = len(lines) + remarks.skipped
        lines += [line_of(reply_of(bad), tasks) for bad in remarks.invalid_tasks]
        hints = hints_about(tasks)
    said = [*skipped_lines(lines, skipped), *warning_lines([*hints, *remarks.warnings])]
    return number, skipped, said


def _check_list(tasks: Sequence[SourcedTask], options: JobOptions) -> tuple[int, Remarks]:
    document = {**job_fields(options), "tasks": [task.body for task in tasks]}
    try:
        job = parse_job(document, _NO_LIMITS)
    except ConveyorError as error:
        raise explained(_refused(error), tasks) from None
    return len(job.specs), job.remarks


def _check_file(source: OpenInput, options: JobOptions) -> tuple[int, Remarks]:
    slot = source.slot
    csv = None
    if "csv" in slot:
        spec = {name: value for name, value in slot["csv"].items() if name != "fields"}
        csv = Csv(**spec, **slot["csv"]["fields"])
    try:
        job = parse_job(plain_fields(options), _NO_LIMITS)
        work = ValidationRequest(
            source=ListSource(slot["type"]),
            run_id=_RUN_ID,
            job_params=job.params,
            csv=csv,
            skip_invalid=job.skip_invalid,
            max_rows=_ANY,
            max_bytes=_ANY,
        )
        done = read_file(_blocks(source), work, lambda _chunk: None)
    except ConveyorError as error:
        raise upload_explained(_refused(error), source) from None
    return done.rows, done.remarks


def _blocks(source: OpenInput) -> Iterator[bytes]:
    source.file.seek(0)
    while block := source.file.read(BLOCK_BYTES):
        yield block


def _refused(error: ConveyorError) -> ServerRefused:
    """Return what a server would answer."""
    tasks = tuple(map(reply_of, error.invalid_tasks))
    return ServerRefused(error.detail, code=error.code.value, status=400, invalid_tasks=tasks)
