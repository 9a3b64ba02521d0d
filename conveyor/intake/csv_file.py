"""A CSV file: which of its columns hold what, and a task of each record."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

from conveyor.domain import task_input
from conveyor.domain.errors import ConveyorError, ErrorCode, InvalidTask, InvalidTaskReason
from conveyor.domain.model import TaskSpec
from conveyor.domain.text_rules import is_external_id, shorten
from conveyor.domain.urls import are_plain
from conveyor.intake.csv_records import Batch, BrokenRecord, CsvRecords, is_blank
from conveyor.intake.file_tasks import Checked, FileTasks
from conveyor.intake.frames import Csv
from conveyor.intake.lines import Piece

BATCH_RECORDS = 1_000
MAX_NAMES_SHOWN = 10


def read_csv(pieces: Iterator[Piece], spec: Csv, tasks: FileTasks) -> None:
    """A task of each record that is not blank; the header, where there is one, is none.

    An empty cell of the external_id column is no external id. Raises ConveyorError: as FileTasks
    does; where the file is no CSV of this kind, naming the record at fault and its line; where a
    column that `spec` names is not in the header, or twice.
    """
    records = CsvRecords(pieces, delimiter=spec.delimiter, quote=spec.quote)
    header = _read_header(records) if spec.header else None
    columns = _Columns(spec, header)
    try:
        while (batch := records.read(BATCH_RECORDS)).records:
            specs = columns.plain_specs(batch.records)
            if specs is None:
                _add_one_by_one(batch, columns, tasks)
            else:
                tasks.add(specs)
    except BrokenRecord as broken:
        before = sum(not is_blank(record) for record in broken.batch.records)
        _refuse_broken(f"record {tasks.count + before + 1}", broken)


class _Columns:
    """Where the url, and the external id if any, stand in a record."""

    def __init__(self, spec: Csv, header: list[str] | None) -> None:
        self._url = _place(spec.url, header)
        self._external_id = None
        self._needed = self._url + 1
        if spec.external_id is not None:
            self._external_id = _place(spec.external_id, header)
            self._needed = max(self._url, self._external_id) + 1

    def plain_specs(self, records: list[list[str]]) -> list[TaskSpec] | None:
        """The tasks of all records that are not empty, where it is quickly seen that every one is
        good; None says nothing about any of them."""
        if not all(records):
            records = list(filter(None, records))
        url, external_id = self._url, self._external_id
        try:
            urls = [record[url] for record in records]
            if not are_plain(urls):
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
        """The task of one record."""
        if len(record) < self._needed:
            columns = f"too few columns: {len(record)} of {self._needed}"
            return InvalidTask(index, InvalidTaskReason.INVALID_ARGUMENT, columns)
        url = record[self._url]
        if not url:
            return InvalidTask(index, InvalidTaskReason.MALFORMED_URL, "empty url cell")
        raw = {"url": url}
        if self._external_id is not None and record[self._external_id]:
            raw["external_id"] = record[self._external_id]
        return task_input.parse(raw, index, {})


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
    count = header.count(column)
    if count == 0:
        names = [f'"{shorten(name)}"' for name in header[:MAX_NAMES_SHOWN]]
        more = ", …" if len(header) > MAX_NAMES_SHOWN else ""
        _refuse(f'the header has no column "{shown}"; it has {", ".join(names)}{more}')
    if count > 1:
        _refuse(f'the header has {count} columns "{shown}"')
    return header.index(column)


def _refuse_broken(what: str, broken: BrokenRecord) -> NoReturn:
    _refuse(f"{what}, which begins at line {broken.batch.lines()[-1]}, {broken.problem}")


def _refuse(problem: str) -> NoReturn:
    raise ConveyorError(ErrorCode.INVALID_ARGUMENT, problem) from None
