"""The signals port: hints between rooms of one process that a run has changed.

A hint may be lost or come from nowhere; discovery over the records is the truth. In production,
where api and workers are apart, there are none and discovery alone does the work.
"""

from __future__ import annotations

from typing import Protocol


class Signals(Protocol):
    """Hints about runs."""

    def run_changed(self, run_id: str) -> None:
        """Say that a run has new work, or may no longer be worked."""
        ...

    async def wait(self) -> set[str]:
        """The runs hinted at since the last call, once there is one. One waiter at a time."""
        ...
