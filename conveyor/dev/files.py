"""The blobs port over files: a body lies under its key, written aside and then renamed. Small
results are appended to the segments of their run.

Bodies survive the death of the process at any instant, not a loss of power. Runs on asyncio.

One thread writes the small files, a batch of whatever is queued at a time: handing each file to a
thread on its own would cost more than writing it. What goes into segments is written on the loop's
thread, if it is little.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import queue
import shutil
import stat
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar, TypeVarTuple, Unpack

import aiofiles
import anyio
from anyio import CancelScope, to_thread

from conveyor.aio.concurrency import ShortWork
from conveyor.clock import SystemClock
from conveyor.dev.segments import (
    PACKED_MOST,
    SegmentWriter,
    packing_place,
    read_packed,
    remove_unsettled,
)
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.blobs import Blobs, Content, NewBodies, NoRoom
from conveyor.ports.idle import OpenWork, turn
from conveyor.records.blob_keys import checked_key, checked_prefix
from conveyor.records.packed_bodies import PackedBody, packed_bodies, packed_body

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")

FILES = "operations of files"
_MAX_BATCH = 256
_MOST_HERE = 1_048_576
"""Bytes of bodies that are written on the loop's thread together."""
_MAX_TRIES = 5
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_SMALL = 65_536
"""Bytes that are written to see whether a full disk is full for every body."""
_SEVERAL = 4
"""Bodies of the mean size that must fit on a disk which is full for a larger one alone."""


@dataclass(slots=True)
class _Job:
    """Bodies to store, new ones or one aside, and the future of the keys they lie under or their
    errors. `left` is called once the thread is done with them."""

    bodies: Sequence[tuple[str, bytes]]
    new: bool
    done: asyncio.Future[list[str | Exception]]
    loop: asyncio.AbstractEventLoop
    results: list[str | Exception]
    left: Callable[[], None] | None = None


