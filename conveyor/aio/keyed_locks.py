"""Locks by name, for callers of one process that would otherwise race for the same record."""

from __future__ import annotations

from weakref import WeakValueDictionary

import anyio


class KeyedLocks:
    """Holds one lock a name, for as long as somebody holds it or waits for it."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, anyio.Lock] = WeakValueDictionary()

    def lock(self, name: str) -> anyio.Lock:
        """Return the lock of a name, to be entered with `async with`."""
        lock = self._locks.get(name)
        if lock is None:
            lock = self._locks[name] = anyio.Lock()
        return lock
