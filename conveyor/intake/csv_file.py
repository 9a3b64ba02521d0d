"""Reads a CSV file: its records in batches, with the line of each, and a task from each record."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from io import StringIO
from itertools import accumulate, chain, islice
from typing import NamedTuple, NoReturn

from conveyor.domain.errors import ConveyorError, ErrorCode, InvalidTask, InvalidTaskReason
from conveyor.domain.listed_urls import (
    AROUND,
    SEPARATOR_LINE,
    is_alone,
    separator_in_all,
    url_of_cell,
    without_params,
)
from conveyor.domain.model import TaskSpec
from conveyor.domain.submission import parse_task
from conveyor.domain.text_rules import Refused, is_external_id, shorten
from conveyor.domain.urls import are_plain
from conveyor.intake.frames import Csv
from conveyor.intake.lines import Piece
from conveyor.intake.rows import Checked, FileTasks

MAX_RECORD = 262_144
"""Maximum characters in the fields of one record: an unclosed quote must not swallow the rest of
the file."""

_TOO_LONG = f"is longer than {MAX_RECORD:,} characters: a quote may not be closed"


class Batch(NamedTuple):
    """Consecutive records, the first of which begins at `first_line`."""

    first_line: int
    records: list[list[str]]

    def lines(self) -> list[int]:
        """Return the line where each record begins, and the line after the last one.

        A record takes a line, and one more for each line feed within its fields.
        """
        return list(accumulate(map(_line_count, self.records), initial=self.first_line))


class BrokenRecord(Exception):
    """The text after the records of `batch` is not a record; `problem` completes a sentence on
    it."""

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
        self._reader = csv.reader(
            lines,
            delimiter=delimiter,
            quotechar=quote,
            skipinitialspace=delimiter != " ",
            strict=True,
        )

    def read(self, limit: int) -> Batch:
        """Return the next records, at most `limit`, blank ones included; empty at the end of the
        file.

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
        """Yield the pieces as files of lines. Raises BrokenRecord if one record uses up several."""
        read_before, waiting, size = (0, 0), 0, 0
        for piece in pieces:
            read = (self._batch.first_line, len(self._batch.records))
            waiting = waiting + size if read == read_before else 0
            if waiting > MAX_RECORD:
                raise BrokenRecord(self._batch, _TOO_LONG)
            read_before, size = read, len(piece.text)
            yield StringIO(piece.text, newline="\n")


def is_blank(record: list[str]) -> bool:
    """Return whether a record is an empty line, or has nothing but blanks in its cells."""
    return not any(cell.strip(AROUND) for cell in record)


def _refuse_long(batch: Batch) -> None:
    """Refuse a record of several lines that is too long; single lines are bounded elsewhere."""
    for place, record in enumerate(batch.records):
        if sum(map(len, record)) > MAX_RECORD:
            raise BrokenRecord(Batch(batch.first_line, batch.records[:place]), _TOO_LONG)


def _line_count(record: list[str]) -> int:
    return 1 + sum(field.count("\n") for field in record)


def _problem(message: str) -> str:
    """Translate an error message of the csv module."""
    if message.startswith("unexpected end"):
        return "has a quote that is not closed"
    if message.startswith("field larger"):
        return _TOO_LONG
    if "expected after" in message:
        return "has an unbalanced quote: text follows a closing one"
    if message.startswith("new-line character"):
        return "holds a carriage return that ends no line: end lines with LF or CRLF"
    return f"is not CSV: {message}"


USUAL_DELIMITER = ","
BATCH_RECORDS = 1_000
MAX_NAMES_SHOWN = 10


def read_csv(pieces: Iterator[Piece], spec: Csv, tasks: FileTasks) -> None:
    """Make a task of each record that is not blank, after the header if there is one.

    An empty cell of the external_id column means no external id. Raises ConveyorError: as FileTasks
    does; where the file is not CSV of this kind, naming the bad record and its line; where a column
    that `spec` names is missing from the header, or there twice; where another separator than that
    of `spec` is in the header, or in every record.
    """
    pieces, delimiter = _after_separator_line(pieces, spec.delimiter)
    records = CsvRecords(pieces, delimiter=delimiter, quote=spec.quote)
    header = _read_header(records) if spec.header else None
    columns = _Columns(spec, header, delimiter)
    looked_at = False
    try:
        while (batch := records.read(BATCH_RECORDS)).records:
            if not looked_at:
                looked_at = True
                _refuse_unseparated("every record", batch.records, headed=spec.header)
            columns.measure(batch.records)
            specs = columns.plain_specs(batch.records)
            if specs is None:
                _add_one_by_one(batch, columns, tasks)
            else:
                tasks.add(specs)
    except BrokenRecord as broken:
        before = sum(not is_blank(record) for record in broken.batch.records)
        _refuse_broken(f"record {tasks.count + before + 1}", broken)


def _after_separator_line(pieces: Iterator[Piece], delimiter: str) -> tuple[Iterator[Piece], str]:
    """Blank the line `sep=;` that Excel writes and reads as the first; return its separator too,
    unless another than the usual one was asked for."""
    first = next(pieces, None)
    if first is None:
        return pieces, delimiter
    told = SEPARATOR_LINE.match(first.text)
    if told is not None:
        first = Piece(first.first_line, first.text[told.end() :])
        delimiter = told[1] if delimiter == USUAL_DELIMITER else delimiter
    return chain([first], pieces), delimiter


