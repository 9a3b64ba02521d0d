"""The child process: reads a JSON document or an uploaded file, checks it and emits rows.

A document is checked as a whole before its first row; a file is unpacked, decoded and read as the
type it was declared to be. The child may refuse a list before reading all of it, and then exits:
the writer meets a broken pipe. It also exits silently when nobody reads its output any more.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import BinaryIO

import msgspec

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.strict_json import decode
from conveyor.domain.submission import JobRequest, parse_job
from conveyor.intake.csv_file import read_csv
from conveyor.intake.frames import (
    Done,
    Frame,
    Head,
    ListSource,
    Refusal,
    ValidationRequest,
    encode_frame,
)
from conveyor.intake.lines import read_jsonl, read_urls, text_pieces, unpacked
from conveyor.intake.rows import FileTasks, RowWriter


def read_file(
    blocks: Iterator[bytes], work: ValidationRequest, emit: Callable[[Frame], None]
) -> Done:
    """Emit the Chunks of the file in `blocks`, in memory that does not grow with its size.

    Raises ConveyorError: invalid_argument, listing the first 100 bad tasks if tasks are bad and not
    to be left out; payload_too_large. The chunks emitted before are void then.
    """
    pieces = text_pieces(unpacked(blocks, max_bytes=work.max_bytes))
    writer = RowWriter(work.run_id, emit)
    tasks = FileTasks(writer, max_rows=work.max_rows, skip_invalid=work.skip_invalid)
    if work.source is ListSource.JSONL:
        read_jsonl(pieces, work.job_params, tasks)
    elif work.source is ListSource.URLS:
        read_urls(pieces, tasks)
    elif work.csv is not None:
        read_csv(pieces, work.csv, tasks)
    else:
        raise ValueError("the CSV file comes without a spec")
    return tasks.finish()


_STEP = 500


def read_document(
    read: Callable[[], bytes], work: ValidationRequest, emit: Callable[[Frame], None]
) -> Done:
    """Emit the Head and the Chunks of the document that `read` returns.

    Raises ConveyorError as parse_job does, before anything is emitted.
    """
    request = _checked(read, work)
    specs = request.specs
    emit(Head(msgspec.structs.replace(request, specs=[]), len(specs)))
    writer = RowWriter(work.run_id, emit)
    for start in range(0, len(specs), _STEP):
        writer.add(specs[start : start + _STEP])
    return writer.finish()


def _checked(read: Callable[[], bytes], work: ValidationRequest) -> JobRequest:
    # Names for the bytes and the raw document would keep them in memory for longer.
    return parse_job(decode(read()), work.limits)


BLOCK_BYTES = 65_536


def main() -> int:
    """Serve standard input and output; the exit code is 0 if an answer could be written."""
    # A terminal sends its interrupt to all of a server's processes: the server ends this one with
    # its request. Collecting cycles would find none, and cost a tenth of the time.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()
    try:
        serve(sys.stdin.buffer, sys.stdout.buffer)
    except ConnectionError:
        # The rest of the buffer would be written at exit, and raise an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Read a ValidationRequest line and the list after it, and write frames.

    Raises only ConnectionError, where the other side is gone.
    """

    def emit(frame: Frame) -> None:
        for piece in encode_frame(frame):
            sink.write(piece)
        sink.flush()

    emit(_answer(source, emit))


def _answer(source: BinaryIO, emit: Callable[[Frame], None]) -> Done | Refusal:
    """Emit heads and chunks; return the last frame."""
    try:
        work = msgspec.json.decode(source.readline(), type=ValidationRequest)
        if work.source is ListSource.DOCUMENT:
            return read_document(source.read, work, emit)
        return read_file(_blocks(source), work, emit)
    except ConveyorError as error:
        return Refusal(error.code, error.detail, error.invalid_tasks)
    except ConnectionError:
        raise
    except Exception as error:
        sys.stderr.write(f"conveyor.intake: unexpected {type(error).__name__}\n")
        return Refusal(ErrorCode.INTERNAL, "the list could not be checked")


def _blocks(source: BinaryIO) -> Iterator[bytes]:
    while block := source.read(BLOCK_BYTES):
        yield block
