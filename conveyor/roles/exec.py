"""`conveyor-dev exec`: run a command against a server of its own, and leave nothing behind."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec

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
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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


class _Signals:
    """The signals that this process has got, in their order, in place of their usual effect."""

    def __init__(self, wakes: socket.socket) -> None:
        self._wakes = wakes
        self.stopped_by = 0
        """The first signal that asked to stop, if one did."""

    def wait(self, *streams: int) -> list[int]:
        """Wait for a signal, or for something to read from the streams; return the new signals that
        ask to stop. The end of a child is a signal too."""
        select.select([self._wakes.fileno(), *streams], [], [])
        numbers: list[int] = []
        with suppress(BlockingIOError):
            numbers = [number for number in self._wakes.recv(4_096) if number in _PASSED_ON]
        if numbers and not self.stopped_by:
            self.stopped_by = numbers[0]
        return numbers


@contextmanager
def _signals() -> Iterator[_Signals]:
    """Keep signals from ending this process. One that is ignored stays so."""
    wakes, written = socket.socketpair()
    with wakes, written:
        wakes.setblocking(False)
        written.setblocking(False)
        before = {number: signal.getsignal(number) for number in (*_PASSED_ON, signal.SIGCHLD)}
        # Each number is written by the wakeup below.
        for number, handler in before.items():
            if handler is not signal.SIG_IGN or number == signal.SIGCHLD:
                signal.signal(number, lambda _number, _frame: None)
        wakeup = signal.set_wakeup_fd(written.fileno(), warn_on_full_buffer=False)
        try:
            yield _Signals(wakes)
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)


def run_with_server(command: Sequence[str], flags: Sequence[str]) -> int:
    """Run a command against a new server; return its exit code, 128 and the signal's number if one
    ended it, 126 or 127 if it cannot be run, or 70 if the server failed.

    `flags` are those of conveyor-dev. Prints nothing but the last lines of a server that failed,
    and why a command cannot be run.
    """
    if shutil.which(command[0]) is None:
        is_there = os.path.exists(command[0])
        _say(f"conveyor-dev: exec: {command[0]}: {'cannot be run' if is_there else 'not found'}")
        return NOT_EXECUTABLE if is_there else NOT_FOUND
    with ExitStack() as stack:
        signals = stack.enter_context(_signals())
        made = TemporaryDirectory(prefix="conveyor-exec-", ignore_cleanup_errors=True)
        directory = Path(stack.enter_context(made))
        server = _start(directory, flags)
        stack.callback(server.stop)
        info = _ready(server, signals)
        if info is not None:
            code = _run(command, info, server, signals)
            if code is not None:
                return code
        elif signals.stopped_by:
            return BY_SIGNAL + signals.stopped_by
        server.stop()
        for line in server.last_lines():
            _say(line)
        return SERVER_FAILED


def _say(line: str) -> None:
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def _start(directory: Path, flags: Sequence[str]) -> _Server:
    log = directory / "server.log"
    own = ["--host", "127.0.0.1", "--port", "0", "--json", "--data-dir", str(directory / "data")]
    with log.open("wb") as written:
        # In a session of its own: the keys of a terminal are for the command.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "conveyor", "dev", *flags, *own],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=written,
            start_new_session=True,
        )
    return _Server(process, log)


def _ready(server: _Server, signals: _Signals) -> ServerInfo | None:
    """Wait until the server answers; None if it failed or is not wanted any more."""
    output = server.process.stdout
    assert output is not None
    line = b""
    while not line.endswith(b"\n"):
        if signals.wait(output.fileno()):
            return None
        if not select.select([output], [], [], 0)[0]:
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
        process = subprocess.Popen(command, env=environment)
    except OSError as error:
        _say(f"conveyor-dev: exec: {command[0]}: {error.strerror}")
        return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
    while process.poll() is None:
        if server.has_failed:
            process.terminate()
            _wait(process)
            return None
        for number in signals.wait():
            # The terminal has sent an interruption to the command itself.
            if number != signal.SIGINT or not _is_in_foreground():
                with suppress(ProcessLookupError):
                    process.send_signal(number)
    code = process.wait()
    return code if code >= 0 else BY_SIGNAL - code


def _is_in_foreground() -> bool:
    """Return whether the keys of a terminal reach this process and its command."""
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return False