class FileWriter:
    """A thread that writes bodies below `root`, by their keys; `temporary` returns an unused path
    on their file system. `kept` counts the bodies that were written, `kept_bytes` their bytes."""

    def __init__(
        self, root: str, temporary: Callable[[], str], work: OpenWork | None = None
    ) -> None:
        self._root = root
        self._work = work
        self._temporary = temporary
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._under_way = 0
        self._short = ShortWork(SystemClock())
        self.segments = SegmentWriter(root)
        self.kept = self.kept_bytes = 0

    async def write(self, key: str, body: bytes) -> None:
        """Write one file, whole or not at all. Raises OSError; NoRoom if smaller ones fit. A
        cancelled write may still happen."""
        [result] = await self._submit([(key, body)], new=False)
        if isinstance(result, Exception):
            raise result

    async def write_new(self, bodies: Sequence[tuple[str, bytes]]) -> list[str | Exception]:
        """Store bodies in segments, or in files under their own names; return the key or the error
        of each. A file that failed is removed, a cancelled write may still happen, and a kill may
        leave part of a body."""
        packed: dict[int, str] = {}
        if self._may_write_here(bodies):
            packed = self._short.run(partial(self._pack, bodies))
        left = [body for place, body in enumerate(bodies) if place not in packed]
        written = iter(await self._submit(left, new=True) if left or not bodies else ())
        return [packed.get(place) or next(written) for place in range(len(bodies))]

    def _may_write_here(self, bodies: Sequence[tuple[str, bytes]]) -> bool:
        """Tell whether bodies are few enough, and the thread has nothing to do."""
        is_free = not (self._under_way or self._closed) and self._work is None
        few = is_free and sum(len(body) for _, body in bodies) <= _MOST_HERE
        return few and self._short.is_welcome

    async def _submit(
        self, bodies: Sequence[tuple[str, bytes]], *, new: bool
    ) -> list[str | Exception]:
        if self._closed:
            raise OSError(errno.EBADF, "closed")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="file-writer", daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        job = _Job(bodies, new, loop.create_future(), loop, [])
        if self._work is not None:
            await self._work.take_turn(FILES)
            job.left = partial(self._work.end_turn, FILES)
        self._queue.put(job)
        self._under_way += 1
        try:
            return await job.done
        finally:
            self._under_way -= 1

    async def aclose(self) -> None:
        """Write what is queued and end the thread."""
        self._closed = True
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            with CancelScope(shield=True):
                await to_thread.run_sync(thread.join)
        self.segments.close()

    def _run(self) -> None:
        open_ended = True
        while open_ended:
            batch: list[_Job] = []
            job = self._queue.get()
            while job is not None:
                batch.append(job)
                if len(batch) == _MAX_BATCH:
                    break
                try:
                    job = self._queue.get_nowait()
                except queue.Empty:
                    break
            open_ended = job is not None
            for job in batch:
                self._write(job)
            self._report(batch)

    def _write(self, job: _Job) -> None:
        if job.done.cancelled():
            return
        packed = self._pack(job.bodies) if job.new else {}
        for place, (key, body) in enumerate(job.bodies):
            job.results.append(packed.get(place) or self._write_file(key, body, aside=not job.new))

    def _pack(self, bodies: Sequence[tuple[str, bytes]]) -> dict[int, str]:
        """Append bodies to segments, those of a run in one write; return the keys by their place in
        the list. What cannot be appended is missing."""
        runs: dict[str, tuple[list[int], list[tuple[str, bytes]]]] = {}
        for place, (key, body) in enumerate(bodies):
            packing = packing_place(key, body)
            if packing is not None:
                run, name = packing
                places, named = runs.setdefault(run, ([], []))
                places.append(place)
                named.append((name, body))
        packed: dict[int, str] = {}
        for run, (places, named) in runs.items():
            # Written one by one, each of them meets this error by itself, or none.
            with contextlib.suppress(OSError):
                packed.update(zip(places, self.segments.append(run, named), strict=True))
        self.kept += len(packed)
        self.kept_bytes += sum(len(bodies[place][1]) for place in packed)
        return packed

    def _write_file(self, key: str, body: bytes, *, aside: bool) -> str | Exception:
        """Write a body to a file of its own; return its key, or the error."""
        target = f"{self._root}/{key}"
        try:
            if aside:
                temporary = self._temporary()
                write_file(temporary, body)
                move_into_place(temporary, target, self._root)
            else:
                write_in_place(target, body, self._root)
        except Exception as error:
            return self.refusal(error, len(body)) or error
        self.kept += 1
        self.kept_bytes += len(body)
        return key

    def refusal(self, error: BaseException | None, size: int) -> NoRoom | None:
        """Return the refusal of a body of at least `size` bytes, if the disk that was full for it
        has room for several others. A disk without is full for all, until something is removed."""
        if not isinstance(error, OSError) or error.errno not in _FULL or size <= _SMALL:
            return None
        usual = self.kept_bytes // self.kept if self.kept else size // _SEVERAL
        path = self._temporary()
        try:
            if _free(os.path.dirname(path)) < max(_SMALL, _SEVERAL * usual):
                return None
            write_file(path, bytes(_SMALL))
            os.unlink(path)
        except OSError:
            return None
        return NoRoom()

    @staticmethod
    def _report(batch: list[_Job]) -> None:
        if batch:
            # After the loop has closed nobody waits for the answer.
            with contextlib.suppress(RuntimeError):
                batch[0].loop.call_soon_threadsafe(_settle, batch)


def _read_all(root: str, bodies: Sequence[PackedBody]) -> list[bytes | None]:
    return [read_packed(root, body) for body in bodies]


def _free(directory: str) -> int:
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def write_file(path: str, body: bytes) -> None:
    """Write a new file that only its owner can read; remove it on an error."""
    _write_out(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), path, body)


