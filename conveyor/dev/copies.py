"""Copies of a data directory: one file with the database, the bodies and the secret.

A copy of a running server is of one instant. Bodies are linked aside, first all of them, then,
while nobody can write to the database, those that came meanwhile; from there on nothing that the
database names can go away. The file is a tar, which any compression may wrap.
"""

from __future__ import annotations

import bz2
import contextlib
import errno
import gzip
import hashlib
import lzma
import os
import shutil
import sqlite3
import tarfile
import zlib
from collections.abc import Callable, Iterator
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import IO

import msgspec

from conveyor import __version__
from conveyor.dev.directory import LOADING, SECRET_BYTES, lock_directory, open_at_once
from conveyor.dev.sqlite.schema import STEPS, check_version, migrate
from conveyor.domain.api_keys import caller_id, derive_key, fingerprint
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.domain.text_rules import quoted
from conveyor.ports.clock import Clock
from conveyor.records.blob_keys import checked_key

FORM = 1
"""The form of the file. A newer one is refused."""
ABOUT, DATABASE, BLOBS, SECRET = "copy.json", "conveyor.db", "blobs", "secret"
_CLOCK, _CALLBACKS, _LOCK = "clock", "callbacks.jsonl", "lock"
_FILES = (SECRET, _CLOCK, _CALLBACKS, DATABASE)
_INPUTS = "inputs/"
_PRIVATE = (
    "notices",
    "signing_keys",
    "idempotency_keys",
    "root_secrets",
    "job_inputs",
    "daily_tasks",
    "closed_hosts",
)
"""The tables of which a copy for sharing has no row of before."""
_CALLERS = """
    SELECT caller FROM (
        SELECT caller, job_id, 0 AS is_job_gone FROM jobs
        UNION ALL SELECT caller, job_id, 1 FROM runs
        UNION ALL SELECT caller, job_id, 1 FROM deliveries)
    WHERE caller <> '' GROUP BY caller ORDER BY min(is_job_gone), min(job_id)
"""
"""All callers, in the order of their first jobs; last those whose jobs are all gone."""
_DIGEST = "CONVEYOR.sha256"
"""The record of an entry's extended header that has the digest of its content."""
_Reader = BufferedReader | gzip.GzipFile | bz2.BZ2File | lzma.LZMAFile
_OPENERS: dict[bytes, Callable[[IO[bytes]], _Reader]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ": lzma.open,
}
"""The readers of compressed files, by the first bytes of those: they check what they read, which
tarfile's own do not."""
_NAMES_AMISS = {errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG}
"""The system's answers to names that cannot stand beside each other, or at all."""
_WAIT = 30.0
"""Seconds to wait for a moment in which the server writes nothing."""
_PIECE = 1 << 20


class AboutCopy(msgspec.Struct, frozen=True):
    """The head of a copy: its form, and the version and the schema of what made it."""

    form: int
    version: str
    schema: int
    for_sharing: bool


class SavedCopy(msgspec.Struct, frozen=True):
    """A copy that was made: its bytes, whether it has the root secret in it, and the API keys under
    which a copy for sharing shows the jobs of its callers."""

    size: int
    has_secret: bool
    keys: tuple[str, ...] = ()


def save_copy(directory: Path, file: Path, clock: Clock, *, for_sharing: bool = False) -> SavedCopy:
    """Copy a data directory into a new file, whether its server runs or not.

    A copy `for_sharing` has a secret of its own, no key of anybody, and callers by new names.
    Raises ConveyorError where there is no data, the file is there already, or either cannot be
    used.
    """
    if not (directory / DATABASE).is_file():
        raise _refused(f"there is no data in {directory}")
    if file.exists():
        raise _refused(f"{file} is there already, and a copy is never written over")
    name = clock.token(8).hex()
    stage = directory / BLOBS / "tmp" / f"copy-{name}"
    part = file.with_name(f"{file.name}.{name}.part")
    try:
        stage.mkdir(mode=0o700, parents=True)
        saved = _write_copy(directory, stage, part, clock, for_sharing=for_sharing)
        part.rename(file)
    except FileNotFoundError as error:
        gone = stage.exists() and f"{error.filename}: {(error.strerror or '').lower()}"
        raise _refused(gone or "the server was started meanwhile: make the copy again") from None
    except sqlite3.Error as error:
        raise _refused(f"{directory / DATABASE} cannot be copied: {error}") from None
    finally:
        shutil.rmtree(stage, ignore_errors=True)
        part.unlink(missing_ok=True)
    return saved


