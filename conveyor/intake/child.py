"""The child process from its first byte to its last.

It may refuse a list before having read it to its end, and then ends: whoever still writes to it
meets a broken pipe. It ends silently, too, when nobody reads what it says any more.

An uploaded file: unpacked, decoded, and read as what it is said to be.

The JSON document of a submit: checked as a whole, then brought into rows.
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
    """Emit the Chunks of the file whose bytes `blocks` are; memory does not grow with its size.

    Raises ConveyorError: invalid_argument, with the first 100 bad tasks listed where tasks are bad;
    payload_too_large. What was emitted before is void then.
    """
    pieces = text_pieces(unpacked(blocks, max_bytes=work.max_bytes))
    tasks = FileTasks(RowWriter(work.run_id, emit), max_rows=work.max_rows)
    if work.source is ListSource.JSONL:
        read_jsonl(pieces, work.job_params, tasks)
    elif work.source is ListSource.URLS:
        read_urls(pieces, tasks)
    elif work.csv is not None:
        read_csv(pieces, work.csv, tasks)
    else:
        raise ValueError("no word on how the CSV file is read")
    return tasks.finish()


_STEP = 500


def read_document(
    read: Callable[[], bytes], work: ValidationRequest, emit: Callable[[Frame], None]
) -> Done:
    """Emit the Head and the Chunks of the document that `read` gives.

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
    # No name here for the bytes and the raw document, or they would lie in memory for longer.
    return parse_job(decode(read()), work.limits)


BLOCK_BYTES = 65_536


def main() -> int:
    """Serve standard input and output; the exit code is 0 whenever there was somebody to answer."""
    # An interrupt from a terminal reaches all of a server's processes: it is the server that ends
    # this one with its request. Collecting cycles would find none, and cost a tenth of the time.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()
    try:
        serve(sys.stdin.buffer, sys.stdout.buffer)
    except ConnectionError:
        # What is left in the buffer would be written at exit, and fail loudly.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Read a Work line and the list after it, and write frames.

    Raises ConnectionError where the other side is gone, and nothing else.
    """

    def emit(frame: Frame) -> None:
        for piece in encode_frame(frame):
            sink.write(piece)
        sink.flush()

    emit(_answer(source, emit))


def _answer(source: BinaryIO, emit: Callable[[Frame], None]) -> Done | Refusal:
    """Emit heads and chunks; what comes last."""
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
        sys.stderr.write(f"conveyor.intake: unforeseen {type(error).__name__}\n")
        return Refusal(ErrorCode.INTERNAL, "the list could not be checked")


def _blocks(source: BinaryIO) -> Iterator[bytes]:
    while block := source.read(BLOCK_BYTES):
        yield block
