"""The expiry of results: a number of days after the scrape that made them."""

from __future__ import annotations

from collections.abc import Sequence

from ulid import ULID

from conveyor.aio.concurrency import for_each
from conveyor.domain.model import Task, TaskStatus
from conveyor.ports.tasks import TaskReader

READS_AT_A_TIME = 8
"""Rows of source runs that are read at the same time, of up to a thousand on a page: half of the
calls that a process makes to DynamoDB at a time, so that other requests go on meanwhile."""

_DAY = 86_400_000


class Expiry:
    """Computes until when bodies are served."""

    def __init__(self, tasks: TaskReader) -> None:
        self._tasks = tasks

    async def of(self, tasks: Sequence[Task], ttl_days: int, *, horizon: int) -> list[int | None]:
        """Compute for each task when its result expires; None where it has no result.

        Instants up to `horizon` are exact; a later one may differ, but is beyond `horizon` too.
        """
        lifetime = ttl_days * _DAY
        ends = [_presumed_end(task, lifetime) for task in tasks]
        # An inherited row expires with the scrape that made its body, not with its copy. A run
        # begins before its scrapes end, so most pages need no look at the source.
        unsure = [
            (place, task.source_run_id, task.task_id)
            for place, (task, end) in enumerate(zip(tasks, ends, strict=True))
            if end is not None and end <= horizon and task.source_run_id is not None
        ]

        async def look(row: tuple[int, str, str]) -> None:
            place, run_id, task_id = row
            source = await self._tasks.get_task(run_id, task_id)
            if source is not None:
                ends[place] = source.updated_at + lifetime

        await for_each(look, unsure, limit=READS_AT_A_TIME)
        return ends


def _presumed_end(task: Task, lifetime: int) -> int | None:
    """Compute when a result expires: exact for a row of its own run, else the earliest possible
    instant."""
    if task.status is not TaskStatus.SUCCESSFUL or task.result is None:
        return None
    made_at = task.updated_at if task.source_run_id is None else _began(task.source_run_id)
    return made_at + lifetime


def _began(run_id: str) -> int:
    return round(ULID.from_str(run_id).timestamp * 1_000)
