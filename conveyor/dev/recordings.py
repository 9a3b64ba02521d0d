"""The recordings port over a directory: `exchanges.jsonl`, and `bodies` by the digests of their
bytes.

The first line says the form, the last one how many exchanges stand between; without it the
recording was cut. An index that answers what is asked lies in a temporary database.
"""

from __future__ import annotations

import errno
import fcntl
import io
import os
import re
import sqlite3
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from hashlib import file_digest, sha256
from itertools import count, islice
from pathlib import Path
from tempfile import mkstemp
from typing import BinaryIO, NamedTuple, TypeVar, TypeVarTuple, Unpack

import msgspec
from anyio import CapacityLimiter, to_thread

from conveyor.dev.directory import open_at_once
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.text_rules import MASK
from conveyor.ports.blobs import Content
from conveyor.ports.idle import OpenWork, turn
from conveyor.ports.recordings import Asked, Exchange, Recorder, Recordings, Verdict

FORM = 1
LOG, BODIES = "exchanges.jsonl", "bodies"
SMALL = 262_144
"""Bytes of a body that is answered in one piece."""
MOST_LINE = 1_048_576
OPERATIONS = "operations of a recording"
_DRAFT = ".draft-"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NEAR = 25
_SOME, _SHORT = 100, 200
"""Exchanges that are looked at for samples, and the characters of the longest URL among those."""
_INDEX = """
CREATE TABLE exchanges (
    at INTEGER PRIMARY KEY, size INTEGER, key TEXT, place INTEGER, site TEXT, path TEXT,
    is_masked INTEGER
);
CREATE TABLE bodies (digest TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE tasks (
    key TEXT, place INTEGER, whose INTEGER, given INTEGER, PRIMARY KEY (key, place)
) WITHOUT ROWID;
CREATE INDEX of_whose ON tasks (key, whose);
"""
_SORTED = """
CREATE INDEX of_key ON exchanges (key, place, at);
CREATE INDEX of_site ON exchanges (site, path);
CREATE INDEX of_masked ON exchanges (key) WHERE is_masked;
"""

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class _Head(msgspec.Struct, forbid_unknown_fields=True):
    form: int


class _Foot(msgspec.Struct, forbid_unknown_fields=True):
    exchanges: int


_decode = msgspec.json.Decoder(Exchange).decode


class _Line(NamedTuple):
    at: int
    exchange: Exchange


def _refused(path: Path, reason: str) -> ConveyorError:
    return ConveyorError(ErrorCode.INVALID_ARGUMENT, f"{path}: {reason}")


def _unreadable(path: Path, error: OSError) -> ConveyorError:
    return _refused(path, f"cannot be read: {error.strerror}")


class _Thread:
    """Runs functions of one recording, one at a time, off the loop; a clock that is moved by hand
    waits for them."""

    def __init__(self, work: OpenWork | None) -> None:
        self._work = work
        self._limiter = CapacityLimiter(1)

    async def run(
        self, function: Callable[[Unpack[Arguments]], Result], *args: *Arguments
    ) -> Result:
        async with turn(self._work, OPERATIONS):
            return await to_thread.run_sync(function, *args, limiter=self._limiter)


# -- writing --


