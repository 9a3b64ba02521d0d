"""A stand-in for the task rows behind queues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import anyio.lowlevel


@dataclass
class Rows:
    """A stand-in for the task rows: what is written and not yet finished."""

    rows: dict[str, dict[int, str]] = field(default_factory=dict)
    refusals: int = 0
    hosts: Sequence[str] = ("",)
    """The hosts of rows, which take turns."""

    def write(self, run_id: str, *indexes: int) -> list[tuple[int, str]]:
        """Write rows; the references to them."""
        tasks = [(index, f"{run_id}-{index}") for index in indexes]
        self.rows.setdefault(run_id, {}).update(tasks)
        return tasks

    def hosts_of(self, tasks: Sequence[tuple[int, str]]) -> list[str]:
        """The hosts of rows, one each."""
        return [self.hosts[index % len(self.hosts)] for index, _ in tasks]

    async def task_hosts(self, run_id: str, tasks: Sequence[tuple[int, str]]) -> list[str]:
        """Answer as the tasks port."""
        await anyio.lowlevel.checkpoint()
        return self.hosts_of(tasks)

    async def unfinished(self, run_id: str) -> list[tuple[int, str]]:
        """All rows of a run."""
        return await self.unfinished_after(run_id, -1, 1_000_000)

    async def unfinished_after(self, run_id: str, after: int, limit: int) -> list[tuple[int, str]]:
        """Answer as the tasks port; raise ConnectionError `refusals` times."""
        await anyio.lowlevel.checkpoint()
        if self.refusals:
            self.refusals -= 1
            raise ConnectionError
        rows = self.rows.get(run_id, {})
        return [(index, rows[index]) for index in sorted(rows) if index > after][:limit]