def write_in_place(path: str, body: bytes, root: str) -> None:
    """Write a file that only its owner can read under its own name, over what may be there, and
    create its directory below `root` where that is missing; remove it on an error."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for _ in range(_MAX_TRIES):
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(path, flags, 0o600)
            break
        with contextlib.suppress(FileNotFoundError):
            _make_directories(os.path.dirname(path), root)
    else:
        descriptor = os.open(path, flags, 0o600)
    _write_out(descriptor, path, body)


def _write_out(descriptor: int, path: str, body: bytes) -> None:
    """Write a body to an open file and close it; remove the file on an error."""
    try:
        written = os.write(descriptor, body)
        while written < len(body):
            written += os.write(descriptor, memoryview(body)[written:])
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)


def _make_directories(path: str, root: str) -> None:
    """Create a directory below `root`, but not `root`: where somebody removed all data, nothing
    appears in its place. Raises FileNotFoundError."""
    os.stat(root)
    os.makedirs(path, mode=0o700, exist_ok=True)


def move_into_place(temporary: str, target: str, root: str) -> None:
    """Rename a finished file to its name, and create its directory below `root` where that is
    missing.

    Tries a few times, in case the directory is being removed at the same moment. Raises OSError,
    after removing the file, where that does not help and on any other error.
    """
    try:
        for _ in range(_MAX_TRIES):
            with contextlib.suppress(FileNotFoundError):
                os.rename(temporary, target)
                return
            with contextlib.suppress(FileNotFoundError):
                _make_directories(os.path.dirname(target), root)
        os.rename(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _settle(batch: list[_Job]) -> None:
    for job in batch:
        if not job.done.done():
            job.done.set_result(job.results)
        if job.left is not None:
            job.left()


PIECE = PACKED_MOST
"""Bytes: at most as many are in a piece that is read, and in a body that counts as small."""

_TEMPORARIES = "tmp"
_REMOVALS_AT_A_TIME = 256

# <job>/<run> at the end of each, as `conveyor.ports.blobs` lays them out.
_STAGED = "staged/*/*"
_OF_RUNS = ("results/*/*/*", "exports/*/*", _STAGED)
_INPUTS = "inputs"
_EXPORTS = "exports/*/*/*"


class FileBlobs(Blobs, NewBodies):
    """Bodies as files below `root`. Opening removes the files that an earlier process left half
    written.

    Methods raise ConveyorError(unavailable) where the disk fails, ValueError for a malformed key.
    Links do not exist here: files go through the API.
    """

    def __init__(self, root: Path, *, work: OpenWork | None = None) -> None:
        # Text, not Path: this is done for every body.
        self._root = str(root)
        self._temporaries = f"{root}/{_TEMPORARIES}"
        self._number = itertools.count(1).__next__
        self._work = work
        self._writer = FileWriter(self._root, self._temporary, work)
        self._large = self._begun = 0
        with _DISK:
            os.makedirs(self._temporaries, mode=0o700, exist_ok=True)
            for leftover in list(os.scandir(self._temporaries)):
                if leftover.is_dir(follow_symlinks=False):
                    shutil.rmtree(leftover.path)
                else:
                    os.unlink(leftover.path)

    async def aclose(self) -> None:
        """Write the queued bodies and stop. No put may follow."""
        await self._writer.aclose()

    async def clear(self) -> None:
        """Remove every body, those included whose write was cancelled and may still happen."""
        with _DISK:
            # The thread takes its jobs in their order: what was queued before this is written.
            await self._writer.write_new([])
            await self._in_thread(self._remove_all)

    async def take(self, source: Path) -> None:
        """Copy every body of another directory."""
        with _DISK:
            await self._in_thread(self._copy_all, source)

    def _copy_all(self, source: Path) -> None:
        shutil.copytree(
            source,
            self._root,
            ignore=shutil.ignore_patterns(_TEMPORARIES),
            dirs_exist_ok=True,
        )

    def _remove_all(self) -> None:
        self._writer.segments.close()
        for found in list(os.scandir(self._root)):
            if found.path != self._temporaries:
                shutil.rmtree(found.path)

    async def put(self, key: str, content: Content) -> int:
        target = self._path(key)
        if isinstance(content, bytes):
            head, rest = content, None
        else:
            head = await _head(content)
            rest = content
        if len(head) > PIECE:
            return await self._put_large(target, head, rest)
        with _DISK:
            await self._writer.write(key, head)
        return len(head)

    async def put_new(self, bodies: Sequence[tuple[str, bytes]]) -> list[str | Exception]:
        for key, _ in bodies:
            checked_key(key)
        try:
            results = await self._writer.write_new(bodies)
        except OSError as error:
            results = [error] * len(bodies)
        return [_unavailable(found) if isinstance(found, OSError) else found for found in results]

    async def open(self, key: str, *, size: int | None = None) -> AsyncIterator[bytes] | None:
        path, packed = self._path(key), packed_body(key)
        with _DISK:
            if packed is None:
                return await self._in_thread(_open_body, path, size, self._work)
            if size is not None and size != packed.size:
                return None
            body = await self._in_thread(read_packed, self._root, packed)
        return None if body is None else _in_pieces(body)

    async def read_neighbours(self, keys: Sequence[str]) -> list[bytes | None]:
        bodies = packed_bodies(map(checked_key, keys))
        with _DISK:
            return await self._in_thread(_read_all, self._root, bodies)

    async def delete(self, key: str) -> None:
        path, packed = self._path(key), packed_body(key)
        with _DISK:
            if packed is None:
                await self._in_thread(_unlink, path)
            else:
                await self._in_thread(self._writer.segments.drop, packed)

    async def remove_unsettled(self, keys: Sequence[str]) -> None:
        """Remove the bodies that an earlier process stored under these keys, which no row names:
        files, and segments with no other body."""
        paths = [self._path(key) for key in keys]
        with _DISK:
            await self._in_thread(_unlink_all, paths)
            await self._in_thread(remove_unsettled, self._root, keys)

    async def delete_prefix(self, prefix: str, *, limit: int | None = None) -> int:
        # In portions off the event loop, so that a large prefix blocks nobody.
        removals = _removals(self._path(checked_prefix(prefix)[:-1]), self._root)
        most = sys.maxsize if limit is None else limit
        removed = 0
        with _DISK:
            await self._in_thread(self._writer.segments.close_below, prefix)
            while removed < most:
                size = min(_REMOVALS_AT_A_TIME, most - removed)
                portion = await self._in_thread(_remove_some, removals, size)
                if not portion:
                    break
                removed += sum(portion)
        return removed

    async def list_keys(self, prefix: str, *, after: str, limit: int) -> list[str]:
        with _DISK:
            keys = await self._in_thread(_keys_below, self._root, checked_prefix(prefix))
        return [key for key in keys if key > after][:limit]

    async def size(self, key: str) -> int | None:
        path, packed = self._path(key), packed_body(key)
        with _DISK:
            if packed is None:
                return await self._in_thread(_size, path)
            whole = await self._in_thread(_size, f"{self._root}/{packed.pack}")
        return packed.size if whole is not None and whole >= packed.end else None

    async def upload_link(self, key: str, *, content_type: str, seconds: int) -> str | None:
        return None

    async def download_link(
        self, key: str, *, seconds: int, file_name: str, content_type: str = ""
    ) -> str | None:
        return None

    async def runs(self) -> set[tuple[str, str]]:
        """List, as (job_id, run_id), the runs with a directory of results, exports or staged
        tasks."""
        with _DISK:
            return await self._in_thread(_runs, self._root, _OF_RUNS)

    async def staged_runs(self) -> set[tuple[str, str]]:
        """List, as (job_id, run_id), the runs with a directory of staged tasks."""
        with _DISK:
            return await self._in_thread(_runs, self._root, (_STAGED,))

    async def input_ids(self) -> list[str]:
        """List the ids of the file inputs whose file is here."""
        with _DISK:
            return await self._in_thread(_names, f"{self._root}/{_INPUTS}")

    async def export_ids(self) -> list[tuple[str, str, str]]:
        """List, as (job_id, run_id, export_id), the exports whose file is here."""
        with _DISK:
            return await self._in_thread(_export_ids, self._root)

    async def _put_large(self, target: str, head: bytes, rest: AsyncIterator[bytes] | None) -> int:
        temporary = self._temporary()
        is_first, number = not self._large, self._begin_large()
        try:
            size = await _write_pieces(temporary, head, rest, self._work)
            with _DISK:
                await self._in_thread(move_into_place, temporary, target, self._root)
        except BaseException as error:
            refusal = None
            with anyio.CancelScope(shield=True):
                await self._in_thread(_unlink, temporary)
                # Bodies that fill a disk together may each fit alone.
                is_alone = is_first and number == self._begun
                if is_alone and isinstance(error, ConveyorError):
                    look = partial(self._writer.refusal, error.__cause__, len(head))
                    refusal = await self._in_thread(look)
            if refusal is not None:
                raise refusal from error
            raise
        finally:
            self._large -= 1
        self._writer.kept += 1
        self._writer.kept_bytes += size
        return size

    async def _in_thread(
        self, function: Callable[[Unpack[Arguments]], Result], *args: *Arguments
    ) -> Result:
        if self._work is None:
            return await to_thread.run_sync(function, *args)
        async with turn(self._work, FILES):
            return await to_thread.run_sync(function, *args)

    def _begin_large(self) -> int:
        self._large += 1
        self._begun += 1
        return self._begun

    def _temporary(self) -> str:
        return f"{self._temporaries}/{self._number()}"

    def _path(self, key: str) -> str:
        return f"{self._root}/{checked_key(key)}"


def _runs(root: str, patterns: Iterable[str]) -> set[tuple[str, str]]:
    found = (path for pattern in patterns for path in Path(root).glob(pattern))
    return {(path.parent.name, path.name) for path in found if path.is_dir()}


def _export_ids(root: str) -> list[tuple[str, str, str]]:
    paths = Path(root).glob(_EXPORTS)
    return [(path.parent.parent.name, path.parent.name, path.name) for path in paths]


def _keys_below(root: str, prefix: str) -> list[str]:
    found = os.walk(f"{root}/{prefix}", onerror=_unless_missing)
    start = len(root) + 1
    return sorted(
        f"{folder.rstrip('/')}/{name}"[start:] for folder, _, names in found for name in names
    )


def holds_bodies(root: Path) -> bool:
    """Tell whether there is any whole body below `root`."""
    temporaries = root / _TEMPORARIES
    return any(names and Path(folder) != temporaries for folder, _, names in os.walk(root))


def _names(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []


class _Disk:
    """A context that turns OSError into ConveyorError(unavailable), without the path."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, OSError):
            raise _unavailable(error) from error


