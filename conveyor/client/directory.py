"""Directories of results: the files, with a manifest and an index of them.

File names are portable, unique, and never lead out of the directory. A line of the manifest follows
its file as soon as that is whole, so the manifest tells the truth whenever the command dies; at the
end it is written anew, in order. A file that no manifest names is never replaced unasked.
"""

from __future__ import annotations

import filecmp
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO, Self

import msgspec

from conveyor.client.errors import ClientError
from conveyor.client.output import clean
from conveyor.domain.export_rows import INDEX, MANIFEST, ExportRow
from conveyor.domain.result_index import IndexPage

if sys.platform != "win32":
    import fcntl

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
        digest = sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
        name = f"{name[: MAX_NAME - 9]}-{digest}"
    return name or "_"


class FileNames:
    """Hands out file names that stay unique on file systems that ignore case; `taken` are never
    handed out."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._claimed: dict[str, int] = {}
        self._given = {name.lower(): 2 for name in taken}

    def claim(self, text: str) -> str:
        """Claim a name for a text before its extension is known, numbered from 2 if it is taken."""
        return _apart(*_split(portable(text)), self._claimed)

    def give(self, claimed: str, suffix: str) -> str:
        """Complete a claimed name with its extension, without doubling one that it already has."""
        return _apart(*_completed(claimed, suffix), self._given)


def _completed(claimed: str, suffix: str) -> tuple[str, str]:
    base, known = _split(claimed)
    return (base if known.lower() == suffix else claimed), suffix


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


class ManifestRow(ExportRow, frozen=True, omit_defaults=True, kw_only=True):
    """A line of the manifest: a row of an export, with its job, and the run that brought the
    file."""

    job_id: str
    run_id: str


class Destination(msgspec.Struct, frozen=True):
    """A directory for results. With `force`, those of another job in it, and files of the names
    needed, are replaced."""

    path: Path
    force: bool = False

    def try_out(self) -> None:
        """Make the directory and check that files can be written into it. Raises ClientError."""
        with writing_into(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=self.path):
                pass

    def prepare(self, job_id: str | None = None) -> None:
        """Try the directory out, and check that the results of a job, None for a new one, can go
        there. Raises ClientError."""
        self.try_out()
        if self.force:
            return
        shown = clean(str(self.path))
        if os.path.lexists(self.path / MANIFEST):
            try:
                others = {row.job_id for row in read_manifest(self.path)} - {job_id}
            except ClientError as error:
                raise ClientError(f"{error} (--force replaces it)") from None
            if others:
                raise ClientError(
                    f"{shown} holds the results of job {clean(min(others))}: name another "
                    "directory, or replace them with --force"
                )
        elif os.path.lexists(self.path / INDEX):
            raise ClientError(f"{shown}/{INDEX} already exists (--force replaces it)")


@contextmanager
def writing_into(directory: Path) -> Iterator[None]:
    """Raise ClientError for what the file system refuses."""
    try:
        yield
    except OSError as error:
        raise unwritable(directory, error) from None


@contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Keep other commands out of a directory. Raises ClientError if one is writing into it."""
    with ExitStack() as opened:
        if sys.platform != "win32":
            with writing_into(directory):
                descriptor = os.open(directory, os.O_RDONLY)
            opened.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ClientError(
                    f"another command is writing into {clean(str(directory))}"
                ) from None
        yield


def unwritable(directory: Path, error: OSError) -> ClientError:
    """Say that the file system refused to write into a directory."""
    reason = error.strerror or type(error).__name__
    return ClientError(f"cannot write into {clean(str(directory))}: {reason}")


def read_manifest(directory: Path) -> Iterator[ManifestRow]:
    """Yield the lines of the manifest, none if there is none; a line cut off at its end does not
    count. Raises ClientError for one that this command did not write."""
    path = directory / MANIFEST
    foreign = ClientError(f"{clean(str(path))} is not a manifest of conveyor")
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_file():
        raise foreign
    with path.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                return
            try:
                yield _decoder.decode(line)
            except msgspec.DecodeError:
                raise foreign from None


class HeldFile(msgspec.Struct, frozen=True):
    """A file that the manifest names, and the run that brought it."""

    run_id: str
    name: str
    size: int
    content_type: str | None


