"""The blobs port over files: a body lies under its key, written aside and then renamed.

Bodies survive the death of the process at any instant, not a loss of power. Runs on asyncio.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiofiles
import anyio
from anyio import to_thread

from conveyor.dev.file_writer import FileWriter, move_into_place
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.blobs import Content

PIECE = 256 * 1024
"""Most bytes in a piece that is read, and in a body that counts as small."""

_KEY = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")
_TEMPORARIES = "tmp"
_REMOVALS_AT_A_TIME = 256


class FileBlobs:
    """Bodies as files below `root`. What an earlier process left half written is removed.

    Raises ConveyorError(unavailable) where the disk fails, ValueError for a key that is not one.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._temporaries = root / _TEMPORARIES
        self._number = itertools.count(1).__next__
        self._writer = FileWriter(self._temporary)
        with _disk():
            self._temporaries.mkdir(mode=0o700, parents=True, exist_ok=True)
            for leftover in self._temporaries.iterdir():
                leftover.unlink()

    async def aclose(self) -> None:
        """Write what is queued. No put may follow."""
        await self._writer.aclose()

    async def put(self, key: str, content: Content) -> int:
        """Store a body; the number of bytes. Whatever the iterator raises is raised again."""
        target = self._path(key)
        if isinstance(content, bytes):
            head, rest = content, None
        else:
            head = await _head(content)
            rest = content
        if len(head) > PIECE:
            return await self._put_large(target, head, rest)
        with _disk():
            await self._writer.write(target, head)
        return len(head)

    async def open(self, key: str) -> AsyncIterator[bytes] | None:
        """The body in pieces of at most 256 KiB; None where there is none."""
        path = self._path(key)
        with _disk():
            first = await to_thread.run_sync(_first_piece, path)
        return None if first is None else _pieces(path, first)

    async def delete(self, key: str) -> None:
        """Remove one body; without effect where there is none."""
        with _disk():
            await to_thread.run_sync(_unlink, self._path(key))

    async def delete_prefix(self, prefix: str) -> int:
        """Remove every body below a prefix, and its directories; how many bodies went.

        Done in portions off the event loop, so that a large prefix holds up nobody.
        """
        if not prefix.endswith("/"):
            raise ValueError("a prefix ends in a slash")
        removals = _removals(self._path(prefix[:-1]), self._root)
        removed = 0
        with _disk():
            while portion := await to_thread.run_sync(_remove_some, removals):
                removed += sum(portion)
        return removed

    async def _put_large(self, target: Path, head: bytes, rest: AsyncIterator[bytes] | None) -> int:
        temporary = self._temporary()
        try:
            size = await _write_pieces(temporary, head, rest)
            with _disk():
                await to_thread.run_sync(move_into_place, temporary, target)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(_unlink, temporary)
            raise
        return size

    def _temporary(self) -> Path:
        return self._temporaries / str(self._number())

    def _path(self, key: str) -> Path:
        parts = key.split("/")
        if _KEY.fullmatch(key) is None or not {".", ".."}.isdisjoint(parts):
            raise ValueError("not a blob key")
        if parts[0] == _TEMPORARIES:
            raise ValueError("a blob key that is reserved")
        return self._root / key


@contextlib.contextmanager
def _disk() -> Iterator[None]:
    """Tell what the disk refuses without telling where."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or "input/output error"
        raise ConveyorError(ErrorCode.UNAVAILABLE, f"result store: {reason}") from error


async def _head(content: AsyncIterator[bytes]) -> bytes:
    """All of a small body, or more than PIECE bytes of a large one."""
    pieces = []
    size = 0
    async for piece in content:
        pieces.append(piece)
        size += len(piece)
        if size > PIECE:
            break
    return b"".join(pieces)


async def _write_pieces(path: Path, head: bytes, rest: AsyncIterator[bytes] | None) -> int:
    with anyio.CancelScope(shield=True), _disk():
        # Opening is not interrupted, or the file could appear after the clean-up.
        file = await aiofiles.open(path, "xb")
    size = len(head)
    try:
        with _disk():
            await file.write(head)
        if rest is not None:
            async for piece in rest:
                size += len(piece)
                with _disk():
                    await file.write(piece)
    finally:
        with anyio.CancelScope(shield=True), _disk():
            await file.close()
    return size


def _first_piece(path: Path) -> bytes | None:
    """Up to PIECE + 1 bytes, the last of which tells that there are more."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(PIECE + 1)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None


async def _pieces(path: Path, first: bytes) -> AsyncIterator[bytes]:
    if first:
        yield first[:PIECE]
    if len(first) <= PIECE:
        return
    with _disk():
        async with aiofiles.open(path, "rb") as file:
            await file.seek(PIECE)
            while piece := await file.read(PIECE):
                yield piece


def _unlink(path: Path) -> bool:
    try:
        os.unlink(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _removals(top: Path, root: Path) -> Iterator[bool]:
    """Remove what is below `top`, and directories left empty up to `root`; one value a file."""
    for directory, _, names in os.walk(top, topdown=False, onerror=_unless_missing):
        for name in names:
            yield _unlink(Path(directory, name))
        _remove_empty(directory)
    for parent in top.parents:
        if parent == root or not _remove_empty(parent):
            return


def _unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def _remove_empty(directory: str | Path) -> bool:
    try:
        os.rmdir(directory)
    except OSError:  # a late writer put something there, or it is gone
        return not os.path.exists(directory)
    return True


def _remove_some(removals: Iterator[bool]) -> list[bool]:
    return list(itertools.islice(removals, _REMOVALS_AT_A_TIME))
