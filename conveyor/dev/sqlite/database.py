"""The connections of one SQLite file: one that writes, in groups, and some that read.

An operation is a function of the connection. The writer commits whatever is queued as one group.
Operations that can share statements are queued as items of a batch handler instead; neighbours with
the same handler become one call of it. Each connection has a thread of its own; a short batch is
written on the loop's thread where nothing else is under way.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any, TypeVar

import aiosqlite
import msgspec

from conveyor.aio.concurrency import ShortWork
from conveyor.clock import SystemClock
from conveyor.dev.sqlite.schema import check_version
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.shards import fnv32a
from conveyor.ports.idle import OpenWork, turn
from conveyor.ports.records import RunWrites

_BUSY_TIMEOUT = 5.0
"""Seconds for which a statement waits for another program that has locked the file."""
_SLICES = 20
"""The attempts of a group of writes within that time: between two of them it may be given up."""
_CACHED_STATEMENTS = 256
_WRITER_CACHE_KIB = 32_768
_READER_CACHE_KIB = 8_192
_CHECKPOINT_PAGES = 2_000
_WAL_LIMIT = 64 * 1_024 * 1_024


_log = logging.getLogger("conveyor.dev")


class Connection(aiosqlite.Connection):
    """An aiosqlite connection that runs a whole function on its thread, in one hop."""

    def __init__(self, connector: Callable[[], sqlite3.Connection]) -> None:
        super().__init__(connector, iter_chunk_size=64)
        # A process that ends without closing must not hang on this thread: committed writes are
        # safe, and no caller was answered about the others.
        self._thread.daemon = True

    async def run(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """Run a function on the connection's thread; return its result.

        It runs to its end even where the waiting task is cancelled.
        """
        result: T = await self._execute(function, self._conn)  # type: ignore[no-untyped-call]
        return result

    def run_here(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """Run a function on the caller's thread, while nothing runs on that of the connection."""
        return function(self._conn)

    def join(self) -> None:
        """Wait for the thread of a connection that could not be opened. It is about to end, and
        would otherwise call an event loop that may be closed by then."""
        self._thread.join()


async def open_writer(
    path: Path, prepare: Callable[[sqlite3.Connection], None], *, may_be_new: bool = True
) -> Connection:
    """Open the connection that writes, and run `prepare` on it.

    Raises ConveyorError(unavailable) where the file cannot be used, and where `check_version`
    refuses it: then nothing was written to it.
    """

    def set_up(connection: sqlite3.Connection) -> None:
        check_version(connection, may_be_new=may_be_new)
        connection.execute("PRAGMA journal_mode = WAL").fetchone()
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA journal_size_limit = {_WAL_LIMIT}").fetchone()
        connection.execute(f"PRAGMA cache_size = -{_WRITER_CACHE_KIB}")
        # What undoes one operation of a group would else go to a temporary file once it is large,
        # for which there may be no descriptor and no room.
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.create_function("fnv32a", 1, fnv32a, deterministic=True)
        prepare(connection)
        # Such waits are for the thread of the connection alone.
        _set_waits(connection, busy=0.0, checkpoint=0)

    return await _open(path, set_up)


async def open_reader(path: Path) -> Connection:
    """Open a connection that only reads."""

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
        check_same_thread=False,  # see `run_here`
    )
    connection = Connection(connect)
    try:
        await connection
    except sqlite3.Error as error:
        connection.join()
        raise _unopened(path, error) from error
    try:
        await connection.run(set_up)
    except BaseException as error:
        await connection.close()
        raise _unopened(path, error) from error
    return connection


def _unopened(path: Path, error: BaseException) -> BaseException:
    """Translate a failure of an opening: on a full disk SQLite finds no room for its index of the
    log, and says only that some input or output failed."""
    full = getattr(error, "sqlite_errorname", "").startswith("SQLITE_IOERR")
    if full and shutil.disk_usage(path.parent).free == 0:
        return ConveyorError(ErrorCode.UNAVAILABLE, DISK_FULL)
    return translated(error)


DISK_FULL = "the disk is full"


