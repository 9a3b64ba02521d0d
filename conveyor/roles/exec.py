"""`conveyor-dev exec`: run a command against a server of its own, and leave nothing behind."""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import NamedTuple

import msgspec

from conveyor.bootstrap.recording import CUT_SHORT, WITHHELD
from conveyor.http.middleware import DEV_PATH
from conveyor.roles.dev import ServerInfo
from conveyor.settings import command_environment

SERVER_FAILED = 70
NOT_FOUND = 127
NOT_EXECUTABLE = 126
BY_SIGNAL = 128
"""Added to the number of the signal that ended a command."""
LAST_LINES = 50
END_SECONDS = 30.0
"""Seconds in which the server, or a command whose server failed, must have ended once asked."""
LOOKS_EVERY = 0.05
"""Seconds between two looks at the signals while the server starts."""
_PASSED_ON = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_PREFIX = "conveyor-exec-"
_OWNER, _DATA = "owner", "data"
_SIGNAL_AT_END_OF_PARENT = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


class _Server(NamedTuple):
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def has_failed(self) -> bool:
        return self.process.poll() is not None

    def stop(self) -> None:
        """End the server; return once it has ended."""
        if self.process.poll() is None:
            self.process.terminate()
        _wait(self.process)

    def end(self) -> str:
        """Say how it ended."""
        code = self.process.wait()
        return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"

    def farewell(self) -> list[str]:
        """Return what it said of its recording, once it has ended."""
        return [line for line in self.last_lines() if line.startswith((WITHHELD, CUT_SHORT))]

    def last_lines(self) -> list[str]:
        """Return the end of what it has written."""
        with self.log.open(encoding="utf-8", errors="replace") as file:
            return [line.rstrip("\n") for line in deque(file, LAST_LINES)]


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for the end of a process that was asked to end; kill one that does not."""
    try:
        return process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


class _Signal(NamedTuple):
    number: int
    reached_command: bool
    """The terminal sends what its keys ask for to the command itself."""


class _Signals:
    """The signals that this process gets, one by one, in place of their usual effect."""

    def __init__(self, awaited: Collection[signal.Signals], former: Collection[int]) -> None:
        self._awaited = awaited
        self._former = former
        self.stopped_by = 0
        """The first signal that asked to stop, if one did."""

    def wait(self) -> _Signal | None:
        """Wait for a signal; return it unless it tells of the end of a child."""
        return self._read(signal.sigwaitinfo(self._awaited))

    def next(self) -> _Signal | None:
        """Return a signal if there is one, other than the end of a child."""
        found = signal.sigtimedwait(self._awaited, 0)
        return None if found is None else self._read(found)

    def _read(self, found: signal.struct_siginfo) -> _Signal | None:
        number = found.si_signo
        if number == signal.SIGCHLD:
            return None
        self.stopped_by = self.stopped_by or number
        # The kernel sends for a terminal, to all in its foreground. Of its end it tells only the
        # leader of a session.
        is_alone = number == signal.SIGHUP and os.getsid(0) == os.getpid()
        return _Signal(number, found.si_code > 0 and not is_alone)

    def forget(self) -> None:
        """Take those that nobody waits for any more."""
        while signal.sigtimedwait(self._awaited, 0) is not None:
            pass

    def let_through(self) -> None:
        """Have a new child get signals as this process did before."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._former)

    def let_through_to_server(self) -> None:
        """Have a new child get signals, and SIGTERM at the end of this process."""
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_SIGNAL_AT_END_OF_PARENT, signal.SIGTERM)
        self.let_through()


@contextmanager
def _signals() -> Iterator[_Signals]:
    """Keep signals from ending this process. One that is ignored stays so."""
    awaited = {number for number in _PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN}
    awaited.add(signal.SIGCHLD)
    of_children = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signals = _Signals(awaited, signal.pthread_sigmask(signal.SIG_BLOCK, awaited))
    try:
        yield signals
    finally:
        signals.forget()
        signals.let_through()
        signal.signal(signal.SIGCHLD, of_children)


