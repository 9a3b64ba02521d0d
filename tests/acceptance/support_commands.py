"""Runs commands of `conveyor`, and servers of `conveyor-dev`, in forks of a program that has
imported their modules: importing is most of what a short command and the start of a server do, and
tests run hundreds.

Each is a process with an environment, standard streams and an exit code of its own.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import pkgutil
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO

import conveyor.client
import conveyor.dev.sqlite
from conveyor.cli import dev_main, main

PROGRAMS = {"conveyor": main, "conveyor-dev": dev_main}
_MOST = 1_048_576
"""Bytes of a request: a program, where it runs, its arguments and its environment."""
_LINE = 64
"""Bytes of an answer at most: the number of a process, and later its exit code."""
_LATE_IMPORTS = (
    *("anyio._backends._asyncio", "anyio.streams.tls", "certifi", "conveyor.clock"),
    *("encodings.idna", "httpcore"),
    *("aiofiles.tempfile", "conveyor.dev.binding", "conveyor.gateway.direct"),
    *("conveyor.gateway.landmarks", "conveyor.roles.banner", "conveyor.roles.dev"),
    *("uvicorn.lifespan.off", "uvloop"),
)
"""Modules that the client's, and those of a server, import when they are first used."""
Request = tuple[str, str, list[str], dict[str, str]]


class Fork:
    """A process that the program forked; for the words, see subprocess.Popen."""

    def __init__(self, told: socket.socket) -> None:
        self._told = told
        self._code: int | None = None
        self.pid = int(told.recv(_LINE))

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def wait(self, seconds: float | None = None) -> int:
        """Wait for the end; return the exit code, less than 0 for a signal. Raises
        TimeoutExpired."""
        if self._code is None:
            self._told.settimeout(seconds)
            try:
                said = self._told.recv(_LINE)
            except (BlockingIOError, TimeoutError):
                raise subprocess.TimeoutExpired(str(self.pid), seconds or 0.0) from None
            self._told.close()
            self._code = int(said)
        return self._code

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            # The program that forked may not have told of its end yet.
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        self.send_signal(signal.SIGKILL)


class Forks:
    """The program that forks. It ends with this process."""

    def __init__(self) -> None:
        self._socket, its_own = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its_own:
            self._program = subprocess.Popen(
                [sys.executable, "-m", __name__, str(its_own.fileno())],
                cwd=Path(__file__).parents[2],
                stdin=subprocess.DEVNULL,
                pass_fds=[its_own.fileno()],
            )
        atexit.register(self._end)

    def start(
        self,
        program: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        streams: Sequence[int],
    ) -> Fork:
        """Start one of PROGRAMS; `streams` are descriptors of its standard input, output and
        errors."""
        request: Request = (program, os.getcwd(), list(arguments), dict(environment))
        ours, its_own = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its_own:
            handed = [*streams, its_own.fileno()]
            socket.send_fds(self._socket, [json.dumps(request).encode()], handed)
        return Fork(ours)

    def run(
        self, arguments: Sequence[str], environment: Mapping[str, str], given: str, seconds: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end. Raises TimeoutExpired."""
        with (
            tempfile.TemporaryFile("w+") as out,
            tempfile.TemporaryFile("w+") as err,
            _giving(given) as stdin,
        ):
            streams = [stdin.fileno(), out.fileno(), err.fileno()]
            fork = self.start("conveyor", arguments, environment, streams)
            try:
                code = fork.wait(seconds)
            except subprocess.TimeoutExpired:
                fork.kill()
                raise
            return subprocess.CompletedProcess(list(arguments), code, _whole(out), _whole(err))

    def _end(self) -> None:
        self._socket.close()
        self._program.wait()


@cache
def forks() -> Forks:
    """The program of this process, which starts when it is first needed."""
    return Forks()


@contextmanager
def _giving(text: str) -> Iterator[IO[bytes]]:
    """Yield the end to read of a pipe through which a text goes."""
    reader, writer = os.pipe()

    def write() -> None:
        with suppress(BrokenPipeError), open(writer, "w") as pipe:
            pipe.write(text)

    thread = threading.Thread(target=write)
    thread.start()
    with open(reader, "rb") as pipe:
        yield pipe
    thread.join()


def _whole(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _wait_for_request(requests: socket.socket) -> Request:
    """Fork for each request; return in the fork, which is to run that program. Raises SystemExit
    once nobody can ask any more."""
    children: dict[int, int] = {}  # where to tell the exit code of each process
    ended, noted = socket.socketpair()
    noted.setblocking(False)
    before = signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(noted.fileno())
    with ended, noted, selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        selector.register(ended, selectors.EVENT_READ)
        while True:
            sources = [key.fileobj for key, _ in selector.select()]
            if ended in sources:
                ended.recv(_LINE)
                _tell_ends(children)
            if requests not in sources:
                continue
            data, handed, _, _ = socket.recv_fds(requests, _MOST, 4)
            if not data:
                sys.exit()
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, before)
                for number, descriptor in enumerate(handed[:3]):
                    os.dup2(descriptor, number)
                for descriptor in (*handed, *children.values()):
                    os.close(descriptor)
                request: Request = json.loads(data)
                return request
            os.write(handed[3], b"%d" % pid)
            children[pid] = handed[3]
            for descriptor in handed[:3]:
                os.close(descriptor)


def _tell_ends(children: dict[int, int]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        told = children.pop(pid)
        with suppress(OSError):  # nobody waits for a process that took too long
            os.write(told, b"%d" % os.waitstatus_to_exitcode(status))
        os.close(told)


def _become(request: Request) -> None:
    program, directory, arguments, environment = request
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    # Those of the program that forked may be files, these pipes.
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    PROGRAMS[program](arguments)


if __name__ == "__main__":
    for package in (conveyor.client, conveyor.dev.sqlite):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    for name in _LATE_IMPORTS:
        importlib.import_module(name)
    gc.freeze()  # what is never looked at is never copied
    with socket.socket(fileno=int(sys.argv[1])) as asked:
        found = _wait_for_request(asked)
    _become(found)
