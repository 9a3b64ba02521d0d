"""Bringing result bodies into a directory, several at a time, each streamed.

File names for results: portable, unique, and never outside the directory asked for.
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
    """The extension for a body, with its dot.

    The format decides; for `html`, which is also what a plain fetch of anything is called, the
    Content-Type may say better.
    """
    media_type = content_type.partition(";")[0].strip().lower()
    if result_format in (None, "html"):
        return _MEDIA_TYPES.get(media_type, ".html")
    return _FORMATS.get(result_format or "", ".bin")


def portable(text: str) -> str:
    """The text as a file name that every common file system takes.

    ASCII letters, digits, `.`, `_` and `-` only; no dot at either end, no leading hyphen, no name
    that Windows reserves; at most 120 characters, a cut one ending in a part of its hash.
    """
    name = _UNPORTABLE.sub("_", text).strip(".")
    if name.startswith("-") or name.partition(".")[0].lower() in _RESERVED:
        name = f"_{name}"
    if len(name) > MAX_NAME:
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
        name = f"{name[: MAX_NAME - 9]}-{digest}"
    return name or "_"


class FileNames:
    """Gives out file names that stay apart where upper and lower case are the same."""

    def __init__(self) -> None:
        self._claimed: dict[str, int] = {}
        self._given: dict[str, int] = {}

    def claim(self, text: str) -> str:
        """The name for a text before its extension is known, numbered from 2 where it is taken."""
        return _apart(*_split(portable(text)), self._claimed)

    def give(self, claimed: str, suffix: str) -> str:
        """The whole name of what was claimed; an extension that it has already is not doubled."""
        base, known = _split(claimed)
        same = known.lower() == suffix
        return _apart(base if same else claimed, suffix, self._given)


def _split(name: str) -> tuple[str, str]:
    base, dot, suffix = name.rpartition(".")
    known = bool(base) and f".{suffix.lower()}" in _EXTENSIONS
    return (base, dot + suffix) if known else (name, "")


def _apart(base: str, suffix: str, taken: dict[str, int]) -> str:
    """A name not taken yet; `taken` holds, by name, the number to try next."""
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
    """A file to write aside, which takes the name `path` once complete.

    What was aside is removed if anything goes wrong; a file that had the name stays until then.
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
    """What a download brought: files written, and a line for each body that did not come."""

    files: int = 0
    unsuccessful_tasks: int = 0
    problems: list[str] = field(default_factory=list)


def prepare(directory: Path) -> None:
    """Make a directory and see that files can be put into it. Raises ClientError."""
    try:
        _make(directory)
        with TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise _unwritable(directory, error) from None


async def download(
    api: Api, job_id: str, directory: Path, *, run_id: str | None = None, status: str | None = None
) -> Downloads:
    """Write the body of every successful task of a run into `directory`, which is made.

    Files are named by external id, else task id; one of the same name is replaced. Raises
    ClientError where the directory cannot be written.
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
    """What the transfers of one download share."""

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
    """The one error worth telling out of a group."""
    for error in errors.exceptions:
        if isinstance(error, ClientError):
            return error
        if isinstance(error, OSError):
            return _unwritable(directory, error)
    return errors


def _unwritable(directory: Path, error: OSError) -> ClientError:
    reason = error.strerror or type(error).__name__
    return ClientError(f"cannot write into {clean(str(directory))}: {reason}")
