"""Read what to scrape: URLs on the command line, lists of URLs or JSON tasks, and files.

Lists are read here. CSV, compressed and large files go to the server whole, as `FileInput`.
"""

from __future__ import annotations

import csv
import gzip
import io
import os
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, BinaryIO

import msgspec

from conveyor.client import workbook
from conveyor.client.errors import ClientError
from conveyor.client.options import CsvOptions, FileType
from conveyor.client.output import clean, shorten
from conveyor.client.rewriting import GZIP, Reading, as_utf8, place_of, with_schemes
from conveyor.domain import strict_json
from conveyor.domain.errors import ConveyorError
from conveyor.domain.listed_urls import (
    AROUND,
    SEPARATOR_LINE,
    have_columns,
    separated,
    separator_at_all_ends,
    url_of_line,
    with_scheme,
)
from conveyor.domain.text_rules import Refused

LARGE = 4 * 1_024 * 1_024
"""A longer list is sent as a file instead of being read here."""
HEADER_BYTES = 65_536
"""Bytes at the start of a CSV file that are searched for its header."""
STANDARD_INPUT = "-"
AS_IT_IS = Reading()
_CSV_SUFFIXES = (".csv", ".tsv")
_LIST_SUFFIXES = (".jsonl", ".ndjson", ".txt")


@dataclass(frozen=True, slots=True)
class FileInput:
    """A file to send whole: its path (`-` is standard input) and its type."""

    path: str
    type: FileType
    csv: CsvOptions = CsvOptions()
    reading: Reading = Reading()

    @property
    def name(self) -> str:
        """Name the file for the user."""
        return "standard input" if self.path == STANDARD_INPUT else clean(self.path)


@dataclass(frozen=True, slots=True)
class OpenInput:
    """An open file: its name for the user, its bytes, its size, and the slot to ask for."""

    name: str
    file: BinaryIO
    size: int
    slot: dict[str, Any]

    @property
    def short_name(self) -> str:
        """Return the end of its name, to show in a narrow place."""
        return shorten(self.name.rpartition("/")[2], 24)


def file_input(
    arguments: Sequence[str],
    file_type: FileType | None,
    csv_options: CsvOptions,
    reading: Reading = AS_IT_IS,
) -> FileInput | None:
    """Find the file that the arguments name; None if they are lists to be read here.

    CSV, compressed and large files are sent whole, one to a submit. Raises ClientError if the
    arguments and options do not fit together, or a file cannot be read.
    """
    chosen = _chosen(arguments, file_type, reading.encoding)
    if csv_options != CsvOptions() and (chosen is None or chosen.type is not FileType.CSV):
        raise ClientError("--field, --header, --delimiter and --quote are for CSV (--type csv)")
    if chosen is None:
        return None
    if chosen.type is FileType.JSONL and reading.scheme is not None:
        raise ClientError("--scheme is for lists of URLs and CSV")
    if chosen.type is not FileType.CSV:
        return FileInput(chosen.path, chosen.type, reading=reading)
    if _is_workbook(chosen.path) and (
        csv_options.delimiter or csv_options.quote or reading.encoding
    ):
        raise ClientError("--delimiter, --quote and --encoding are for text: a workbook has none")
    if csv_options.delimiter is None and _stem(chosen.path).endswith(".tsv"):
        csv_options = CsvOptions(
            csv_options.url, csv_options.external_id, "\t", csv_options.quote, csv_options.header
        )
    return FileInput(chosen.path, chosen.type, csv_options, reading)


def _chosen(
    arguments: Sequence[str], file_type: FileType | None, encoding: str | None
) -> FileInput | None:
    paths = [argument for argument in arguments if not _URL.match(argument)]
    for path in paths:
        if path.lower().endswith(workbook.OTHER_SUFFIXES):
            raise ClientError(f"{clean(path)}: save it as .xlsx or CSV")
    if file_type is None:
        alone = [path for path in paths if _is_sent_whole(path)]
        if not alone:
            return _large(arguments, encoding)
        path, file_type = alone[0], _type_by_name(alone[0], encoding)
        if file_type is None:
            raise ClientError(f"{clean(path)} does not show its type: add --type")
    elif not paths:
        raise ClientError("--type is for a file")
    else:
        path = paths[0]
    if len(arguments) > 1:
        raise ClientError(f"{clean(path)} is sent as a file: submit it by itself")
    return FileInput(path, file_type)


def _is_sent_whole(path: str) -> bool:
    return path.lower().endswith((*_CSV_SUFFIXES, *workbook.SUFFIXES, ".gz"))


def _is_workbook(path: str) -> bool:
    return path.lower().endswith(workbook.SUFFIXES)


def _stem(path: str) -> str:
    return path.lower().removesuffix(".gz")


def _type_by_name(path: str, encoding: str | None) -> FileType | None:
    stem = _stem(path)
    if stem.endswith((*_CSV_SUFFIXES, *workbook.SUFFIXES)):
        return FileType.CSV
    return _type_by_content(path, encoding) if stem.endswith(_LIST_SUFFIXES) else None


