"""Write exports: a zip archive with a file for each body, JSON lines, or CSV.

The index and the manifest of a zip archive, with all rows, come last. Rows arrive on the event
loop; a writer runs in a thread.
"""

from __future__ import annotations

import csv
import gzip
import io
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from typing import IO, TYPE_CHECKING

import msgspec
from anyio import from_thread, to_thread

from conveyor.domain.export_rows import (
    EXTENSIONS,
    INDEX,
    MANIFEST,
    ArchiveNames,
    Exported,
    ExportRow,
    export_row,
    inline_row,
    neutral,
)
from conveyor.domain.result_index import IndexPage

if TYPE_CHECKING:
    from stream_zip import Method

    _Member = tuple[str, datetime, int, Method, Iterable[bytes]]

_LEVEL = 6
_MODE = 0o100644
_LARGE = 1 << 31
"""Size from which a body is written in the long form, which takes 20 more bytes of header."""
_EARLIEST = 315_532_800_000
"""1980-01-01, the earliest date of a zip archive."""

_encoder = msgspec.json.Encoder()


def zip_pieces(rows: Iterable[Exported]) -> Generator[bytes, None, None]:
    """Yield the archive in pieces of 64 KiB, while the rows come in.

    The index and the manifest wait in temporary files, packed. Memory holds each body's entry in
    the archive's directory, about 250 bytes.
    """
    # It takes a tenth of a second of a start, and few servers make an archive.
    from stream_zip import stream_zip

    with tempfile.TemporaryFile() as manifest, tempfile.TemporaryFile() as index:
        yield from stream_zip(_members(rows, manifest, index), extended_timestamps=False)


def _members(rows: Iterable[Exported], manifest: IO[bytes], index: IO[bytes]) -> Iterator[_Member]:
    from stream_zip import ZIP_64, ZIP_AUTO

    names, deflated = ArchiveNames(), ZIP_AUTO(0, level=_LEVEL)
    page = IndexPage()
    latest = _EARLIEST
    with _packed(manifest) as lines, _packed(index) as html:
        html.write(page.head.encode())
        for row in rows:
            task, file = row.task, None
            latest = max(latest, task.updated_at)
            if row.body is not None and task.result is not None:
                extension = EXTENSIONS[task.result.format]
                file = names.name(task.task_id, task.spec.external_id, extension)
                method = ZIP_64 if task.result.size >= _LARGE else deflated
                yield file, _date(task.updated_at), _MODE, method, row.body
            listed = export_row(row, file=file)
            lines.write(_encoder.encode(listed) + b"\n")
            html.write(page.row(listed).encode())
        html.write(page.foot().encode())
    for name, spool in ((INDEX, index), (MANIFEST, manifest)):
        spool.seek(0)
        with gzip.GzipFile(fileobj=spool, mode="rb") as unpacked:
            yield name, _date(latest), _MODE, ZIP_64, iter(partial(unpacked.read, 1 << 16), b"")


def _packed(spool: IO[bytes]) -> gzip.GzipFile:
    return gzip.GzipFile(fileobj=spool, mode="wb", compresslevel=1)


def _date(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(max(milliseconds, _EARLIEST) / 1_000, UTC)


CSV_COLUMNS = (
    "task_id",
    "external_id",
    "url",
    "status",
    "content_type",
    "size",
    "error_code",
    "error_status",
    "error_detail",
    "metadata",
    "body_encoding",
    "body",
)


def jsonl_pieces(rows: Iterable[Exported]) -> Generator[bytes, None, None]:
    """Yield one JSON object a line, with the body inside."""
    for row in rows:
        yield _encoder.encode(inline_row(row)) + b"\n"


def csv_pieces(rows: Iterable[Exported]) -> Generator[bytes, None, None]:
    """Yield a header and one record a row, in UTF-8, lines ended by CR LF; no cell is a formula."""
    sheet = io.StringIO()
    writer = csv.writer(sheet)
    writer.writerow(CSV_COLUMNS)
    for row in rows:
        writer.writerow([neutral(cell) for cell in _cells(inline_row(row))])
        yield sheet.getvalue().encode()
        sheet.seek(0)
        sheet.truncate()
    yield sheet.getvalue().encode()


def _cells(row: ExportRow) -> list[str]:
    error = row.error
    cells = [
        row.task_id,
        row.external_id,
        row.url,
        row.status,
        row.content_type,
        row.size,
        error and error.code,
        error and error.status,
        error and error.detail,
        row.metadata and _encoder.encode(row.metadata).decode(),
        row.body_encoding,
        row.body,
    ]
    return ["" if cell is None else str(cell) for cell in cells]


Writer = Callable[[Iterable[Exported]], Generator[bytes, None, None]]
"""Makes an archive while the rows come in; knows no event loop."""

BLOCK = 256 * 1024
"""Bytes gathered before they are passed on."""


async def archive(
    writer: Writer, portions: AsyncIterator[list[Exported]]
) -> AsyncGenerator[bytes, None]:
    """Yield the archive of these rows in blocks.

    Raises what `portions` raises. A cancelled archive ends at its next portion.
    """
    with closing(writer(_rows(portions))) as output:
        while block := await to_thread.run_sync(_block, output):
            yield block


def _rows(portions: AsyncIterator[list[Exported]]) -> Iterator[Exported]:
    async def following() -> list[Exported] | None:
        return await anext(portions, None)

    while (portion := from_thread.run(following)) is not None:
        yield from portion


def _block(output: Iterator[bytes]) -> bytes:
    pieces = []
    size = 0
    for piece in output:
        pieces.append(piece)
        size += len(piece)
        if size >= BLOCK:
            break
    return b"".join(pieces)
