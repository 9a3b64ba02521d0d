"""Reading what to scrape: URLs on the command line, files of URLs, files of JSON tasks."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import msgspec

from conveyor.client.errors import ClientError
from conveyor.client.output import clean

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
