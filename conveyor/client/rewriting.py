"""Rewrite a file of tasks before it is sent: from another encoding into UTF-8, and bare hosts into
URLs. The server reads UTF-8 and URLs alone; lines stay where they are."""

from __future__ import annotations

import csv
import gzip
import io
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, TextIO

from conveyor.client.errors import ClientError
from conveyor.domain.listed_urls import AROUND, with_scheme

GZIP = b"\x1f\x8b"
_PIECE = 65_536


@dataclass(frozen=True, slots=True)
class Reading:
    """Options of reading lists: the encoding of their text, UTF-8 by default, the scheme to put
    before bare hosts, if any, and whether bad tasks are left out."""

    encoding: str | None = None
    scheme: str | None = None
    skip_invalid: bool = False


@contextmanager
def as_utf8(file: BinaryIO, name: str, encoding: str) -> Iterator[BinaryIO]:
    """Copy a file, packed or not, into a temporary one in UTF-8. Raises ClientError."""
    with tempfile.TemporaryFile() as aside:
        try:
            with _text(_unpacked(file), encoding) as text, _text(aside, "utf-8") as out:
                while piece := text.read(_PIECE):
                    out.write(piece)
        except UnicodeError:
            raise ClientError(f"{name} is not {encoding}: name another --encoding") from None
        except (OSError, EOFError, zlib.error):
            raise ClientError(f"{name} cannot be unpacked: it is damaged or cut off") from None
        aside.seek(0)
        yield aside


@contextmanager
def with_schemes(
    file: BinaryIO, name: str, scheme: str, slot: dict[str, Any]
) -> Iterator[BinaryIO]:
    """Copy a file of URLs, or of CSV as `slot` says, with the scheme before bare hosts.

    Raises ClientError if it cannot be read so.
    """
    with tempfile.TemporaryFile() as aside:
        try:
            with _text(_unpacked(file), "utf-8-sig") as text, _text(aside, "utf-8") as out:
                if "csv" in slot:
                    _rewrite_records(text, out, scheme, slot["csv"])
                else:
                    _rewrite_lines(text, out, scheme)
        except UnicodeError:
            raise ClientError(f"{name} is not UTF-8: name its --encoding") from None
        except csv.Error as error:
            raise ClientError(f"{name} is not CSV of this kind: {error}") from None
        except (OSError, EOFError, zlib.error):
            raise ClientError(f"{name} cannot be unpacked: it is damaged or cut off") from None
        aside.seek(0)
        yield aside


@contextmanager
def _text(file: BinaryIO, encoding: str) -> Iterator[TextIO]:
    """Read or write a file as text, line ends as they are; the file stays open."""
    text = io.TextIOWrapper(file, encoding=encoding, newline="")
    try:
        yield text
    finally:
        text.detach()


def _unpacked(file: BinaryIO) -> BinaryIO:
    file.seek(0)
    packed = file.read(len(GZIP)) == GZIP
    file.seek(0)
    return gzip.GzipFile(fileobj=file) if packed else file  # type: ignore[return-value]


def _rewrite_lines(text: TextIO, out: TextIO, scheme: str) -> None:
    for line in text:
        url = line.strip(AROUND)
        if not url.startswith("#"):
            line = with_scheme(url, scheme) + "\n"
        out.write(line)


def _rewrite_records(text: TextIO, out: TextIO, scheme: str, spec: dict[str, Any]) -> None:
    delimiter, quote = spec["delimiter"], spec["quote"]
    reader = csv.reader(
        text,
        delimiter=delimiter,
        quotechar=quote,
        skipinitialspace=delimiter != " ",
        strict=True,
    )
    writer = csv.writer(out, delimiter=delimiter, quotechar=quote, lineterminator="\n")
    column: int | str = spec["fields"]["url"]
    awaits_header = spec["header"]
    for record in reader:
        if not any(cell.strip(AROUND) for cell in record) or is_separator_line(record):
            out.write("\n")
            continue
        if awaits_header:
            awaits_header = False
            if isinstance(column, str):
                column = place_of(column, record)
        elif isinstance(column, int) and column < len(record):
            record[column] = with_scheme(record[column], scheme)
        writer.writerow(record)


def is_separator_line(record: list[str]) -> bool:
    """Return whether a record is the line `sep=;` that Excel writes."""
    return record[0][:4].lower() == "sep=" and len("".join(record)) <= len("sep=;")


def place_of(column: str, header: list[str]) -> int | str:
    """Find a column by its name, in any case if no other fits; the name if there is none."""
    if column in header:
        return header.index(column)
    folded = [name.strip(AROUND).casefold() for name in header]
    wanted = column.strip(AROUND).casefold()
    return folded.index(wanted) if wanted in folded else column