def translated(error: BaseException) -> BaseException:
    """Turn a failure of the disk or the file into ConveyorError(unavailable).

    A broken constraint or a misused statement is a bug of this package and stays as it is.
    """
    if isinstance(error, UnicodeDecodeError | msgspec.DecodeError):
        return _damaged(type(error).__name__)
    ours = (sqlite3.IntegrityError, sqlite3.ProgrammingError, sqlite3.InterfaceError)
    if not isinstance(error, sqlite3.Error) or isinstance(error, ours):
        return error
    name = getattr(error, "sqlite_errorname", "SQLITE_ERROR")
    if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        return _damaged(name)
    reason = f"the store failed (conveyor.db: {name})"
    if name == "SQLITE_FULL":
        reason = DISK_FULL
    elif is_busy(error):
        reason = "another program has locked conveyor.db"
    return ConveyorError(ErrorCode.UNAVAILABLE, reason)


def _damaged(sign: str) -> ConveyorError:
    """Build the error for bytes that this package never wrote."""
    return ConveyorError(ErrorCode.UNAVAILABLE, f"conveyor.db is damaged ({sign})")


def is_busy(error: BaseException) -> bool:
    """Tell whether a statement failed because another program has locked the file."""
    code = getattr(error, "sqlite_errorcode", 0)
    return isinstance(error, sqlite3.OperationalError) and code & 0xFF == sqlite3.SQLITE_BUSY


class DatabaseFile:
    """The file under the connections, which go on with a file that was removed without noticing.

    Tells once that it is gone, or a path that is watched beside it. They may come back, as when a
    directory is moved and moved back.
    """

    def __init__(self, path: Path) -> None:
        self._watched = {str(path): _identity(str(path))}
        self._lock = threading.Lock()
        self._told = False

    def is_there(self) -> bool:
        """Look whether each path still leads to what was opened."""
        there = all(_identity(path) == seen for path, seen in self._watched.items())
        if there is self._told:
            self._tell(gone=not there)
        return there

    def watch(self, path: Path) -> None:
        """Take a path without which the file means little as a part of it."""
        self._watched = {**self._watched, str(path): _identity(str(path))}

    def _tell(self, *, gone: bool) -> None:
        with self._lock:  # threads of several connections look
            if gone and not self._told:
                _log.error(
                    "the data directory was removed or replaced while its server runs: nothing is "
                    "taken on until it is back, or the server is started again"
                )
            self._told = gone


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


T = TypeVar("T")

Operation = Callable[[sqlite3.Connection], T]
Batch = Callable[[sqlite3.Connection, list[Any]], list[Any]]

OPERATIONS = "operations of the database"
_MOST_WRITES = 1_000
_MOST_READS = 8
_MOST_HERE = 64
"""Items of a batch that is written on the loop's thread."""
_HERE_IN_A_ROW = 128
"""Batches on the loop's thread after which one goes to the writer's, for the checkpoint."""


@dataclass(slots=True, eq=False)
class _Queued:
    """One operation and the future of its result: `items` of a batch handler, whose results are a
    list, or else one function."""

    batch: Batch | None
    items: Sequence[Any]
    future: asyncio.Future[Any]


@dataclass(slots=True, frozen=True)
class _Raised:
    error: BaseException


_Execute = Callable[[list[_Queued], sqlite3.Connection], list[Any]]


_TRIGGERS = """
    CREATE TEMP TRIGGER run_written AFTER UPDATE ON main.runs
    BEGIN SELECT note_run(NEW.run_id, 0); END;
    CREATE TEMP TRIGGER run_moved AFTER UPDATE OF status, paused ON main.runs
    BEGIN SELECT note_run(NEW.run_id, 1); END;
    CREATE TEMP TRIGGER run_made AFTER INSERT ON main.runs
    BEGIN SELECT note_run(NEW.run_id, 1); END;
"""