def _unavailable(error: OSError) -> ConveyorError:
    reason = error.strerror or "input/output error"
    return ConveyorError(ErrorCode.UNAVAILABLE, f"result store: {reason}")


_DISK = _Disk()


async def _head(content: AsyncIterator[bytes]) -> bytes:
    """Read all of a small body, or a bit more than PIECE bytes of a large one."""
    pieces = []
    size = 0
    async for piece in content:
        pieces.append(piece)
        size += len(piece)
        if size > PIECE:
            break
    return b"".join(pieces)


async def _write_pieces(
    path: str, head: bytes, rest: AsyncIterator[bytes] | None, work: OpenWork | None
) -> int:
    with anyio.CancelScope(shield=True), _DISK:
        # A cancelled opening could create the file after the clean-up.
        async with turn(work, FILES):
            file = await aiofiles.open(path, "xb", opener=_open_private)
    size = len(head)
    try:
        with _DISK:
            async with turn(work, FILES):
                await file.write(head)
        if rest is not None:
            async for piece in rest:
                size += len(piece)
                with _DISK:
                    async with turn(work, FILES):
                        await file.write(piece)
    finally:
        with anyio.CancelScope(shield=True), _DISK:
            async with turn(work, FILES):
                await file.close()
    return size


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


class _Body:
    """A body that is being read, also while it is replaced or deleted.

    Opening reads the first piece, and closes the file again where that is all of it.
    """

    def __init__(self, descriptor: int, work: OpenWork | None) -> None:
        self._descriptor = descriptor
        self._work = work
        self._first = os.read(descriptor, PIECE)
        if len(self._first) < PIECE:
            self._close()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        piece, self._first = self._first, b""
        if not piece and self._descriptor >= 0:
            with _DISK:
                async with turn(self._work, FILES):
                    piece = await to_thread.run_sync(os.read, self._descriptor, PIECE)
        if not piece:
            self._close()
            raise StopAsyncIteration
        return piece

    def __del__(self) -> None:
        self._close()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


