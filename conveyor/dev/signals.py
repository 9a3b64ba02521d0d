"""The signals port within one process."""

from __future__ import annotations

import anyio


class LocalSignals:
    """Hints from one room to another on the same event loop."""

    def __init__(self) -> None:
        self._changed: set[str] = set()
        self._event = anyio.Event()

    def run_changed(self, run_id: str) -> None:
        """Say that a run has new work, or may no longer be worked."""
        self._changed.add(run_id)
        self._event.set()

    async def wait(self) -> set[str]:
        """The runs hinted at since the last call, once there is one. A cancelled wait loses
        none."""
        await self._event.wait()
        self._event = anyio.Event()
        changed, self._changed = self._changed, set()
        return changed