def _large(arguments: Sequence[str], encoding: str | None) -> FileInput | None:
    if len(arguments) != 1 or not arguments[0].lower().endswith(_LIST_SUFFIXES):
        return None
    path = arguments[0]
    try:
        if _URL.match(path) or os.stat(path).st_size <= LARGE:
            return None
    except (OSError, ValueError):
        # Reading it later reports the error.
        return None
    return FileInput(path, _type_by_content(path, encoding))


def _type_by_content(path: str, encoding: str | None) -> FileType:
    """Detect JSON tasks or URLs by the first line that counts."""
    with _open(path) as file:
        for line in _beginning(file, encoding).splitlines():
            if text := line.strip():
                if text.startswith("#"):
                    continue
                return FileType.JSONL if text.startswith("{") else FileType.URLS
    return FileType.URLS


@contextmanager
def opened(chosen: FileInput) -> Iterator[OpenInput]:
    """Open the file from its start. Standard input is copied to a temporary file, to know its size.

    Raises ClientError if it cannot be read.
    """
    with ExitStack() as files:
        if chosen.path == STANDARD_INPUT:
            file: BinaryIO = files.enter_context(tempfile.TemporaryFile())
            shutil.copyfileobj(sys.stdin.buffer, file)
        else:
            file = files.enter_context(_open(chosen.path))
        if not file.seek(0, os.SEEK_END):
            raise ClientError(f"{chosen.name} is empty")
        if _is_workbook(chosen.path) and chosen.type is FileType.CSV:
            file = files.enter_context(workbook.as_csv(file, chosen.name))
        reading = chosen.reading
        if reading.encoding is not None:
            file = files.enter_context(as_utf8(file, chosen.name, reading.encoding))
        slot: dict[str, Any] = {"type": chosen.type.value}
        if chosen.type is FileType.CSV:
            slot["csv"] = _csv_document(chosen.csv, file)
        if reading.scheme is not None:
            file = files.enter_context(with_schemes(file, chosen.name, reading.scheme, slot))
        yield OpenInput(chosen.name, file, file.seek(0, os.SEEK_END), slot)


def _csv_document(options: CsvOptions, file: BinaryIO) -> dict[str, Any]:
    beginning, quote = _beginning(file), options.quote or '"'
    delimiter = options.delimiter or ","
    told = SEPARATOR_LINE.match(beginning)
    if told is not None:
        beginning = beginning[told.end() :]
        delimiter = options.delimiter or told[1]
    columns = _first_record(beginning, delimiter, quote)
    # By name if it has one: then the order of the columns does not matter.
    named = next((column for column in columns if place_of("url", [column]) == 0), None)
    # A first record that names a column url, and has no URL, is a header that was not announced.
    header = options.header or (
        options.url is None and named is not None and not any("://" in cell for cell in columns)
    )
    url = options.url
    if url is None:
        url = named if header and named is not None else 0
    fields = {"url": url}
    if options.external_id is not None:
        fields["external_id"] = options.external_id
    return {"delimiter": delimiter, "quote": quote, "header": header, "fields": fields}


def _first_record(text: str, delimiter: str, quote: str) -> list[str]:
    """Read the first row; no columns if it is unreadable, which the server explains better."""
    try:
        rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, quotechar=quote)
        return next((row for row in rows if any(cell.strip(AROUND) for cell in row)), [])
    except (csv.Error, TypeError, ValueError):
        return []


def _beginning(file: BinaryIO, encoding: str | None = None) -> str:
    """Read the first characters of a file, decompressing it if necessary."""
    file.seek(0)
    content = file.read(HEADER_BYTES)
    if content.startswith(GZIP):
        file.seek(0)
        try:
            content = gzip.GzipFile(fileobj=file).read(HEADER_BYTES)
        except (OSError, EOFError, zlib.error):
            content = b""
    return content.decode(encoding or "utf-8", "replace").removeprefix("\ufeff")


@contextmanager
def _open(path: str) -> Iterator[BinaryIO]:
    name = clean(path)
    try:
        file = open(path, "rb")  # noqa: SIM115 (closed below)
    except FileNotFoundError:
        raise ClientError(f"no such file: {name}") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ClientError(f"cannot read {name}: {reason}") from None
    with file:
        if not file.seekable():
            raise ClientError(f"{name} is not a regular file: give it as standard input (-)")
        yield file


MAX_TASKS = 100_000
LOOKED_AT = 1_000
"""Tasks at the start of a list that are looked at together."""
ARGUMENT = "argument"
"""Source of a URL given as an argument."""

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


class SourcedTask(msgspec.Struct, frozen=True):
    """A task for the server, and the place it was read from: `urls.txt:3`, or ARGUMENT.

    A line that could not be read, and is to be left out, has a `problem` instead of a body.
    """

    body: dict[str, Any]
    source: str
    problem: str | None = None


