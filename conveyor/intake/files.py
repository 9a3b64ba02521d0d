"""An uploaded file: unpacked, decoded, and read as what it is said to be."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from conveyor.intake.csv_file import read_csv
from conveyor.intake.file_tasks import FileTasks
from conveyor.intake.frames import Done, Frame, Source, Work
from conveyor.intake.jsonl_file import read_jsonl
from conveyor.intake.lines import text_pieces
from conveyor.intake.rows import RowWriter
from conveyor.intake.unpack import unpacked
from conveyor.intake.url_file import read_urls


def read_file(blocks: Iterator[bytes], work: Work, emit: Callable[[Frame], None]) -> Done:
    """Emit the Chunks of the file whose bytes `blocks` are; memory does not grow with its size.

    Raises ConveyorError: invalid_argument, with the first 100 bad tasks listed where tasks are bad;
    payload_too_large. What was emitted before is void then.
    """
    pieces = text_pieces(unpacked(blocks, max_bytes=work.max_bytes))
    tasks = FileTasks(RowWriter(work.run_id, emit), max_rows=work.max_rows)
    if work.source is Source.JSONL:
        read_jsonl(pieces, work.job_params, tasks)
    elif work.source is Source.URLS:
        read_urls(pieces, tasks)
    elif work.csv is not None:
        read_csv(pieces, work.csv, tasks)
    else:
        raise ValueError("no word on how the CSV file is read")
    return tasks.finish()
