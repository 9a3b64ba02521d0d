"""The data directory of a development server: its lock, its secret and its contents."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import shutil
import stat
import tempfile
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from conveyor.dev.sqlite.store import secret_problem
from conveyor.domain.api_keys import secret_bytes
from conveyor.domain.errors import ConveyorError, ErrorCode
from conveyor.ports.clock import Clock

SECRET_BYTES = 32

CONTENTS: dict[str, str] = {
    "lock": "the process id of the owner, under an exclusive lock",
    "secret": f"{SECRET_BYTES} random bytes in hexadecimal, made at the first start; not made "
    "where `CONVEYOR_SECRET` is set",
    "conveyor.db": "the database, with its `-wal` and `-shm` files beside it",
    "blobs/results/": "bodies: lifecycle class, job, run, the first five letters of the task id, "
    "then task id, dot, claim number",
    "blobs/staged/": "staged lists: job, run, then the index of a chunk's first task in 11 digits",
    "blobs/templates/": "lists of scheduled jobs: job, list, then the index of a chunk's first "
    "task in 11 digits; they stay as long as their job",
    "blobs/inputs/": "uploaded files, by the id of their file input",
    "blobs/exports/": "exports: job, run, then the id of the export",
    "blobs/tmp/": "blobs being written; emptied at every start",
    "clock": "the instant and the state of the ids of a clock that is moved by hand, as JSON; not "
    "made on the system's clock, of which a server notes in it that it has told of the other",
    "calls": "the gateway calls under way, in a table that is mapped into memory: the next start "
    "tells by it claims whose call had begun from claims that had only waited",
    "loading": "there while the directory is filled from a copy: no server starts over it, and the "
    "next load begins anew",
    "callbacks.jsonl": "notifications for state machines, a JSON object a line: `at` (ms), "
    "`task_token`, `succeeded`, and `output`, or `error` and `cause`",
}
"""The contents of a data directory, by path."""

_OURS = re.compile(
    r"lock|secret(?:\.new)?|conveyor\.db(?:-wal|-shm|-journal)?|blobs|calls(?:\.new)?|clock(?:\.new)?|loading|callbacks\.jsonl"
)
"""Names of what belongs into a data directory."""

_FILES = [name for name in CONTENTS if "/" not in name]

_TOLD = "told"
"""The note in the file of a clock that a server on the system's clock has told of it."""

LOADING = "loading"
"""The file that is there while a directory is filled from a copy: what is in it is not whole."""
_NOT_LOADED = "a copy was not loaded to its end: load it again, or remove the directory"

LEAST_FREE = 100_000_000
"""Bytes of a disk with less room than a server needs to begin to work."""
_PROBE = bytes(65_536)

_log = logging.getLogger("conveyor.dev")

_HEX_SECRET = re.compile(rf"[0-9a-fA-F]{{{2 * SECRET_BYTES}}}")