async def _in_pieces(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), PIECE):
        yield body[start : start + PIECE]


def _open_body(path: str, size: int | None, work: OpenWork | None) -> AsyncIterator[bytes] | None:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if size is not None and os.fstat(descriptor).st_size != size:
        os.close(descriptor)
        return None
    try:
        return _Body(descriptor, work)
    except IsADirectoryError:
        return None


def _size(path: str) -> int | None:
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _unlink(path: str) -> bool:
    try:
        os.unlink(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _unlink_all(paths: Iterable[str]) -> None:
    for path in paths:
        _unlink(path)


def _removals(top: str, root: str) -> Iterator[bool]:
    """Remove the files below `top`, and directories left empty up to `root`; yield once a file."""
    for directory, _, names in os.walk(top, topdown=False, onerror=_unless_missing):
        for name in names:
            yield _unlink(f"{directory}/{name}")
        _remove_empty(directory)
    parent = os.path.dirname(top)
    while parent != root and _remove_empty(parent):
        parent = os.path.dirname(parent)


def _unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def _remove_empty(directory: str) -> bool:
    try:
        os.rmdir(directory)
    except OSError:  # a late writer put something there, or it is gone
        return not os.path.exists(directory)
    return True


def _remove_some(removals: Iterator[bool], most: int) -> list[bool]:
    return list(itertools.islice(removals, most))
