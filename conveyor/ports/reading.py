"""Reading the task rows of a run over all of its shards, in submission order."""

from __future__ import annotations

from collections.abc import AsyncIterator

from conveyor.domain.gather import Read, ShardRead, ShardRows, stream
from conveyor.domain.model import Task, TaskStatus
from conveyor.domain.shards import Shards
from conveyor.ports.tasks import Tasks


def task_reader(tasks: Tasks, run_id: str, *, statuses: frozenset[TaskStatus] | None) -> Read[Task]:
    """What reads a stretch of one shard of a run, for the functions of `domain.gather`."""

    async def read(wanted: ShardRead) -> ShardRows[Task]:
        page = await tasks.page_tasks(
            run_id,
            shard=wanted.shard,
            statuses=statuses,
            after=wanted.after if wanted.after >= 0 else None,
            limit=wanted.limit,
            most_read=wanted.most_read,
        )
        return ShardRows(page.tasks, page.next_index, page.rows_read)

    return read


def all_tasks(
    tasks: Tasks,
    run_id: str,
    shards: Shards,
    *,
    statuses: frozenset[TaskStatus] | None = None,
    piece: int = 1_000,
) -> AsyncIterator[Task]:
    """Every row of a run in submission order, those of `statuses` only where given.

    No row is read twice. About `piece` rows are in memory at a time, of all shards together.
    """
    read = task_reader(tasks, run_id, statuses=statuses)
    return stream(read, shards, piece=piece)