class WriteNotes(RunWrites):
    """Notes the runs that a connection writes to, whatever statement does it: one call for each run
    of a group of writes, and none for its tasks."""

    def __init__(self) -> None:
        self._run_ids: set[str] = set()
        self._moved = False
        self._listener: Callable[[Collection[str], bool], None] | None = None

    def attach(self, connection: sqlite3.Connection) -> None:
        """Note what this connection writes from here on."""
        connection.create_function("note_run", 2, self._note)
        connection.executescript(_TRIGGERS)

    def on_write(self, tell: Callable[[Collection[str], bool], None]) -> None:
        self._listener = tell

    def pass_on(self) -> None:
        """Tell of what was noted. Not to be called while the connection writes."""
        if self._run_ids:
            run_ids, moved = self._run_ids, self._moved
            self._run_ids, self._moved = set(), False
            if self._listener is not None:
                self._listener(run_ids, moved)

    def _note(self, run_id: str, moved: int) -> None:
        self._run_ids.add(run_id)
        self._moved = self._moved or bool(moved)


class Database:
    """The connections of one file and their queues. Belongs to one event loop.

    `rows_read` and `rows_returned` count task rows, whose readers add to both; `rows_read` counts
    the jobs and runs of pages as well.
    """

    def __init__(
        self,
        path: Path,
        writer: Connection,
        readers: Sequence[Connection],
        after_writes: Callable[[], None] = lambda: None,
        *,
        work: OpenWork | None = None,
    ) -> None:
        self.rows_read = 0
        self.rows_returned = 0
        self.file = DatabaseFile(path)
        self._connections = [*readers, writer]
        self._writes = _WriteLane(writer, self.file, after=after_writes, work=work)
        self._reads = _Lane(readers, _read, self.file, most=_MOST_READS, work=work)

    async def write(self, operation: Operation[T]) -> T:
        """Run one operation inside the next group; its writes are durable once this returns.

        Where it raises, its own writes are undone and no others. A cancelled caller does not stop
        it.
        """
        result: T = await self._writes.submit(None, (operation,))
        return result

    async def write_batched(self, batch: Batch, item: object) -> Any:
        """Write one item by a handler that takes many at a time and raises nothing; see `write`."""
        [result] = await self.write_many(batch, (item,))
        if isinstance(result, BaseException):
            raise result
        return result

    async def write_many(self, batch: Batch, items: Sequence[object]) -> list[Any]:
        """Write items by such a handler, with one wait for all; see `write`. In the place of the
        result of an item that failed there is its error, and the others are written."""
        results: list[Any] = await self._writes.submit(batch, items)
        return results

    async def read(self, operation: Operation[T]) -> T:
        """Run one operation on a reader; each of its statements sees the data of one instant."""
        result: T = await self._reads.submit(None, (operation,))
        return result

    async def read_records(self, operation: Operation[list[T]]) -> list[T]:
        """Run one operation that reads jobs or runs, and count them in `rows_read`."""
        records = await self.read(operation)
        self.rows_read += len(records)
        return records

    async def read_record(self, operation: Operation[T | None]) -> T | None:
        """Run one operation that reads a job or a run, and count it in `rows_read`."""
        record = await self.read(operation)
        self.rows_read += record is not None
        return record

    @property
    def groups(self) -> int:
        """The number of groups committed so far."""
        return self._writes.groups

    @property
    def operations(self) -> int:
        """The number of operations in them."""
        return self._writes.operations

    def hurry(self) -> None:
        """Wait no longer for other programs that have locked the file."""
        self._writes.hurry()

    async def aclose(self) -> None:
        """Finish the queued operations, refuse later ones, and close. Idempotent."""
        self.hurry()
        await self._writes.aclose()
        await self._reads.aclose()
        while self._connections:
            await self._connections.pop(0).close()


