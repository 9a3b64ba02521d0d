"""An export as text, a row a line: JSON lines, or CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Generator, Iterable

import msgspec

from conveyor.domain.export_rows import Exported, ExportRow, inline_row, neutral

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

_encoder = msgspec.json.Encoder()


def jsonl_pieces(rows: Iterable[Exported]) -> Generator[bytes, None, None]:
    """One JSON object a line, bodies inside."""
    for row in rows:
        yield _encoder.encode(inline_row(row)) + b"\n"


def csv_pieces(rows: Iterable[Exported]) -> Generator[bytes, None, None]:
    """A header and one record a row, in UTF-8, lines ended by CR LF; no cell is a formula."""
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
