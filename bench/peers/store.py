"""The store of every peer: each answer goes to a file of its own, then a durable state row.

Each worker process has an SQLite file of its own, so that the peers do not wait for each other's
write lock.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from pathlib import Path

SCHEMA = """
CREATE TABLE IF NOT EXISTS states (
    url TEXT NOT NULL, status INTEGER NOT NULL, bytes INTEGER NOT NULL, ended_at REAL NOT NULL
)
"""


class Store:
    """Bodies and states of one worker process. Safe for use from many threads."""

    def __init__(self, directory: Path) -> None:
        self._bodies = directory / f"bodies-{os.getpid()}"
        self._bodies.mkdir()
        self._lock = threading.Lock()
        self._database = sqlite3.connect(
            directory / f"states-{os.getpid()}.sqlite",
            isolation_level=None,
            check_same_thread=False,
        )
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = NORMAL")
        self._database.execute(SCHEMA)

    def record(self, url: str, status: int, body: bytes) -> None:
        """Write the body to a file named after the last part of the URL, then commit the state."""
        with open(self._bodies / url.rpartition("/")[2], "wb", buffering=0) as file:
            file.write(body)
        with self._lock:
            self._database.execute(
                "INSERT INTO states VALUES (?, ?, ?, ?)", (url, status, len(body), time.time())
            )


def open_store() -> Store:
    """Open the store in the directory that the environment names."""
    return Store(Path(os.environ["BENCH_DIRECTORY"]))