class _Lane:
    """A queue of operations, and the connections that work it off.

    While another program has locked the file, a group is tried again as a whole. Once one was given
    up, those behind it have had their time too, and get one attempt each until one succeeds.
    """

    def __init__(
        self,
        connections: Sequence[Connection],
        execute: _Execute,
        file: DatabaseFile,
        *,
        most: int,
        after: Callable[[], None] = lambda: None,
        work: OpenWork | None = None,
    ) -> None:
        self.groups = 0
        self.operations = 0
        self._after = after
        self._work = work
        self._execute = execute
        self._file = file
        self._most = most
        self._locked = False
        self._attempts = _SLICES
        self._hurries = False
        self._queued: deque[_Queued] = deque()
        self._idle: list[asyncio.Future[None]] = []
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._pumps = [self._loop.create_task(self._pump(one)) for one in connections]

    def submit(self, batch: Batch | None, items: Sequence[object]) -> asyncio.Future[Any]:
        if self._closed:
            raise ConveyorError(ErrorCode.UNAVAILABLE, "the store is closed")
        future: asyncio.Future[Any] = self._loop.create_future()
        self._queued.append(_Queued(batch, items, future))
        if self._idle:
            self._idle.pop().set_result(None)
        return future

    async def aclose(self) -> None:
        self._closed = True
        while self._idle:
            self._idle.pop().set_result(None)
        await asyncio.gather(*self._pumps)

    async def _pump(self, connection: Connection) -> None:
        while self._queued or not self._closed:
            if not self._queued:
                idle = self._loop.create_future()
                self._idle.append(idle)
                await idle
                continue
            if self._work is None:
                await self._serve(connection)
                continue
            async with turn(self._work, OPERATIONS):
                # Another connection may have taken them meanwhile.
                if self._queued:
                    await self._serve(connection)

    async def _serve(self, connection: Connection) -> None:
        group = self._take()
        self._done(group, await self._run(connection, group))

    def _done(self, group: list[_Queued], results: list[Any]) -> None:
        self.groups += 1
        self.operations += sum(len(queued.items) for queued in group)
        _deliver(group, results)
        self._after()

    async def _run(self, connection: Connection, group: list[_Queued]) -> list[Any]:
        attempts = 0
        while True:
            attempts += 1
            try:
                results = await connection.run(partial(self._guarded, self._execute, group))
            except Exception as error:
                busy = is_busy(error)
                if busy and not self._locked:
                    self._locked = True
                    _log.warning("another program has locked conveyor.db: writes wait for it")
                if busy and attempts < self._attempts and not self._hurries:
                    continue
                if busy:
                    self._attempts = 1
                return [_Raised(translated(error))] * len(group)
            self._note_success()
            return results

    def _note_success(self) -> None:
        """Let the next group wait its whole time for a lock again."""
        if self._locked:
            self._locked = False
            self._attempts = _SLICES
            _log.info("conveyor.db is free again")

    def _guarded(
        self, execute: _Execute, group: list[_Queued], connection: sqlite3.Connection
    ) -> list[Any]:
        if not self._file.is_there():
            raise ConveyorError(ErrorCode.UNAVAILABLE, "the data directory was removed or replaced")
        return execute(group, connection)

    def hurry(self) -> None:
        self._hurries = True

    def _take(self) -> list[_Queued]:
        if len(self._queued) <= self._most:
            group = list(self._queued)
            self._queued.clear()
            return group
        return [self._queued.popleft() for _ in range(self._most)]


class _WriteLane(_Lane):
    """The lane of the connection that writes.

    A short batch is written before `submit` returns, where the connection is free. The others go to
    its thread, and so does a batch that meets a lock of another program.
    """

    def __init__(
        self,
        writer: Connection,
        file: DatabaseFile,
        *,
        after: Callable[[], None],
        work: OpenWork | None,
    ) -> None:
        super().__init__(
            [writer], _commit_patiently, file, most=_MOST_WRITES, after=after, work=work
        )
        self._writer = writer
        self._short = ShortWork(SystemClock())
        self._here_in_a_row = 0

    def submit(self, batch: Batch | None, items: Sequence[object]) -> asyncio.Future[Any]:
        if batch is not None and 1 < len(items) <= _MOST_HERE and self._may_write_here():
            queued = _Queued(batch, items, self._loop.create_future())
            if self._write_here(queued):
                return queued.future
        return super().submit(batch, items)

    def _may_write_here(self) -> bool:
        is_free = bool(self._idle) and not self._queued and self._work is None
        return is_free and self._here_in_a_row < _HERE_IN_A_ROW and self._short.is_welcome

    def _write_here(self, queued: _Queued) -> bool:
        """Write a batch on the loop's thread; return False, with nothing written, if another
        program has locked the file."""
        write = partial(self._guarded, _commit, [queued])
        try:
            results = self._short.run(partial(self._writer.run_here, write))
        except Exception as error:
            if is_busy(error):
                return False
            results = [_Raised(translated(error))]
        else:
            self._note_success()
        self._here_in_a_row += 1
        self._done([queued], results)
        return True

    async def _serve(self, connection: Connection) -> None:
        await super()._serve(connection)
        self._here_in_a_row = 0


