"""Read a workbook of Excel as CSV, with the library of the extra `xlsx`."""

from __future__ import annotations

import csv
import io
import re
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import BinaryIO

from conveyor.client.errors import ClientError
from conveyor.domain.text_rules import pip_install

SUFFIXES = (".xlsx", ".xlsm")
OTHER_SUFFIXES = (".xls", ".xlsb", ".ods", ".numbers")
"""Workbooks that are not read."""
MAX_AREA = 4_000_000
"""Maximum cells of a sheet from its first to its last: the library holds all of them, empty ones
too."""
MAX_SPREAD = 8
"""A larger sheet may have so many cells, empty ones included, for each one with content."""

_PIECE = 1_048_576
_SHEET = re.compile(r"xl/worksheets/[^/]+\.xml", re.IGNORECASE)
# Cells with content: those that are styled and empty end in a slash.
_CELL = re.compile(rb'<(?:\w+:)?c\s(?:[^>]*?\s)?r="([A-Z]{1,3})([0-9]{1,7})"[^>]*(?<!/)>')
_ERROR = re.compile(rb'(<(?:\w+:)?c\s(?:[^>]*?\s)?t=")e(")')


@contextmanager
def as_csv(file: BinaryIO, name: str) -> Iterator[BinaryIO]:
    """Copy the one sheet with content into a temporary CSV file, row by row from the first.

    The error of a formula is text, as `#N/A`. Raises ClientError without the library, for a damaged
    file, for several sheets with content, and for one with cells far from the others.
    """
    with tempfile.TemporaryFile() as aside:
        text = io.TextIOWrapper(aside, encoding="utf-8", newline="")
        rows = _rows(file, name)
        csv.writer(text, lineterminator="\n").writerows(map(_shown, row) for row in rows)
        text.detach()
        aside.seek(0)
        yield aside


def _rows(file: BinaryIO, name: str) -> Iterable[list[object]]:
    try:
        from python_calamine import CalamineError, CalamineWorkbook
    except ImportError:
        install = pip_install("conveyor-batch[xlsx]")
        text = f"{name} needs the extra xlsx ({install}), or save it as CSV"
        raise ClientError(text) from None
    damaged = (CalamineError, OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)
    try:
        with tempfile.TemporaryFile() as aside:
            if _look_at_sheets(file, name):
                _copy_with_errors(file, aside)
                file = aside
            file.seek(0)
            with CalamineWorkbook.from_filelike(file) as workbook:
                sheets = map(workbook.get_sheet_by_name, workbook.sheet_names)
                filled = [sheet for sheet in sheets if any(map(any, sheet.iter_rows()))]
    except damaged as error:
        raise ClientError(f"{name} is not a workbook that can be read: {error}") from None
    if len(filled) > 1:
        raise ClientError(f"{name} has {len(filled)} sheets with content: keep the one to submit")
    return map(list, filled[0].iter_rows()) if filled else []


def _look_at_sheets(file: BinaryIO, name: str) -> bool:
    """Return whether a cell of a sheet is an error.

    Raises ClientError for cells far apart, before the library takes room for all between them.
    """
    has_errors = False
    with zipfile.ZipFile(file) as parts:
        for part in filter(_SHEET.fullmatch, parts.namelist()):
            cells, width, height = 0, 0, 0
            for piece in _pieces(parts, part):
                found = _CELL.findall(piece)
                cells += len(found)
                columns = {letters for letters, _ in found}
                width = max([width, *map(_column, columns)])
                height = max([height, *(int(row) for _, row in found)])
                has_errors = has_errors or _ERROR.search(piece) is not None
            if width * height > max(MAX_AREA, MAX_SPREAD * cells):
                raise ClientError(
                    f"{name} has cells far from the others ({height:,} rows, {width:,} columns): "
                    "delete them, or save the list as CSV"
                )
    return has_errors


def _copy_with_errors(file: BinaryIO, aside: BinaryIO) -> None:
    """Copy a workbook with text in place of errors, which the library reads as empty cells."""
    with zipfile.ZipFile(file) as parts, zipfile.ZipFile(aside, "w") as copy:
        for part in parts.namelist():
            is_sheet = _SHEET.fullmatch(part) is not None
            with copy.open(part, "w", force_zip64=True) as out:
                for piece in _pieces(parts, part):
                    out.write(_ERROR.sub(rb"\1str\2", piece) if is_sheet else piece)


def _pieces(parts: zipfile.ZipFile, part: str) -> Iterator[bytes]:
    """Yield a part of a workbook in pieces that end before a tag begins."""
    rest = b""
    with parts.open(part) as file:
        while block := file.read(_PIECE):
            rest += block
            cut = rest.rfind(b"<")
            if cut > 0:
                yield rest[:cut]
                rest = rest[cut:]
    yield rest


def _column(letters: bytes) -> int:
    """Return the number of a column, from 1."""
    number = 0
    for letter in letters:
        number = 26 * number + letter - ord("A") + 1
    return number


def _shown(cell: object) -> str:
    """Return a cell as Excel would write it to CSV; whole numbers have no fraction."""
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))
    return str(cell)