def _write_copy(
    directory: Path, stage: Path, part: Path, clock: Clock, *, for_sharing: bool
) -> SavedCopy:
    copied = stage / DATABASE
    with (
        _pinned(directory, stage / BLOBS) as reader,
        contextlib.closing(_connect(copied, mode="rwc")) as target,
    ):
        # The snapshot of its transaction, whatever is written meanwhile.
        reader.backup(target)
        target.execute("PRAGMA journal_mode = DELETE").fetchone()
    secret = _secret_of(directory)
    keys: tuple[str, ...] = ()
    if for_sharing:
        secret = clock.token(SECRET_BYTES)
        keys = _share(copied, secret)
    about = AboutCopy(FORM, __version__, len(STEPS), for_sharing)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as stream:
        with tarfile.open(fileobj=stream, mode="w|", bufsize=_PIECE) as tar:
            at = clock.now() // 1_000
            _add(tar, ABOUT, BytesIO(msgspec.json.encode(about)), at)
            if secret is not None:
                _add(tar, SECRET, BytesIO(f"{secret.hex()}\n".encode()), at)
            for name in (_CLOCK,) if for_sharing else (_CLOCK, _CALLBACKS):
                with contextlib.suppress(FileNotFoundError), open(directory / name, "rb") as kept:
                    _add(tar, name, kept, at)
            for key in _keys(stage / BLOBS):
                if for_sharing and key.startswith(_INPUTS):
                    continue
                with open(stage / BLOBS / key, "rb") as body:
                    _add(tar, f"{BLOBS}/{key}", body, at)
            # Last: a file without it was cut off.
            with open(copied, "rb") as database:
                _add(tar, DATABASE, database, at)
        stream.flush()
        os.fsync(descriptor)
        size = os.fstat(descriptor).st_size
    return SavedCopy(size, secret is not None, keys)


@contextlib.contextmanager
def _pinned(directory: Path, linked: Path) -> Iterator[sqlite3.Connection]:
    """Yield a connection whose transaction sees one instant, with the bodies of that instant linked
    aside."""
    with (
        contextlib.closing(_connect(directory / DATABASE)) as writer,
        contextlib.closing(_connect(directory / DATABASE)) as reader,
    ):
        check_version(reader, may_be_new=False)
        seen: dict[str, int | None] = {}
        _link(directory / BLOBS, linked, seen)
        writer.execute("BEGIN IMMEDIATE")
        try:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM sqlite_schema").fetchone()
            _link(directory / BLOBS, linked, seen)
        finally:
            writer.execute("ROLLBACK")
        yield reader
        reader.execute("ROLLBACK")


def _connect(path: Path, *, mode: str = "rw") -> sqlite3.Connection:
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}", uri=True, isolation_level=None, timeout=_WAIT
    )


def _link(root: Path, linked: Path, seen: dict[str, int | None]) -> None:
    """Link every body that is not linked yet. Where the file system has no links, `seen` keeps
    the bytes copied, and a body that has grown is copied again."""
    linked.mkdir(mode=0o700, exist_ok=True)
    for key in _keys(root):
        # Removed since it was listed: the database does not name it any more.
        with contextlib.suppress(FileNotFoundError):
            if key in seen and seen[key] in (None, (root / key).stat().st_size):
                continue
            target = linked / key
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            seen[key] = _link_one(root / key, target)


def _link_one(body: Path, target: Path) -> int | None:
    try:
        os.link(body, target)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without links
        shutil.copyfile(body, target)
        return target.stat().st_size
    return None


def _keys(root: Path) -> Iterator[str]:
    """List the bodies below a directory, but what is not whole yet."""
    start = len(str(root)) + 1
    for folder, folders, names in os.walk(root):
        if len(folder) < start:
            folders[:] = [name for name in folders if name != "tmp"]
        folders.sort()
        for name in sorted(names):
            yield f"{folder}/{name}"[start:]