@dataclass(slots=True, repr=False)
class DataDirectory:
    """An open data directory, locked against every other server until `close`."""

    path: Path
    secret: bytes
    _lock: int

    @property
    def database(self) -> Path:
        """The SQLite file."""
        return self.path / "conveyor.db"

    @property
    def blobs(self) -> Path:
        """The root of the bodies."""
        return self.path / "blobs"

    @property
    def callbacks(self) -> Path:
        """The file of notifications for state machines."""
        return self.path / "callbacks.jsonl"

    @property
    def clock(self) -> Path:
        """The file of a clock that is moved by hand."""
        return self.path / "clock"

    def is_clock_told(self) -> bool:
        """Tell whether a server on the system's clock has told of the kept one since that ran."""
        return bool(self._kept_clock().get(_TOLD))

    def note_clock_told(self) -> None:
        """Note in the file of the kept clock that it was told of. A server that moves it writes the
        file anew, without the note. A damaged file stays as it is."""
        kept = self._kept_clock()
        if not kept:
            return
        aside = self.path / "clock.new"
        # Without the note the next start tells it again.
        with contextlib.suppress(OSError):
            aside.write_text(json.dumps({**kept, _TOLD: True}), "ascii")
            aside.replace(self.clock)

    def _kept_clock(self) -> dict[str, object]:
        try:
            kept = json.loads(self.clock.read_text("ascii"))
        except (OSError, ValueError):
            return {}
        return kept if isinstance(kept, dict) else {}

    @property
    def calls(self) -> Path:
        """The table of gateway calls under way."""
        return self.path / "calls"

    @classmethod
    def open(cls, path: Path, clock: Clock, *, secret: str = "") -> DataDirectory:
        """Open a directory, create it where it is missing, and lock it.

        With a `secret`, the one in the directory is neither read nor created.
        Raises ConveyorError: conflict where another server has the directory, unavailable where it
        cannot be used.
        """
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            problem = _misplaced(path)
            if problem is not None:
                raise _unusable(path, problem)
            lock = lock_directory(path)
        except FileExistsError:
            raise _unusable(path, "is not a directory") from None
        except OSError as error:
            raise _unusable(path, _reason(error)) from None
        try:
            if os.path.lexists(path / LOADING):
                raise _unusable(path, _NOT_LOADED)
            _shut(path)
            root_secret = secret_bytes(secret) if secret else _stored_secret(path, clock)
        except OSError as error:
            os.close(lock)
            raise _unusable(path, _reason(error)) from None
        except BaseException:
            os.close(lock)
            raise
        return cls(path, root_secret, lock)

    def close(self) -> None:
        """Unlock the directory. Closing twice is harmless."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __repr__(self) -> str:
        return f"DataDirectory({str(self.path)!r})"


def directory_problem(path: Path) -> str | None:
    """Say what would keep a server from using a data directory; None if nothing would. Changes
    nothing there."""
    place = _existing(path)
    if not place.is_dir():
        return f"{place} is not a directory"
    refused = _write_probe(place)
    if refused is not None and not _is_full(refused):
        return f"cannot write to {place}: {_reason(refused)}"
    if place != path.absolute():
        return None
    problem = _misplaced(path)
    if problem is not None:
        return problem
    try:
        _look_at_lock(path)
        if os.path.lexists(path / LOADING):
            return _NOT_LOADED
        secret = path / "secret"
        if secret.exists() and _HEX_SECRET.fullmatch(secret.read_text("ascii", "replace").strip()):
            return None
        return "its secret is damaged" if secret.exists() else None
    except OSError as error:
        return f"cannot read {path}: {_reason(error)}"
    except ConveyorError as error:
        return error.detail


def _misplaced(path: Path) -> str | None:
    """Say which part of a data directory is none, such as a pipe, for which a reader would wait;
    None if all may be what they should."""
    for name in _FILES:
        part = path / name
        if part.is_dir():
            return f"its {name} is a directory"
        if part.exists() and not part.is_file():
            return f"its {name} is no regular file"
    if os.path.lexists(path / "blobs") and not (path / "blobs").is_dir():
        return "its blobs is not a directory"
    return None


def kept_secret(path: Path) -> bytes | None:
    """Return the secret of a directory; None without one, or for one that is damaged."""
    with contextlib.suppress(OSError, ValueError), open_at_once(path / "secret") as file:
        text = file.read().decode("ascii").strip()
        return bytes.fromhex(text) if _HEX_SECRET.fullmatch(text) is not None else None
    return None


def open_at_once(path: Path) -> BufferedReader:
    """Open a file for reading. Of a pipe to which nobody writes nothing comes, and nothing is
    waited for. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    os.set_blocking(descriptor, True)
    return open(descriptor, "rb")


