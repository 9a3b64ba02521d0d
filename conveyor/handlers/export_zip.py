"""An export as a zip archive: a file for each body, and the manifest of all rows at the end."""

from __future__ import annotations

import gzip
import tempfile
from collections.abc import Generator, Iterable, Iterator
from datetime import UTC, datetime
from typing import IO

import msgspec
from stream_zip import ZIP_64, ZIP_AUTO, Method, stream_zip

from conveyor.domain.export_names import EXTENSIONS, MANIFEST, Names
from conveyor.domain.export_rows import Exported, export_row

_Member = tuple[str, datetime, int, Method, Iterable[bytes]]

_LEVEL = 6
_MODE = 0o100644
_DEFLATED = ZIP_AUTO(0, level=_LEVEL)
_LARGE = 1 << 31
"""Bytes from which a body is written in the long form; what is told of it takes 20 bytes more."""
_EARLIEST = 315_532_800_000
"""1980-01-01: a zip archive knows no earlier date."""

_encoder = msgspec.json.Encoder()


def zip_pieces(rows: Iterable[Exported]) -> Generator[bytes, None, None]:
    """The archive in pieces of 64 KiB, made while the rows come in.

    The manifest waits in a temporary file, packed. What is kept in memory for each body is its
    entry in the archive's directory, about 250 bytes.
    """
    with tempfile.TemporaryFile() as spool:
        yield from stream_zip(_members(rows, spool), extended_timestamps=False)


def _members(rows: Iterable[Exported], spool: IO[bytes]) -> Iterator[_Member]:
    names = Names()
    latest = _EARLIEST
    with gzip.GzipFile(fileobj=spool, mode="wb", compresslevel=1) as manifest:
        for row in rows:
            task, file = row.task, None
            latest = max(latest, task.updated_at)
            if row.body is not None and task.result is not None:
                extension = EXTENSIONS[task.result.format]
                file = names.name(task.task_id, task.spec.external_id, extension)
                method = ZIP_64 if task.result.size >= _LARGE else _DEFLATED
                yield file, _date(task.updated_at), _MODE, method, row.body
            manifest.write(_encoder.encode(export_row(row, file=file)) + b"\n")
    spool.seek(0)
    with gzip.GzipFile(fileobj=spool, mode="rb") as manifest:
        pieces = iter(lambda: manifest.read(1 << 16), b"")
        yield MANIFEST, _date(latest), _MODE, ZIP_64, pieces


def _date(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(max(milliseconds, _EARLIEST) / 1_000, UTC)
