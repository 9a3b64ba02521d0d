"""`conveyor-dev` as a process of its own, for tests that signal or kill it."""

from __future__ import annotations

import selectors
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Self

import msgspec

from conveyor.roles.dev import ServerInfo

BOOT_TIMEOUT = 30.0
PROGRAM = "from conveyor.cli import dev_main; dev_main()"


class ServerProcess:
    """A child on a free port: ready once entered, gone once left. `info` is its line of JSON.

    `environment` replaces the whole environment of the child, by default this process's own.
    """

    def __init__(
        self, data_dir: Path, *flags: str, environment: Mapping[str, str] | None = None
    ) -> None:
        settings = ("--port", "0", "--data-dir", str(data_dir), "--log-level", "error")
        self._command = [sys.executable, "-c", PROGRAM, "--json", *settings, *flags]
        self._environment = environment
        self._child: subprocess.Popen[bytes] | None = None
        self.info = ServerInfo(api="", pid=0, data_dir="", gateway="")

    def __enter__(self) -> Self:
        """Start it. Raises RuntimeError with its last output if it does not become ready."""
        self._child = subprocess.Popen(
            self._command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self._environment,
        )
        assert self._child.stdout is not None
        line = _first_line(self._child.stdout)
        if not line:
            self._child.kill()
            _, errors = self._child.communicate()
            raise RuntimeError(f"the server did not start: {errors.decode(errors='replace')}")
        self.info = msgspec.json.decode(line, type=ServerInfo)
        return self

    def __exit__(self, *_error: object) -> None:
        self.kill()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the server."""
        self._running.send_signal(number)

    def wait(self, timeout: float = 10.0) -> tuple[int, str]:
        """Wait for the end; return its exit code and its output on standard error.

        Raises subprocess.TimeoutExpired.
        """
        _, errors = self._running.communicate(timeout=timeout)
        return self._running.returncode, errors.decode(errors="replace")

    def kill(self) -> None:
        """Send it kill -9, unless it has ended; return when it is gone."""
        child = self._running
        if child.poll() is None:
            child.kill()
        if child.stdout is not None and not child.stdout.closed:
            child.communicate()

    @property
    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is None:
            raise RuntimeError("the server has not been started")
        return self._child


def _first_line(stream: IO[bytes]) -> bytes:
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        return stream.readline() if selector.select(BOOT_TIMEOUT) else b""