def _add(tar: tarfile.TarFile, name: str, content: IO[bytes], at: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = content.seek(0, os.SEEK_END)
    content.seek(0)
    digest, left = hashlib.sha256(), entry.size
    while left:  # not to the end: a file of many bodies grows meanwhile
        piece = content.read(min(left, _PIECE))
        if not piece:
            raise _refused(f"{name} became shorter while it was copied")
        digest.update(piece)
        left -= len(piece)
    entry.pax_headers = {_DIGEST: digest.hexdigest()}
    content.seek(0)
    entry.mode, entry.mtime = 0o600, at
    tar.addfile(entry, content)


def _secret_of(directory: Path) -> bytes | None:
    """Read the secret of a directory; None where it is given by the environment."""
    try:
        return bytes.fromhex((directory / SECRET).read_text("ascii").strip())
    except FileNotFoundError:
        return None
    except ValueError:
        raise _refused(f"the secret in {directory} is damaged") from None


_PAUSE_SCHEDULES = """
    UPDATE jobs
    SET scheduling = json_remove(json_set(scheduling, '$.paused', json('true')), '$.key_hash')
    WHERE scheduling IS NOT NULL
"""
"""No key is there to fire with; `key_hash` is that of the caller's own key."""


def _share(database: Path, secret: bytes) -> tuple[str, ...]:
    """Take out of a database what is nobody else's business; return the new names of its callers,
    which are API keys under the secret."""
    with contextlib.closing(_connect(database)) as connection:
        migrate(connection)
        connection.execute("PRAGMA secure_delete = ON").fetchone()
        callers = connection.execute(_CALLERS).fetchall()
        naming = derive_key(secret, "callers")
        keys = tuple(f"caller-{number}" for number in range(1, len(callers) + 1))
        connection.execute("BEGIN")
        for (caller,), key in zip(callers, keys, strict=True):
            _rename(connection, caller, caller_id(naming, key))
        connection.execute("UPDATE jobs SET sealed_key = x'', callback = NULL, webhook = NULL")
        connection.execute(_PAUSE_SCHEDULES)
        # Without a key, their tasks would all fail at the first start.
        connection.execute("UPDATE runs SET paused = 1 WHERE status IN ('running', 'pending')")
        connection.execute("DELETE FROM deliveries WHERE status = 'pending'")
        for table in _PRIVATE:
            connection.execute(f"DELETE FROM {table}")
        connection.execute(
            "INSERT INTO root_secrets (fingerprint) VALUES (?)", (fingerprint(secret),)
        )
        connection.execute("COMMIT")
        connection.execute("VACUUM")
    return keys


def _rename(connection: sqlite3.Connection, before: str, after: str) -> None:
    for table in ("jobs", "runs", "deliveries"):
        connection.execute(f"UPDATE {table} SET caller = ? WHERE caller = ?", (after, before))
    connection.execute(
        "UPDATE deliveries SET record = replace(record, ?, ?) WHERE caller = ?",
        (before, after, after),
    )


def check_empty(directory: Path) -> None:
    """Raise ConveyorError(conflict) for a directory with anything but a lock in it, or what a load
    left that was killed; it may be missing."""
    names = set(os.listdir(directory)) if directory.is_dir() else set()
    ours = {_LOCK, LOADING, BLOBS, *_FILES} if LOADING in names else {_LOCK}
    if directory.is_symlink() or names - ours:
        raise _refused(f"{directory} is not empty: only an empty directory is filled")


def load_copy(file: Path, directory: Path) -> AboutCopy:
    """Fill an empty or missing directory from a copy; the next start brings it to the present
    schema.

    Raises ConveyorError, and leaves nothing behind, where the directory has anything in it or is
    in use, or the file is no whole copy or of a newer version.
    """
    was_there = directory.is_dir()
    check_empty(directory)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = lock_directory(directory)
    try:
        # Again: only from here on does nobody else fill it.
        check_empty(directory)
        return _fill(directory, file, was_there=was_there)
    finally:
        os.close(lock)


def _fill(directory: Path, file: Path, *, was_there: bool) -> AboutCopy:
    """Fill a directory that is locked; empty it again where that fails."""
    try:
        directory.chmod(0o700)
        if (directory / LOADING).exists():
            _remove(directory)
        (directory / LOADING).touch(mode=0o600)
        with open_at_once(file) as raw, _opened(raw) as stream:
            with tarfile.open(fileobj=stream, mode="r|", bufsize=_PIECE) as tar:
                about = _unpack(tar, directory, file)
            while stream.read(_PIECE):  # up to the checksum of a compressed file
                pass
        _check_database(directory / DATABASE)
        (directory / LOADING).unlink()
    except BaseException as error:
        _empty(directory, was_there=was_there)
        if not _is_damage(error):
            raise
        raise _refused(f"{file} is cut off or damaged, or no copy of Conveyor's data") from None
    return about


def _opened(raw: BufferedReader) -> _Reader:
    """Open a file that any compression may wrap."""
    head = raw.peek(8)
    for begin, opener in _OPENERS.items():
        if head.startswith(begin):
            return opener(raw)
    return raw


def _is_damage(error: BaseException) -> bool:
    """Tell what a damaged file raises from what the disk does: only the latter has a number."""
    damage = (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, sqlite3.Error)
    return isinstance(error, damage) or (isinstance(error, OSError) and error.errno is None)


def _check_database(path: Path) -> None:
    with contextlib.closing(_connect(path)) as connection:
        check_version(connection)
        is_new = connection.execute("PRAGMA user_version").fetchone() == (0,)
        if is_new or connection.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
            raise sqlite3.DatabaseError("damaged")


def _empty(directory: Path, *, was_there: bool) -> None:
    _remove(directory)
    for name in (LOADING, _LOCK):
        (directory / name).unlink(missing_ok=True)
    if not was_there:
        directory.rmdir()


def _remove(directory: Path) -> None:
    """Remove all that comes from a copy."""
    for name in _FILES:
        (directory / name).unlink(missing_ok=True)
    shutil.rmtree(directory / BLOBS, ignore_errors=True)


def _unpack(tar: tarfile.TarFile, directory: Path, file: Path) -> AboutCopy:
    entries = iter(tar)
    about = _about(tar, next(entries, None), file)
    (directory / BLOBS).mkdir(mode=0o700)
    last = ""
    for entry in entries:
        content = tar.extractfile(entry)
        if content is None or not _is_ours(entry.name):
            raise tarfile.ReadError("a file that no copy has")
        with open(_made(directory / entry.name), "wb") as target:
            digest = hashlib.sha256()
            while piece := content.read(_PIECE):
                digest.update(piece)
                target.write(piece)
        _check_digest(entry, digest.hexdigest())
        last = entry.name
    if last != DATABASE:
        raise tarfile.ReadError("cut off")
    return about


def _made(path: Path) -> int:
    """Make a file of a copy, and the directories above it."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        if error.errno in _NAMES_AMISS:
            raise tarfile.ReadError(f"no name of a copy: {error.strerror}") from None
        raise


def _about(tar: tarfile.TarFile, first: tarfile.TarInfo | None, file: Path) -> AboutCopy:
    content = tar.extractfile(first) if first is not None and first.name == ABOUT else None
    if first is None or content is None:
        raise tarfile.ReadError("no copy")
    document = content.read(_PIECE)
    try:
        about = msgspec.json.decode(document, type=AboutCopy)
    except msgspec.DecodeError:
        raise tarfile.ReadError("no copy") from None
    if about.form > FORM or about.schema > len(STEPS):
        text = f"{file} was made by a newer Conveyor ({quoted(about.version)}): load it with that"
        raise _refused(text)
    _check_digest(first, hashlib.sha256(document).hexdigest())
    return about


def _check_digest(entry: tarfile.TarInfo, found: str) -> None:
    if entry.pax_headers.get(_DIGEST) != found:
        raise tarfile.ReadError("damaged")


def _is_ours(name: str) -> bool:
    folder, _, key = name.partition("/")
    if not key:
        return name in _FILES
    try:
        return folder == BLOBS and bool(checked_key(key))
    except ValueError:
        return False


def _refused(text: str) -> ConveyorError:
    return ConveyorError(ErrorCode.CONFLICT, text)