def read_tasks(arguments: Iterable[str], reading: Reading = AS_IT_IS) -> list[SourcedTask]:
    """Read the tasks that the arguments name, in order; `-` is standard input.

    Raises ClientError for an unreadable file, a line without a task, no task at all, or more than
    100,000 tasks.
    """
    tasks: list[SourcedTask] = []
    for argument in arguments:
        for task in _read_argument(argument, reading):
            if len(tasks) == MAX_TASKS:
                raise ClientError(f"more than {MAX_TASKS:,} tasks: split them into several jobs")
            tasks.append(task)
    if not tasks:
        raise ClientError("no task: the input holds neither a URL nor a JSON task")
    return tasks


def _read_argument(argument: str, reading: Reading) -> Iterator[SourcedTask]:
    if argument == "-":
        yield from read_lines(sys.stdin.buffer, "standard input", reading)
        return
    if _URL.match(argument):
        url = argument.strip(AROUND)
        if not url.isprintable():
            raise ClientError(f"not a URL: {clean(argument)}")
        yield SourcedTask(_parse(url, ARGUMENT, None), ARGUMENT)
        return
    name = clean(argument)
    try:
        with open(argument, "rb") as file:
            yield from read_lines(file, name, reading)
    except FileNotFoundError:
        raise ClientError(f"no such file: {name} (a URL starts with http:// or https://)") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ClientError(f"cannot read {name}: {reason}") from None


def hints_about(tasks: Sequence[SourcedTask]) -> list[str]:
    """Return what to say of lists that were taken as they are, and may be meant otherwise."""
    lists: dict[str, list[str]] = {}
    for task in tasks[:LOOKED_AT]:
        if task.problem is None and task.source != ARGUMENT and task.body.keys() == {"url"}:
            lists.setdefault(task.source.rpartition(":")[0], []).append(task.body["url"])
    return [
        f"{name}: every line has a comma, and what follows it is taken as part of the URL; "
        "if it is a column, send CSV (--type csv)"
        for name, urls in lists.items()
        if have_columns(urls)
    ]


def read_lines(file: BinaryIO, name: str, reading: Reading = AS_IT_IS) -> Iterator[SourcedTask]:
    """Parse one task a line: a URL, or a JSON object.

    Blank lines and lines that start with # are skipped, and a note behind a URL; CRLF and a byte
    order mark are accepted. Raises ClientError for a line without a task, unless such lines are to
    be left out.
    """
    tasks = _read(file, name, reading)
    first = list(islice(tasks, LOOKED_AT))
    urls = [task.body.get("url", "") for task in first if task.problem is None]
    if (separator := separator_at_all_ends(urls)) is not None:
        raise ClientError(f"{name}: {separated(separator)}")
    yield from first
    yield from tasks


def _read(file: BinaryIO, name: str, reading: Reading) -> Iterator[SourcedTask]:
    for number, line in enumerate(_decoded(file, name, reading.encoding), start=1):
        text = line.strip(AROUND)
        if not text or text.startswith("#"):
            continue
        source = f"{name}:{number}"
        try:
            yield SourcedTask(_parse(text, source, reading.scheme), source)
        except ClientError as error:
            if not reading.skip_invalid:
                raise
            yield SourcedTask({}, source, str(error))


def _decoded(file: BinaryIO, name: str, encoding: str | None) -> Iterator[str]:
    if encoding is not None:
        text = io.TextIOWrapper(file, encoding=encoding, newline="\n")
        try:
            yield from text
        except UnicodeError:
            raise ClientError(f"{name}: not {encoding} text: name another --encoding") from None
        finally:
            text.detach()
        return
    for number, line in enumerate(file, start=1):
        if number == 1 and b"\0" in line:
            raise ClientError(f"{name}: not UTF-8 text: add --encoding utf-16, or save it as UTF-8")
        try:
            yield line.decode()
        except UnicodeDecodeError:
            raise ClientError(
                f"{name}:{number}: not UTF-8 text: add --encoding (cp1252 on Windows), or save it "
                "as UTF-8"
            ) from None


def _parse(text: str, source: str, scheme: str | None) -> dict[str, Any]:
    if text.startswith("[") and "](" not in text:
        raise ClientError(f"{source}: a list; write one JSON task a line")
    if not text.startswith("{"):
        try:
            url = url_of_line(text if scheme is None else with_scheme(text, scheme))
        except Refused as refused:
            raise ClientError(f"{source}: {refused.value}: {refused.detail}") from None
        return {"url": url}
    try:
        task = strict_json.decode(text.encode())
    except ConveyorError as error:
        reason = clean(error.detail.removeprefix("the request body "))
        raise ClientError(
            f"{source}: not a JSON object as it should be (it {reason}); write one JSON task a line"
        ) from None
    if not isinstance(task, dict) or not isinstance(task.get("url"), str):
        raise ClientError(f'{source}: a JSON task needs a "url" that is text')
    return task
