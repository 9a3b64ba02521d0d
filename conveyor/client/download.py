"""Download result bodies into a directory: several at a time, each streamed into its own file.

File names are portable, unique, and never lead out of the directory.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO

import anyio
import httpx
from tenacity import retry_if_exception_type

from conveyor.client.api import CONNECTIONS, Api, retrying
from conveyor.client.errors import ClientError
from conveyor.client.output import clean
from conveyor.client.wire import ResultRow

MAX_NAME = 120

_FORMATS = {
    "html": ".html",
    "json": ".json",
    "markdown": ".md",
    "plaintext": ".txt",
    "pdf": ".pdf",
}
_MEDIA_TYPES = {
    "application/json": ".json",
    "application/pdf": ".pdf",
    "application/xml": ".xml",
    "image/gif": ".gif",
    "image/jpeg": ".jpg",
    "image/png": ".png",
    "image/svg+xml": ".svg",
    "image/webp": ".webp",
    "text/css": ".css",
    "text/csv": ".csv",
    "text/markdown": ".md",
    "text/plain": ".txt",
    "text/xml": ".xml",
}
_EXTENSIONS = frozenset({".htm", *_FORMATS.values(), *_MEDIA_TYPES.values()})
_UNPORTABLE = re.compile(r"[^A-Za-z0-9._-]")
_RESERVED = frozenset(
    {"con", "prn", "aux", "nul", "clock$", "conin$", "conout$"}
    | {f"{port}{number}" for port in ("com", "lpt") for number in range(10)}
)


def extension(result_format: str | None, content_type: str) -> str:
    """Choose the extension for a body, with its dot.

    The format decides, except for `html`: the server calls any plain fetch `html`, so there the
    Content-Type decides.
    """
    media_type = content_type.partition(";")[0].strip().lower()
    if result_format in (None, "html"):
        return _MEDIA_TYPES.get(media_type, ".html")
    return _FORMATS.get(result_format or "", ".bin")


def portable(text: str) -> str:
    """Turn a text into a file name that every common file system accepts.

    The name has ASCII letters, digits, `.`, `_` and `-` only, no dot at either end, no leading
    hyphen, and is not reserved by Windows. It is at most 120 characters long; a longer one is cut
    and ends in a part of its hash.
    """
    name = _UNPORTABLE.sub("_", text).strip(".")
    if name.startswith("-") or name.partition(".")[0].lower() in _RESERVED:
        name = f"_{name}"
    if len(name) > MAX_NAME:
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
        name = f"{name[: MAX_NAME - 9]}-{digest}"
    return name or "_"


class FileNames:
    """Hands out file names that stay unique on file systems that ignore case."""

    def __init__(self) -> None:
        self._claimed: dict[str, int] = {}
        self._given: dict[str, int] = {}

    def claim(self, text: str) -> str:
        """Claim a name for a text before its extension is known, numbered from 2 if it is taken."""
        return _apart(*_split(portable(text)), self._claimed)

    def give(self, claimed: str, suffix: str) -> str:
        """Complete a claimed name with its extension, without doubling one that it already has."""
        base, known = _split(claimed)
        same = known.lower() == suffix
        return _apart(base if same else claimed, suffix, self._given)


def _split(name: str) -> tuple[str, str]:
    base, dot, suffix = name.rpartition(".")
    known = bool(base) and f".{suffix.lower()}" in _EXTENSIONS
    return (base, dot + suffix) if known else (name, "")


def _apart(base: str, suffix: str, taken: dict[str, int]) -> str:
    """Find a free name; `taken` maps each name to the next number to try."""
    wanted = (base + suffix).lower()
    name = base + suffix
    number = taken.get(wanted, 2)
    while name.lower() in taken:
        name = f"{base}-{number}{suffix}"
        number += 1
    taken[wanted] = number
    taken.setdefault(name.lower(), 2)
    return name


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file beside `path`, and rename it to `path` once it is complete.

    On an error the temporary file is removed; an existing file at `path` stays until the rename.
    """
    aside = path.with_name(f".{path.name}.part")
    aside.unlink(missing_ok=True)
    try:
        with aside.open("xb") as file:
            yield file
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


ATTEMPTS = 3


@dataclass(slots=True)
class Downloads:
    """Counts the files written, and holds a line for each body that could not be downloaded."""

    files: int = 0
    unsuccessful_tasks: int = 0
    problems: list[str] = field(default_factory=list)


def prepare(directory: Path) -> None:
    """Make a directory and check that files can be written into it. Raises ClientError."""
    try:
        _make(directory)
        with TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise _unwritable(directory, error) from None


async def download(
    api: Api, job_id: str, directory: Path, *, run_id: str | None = None, status: str | None = None
) -> Downloads:
    """Write the body of every successful task of a run into `directory`, creating it.

    Files are named by external id, else by task id, and replace existing ones. Raises ClientError
    if the directory cannot be written.
    """
    run = _Downloader(api, directory)
    try:
        _make(directory)
        async with anyio.create_task_group() as group:
            async for row, _raw in api.results(job_id, run_id=run_id, status=status):
                if not row.succeeded:
                    run.done.unsuccessful_tasks += 1
                elif row.result_url is None:
                    run.done.problems.append(f"{clean(row.task_id)}: the result has expired")
                else:
                    name = run.names.claim(row.external_id or row.task_id)
                    await run.slots.acquire()
                    group.start_soon(run.fetch, name, row, row.result_url)
    except OSError as error:
        raise _unwritable(directory, error) from None
    except BaseExceptionGroup as errors:
        raise _plain(directory, errors) from None
    return run.done


class _Downloader:
    """State shared by the transfers of one download."""

    def __init__(self, api: Api, directory: Path) -> None:
        self.slots = anyio.Semaphore(CONNECTIONS)
        self.names = FileNames()
        self.done = Downloads()
        self._api = api
        self._directory = directory

    async def fetch(self, claimed: str, row: ResultRow, url: str) -> None:
        """Download one body, retrying a broken transfer; release the slot at the end."""
        broken = retry_if_exception_type(httpx.TransportError)
        try:
            await retrying(self._api.pace, ATTEMPTS, broken)(self._transfer, claimed, row, url)
            self.done.files += 1
        except (ClientError, httpx.RequestError) as error:
            reason = clean(str(error)) or type(error).__name__
            self.done.problems.append(f"{clean(row.task_id)}: {reason}")
        finally:
            self.slots.release()

    async def _transfer(self, claimed: str, row: ResultRow, url: str) -> None:
        async with self._api.download(url) as response:
            suffix = extension(row.type, response.headers.get("Content-Type", ""))
            with replacing(self._directory / self.names.give(claimed, suffix)) as file:
                async for chunk in response.aiter_raw():
                    file.write(chunk)


def _make(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)


def _plain(directory: Path, errors: BaseExceptionGroup) -> BaseException:
    """Pick the one error of a group to report."""
    for error in errors.exceptions:
        if isinstance(error, ClientError):
            return error
        if isinstance(error, OSError):
            return _unwritable(directory, error)
    return errors


def _unwritable(directory: Path, error: OSError) -> ClientError:
    reason = error.strerror or type(error).__name__
    return ClientError(f"cannot write into {clean(str(directory))}: {reason}")