class NewBody:
    """A body on its way into a directory; it has its name once it is whole."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.name = ""


class ResultDirectory:
    """Takes results of one job into a directory, between enter and exit.

    `moved` has a line for each file whose name belonged to one of another origin.
    """

    def __init__(self, destination: Destination, job_id: str) -> None:
        self._destination = destination
        self.path = destination.path
        self._job_id = job_id
        self._held: dict[str, HeldFile] = {}
        self._replaced: set[str] = set()
        self._strangers: set[str] = set()
        self._names = FileNames()
        self._manifest: BinaryIO | None = None
        self._lock = ExitStack()
        self.moved: list[str] = []

    def __enter__(self) -> Self:
        self._destination.try_out()
        with ExitStack() as held_alone:
            held_alone.enter_context(_alone_in(self.path))
            self._destination.prepare(self._job_id)
            with writing_into(self.path):
                self._take_over()
                # Written anew just now: it is no link.
                self._manifest = (self.path / MANIFEST).open("ab", buffering=0)
            self._lock = held_alone.pop_all()
        held = {file.name.lower() for file in self._held.values()}
        if not self._destination.force:
            there = {name.lower() for name in os.listdir(self.path)}
            self._strangers = there - held - {MANIFEST, INDEX}
        self._names = FileNames({*self._strangers, *held, MANIFEST, INDEX})
        return self

    def __exit__(self, *_error: object) -> None:
        assert self._manifest is not None
        self._manifest.close()
        with self._lock, writing_into(self.path):
            named = self._write_lists()
            for name in self._replaced - set(named.values()):
                self._remove(name, named.get(name.lower()))

    def held(self, task_id: str, *run_ids: str | None) -> HeldFile | None:
        """Return the file of a task if it is there, whole, and from one of these runs; without any,
        from whichever."""
        file = self._held.get(task_id)
        if file is None or (run_ids and file.run_id not in run_ids):
            return None
        try:
            there = (self.path / file.name).lstat().st_size
        except OSError:
            return None
        return file if there == file.size else None

    def count_of(self, run_id: str) -> int:
        """Return how many files of a run the manifest had at the start."""
        return sum(file.run_id == run_id for file in self._held.values())

    def claim(self, external_id: str | None, task_id: str) -> str:
        """Claim the name of a body, in the order of the rows."""
        return self._names.claim(external_id or task_id)

    @contextmanager
    def body(self, claimed: str, suffix: str, task_id: str) -> Iterator[NewBody]:
        """Open a file for a body; it appears, named, once it is whole."""
        aside = f"{self.path}/.{claimed}{suffix}.part"
        try:
            with _new_file(aside) as file:
                new = NewBody(file)
                yield new
            new.name = self._name(aside, claimed, suffix, task_id)
            os.replace(aside, f"{self.path}/{new.name}")
        except BaseException:
            Path(aside).unlink(missing_ok=True)
            raise

    def add(self, row: ManifestRow) -> None:
        """List a row. Its file, if it has one, is whole."""
        assert self._manifest is not None
        self._manifest.write(_encoder.encode(row) + b"\n")

    def _remove(self, name: str, new: str | None) -> None:
        path = self.path / name
        # Where case is ignored, the new file may be found under the old name.
        if path.exists() and not (new and path.samefile(self.path / new)):
            path.unlink()

    def _take_over(self) -> None:
        """Keep the lines of this job in the manifest; the files of others are replaced."""
        with replacing(self.path / MANIFEST) as manifest:
            try:
                for row in read_manifest(self.path):
                    mine = row.job_id == self._job_id
                    if row.file is not None and not _is_name(row.file):
                        continue
                    if mine:
                        manifest.write(_encoder.encode(row) + b"\n")
                    if mine and row.file is not None:
                        self._held[row.task_id] = HeldFile(
                            row.run_id, row.file, row.size or 0, row.content_type
                        )
                    elif row.file is not None:
                        self._replaced.add(row.file)
            except ClientError:
                # `prepare` has refused it unless it is to be replaced.
                manifest.truncate(0)

    def _name(self, aside: str, claimed: str, suffix: str, task_id: str) -> str:
        """Choose the name of a whole body."""
        wanted = "".join(_completed(claimed, suffix))
        earlier = self._held.get(task_id)
        if earlier is not None and earlier.name.endswith(suffix):
            return earlier.name
        if wanted.lower() in self._strangers and _equal(aside, self.path / wanted):
            # It was fetched by a command that was killed, or that wrote no manifest.
            self._strangers.discard(wanted.lower())
            return wanted
        name = self._names.give(claimed, suffix)
        if wanted.lower() in self._strangers:
            self.moved.append(f"{wanted} was there before: this one is {name}")
        if earlier is not None:
            self._replaced.add(earlier.name)
        return name

    def _write_lists(self) -> dict[str, str]:
        """Write index and manifest from the last line of each task, in the order of submission;
        return the names of the files by their small letters."""
        path = self.path / MANIFEST
        named: dict[str, str] = {}
        page = IndexPage()
        with (
            path.open("rb") as lines,
            replacing(path) as manifest,
            replacing(self.path / INDEX) as index,
        ):
            index.write(page.head.encode())
            for offset in _last_lines(lines):
                lines.seek(offset)
                line = lines.readline()
                row = _decoder.decode(line)
                if row.file is not None:
                    named[row.file.lower()] = row.file
                manifest.write(line)
                index.write(page.row(row).encode())
            index.write(page.foot().encode())
        return named


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(ManifestRow)


def _last_lines(lines: BinaryIO) -> list[int]:
    """Return where the last line of each task begins, ordered by task id."""
    places: dict[str, int] = {}
    offset = 0
    for line in lines:
        places[_decoder.decode(line).task_id] = offset
        offset += len(line)
    return [places[task_id] for task_id in sorted(places)]


def _is_name(name: str) -> bool:
    """Return whether a name leads to a file of the directory itself."""
    return portable(name) == name and name not in (MANIFEST, INDEX)


def _new_file(path: str) -> BinaryIO:
    """Open a new file, in place of one that a killed command left, and never through a link."""
    try:
        return open(path, "xb")
    except FileExistsError:
        os.unlink(path)
        return open(path, "xb")


def _equal(new: str, there: Path) -> bool:
    return there.is_file() and not there.is_symlink() and filecmp.cmp(new, there, shallow=False)