def _deliver(group: list[_Queued], results: list[Any]) -> None:
    for queued, result in zip(group, results, strict=True):
        if queued.future.done():
            continue
        if isinstance(result, _Raised):
            queued.future.set_exception(result.error)
        else:
            queued.future.set_result(result)


def _read(group: list[_Queued], connection: sqlite3.Connection) -> list[Any]:
    results: list[Any] = []
    for queued in group:
        try:
            results.append(queued.items[0](connection))
        except Exception as error:
            raised = _Raised(translated(error))
            if is_busy(error):  # each of the others would wait as long
                return results + [raised] * (len(group) - len(results))
            results.append(raised)
    return results


def _commit_patiently(group: list[_Queued], connection: sqlite3.Connection) -> list[Any]:
    """Commit on the thread of the connection, which may wait."""
    _set_waits(connection, busy=_BUSY_TIMEOUT / _SLICES, checkpoint=_CHECKPOINT_PAGES)
    try:
        return _commit(group, connection)
    finally:
        _set_waits(connection, busy=0.0, checkpoint=0)


def _set_waits(connection: sqlite3.Connection, *, busy: float, checkpoint: int) -> None:
    """Set the seconds for which a lock is waited for, and the pages of the log from which a commit
    makes a checkpoint, which flushes; 0 means never."""
    # Not by `execute`: a statement that is kept sets nothing when it is used again.
    connection.executescript(
        f"PRAGMA busy_timeout = {busy * 1_000:.0f}; PRAGMA wal_autocheckpoint = {checkpoint};"
    )


def _commit(group: list[_Queued], connection: sqlite3.Connection) -> list[Any]:
    """Run a group as one transaction; where that fails, run each operation in one of its own.

    Raises sqlite3.OperationalError, and has written nothing, where the file is locked.
    """
    try:
        return _transaction(group, connection)
    except Exception as error:
        if is_busy(error):
            raise
        return _apart(group, error, connection)


def _apart(group: list[_Queued], error: Exception, connection: sqlite3.Connection) -> list[Any]:
    """Run the operations of a failed group, and the items of each, in transactions of their own."""
    results: list[Any] = []
    for queued in group:
        if len(group) > 1:
            results.append(_alone(queued, connection))
        elif queued.batch is None:
            results.append(_Raised(translated(error)))
        elif len(queued.items) == 1:
            results.append([translated(error)])
        else:
            alone = [_Queued(queued.batch, (item,), queued.future) for item in queued.items]
            results.append([result for one in alone for result in _alone(one, connection)])
    return results


def _alone(queued: _Queued, connection: sqlite3.Connection) -> Any:
    try:
        [result] = _transaction([queued], connection)
    except Exception as error:
        if not is_busy(error):
            return _apart([queued], error, connection)[0]
        result = _Raised(translated(error))
        return result if queued.batch is None else [result.error] * len(queued.items)
    return result


def _transaction(group: list[_Queued], connection: sqlite3.Connection) -> list[Any]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        results = list(_results(group, connection))
        connection.execute("COMMIT")
        return results
    except BaseException:
        if connection.in_transaction:
            with suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
        raise


def _results(group: list[_Queued], connection: sqlite3.Connection) -> Iterator[Any]:
    for batch, stretch in groupby(group, key=lambda queued: queued.batch):
        if batch is not None:
            shares = [queued.items for queued in stretch]
            results = iter(batch(connection, [item for share in shares for item in share]))
            for share in shares:
                yield list(islice(results, len(share)))
            continue
        for queued in stretch:
            [operation] = queued.items
            yield operation(connection) if len(group) == 1 else _nested(operation, connection)


def _nested(operation: Operation[Any], connection: sqlite3.Connection) -> Any:
    """Run an operation so that its failure undoes its own writes alone, not those of the group."""
    connection.execute("SAVEPOINT operation")
    try:
        result = operation(connection)
    except Exception as error:
        if not connection.in_transaction:
            raise  # a full or failing disk has rolled back the whole group
        connection.execute("ROLLBACK TO operation")
        result = _Raised(translated(error))
    connection.execute("RELEASE operation")
    return result