def disk_problem(path: Path) -> str | None:
    """Say why the disk of a data directory has no room for a server; None if it has."""
    place = _existing(path)
    refused = _write_probe(place) if place.is_dir() else None
    if refused is not None and _is_full(refused):
        return f"the disk of {place} is full"
    # A link to nowhere lies on the disk of its directory.
    disk = shutil.disk_usage(place if place.exists() else place.parent)
    # What is no disk, such as /proc, has no size.
    if disk.total and disk.free < LEAST_FREE:
        return f"the disk of {place} has {disk.free / 1e6:.0f} MB left"
    return None


def _existing(path: Path) -> Path:
    """Return the directory, or that above it in which it would be made."""
    whole = path.absolute()
    return next(place for place in (whole, *whole.parents) if os.path.lexists(place))


def _write_probe(place: Path) -> OSError | None:
    try:
        with tempfile.TemporaryFile(dir=place) as probe:
            probe.write(_PROBE)
            probe.flush()
    except OSError as error:
        return error
    return None


def _is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def _look_at_lock(path: Path) -> None:
    """Raises ConveyorError(conflict) where another server has the directory."""
    try:
        descriptor = os.open(path / "lock", os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _in_use(path, descriptor) from None
    finally:
        os.close(descriptor)


def _in_use(path: Path, lock: int) -> ConveyorError:
    owner = os.pread(lock, 20, 0).decode("ascii", "replace")
    by = f" (pid {owner})" if owner.isdigit() else ""
    return ConveyorError(ErrorCode.CONFLICT, f"{path} is in use by another conveyor-dev{by}")


def _shut(path: Path) -> None:
    """Take the right to enter from others: the directory holds keys and bodies. One that holds
    other files too is somebody's for another purpose, and is left as it is."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if not mode & 0o077:
        return
    try:
        if any(_OURS.fullmatch(name) is None for name in os.listdir(path)):
            reason = "it holds other files too"
        else:
            path.chmod(0o700)
            _log.warning("the data directory had mode %04o: closed it to others (0700)", mode)
            return
    except OSError as error:
        reason = _reason(error)
    _log.warning(
        "others can enter the data directory (mode %04o), and it stays so: %s", mode, reason
    )


def lock_directory(path: Path) -> int:
    """Keep everybody else out of a data directory until the descriptor returned is closed.

    Raises ConveyorError(conflict) where another process has it; OSError.
    """
    descriptor = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.fstat(descriptor).st_nlink:
            # Its owner removed it, after a copy that could not be loaded: it locks nothing now.
            raise _in_use(path, descriptor)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
    except BlockingIOError:
        refusal = _in_use(path, descriptor)
        os.close(descriptor)
        raise refusal from None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _stored_secret(path: Path, clock: Clock) -> bytes:
    file = path / "secret"
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except FileNotFoundError:
        # A new one would not open what is there, and would be in the way of the right one.
        problem = secret_problem(path / "conveyor.db", ())
        if problem is not None:
            raise ConveyorError(ErrorCode.CONFLICT, f"{path}: {problem}") from None
        return _make_secret(path, clock)
    with open(descriptor, encoding="ascii", errors="replace") as stream:
        if os.fstat(descriptor).st_mode & 0o077:
            os.fchmod(descriptor, 0o600)
        text = stream.read().strip()
    if _HEX_SECRET.fullmatch(text) is None:
        # Making another one would leave every sealed key in the database unreadable.
        raise _unusable(path, "its secret is damaged")
    return bytes.fromhex(text)


def _make_secret(path: Path, clock: Clock) -> bytes:
    secret = clock.token(SECRET_BYTES)
    aside = path / "secret.new"
    with contextlib.suppress(FileNotFoundError):
        aside.unlink()
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="ascii") as stream:
        stream.write(secret.hex() + "\n")
        stream.flush()
        os.fsync(descriptor)
    aside.rename(path / "secret")
    return secret


def _reason(error: OSError) -> str:
    return (error.strerror or "input/output error").lower()


def _unusable(path: Path, reason: str) -> ConveyorError:
    return ConveyorError(ErrorCode.UNAVAILABLE, f"cannot use {path} as data directory: {reason}")
