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
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

import msgspec

from conveyor.client.errors import ClientError
from conveyor.client.options import CsvOptions, FileType
from conveyor.client.output import clean, shorten

LARGE = 4 * 1_024 * 1_024
"""A longer list is sent as a file instead of being read here."""
HEADER_BYTES = 65_536
"""Bytes at the start of a CSV file that are searched for its header."""
STANDARD_INPUT = "-"
_GZIP = b"\x1f\x8b"
_CSV_SUFFIXES = (".csv", ".tsv")
_LIST_SUFFIXES = (".jsonl", ".ndjson", ".txt")


@dataclass(frozen=True, slots=True)
class FileInput:
    """A file to send whole: its path (`-` is standard input) and its type."""

    path: str
    type: FileType
    csv: CsvOptions = CsvOptions()

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
    arguments: Sequence[str], file_type: FileType | None, csv_options: CsvOptions
) -> FileInput | None:
    """Find the file that the arguments name; None if they are lists to be read here.

    CSV, compressed and large files are sent whole, one to a submit. Raises ClientError if the
    arguments and options do not fit together, or a file cannot be read.
    """
    chosen = _chosen(arguments, file_type)
    if csv_options != CsvOptions() and (chosen is None or chosen.type is not FileType.CSV):
        raise ClientError("--field, --header, --delimiter and --quote are for CSV (--type csv)")
    if chosen is None or chosen.type is not FileType.CSV:
        return chosen
    if csv_options.delimiter is None and _stem(chosen.path).endswith(".tsv"):
        csv_options = CsvOptions(
            csv_options.url, csv_options.external_id, "\t", csv_options.quote, csv_options.header
        )
    return FileInput(chosen.path, chosen.type, csv_options)


def _chosen(arguments: Sequence[str], file_type: FileType | None) -> FileInput | None:
    paths = [argument for argument in arguments if not _URL.match(argument)]
    if file_type is None:
        alone = [path for path in paths if _is_sent_whole(path)]
        if not alone:
            return _large(arguments)
        path, file_type = alone[0], _type_by_name(alone[0])
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
    return path.lower().endswith((*_CSV_SUFFIXES, ".gz"))


def _stem(path: str) -> str:
    return path.lower().removesuffix(".gz")


def _type_by_name(path: str) -> FileType | None:
    stem = _stem(path)
    if stem.endswith(_CSV_SUFFIXES):
        return FileType.CSV
    return _type_by_content(path) if stem.endswith(_LIST_SUFFIXES) else None


def _large(arguments: Sequence[str]) -> FileInput | None:
    if len(arguments) != 1 or not arguments[0].lower().endswith(_LIST_SUFFIXES):
        return None
    path = arguments[0]
    try:
        if _URL.match(path) or os.stat(path).st_size <= LARGE:
            return None
    except (OSError, ValueError):
        # Reading it later reports the error.
        return None
    return FileInput(path, _type_by_content(path))


def _type_by_content(path: str) -> FileType:
    """Detect JSON tasks or URLs by the first line that counts."""
    with _open(path) as file:
        for line in _beginning(file).splitlines():
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
    if chosen.path == STANDARD_INPUT:
        with tempfile.TemporaryFile() as aside:
            shutil.copyfileobj(sys.stdin.buffer, aside)
            yield _ready(chosen, aside)
    else:
        with _open(chosen.path) as file:
            yield _ready(chosen, file)


def _ready(chosen: FileInput, file: BinaryIO) -> OpenInput:
    size = file.seek(0, os.SEEK_END)
    if not size:
        raise ClientError(f"{chosen.name} is empty")
    slot: dict[str, Any] = {"type": chosen.type.value}
    if chosen.type is FileType.CSV:
        slot["csv"] = _csv_document(chosen.csv, file)
    return OpenInput(chosen.name, file, size, slot)


