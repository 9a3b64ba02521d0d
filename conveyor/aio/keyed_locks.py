"""One at a time, for each name: callers in this process that would only take each other's place."""

from __future__ import annotations

from weakref import WeakValueDictionary

import anyio


class KeyedLocks:
    """Locks by name, kept while somebody holds or awaits them."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, anyio.Lock] = WeakValueDictionary()

    def lock(self, name: str) -> anyio.Lock:
        """The lock of a name, to be entered by `async with`."""
        lock = self._locks.get(name)
        if lock is None:
            lock = self._locks[name] = anyio.Lock()
        return lock
