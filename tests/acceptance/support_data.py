"""Looking into a data directory behind the server's back, and servers that are killed."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from conveyor.testing.process import PROGRAM, ServerProcess


def server(data_dir: Path, *flags: str, **settings: object) -> ServerProcess:
    """A server process, not started yet; `settings` are fields of `Settings`, the only ones that
    it sees."""
    return ServerProcess(data_dir, *flags, environment=_environment(settings))


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