def run_with_server(command: Sequence[str], flags: Sequence[str]) -> int:
    """Run a command against a new server; return its exit code, 128 and the signal's number if one
    ended it, 126 or 127 if it cannot be run, or 70 if the server failed.

    `flags` are those of conveyor-dev. Prints nothing but the last lines of a server that failed,
    why a command cannot be run, and which answers were not recorded.
    """
    if not hasattr(signal, "sigwaitinfo"):
        _say("conveyor-dev: exec: needs a system that tells who sent a signal, such as Linux")
        return NOT_EXECUTABLE
    if shutil.which(command[0]) is None:
        is_there = os.path.exists(command[0])
        _say(f"conveyor-dev: exec: {command[0]}: {'cannot be run' if is_there else 'not found'}")
        return NOT_EXECUTABLE if is_there else NOT_FOUND
    with ExitStack() as stack:
        signals = stack.enter_context(_signals())
        directory = stack.enter_context(_own_directory())
        server = _start(directory, flags, signals)
        stack.callback(server.stop)
        info = _ready(server, signals)
        if info is not None:
            code = _run(command, info, server, signals)
            if code is not None:
                server.stop()
                for line in server.farewell():
                    _say(f"conveyor-dev: exec: {line}")
                return code
        elif signals.stopped_by:
            return BY_SIGNAL + signals.stopped_by
        server.stop()
        for line in server.last_lines():
            _say(line)
        _say(f"conveyor-dev: exec: the server {server.end()}")
        return SERVER_FAILED


@contextmanager
def _own_directory() -> Iterator[Path]:
    """Make a temporary directory, and remove it in the end; first remove those of others that were
    killed."""
    _remove_abandoned(gettempdir())
    made = TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True)
    directory = Path(made.name)
    new = directory / f"{_OWNER}.new"
    new.touch(mode=0o600)
    lock = _locked(new)
    # Whoever finds the file under its name finds it locked.
    new.rename(directory / _OWNER)
    try:
        yield directory
    finally:
        made.cleanup()
        os.close(lock)


def _remove_abandoned(folder: str) -> None:
    """Remove directories of this user whose owner and server both are gone."""
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return  # one may be allowed to write there, and not to look
    for found in entries:
        # Another may remove it at the same time, or have it; neither is for whoever runs a command.
        with suppress(OSError), ExitStack() as locks:
            is_ours = found.name.startswith(_PREFIX) and found.is_dir(follow_symlinks=False)
            if not is_ours or found.stat(follow_symlinks=False).st_uid != os.geteuid():
                continue
            locks.callback(os.close, _locked(Path(found.path, _OWNER)))
            of_server = Path(found.path, _DATA, "lock")
            if of_server.exists():
                locks.callback(os.close, _locked(of_server))
            shutil.rmtree(found.path, ignore_errors=True)


def _locked(path: Path) -> int:
    """Lock a file that is there, until the descriptor returned is closed. Raises OSError, also
    where another process has the lock."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _say(line: str) -> None:
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def _start(directory: Path, flags: Sequence[str], signals: _Signals) -> _Server:
    log = directory / "server.log"
    own = ["--host", "127.0.0.1", "--port", "0", "--json", "--data-dir", str(directory / _DATA)]
    with log.open("wb") as written:
        # In a session of its own: the keys of a terminal are for the command.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "conveyor", "dev", *flags, *own],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=written,
            start_new_session=True,
            preexec_fn=signals.let_through_to_server,
        )
    return _Server(process, log)


def _ready(server: _Server, signals: _Signals) -> ServerInfo | None:
    """Wait until the server answers; None if it failed or is not wanted any more."""
    output = server.process.stdout
    assert output is not None
    line = b""
    while not line.endswith(b"\n"):
        if signals.next() is not None:
            return None
        if not select.select([output], [], [], LOOKS_EVERY)[0]:
            continue
        piece = os.read(output.fileno(), 65_536)
        if not piece:
            return None
        line += piece
    return msgspec.json.decode(line, type=ServerInfo)


def _run(
    command: Sequence[str], info: ServerInfo, server: _Server, signals: _Signals
) -> int | None:
    """Run the command to its end; return its exit code, or None if the server failed before it."""
    dev_url = f"{info.api.removesuffix('/v1')}{DEV_PATH}"
    environment = command_environment(info.api, dev_url, info.dev_token)
    try:
        process = subprocess.Popen(command, env=environment, preexec_fn=signals.let_through)
    except OSError as error:
        _say(f"conveyor-dev: exec: {command[0]}: {error.strerror}")
        return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
    while process.poll() is None:
        if server.has_failed:
            process.terminate()
            _wait(process)
            return None
        found = signals.wait()
        if found is not None and not found.reached_command:
            with suppress(ProcessLookupError):
                process.send_signal(found.number)
    code = process.wait()
    return code if code >= 0 else BY_SIGNAL - code
