"""The child process from its first byte to its last.

It may refuse a list before having read it to its end, and then ends: whoever still writes to it
meets a broken pipe. It ends silently, too, when nobody reads what it says any more.
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
from conveyor.intake.document import read_document
from conveyor.intake.files import read_file
from conveyor.intake.frames import Done, Frame, Refusal, Source, Work, encode_frame

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
        work = msgspec.json.decode(source.readline(), type=Work)
        if work.source is Source.DOCUMENT:
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
