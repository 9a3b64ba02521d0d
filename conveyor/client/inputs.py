"""Reading what to scrape: URLs on the command line, files of URLs, files of JSON tasks.

Files of tasks that go to the server as they are: which ones, what they hold, how CSV is read.
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
"""A list of lines beyond so many bytes is sent as a file rather than read here."""
HEADER_BYTES = 65_536
"""The header of a CSV file is looked for in so many bytes."""
STANDARD_INPUT = "-"
_GZIP = b"\x1f\x8b"
_CSV_SUFFIXES = (".csv", ".tsv")
_LIST_SUFFIXES = (".jsonl", ".ndjson", ".txt")


@dataclass(frozen=True, slots=True)
class FileInput:
    """A file that is sent whole: its path (`-` is standard input), and what it holds."""

    path: str
    type: FileType
    csv: CsvOptions = CsvOptions()

    @property
    def name(self) -> str:
        """What to call it before people."""
        return "standard input" if self.path == STANDARD_INPUT else clean(self.path)


@dataclass(frozen=True, slots=True)
class OpenInput:
    """A file that is open for reading: what to call it, its bytes, how many, and the slot that it
    needs, as the wire says it."""

    name: str
    file: BinaryIO
    size: int
    slot: dict[str, Any]

    @property
    def short_name(self) -> str:
        """The end of its name, for where there is little room."""
        return shorten(self.name.rpartition("/")[2], 24)


def file_input(
    arguments: Sequence[str], file_type: FileType | None, csv_options: CsvOptions
) -> FileInput | None:
    """The file that the arguments of a submit name; None where they are lists to be read here.

    CSV, compressed and large files are sent whole, and alone. Raises ClientError where the
    arguments and options do not go together, or a file cannot be read.
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
            raise ClientError(f"{clean(path)} does not say what it holds: add --type")
    elif not paths:
        raise ClientError("--type is for a file")
    else:
        path = paths[0]
    if len(arguments) > 1:
        raise ClientError(f"{clean(path)} is sent as a file, and so alone: submit it by itself")
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
        # Whoever reads it says what is wrong.
        return None
    return FileInput(path, _type_by_content(path))


def _type_by_content(path: str) -> FileType:
    """JSON tasks or URLs: as the first line that counts."""
    with _open(path) as file:
        for line in _beginning(file).splitlines():
            if text := line.strip():
                if text.startswith("#"):
                    continue
                return FileType.JSONL if text.startswith("{") else FileType.URLS
    return FileType.URLS


@contextmanager
def opened(chosen: FileInput) -> Iterator[OpenInput]:
    """The file, open from its start. Standard input is put aside first, for its size to be known.

    Raises ClientError where it cannot be read.
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
        # By its name where it has one: then the order of the columns does not matter.
        url = next((column for column in columns if column.strip().lower() == "url"), 0)
    fields = {"url": url}
    if options.external_id is not None:
        fields["external_id"] = options.external_id
    return {"delimiter": delimiter, "quote": quote, "header": options.header, "fields": fields}


def _header(file: BinaryIO, delimiter: str, quote: str) -> list[str]:
    """The first row; no columns where it cannot be made out, which the server tells better."""
    try:
        rows = csv.reader(
            io.StringIO(_beginning(file), newline=""), delimiter=delimiter, quotechar=quote
        )
        return next(rows, [])
    except (csv.Error, TypeError, ValueError):
        return []


def _beginning(file: BinaryIO) -> str:
    """The first characters of a file, unpacked where it is compressed."""
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
        file = open(path, "rb")  # noqa: SIM115 (closed below, where errors are no longer its own)
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
"""The source of a URL that is an argument itself."""

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class SourcedTask(msgspec.Struct, frozen=True):
    """A task as the server takes it, and where it was read: `urls.txt:3`, or ARGUMENT."""

    body: dict[str, Any]
    source: str


def read_tasks(arguments: Iterable[str]) -> list[SourcedTask]:
    """The tasks that the arguments name, in order; `-` is standard input.

    Raises ClientError for a file that cannot be read, a line that is no task, no task at all, or
    more than 100,000.
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
    """One task a line: a URL, or a JSON object. Blank lines and lines that start with # do not
    count; CRLF and a byte order mark are taken."""
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