def _refuse_unseparated(what: str, records: list[list[str]], *, headed: bool = False) -> None:
    """Refuse records of one column if each holds the same separator of columns.

    Behind a header, which says that there is one column, params of a URL's path separate none.
    """
    found = [record for record in records if not is_blank(record)]
    if any(len(record) > 1 for record in found):
        return
    cells = [record[0] for record in found]
    separator = separator_in_all(list(map(without_params, cells)) if headed else cells)
    if separator is not None:
        shown = shorten(separator)
        _refuse(
            f'{what} is one column with "{shown}" in it: name that as the delimiter '
            f"(--delimiter '{shown}'), or send a list of URLs (--type urls) if it is part of them"
        )


class _Columns:
    """The positions of the url, and of the external id if any, in a record."""

    def __init__(self, spec: Csv, header: list[str] | None, delimiter: str) -> None:
        if header is not None:
            _refuse_unseparated("the header", [header])
        self._quote = spec.quote
        self._delimiter = delimiter
        self._widest = "the first record" if header is None else "the header"
        self._width = 0 if header is None else len(header)
        self._url = _place(spec.url, header)
        self._external_id = None
        self._needed = self._url + 1
        if spec.external_id is not None:
            self._external_id = _place(spec.external_id, header)
            self._needed = max(self._url, self._external_id) + 1

    def measure(self, records: list[list[str]]) -> None:
        """Take the number of columns from the first record, if no header gave it."""
        if not self._width:
            self._width = next((len(record) for record in records if not is_blank(record)), 0)

    def plain_specs(self, records: list[list[str]]) -> list[TaskSpec] | None:
        """Return the tasks of all records that are not empty, if a quick check finds all good.

        None says nothing about any of them.
        """
        if not all(records):
            records = list(filter(None, records))
        if max(map(len, records), default=0) > self._width:
            return None
        url, external_id = self._url, self._external_id
        try:
            urls = [record[url] for record in records]
            if not are_plain(urls) or not is_alone(urls):
                return None
            if external_id is None:
                return list(map(TaskSpec, urls))
            external_ids = [record[external_id] or None for record in records]
        except IndexError:
            return None
        if not all(map(is_external_id, filter(None, external_ids))):
            return None
        return list(map(TaskSpec, urls, external_ids))

    def task(self, record: list[str], index: int) -> Checked:
        """Return the task of one record."""
        if len(record) < self._needed:
            columns = f"too few columns: {len(record)} of {self._needed}"
            return InvalidTask(index, InvalidTaskReason.MALFORMED_URL, columns, detail=columns)
        if not is_blank(record[self._width :]):
            cells = max(place for place, cell in enumerate(record, 1) if cell.strip(AROUND))
            shown = shorten(self._delimiter)
            columns = (
                f"{cells} columns, {self._widest} has {self._width}: "
                f'quote a cell with "{shown}" in it'
            )
            return InvalidTask(index, InvalidTaskReason.MALFORMED_URL, columns, detail=columns)
        try:
            url = url_of_cell(record[self._url], self._quote)
        except Refused as refused:
            return InvalidTask(index, refused.reason, refused.value, detail=refused.detail)
        if not url:
            return InvalidTask(index, InvalidTaskReason.MALFORMED_URL, "empty url cell")
        raw = {"url": url}
        if self._external_id is not None and (name := record[self._external_id].strip(AROUND)):
            raw["external_id"] = name
        return parse_task(raw, index, {})


def _add_one_by_one(batch: Batch, columns: _Columns, tasks: FileTasks) -> None:
    checked: list[Checked] = []
    numbers: list[int] = []
    for record, line in zip(batch.records, batch.lines(), strict=False):
        if not is_blank(record):
            checked.append(columns.task(record, tasks.count + len(checked)))
            numbers.append(line)
    tasks.add_checked(checked, numbers)


def _read_header(records: CsvRecords) -> list[str]:
    try:
        while (batch := records.read(1)).records:
            if not is_blank(batch.records[0]):
                return batch.records[0]
    except BrokenRecord as broken:
        _refuse_broken("the header", broken)
    _refuse("the file is empty: there is no header")


def _place(column: int | str, header: list[str] | None) -> int:
    if isinstance(column, int):
        return column
    shown = shorten(column)
    if header is None:
        _refuse(f'the column "{shown}" is named, but the file is read without a header')
    places = [place for place, name in enumerate(header) if name == column]
    if not places:
        places = [place for place, name in enumerate(header) if _folded(name) == _folded(column)]
    if not places:
        names = [f'"{shorten(name)}"' for name in header[:MAX_NAMES_SHOWN]]
        more = ", …" if len(header) > MAX_NAMES_SHOWN else ""
        _refuse(f'the header has no column "{shown}"; it has {", ".join(names)}{more}')
    if len(places) > 1:
        _refuse(f'the header has {len(places)} columns "{shown}"')
    return places[0]


def _folded(name: str) -> str:
    return name.strip(AROUND).casefold()


def _refuse_broken(what: str, broken: BrokenRecord) -> NoReturn:
    _refuse(f"{what}, which begins at line {broken.batch.lines()[-1]}, {broken.problem}")


def _refuse(problem: str) -> NoReturn:
    raise ConveyorError(ErrorCode.INVALID_ARGUMENT, problem) from None
