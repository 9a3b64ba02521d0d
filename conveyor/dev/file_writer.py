"""Small files, written by one thread that takes whatever is queued.

One hand-over a batch in each direction is what makes it cheap: a thread hop a file costs more than
the file. Used by `files` alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from anyio import CancelScope, to_thread

_MAX_BATCH = 256
_MAX_RENAMES = 5


@dataclass(slots=True)
class _Job:
    target: str
    body: bytes
    done: asyncio.Future[None]
    loop: asyncio.AbstractEventLoop
    error: Exception | None = None


class FileWriter:
    """Writes bodies to files. `temporary` names an unused path on the same file system."""

    def __init__(self, temporary: Callable[[], str]) -> None:
        self._temporary = temporary
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    async def write(self, target: str, body: bytes) -> None:
        """Write one file, whole or not at all. Raises OSError; a cancelled write may still
        happen."""
        if self._closed:
            raise OSError(errno.EBADF, "closed")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="file-writer", daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        job = _Job(target, body, loop.create_future(), loop)
        self._queue.put(job)
        await job.done

    async def aclose(self) -> None:
        """Write what is queued and end the thread."""
        self._closed = True
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            with CancelScope(shield=True):
                await to_thread.run_sync(thread.join)

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
        temporary = self._temporary()
        try:
            write_file(temporary, job.body)
            move_into_place(temporary, job.target)
        except Exception as error:
            job.error = error

    @staticmethod
    def _report(batch: list[_Job]) -> None:
        if batch:
            # A loop that closed meanwhile has nobody left to tell.
            with contextlib.suppress(RuntimeError):
                batch[0].loop.call_soon_threadsafe(_settle, batch)


def write_file(path: str, body: bytes) -> None:
    """Write a new file that only its owner can read; nothing is left of it on an error."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        rest = memoryview(body)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)


def move_into_place(temporary: str, target: str) -> None:
    """Give a finished file its name, making its directory where that is missing.

    Whoever removes the directory at the same moment is outrun a few times; if that fails, or on any
    other error, the file is gone and OSError raised.
    """
    try:
        for _ in range(_MAX_RENAMES):
            with contextlib.suppress(FileNotFoundError):
                os.rename(temporary, target)
                return
            with contextlib.suppress(FileNotFoundError):
                os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
        os.rename(temporary, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _settle(batch: list[_Job]) -> None:
    for job in batch:
        if job.done.done():
            continue
        if job.error is None:
            job.done.set_result(None)
        else:
            job.done.set_exception(job.error)
