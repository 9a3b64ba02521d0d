"""Looking into a data directory behind the server's back, and servers that are killed."""

from __future__ import annotations

import os
import select
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Self

import msgspec

from conveyor.roles.dev import ServerInfo
from conveyor.testing.process import BOOT_TIMEOUT, PROGRAM, ServerProcess
from tests.acceptance.support_commands import Fork, forks


class ForkedServer(ServerProcess):
    """A server process that need not import its modules."""

    def __init__(
        self, data_dir: Path, *flags: str, environment: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(data_dir, *flags, environment=environment)
        self._fork: Fork | None = None
        self._streams = ExitStack()
        self._errors = -1

    def __enter__(self) -> Self:
        """Start it. Raises RuntimeError with its last output if it does not become ready."""
        reader, writer = os.pipe()
        said = self._streams.enter_context(open(reader, "rb"))
        self._errors = self._streams.enter_context(tempfile.TemporaryFile()).fileno()
        environment = os.environ if self._environment is None else self._environment
        with open(writer, "wb") as out, open(os.devnull, "rb") as nothing:
            streams = [nothing.fileno(), out.fileno(), self._errors]
            self._fork = forks().start("conveyor-dev", self._command[3:], environment, streams)
        ready, _, _ = select.select([said], [], [], BOOT_TIMEOUT)
        line = said.readline() if ready else b""
        if not line:
            errors = self.errors()
            self.kill()
            raise RuntimeError(f"the server did not start: {errors}")
        self.info = msgspec.json.decode(line, type=ServerInfo)
        return self

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the server."""
        self._forked.send_signal(number)

    def wait(self, timeout: float = 10.0) -> tuple[int, str]:
        """Wait for the end; return its exit code and its output on standard error.

        Raises subprocess.TimeoutExpired.
        """
        return self._forked.wait(timeout), self.errors()

    def kill(self) -> None:
        """Send it kill -9, unless it has ended; return when it is gone."""
        self._forked.kill()
        self._forked.wait()
        self._streams.close()

    def errors(self) -> str:
        """Return its output on standard error so far."""
        size = os.fstat(self._errors).st_size
        return os.pread(self._errors, size, 0).decode(errors="replace")

    @property
    def _forked(self) -> Fork:
        if self._fork is None:
            raise RuntimeError("the server has not been started")
        return self._fork


def server(data_dir: Path, *flags: str, **settings: object) -> ForkedServer:
    """A server process, not started yet; `settings` are fields of `Settings`, the only ones that
    it sees."""
    return ForkedServer(data_dir, *flags, environment=_environment(settings))


def kill_while_booting(data_dir: Path, *flags: str, after: float, **settings: object) -> None:
    """Start a server and kill -9 it `after` seconds later, ready or not."""
    command = [sys.executable, "-c", PROGRAM, "--port", "0", "--data-dir", str(data_dir), *flags]
    child = subprocess.Popen(command, env=_environment(settings), stdout=subprocess.DEVNULL)
    time.sleep(after)  # the moment is what the test varies; nothing is waited for
    child.kill()
    child.wait()


def rows_of(data_dir: Path, sql: str, *values: Any) -> list[Any]:
    """Return the rows of a query in the database of a running server."""
    with closing(sqlite3.connect(f"file:{data_dir}/conveyor.db?mode=ro", uri=True)) as database:
        return database.execute(sql, values).fetchall()


def rows_left(data_dir: Path, sql: str, *values: Any) -> list[Any]:
    """Return the rows of a query in the database of a dead server.

    Reads a copy: opening the file itself would repair what the next boot is to repair.
    """
    with tempfile.TemporaryDirectory() as copy:
        for file in data_dir.glob("conveyor.db*"):
            if not file.name.endswith("-shm"):
                shutil.copy(file, copy)
        with closing(sqlite3.connect(Path(copy, "conveyor.db"))) as database:
            return database.execute(sql, values).fetchall()


def row_counts(data_dir: Path) -> dict[str, int]:
    """Count the rows of each table about jobs."""
    tables = ("jobs", "runs", "run_sources", "tasks", "claims", "histories")
    return {table: rows_of(data_dir, f"SELECT count(*) FROM {table}")[0][0] for table in tables}


def temporary_files(data_dir: Path) -> list[Path]:
    """Files that were begun and not put into place."""
    return list((data_dir / "blobs" / "tmp").iterdir())


def _environment(settings: dict[str, object]) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("CONVEYOR_")}
    return inherited | {f"CONVEYOR_{k.upper()}": str(v) for k, v in settings.items()}
