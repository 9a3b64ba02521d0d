"""When results expire: so many days after the scrape that made them."""

from __future__ import annotations

from collections.abc import Sequence

from ulid import ULID

from conveyor.domain.model import Task, TaskStatus
from conveyor.ports.tasks import Tasks

_DAY = 86_400_000


class Expiry:
    """Knows how long bodies are served."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks

    async def of(self, tasks: Sequence[Task], ttl_days: int, *, horizon: int) -> list[int | None]:
        """For each task the instant at which its result expires, None where it has no result.

        Exact up to `horizon`; beyond it, some instant that also lies beyond it.
        """
        return [await self._end(task, ttl_days * _DAY, horizon) for task in tasks]

    async def _end(self, task: Task, lifetime: int, horizon: int) -> int | None:
        if task.status is not TaskStatus.SUCCESSFUL or task.result is None:
            return None
        if task.source_run_id is None:
            return task.updated_at + lifetime
        # An inherited row expires with the scrape that made its body, not with its copy. A run
        # begins before its scrapes end, so most pages need no look at the source.
        earliest = _began(task.source_run_id) + lifetime
        if earliest > horizon:
            return earliest
        source = await self._tasks.get_task(task.source_run_id, task.task_id)
        return source.updated_at + lifetime if source is not None else earliest


def _began(run_id: str) -> int:
    return round(ULID.from_str(run_id).timestamp * 1_000)
