"""The records of a CSV file, in batches, with the line where each begins."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from io import StringIO
from itertools import accumulate, chain, islice
from typing import NamedTuple

from conveyor.intake.lines import Piece

MAX_RECORD = 262_144
"""Most characters in the fields of one record: a quote that nobody closes must not swallow the
rest of a file."""

_TOO_LONG = f"is longer than {MAX_RECORD:,} characters: a quote may not be closed"


class Batch(NamedTuple):
    """Some records in a row, the first of which begins at `first_line`."""

    first_line: int
    records: list[list[str]]

    def lines(self) -> list[int]:
        """Where each record begins, and last where the one after them does. A record takes a line,
        and one more for each line feed within its fields."""
        return list(accumulate(map(_line_count, self.records), initial=self.first_line))


class BrokenRecord(Exception):
    """What follows the records of `batch` is no record; `problem` completes a sentence on it."""

    def __init__(self, batch: Batch, problem: str) -> None:
        super().__init__(problem)
        self.batch = batch
        self.problem = problem


class CsvRecords:
    """Reads records strictly: a quote within a quoted field is doubled, and text after a closing
    quote is an error."""

    def __init__(self, pieces: Iterator[Piece], *, delimiter: str, quote: str) -> None:
        csv.field_size_limit(MAX_RECORD)
        self._batch = Batch(1, [])
        lines = chain.from_iterable(self._files(pieces))
        self._reader = csv.reader(lines, delimiter=delimiter, quotechar=quote, strict=True)

    def read(self, limit: int) -> Batch:
        """The next records, at most `limit`, blank ones among them; none at the end of the file.

        Raises BrokenRecord.
        """
        self._batch = batch = Batch(self._reader.line_num + 1, [])
        add = batch.records.append
        try:
            for record in islice(self._reader, limit):
                add(record)
        except csv.Error as error:
            raise BrokenRecord(batch, _problem(str(error))) from None
        if self._reader.line_num + 1 - batch.first_line > len(batch.records):
            _refuse_long(batch)
        return batch

    def _files(self, pieces: Iterator[Piece]) -> Iterator[StringIO]:
        """The pieces as files of lines, as long as no record uses up several."""
        read_before, waiting, size = (0, 0), 0, 0
        for piece in pieces:
            read = (self._batch.first_line, len(self._batch.records))
            waiting = waiting + size if read == read_before else 0
            if waiting > MAX_RECORD:
                raise BrokenRecord(self._batch, _TOO_LONG)
            read_before, size = read, len(piece.text)
            yield StringIO(piece.text, newline="\n")


def is_blank(record: list[str]) -> bool:
    """Whether a record is a line with nothing, or nothing but spaces."""
    return not record or (len(record) == 1 and record[0].isspace())


def _refuse_long(batch: Batch) -> None:
    """Refuse a record of several lines that is too long; a single line never is."""
    for place, record in enumerate(batch.records):
        if sum(map(len, record)) > MAX_RECORD:
            raise BrokenRecord(Batch(batch.first_line, batch.records[:place]), _TOO_LONG)


def _line_count(record: list[str]) -> int:
    return 1 + sum(field.count("\n") for field in record)


def _problem(message: str) -> str:
    """What the reader's complaint means."""
    if message.startswith("unexpected end"):
        return "has a quote that is not closed"
    if message.startswith("field larger"):
        return _TOO_LONG
    if "expected after" in message:
        return "has an unbalanced quote: text follows a closing one"
    if message.startswith("new-line character"):
        return "holds a carriage return that ends no line: end lines with LF or CRLF"
    return f"is not CSV: {message}"
