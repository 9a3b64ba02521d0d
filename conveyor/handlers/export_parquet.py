"""Write an export as a Parquet file, with bodies as bytes in a column. Needs pyarrow."""

from __future__ import annotations

import io
from collections.abc import Generator, Iterable, Iterator

import msgspec
import pyarrow
from pyarrow import parquet

from conveyor.domain.export_rows import Exported, export_row

GROUP_ROWS = 10_000
GROUP_BYTES = 16 * 1024 * 1024
"""A group of rows ends at either bound; memory holds one group."""

SCHEMA = pyarrow.schema(
    [
        pyarrow.field("task_id", pyarrow.string(), nullable=False),
        ("external_id", pyarrow.string()),
        pyarrow.field("url", pyarrow.string(), nullable=False),
        pyarrow.field("status", pyarrow.string(), nullable=False),
        ("content_type", pyarrow.string()),
        ("size", pyarrow.int64()),
        ("error_code", pyarrow.string()),
        ("error_status", pyarrow.int32()),
        ("error_detail", pyarrow.string()),
        ("metadata", pyarrow.string()),
        ("body", pyarrow.binary()),
    ]
)

_encoder = msgspec.json.Encoder()


def parquet_pieces(rows: Iterable[Exported]) -> Generator[bytes, None, None]:
    """Yield the file, one piece for each group of rows."""
    sink = _Sink()
    with parquet.ParquetWriter(sink, SCHEMA, compression="zstd") as writer:
        for group in _groups(rows):
            writer.write_batch(pyarrow.RecordBatch.from_pylist(group, schema=SCHEMA))
            yield sink.taken()
    yield sink.taken()


class _Sink(io.RawIOBase):
    """A file in memory whose content is taken away piece by piece."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._position = 0

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        piece = bytes(memoryview(data))  # type: ignore[arg-type]
        self._pieces.append(piece)
        self._position += len(piece)
        return len(piece)

    def tell(self) -> int:
        return self._position

    def taken(self) -> bytes:
        """Return what was written since the last call."""
        piece = b"".join(self._pieces)
        self._pieces.clear()
        return piece


def _groups(rows: Iterable[Exported]) -> Iterator[list[dict[str, object]]]:
    group: list[dict[str, object]] = []
    size = 0
    for row in rows:
        body = None if row.body is None else b"".join(row.body)
        group.append(_record(row, body))
        size += len(body or b"")
        if len(group) == GROUP_ROWS or size >= GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _record(exported: Exported, body: bytes | None) -> dict[str, object]:
    row = export_row(exported)
    error = row.error
    return {
        "task_id": row.task_id,
        "external_id": row.external_id,
        "url": row.url,
        "status": row.status,
        "content_type": row.content_type,
        "size": row.size,
        "error_code": error and error.code,
        "error_status": error and error.status,
        "error_detail": error and error.detail,
        "metadata": row.metadata and _encoder.encode(row.metadata).decode(),
        "body": body,
    }
