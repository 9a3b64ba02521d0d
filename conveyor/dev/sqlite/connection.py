"""One SQLite connection on a thread of its own, and what its failures mean to the rooms above."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import aiosqlite

from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.shards import fnv32a

T = TypeVar("T")

_BUSY_TIMEOUT = 5.0
_CACHED_STATEMENTS = 256
_WRITER_CACHE_KIB = 32_768
_READER_CACHE_KIB = 8_192
_CHECKPOINT_PAGES = 2_000
_WAL_LIMIT = 64 * 1_024 * 1_024


class Connection(aiosqlite.Connection):
    """An aiosqlite connection that runs a whole function on its thread, in one hop."""

    def __init__(self, connector: Callable[[], sqlite3.Connection]) -> None:
        super().__init__(connector, iter_chunk_size=64)
        # A process that is torn down without closing must not hang on this thread: whatever was
        # committed is safe, the rest was promised to nobody.
        self._thread.daemon = True

    async def run(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """The function's result, computed on the connection's thread.

        It runs to its end even where the waiting task is cancelled.
        """
        result: T = await self._execute(function, self._conn)  # type: ignore[no-untyped-call]
        return result

    def join(self) -> None:
        """Wait for the thread of a connection that could not be made: it is about to end, and
        would otherwise speak to an event loop that may be gone by then."""
        self._thread.join()


async def open_writer(path: Path, prepare: Callable[[sqlite3.Connection], None]) -> Connection:
    """The connection that writes, once `prepare` has run on it."""

    def set_up(connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA journal_mode = WAL").fetchone()
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}").fetchone()
        connection.execute(f"PRAGMA journal_size_limit = {_WAL_LIMIT}").fetchone()
        connection.execute(f"PRAGMA cache_size = -{_WRITER_CACHE_KIB}")
        connection.create_function("fnv32a", 1, fnv32a, deterministic=True)
        prepare(connection)

    return await _open(path, set_up)


async def open_reader(path: Path) -> Connection:
    """A connection that only reads."""

    def set_up(connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA query_only = ON")
        connection.execute(f"PRAGMA cache_size = -{_READER_CACHE_KIB}")

    return await _open(path, set_up)


async def _open(path: Path, set_up: Callable[[sqlite3.Connection], None]) -> Connection:
    connect = partial(
        sqlite3.connect,
        path,
        timeout=_BUSY_TIMEOUT,
        isolation_level=None,
        cached_statements=_CACHED_STATEMENTS,
    )
    connection = Connection(connect)
    try:
        await connection
    except sqlite3.Error as error:
        connection.join()
        raise translated(error) from error
    try:
        await connection.run(set_up)
    except BaseException as error:
        await connection.close()
        raise translated(error) from error
    return connection


def translated(error: BaseException) -> BaseException:
    """What a failure means to a caller: `unavailable` where the disk or the file is at fault.

    A broken constraint or a misused statement is a fault of ours and stays what it is.
    """
    ours = (sqlite3.IntegrityError, sqlite3.ProgrammingError, sqlite3.InterfaceError)
    if not isinstance(error, sqlite3.Error) or isinstance(error, ours):
        return error
    name = getattr(error, "sqlite_errorname", "SQLITE_ERROR")
    reason = "the disk is full" if name == "SQLITE_FULL" else f"the store failed ({name})"
    return ConveyorError(ErrorCode.UNAVAILABLE, reason)
