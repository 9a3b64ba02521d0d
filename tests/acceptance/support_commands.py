"""Runs commands of `conveyor` in forks of a program that has imported their modules: importing is
most of what a short command does, and tests run hundreds.

Each command is a process with an environment, standard streams and an exit code of its own.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import pkgutil
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
from conveyor.cli import main

_MOST = 1_048_576
"""Bytes of a request: where a command runs, its arguments and its environment."""
_LATE_IMPORTS = (
    *("anyio._backends._asyncio", "anyio.streams.tls", "certifi", "conveyor.clock"),
    *("encodings.idna", "httpcore"),
)
"""Modules that the client's own import when they are first used."""
Request = tuple[str, list[str], dict[str, str]]


class Forks:
    """The program that forks. It runs one command at a time, and ends with this process."""

    def __init__(self) -> None:
        self._socket, its_own = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._turn = threading.Lock()
        with its_own:
            self._program = subprocess.Popen(
                [sys.executable, "-m", __name__, str(its_own.fileno())],
                cwd=Path(__file__).parents[2],
                stdin=subprocess.DEVNULL,
                pass_fds=[its_own.fileno()],
            )
        atexit.register(self._end)

    def run(
        self, arguments: Sequence[str], environment: Mapping[str, str], given: str, seconds: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end. Raises TimeoutExpired."""
        request: Request = (os.getcwd(), list(arguments), dict(environment))
        with (
            tempfile.TemporaryFile("w+") as out,
            tempfile.TemporaryFile("w+") as err,
            _giving(given) as stdin,
            self._turn,
        ):
            ours, its_own = socket.socketpair()
            with ours, ours.makefile() as told:
                with its_own:
                    handed = [stdin.fileno(), out.fileno(), err.fileno(), its_own.fileno()]
                    socket.send_fds(self._socket, [json.dumps(request).encode()], handed)
                ours.settimeout(seconds)
                pid = int(told.readline())
                try:
                    code = int(told.readline())
                except TimeoutError:
                    os.kill(pid, signal.SIGKILL)
                    raise subprocess.TimeoutExpired(request[1], seconds) from None
            return subprocess.CompletedProcess(request[1], code, _whole(out), _whole(err))

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
    """Fork for each request; return in the fork, which is to run that command. Raises SystemExit
    once nobody can ask any more."""
    while True:
        data, handed, _, _ = socket.recv_fds(requests, _MOST, 4)
        if not data:
            sys.exit()
        pid = os.fork()
        if pid == 0:
            for number, descriptor in enumerate(handed[:3]):
                os.dup2(descriptor, number)
        else:
            os.write(handed[3], b"%d\n" % pid)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with suppress(OSError):  # nobody waits for a command that took too long
                os.write(handed[3], b"%d\n" % code)
        for descriptor in handed:
            os.close(descriptor)
        if pid == 0:
            request: Request = json.loads(data)
            return request


def _become_command(request: Request) -> None:
    directory, arguments, environment = request
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 (the process's own)
    main(arguments)


if __name__ == "__main__":
    modules = pkgutil.iter_modules(conveyor.client.__path__, "conveyor.client.")
    for name in (*(module.name for module in modules), *_LATE_IMPORTS):
        importlib.import_module(name)
    gc.freeze()  # what is never looked at is never copied
    with socket.socket(fileno=int(sys.argv[1])) as asked:
        found = _wait_for_request(asked)
    _become_command(found)
