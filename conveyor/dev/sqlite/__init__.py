"""The records and tasks ports over one SQLite file: the development store."""

from __future__ import annotations

from conveyor.dev.sqlite.store import SqliteStore, open_store

__all__ = ["SqliteStore", "open_store"]