class DirectoryRecorder(Recorder):
    """Writes a recording into a directory. With `has_foot` it adds to one that has ended, which
    stays one that has ended after each addition."""

    def __init__(
        self,
        directory: Path,
        log: BinaryIO,
        thread: _Thread,
        *,
        written: int = 0,
        has_foot: bool = False,
    ) -> None:
        self._directory = directory
        self._log = log
        self._thread = thread
        self._written = written
        self._has_foot = has_foot

    def draft(self) -> _Draft:
        return _Draft(self._directory / BODIES, self._thread)

    async def append(self, exchange: Exchange, body: bytes | None = None) -> None:
        await self._thread.run(self._append, exchange, body)

    def _append(self, exchange: Exchange, body: bytes | None) -> None:
        if body is not None:
            digest = sha256(body).hexdigest()
            self._keep(self._directory / BODIES / digest, body)
            exchange = msgspec.structs.replace(exchange, body=digest)
        line = msgspec.json.encode(exchange) + b"\n"
        if self._has_foot:
            _replace_foot(self._log.fileno(), line + _foot(self._written + 1))
        else:
            self._log.write(line)
            self._log.flush()
        self._written += 1

    def _keep(self, path: Path, body: bytes) -> None:
        if path.exists():
            return
        descriptor, name = mkstemp(prefix=_DRAFT, dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(body)
        os.replace(name, path)

    async def aclose(self, *, is_whole: bool) -> None:
        await self._thread.run(self._close, is_whole)

    def _close(self, is_whole: bool) -> None:
        with self._log:
            if is_whole and not self._has_foot:
                self._log.write(_foot(self._written))
                self._log.flush()


def _foot(exchanges: int) -> bytes:
    return msgspec.json.encode(_Foot(exchanges)) + b"\n"


def _replace_foot(log: int, lines: bytes) -> None:
    """Write over the last line, at once: whoever is killed before or after leaves a whole file. If
    there is no room the last line stays."""
    end = os.fstat(log).st_size
    start = max(end - 256, 0)
    tail = os.pread(log, end - start, start)
    at = start + tail.rindex(b"\n", 0, -1) + 1
    try:
        if os.pwrite(log, lines, at) != len(lines):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        os.pwrite(log, tail[at - start :], at)
        os.ftruncate(log, end)
        raise


class _Draft:
    """A body under a name of its own, until it is kept under its digest."""

    def __init__(self, directory: Path, thread: _Thread) -> None:
        self._directory = directory
        self._path = directory
        self._thread = thread
        self._file: BinaryIO | None = None
        self._digest = sha256()

    async def write(self, piece: bytes) -> None:
        await self._thread.run(self._write, piece)

    def _write(self, piece: bytes) -> None:
        if self._file is None:
            descriptor, name = mkstemp(prefix=_DRAFT, dir=self._directory)
            self._file, self._path = os.fdopen(descriptor, "wb"), Path(name)
        self._file.write(piece)
        self._digest.update(piece)

    async def keep(self) -> str:
        return await self._thread.run(self._keep)

    def _keep(self) -> str:
        self._write(b"")
        assert self._file is not None  # opened by the write
        self._file.close()
        self._file = None
        digest = self._digest.hexdigest()
        self._path.replace(self._directory / digest)
        return digest

    async def drop(self) -> None:
        if self._file is not None:
            await self._thread.run(self._drop)

    def _drop(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
            self._path.unlink(missing_ok=True)


async def open_recorder(directory: Path, work: OpenWork | None = None) -> DirectoryRecorder:
    """Begin a recording. Raises ConveyorError for a directory that holds one already."""
    log = await to_thread.run_sync(_begin, directory)
    return DirectoryRecorder(directory, log, _Thread(work))


def _begin(directory: Path) -> BinaryIO:
    bodies, log = directory / BODIES, directory / LOG
    try:
        if os.path.lexists(log) or (bodies.is_dir() and any(bodies.iterdir())):
            raise _refused(directory, "holds a recording already; --record takes a new directory")
        bodies.mkdir(parents=True, exist_ok=True)
        file = log.open("x+b")
    except FileExistsError:
        raise _refused(directory, "holds another file where the recording belongs") from None
    except OSError as error:
        raise _refused(directory, f"cannot be written: {error.strerror}") from None
    _lock(directory, file, fcntl.LOCK_EX)
    file.write(msgspec.json.encode(_Head(FORM)) + b"\n")
    file.flush()
    return file


def _lock(directory: Path, log: BinaryIO, how: int) -> None:
    try:
        fcntl.flock(log, how | fcntl.LOCK_NB)
    except BlockingIOError:
        log.close()
        raise _refused(directory, "another server writes this recording") from None


# -- reading --


class DirectoryRecordings(Recordings):
    """Reads a recording that has been checked; where it stands with each task is forgotten with the
    process. With `recorder` exchanges are added that it does not answer from."""

    def __init__(
        self,
        directory: Path,
        log: BinaryIO,
        index: sqlite3.Connection,
        *,
        exchanges: int,
        work: OpenWork | None,
    ) -> None:
        self.exchanges = exchanges
        self._directory = directory
        self._log = log
        self._index = index
        self._thread = _Thread(work)

    async def following(self, key: str, order: int) -> Exchange | None:
        return await self._thread.run(self._following, key, order)

    async def alike(self, asked: Asked) -> str | None:
        return await self._thread.run(self._alike, asked)

    async def nearest(self, asked: Asked) -> Exchange | None:
        return await self._thread.run(self._nearest, asked)

    async def rewind(self) -> None:
        await self._thread.run(self._rewind)

    def body(self, digest: str) -> AbstractAsyncContextManager[tuple[Content, int]]:
        return self._body(digest)

    async def samples(self, most: int) -> list[str]:
        """Return some URLs that are answered with a page to a task of nothing but its URL."""
        return await self._thread.run(self._samples, most)

    async def aclose(self) -> None:
        await self._thread.run(self._close)

    def recorder(self) -> DirectoryRecorder:
        """Return a writer that adds to this recording."""
        file = (self._directory / LOG).open("r+b")
        return DirectoryRecorder(
            self._directory, file, self._thread, written=self.exchanges, has_foot=True
        )

    def _close(self) -> None:
        self._index.close()
        self._log.close()

    def _following(self, key: str, order: int) -> Exchange | None:
        ask = self._index.execute
        task = ask(
            "SELECT whose, given FROM tasks WHERE key = ? AND place = ?", (key, order)
        ).fetchone()
        place, given = task or (self._place(key, order), -1)
        if place is None:
            return None
        row = ask(
            "SELECT at, size FROM exchanges WHERE key = ? AND place = ? AND at > ? LIMIT 1",
            (key, place, given),
        ).fetchone()
        if row is None:  # after the last one it stays
            row = ask("SELECT at, size FROM exchanges WHERE at = ?", (given,)).fetchone()
        ask("INSERT OR REPLACE INTO tasks VALUES (?, ?, ?, ?)", (key, order, place, row[0]))
        return self._read(*row)

    def _place(self, key: str, order: int) -> int | None:
        """Return the place of the recorded task that a new one is answered as; None without any."""
        others = "NOT EXISTS (SELECT 1 FROM tasks t WHERE t.key = e.key AND t.whose = e.place)"
        for which, way in (("place = :place", "ASC"), (others, "ASC"), ("TRUE", "DESC")):
            found: tuple[int] | None = self._index.execute(
                f"SELECT place FROM exchanges e WHERE key = :key AND {which}"
                f" ORDER BY place {way} LIMIT 1",
                {"key": key, "place": order},
            ).fetchone()
            if found is not None:
                return found[0]
        return None

    def _alike(self, asked: Asked) -> str | None:
        rows = self._index.execute("SELECT at, size FROM exchanges WHERE is_masked GROUP BY key")
        found = (other for row in rows if _is_alike(asked, other := self._read(*row)))
        # The one that tells most of itself.
        most = max(found, key=lambda other: len(other.url.replace(MASK, "")), default=None)
        return None if most is None else most.key

    def _samples(self, most: int) -> list[str]:
        rows = self._index.execute("SELECT at, size FROM exchanges ORDER BY at LIMIT ?", (_SOME,))
        urls = (other.url for row in rows if _is_plain(other := self._read(*row)))
        return list(islice(dict.fromkeys(urls), most))

    def _rewind(self) -> None:
        self._index.execute("DELETE FROM tasks")

    def _nearest(self, asked: Asked) -> Exchange | None:
        site, path = _site(asked.url)
        near: list[tuple[int, int]] = []
        for bound, way in ((">=", "ASC"), ("<", "DESC")):
            near += self._index.execute(
                f"SELECT at, size FROM exchanges WHERE site = ? AND path {bound} ?"
                f" ORDER BY path {way} LIMIT {_NEAR}",
                (site, path),
            )
        exchanges = [self._read(*row) for row in near]
        return min(exchanges, key=lambda other: _distance(asked, other), default=None)

    def _read(self, at: int, size: int) -> Exchange:
        return _decode(os.pread(self._log.fileno(), size, at))

    @asynccontextmanager
    async def _body(self, digest: str) -> AsyncIterator[tuple[Content, int]]:
        path = self._directory / BODIES / digest
        file = await self._thread.run(lambda: path.open("rb"))
        try:
            size = os.fstat(file.fileno()).st_size
            if size <= SMALL:
                yield await self._thread.run(file.read), size
            else:
                yield self._pieces(file), size
        finally:
            file.close()

    async def _pieces(self, file: io.BufferedReader) -> AsyncIterator[bytes]:
        while piece := await self._thread.run(file.read, SMALL):
            yield piece


def _site(url: str) -> tuple[str, str]:
    scheme, mark, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    return (scheme + mark + authority.partition("?")[0]).lower(), slash + path


def _is_alike(asked: Asked, other: Exchange) -> bool:
    """Tell whether a request may be that of an exchange in which something was redacted beyond its
    own place."""
    is_body_alike = asked.body == other.posted or (
        "posted" in other.masked and bool(asked.body) and bool(other.posted)
    )
    return (
        is_body_alike
        and asked.method == other.method
        and other.url != MASK
        and _fits(other.url, asked.url)
        and _fits(_told(other.params), _told(asked.params))
    )


def _is_plain(exchange: Exchange) -> bool:
    """Tell whether a command of a shell's line can ask for a page by its URL alone."""
    url = exchange.url
    is_short = len(url) <= _SHORT and url.isascii() and url.isprintable()
    is_bare = exchange.method == "GET" and not (exchange.params or exchange.posted)
    is_open = not exchange.masked and MASK not in url
    return exchange.verdict is Verdict.OK and is_short and is_bare and is_open


def _told(params: dict[str, str]) -> str:
    return msgspec.json.encode(sorted(params.items())).decode()


def _fits(pattern: str, text: str) -> bool:
    """Tell whether a text is a redacted one, with any characters for what was redacted."""
    first, *rest = pattern.split(MASK)
    if not rest:
        return pattern == text
    if not text.startswith(first):
        return False
    at = len(first)
    for piece in rest[:-1]:
        at = text.find(piece, at)
        if at < 0:
            return False
        at += len(piece)
    return len(text) - at >= len(rest[-1]) and text.endswith(rest[-1])


def _distance(asked: Asked, other: Exchange) -> tuple[bool, int, bool, int, bool]:
    """Return how far a request is from an exchange: by method, by URL, by body, by params."""
    common = len(os.path.commonprefix([asked.url, other.url]))
    differing = len(set(asked.params.items()) ^ set(other.params.items()))
    return (
        asked.url.partition("?")[0] != other.url.partition("?")[0],
        -common,
        asked.method != other.method,
        differing,
        asked.body != other.posted,
    )


async def open_recordings(
    directory: Path, *, adds: bool = False, work: OpenWork | None = None
) -> DirectoryRecordings:
    """Open a recording to answer from; with `adds` it will be added to. Raises ConveyorError for
    one that is cut, of a newer form, or damaged."""
    log, index, exchanges = await to_thread.run_sync(_open, directory, adds)
    return DirectoryRecordings(directory, log, index, exchanges=exchanges, work=work)


def _open(directory: Path, adds: bool) -> tuple[BinaryIO, sqlite3.Connection, int]:
    try:
        with open_at_once(directory / LOG) as found:
            if not stat.S_ISREG(os.fstat(found.fileno()).st_mode):
                raise _refused(directory / LOG, "is no regular file")
        log = (directory / LOG).open("r+b" if adds else "rb")
    except FileNotFoundError:
        raise _refused(directory, f"holds no recording: there is no {LOG}") from None
    except OSError as error:
        raise _unreadable(directory / LOG, error) from None
    # An empty name makes a database in a temporary file, which the system removes.
    index = sqlite3.connect("", isolation_level=None, check_same_thread=False)
    try:
        _lock(directory, log, fcntl.LOCK_EX if adds else fcntl.LOCK_SH)
        index.executescript("PRAGMA cache_size = -2000; PRAGMA journal_mode = OFF;" + _INDEX)
        exchanges = _fill(directory, log, index)
        _check_bodies(directory, index)
    except BaseException as error:
        index.close()
        log.close()
        if isinstance(error, OSError):
            raise _unreadable(directory, error) from None
        raise
    return log, index, exchanges


def _fill(directory: Path, log: BinaryIO, index: sqlite3.Connection) -> int:
    found = 0
    index.execute("BEGIN")
    for at, exchange in _lines(directory / LOG, log):
        found += 1
        site, path = _site(exchange.url)
        key, order, is_masked = exchange.key, exchange.order, bool(exchange.masked)
        row = (at, log.tell() - at, key, order, site, path, is_masked)
        index.execute("INSERT INTO exchanges VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        if exchange.body:
            index.execute("INSERT OR IGNORE INTO bodies VALUES (?)", (exchange.body,))
    index.execute("COMMIT")
    index.executescript(_SORTED)
    return found


def _lines(path: Path, log: BinaryIO) -> Iterator[_Line]:
    """Yield the exchanges with their offsets; after each, `log.tell()` is the end of its line."""
    _check_head(path, log.readline(MOST_LINE))
    for number in count(2):
        at = log.tell()
        line = log.readline(MOST_LINE)
        if not line.endswith(b"\n"):
            raise _refused(path, "is cut: its last line does not say how many exchanges there are")
        with suppress(msgspec.DecodeError):
            foot = msgspec.json.decode(line, type=_Foot)
            if foot.exchanges != number - 2 or log.read(1):
                reason = f"says {foot.exchanges} exchanges in line {number}, but has others"
                raise _refused(path, reason)
            return
        try:
            exchange = _decode(line)
        except (msgspec.DecodeError, UnicodeError):
            raise _refused(path, f"line {number} is no exchange") from None
        if exchange.body and _DIGEST.fullmatch(exchange.body) is None:
            raise _refused(path, f"line {number} has a body that is no digest")
        if not _is_consistent(exchange):
            raise _refused(path, f"line {number} is no exchange")
        yield _Line(at, exchange)


_MOST_ORDER = 2**63 - 1
_REFUSED = frozenset({Verdict.FAILED, Verdict.POSTPONED})


def _is_consistent(exchange: Exchange) -> bool:
    """Tell whether an exchange has what its verdict asks for, and a place that can be looked up."""
    return (
        (exchange.verdict is Verdict.OK) == bool(exchange.body)
        and (exchange.verdict in _REFUSED) == (exchange.refusal is not None)
        and 0 <= exchange.order <= _MOST_ORDER
    )


def _check_head(path: Path, line: bytes) -> None:
    try:
        form = msgspec.json.decode(line, type=dict[str, object]).get("form")
    except (msgspec.DecodeError, UnicodeError):
        form = None
    if type(form) is not int or form < 1:
        raise _refused(path, "is no recording: its first line does not say the form")
    if form > FORM:
        raise _refused(path, f"is of form {form}; this version reads up to {FORM}")


def _check_bodies(directory: Path, index: sqlite3.Connection) -> None:
    for (digest,) in index.execute("SELECT digest FROM bodies"):
        path = directory / BODIES / digest
        try:
            with open_at_once(path) as file:
                found = file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:
            raise _refused(path, "is missing from the recording") from None
        except OSError as error:
            raise _unreadable(path, error) from None
        if found != digest:
            raise _refused(path, "does not fit its digest")
