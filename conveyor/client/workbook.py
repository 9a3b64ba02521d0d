"""Read a workbook of Excel as CSV, with the library of the extra `xlsx`."""

from __future__ import annotations

import csv
import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from conveyor.client.errors import ClientError

SUFFIXES = (".xlsx", ".xlsm")
OTHER_SUFFIXES = (".xls", ".xlsb", ".ods", ".numbers")
"""Workbooks that are not read."""


@contextmanager
def as_csv(file: BinaryIO, name: str) -> Iterator[BinaryIO]:
    """Copy the one sheet with content into a temporary CSV file, row by row from the first.

    Raises ClientError without the library, for a damaged file, and for several sheets with content.
    """
    rows = _rows(file, name)
    with tempfile.TemporaryFile() as aside:
        text = io.TextIOWrapper(aside, encoding="utf-8", newline="")
        csv.writer(text, lineterminator="\n").writerows(map(_shown, row) for row in rows)
        text.detach()
        aside.seek(0)
        yield aside


def _rows(file: BinaryIO, name: str) -> list[list[object]]:
    try:
        from python_calamine import CalamineError, CalamineWorkbook
    except ImportError:
        raise ClientError(
            f"{name} needs the extra xlsx (pip install 'conveyor-batch[xlsx]'), or save it as CSV"
        ) from None
    file.seek(0)
    try:
        with CalamineWorkbook.from_filelike(file) as workbook:
            names = workbook.sheet_names
            sheets = [
                workbook.get_sheet_by_name(name).to_python(skip_empty_area=False) for name in names
            ]
    except (CalamineError, OSError) as error:
        raise ClientError(f"{name} is not a workbook that can be read: {error}") from None
    filled = [rows for rows in sheets if any(map(any, rows))]
    if len(filled) > 1:
        raise ClientError(f"{name} has {len(filled)} sheets with content: keep the one to submit")
    return [list(row) for row in filled[0]] if filled else []


def _shown(cell: object) -> str:
    """Return a cell as Excel would write it to CSV; whole numbers have no fraction."""
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))
    return str(cell)