def _csv_document(options: CsvOptions, file: BinaryIO) -> dict[str, Any]:
    delimiter, quote = options.delimiter or ",", options.quote or '"'
    url = options.url
    if url is None:
        columns = _header(file, delimiter, quote) if options.header else []
        # By name if it has one: then the order of the columns does not matter.
        url = next((column for column in columns if column.strip().lower() == "url"), 0)
    fields = {"url": url}
    if options.external_id is not None:
        fields["external_id"] = options.external_id
    return {"delimiter": delimiter, "quote": quote, "header": options.header, "fields": fields}


def _header(file: BinaryIO, delimiter: str, quote: str) -> list[str]:
    """Read the first row; no columns if it is unreadable, which the server explains better."""
    try:
        rows = csv.reader(
            io.StringIO(_beginning(file), newline=""), delimiter=delimiter, quotechar=quote
        )
        return next(rows, [])
    except (csv.Error, TypeError, ValueError):
        return []


def _beginning(file: BinaryIO) -> str:
    """Read the first characters of a file, decompressing it if necessary."""
    file.seek(0)
    content = file.read(HEADER_BYTES)
    if content.startswith(_GZIP):
        file.seek(0)
        try:
            content = gzip.GzipFile(fileobj=file).read(HEADER_BYTES)
        except (OSError, EOFError, zlib.error):
            content = b""
    return content.decode("utf-8-sig", "replace")


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
ARGUMENT = "argument"
"""Source of a URL given as an argument."""

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class SourcedTask(msgspec.Struct, frozen=True):
    """A task for the server, and the place it was read from: `urls.txt:3`, or ARGUMENT."""

    body: dict[str, Any]
    source: str


def read_tasks(arguments: Iterable[str]) -> list[SourcedTask]:
    """Read the tasks that the arguments name, in order; `-` is standard input.

    Raises ClientError for an unreadable file, a line without a task, no task at all, or more than
    100,000 tasks.
    """
    tasks: list[SourcedTask] = []
    for argument in arguments:
        for task in _read_argument(argument):
            if len(tasks) == MAX_TASKS:
                raise ClientError(f"more than {MAX_TASKS:,} tasks: split them into several jobs")
            tasks.append(task)
    if not tasks:
        raise ClientError("no task: the input holds neither a URL nor a JSON task")
    return tasks


def _read_argument(argument: str) -> Iterator[SourcedTask]:
    if argument == "-":
        yield from read_lines(sys.stdin.buffer, "standard input")
        return
    if _URL.match(argument):
        if not argument.isprintable():
            raise ClientError(f"not a URL: {clean(argument)}")
        yield SourcedTask({"url": argument}, ARGUMENT)
        return
    name = clean(argument)
    try:
        with open(argument, "rb") as file:
            yield from read_lines(file, name)
    except FileNotFoundError:
        raise ClientError(f"no such file: {name} (a URL starts with http:// or https://)") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ClientError(f"cannot read {name}: {reason}") from None


def read_lines(file: BinaryIO, name: str) -> Iterator[SourcedTask]:
    """Parse one task a line: a URL, or a JSON object.

    Blank lines and lines that start with # are skipped; CRLF and a byte order mark are accepted.
    """
    for number, line in enumerate(file, start=1):
        source = f"{name}:{number}"
        if number == 1:
            line = line.removeprefix(_BYTE_ORDER_MARK)
        try:
            text = line.decode().strip()
        except UnicodeDecodeError:
            raise ClientError(f"{source}: not UTF-8 text") from None
        if not text or text.startswith("#"):
            continue
        yield SourcedTask(_parse(text, source), source)


def _parse(text: str, source: str) -> dict[str, Any]:
    if text.startswith("["):
        raise ClientError(f"{source}: a list; write one JSON task a line")
    if not text.startswith("{"):
        return {"url": text}
    try:
        task: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        reason = clean(str(error))
        raise ClientError(
            f"{source}: not a JSON object ({reason}); write one JSON task a line"
        ) from None
    if not isinstance(task.get("url"), str):
        raise ClientError(f'{source}: a JSON task needs a "url" that is text')
    return task
